"""The context of a checkpoint, from its configuration and tensor headers."""

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ctxext.checkpoint.auto_class import is_causal
from ctxext.checkpoint.families import (
    NOTHING_TO_EXTEND,
    Family,
    family_of,
    full_attention_layers,
    read,
    sliding_layers,
    text_config,
)
from ctxext.checkpoint.geometry import cache_numbers, default_length
from ctxext.checkpoint.opening import Checkpoint, claimed_lengths
from ctxext.checkpoint.other_files import SentencePipeline, read_pipeline
from ctxext.converters.engine_support import Serving, serving_of, source_commands
from ctxext.errors import CtxextError
from ctxext.recipes.encodings.base import Encoding, provenance
from ctxext.recipes.encodings.frequencies import inverse_frequencies
from ctxext.recipes.encodings.rotary import Rotary, sliding_layers_follow
from ctxext.recipes.model_config import ModelConfig, beyond_training, is_readable, model_config
from ctxext.recipes.registry import METHODS

_BY_ENCODING: Mapping[str, str] = {
    "learned": "a learned position table, which this version cannot extend for this family",
    "sinusoidal": "a table of sinusoids, which this version cannot extend for this family",
    "relative": "only distances matter, so no position is out of range",
    "buckets": "an absolute table besides its buckets of distances, which this version cannot extend",
    "memory": (
        "none: its relative sinusoids are computed for any distance; mem_len ({mem_len}) is the number of states of "
        "earlier segments that it keeps, all of them if it is None"
    ),
    "none": "no positions; its state or its window limits the context",
}
_BY_TYPE: Mapping[str, str] = {
    "transfo-xl": (
        "none: it reads segments and keeps mem_len ({mem_len}) states of earlier ones; a larger mem_len extends the "
        "context"
    ),
}
_DEFAULTS: Mapping[str, Any] = {"mem_len": "not set"}


def bound_of(config: Mapping[str, Any], family: Family) -> str:
    """Describe the limit of a family's context, with the values of this configuration."""
    sentence = _BY_TYPE.get(family.model_type, _BY_ENCODING.get(family.positions, ""))
    return sentence.format_map({**_DEFAULTS, **text_config(config, family)})


_ANY_LENGTH = 1 << 31
_CACHE_LENGTHS = (8192, 32768, 131072)
_BYTES_PER_NUMBER = 2


@dataclass(frozen=True)
class Inspection:
    """Result of `ctxext inspect`.

    Attributes:
        positions: "rotary", "learned", "sinusoidal", "alibi", "relative" or "none".
        model: The resolved configuration; None if its encoding cannot be changed.
        bound: The limit of its context if no method supports it; empty if one does.
        unfinished_pairs: Rotated pairs of dimensions that never complete a rotation in the original context length.
        windows: The context length in each file, by file name.
        pipeline: The modules of a sentence encoder; None for other models.
        default_length: The configuration class's default length in tokens if config.json contains none; else None.
        attention: Heads, KV heads, full and sliding layers.
        cache_bytes: Size of the keys and values of one sequence in 16 bits, by length in tokens.
        num_parameters: Counted from the safetensors headers; None if there are none.
        methods: For every method the reason why it does not apply; empty if it does.
        caution: The warning if sliding layers would see distances beyond their training; empty if not.
        recipe: The recipe that ctxext applied to it, as in a recipe file, or None.
        serving: Status in each engine, if ctxext created the checkpoint.
        source_commands: By engine the command that serves its unconverted source with the recipe on the command line.
    """

    family: Family
    positions: str
    model: ModelConfig | None
    bound: str
    unfinished_pairs: int | None
    windows: Mapping[str, int]
    pipeline: SentencePipeline | None
    default_length: int | None
    attention: Mapping[str, int | None]
    cache_bytes: Mapping[int, int]
    num_parameters: int | None
    methods: Mapping[str, str]
    caution: str
    recipe: Mapping[str, Any] | None
    serving: tuple[Serving, ...]
    source_commands: Mapping[str, str]

    @property
    def rotary(self) -> Rotary | None:
        """The encoding if it is rotary; None for the others."""
        encoding = self.model.encoding if self.model else None
        return encoding if isinstance(encoding, Rotary) else None

    def to_dict(self, source: str) -> dict[str, Any]:
        """Return the inspection as JSON, with the name that the user gave the checkpoint."""
        rotary, model = self.rotary, self.model
        return {
            "source": source,
            "model_type": self.family.model_type,
            "positions": self.positions,
            "num_parameters": self.num_parameters,
            "rotary": rotary
            and {
                **rotary_data(rotary),
                "pairs_that_never_complete_a_turn": self.unfinished_pairs,
                "declared_length": rotary.claimed_length,
                "is_extended": model is not None and model.is_extended,
            },
            "encoding": model and {**encoding_data(model.encoding), "is_extended": model.is_extended},
            "bound": self.bound,
            "windows": dict(self.windows),
            "pipeline": str(self.pipeline) if self.pipeline else None,
            "default_length": self.default_length,
            "attention": dict(self.attention),
            "cache_bytes": {str(length): size for length, size in self.cache_bytes.items()},
            "caution": self.caution,
            "methods": methods_data(self.methods),
            "recipe": self.recipe,
            "serving": [row.to_dict() for row in self.serving],
            "unconverted": dict(self.source_commands),
        }


def rotary_data(rotary: Rotary) -> dict[str, Any]:
    """Return a rotary encoding as JSON, as `inspect` prints it for a checkpoint or a GGUF file."""
    return {
        "rope_type": rotary.rope_type,
        "parameters": dict(rotary.parameters),
        "theta": rotary.theta,
        "dimensions": rotary.dim,
        "trained_length": rotary.trained_length,
        "trained_length_from": rotary.length_origin,
        "context_length": rotary.usable_length,
    }


def encoding_data(encoding: Encoding) -> dict[str, Any]:
    """Return the description and the lengths of any encoding, as JSON."""
    return {
        "description": encoding.describe(),
        "trained_length": encoding.trained_length,
        "context_length": encoding.usable_length,
    }


def methods_data(reasons: Mapping[str, str]) -> dict[str, Any]:
    """Return for each method whether it applies, and the reason if it does not, as JSON."""
    return {name: {"applies": not reason, "reason": reason} for name, reason in reasons.items()}


def inspect_checkpoint(checkpoint: Checkpoint) -> Inspection:
    """Inspect a checkpoint without loading weights.

    Raises:
        CtxextError: the model's family is unknown, or its configuration is broken.
    """
    config = checkpoint.config
    family = family_of(config)
    methods = {method.name: method.refusal(config, family) for method in METHODS}
    can_be_read = is_readable(config, family) and family.reason in ("", NOTHING_TO_EXTEND)
    model = model_config(config, checkpoint.original_length) if can_be_read else None
    rotary = model.encoding if model and isinstance(model.encoding, Rotary) else None
    unfinished = None
    if rotary:
        with contextlib.suppress(CtxextError):
            frequencies = inverse_frequencies(rotary)
            unfinished = sum(2 * math.pi / theta > rotary.trained_length for theta in frequencies)
    heads = read(config, family, "num_attention_heads")
    record = provenance(config)
    recipe = record.get("recipe")
    serving = serving_of(model) if recipe and model else ()
    keeps_sliding = model and not sliding_layers_follow(config, family, model.encoding)
    is_copy = recipe and model and not record.get("finetune")
    return Inspection(
        family=family,
        positions=family.positions,
        model=model,
        bound="" if model or family.positions == "rotary" else bound_of(config, family),
        unfinished_pairs=unfinished,
        windows=claimed_lengths(checkpoint, family, model.encoding.context_length if model and not rotary else None),
        pipeline=read_pipeline(checkpoint.folder),
        default_length=default_length(config, family),
        attention={
            "heads": heads,
            "key_heads": read(config, family, "num_key_value_heads") or heads,
            "head_dim": read(config, family, "head_dim"),
            "layers": read(config, family, "num_hidden_layers"),
            "full_attention_layers": len(full_attention_layers(config, family)),
            "sliding_layers": len(sliding_layers(config, family)),
        },
        cache_bytes={length: _BYTES_PER_NUMBER * cache_numbers(config, family, length) for length in _CACHE_LENGTHS}
        if is_causal(config)
        else {},
        num_parameters=checkpoint.num_parameters,
        methods=methods,
        caution=beyond_training(model, _ANY_LENGTH) if model and keeps_sliding else "",
        recipe=recipe,
        serving=serving,
        source_commands=source_commands(str(record.get("source")), model, serving) if is_copy and model else {},
    )
