"""Layout of a schedule in config.json, in the v4 and v5 formats of transformers that a family's code accepts."""

import copy
from collections.abc import Mapping
from typing import Any

from ctxext.checkpoint.families import Family, read, text_config
from ctxext.checkpoint.geometry import LENGTH_ABOVE, LENGTH_REACHED
from ctxext.errors import CtxextError
from ctxext.recipes.encodings.base import Config

_DTYPES = ("dtype", "torch_dtype")
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


def rope_scaling(family: Family, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schedule in the v4 format; some classes accept certain keys only (Phi-3)."""
    keys = family.rope_scaling_keys.get(parameters["rope_type"])
    if keys is None:
        return dict(parameters)
    named = {**parameters, "type": parameters["rope_type"]}
    return {key: named[key] for key in keys if key in named}


def nested_by_type(config: Config, family: Family, full: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schedule by layer type; that of sliding layers is unchanged (docs/traps.md, trap 9)."""
    source = text_config(config, family).get("rope_parameters") or {}
    nested = {key: copy.deepcopy(value) for key, value in source.items() if isinstance(value, dict)}
    local = {"rope_type": "default", "rope_theta": read(config, family, "local_rope_theta")}
    if partial := family.defaults.get("local_partial_rotary_factor"):
        local["partial_rotary_factor"] = partial
    for name in family.sliding_types if local["rope_theta"] else ():
        nested.setdefault(name, local)
    return {**nested, **{name: dict(full) for name in family.full_types}}


def write_explicit(config: Config, edited: Config, text: Config, family: Family) -> None:
    """Write values that some programs would otherwise guess: head size, base of sliding layers, dtype."""
    head_dim = read(config, family, "head_dim")
    if head_dim and family.explicit_head_dim and not family.shared_rotary_key and text.get("head_dim") is None:
        text["head_dim"] = int(head_dim)
    if family.local_theta_key:
        text[family.local_theta_key] = read(config, family, family.local_theta_key)
    for place in (edited, text):
        known = next((place[key] for key in _DTYPES if place.get(key)), None)
        if known:
            place.update(dict.fromkeys(_DTYPES, known))


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
