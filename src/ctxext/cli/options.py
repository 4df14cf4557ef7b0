"""Options that several commands share, each written once."""

from collections.abc import Sequence
from typing import Annotated

import typer

from ctxext.recipes.length import parse_length

_REPORTING = "Output"
_HUB = "Hub"

SourceArgument = Annotated[str, typer.Argument(metavar="SOURCE", help="A folder, a Hub id (user/name), or demo.")]
RevisionOption = Annotated[
    str | None, typer.Option("--revision", help="Branch, tag or commit on the Hub.", rich_help_panel=_HUB)
]
TokenOption = Annotated[
    str | None,
    typer.Option(
        "--token",
        help="Hub token; by default the one that hf auth login stored.",
        rich_help_panel=_HUB,
        show_default=False,
    ),
]
OriginalLengthOption = Annotated[
    str | None,
    typer.Option(
        "--original-length",
        help="Tokens that the model was trained on, as 32k, where its files do not say it or you know better.",
        show_default=False,
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout.", rich_help_panel=_REPORTING)
]
QuietOption = Annotated[
    bool, typer.Option("-q", "--quiet", help="No progress, notes or suggestions.", rich_help_panel=_REPORTING)
]
VerboseOption = Annotated[bool, typer.Option("-v", "--verbose", help="Say more.", rich_help_panel=_REPORTING)]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace OUT if ctxext made it.")]
OverwriteAnythingOption = Annotated[
    bool, typer.Option("--overwrite-anything", help="Replace OUT and delete whatever lies there.")
]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or mps.")]
DtypeOption = Annotated[
    str, typer.Option("--dtype", help="auto (as saved; on a CPU what it is fast in), bf16, fp16 or fp32.")
]


def length_in(word: str | None) -> int | None:
    """The length in tokens of an option that may be left out."""
    return parse_length(word) if word else None


def names_in(words: Sequence[str] | None) -> tuple[str, ...]:
    """Names from options that may be repeated and may hold several with commas, each once."""
    return tuple(dict.fromkeys(name.strip() for word in words or () for name in word.split(",") if name.strip()))
