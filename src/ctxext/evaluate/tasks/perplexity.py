"""The loss on documents: by position, on key tokens, of masked tokens, and at the original context length."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar

from ctxext.evaluate.tasks.base import Key, Reading, Record, Task

if TYPE_CHECKING:
    import torch

    from ctxext.evaluate.model import LoadedModel

_NUM_BUCKETS = 32
_MIN_BUCKET = 16
_LONGEST_WINDOW = 4096


@dataclass(frozen=True)
class DocumentWork(ABC):
    """One document.

    Attributes:
        ids: Its tokens, special tokens included.
        sample: Its index.
    """

    task: ClassVar[str]
    ids: list[int]
    sample: int

    @property
    def name(self) -> str:
        """The name of the task in records."""
        return self.task

    @property
    def length(self) -> int:
        """The number of tokens that are read."""
        return len(self.ids)

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
            yield {**cell, **self.measure(loaded)}

    @abstractmethod
    def measure(self, loaded: "LoadedModel") -> Mapping[str, Any]:
        """Return the results of the document."""


@dataclass(frozen=True)
class PerplexityWork(DocumentWork):
    """One document whose loss is measured by position.

    Attributes:
        lengths: Context lengths to report; the document is read once, up to the longest.
        num_start: The number of begin tokens.
        stride: Of the sliding window; None for none.
        text: The name of the kind of text; empty where there is only one.
    """

    task: ClassVar[str] = "perplexity"
    lengths: tuple[int, ...]
    num_start: int
    stride: int | None = None
    text: str = ""

    @property
    def name(self) -> str:
        """The name of the task in records, with the kind of text."""
        return f"{self.task}: {self.text}" if self.text else self.task

    @property
    def length(self) -> int:
        """The number of tokens that are read."""
        return max(self.lengths)

    def measure(self, loaded: "LoadedModel") -> Mapping[str, Any]:
        """Read the document once, and again in sliding windows if there is a stride."""
        losses = _losses(loaded, self.ids[: self.length])
        width = bucket_width(self.length)
        # losses[i] is the loss of the token at position i + 1.
        buckets = [losses[max(0, at - 1) : at - 1 + width] for at in range(0, self.length, width)]
        record: Record = {
            "width": width,
            "buckets": [[float(part.sum()), len(part)] for part in buckets],
            "lengths": {str(n): self._beginning(loaded, losses, n) for n in self.lengths},
        }
        if self.text:
            record["text"] = self.text
        if self.stride:
            record["sliding"] = {str(n): self._sliding(loaded, n, self.stride) for n in self.lengths}
        return record

    def _beginning(self, loaded: "LoadedModel", losses: "torch.Tensor", length: int) -> tuple[float, int]:
        """The sum of the losses of the first tokens, and their number.

        A shorter text is read separately if the position encoding depends on the length or content of the prompt.
        """
        if not loaded.can_share and length < len(losses) + 1:
            losses = _losses(loaded, self.ids[:length])
        return float(losses[: length - 1].sum()), length - 1

    def _sliding(self, loaded: "LoadedModel", window: int, stride: int) -> tuple[float, int]:
        """The sum of the windows' mean losses, and the number of windows.

        The window moves by `stride` and only its new tokens count. All windows have the same weight, the first and
        longest included, as in YaRN's script.
        """
        import torch

        from ctxext.evaluate.scoring.batch_size import rows_that_fit
        from ctxext.evaluate.scoring.token_losses import token_losses

        start, body = self.ids[: self.num_start], self.ids[self.num_start :]
        size = window - len(start)
        spans, previous = [], 0
        for begin in range(0, len(body), stride):
            end = min(begin + size, len(body))
            spans.append((begin, end, end - previous))
            previous = end
            if end == len(body):
                break
        means: list[float] = []
        rows = rows_that_fit(loaded.model, window)
        for (_, num_new), group in groupby(spans, key=lambda span: (span[1] - span[0], span[2])):
            alike = list(group)
            for first in range(0, len(alike), rows):
                windows = [start + body[begin:end] for begin, end, _ in alike[first : first + rows]]
                ids = torch.tensor(windows, device=loaded.device)
                means += token_losses(loaded, ids, last=min(num_new, ids.shape[1] - 1)).mean(1).tolist()
        return sum(means), len(means)


class Perplexity(Task):
    """Read long documents and measure the loss position by position."""

    name: ClassVar[str] = PerplexityWork.task
    description: ClassVar[str] = (
        "Each document was read once; a point of the curve is the mean loss of the tokens at that position."
    )
    shows: ClassVar[str] = "the loss on long text, position by position"
    tells_texts_apart: ClassVar[bool] = True

    @classmethod
    def documents_to_read(cls, reading: Reading) -> list[PerplexityWork]:
        """The work, one for each document; a sliding window also reads the text behind the longest length."""
        documents = reading.documents(reading.longest, 2 * reading.longest if reading.stride else reading.longest)
        num_start = len(reading.encoder.start())
        return [
            PerplexityWork(ids, sample, reading.lengths, num_start, reading.stride, reading.text)
            for sample, ids in enumerate(documents)
        ]


@dataclass(frozen=True)
class LongPerplexityWork(DocumentWork):
    """One document at one length, whose loss is measured on the tokens that only a far context predicts.

    Attributes:
        window: The tokens of the last part.
        num_start: The number of begin tokens.
        evaluator: The model that finds key tokens.
    """

    task: ClassVar[str] = "longppl"
    window: int
    num_start: int
    evaluator: str

    def measure(self, loaded: "LoadedModel") -> Mapping[str, Any]:
        """Read the document once, and let the evaluator read it."""
        from ctxext.evaluate.scoring.key_tokens import key_tokens, load_evaluator

        evaluator = load_evaluator(self.evaluator, str(loaded.device))
        chosen = key_tokens(evaluator, self.ids, self.window, self.num_start)
        loss = float(_losses(loaded, self.ids)[chosen - 1].sum())
        return {"loss": [loss], "key_tokens": [len(chosen)], "of": [self.length - self.window]}


class LongPerplexity(Task):
    """Read long documents, and measure the loss on the tokens that another model predicts from far context alone."""

    name: ClassVar[str] = LongPerplexityWork.task
    description: ClassVar[str] = (
        "The loss on key tokens: those that an evaluator predicts well from the whole text (a loss below 2 nats) and "
        "worse by over 2 nats from its last part (LongPPL, arXiv 2410.23771). All models are asked the same tokens."
    )
    shows: ClassVar[str] = "the loss on what only far context predicts"

    @classmethod
    def documents_to_read(cls, reading: Reading) -> list[LongPerplexityWork]:
        """The work, one for each document and length; the last part is a quarter of the longest, at most 4096."""
        assert reading.evaluator is not None
        window, num_start = min(_LONGEST_WINDOW, reading.longest // 4), len(reading.encoder.start())
        return [
            LongPerplexityWork(ids[:length], sample, window, num_start, reading.evaluator)
            for sample, ids in enumerate(reading.documents(reading.longest))
            for length in reading.lengths
            if length > window
        ]


@dataclass(frozen=True)
class PseudoPerplexityWork(DocumentWork):
    """One document whose masked tokens are predicted.

    Attributes:
        lengths: Context lengths to report; the document is cut to each, as an encoder also reads what follows a token.
        end: The end tokens of the tokenizer; they replace the last tokens.
    """

    task: ClassVar[str] = "pseudo-perplexity"
    lengths: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def length(self) -> int:
        """The number of tokens that are read."""
        return max(self.lengths)

    def measure(self, loaded: "LoadedModel") -> Mapping[str, Any]:
        """Read the document at every length."""
        from ctxext.evaluate.scoring.masked_losses import masked_losses

        results = {n: masked_losses(loaded, _closed(self.ids, n, self.end)) for n in self.lengths}
        losses, is_guessed = results[self.length]
        width = bucket_width(self.length)
        parts = [slice(at, at + width) for at in range(0, self.length, width)]
        return {
            "width": width,
            "buckets": [[float(losses[part].sum()), int(is_guessed[part].sum())] for part in parts],
            "lengths": {str(n): (float(loss.sum()), int(count.sum())) for n, (loss, count) in results.items()},
        }


class PseudoPerplexity(Task):
    """Mask every eighth token of long documents, eight times, and measure the loss position by position."""

    name: ClassVar[str] = PseudoPerplexityWork.task
    kinds: ClassVar[tuple[str, ...]] = ("masked",)
    description: ClassVar[str] = (
        "Each document was read eight times, every eighth token masked, so that each was guessed once; a point of the "
        "curve is the mean loss of the tokens at that position. Shorter lengths are read by themselves."
    )
    shows: ClassVar[str] = "the loss of masked tokens in long text, position by position"

    @classmethod
    def documents_to_read(cls, reading: Reading) -> list[PseudoPerplexityWork]:
        """The work, one for each document."""
        documents, end = reading.documents(reading.longest), tuple(reading.encoder.end())
        return [PseudoPerplexityWork(ids, sample, reading.lengths, end) for sample, ids in enumerate(documents)]


class ShortWork(DocumentWork):
    """One document of exactly the original context length."""

    task: ClassVar[str] = "short"

    def measure(self, loaded: "LoadedModel") -> Mapping[str, Any]:
        """Read the document once."""
        from ctxext.evaluate.scoring.masked_losses import losses_of

        losses = losses_of(loaded, self.ids)
        return {"loss": [float(losses.sum())], "tokens": [len(losses)]}


class Short(Task):
    """Read documents of exactly the original context length."""

    name: ClassVar[str] = ShortWork.task
    description: ClassVar[str] = "What extending costs where the model was good before."
    kinds: ClassVar[tuple[str, ...]] = ("causal", "masked")
    shows: ClassVar[str] = "what extending cost at the original context length"

    @classmethod
    def documents_to_read(cls, reading: Reading) -> list[ShortWork]:
        """The work, one for each document."""
        length, end = reading.trained_length, tuple(reading.encoder.end()) if reading.kind == "masked" else ()
        return [ShortWork(_closed(ids, length, end), sample) for sample, ids in enumerate(reading.documents(length))]


def _losses(loaded: "LoadedModel", ids: list[int]) -> "torch.Tensor":
    """The loss of each token of a text except the first."""
    import torch

    from ctxext.evaluate.scoring.token_losses import token_losses

    return token_losses(loaded, torch.tensor([ids], device=loaded.device))[0]


def bucket_width(length: int) -> int:
    """The number of positions that are averaged for one point of a curve, a power of two."""
    width = _MIN_BUCKET
    while width * _NUM_BUCKETS < length:
        width *= 2
    return width


def _closed(ids: list[int], length: int, end: tuple[int, ...]) -> list[int]:
    """The beginning of a document as a text of exactly `length` tokens, with the end tokens."""
    return [*ids[: length - len(end)], *end]
