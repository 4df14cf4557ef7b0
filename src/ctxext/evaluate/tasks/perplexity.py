"""The loss on documents: by position, on key tokens, of masked tokens, and at the original context length."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ctxext.evaluate.tasks.base import Key, Reading, Record, Task

if TYPE_CHECKING:
    from ctxext.evaluate.model import LoadedModel

_NUM_BUCKETS = 32
_MIN_BUCKET = 16
_LONGEST_WINDOW = 4096


@dataclass(frozen=True)
class DocumentWork:
    """One document.

    Attributes:
        name: The name of the task in records.
        ids: Its tokens, special tokens included.
        sample: Its index.
        length: The number of tokens that are read.
        measure: Returns the results of a document.
    """

    name: str
    ids: list[int]
    sample: int
    length: int
    measure: "Callable[[LoadedModel, list[int]], Mapping[str, Any]]"

    @property
    def label(self) -> str:
        """The text of the progress line."""
        return f"{self.name} {self.length}"

    @property
    def keys(self) -> list[Key]:
        """The document."""
        return [Key(self.name, self.length, None, self.sample)]

    def run(self, loaded: "LoadedModel", wanted: set[Key]) -> Iterator[Record]:
        """Read the document once, unless it is not wanted."""
        if self.keys[0] in wanted:
            cell = {"task": self.name, "length": self.length, "depth": None, "samples": [self.sample]}
            yield {**cell, **self.measure(loaded, self.ids)}


@dataclass(frozen=True, kw_only=True)
class Perplexity(Task):
    """Read long documents and measure the loss position by position."""

    name: str = "perplexity"
    description: str = (
        "Each document was read once; a point of the curve is the mean loss of the tokens at that position."
    )
    shows: str = "the loss on long text, position by position"
    tells_texts_apart: bool = True

    def documents_to_read(self, reading: Reading) -> list[DocumentWork]:
        """The work, one for each document; a sliding window also reads the text behind the longest length."""
        documents = reading.documents(reading.longest, 2 * reading.longest if reading.stride else reading.longest)
        name = f"{self.name}: {reading.text}" if reading.text else self.name
        measure = partial(_measure_by_position, reading)
        return [DocumentWork(name, ids, sample, max(reading.lengths), measure) for sample, ids in enumerate(documents)]


def _measure_by_position(reading: Reading, loaded: "LoadedModel", ids: list[int]) -> Record:
    """Read a document once, up to the longest length, and again in sliding windows if there is a stride."""
    from ctxext.evaluate.scoring.token_losses import losses_in_windows, losses_of

    length = max(reading.lengths)
    losses, width = losses_of(loaded, ids[:length]), bucket_width(length)
    # losses[i] is the loss of the token at position i + 1.
    buckets = [losses[max(0, at - 1) : at - 1 + width] for at in range(0, length, width)]
    record: Record = {"width": width, "buckets": [[float(part.sum()), len(part)] for part in buckets], "lengths": {}}
    for n in reading.lengths:
        # A shorter text is read separately if the position encoding depends on the length or content of the prompt.
        of_beginning = losses if loaded.can_share or n == length else losses_of(loaded, ids[:n])
        record["lengths"][str(n)] = float(of_beginning[: n - 1].sum()), n - 1
    if reading.text:
        record["text"] = reading.text
    if reading.stride:
        num_start = len(reading.encoder.start())
        record["sliding"] = {
            str(n): losses_in_windows(loaded, ids, num_start, n, reading.stride) for n in reading.lengths
        }
    return record


@dataclass(frozen=True, kw_only=True)
class LongPerplexity(Task):
    """Read long documents, and measure the loss on the tokens that another model predicts from far context alone."""

    name: str = "longppl"
    description: str = (
        "The loss on key tokens: those that an evaluator predicts well from the whole text (a loss below 2 nats) and "
        "worse by over 2 nats from its last part (LongPPL, arXiv 2410.23771). All models are asked the same tokens."
    )
    shows: str = "the loss on what only far context predicts"

    def documents_to_read(self, reading: Reading) -> list[DocumentWork]:
        """The work, one for each document and length; the last part is a quarter of the longest, at most 4096."""
        window = min(_LONGEST_WINDOW, reading.longest // 4)
        measure = partial(_measure_key_tokens, reading, window)
        return [
            DocumentWork(self.name, ids[:length], sample, length, measure)
            for sample, ids in enumerate(reading.documents(reading.longest))
            for length in reading.lengths
            if length > window
        ]


def _measure_key_tokens(reading: Reading, window: int, loaded: "LoadedModel", ids: list[int]) -> Record:
    """Read a document once, and let the evaluator read it, whole and in parts of a window."""
    from ctxext.evaluate.scoring.token_losses import key_tokens, load_evaluator, losses_of

    assert reading.evaluator is not None
    evaluator = load_evaluator(reading.evaluator, str(loaded.device))
    chosen = key_tokens(evaluator, ids, window, len(reading.encoder.start()))
    loss = float(losses_of(loaded, ids)[chosen - 1].sum())
    return {"loss": [loss], "key_tokens": [len(chosen)], "of": [len(ids) - window]}


@dataclass(frozen=True, kw_only=True)
class PseudoPerplexity(Task):
    """Mask every eighth token of long documents, eight times, and measure the loss position by position."""

    name: str = "pseudo-perplexity"
    kinds: tuple[str, ...] = ("masked",)
    description: str = (
        "Each document was read eight times, every eighth token masked, so that each was guessed once; a point of the "
        "curve is the mean loss of the tokens at that position. Shorter lengths are read by themselves."
    )
    shows: str = "the loss of masked tokens in long text, position by position"

    def documents_to_read(self, reading: Reading) -> list[DocumentWork]:
        """The work, one for each document."""
        documents, measure = reading.documents(reading.longest), partial(_measure_masked, reading)
        length = max(reading.lengths)
        return [DocumentWork(self.name, ids, sample, length, measure) for sample, ids in enumerate(documents)]


def _measure_masked(reading: Reading, loaded: "LoadedModel", ids: list[int]) -> Record:
    """Read a document at every length, cut and closed, as an encoder also reads what follows a token."""
    from ctxext.evaluate.scoring.token_losses import masked_losses

    length, end = max(reading.lengths), reading.encoder.end()
    results = {n: masked_losses(loaded, _closed(ids, n, end)) for n in reading.lengths}
    losses, is_guessed = results[length]
    width = bucket_width(length)
    parts = [slice(at, at + width) for at in range(0, length, width)]
    return {
        "width": width,
        "buckets": [[float(losses[part].sum()), int(is_guessed[part].sum())] for part in parts],
        "lengths": {str(n): (float(loss.sum()), int(count.sum())) for n, (loss, count) in results.items()},
    }


@dataclass(frozen=True, kw_only=True)
class Short(Task):
    """Read documents of exactly the original context length."""

    name: str = "short"
    description: str = "What extending costs where the model was good before."
    kinds: tuple[str, ...] = ("causal", "masked")
    shows: str = "what extending cost at the original context length"

    def documents_to_read(self, reading: Reading) -> list[DocumentWork]:
        """The work, one for each document."""
        length, end = reading.trained_length, reading.encoder.end() if reading.kind == "masked" else []
        return [
            DocumentWork(self.name, _closed(ids, length, end), sample, length, _measure_whole)
            for sample, ids in enumerate(reading.documents(length))
        ]


def _measure_whole(loaded: "LoadedModel", ids: list[int]) -> Record:
    """Read a document once."""
    from ctxext.evaluate.scoring.token_losses import losses_of

    losses = losses_of(loaded, ids)
    return {"loss": [float(losses.sum())], "tokens": [len(losses)]}


def bucket_width(length: int) -> int:
    """The number of positions that are averaged for one point of a curve, a power of two."""
    width = _MIN_BUCKET
    while width * _NUM_BUCKETS < length:
        width *= 2
    return width


def _closed(ids: list[int], length: int, end: list[int]) -> list[int]:
    """The beginning of a document as a text of exactly `length` tokens, with the end tokens."""
    return [*ids[: length - len(end)], *end]
