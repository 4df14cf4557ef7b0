"""How a model takes and returns its cache, and whether decoding from one gives the logits of a single call.

Versions of transformers name the cache differently (`past_key_values` until 5.23, `cache` since), so it is recognized
by its method `get_seq_length` and by the annotation of the argument. The check after converting runs in a process
without ctxext, where this file is imported beside the script.
"""

import inspect
from typing import Any

NAMES = ("cache", "past_key_values")
"""The names of the argument in classes that do not annotate it."""
PROMPTS = (44, 34, 29)
"""Tokens of each text before decoding begins."""
DECODED = 4
"""Tokens of each text that are decoded one by one."""
LENGTH = 32
"""The original context length for which methods are set in this check, so that short texts exceed it."""
TOLERANCE = 1e-4
"""Largest difference of decoded logits from those of one call, relative to the largest."""


def cache_argument(model: Any) -> str:
    """Return the name of the argument by which a model takes its cache.

    Raises:
        LookupError: the model's forward has none.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # Of an adapter.
    kind = inner if isinstance(inner, type) else type(inner)
    for forward in (vars(cls)["forward"] for cls in kind.__mro__ if "forward" in vars(cls)):
        parameters = inspect.signature(forward).parameters
        annotated = (name for name, parameter in parameters.items() if "Cache" in str(parameter.annotation))
        if name := next(annotated, None) or next((name for name in NAMES if name in parameters), None):
            return name
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            break  # Otherwise it may pass a cache on to the class that it extends.
    raise LookupError(f"{kind.__name__}.forward has no argument for a cache")


def cache_of(output: Any) -> Any:
    """Return the cache in the output of a model that was called with `use_cache`.

    Raises:
        LookupError: no value of the output has `get_seq_length`.
    """
    found = next((value for value in output.values() if hasattr(value, "get_seq_length")), None)
    if found is None:
        raise LookupError(f"{type(output).__name__} has no cache: none of {', '.join(output)} has get_seq_length")
    return found


def decode(model: Any, texts: list[Any], *, gives_positions: bool) -> list[Any]:
    """Return the logits of each text (l, v): the prompts in one left-padded batch, then one token a call."""
    import torch

    width, name = max(text.shape[1] for text in texts), cache_argument(model)
    ids = torch.cat([torch.nn.functional.pad(text, (width - text.shape[1], 0)) for text in texts])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(text), (width - text.shape[1], 0)) for text in texts])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    start, end, parts = 0, width - DECODED, []
    cache: dict[str, Any] = {}
    while start < width:
        given = {"position_ids": positions[:, start:end]} if gives_positions else {}
        output = model(ids[:, start:end], attention_mask=mask[:, :end], use_cache=True, **cache, **given)
        cache = {name: cache_of(output)}
        if (held := int(cache[name].get_seq_length())) != end:
            raise ValueError(f"its cache holds {held} tokens after {end} tokens")
        parts.append(output.logits)
        start, end = end, end + 1
    logits = torch.cat(parts, 1)
    return [row[width - text.shape[1] :] for row, text in zip(logits, texts, strict=True)]


def in_one_call(model: Any, text: Any, *, orders: bool) -> Any:
    """Return the logits of a text (1, l) alone, (l, v), in one call.

    If the prompt alone orders the heads, the other tokens need a call after it.
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
        orders: Whether the prompt alone orders the heads.

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
        expected = [in_one_call(model, text, orders=orders) for text in texts]
        scale = torch.stack([logits.abs().max() for logits in expected]).max().clamp(min=1e-30)
        for gives_positions in (True, False) if takes_positions else (False,):
            decoded = decode(model, texts, gives_positions=gives_positions)
            off = [(one - other).abs().max() for one, other in zip(decoded, expected, strict=True)]
            name = "with position_ids" if gives_positions else "without position_ids"
            differences[name] = (torch.stack(off).max() / scale).item()  # Python's max would lose NaN.
    return differences


def compare_decoding(model: Any, steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare decoding from a cache with one call: the differences by name, or the `error` that a call raised."""
    orders = any(step["method"] == "mspoe" and not {"ranks", "heads"} & step.keys() for step in steps)
    try:
        return decoding_difference(model, orders=orders)
    except Exception as error:  # Whatever the model or its cache raises is the finding.
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def explain_decoding(decoding: dict[str, Any], stock: Any) -> str:
    """Return why decoding is wrong; empty if it is right, or no better in the stock model."""
    wrong = {name: off for name, off in decoding.items() if name == "error" or not off <= TOLERANCE}
    if not wrong:
        return ""
    unchanged = compare_decoding(stock, [])
    if "error" in wrong:
        return "" if "error" in unchanged else str(wrong["error"])
    # Some families decode padded rows inexactly (Zamba 2), and methods enlarge such differences.
    allowed = 0.0 if "error" in unchanged else 10 * max(unchanged.values(), default=0.0)
    for name, off in wrong.items():
        if not off <= allowed and "error" not in unchanged:
            return f"left-padded rows {name} differ from one call by {off:.1e}"
    return ""
