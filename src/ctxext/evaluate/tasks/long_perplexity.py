"""LongPPL: the loss on the tokens that only a far context predicts."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ctxext.evaluate.tasks.base import Key, Reading, Record, Task

if TYPE_CHECKING:
    from ctxext.evaluate.model import LoadedModel

_LONGEST_WINDOW = 4096


class LongPerplexity(Task):
    """Read long documents, and measure the loss on the tokens that another model predicts from far context alone."""

    name: ClassVar[str] = "longppl"
    description: ClassVar[str] = (
        "The loss on key tokens: those that an evaluator predicts well from the whole text (a loss below 2 nats) and "
        "worse by over 2 nats from its last part (LongPPL, arXiv 2410.23771). All models are asked the same tokens."
    )
    shows: ClassVar[str] = "the loss on what only far context predicts"

    @classmethod
    def documents_to_read(cls, reading: Reading) -> "list[LongPerplexityWork]":
        """The work, one for each document and length; the last part is a quarter of the longest, at most 4096."""
        assert reading.evaluator is not None
        window, num_start = min(_LONGEST_WINDOW, reading.longest // 4), len(reading.encoder.start())
        return [
            LongPerplexityWork(tuple(ids[:length]), sample, window, num_start, reading.evaluator)
            for sample, ids in enumerate(reading.documents(reading.longest))
            for length in reading.lengths
            if length > window
        ]


@dataclass(frozen=True)
class LongPerplexityWork:
    """One document at one length.

    Attributes:
        ids: Its tokens, begin token included.
        sample: Its index.
        window: The tokens of the last part.
        num_start: The number of begin tokens.
        evaluator: The model that finds key tokens.
    """

    ids: tuple[int, ...]
    sample: int
    window: int
    num_start: int
    evaluator: str

    @property
    def label(self) -> str:
        """The text of the progress line."""
        return f"{LongPerplexity.name} {len(self.ids)}"

    @property
    def keys(self) -> list[Key]:
        """The document."""
        return [Key(LongPerplexity.name, len(self.ids), None, self.sample)]

    def run(self, loaded: "LoadedModel", wanted: set[Key]) -> Iterator[Record]:
        """Read the document once, and let the evaluator read it."""
        if self.keys[0] not in wanted:
            return
        import torch

        from ctxext.evaluate.scoring.key_tokens import key_tokens, load_evaluator
        from ctxext.evaluate.scoring.token_losses import token_losses

        evaluator = load_evaluator(self.evaluator, str(loaded.device))
        chosen = key_tokens(evaluator, self.ids, self.window, self.num_start)
        losses = token_losses(loaded, torch.tensor([self.ids], device=loaded.device))[0]
        yield {
            "task": LongPerplexity.name,
            "length": len(self.ids),
            "depth": None,
            "samples": [self.sample],
            "loss": [float(losses[chosen - 1].sum())],
            "key_tokens": [len(chosen)],
            "of": [len(self.ids) - self.window],
        }
