"""The loss on documents: by position, of masked tokens, and at the original context length."""

import dataclasses
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ctxext.tasks.base import DocumentPlan, Key, Record, Task, Work

if TYPE_CHECKING:
    from ctxext.models.model import LoadedModel

_NUM_BUCKETS = 32
_MIN_BUCKET = 16


@dataclass(frozen=True)
class DocumentWork(Work):
    """One document.

    Attributes:
        plan: The documents and lengths to read.
        ids: Tokens of the document, with start tokens.
        sample: Index of the document.
    """

    task: "DocumentTask"
    plan: DocumentPlan
    ids: list[int]
    sample: int

    @property
    def keys(self) -> list[Key]:
        """The only key: the document."""
        return [Key(self.task.name, self.length, None, self.sample)]

    def run(self, loaded: "LoadedModel", keys: set[Key]) -> Iterator[Record]:
        """Read the document once if its key is in `keys`."""
        if self.keys[0] in keys:
            cell = {"task": self.task.name, "length": self.length, "depth": None, "samples": [self.sample]}
            yield {**cell, **self.task.measure(self.plan, loaded, self.ids, self.length)}


@dataclass(frozen=True, kw_only=True)
class DocumentTask(Task):
    """Read documents and measure the loss."""

    options: tuple[str, ...] = ("data",)

    def documents_to_read(self, plan: DocumentPlan) -> list[DocumentWork]:
        """Return the work, one for each document and length."""
        named = dataclasses.replace(self, name=f"{self.name}: {plan.text}") if plan.text else self
        read, lengths = self.documents(plan)
        return [DocumentWork(named, n, plan, ids, sample) for sample, ids in enumerate(read) for n in lengths]

    def documents(self, plan: DocumentPlan) -> tuple[list[list[int]], list[int]]:
        """Return the tokens of each document, and the lengths to measure: by default the model's longest."""
        return plan.documents(plan.longest), [max(plan.lengths)]

    @abstractmethod
    def measure(self, plan: DocumentPlan, loaded: "LoadedModel", ids: list[int], length: int) -> Record:
        """Measure the loss on a document up to a length."""


@dataclass(frozen=True, kw_only=True)
class Perplexity(DocumentTask):
    """Measure the loss on long documents by position."""

    name: str = "perplexity"
    description: str = (
        "Each document was read once. A point of the curve is the mean loss of the tokens at that position."
    )
    shows: str = "the loss on long text by position"
    options: tuple[str, ...] = ("data", "stride")
    separates_texts: bool = True

    def documents(self, plan: DocumentPlan) -> tuple[list[list[int]], list[int]]:
        """Return longer documents for a sliding window, which also reads text beyond the longest length."""
        most = 2 * plan.longest if plan.stride else plan.longest
        return plan.documents(plan.longest, most), [max(plan.lengths)]

    def measure(self, plan: DocumentPlan, loaded: "LoadedModel", ids: list[int], length: int) -> Record:
        """Read a document once, and again in sliding windows if there is a stride."""
        from ctxext.models.token_losses import losses_in_windows, losses_of

        losses, width = losses_of(loaded, ids[:length]), bucket_width(length)
        # losses[i] is the loss of the token at position i + 1.
        buckets = [losses[max(0, at - 1) : at - 1 + width] for at in range(0, length, width)]
        record: Record = {"width": width, "buckets": [[float(part.sum()), len(part)] for part in buckets]}
        record["lengths"] = {}
        for n in plan.lengths:
            # If the position encoding depends on the prompt, a shorter text is read separately.
            of_beginning = losses if loaded.can_share or n == length else losses_of(loaded, ids[:n])
            record["lengths"][str(n)] = float(of_beginning[: n - 1].sum()), n - 1
        if plan.text:
            record["text"] = plan.text
        if stride := plan.stride:
            num_start = len(plan.encoder.get_start_tokens())
            record["sliding"] = {str(n): losses_in_windows(loaded, ids, num_start, n, stride) for n in plan.lengths}
        return record


@dataclass(frozen=True, kw_only=True)
class PseudoPerplexity(DocumentTask):
    """Measure the loss on long documents by position, with every eighth token masked in each of eight passes."""

    name: str = "pseudo-perplexity"
    kinds: tuple[str, ...] = ("masked",)
    description: str = (
        "Each document was read eight times with every eighth token masked, so that each token was predicted once. A "
        "point of the curve is the mean loss of the tokens at that position. Shorter lengths are read separately."
    )
    shows: str = "the loss of masked tokens in long text by position"

    def measure(self, plan: DocumentPlan, loaded: "LoadedModel", ids: list[int], length: int) -> Record:
        """Measure a document at every length, cut and with end tokens, because an encoder reads both sides."""
        from ctxext.models.token_losses import masked_losses

        end, width = plan.encoder.get_end_tokens(), bucket_width(length)
        results = {n: masked_losses(loaded, [*ids[: n - len(end)], *end]) for n in plan.lengths}
        losses, is_guessed = results[length]
        parts = [slice(at, at + width) for at in range(0, length, width)]
        return {
            "width": width,
            "buckets": [[float(losses[part].sum()), int(is_guessed[part].sum())] for part in parts],
            "lengths": {str(n): (float(loss.sum()), int(count.sum())) for n, (loss, count) in results.items()},
        }


@dataclass(frozen=True, kw_only=True)
class Short(DocumentTask):
    """Measure the loss on documents of exactly the original context length."""

    name: str = "short"
    description: str = "The cost of extending at the original context length."
    kinds: tuple[str, ...] = ("causal", "masked")
    shows: str = "the cost of extending at the original context length"

    def documents(self, plan: DocumentPlan) -> tuple[list[list[int]], list[int]]:
        """Return documents as long as the original context."""
        return plan.documents(plan.trained_length), [plan.trained_length]

    def measure(self, plan: DocumentPlan, loaded: "LoadedModel", ids: list[int], length: int) -> Record:
        """Read a document once, with end tokens for an encoder."""
        from ctxext.models.token_losses import losses_of

        end = plan.encoder.get_end_tokens() if plan.kind == "masked" else []
        losses = losses_of(loaded, [*ids[: length - len(end)], *end])
        return {"loss": [float(losses.sum())], "tokens": [len(losses)]}


def bucket_width(length: int) -> int:
    """Return the number of positions per point of a curve, a power of two."""
    width = _MIN_BUCKET
    while width * _NUM_BUCKETS < length:
        width *= 2
    return width
