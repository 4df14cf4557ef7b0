"""Whether one prompt's cache may be cropped and used for another prompt that begins alike."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ctxext.recipes.code.layout import depends_on_prompt
from ctxext.recipes.encodings.legacy import upgraded

_LENGTH_DEPENDENT = ("dynamic", "longrope", "su")
_PROBE_LENGTH, _PROBE_KEPT, _PROBE_EXTRA = 24, 12, 4
_TOLERANCE = 0.05


def is_static(config: Mapping[str, Any]) -> bool:
    """Whether a token's keys depend on the tokens before it alone, as far as config.json tells.

    Not so where the schedule follows the length of the prompt, or where the order of heads is chosen from each prompt.
    """
    return not chooses_by_prompt(config) and not follows_length(config)


def is_static_for(config: Mapping[str, Any], common: int, length: int) -> bool:
    """Whether that is so for some prompts, where it is not so for all.

    A schedule that follows the length is one and the same inside the original context length, and LongRoPE's long
    list is from there on.

    Args:
        config: The model's configuration.
        common: How many tokens the prompts have in common at least.
        length: How many tokens the longest has, its answer included.
    """
    if chooses_by_prompt(config):
        return False
    nodes = [node for node in _dicts(config) if _follows_length(node)]
    return all(
        length <= _switch(node, config) or (_is_longrope(node) and common >= _switch(node, config) > 0)
        for node in nodes
    )


def chooses_by_prompt(config: Mapping[str, Any]) -> bool:
    """Whether heads take their place by each prompt's last token."""
    return depends_on_prompt(upgraded(dict(config)))


def follows_length(config: Mapping[str, Any]) -> bool:
    """Whether the schedule follows the length of the prompt, one for all its tokens."""
    return any(_follows_length(node) for node in _dicts(config))


def _follows_length(node: Mapping[str, Any]) -> bool:
    rope_type = node.get("rope_type") or node.get("type")
    same_lists = rope_type != "dynamic" and node.get("short_factor") == node.get("long_factor")
    return rope_type in _LENGTH_DEPENDENT and not same_lists


def _is_longrope(node: Mapping[str, Any]) -> bool:
    return "longrope" in (node.get("rope_type"), node.get("type"))


def _switch(node: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """The length in tokens up to which the schedule is the model's own."""
    own = node.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    return int(own or (0 if _is_longrope(node) else config.get("max_position_embeddings") or 0))


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

    if model._is_stateful:
        return None
    cache = DynamicCache(config=model.config)
    return cache if all(type(layer) is DynamicLayer for layer in cache.layers) else None


@torch.no_grad()
def sharing_works(model: Any) -> bool:
    """Try it on a few tokens: a cropped and continued cache must give the logits of the whole prompt."""
    size = model.config.get_text_config(decoder=True).vocab_size
    ids = (torch.arange(_PROBE_LENGTH, device=model.device)[None] * 7) % size
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
