"""Lengths and sizes of a model: claimed and original context length, checks of config.json, size of the cache.

Several keys may specify the original length; known_models.json lists published models without it in config.json.
"""

import dataclasses
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ctxext.checkpoint.families import (
    Family,
    family_of,
    find_family,
    full_attention_layers,
    language_types,
    own_config,
    plain_value,
    read,
    rotary_dim,
    sliding_layers,
    text_config,
    window_of,
)
from ctxext.errors import CtxextError
from ctxext.files.schemas import CONFIG, SIZES, check_schema

_NEEDED: tuple[str, ...] = ("hidden_size", "num_attention_heads", "num_hidden_layers", "qk_rope_head_dim")
_NEEDED += ("no_rope_layer_interval", "attn_layer_period", "attn_layer_offset")
_DERIVED = ("rope_theta", "local_rope_theta", "partial_rotary_factor", "head_dim")
_ONE_PER_LAYER = ("layer_types", "no_rope_layers", "layer_rope_theta")


def check_sizes(config: Mapping[str, Any], name: str) -> None:
    """Check the sizes in a config.json, by the family's names; `name` is the file's name in errors."""
    try:
        plain = find_family(config)
    except CtxextError:  # Code that needs the family reports this error.
        return
    text = text_config(config, plain)
    if plain.text_config and text is config and not (plain.flat_text or plain.reason):
        raise CtxextError(
            f'"{name}" has no "{plain.text_config}", which "{plain.model_type}" needs for its language model.',
            hint="Download the file again, or move the keys of the language model there.",
        )
    sizes = {key: plain_value(text, plain, key) for key in SIZES.fields}
    indices = plain.layers.get("indices")
    aliases = {key: alias for key, alias in plain.aliases.items() if alias in text}
    check_schema(
        {**sizes, "attention_layers": indices and plain_value(text, plain, indices)}, SIZES, name, aliases=aliases
    )
    if null := next((key for key in _NEEDED if key in plain.defaults and sizes[key] is None), None):
        raise CtxextError(f'"{name}": "{plain.aliases.get(null, null)}" is null, expected a number.')
    family = family_of(config)
    if family.positions != "rotary" or family.reason:
        return
    count, text = read(config, family, "num_hidden_layers"), text_config(config, family)
    for key in _ONE_PER_LAYER:
        listed = text.get(key)
        if isinstance(listed, list) and len(listed) < count:
            raise CtxextError(
                f'"{name}": "{key}" has "{len(listed)}" entries, expected one for each of {count} layers.'
            )
    keys = ("sliding_window", "attention_chunk_size")
    stated = [key for key in keys if family.aliases.get(key, key) in text]
    # Without a window most classes fail, and in some sliding layers attend to the whole context.
    if stated and sliding_layers(config, family) and all(read(config, family, key) is None for key in keys):
        raise CtxextError(
            f'"{name}": "{stated[0]}" is null, but the model has sliding layers.',
            hint="Set the window that the model was trained with, or give these layers the type full_attention.",
        )
    # Sliding layers with a base for each keep them.
    derived = [key for key in _DERIVED if not (family.layer_theta_key and key.startswith("local"))]
    check_schema({key: read(config, family, key) for key in derived}, CONFIG, name)
    dim = rotary_dim(config, family)
    if dim < 4 or dim % 2:
        raise CtxextError(f'"{name}": each head rotates "{dim}" dimensions, expected an even number of at least 4.')


def claimed_length(config: Mapping[str, Any], family: Family) -> Any:
    """Return the context length in tokens in config.json: `max_position_embeddings`, or a key that overrides it.

    Command R has 8192 there and 131072 under `model_max_length`, which engines use.
    """
    above = text_config(config, family).get(LENGTH_ABOVE) if family.model_type in _NAMED_ABOVE else None
    return above or read(config, family, "max_position_embeddings")


LENGTH_ABOVE = "model_max_length"
_NAMED_ABOVE = ("cohere", "cohere2", "kimi_linear")
"""Families with that key in published files."""
LENGTH_REACHED = "max_sequence_length"
"""Key of Vicuna and LongChat for the product of a linear schedule's factor and `max_position_embeddings`."""


def reached_length(config: Mapping[str, Any], family: Family, schedule: Mapping[str, Any]) -> int:
    """Return the context length in tokens of a model with its own schedule; by default the claimed length.

    YaRN schedules of model cards have a factor and an original length, with `max_position_embeddings` unchanged (Qwen3,
    GLM-4). A linear schedule may start from that key, with its end in `max_sequence_length`. The schedule is that of
    the full-attention layers, with `rope_type`.
    """
    claimed, factor = int(claimed_length(config, family)), float(schedule.get("factor") or 1)
    if schedule.get("rope_type") == "yarn":
        return max(claimed, round(factor * (schedule.get("original_max_position_embeddings") or 0)))
    starts_there = schedule.get("rope_type") == "linear" and factor > 1
    end = text_config(config, family).get(LENGTH_REACHED)
    return int(end) if starts_there and end == round(factor * claimed) else claimed


def default_length(config: Mapping[str, Any], family: Family) -> int | None:
    """Return the default context length of the configuration class, in tokens; None if config.json has a length."""
    named = read(config, dataclasses.replace(family, defaults={}), "max_position_embeddings")
    length = claimed_length(config, family)
    names_above = text_config(config, family).get(LENGTH_ABOVE) is not None
    return int(length) if named is None and isinstance(length, int) and not names_above else None


MAXIMUM = "max_position_embeddings"
"""Default key of the original length."""

_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True)
class KnownModel:
    """One published model, or several with the same properties.

    Attributes:
        names: Their ids on the Hub.
        model_types: Their model types.
        facts: Keys of config.json or its schedule with the required value, or a list of accepted ones.
        original_length: The context length of training before any schedule, in tokens.
        source: The document with this length.
    """

    names: tuple[str, ...]
    model_types: tuple[str, ...]
    facts: Mapping[str, Any]
    original_length: int
    source: str

    @property
    def origin(self) -> str:
        """The source of the original length, human-readable."""
        return f"published for {self.names[0]}: {self.source}"


@cache
def known_models() -> tuple[KnownModel, ...]:
    """Read the table `known_models.json`."""
    rows = json.loads(Path(__file__).with_name("known_models.json").read_text(encoding="utf-8"))
    return tuple(
        KnownModel(**{**row, "names": tuple(row["names"]), "model_types": tuple(row["model_types"])}) for row in rows
    )


def known_model(
    config: Mapping[str, Any],
    family: Family,
    schedule: Mapping[str, Any],
    *,
    model_types: Collection[str] | None = None,
    unstated: Collection[str] = (),
) -> KnownModel | None:
    """Return the published model with the properties of a configuration, or None; missing keys have the class default.

    Names are ignored: copies have other names, and fine-tuned models have the properties of their base.

    Args:
        config: The content of config.json.
        family: Its family.
        schedule: The full-attention layers' schedule, with `rope_type`.
        model_types: The types of the language model; by default those of config.json. The
            architecture of a GGUF file has one or several types.
        unstated: Facts for which the file has no key.
    """
    types = frozenset(language_types(config, family) if model_types is None else model_types)
    numbers = {"rope_type": "default", "factor": None, **schedule}

    def matches(key: str, expected: Any) -> bool:
        if key in unstated:
            return True
        value = numbers[key] if key in ("rope_type", "factor") else read(config, family, key)
        return value in (expected if isinstance(expected, list) else [expected])

    candidates = (model for model in known_models() if types.intersection(model.model_types))
    return next((model for model in candidates if all(matches(*fact) for fact in model.facts.items())), None)


def original_length_of(
    config: Mapping[str, Any],
    family: Family,
    schedule: Mapping[str, Any],
    *,
    requested: int | None = None,
    recorded: int | None = None,
) -> tuple[int, str]:
    """Return the original context length in tokens, and its source.

    In order of precedence: the user's value, ctxext's record of its conversion, the full-attention layers' schedule,
    and the rest of config.json.
    """
    if requested:
        return requested, "--original-length"
    if recorded:
        return int(recorded), "recorded by ctxext"
    if original := schedule.get(_ORIGINAL) or text_config(config, family).get(_ORIGINAL):
        return int(original), _ORIGINAL
    if known := known_model(config, family, schedule):
        return known.original_length, known.origin
    claimed = int(claimed_length(config, family))
    if (reached := reached_length(config, family, schedule)) > claimed:
        return claimed, f"{MAXIMUM}, implied by {LENGTH_REACHED} {reached}"
    return claimed, MAXIMUM if claimed == read(config, family, MAXIMUM) else LENGTH_ABOVE


def cache_numbers(config: Mapping[str, Any], family: Family, length: int) -> int:
    """Return the number of elements in the cached keys and values of one sequence.

    Layers with a window or chunks cache at most that many tokens. Latent attention caches one compressed vector and
    one rotated key for all heads (DeepSeek-V2, section 2.1). States of constant size are not counted.
    """
    window = window_of(config, family) or length
    count, num_shared = (read(config, family, key) or 0 for key in ("num_hidden_layers", "num_kv_shared_layers"))
    borrowing = set(range(count - num_shared, count))  # They use the keys of earlier layers (Gemma 3n).
    full, sliding = ({*layers(config, family)} - borrowing for layers in (full_attention_layers, sliding_layers))
    looped, loops = _find_loops(config, family) if "n_recurrent_loops" in family.defaults else (range(0), 1)
    return sum(
        _per_token(config, family, layer, sliding=layer in sliding)
        * (min(length, window) if layer in sliding else length)
        * (loops if layer in looped else 1)
        for layer in full | sliding
    )


def _find_loops(config: Mapping[str, Any], family: Family) -> tuple[range, int]:
    """Return the layers that run several times, and how many times they cache keys (Dory)."""
    text = text_config(config, family)
    loops = plain_value(text, family, "n_recurrent_loops") or 1
    if text.get("recurrent_kv_cache_mode") == "last_loop":
        loops = 1
    start = plain_value(text, family, "n_input_layers") or 0
    stop = read(config, family, "num_hidden_layers") - (plain_value(text, family, "n_output_layers") or 0)
    return range(start, stop), loops


def _per_token(config: Mapping[str, Any], family: Family, layer: int, *, sliding: bool) -> int:
    """Return the number of elements that a layer caches per token."""
    text = text_config(config, family)
    entry = own_config(text, layer)

    def size(*names: str) -> int:
        return int(next((value for name in names if (value := entry.get(name) or read(config, family, name))), 0))

    if rank := size("kv_lora_rank"):
        return rank + size("qk_rope_head_dim")
    if sliding:  # `read` returns the head size of full-attention layers.
        heads, named = size("swa_num_key_value_heads", "num_key_value_heads"), entry.get("head_dim")
        plain = text.get("swa_head_dim") or text.get("head_dim") or family.defaults.get("head_dim")
        head_dim = int(named or plain or size("head_dim"))
    else:
        heads, head_dim = size("num_global_key_value_heads", "num_key_value_heads"), size("head_dim")
    return heads * (head_dim + (size("v_head_dim") or head_dim))
