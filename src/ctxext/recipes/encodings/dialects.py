"""How a schedule is laid out in config.json, in the dialects of transformers 4 and 5, by what a family's code takes."""

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
"""Numbers without which transformers builds no such schedule."""

KEPT = ("mrope_section", "mrope_interleaved", "llama_4_scaling_beta")
"""Keys of a schedule that say something else, and stay whatever becomes of it."""
_STOCK = frozenset(
    {"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"}
    | {"attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate"}
    | {"low_freq_factor", "high_freq_factor", "short_factor", "long_factor"}
    | {"short_mscale", "long_mscale"}  # What vLLM reads for longrope, and `longrope` and its kin write.
)
"""What transformers' rope types read of a schedule, in any family, and engines beside them."""
_OF_FAMILY: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe"), frozenset({"alpha"})),
    "ministral3": frozenset({"max_position_embeddings"}),  # Nothing reads it, and the class lets it pass.
}
"""What a family's code reads beside that; `Family.required_keys` are some of it too."""


def known_keys(text: Mapping[str, Any], family: Family) -> frozenset[str]:
    """The keys of a schedule whose meaning is known in a family."""
    names = (family.model_type, str(text.get("model_type")))
    return _STOCK.union(KEPT, family.required_keys, *(_OF_FAMILY.get(name, ()) for name in names))


def check_numbers(parameters: Mapping[str, Any]) -> None:
    """Refuse a schedule that lacks a number.

    Raises:
        CtxextError: it does.
    """
    for key in _NEEDED.get(str(parameters["rope_type"]), ()):
        if parameters.get(key) is None:
            raise CtxextError(
                f'The schedule "{parameters["rope_type"]}" of config.json lacks "{key}".',
                hint="Add it there, in rope_scaling as in rope_parameters, or take the schedule out.",
            )


def rope_scaling(family: Family, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The schedule as transformers 4 reads it; some of its classes accept certain keys only (Phi-3)."""
    keys = family.rope_scaling_keys.get(parameters["rope_type"])
    if keys is None:
        return dict(parameters)
    named = {**parameters, "type": parameters["rope_type"]}
    return {key: named[key] for key in keys if key in named}


def nested_by_type(config: Config, family: Family, full: Mapping[str, Any]) -> dict[str, Any]:
    """The schedule by layer type; the sliding layers keep their own rotary embedding (docs/traps.md, trap 9)."""
    source = text_config(config, family).get("rope_parameters") or {}
    nested = {key: copy.deepcopy(value) for key, value in source.items() if isinstance(value, dict)}
    local_theta = read(config, family, "local_rope_theta")
    for name in family.sliding_types if local_theta else ():
        nested.setdefault(name, {"rope_type": "default", "rope_theta": local_theta})
    return {**nested, **{name: dict(full) for name in family.full_types}}


def write_explicit(config: Config, edited: Config, text: Config, family: Family) -> None:
    """Say what some readers would otherwise guess: the head's size, the sliding base and the weights' type."""
    head_dim = read(config, family, "head_dim")
    if head_dim and family.explicit_head_dim and not family.shared_rotary_key:
        text.setdefault("head_dim", int(head_dim))
    if family.local_theta_key:
        text[family.local_theta_key] = read(config, family, family.local_theta_key)
    for place in (edited, text):
        known = next((place[key] for key in _DTYPES if place.get(key)), None)
        if known:
            place.update(dict.fromkeys(_DTYPES, known))


def write_length(text: Config, family: Family, length: int) -> None:
    """State a context length in tokens wherever the family reads it."""
    text[family.length_key] = length
    for key in (LENGTH_ABOVE, LENGTH_REACHED):
        if text.get(key):
            text[key] = length


def native_type(family: Family, rope_type: str) -> str:
    """The name under which a family carries a schedule: where a part of the head rotates, linear is `proportional`."""
    is_plain = rope_type == "default" or (rope_type == "linear" and family.plain_type != "default")
    return family.plain_type if is_plain else rope_type


def unsupported(family: Family, rope_type: str) -> str:
    """Why a family does not carry a schedule; empty where it does."""
    if family.reason:
        return family.reason
    if rope_type == "default" or native_type(family, rope_type) in family.rope_types:
        return ""
    able = ", ".join(family.rope_types) or "none"
    return f'its code does not carry the rope type "{rope_type}" (it takes: {able})'
