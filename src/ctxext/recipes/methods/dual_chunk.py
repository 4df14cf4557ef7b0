"""Dual chunk attention: positions within chunks, so that no distance exceeds the chunk."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from typing_extensions import override

from ctxext.recipes.code.method import PORTABLE
from ctxext.recipes.methods.relation import Relation, require
from ctxext.recipes.model_config import ModelConfig
from ctxext.recipes.param import param


class DualChunk(Relation):
    """Split positions into chunks: exact distances within a chunk and to the previous one, fixed beyond. No training.

    Inputs within L give bit-identical output. Use it like self-extend if attention within a few thousand tokens must
    stay exact; Qwen2.5-1M is published with it. The rotation of a key never changes, so caches and chunked prompts give
    the same result. An et al. 2024, section 3.
    """

    name = "dca"
    title = "Dual chunk attention"
    paper = "https://arxiv.org/abs/2402.17463"
    code = (PORTABLE / "dual_chunk.py", *Relation.code)
    code_class = "Dca"

    chunk_size: int | None = param(None, help="Largest distance used. Default: L.", min=2)
    local: int | None = param(
        None,
        help="Overlap of neighbouring chunks, in tokens. Default: an eighth of the chunk.",
        min=1,
    )

    @override
    def adapt(self, model: ModelConfig) -> Self:
        # Qwen2.5-1M publishes the parameters in `dual_chunk_attention_config`, which transformers ignores.
        published = model.read("dual_chunk_attention_config")
        if not isinstance(published, Mapping):
            return self
        has_options = self.chunk_size is not None or self.local is not None
        return dataclasses.replace(
            self,
            target_length=self.target_length or (model.rotary.claimed_length if self.factor is None else None),
            chunk_size=self.chunk_size if has_options else published.get("chunk_size"),
            local=self.local if has_options else published.get("local_size"),
        )

    @override
    def defaults(self, length: int) -> dict[str, Any]:
        # With chunks as long as L, all query positions within L stay unchanged.
        size = self.chunk_size or length
        return {"chunk_size": size, "local": max(size // 8, 1)}

    @override
    def problem(self, length: int, target: int) -> tuple[str, str] | None:
        # No distance may be longer than L, and chunks must be longer than their overlap.
        size, local = require(self.chunk_size), require(self.local)
        if size > length:
            return f'a chunk of "{size}" exceeds the model\'s context length of {length} tokens.', (
                f"--chunk-size {length}"
            )
        if local >= size:
            return (
                f'an overlap of "{local}" is not shorter than the chunk of {size} tokens.',
                f"--local {max(size // 8, 1)}",
            )
        return None
