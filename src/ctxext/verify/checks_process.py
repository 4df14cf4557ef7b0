"""Checks of a loaded model other than its attention; `clean_process.py` runs them in a process without ctxext.

Versions of transformers name the cache differently (`past_key_values` until 5.23, `cache` since), so it is recognized
by its method `get_seq_length` and by the annotation of the argument.
"""

import contextlib
import inspect
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .references import REFERENCES

LOADED = "loaded"
"""Printed after the converted model's first output: later failures are not the model's."""


def load_stock(out: Path, config: dict[str, Any], **options: Any) -> Any:
    """Load the weights of a checkpoint under a stock configuration, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config))
        for path in out.iterdir():
            if path.suffix in (".safetensors", ".bin") or path.name.endswith(".index.json"):
                (folder / path.name).symlink_to(path.resolve())
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()


@contextlib.contextmanager
def replace_functions(space: dict[str, Any], functions: dict[str, Any]) -> Iterator[None]:
    """Replace functions in a module's namespace, by name, for the duration of the context."""
    before = {name: space[name] for name in functions if name in space}
    space.update(functions)
    try:
        yield
    finally:
        for name in functions.keys() - before.keys():
            space.pop(name, None)
        space.update(before)


def differences(logits: Any, unchanged: Any, expected: Any) -> dict[str, float]:
    """Return the largest differences of converted and of stock logits from the expected logits, and their scale."""
    numbers = {"difference": logits - expected, "scale": expected, "change": unchanged - expected}
    return {name: number.abs().max().item() for name, number in numbers.items()}


def rotary_modules(model: Any) -> list[dict[str, Any]]:
    """Return name, layer type, inverse frequencies and scaling of each rotary embedding."""
    entries = []
    for name, buffer in model.named_buffers():
        module_name, _, buffer_name = name.rpartition(".")
        if not buffer_name.endswith("inv_freq") or "original" in buffer_name or buffer.dim() != 1:
            continue
        layer_type = buffer_name.removesuffix("inv_freq").rstrip("_")
        module = model.get_submodule(module_name)
        scaling = getattr(module, f"{layer_type}_attention_scaling" if layer_type else "attention_scaling", 1.0)
        entry = {"module": module_name, "layer_type": layer_type, "frequencies": buffer.float().tolist()}
        entries.append({**entry, "scaling": float(scaling if scaling is not None else 1.0)})
    return entries


def score_factors(model: Any) -> dict[str, float]:
    """Return the factor on the scores of each latent attention, relative to the square root of its head size."""
    return {
        name: float(module.scaling) * module.qk_head_dim**0.5
        for name, module in model.named_modules()
        if hasattr(module, "qk_head_dim") and hasattr(module, "scaling")
    }


def load(task: dict[str, Any]) -> dict[str, Any]:
    """Load a model and describe it: class, number of parameters, missing weights, `rotary_modules`, `score_factors`.

    The task has `folder`, `trust` and `auto`, the Auto class that loads it.
    """
    import transformers

    model, info = getattr(transformers, task["auto"]).from_pretrained(
        task["folder"], trust_remote_code=task["trust"], dtype="auto", output_loading_info=True
    )
    return {
        "name": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "missing": sorted(map(str, info["missing_keys"])),
        "rotary": rotary_modules(model),
        "scores": score_factors(model),
    }


def compare_table(task: dict[str, Any], model: Any, name: str, origin: str | None) -> dict[str, Any]:
    """Compare a table with that of the reference, computed from the original rows."""
    import torch
    from safetensors import safe_open

    reference, special = REFERENCES[task["numbers"]["method"]], task["special"]
    ending = next(ending for ending in task["endings"] if name.endswith(ending))
    parameters = model.named_parameters()  # Classes differ in the prefix of a name.
    table = next(weight for full, weight in parameters if full == ending or full.endswith("." + ending)).detach()
    rows = table[special:].double()
    if len(rows) != task["count"]:
        return {"name": name, "rows": len(rows)}
    if origin is None:
        indices = reference.original(task["numbers"], rows, task["length"], task["count"])
        if indices is None:
            return {"name": name, "rows": len(rows), "unknown": True}
        old, same = rows[indices], True
    else:
        with safe_open(origin, framework="pt") as file:
            source = file.get_tensor(name)
        old, same = (
            source[special : special + task["length"]].double(),
            torch.equal(source[:special].to(table.dtype), table[:special]),
        )
    expected = reference.rows(task["numbers"], old, task["count"])
    difference = (rows - expected.to(table.dtype).double()).abs().max().item()
    is_kept = bool(torch.equal(rows[: len(old)], old))
    scale = expected.abs().max().item()
    return {"name": name, "rows": len(rows), "difference": difference, "scale": scale, "same": same, "kept": is_kept}


def compare_tables(task: dict[str, Any]) -> dict[str, Any]:
    """Compare the position tables of a loaded model with the reference.

    The task has `folder`; `auto`, the Auto class that loads it; `tables`, the source's file, if known, by the name of
    the table in the weights; `endings`; `special`; `length` and `count`, the old and new number of positions; and
    `numbers`, the step.
    """
    import torch
    import transformers

    model = getattr(transformers, task["auto"]).from_pretrained(task["folder"], dtype="auto")
    tables = [compare_table(task, model, name, origin) for name, origin in task["tables"].items()]
    epsilon = torch.finfo(next(iter(model.parameters())).dtype).eps
    return {"tables": tables, "epsilon": epsilon}


SMALL = {"d_model": 8, "d_kv": 4, "d_ff": 8, "vocab_size": 16, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 1}
SMALL |= {"num_experts": 1, "num_sparse_encoder_layers": 0, "num_sparse_decoder_layers": 0}
TABLE = "relative_attention_bias"


def record_lookups(folder: str, length: int) -> list[tuple[bool, Any]]:
    """Return for each table whether its stack is bidirectional, and the buckets (queries, keys) of its lookups."""
    import torch
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(folder)
    for name, value in SMALL.items():
        if hasattr(config, name):
            setattr(config, name, value)
    lookups = list[tuple[bool, Any]]()
    model = AutoModel.from_config(config).eval()
    for name, module in model.named_modules():
        if name.endswith(f".{TABLE}") and "global" not in name:
            is_encoder = name.startswith("encoder")
            module.register_forward_pre_hook(lambda _, args, kind=is_encoder: lookups.append((kind, args[0])))
    ids = torch.ones(1, length, dtype=torch.long)
    with torch.no_grad():
        model(input_ids=ids, decoder_input_ids=ids)
    return lookups


def compare_buckets(task: dict[str, Any]) -> dict[str, Any]:
    """Compare every bucket of distances that a model looks up with the reference.

    The task has `folder`; `numbers`, the step; and `source`, the source's `distance` and `num_buckets`. Buckets depend
    only on config.json, so the lookups of a tiny model with the checkpoint's configuration are compared. Its input is
    longer than any distance that it distinguishes, up to 2000 tokens.
    """
    reference, source = REFERENCES[task["numbers"]["method"]], task["source"]
    length = min(int(source["distance"] * task["numbers"]["factor"]) + 20, 2000)
    wrong, distances, lookups = set(), set(), record_lookups(task["folder"], length)
    for is_encoder, buckets in lookups:
        queries, keys = buckets.shape[-2:]
        offset = queries if keys == 3 * queries else 0  # A block of LongT5 attends to itself and its neighbours.
        for query in {0, queries // 2, queries - 1}:
            for key, bucket in enumerate(buckets.reshape(-1, queries, keys)[0, query].tolist()):
                relative = key - offset - query
                if not is_encoder and relative > 0:
                    continue  # Masked.
                place = reference.bucket(task["numbers"], {**source, "bidirectional": is_encoder}, relative)
                distances.add(relative)
                # Rounding decides if the logarithm is a whole number.
                if bucket not in (int(place - 1e-4), int(place + 1e-4)):
                    wrong.add(relative)
    return {"stacks": len(lookups), "distances": len(distances), "wrong": sorted(wrong, key=abs)}


BUILDERS = ("build_alibi_tensor", "build_mpt_alibi_tensor")


def token_by_token(stock: Any, input_ids: Any, settings: dict[str, Any], reference: Any) -> Any:
    """Compute the logits of the stock model with the reference's slopes for each query position."""
    import torch

    space = vars(sys.modules[type(stock).__module__])
    name = next(name for name in BUILDERS if name in space)
    heads, logits, cache = stock.config.num_attention_heads, [], dict[str, Any]()
    # Falcon rounds slopes, positions and their products, but not the factors of a row.
    dtype = torch.bfloat16 if stock.config.model_type == "falcon" else torch.float32
    plain = torch.tensor(reference.slopes({**settings, "factor": 1}, heads, 0))
    for row in range(input_ids.shape[1]):
        shares = torch.tensor(reference.slopes(settings, heads, row)) / plain
        bias = (plain.to(dtype)[:, None] * torch.arange(row + 1)).float() * shares[:, None]
        mask = torch.ones(1, row + 1, dtype=torch.long)
        build = lambda *args, bias=bias, **kwargs: bias[:, None]  # noqa: E731
        with replace_functions(space, {name: build}), torch.no_grad():
            out = stock(input_ids[:, row : row + 1], attention_mask=mask, use_cache=True, **cache)
        cache = {cache_argument(stock): cache_of(out)}
        logits.append(out.logits)
    return torch.cat(logits, 1)


SHIFT = 5
"""Padding on the left of the second row of a batch with ALiBi."""


def run_in_calls(
    model: Any, ids: Any, sizes: list[int], *, is_padded: bool = False, drafts: int = 0, swaps: bool = False
) -> list[Any]:
    """Return the logits of a text (1, l) in calls of these sizes, (l, v); if padded, also those of a second row.

    That row has the same tokens after padding. If set, `drafts` tokens are read before each call but the first and
    removed from the cache, as in assisted generation. With `swaps` the rows change places in the cache after the first
    call, as in beam search.
    """
    import torch

    length, order = ids.shape[1], [0, 1][: 1 + is_padded]
    rows = torch.cat([ids, ids.roll(SHIFT, 1)][: len(order)])
    mask = torch.ones(len(order), length + drafts, dtype=torch.long)
    mask[1:, :SHIFT] = 0
    cache, parts, start = dict[str, Any](), list[Any](), 0

    def call(tokens: Any, stop: int) -> Any:
        output = model(tokens[order], attention_mask=mask[order, :stop], use_cache=True, **cache)
        cache[cache_argument(model)] = cache_of(output)
        return output.logits[order]

    for size in sizes:
        if swaps and start and order[0] == 0:
            order.reverse()
            next(iter(cache.values())).reorder_cache(torch.tensor(order))
        if drafts and start:
            call(rows.flip(1)[:, :drafts], start + drafts)
            crop(next(iter(cache.values())), drafts)
        parts.append(call(rows[:, start : start + size], start + size))
        start += size
    logits = torch.cat(parts, 1)
    return [logits[0], *logits[1:, SHIFT:]]


def backend_of(model: Any) -> str:
    """Return the attention implementation of a model."""
    return model.config.get_text_config()._attn_implementation or "eager"


def describe(error: Exception) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def run_slope_forms(model: Any, ids: Any, length: int) -> dict[str, Any]:
    """Return the logits of a text with ALiBi by form, or an error, text.

    Args:
        model: A causal language model. Not all of these families can change their attention implementation.
        ids: The text (1, l).
        length: The original context length.
    """
    import torch

    # The first chunk is within the original context length; the second is too, by its size, but ends beyond it.
    inside, end = length // 2 or 1, ids.shape[1] - 3
    calls, forms = [end - length, length, 1, 1, 1], dict[str, Any]()
    ways: dict[str, tuple[list[int], dict[str, Any]]] = {
        "chunks": ([inside, length, end - inside - length, 1, 1, 1], {}),
        "padded": (calls, {"is_padded": True}),
        "drafts": (calls, {"drafts": 4}),
        "beams": (calls, {"is_padded": True, "swaps": True}),
    }
    for name, (sizes, options) in ways.items():
        form = f"{name} ({backend_of(model)})"
        try:
            with torch.no_grad():
                forms[form] = run_in_calls(model, ids, sizes, **options)
        except Exception as error:  # Any exception of the model or its cache is the result.
            forms[form] = describe(error)
    return forms


def compare_slopes(task: dict[str, Any]) -> dict[str, Any]:
    """Load a checkpoint with ALiBi and compare its logits with the reference, in every form.

    The task has `folder`; `stock`, the config.json of the same model without code; `steps`, its only method with
    settings; and `count`, a number of tokens. The expected logits come from the stock model, which decodes token by
    token with the slopes of each position; it shares no code with the checkpoint.

    The original context length is set to a third of the tokens, in the loaded model and for the reference, so that
    few tokens exceed it. The check of the configuration verifies the value in config.json.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    out, (step,) = Path(task["folder"]), task["steps"]
    settings = {**step, "original_length": max(task["count"] // 3, 1)}
    config = AutoConfig.from_pretrained(out, trust_remote_code=True)
    config.ctxext_code["steps"] = [settings]
    if hasattr(config, "max_seq_len"):  # The longest input of MPT.
        config.max_seq_len = max(config.max_seq_len, task["count"])
    loaded = AutoModelForCausalLM.from_pretrained(
        out, config=config, trust_remote_code=True, dtype=torch.float32
    ).eval()
    input_ids = torch.randint(0, config.vocab_size, (1, task["count"]))
    with torch.no_grad():
        logits = loaded(input_ids, attention_mask=torch.ones_like(input_ids), use_cache=False).logits
    forms: dict[str, Any] = {f"one call ({backend_of(loaded)})": [logits[0]]}
    forms |= run_slope_forms(loaded, input_ids, settings["original_length"])
    decoding = compare_decoding(loaded, [settings])
    del loaded
    print(LOADED, flush=True)  # noqa: T201
    stock = load_stock(out, task["stock"])
    with torch.no_grad():
        unchanged = stock(input_ids, attention_mask=torch.ones_like(input_ids), use_cache=False).logits
    expected = token_by_token(stock, input_ids, settings, REFERENCES[step["method"]])
    results = differences(logits, unchanged, expected)
    by_form = {name: form if isinstance(form, str) else off_by(form, expected[0]) for name, form in forms.items()}
    unusable = list[str]()
    if any(isinstance(form, str) for form in by_form.values()):
        unchanged_forms = run_slope_forms(stock, input_ids, settings["original_length"])
        names = [name for name, form in unchanged_forms.items() if isinstance(form, str)]
        unusable = [name for name in names if isinstance(by_form[name], str)]
    return {
        **results,
        "forms": {name: off for name, off in by_form.items() if name not in unusable},
        "unusable": unusable,
        "decoding": explain_decoding(decoding, stock),
    }


def off_by(rows: list[Any], expected: Any) -> float:
    """Return the largest difference of the logits of rows from the expected ones, relative to the largest of these."""
    import torch

    off = [(row - expected[: len(row)]).abs().max() for row in rows]
    return float(torch.stack(off).max() / expected.abs().max().clamp(min=1e-30))  # Python's max would lose NaN.


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
"""Factor by which methods may enlarge a difference that the stock model has too."""


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
    """Return whether the stock model raises an error too, or differs similarly: a wrong result proves nothing then."""
    if isinstance(unchanged, str):
        return is_wrong(result)
    return not isinstance(result, str) and is_wrong(unchanged) and TOLERANCE < result <= ENLARGED * unchanged


def explain_decoding(decoding: dict[str, Any], stock: Any) -> str:
    """Return why decoding is wrong; empty if it is correct, or as wrong in the stock model."""
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
