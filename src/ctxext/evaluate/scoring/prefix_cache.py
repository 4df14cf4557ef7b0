"""Whether one prompt's cache may be cropped and used for another prompt that begins alike."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from ctxext.recipes.code_layout import depends_on_prompt
from ctxext.recipes.legacy import upgraded

_LENGTH_DEPENDENT = ("dynamic", "longrope", "su")
_PROBE_LENGTH, _PROBE_KEPT, _PROBE_EXTRA = 24, 12, 4
_TOLERANCE = 0.05


def is_static(config: Mapping[str, Any]) -> bool:
    """Whether a token's keys depend on the tokens before it alone, as far as config.json tells.

    Not so where the schedule follows the length of the prompt, or where the order of heads is chosen from each prompt.
    """
    return _depends_on_nothing(config, _LENGTH_DEPENDENT)


def is_static_beyond(config: Mapping[str, Any], length: int) -> bool:
    """Whether that is so for prompts whose common beginning is longer than some length in tokens.

    LongRoPE's two lists are one from the original context length on.
    """
    others = [kind for kind in _LENGTH_DEPENDENT if kind != "longrope"]
    switches = [
        node.get("original_max_position_embeddings") or 0
        for node in _dicts(config)
        if "longrope" in (node.get("rope_type"), node.get("type"))
    ]
    return bool(switches) and length >= max(switches) > 0 and _depends_on_nothing(config, others)


def _depends_on_nothing(config: Mapping[str, Any], length_dependent: Collection[str]) -> bool:
    if depends_on_prompt(upgraded(dict(config))):
        return False
    for node in _dicts(config):
        rope_type = node.get("rope_type") or node.get("type")
        same_lists = rope_type != "dynamic" and node.get("short_factor") == node.get("long_factor")
        if rope_type in length_dependent and not same_lists:
            return False
    return True


def _dicts(value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        yield value
        for inner in value.values():
            yield from _dicts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _dicts(inner)


def new_cache(model: Any) -> Any:
    """An empty cache that can be cropped, or None where the model's layers keep something else."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    if getattr(model, "_is_stateful", False):
        return None
    cache = DynamicCache(config=model.config)
    return cache if all(type(layer) is DynamicLayer for layer in cache.layers) else None


@torch.no_grad()
def sharing_works(model: Any) -> bool:
    """Try it on a few tokens: a cropped and continued cache must give the logits of the whole prompt."""
    size = model.config.get_text_config(decoder=True).vocab_size
    ids = (torch.arange(_PROBE_LENGTH, device=model.device)[None] * 7 + 3) % size
    try:
        cache = new_cache(model)
        if cache is None:
            return False
        whole = model(input_ids=ids, use_cache=False).logits[:, _PROBE_KEPT:].float()
        first = model(input_ids=ids[:, : _PROBE_KEPT + _PROBE_EXTRA], past_key_values=cache, use_cache=True)
        if first.past_key_values is not cache:
            return False
        cache.crop(-_PROBE_EXTRA)
        if cache.get_seq_length() != _PROBE_KEPT:
            return False
        rest = model(input_ids=ids[:, _PROBE_KEPT:], past_key_values=cache, use_cache=True).logits.float()
    except (TypeError, ValueError, AttributeError, NotImplementedError, RuntimeError):
        return False
    return bool((whole - rest).abs().max() <= _TOLERANCE * whole.std())
