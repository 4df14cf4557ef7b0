"""The check of decoding from a cache, for a process without ctxext.

Versions of transformers name the cache differently (`past_key_values` until 5.23, `cache` since), so it is recognized
by its method `get_seq_length` and by the annotation of the argument.
"""

import inspect
from typing import Any

from .model_process import describe

NAMES = ("cache", "past_key_values")
"""Names of the cache argument in classes without its annotation."""
PROMPTS = (46, 36, 31)
"""Tokens of each text before the decode steps."""
DECODED = 4
"""Decode steps per text."""
LENGTH = 34
"""The original context length in this check, so that short texts exceed it. Twice it is no multiple of 16."""
TOLERANCE = 1e-4
"""Largest difference between decoded logits and those of one call, relative to the largest logit."""
ENLARGED = 10
"""Factor by which methods may enlarge a difference that the unmodified model has too."""


def crop(cache: Any, num_tokens: int) -> None:
    """Remove the last tokens of a cache; in transformers 5.9, its layers that have not run would fail."""
    for layer in getattr(cache, "layers", ()):
        if not getattr(layer, "is_initialized", True):
            layer.crop = lambda _: None
    cache.crop(-num_tokens)


def cache_argument(model: Any) -> str:
    """Return the name of the argument by which a model takes its cache.

    Raises:
        LookupError: the model's forward has none.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # For models with an adapter.
    kind = inner if isinstance(inner, type) else type(inner)
    for forward in (vars(cls)["forward"] for cls in kind.__mro__ if "forward" in vars(cls)):
        parameters = inspect.signature(forward).parameters
        annotated = (name for name, parameter in parameters.items() if "Cache" in str(parameter.annotation))
        if name := next(annotated, None) or next((name for name in NAMES if name in parameters), None):
            return name
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            break  # Otherwise it may pass a cache to its base class.
    raise LookupError(f"{kind.__name__}.forward has no argument for a cache")


def cache_of(output: Any) -> Any:
    """Return the cache in the output of a model that was called with `use_cache`.

    Raises:
        LookupError: no value of the output has `get_seq_length`.
    """
    cache = next((value for value in output.values() if hasattr(value, "get_seq_length")), None)
    if cache is None:
        raise LookupError(f"{type(output).__name__} has no cache: none of {', '.join(output)} has get_seq_length")
    return cache


def decode(model: Any, texts: list[Any], *, gives_positions: bool) -> list[Any]:
    """Return the logits of each text (l, v): the prompts in one left-padded batch, then one token per call."""
    import torch

    width, name = max(text.shape[1] for text in texts), cache_argument(model)
    ids = torch.cat([torch.nn.functional.pad(text, (width - text.shape[1], 0)) for text in texts])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(text), (width - text.shape[1], 0)) for text in texts])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    start, end, parts = 0, width - DECODED, []
    cache: dict[str, Any] = {}
    while start < width:
        arguments = {"position_ids": positions[:, start:end]} if gives_positions else {}
        output = model(ids[:, start:end], attention_mask=mask[:, :end], use_cache=True, **cache, **arguments)
        cache = {name: cache_of(output)}
        if (count := int(cache[name].get_seq_length())) != end:
            raise ValueError(f"its cache contains {count} tokens after {end} tokens")
        parts.append(output.logits)
        start, end = end, end + 1
    logits = torch.cat(parts, 1)
    return [row[width - text.shape[1] :] for row, text in zip(logits, texts, strict=True)]


def compute_in_one_call(model: Any, text: Any, *, orders: bool) -> Any:
    """Return the logits of a text (1, l) alone, (l, v), in one call.

    If only the prompt orders the heads, the other tokens need a second call.
    """
    import torch

    if not orders:
        return model(text, attention_mask=torch.ones_like(text), use_cache=False).logits[0]
    prompt, mask = text.shape[1] - DECODED, torch.ones_like(text)
    first = model(text[:, :prompt], attention_mask=mask[:, :prompt], use_cache=True)
    rest = model(text[:, prompt:], attention_mask=mask, use_cache=True, **{cache_argument(model): cache_of(first)})
    return torch.cat([first.logits, rest.logits], 1)[0]


def decoding_difference(model: Any, *, orders: bool = False) -> dict[str, float]:
    """Return the largest difference of decoded logits from those of one call, with and without position_ids.

    Each is relative to the largest logit.

    Args:
        model: A causal language model.
        orders: Whether only the prompt orders the heads.

    Raises:
        LookupError: the model takes or returns no cache.
    """
    import torch

    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    differences = {}
    with torch.no_grad():
        vocabulary, generator = model.config.get_text_config().vocab_size, torch.Generator().manual_seed(0)
        lengths = (prompt + DECODED for prompt in PROMPTS)
        texts = [torch.randint(0, vocabulary, (1, length), generator=generator) for length in lengths]
        expected = [compute_in_one_call(model, text, orders=orders) for text in texts]
        scale = torch.stack([logits.abs().max() for logits in expected]).max().clamp(min=1e-30)
        for gives_positions in (True, False) if takes_positions else (False,):
            decoded = decode(model, texts, gives_positions=gives_positions)
            off = [(actual - logits).abs().max() for actual, logits in zip(decoded, expected, strict=True)]
            name = "with position_ids" if gives_positions else "without position_ids"
            differences[name] = (torch.stack(off).max() / scale).item()  # Python's max would lose NaN.
    return differences


def compare_decoding(model: Any, steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare decoding from a cache with one call; return the differences by name, or the `error` that was raised."""
    orders = any(step["method"] == "mspoe" and "ranks" not in step for step in steps)
    try:
        return decoding_difference(model, orders=orders)
    except Exception as error:  # Any exception of the model or its cache is the result.
        return {"error": describe(error)}


def is_wrong(result: Any) -> bool:
    """Return whether a result is an error, or a difference above the tolerance."""
    return isinstance(result, str) or not result <= TOLERANCE


def is_as_wrong(result: Any, unchanged: Any) -> bool:
    """Return whether the unmodified model raises an error too, or is similarly wrong, so that nothing is proven."""
    if isinstance(unchanged, str):
        return is_wrong(result)
    return not isinstance(result, str) and is_wrong(unchanged) and TOLERANCE < result <= ENLARGED * unchanged


def explain_decoding(decoding: dict[str, Any], stock: Any) -> str:
    """Return why decoding is wrong; empty if it is correct, or as wrong in the unmodified model."""
    wrong = {name: off for name, off in decoding.items() if is_wrong(off)}
    if not wrong:
        return ""
    unchanged = compare_decoding(stock, [])
    if "error" in wrong:
        return "" if "error" in unchanged else str(wrong["error"])
    # Some families decode padded rows inexactly (Zamba 2).
    allowed = 0.0 if "error" in unchanged else ENLARGED * max(unchanged.values(), default=0.0)
    for name, off in wrong.items():
        if not off <= allowed and "error" not in unchanged:
            return f"left-padded rows {name} differ from one call by {off:.1e}"
    return ""
