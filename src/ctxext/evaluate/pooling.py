"""One vector for a text: the modules of a sentence encoder behind its transformer, and the length at which it cuts."""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ctxext.checkpoint.other_files import stated_lengths
from ctxext.errors import CtxextError
from ctxext.evaluate.checkpoint_info import CheckpointInfo

_POOLINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cls": lambda states: states[:, 0],
    "mean": lambda states: states.mean(1),
    "max": lambda states: states.amax(1),
    "mean_sqrt_len_tokens": lambda states: states.sum(1) / states.shape[1] ** 0.5,
    "lasttoken": lambda states: states[:, -1],
}
"""The poolings of sentence-transformers for texts without padding, of shape (texts, tokens, width)."""

_PLAIN = ("Transformer", "Pooling", "Normalize")
"""Modules that need nothing of sentence-transformers: the cosine normalizes anyway."""

_PACKAGE = "sentence_transformers"


@dataclass(frozen=True)
class Pooler:
    """How a model makes one vector of a text.

    Attributes:
        pooling: The poolings, whose vectors are concatenated.
        modules: Modules of sentence-transformers that replace them.
        length: The number of tokens at which it cuts texts; None if it does not.
    """

    pooling: tuple[str, ...] = ("mean",)
    modules: tuple[Any, ...] = ()
    length: int | None = None

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """The vectors of texts of one length, from their last hidden states."""
        if not self.modules:
            return torch.cat([_POOLINGS[name](states) for name in self.pooling], 1)
        mask = torch.ones(states.shape[:2], dtype=torch.long, device=states.device)
        features: dict[str, Any] = {"token_embeddings": states, "attention_mask": mask}
        for module in self.modules:
            features = module.to(states)(features)
        vectors: torch.Tensor = features["sentence_embedding"]
        return vectors

    def cut(self, text: Sequence[int], start: Sequence[int], end: Sequence[int]) -> list[int]:
        """A text as it is read: cut within its end tokens."""
        return self.chunks(text, start, end)[0]

    def chunks(self, text: Sequence[int], start: Sequence[int], end: Sequence[int]) -> list[list[int]]:
        """A text as chunks that are read whole, each with the begin and the end tokens."""
        if self.length is None or len(text) <= self.length:
            return [list(text)]
        room = self.length - len(start) - len(end)
        content = text[len(start) : len(text) - len(end)]
        return [[*start, *content[at : at + room], *end] for at in range(0, len(content), room)]


def open_pooler(info: CheckpointInfo) -> Pooler:
    """The pooler of a checkpoint; without a pipeline the mean of all states, of texts of any length."""
    pipeline, folder = info.pipeline, info.checkpoint.folder
    if pipeline is None:
        return Pooler()
    length = min([*stated_lengths(folder).values(), *filter(None, [info.context_length])], default=None)
    plain = all(module.name in _PLAIN for module in pipeline.modules)
    if plain and pipeline.pooling and set(pipeline.pooling) <= set(_POOLINGS):
        return Pooler(pipeline.pooling, length=length)
    if foreign := [module.type for module in pipeline.modules if module.type.partition(".")[0] != _PACKAGE]:
        raise CtxextError(f'"{folder}" has the module {foreign[0]}, which is no part of sentence-transformers.')
    if importlib.util.find_spec(_PACKAGE) is None:
        raise CtxextError(
            f'The vectors of "{folder}" need modules of sentence-transformers: {pipeline}.',
            hint='Install them: pip install "sentence-transformers>=5"',
        )
    load = importlib.import_module(f"{_PACKAGE}.util").import_from_string
    modules = [load(module.type).load(str(folder), subfolder=module.path) for module in pipeline.modules[1:]]
    return Pooler((), tuple(module.eval() for module in modules), length)
