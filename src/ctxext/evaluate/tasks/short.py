"""Perplexity at the original context length: what extending the context costs."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ctxext.evaluate.tasks.base import Key, Reading, Record, Task
from ctxext.evaluate.tasks.pseudo_perplexity import closed

if TYPE_CHECKING:
    from ctxext.evaluate.model import LoadedModel


class Short(Task):
    """Read documents of exactly the original context length."""

    name: ClassVar[str] = "short"
    description: ClassVar[str] = "What extending costs where the model was good before."
    kinds: ClassVar[tuple[str, ...]] = ("causal", "masked")
    shows: ClassVar[str] = "what extending cost at the original context length"

    @classmethod
    def documents_to_read(cls, reading: Reading) -> "list[ShortWork]":
        """The work, one for each document."""
        length, end = reading.trained_length, tuple(reading.encoder.end()) if reading.kind == "masked" else ()
        return [ShortWork(closed(ids, length, end), sample) for sample, ids in enumerate(reading.documents(length))]


@dataclass(frozen=True)
class ShortWork:
    """One document of exactly the original context length.

    Attributes:
        ids: Its tokens, special tokens included.
        sample: Its index.
    """

    ids: list[int]
    sample: int

    @property
    def label(self) -> str:
        """The text of the progress line."""
        return f"{Short.name} {len(self.ids)}"

    @property
    def keys(self) -> list[Key]:
        """The document."""
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
