"""Checks whether the cache of a prompt may be cropped and reused for a prompt with a common prefix."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ctxext.recipes.code.layout import depends_on_prompt
from ctxext.verify.decoding_process import cache_argument, cache_of

_LENGTH_DEPENDENT = ("dynamic", "longrope", "su")
_PROBE_LENGTH, _PROBE_KEPT, _PROBE_EXTRA = 24, 12, 4
_TOLERANCE = 0.05
_SHORTEST = [[0]]
"""A prompt of one arbitrary token."""


def is_static(config: Mapping[str, Any]) -> bool:
    """Return whether a token's keys depend only on the tokens before it, according to config.json.

    They do not if the schedule depends on the prompt length, or the order of heads on the prompt.
    """
    return not depends_on_prompt(config) and not follows_length(config)


def is_static_for(config: Mapping[str, Any], common: int, length: int) -> bool:
    """Return whether a token's keys depend only on the tokens before it, for prompts of these lengths.

    A schedule that depends on the length is constant up to the original context length, and LongRoPE's is also constant
    beyond it.

    Args:
        config: The model's configuration.
        common: Minimum number of common tokens of two prompts.
        length: The number of tokens of the longest prompt, its answer included.
    """
    if depends_on_prompt(config):
        return False
    nodes = [node for node in _dicts(config) if _follows_length(node)]
    return all(
        length <= _switch(node, config) or (_is_longrope(node) and common >= _switch(node, config) > 0)
        for node in nodes
    )


def follows_length(config: Mapping[str, Any]) -> bool:
    """Return whether the schedule depends on the prompt length and is the same for all tokens."""
    return any(_follows_length(node) for node in _dicts(config))


def forget_longer_prompts(model: Any) -> None:
    """Reset a model to its state after loading.

    The `dynamic` schedule of transformers keeps the frequencies of the longest prompt until a short prompt, so that
    results would depend on earlier prompts.
    """
    if follows_length(model.config.to_dict()):
        for module in model.modules():
            if hasattr(module, "original_max_seq_len"):  # Some releases do not record the longest prompt there.
                module.max_seq_len_cached = module.original_max_seq_len + 1
        with torch.no_grad():
            model(input_ids=torch.tensor(_SHORTEST, device=model.device), use_cache=False)


def _follows_length(node: Mapping[str, Any]) -> bool:
    rope_type = node.get("rope_type") or node.get("type")
    same_lists = rope_type != "dynamic" and node.get("short_factor") == node.get("long_factor")
    return rope_type in _LENGTH_DEPENDENT and not same_lists


def _is_longrope(node: Mapping[str, Any]) -> bool:
    return "longrope" in (node.get("rope_type"), node.get("type"))


def _switch(node: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """Return the maximum length in tokens with the original schedule."""
    original = node.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    return int(original or (0 if _is_longrope(node) else config.get("max_position_embeddings") or 0))


def _dicts(value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        yield value
        for inner in value.values():
            yield from _dicts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _dicts(inner)


def new_cache(model: Any) -> Any:
    """Return an empty cache that can be cropped; None if the model has layers with another state."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    if model._is_stateful:
        return None
    cache = DynamicCache(config=model.config)
    return cache if all(type(layer) is DynamicLayer for layer in cache.layers) else None


@torch.no_grad()
def sharing_works(model: Any) -> bool:
    """Return whether a cropped and continued cache gives the logits of the whole prompt, tested on a few tokens."""
    size = model.config.get_text_config(decoder=True).vocab_size
    ids = (torch.arange(_PROBE_LENGTH, device=model.device)[None] * 7) % size
    try:
        cache = new_cache(model)
        if cache is None:
            return False
        whole = model(input_ids=ids, use_cache=False).logits[:, _PROBE_KEPT:].float()
        name = cache_argument(model)
        first = model(input_ids=ids[:, : _PROBE_KEPT + _PROBE_EXTRA], **{name: cache}, use_cache=True)
        if cache_of(first) is not cache:
            return False
        cache.crop(-_PROBE_EXTRA)
        if cache.get_seq_length() != _PROBE_KEPT:
            return False
        rest = model(input_ids=ids[:, _PROBE_KEPT:], **{name: cache}, use_cache=True).logits.float()
    except (LookupError, TypeError, ValueError, AttributeError, NotImplementedError, RuntimeError):
        return False
    return bool((whole - rest).abs().max() <= _TOLERANCE * whole.std())
