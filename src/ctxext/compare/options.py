"""The options of a comparison: those of an evaluation, how far to reach, and which methods."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ctxext.errors import CtxextError
from ctxext.evaluate.settings import Settings
from ctxext.evaluate.tasks.registry import NAMES
from ctxext.options import option, target_length_option, with_documented_options


@with_documented_options
@dataclass(frozen=True, kw_only=True)
class CompareOptions(Settings):
    """How to compare methods.

    In Python `methods` may also map a name of your choice to each recipe.
    """

    target_length: int = target_length_option()
    methods: "tuple[str, ...] | Mapping[str, Any]" = option(
        (),
        help="Methods, presets or recipe files, as yarn,dca,mine.yaml. Default: the published methods for the model's "
        "kind of positions.",
        kind="names",
        repeats=True,
    )
    minutes: float | None = option(None, help="How long it may take, everything included.")
    tasks: tuple[str, ...] = option(
        (),
        help=f"{', '.join(NAMES)}; several with commas. Default: needle,perplexity,short; of encoders passages,short.",
        flags=("--task", "-t"),
        kind="names",
        repeats=True,
    )
    num_needles: int = option(
        5,
        help="needle, kv, documents: facts of a text that can be asked for; it is read once for as many depths.",
        panel="What is asked",
        flags=("--needles",),
        min=1,
    )
    samples: int = option(8, help="Questions per cell, and documents to read.", min=1)
    lengths: tuple[int, ...] = option(
        (),
        help="Prompt lengths, as 4k,32k. Default: the original context length and its doubles up to the target.",
        kind="lengths",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target_length < 1:
            raise CtxextError(f"target_length must be at least 1, not {self.target_length}.")
        if self.minutes is not None and not self.minutes > 0:
            raise CtxextError(f"minutes must be above 0, not {self.minutes:g}.")
        if self.minutes is not None and self.harness:
            raise CtxextError("--minutes cannot hold for the tasks of --harness.", hint="Leave one of them out.")
        if self.lengths and max(self.lengths) > self.target_length:
            raise CtxextError(
                f"A length of {max(self.lengths)} is beyond the target of {self.target_length} tokens.",
                hint="Ask for shorter --lengths, or for a longer --target-length.",
            )

    def settings(self, tasks: Sequence[str], trained_length: int | None) -> Settings:
        """What every model is asked; these tasks unless the user named some."""
        shared = {field.name: getattr(self, field.name) for field in dataclasses.fields(Settings)}
        return Settings(
            **{
                **shared,
                "tasks": self.tasks or tuple(tasks),
                "lengths": self.lengths or doubled(trained_length, self.target_length),
                "allow_beyond": True,
            }
        )


def doubled(trained_length: int | None, target_length: int) -> tuple[int, ...]:
    """The original context length and its doubles up to a target, which is among them."""
    lengths, length = {target_length}, trained_length or target_length
    while length < target_length:
        lengths.add(length)
        length *= 2
    return tuple(sorted(lengths))
