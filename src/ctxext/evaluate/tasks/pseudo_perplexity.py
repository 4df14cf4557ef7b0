"""Pseudo-perplexity: how well an encoder predicts masked tokens of long documents, position by position."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ctxext.evaluate.tasks.base import Key, Reading, Record, Task
from ctxext.evaluate.tasks.perplexity import bucket_width

if TYPE_CHECKING:
    from ctxext.evaluate.model import LoadedModel


class PseudoPerplexity(Task):
    """Mask every eighth token of long documents, eight times, and measure the loss position by position."""

    name: ClassVar[str] = "pseudo-perplexity"
    kinds: ClassVar[tuple[str, ...]] = ("masked",)
    description: ClassVar[str] = (
        "Each document was read eight times, every eighth token masked, so that each was guessed once; a point of the "
        "curve is the mean loss of the tokens at that position. Shorter lengths are read by themselves."
    )
    shows: ClassVar[str] = "the loss of masked tokens in long text, position by position"

    @classmethod
    def documents_to_read(cls, reading: Reading) -> "list[PseudoPerplexityWork]":
        """The work, one for each document."""
        documents, end = reading.documents(reading.longest), tuple(reading.encoder.end())
        return [PseudoPerplexityWork(ids, sample, reading.lengths, end) for sample, ids in enumerate(documents)]


@dataclass(frozen=True)
class PseudoPerplexityWork:
    """One document.

    Attributes:
        ids: Its tokens, begin token included.
        sample: Its index.
        lengths: Context lengths to report; the document is cut to each, as an encoder also reads what follows a token.
        end: The end tokens of the tokenizer; they replace the last tokens.
    """

    ids: list[int]
    sample: int
    lengths: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def label(self) -> str:
        """The text of the progress line."""
        return f"{PseudoPerplexity.name} {max(self.lengths)}"

    @property
    def keys(self) -> list[Key]:
        """The document."""
        return [Key(PseudoPerplexity.name, max(self.lengths), None, self.sample)]

    def run(self, loaded: "LoadedModel", wanted: set[Key]) -> Iterator[Record]:
        """Read the document at every length."""
        from ctxext.evaluate.scoring.masked_losses import masked_losses

        if self.keys[0] not in wanted:
            return
        results = {n: masked_losses(loaded, closed(self.ids, n, self.end)) for n in self.lengths}
        longest = max(self.lengths)
        losses, is_guessed = results[longest]
        width = bucket_width(longest)
        starts = range(0, longest, width)
        yield {
            "task": PseudoPerplexity.name,
            "length": longest,
            "depth": None,
            "samples": [self.sample],
            "width": width,
            "buckets": [
                [float(losses[at : at + width].sum()), int(is_guessed[at : at + width].sum())] for at in starts
            ],
            "lengths": {str(n): (float(loss.sum()), int(count.sum())) for n, (loss, count) in results.items()},
        }


def closed(ids: list[int], length: int, end: tuple[int, ...]) -> list[int]:
    """The beginning of a document as a text of exactly `length` tokens, with the end tokens."""
    return [*ids[: length - len(end)], *end]
