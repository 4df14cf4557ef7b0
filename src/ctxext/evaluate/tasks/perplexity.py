"""Loss by position in long documents, and perplexity with a sliding window as YaRN reports it."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, ClassVar

from ctxext.evaluate.tasks.base import Key, Reading, Record, Task

if TYPE_CHECKING:
    import torch

    from ctxext.evaluate.model import LoadedModel

_NUM_BUCKETS = 32
_MIN_BUCKET = 16


class Perplexity(Task):
    """Read long documents and measure the loss position by position."""

    name: ClassVar[str] = "perplexity"
    description: ClassVar[str] = (
        "Each document was read once; a point of the curve is the mean loss of the tokens at that position."
    )
    shows: ClassVar[str] = "the loss on long text, position by position"
    tells_texts_apart: ClassVar[bool] = True

    @classmethod
    def documents_to_read(cls, reading: Reading) -> "list[PerplexityWork]":
        """The work, one for each document; a sliding window also reads the text behind the longest length."""
        documents = reading.documents(reading.longest, 2 * reading.longest if reading.stride else reading.longest)
        num_start = len(reading.encoder.start())
        return [
            PerplexityWork(ids, sample, reading.lengths, num_start, reading.stride, reading.text)
            for sample, ids in enumerate(documents)
        ]


@dataclass(frozen=True)
class PerplexityWork:
    """One document.

    Attributes:
        ids: Its tokens, begin token included.
        sample: Its index.
        lengths: Context lengths to report; the document is read once, up to the longest.
        num_start: The number of begin tokens.
        stride: Of the sliding window; None for none.
        text: The name of the kind of text; empty where there is only one.
    """

    ids: list[int]
    sample: int
    lengths: tuple[int, ...]
    num_start: int
    stride: int | None = None
    text: str = ""

    @property
    def label(self) -> str:
        """The text of the progress line."""
        return f"{self._task} {max(self.lengths)}"

    @property
    def keys(self) -> list[Key]:
        """The document."""
        return [Key(self._task, max(self.lengths), None, self.sample)]

    @property
    def _task(self) -> str:
        return f"{Perplexity.name}: {self.text}" if self.text else Perplexity.name

    def run(self, loaded: "LoadedModel", wanted: set[Key]) -> Iterator[Record]:
        """Read the document once, and again in sliding windows if there is a stride."""
        longest = max(self.lengths)
        if self.keys[0] not in wanted:
            return
        losses = _losses(loaded, self.ids[:longest])
        width = bucket_width(longest)
        # losses[i] is the loss of the token at position i + 1.
        buckets = [losses[max(0, at - 1) : at - 1 + width] for at in range(0, longest, width)]
        record: Record = {
            "task": self._task,
            "length": longest,
            "depth": None,
            "samples": [self.sample],
            "width": width,
            "buckets": [[float(part.sum()), len(part)] for part in buckets],
            "lengths": {str(n): self._beginning(loaded, losses, n) for n in self.lengths},
        }
        if self.text:
            record["text"] = self.text
        if self.stride:
            record["sliding"] = {str(n): self._sliding(loaded, n, self.stride) for n in self.lengths}
        yield record

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
