"""The keys and rope types of schedules in config.json that a family's code accepts, in any version of transformers."""

from collections.abc import Mapping
from typing import Any

from ctxext.checkpoint.families import Family
from ctxext.checkpoint.geometry import LENGTH_ABOVE, LENGTH_REACHED
from ctxext.errors import CtxextError
from ctxext.recipes.encodings.base import Config

_NEEDED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("linear", "dynamic", "yarn"), ("factor",)),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
"""Required parameters in transformers, by rope type."""

KEPT = ("mrope_section", "mrope_interleaved", "llama_4_scaling_beta")
"""Keys of a schedule that remain when it is replaced."""
STOCK_KEYS = frozenset(
    {"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"}
    | {"attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate"}
    | {"low_freq_factor", "high_freq_factor", "short_factor", "long_factor"}
    | {"short_mscale", "long_mscale"}  # Written by `longrope` and related methods for vLLM.
)
"""Keys of transformers' rope types that any family or some engine reads."""
_WITHOUT_EFFECT = ("finetuned",)
"""Keys of published schedules without any effect, as in the YaRN models of NousResearch."""
_OF_FAMILY: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe"), frozenset({"alpha"})),
    # The classes accept it and do not use it.
    **dict.fromkeys(("ministral3", "mistral4"), frozenset({"max_position_embeddings"})),
}
"""Further keys by family, besides `Family.required_keys`."""


def known_keys(text: Mapping[str, Any], family: Family) -> frozenset[str]:
    """Return the keys of a schedule that are known for a family."""
    names = (family.model_type, str(text.get("model_type")))
    return STOCK_KEYS.union(KEPT, _WITHOUT_EFFECT, family.required_keys, *(_OF_FAMILY.get(name, ()) for name in names))


def check_numbers(parameters: Mapping[str, Any]) -> None:
    """Raise if a schedule lacks a parameter that transformers requires."""
    for key in _NEEDED.get(str(parameters["rope_type"]), ()):
        if parameters.get(key) is None:
            raise CtxextError(
                f'The schedule "{parameters["rope_type"]}" of config.json lacks "{key}".',
                hint="Add it to rope_scaling and rope_parameters, or remove the schedule.",
            )


def write_length(text: Config, family: Family, length: int) -> None:
    """Write a context length in tokens to every key that the family reads."""
    text[family.length_key] = length
    for key in (LENGTH_ABOVE, LENGTH_REACHED):
        if text.get(key):
            text[key] = length


def native_type(family: Family, rope_type: str) -> str:
    """Return a family's name for a rope type: with partial rotation, linear can be `proportional`."""
    is_plain = rope_type == "default" or (rope_type == "linear" and family.plain_type != "default")
    return family.plain_type if is_plain else rope_type


def unsupported_reason(family: Family, rope_type: str) -> str:
    """Return the reason why a family does not support a rope type; empty if it does."""
    if reason := family.reason or family.fixed:
        return reason
    if rope_type == "default" or native_type(family, rope_type) in family.rope_types:
        return ""
    supported = ", ".join(family.rope_types) or "none"
    return f'its code does not support the rope type "{rope_type}" (supported: {supported})'
