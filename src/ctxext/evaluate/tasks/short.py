"""Perplexity inside the trained window: what extending the context costs where the model was good before."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from ctxext.evaluate.model import LoadedModel
from ctxext.evaluate.scoring.token_losses import token_losses
from ctxext.evaluate.tasks.base import Key, Record


@dataclass(frozen=True)
class ShortWork:
    """One document of exactly the trained length.

    Attributes:
        ids: Its tokens, begin token included.
        sample: Its number.
    """

    name: ClassVar[str] = "short"
    ids: list[int]
    sample: int

    @property
    def label(self) -> str:
        """What the progress line says."""
        return f"{self.name} {len(self.ids)}"

    @property
    def keys(self) -> list[Key]:
        """The one document."""
        return [Key(self.name, len(self.ids), None, self.sample)]

    def run(self, loaded: LoadedModel, wanted: set[Key]) -> Iterator[Record]:
        """Read the document once."""
        if self.keys[0] not in wanted:
            return
        losses = token_losses(loaded, torch.tensor([self.ids], device=loaded.device))[0]
        yield {
            "task": self.name,
            "length": len(self.ids),
            "depth": None,
            "samples": [self.sample],
            "loss": [float(losses.sum())],
            "tokens": [len(losses)],
        }
