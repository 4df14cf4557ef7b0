"""The cache of a prompt's first tokens, reused for prompts with the same beginning, and a test of that."""

import inspect
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from ctxext.recipes.code.layout import depends_on_prompt
from ctxext.verify.decoding_process import cache_argument, cache_of

_LENGTH_DEPENDENT = ("dynamic", "longrope", "su")
_PROBE_LENGTH, _PROBE_KEPT, _PROBE_EXTRA, _PROBE_COMPARED = 24, 12, 4, 2
_TOLERANCE = 0.05
_TOLERANCE_16 = 0.15
"""Largest mean difference of cached numbers in 16 bits; by rounding alone, it is 0.03 in models of 18 to 30 layers."""
_TIMES_ROUNDING = 4
"""Largest difference of logits in 16 bits, relative to that of the same tokens in a longer prompt."""
_GROWING = frozenset({"keys", "values"})
"""What a layer without a window keeps of every token."""
_CHUNK = 64
_CHUNK_KEYS = ("chunk_size", "mamba_chunk_size")
"""Tokens in a chunk of the gated delta rule in transformers, and configuration keys of those of other states."""
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


class PrefixCache:
    """The cache of some tokens, which can go back to the lengths that were marked.

    Keys and values of layers without a window are cropped. Windows and states lose tokens as others follow, so a mark
    copies them; they do not grow with the length.

    Args:
        cache: A cache of transformers.
        length: The number of tokens in it.
        chunk: The number of tokens in a chunk of the model's states.
    """

    def __init__(self, cache: Any, length: int = 0, chunk: int = 1) -> None:
        self.cache, self.length, self._chunk = cache, length, chunk
        self._marks: dict[int, list[dict[str, Any]]] = {}

    def has_window_within(self, length: int) -> bool:
        """Return whether a layer attends to fewer tokens than `length`."""
        return any(_has_window(layer) and layer.sliding_window < length for layer in self.cache.layers)

    def count_tokens(self, length: int) -> int:
        """Return the number of tokens that layers keep of a prompt of a length, summed over all layers."""
        kept = (layer.sliding_window if _has_window(layer) else length for layer in self.cache.layers)
        return sum(min(length, most) for most in kept)

    @property
    def has_states(self) -> bool:
        """Whether a layer keeps a state instead of every token."""
        return any(hasattr(layer, "recurrent_states") for layer in self.cache.layers)

    @property
    def unit(self) -> int:
        """The number of tokens between places where pieces should begin.

        A state is computed in chunks, and rounds as in the whole prompt if a piece begins where a chunk does.
        """
        return self._chunk if self.has_states else 1

    @property
    def marks(self) -> frozenset[int]:
        """The lengths to go back to."""
        return frozenset(self._marks)

    def mark(self) -> None:
        """Make it possible to go back to the present length."""
        if self.length not in self._marks:
            self._marks[self.length] = [
                {name: _copy(value) for name, value in vars(layer).items() if name not in _growing_names(layer)}
                for layer in self.cache.layers
            ]

    def go_back(self, length: int) -> None:
        """Forget the tokens from a marked length on, and marks beyond it."""
        surplus = self.length - length
        if surplus:
            for layer, saved in zip(self.cache.layers, self._marks[length], strict=True):
                layer.crop = partial(_restore, layer, saved)
            self.cache.crop(-surplus)  # Code of methods follows this call.
            self.length = length
        self._marks = {mark: saved for mark, saved in self._marks.items() if mark <= length}


def _restore(layer: Any, saved: Mapping[str, Any], crop: int) -> None:
    """Give a layer its marked state; what it keeps of every token is cropped by `-crop` tokens instead."""
    grown = {name: vars(layer)[name][..., :crop, :] for name in _growing_names(layer)}
    vars(layer).clear()
    vars(layer).update(_copy(saved), **grown)


def _has_window(layer: Any) -> bool:
    return bool(getattr(layer, "is_sliding", False))


def _growing_names(layer: Any) -> frozenset[str]:
    """Return the names of what a layer keeps of every token; empty before its first token."""
    keys = getattr(layer, "keys", None)
    return _GROWING if keys is not None and keys.numel() and not _has_window(layer) else frozenset()


def _copy(value: Any) -> Any:
    """Copy the tensors in a layer's state: some models change them in place."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copy(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_copy, value))
    return value


def limit_logits(model: Any, count: int) -> dict[str, Any]:
    """Return the argument of a model's forward that limits logits to the last tokens, if it has one."""
    return {"logits_to_keep": count} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


def new_cache(model: Any) -> PrefixCache:
    """Return an empty cache for a model."""
    from transformers import DynamicCache

    config = model.config.get_text_config(decoder=True)
    chunk = max(_CHUNK, *(getattr(config, key, None) or 0 for key in _CHUNK_KEYS))
    return PrefixCache(DynamicCache(config=model.config), chunk=chunk)


def cache_of_windows(model: Any, length: int) -> PrefixCache | None:
    """Return an empty cache to read a prompt of a length in pieces; None if no window is shorter."""
    cache = new_cache(model)
    return cache if cache.has_window_within(length) else None


@torch.no_grad()
def sharing_works(model: Any) -> bool:
    """Return whether a continued cache gives the results of the whole prompt, tested on a few tokens.

    The test compares the logits, and on average the tensors in the cache: a model may continue its attention, but begin
    its states again. In 16 bits, rounding alone moves logits by up to a third of their standard deviation. How far is
    seen from the same tokens in a prompt of twice the length, which other kernels compute.
    """
    size = model.config.get_text_config(decoder=True).vocab_size
    longer = (torch.arange(2 * _PROBE_LENGTH, device=model.device)[None] * 7) % size
    ids = longer[:, :_PROBE_LENGTH]
    try:
        name, whole, parts = cache_argument(model), new_cache(model), new_cache(model)
        limit = limit_logits(model, _PROBE_COMPARED)  # Logits of a large vocabulary cost more than the layers.
        plain = model(input_ids=ids, use_cache=False, **limit).logits[:, -_PROBE_COMPARED:].float()
        model(input_ids=ids, **{name: whole.cache}, use_cache=True, **limit)
        for end in (_PROBE_KEPT, _PROBE_KEPT + _PROBE_EXTRA):
            output = model(input_ids=ids[:, parts.length : end], **{name: parts.cache}, use_cache=True, **limit)
            parts.length = end
            parts.mark()
        parts.go_back(_PROBE_KEPT)
        if cache_of(output) is not parts.cache or any(
            layer.keys.shape[-2] != _PROBE_KEPT for layer in parts.cache.layers if _growing_names(layer)
        ):
            return False
        rest = model(input_ids=ids[:, _PROBE_KEPT:], **{name: parts.cache}, use_cache=True, **limit).logits
        rest = rest[:, -_PROBE_COMPARED:].float()
        kept = [*zip(_tensors(whole.cache), _tensors(parts.cache), strict=True)]
        is_short = model.dtype in (torch.float16, torch.bfloat16)
        allowed = _TOLERANCE * plain.std()
        if is_short and (plain - rest).abs().max() > allowed:
            limit = limit_logits(model, _PROBE_LENGTH + _PROBE_COMPARED)
            same = model(input_ids=longer, use_cache=False, **limit).logits[:, :-_PROBE_LENGTH][:, -_PROBE_COMPARED:]
            allowed = max(allowed, _TIMES_ROUNDING * (plain - same.float()).abs().max())
    except (LookupError, TypeError, ValueError, AttributeError, NotImplementedError, RuntimeError):
        return False
    tolerance = _TOLERANCE_16 if is_short else _TOLERANCE
    return bool((plain - rest).abs().max() <= allowed) and all(
        one.shape == other.shape and _is_alike(one.float(), other.float(), tolerance) for one, other in kept
    )


def _is_alike(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    return bool((one - other).abs().mean() <= tolerance * one.abs().mean())


def _tensors(cache: Any) -> list[torch.Tensor]:
    """Return the numbers in the layers of a cache, always in the same order."""
    found: list[torch.Tensor] = []
    waiting = [vars(layer) for layer in cache.layers]
    while waiting:
        for _, value in sorted(waiting.pop(0).items()):
            if isinstance(value, dict):
                waiting.append(value)
            elif isinstance(value, torch.Tensor) and value.is_floating_point():
                found.append(value)
    return found
