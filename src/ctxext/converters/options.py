"""The options of a conversion: writing the checkpoint, and permitted losses compared with the source."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ctxext.errors import CtxextError
from ctxext.files.length import read_words
from ctxext.files.output_directory import OverwriteOptions
from ctxext.options import option, original_length_option, with_documented_options

CLONED, HARD, COPIED = "cloned", "hard-linked", "copied"
LINKS: Mapping[str, tuple[str, ...]] = {
    "auto": (CLONED, COPIED),
    "reflink": (CLONED,),
    "hard": (HARD, COPIED),
    "copy": (COPIED,),
}
"""Values of `--link`, and the ways to place weight files, in the order of the attempts."""

_CALIBRATION = "Calibration of the head order"


@with_documented_options
@dataclass(frozen=True, kw_only=True)
class SaveOptions(OverwriteOptions):
    """Options for writing a checkpoint."""

    link: str = option(
        "auto",
        help="How the weights come into OUT: auto (cloned where the disk can, else copied), reflink, hard or copy. "
        "After hard an edit of OUT's weights is an edit of SOURCE's.",
    )
    digest: bool = option(False, help="Record the SHA-256 of the weights; reads them.")
    check: bool = option(
        True,
        help="Check that transformers rotates as the method says; load code in a clean process.",
        flags=("--verify/--no-verify",),
    )

    def __post_init__(self) -> None:
        if self.link not in LINKS:
            raise CtxextError(f'"{self.link}" is not a way to bring the weights.', hint=f"Choose {', '.join(LINKS)}.")


@with_documented_options
@dataclass(frozen=True)
class Calibration:
    """Options for measuring a calibrated head order."""

    text: Path | None = option(
        None,
        help="Text or JSONL file for --head-order calibrated; by default the package's.",
        flags=("--calibration-text",),
        panel=_CALIBRATION,
    )
    device: str = option("auto", help="auto, cpu, cuda or mps.", panel=_CALIBRATION)
    dtype: str = option(
        "auto", help="auto (as saved; on a CPU what it is fast in), bf16, fp16, fp32.", panel=_CALIBRATION
    )


@with_documented_options
@dataclass(frozen=True, kw_only=True)
class ConvertOptions(SaveOptions):
    """Options for converting and writing a checkpoint; `calibration` is for measuring a calibrated head order."""

    replace_scaling: bool = option(
        False,
        help="Take the source's own schedule away first, and what its weights learned with it; says what that is.",
    )
    allow_shorter: bool = option(False, help="Accept a result that reads less than the source.")
    original_length: int | None = original_length_option()
    calibration: Calibration = Calibration()

    def __post_init__(self) -> None:
        super().__post_init__()
        read_words(self)
