"""The options of a conversion."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ctxext.files.length import read_words
from ctxext.files.output_directory import OverwriteOptions
from ctxext.options import check_options, option, original_length_option, with_documented_options

CLONED, HARD, COPIED = "cloned", "hard-linked", "copied"
LINKS: Mapping[str, tuple[str, ...]] = {
    "auto": (CLONED, COPIED),
    "reflink": (CLONED,),
    "hard": (HARD, COPIED),
    "copy": (COPIED,),
}
"""Values of `--link`, with the ways to place weight files in the order of attempts."""

_CALIBRATION = "Calibration of the head order"


@with_documented_options
@dataclass(frozen=True, kw_only=True)
class SaveOptions(OverwriteOptions):
    """Options for writing a checkpoint."""

    link: str = option(
        "auto",
        help="How weight files are placed in OUT: auto (cloned if the file system can, else copied), reflink, hard or "
        "copy. After hard, editing the weights of OUT also edits those of SOURCE.",
        choices=tuple(LINKS),
        invalid='"{value}" is not a value of --link.',
    )
    digest: bool = option(False, help="Record the SHA-256 of the weights (reads all weight files).")
    check: bool = option(
        True,
        help="Check the rotation in transformers against the method; load code in a clean process.",
        flags=("--verify/--no-verify",),
    )

    def __post_init__(self) -> None:
        check_options(self)


@with_documented_options
@dataclass(frozen=True)
class Calibration:
    """Options for measuring a calibrated head order."""

    text: Path | None = option(
        None,
        help="Text or JSONL file for --head-order calibrated; a text is included.",
        flags=("--calibration-text",),
        panel=_CALIBRATION,
    )
    device: str = option("auto", help="auto, cpu, cuda, xpu or mps.", panel=_CALIBRATION)
    dtype: str = option(
        "auto", help="auto (as saved, or the fastest type on a CPU), bf16, fp16, fp32.", panel=_CALIBRATION
    )


@with_documented_options
@dataclass(frozen=True, kw_only=True)
class ConvertOptions(SaveOptions):
    """Options for converting and writing a checkpoint; `calibration` is for measuring a calibrated head order."""

    replace_scaling: bool = option(
        False,
        help="Remove the existing RoPE scaling first (may hurt a model trained with it).",
    )
    allow_shorter: bool = option(False, help="Allow a shorter context than the source has.")
    original_length: int | None = original_length_option()
    calibration: Calibration = Calibration()

    def __post_init__(self) -> None:
        read_words(self)
        super().__post_init__()
