"""Whether the sizes of a config.json can be those of a model with a rotary embedding."""

from collections.abc import Mapping
from typing import Any

from ctxext.errors import CtxextError
from ctxext.families import Family, family_of, read, rotary_dim, text_config
from ctxext.reading.schemas import Config, checked

_READ: tuple[str, ...] = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "num_hidden_layers")
_READ += ("max_position_embeddings", "rope_theta", "partial_rotary_factor")
_ONE_PER_LAYER = ("layer_types", "no_rope_layers", "layer_rope_theta")


def check_sizes(config: Mapping[str, Any], name: str) -> None:
    """Check the sizes as this package reads them, under whatever names the family has for them.

    Args:
        config: The content of a config.json that `check_config` let through.
        name: What errors call the file.

    Raises:
        CtxextError: one of them is no size, heads do not divide, or a head's rotated part is odd.
    """
    try:
        family = family_of(config)
    except CtxextError:  # Whoever needs the family says why there is none.
        return
    if family.positions != "rotary" or family.reason:
        return
    _check_lists(config, family, name)
    checked({key: read(config, family, key) for key in _READ}, Config, name)
    dim = rotary_dim(config, family)
    if dim < 4 or dim % 2:
        raise CtxextError(f'"{name}": "{dim}" dimensions of a head rotate, expected an even number of at least 4.')


def claimed_length(config: Mapping[str, Any], family: Family) -> Any:
    """The context length in tokens that config.json claims: `max_position_embeddings`, or what stands above it.

    Command R was published with 8192 there and its 131072 under `model_max_length`, which engines believe.
    """
    above = text_config(config, family).get(LENGTH_ABOVE) if family.model_type in ("cohere", "cohere2") else None
    return above or read(config, family, "max_position_embeddings")


LENGTH_ABOVE = "model_max_length"


def _check_lists(config: Mapping[str, Any], family: Family, name: str) -> None:
    """Check the lists that have one entry for each layer."""
    text = text_config(config, family)
    count = read(config, family, "num_hidden_layers") or 0
    for key in _ONE_PER_LAYER:
        listed = text.get(key)
        if isinstance(listed, list) and len(listed) < count:
            raise CtxextError(
                f'"{name}": "{key}" has "{len(listed)}" entries, expected one for each of {count} layers.'
            )
