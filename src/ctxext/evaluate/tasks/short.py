"""Perplexity at the original context length: what extending the context costs where the model was good before."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ctxext.evaluate.tasks.base import Key, Record, Task

if TYPE_CHECKING:
    from ctxext.evaluate.model import LoadedModel


class Short(Task):
    """Read documents of exactly the original context length."""

    name: ClassVar[str] = "short"
    description: ClassVar[str] = "What extending costs where the model was good before."
    kinds: ClassVar[tuple[str, ...]] = ("causal", "masked")
    shows: ClassVar[str] = "what extending cost at the original context length"


@dataclass(frozen=True)
class ShortWork:
    """One document of exactly the original context length.

    Attributes:
        ids: Its tokens, special tokens included.
        sample: Its number.
    """

    ids: list[int]
    sample: int

    @property
    def label(self) -> str:
        """What the progress line says."""
        return f"{Short.name} {len(self.ids)}"

    @property
    def keys(self) -> list[Key]:
        """The one document."""
        return [Key(Short.name, len(self.ids), None, self.sample)]

    def run(self, loaded: "LoadedModel", wanted: set[Key]) -> Iterator[Record]:
        """Read the document once."""
        if self.keys[0] not in wanted:
            return
        from ctxext.evaluate.scoring.masked_losses import losses_of

        losses = losses_of(loaded, self.ids)
        yield {
            "task": Short.name,
            "length": len(self.ids),
            "depth": None,
            "samples": [self.sample],
            "loss": [float(losses.sum())],
            "tokens": [len(losses)],
        }
