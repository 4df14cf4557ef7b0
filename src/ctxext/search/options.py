"""The options of a search."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ctxext.data.records import check_place
from ctxext.errors import CtxextError
from ctxext.evaluate.settings import even_depths
from ctxext.files.length import format_length, read_words
from ctxext.options import check_numbers, option, original_length_option, target_length_option, with_documented_options

DEFAULT_MINUTES = 20.0


_ASKED = "What is asked"


@with_documented_options
@dataclass(frozen=True)
class SearchOptions:
    """How to search."""

    target_length: int = target_length_option()
    trials: int | None = option(None, help="Stop after so many recipes, those of earlier runs included.", min=1)
    minutes: float | None = option(
        None, help="How long it may take, everything included. Default: 20, without --trials."
    )
    methods: tuple[str, ...] = option(
        (),
        help="Methods to try, as yarn,mspoe. Default: all that apply but experimental ones.",
        kind="names",
        repeats=True,
    )
    original_length: int | None = original_length_option()
    gradient: bool = option(
        False,
        help="Learn ratio, ramp and temperature of every KV head by gradient, the weights frozen; --trials counts "
        "steps.",
    )
    keep_short: float = option(0.01, help="Share by which the loss at the original context length may rise.")
    samples: int = option(12, help="Questions per depth and length.", panel=_ASKED, min=1)
    lengths: tuple[int, ...] = option(
        (),
        help="Prompt lengths. Default: the original context length and its doubles up to the target.",
        panel=_ASKED,
        kind="lengths",
    )
    data: str | None = option(
        None,
        help="Your own text: documents at the original context length, and where to hide needles in. As for eval.",
        panel=_ASKED,
    )
    checked: int = option(20, help="Questions per depth and length at the end.", panel=_ASKED, min=2)
    seed: int = option(0, help="Decides questions and recipes.", panel=_ASKED)
    num_depths: int = 5

    def __post_init__(self) -> None:
        read_words(self)
        check_numbers(self)
        if self.data is not None:
            check_place(self.data)
        for name in ("target_length", "num_depths"):
            if (value := getattr(self, name)) < 1:
                raise CtxextError(f"{name} must be at least 1, not {value}.")
        if self.minutes is not None and not self.minutes > 0:
            raise CtxextError(f"minutes must be above 0, not {self.minutes:g}.")
        if not 0 <= self.keep_short < 10:
            raise CtxextError(
                f"keep_short must be a share from 0 to 10, not {self.keep_short:g}.",
                hint="--keep-short 0.01 lets the loss at the original context length rise by one percent.",
            )
        if self.lengths and max(self.lengths) > self.target_length:
            raise CtxextError(
                f"A length of {max(self.lengths)} is beyond the target of {self.target_length} tokens.",
                hint="Ask for shorter --lengths, or for a longer --target-length.",
            )

    @property
    def depths(self) -> tuple[float, ...]:
        """Where needles lie, from 0 (the beginning) to 1."""
        return even_depths(self.num_depths)

    @property
    def seconds(self) -> float:
        """The time limit of this run in seconds."""
        if self.minutes is None:
            return float("inf") if self.trials is not None else 60 * DEFAULT_MINUTES
        return 60 * self.minutes

    def lengths_from(self, trained_length: int) -> tuple[int, ...]:
        """The prompt lengths, shortest first; the target is always among them."""
        if self.target_length <= trained_length:
            raise CtxextError(
                f"The model was trained to {trained_length} tokens already; a target of {self.target_length} is no "
                "longer.",
                hint=f"Choose a longer one, for example --target-length {format_length(4 * trained_length)}.",
            )
        doubles: list[int] = []
        while trained_length << len(doubles) < self.target_length:
            doubles.append(trained_length << len(doubles))
        return tuple(sorted({*(self.lengths or doubles), self.target_length}))

    def what_is_asked(self, trained_length: int) -> dict[str, Any]:
        """The options that must be equal for two runs to share a study."""
        names: Sequence[str] = ("target_length", "keep_short", "samples", "num_depths", "seed")
        asked = {name: getattr(self, name) for name in names}
        if self.original_length is not None:
            asked["original_length"] = self.original_length
        methods = list(self.methods) or ["all but experimental"]  # The default of earlier versions was wider.
        return {**asked, "lengths": list(self.lengths_from(trained_length)), "methods": methods}
