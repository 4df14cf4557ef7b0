"""The loss on documents: by position, on key tokens, of masked tokens, and at the original context length."""

import dataclasses
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ctxext.evaluate.tasks.base import Key, Reading, Record, Task, Work

if TYPE_CHECKING:
    from ctxext.evaluate.model import LoadedModel

_NUM_BUCKETS = 32
_MIN_BUCKET = 16
_LONGEST_WINDOW = 4096


@dataclass(frozen=True)
class DocumentWork(Work):
    """One document.

    Attributes:
        reading: The lengths of documents to read.
        ids: Its tokens, with begin tokens.
        sample: Its index.
    """

    task: "DocumentTask"
    reading: Reading
    ids: list[int]
    sample: int

    @property
    def keys(self) -> list[Key]:
        """The document."""
        return [Key(self.task.name, self.length, None, self.sample)]

    def run(self, loaded: "LoadedModel", wanted: set[Key]) -> Iterator[Record]:
        """Read the document once, unless it is not wanted."""
        if self.keys[0] in wanted:
            cell = {"task": self.task.name, "length": self.length, "depth": None, "samples": [self.sample]}
            yield {**cell, **self.task.measure(self.reading, loaded, self.ids, self.length)}


@dataclass(frozen=True, kw_only=True)
class DocumentTask(Task):
    """Read documents and measure the loss."""

    def documents_to_read(self, reading: Reading) -> list[DocumentWork]:
        """Return the work, one for each document and length."""
        named = dataclasses.replace(self, name=f"{self.name}: {reading.text}") if reading.text else self
        read, lengths = self.documents(reading)
        return [DocumentWork(named, n, reading, ids, sample) for sample, ids in enumerate(read) for n in lengths]

    def documents(self, reading: Reading) -> tuple[list[list[int]], list[int]]:
        """Return the tokens of each document, and the lengths to read it at: by default the longest of the model."""
        return reading.documents(reading.longest), [max(reading.lengths)]

    @abstractmethod
    def measure(self, reading: Reading, loaded: "LoadedModel", ids: list[int], length: int) -> Record:
        """Measure the loss on a document up to a length."""


@dataclass(frozen=True, kw_only=True)
class Perplexity(DocumentTask):
    """Read long documents and measure the loss position by position."""

    name: str = "perplexity"
    description: str = (
        "Each document was read once; a point of the curve is the mean loss of the tokens at that position."
    )
    shows: str = "the loss on long text, position by position"
    tells_texts_apart: bool = True

    def documents(self, reading: Reading) -> tuple[list[list[int]], list[int]]:
        """Return longer documents for a sliding window, which also reads the text behind the longest length."""
        most = 2 * reading.longest if reading.stride else reading.longest
        return reading.documents(reading.longest, most), [max(reading.lengths)]

    def measure(self, reading: Reading, loaded: "LoadedModel", ids: list[int], length: int) -> Record:
        """Read a document once, and again in sliding windows if there is a stride."""
        from ctxext.evaluate.scoring.token_losses import losses_in_windows, losses_of

        losses, width = losses_of(loaded, ids[:length]), bucket_width(length)
        # losses[i] is the loss of the token at position i + 1.
        buckets = [losses[max(0, at - 1) : at - 1 + width] for at in range(0, length, width)]
        record: Record = {"width": width, "buckets": [[float(part.sum()), len(part)] for part in buckets]}
        record["lengths"] = {}
        for n in reading.lengths:
            # A shorter text is read separately if the position encoding depends on the length or content of the prompt.
            of_beginning = losses if loaded.can_share or n == length else losses_of(loaded, ids[:n])
            record["lengths"][str(n)] = float(of_beginning[: n - 1].sum()), n - 1
        if reading.text:
            record["text"] = reading.text
        if stride := reading.stride:
            num_start = len(reading.encoder.start())
            record["sliding"] = {str(n): losses_in_windows(loaded, ids, num_start, n, stride) for n in reading.lengths}
        return record


@dataclass(frozen=True, kw_only=True)
class LongPerplexity(DocumentTask):
    """Read long documents, and measure the loss on the tokens that another model predicts from far context alone."""

    name: str = "longppl"
    description: str = (
        "The loss on key tokens: those that an evaluator predicts well from the whole text (a loss below 2 nats) and "
        "worse by over 2 nats from its last part (LongPPL, arXiv 2410.23771). All models are asked the same tokens."
    )
    shows: str = "the loss on what only far context predicts"

    def window(self, reading: Reading) -> int:
        """Return the length of the last part: a quarter of the longest length, at most 4096 tokens."""
        return min(_LONGEST_WINDOW, reading.longest // 4)

    def documents(self, reading: Reading) -> tuple[list[list[int]], list[int]]:
        """Return the documents, and only the lengths that have more than a last part."""
        return reading.documents(reading.longest), [n for n in reading.lengths if n > self.window(reading)]

    def measure(self, reading: Reading, loaded: "LoadedModel", ids: list[int], length: int) -> Record:
        """Read a document once, and let the evaluator read it, whole and in parts of a window."""
        from ctxext.evaluate.scoring.token_losses import key_tokens, load_evaluator, losses_of

        assert reading.evaluator is not None
        evaluator, window = load_evaluator(reading.evaluator, str(loaded.device)), self.window(reading)
        chosen = key_tokens(evaluator, ids[:length], window, len(reading.encoder.start()))
        loss = float(losses_of(loaded, ids[:length])[chosen - 1].sum())
        return {"loss": [loss], "key_tokens": [len(chosen)], "of": [length - window]}


@dataclass(frozen=True, kw_only=True)
class PseudoPerplexity(DocumentTask):
    """Mask every eighth token of long documents, eight times, and measure the loss position by position."""

    name: str = "pseudo-perplexity"
    kinds: tuple[str, ...] = ("masked",)
    description: str = (
        "Each document was read eight times, every eighth token masked, so that each was guessed once; a point of the "
        "curve is the mean loss of the tokens at that position. Shorter lengths are read by themselves."
    )
    shows: str = "the loss of masked tokens in long text, position by position"

    def measure(self, reading: Reading, loaded: "LoadedModel", ids: list[int], length: int) -> Record:
        """Read a document at every length, cut and closed, as an encoder also reads the text that follows a token."""
        from ctxext.evaluate.scoring.token_losses import masked_losses

        end, width = reading.encoder.end(), bucket_width(length)
        results = {n: masked_losses(loaded, [*ids[: n - len(end)], *end]) for n in reading.lengths}
        losses, is_guessed = results[length]
        parts = [slice(at, at + width) for at in range(0, length, width)]
        return {
            "width": width,
            "buckets": [[float(losses[part].sum()), int(is_guessed[part].sum())] for part in parts],
            "lengths": {str(n): (float(loss.sum()), int(count.sum())) for n, (loss, count) in results.items()},
        }


@dataclass(frozen=True, kw_only=True)
class Short(DocumentTask):
    """Read documents of exactly the original context length."""

    name: str = "short"
    description: str = "What extending costs where the model was good before."
    kinds: tuple[str, ...] = ("causal", "masked")
    shows: str = "what extending cost at the original context length"

    def documents(self, reading: Reading) -> tuple[list[list[int]], list[int]]:
        """Return documents as long as the original context."""
        return reading.documents(reading.trained_length), [reading.trained_length]

    def measure(self, reading: Reading, loaded: "LoadedModel", ids: list[int], length: int) -> Record:
        """Read a document once, with the end tokens that an encoder has."""
        from ctxext.evaluate.scoring.token_losses import losses_of

        end = reading.encoder.end() if reading.kind == "masked" else []
        losses = losses_of(loaded, [*ids[: length - len(end)], *end])
        return {"loss": [float(losses.sum())], "tokens": [len(losses)]}


def bucket_width(length: int) -> int:
    """Return the number of positions that are averaged for one point of a curve, a power of two."""
    width = _MIN_BUCKET
    while width * _NUM_BUCKETS < length:
        width *= 2
    return width
