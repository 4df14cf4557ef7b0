"""Options of a merge."""

from dataclasses import dataclass

from ctxext.files.output_directory import OverwriteOptions
from ctxext.options import check_options, strength_option, with_documented_options


@with_documented_options
@dataclass(frozen=True, kw_only=True)
class MergeOptions(OverwriteOptions):
    """Share of the change that is merged, and files that may be deleted."""

    strength: float = strength_option()

    def __post_init__(self) -> None:
        check_options(self)
