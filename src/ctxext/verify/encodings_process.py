"""Checks of position tables, buckets of distances and ALiBi slopes, for a process without ctxext."""

import sys
from pathlib import Path
from typing import Any

import torch

from .decoding_process import cache_argument, cache_of, compare_decoding, explain_decoding
from .forms_process import Way, run_calls
from .model_process import LOADED, backend_of, describe, load_stock, replace_functions
from .references import REFERENCES


def differences(logits: Any, unchanged: Any, expected: Any) -> dict[str, float]:
    """Return the largest differences of converted and of stock logits from the expected logits, and their scale."""
    numbers = {"difference": logits - expected, "scale": expected, "change": unchanged - expected}
    return {name: number.abs().max().item() for name, number in numbers.items()}


def compare_table(task: dict[str, Any], model: Any, name: str, origin: str | None) -> dict[str, Any]:
    """Compare a table with that of the reference, computed from the original rows."""
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
    first = (task["count"] - len(old)) // 2 if task["numbers"].get("distances") else 0
    is_kept = bool(torch.equal(rows[first : first + len(old)], old))
    scale = expected.abs().max().item()
    return {"name": name, "rows": len(rows), "difference": difference, "scale": scale, "same": same, "kept": is_kept}


def compare_tables(task: dict[str, Any]) -> dict[str, Any]:
    """Compare the position tables of a loaded model with the reference.

    The task has `folder`; `auto`, the Auto class that loads it; `tables`, the source's file, if known, by the name of
    the table in the weights; `endings`; `special`; `length` and `count`, the old and new number of positions or of rows
    for distances; and `numbers`, the step, with `distances` for such a table.
    """
    import transformers

    model = getattr(transformers, task["auto"]).from_pretrained(task["folder"], dtype="auto")
    tables = [compare_table(task, model, name, origin) for name, origin in task["tables"].items()]
    epsilon = torch.finfo(next(iter(model.parameters())).dtype).eps
    return {"tables": tables, "epsilon": epsilon}


SMALL = {"d_model": 8, "d_kv": 4, "d_ff": 8, "vocab_size": 16, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 1}
SMALL |= {"num_experts": 1, "num_sparse_encoder_layers": 0, "num_sparse_decoder_layers": 0}
SMALL |= {"hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1, "intermediate_size": 8}
SMALL |= {"embedding_size": 8, "attention_head_size": 8, "pad_token_id": 0, "pooler_hidden_size": 8}
TABLE = "relative_attention_bias"


def build_small(folder: str, small: dict[str, Any]) -> Any:
    """Return a small model with random weights and the checkpoint's configuration of positions."""
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(folder)
    for name, value in small.items():
        if hasattr(config, name):
            setattr(config, name, value)
    torch.manual_seed(0)
    return AutoModel.from_config(config).eval()


def record_rows(folder: str, length: int) -> list[tuple[bool, Any]]:
    """Return True, for a bidirectional encoder, and the rows (queries, keys) of DeBERTa's table that it looks up."""
    rows, model = list[tuple[bool, Any]](), build_small(folder, SMALL)
    span = len(model.encoder.rel_embeddings.weight) // 2

    def record(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        rows.append((True, (kwargs["relative_pos"].long() + span).clamp(0, 2 * span - 1)))

    model.encoder.layer[0].register_forward_pre_hook(record, with_kwargs=True)
    with torch.no_grad():
        model(input_ids=torch.ones(1, length, dtype=torch.long))
    return rows


def record_lookups(folder: str, length: int) -> list[tuple[bool, Any]]:
    """Return for each table whether its stack is bidirectional, and the buckets (queries, keys) of its lookups."""
    lookups, model = list[tuple[bool, Any]](), build_small(folder, SMALL)
    for name, module in model.named_modules():
        if name.endswith(f".{TABLE}") and "global" not in name:
            is_encoder = name.startswith("encoder")
            module.register_forward_pre_hook(lambda _, args, kind=is_encoder: lookups.append((kind, args[0])))
    ids = torch.ones(1, length, dtype=torch.long)
    with torch.no_grad():
        model(input_ids=ids, decoder_input_ids=ids)
    return lookups


RECORDERS = {"t5": record_lookups, "deberta": record_rows}
"""Functions that record the buckets that a model looks up, by the formula of the buckets."""


def compare_buckets(task: dict[str, Any]) -> dict[str, Any]:
    """Compare every bucket of distances that a model looks up with the reference.

    The task has `folder`; `numbers`, the step; and `source`, the source's `formula`, `distance` and `num_buckets`.
    Buckets depend only on config.json, so the lookups of a tiny model with the checkpoint's configuration are compared.
    Its input is longer than any distance that it distinguishes, up to 2000 tokens.
    """
    reference, source = REFERENCES[task["numbers"]["method"]], task["source"]
    length = min(int(source["distance"] * task["numbers"]["factor"]) + 20, 2000)
    wrong, distances, lookups = set(), set(), RECORDERS[source["formula"]](task["folder"], length)
    for is_encoder, buckets in lookups:
        queries, keys = buckets.shape[-2:]
        offset = queries if keys == 3 * queries else 0  # A block of LongT5 attends to itself and its neighbours.
        for query in {0, queries // 2, queries - 1}:
            for key, bucket in enumerate(buckets.reshape(-1, queries, keys)[0, query].tolist()):
                relative = key - offset - query
                if not is_encoder and relative > 0:
                    continue  # The key is masked.
                place = reference.bucket(task["numbers"], {**source, "bidirectional": is_encoder}, relative)
                distances.add(relative)
                # Rounding decides if the logarithm is a whole number.
                if bucket not in (int(place - 1e-4), int(place + 1e-4)):
                    wrong.add(relative)
    return {"stacks": len(lookups), "distances": len(distances), "wrong": sorted(wrong, key=abs)}


SMALL_XLNET = {"d_model": 8, "d_inner": 8, "n_layer": 2, "n_head": 2, "d_head": 4, "vocab_size": 16}


SEGMENT = 512
"""Largest number of tokens of a segment, about: the reference computes the distances of all pairs at once."""


def compare_memory(task: dict[str, Any]) -> dict[str, Any]:
    """Compare a model that reads a text in segments with the reference, which computes them in float64.

    The task has `folder` and `numbers`, the step. Two or more segments exceed the memory, and the last is read with a
    full one. The weights are random ones of a tiny model with the checkpoint's configuration.
    """
    reference, model = REFERENCES[task["numbers"]["method"]], build_small(task["folder"], SMALL_XLNET)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    kept = task["numbers"]["mem_len"]
    count = 2 + kept // SEGMENT
    segments = [torch.randint(0, 16, (1, size)) for size in (*[kept // count + 4] * count, 8)]
    weights = {name: weight.detach().double() for name, weight in model.named_parameters()}
    expected = reference.states(weights, model.config.to_dict(), segments, kept)
    loaded, mems = list[Any](), list[Any]()
    with torch.no_grad():
        for segment in segments:
            output = model(input_ids=segment, mems=mems or None)
            mems = output.mems
            loaded.append(output.last_hidden_state)
    differences = [(a.double() - b).abs().max().item() for a, b in zip(loaded, expected, strict=True)]
    scale = max(each.abs().max().item() for each in expected)
    return {"states": len(mems[0]), "expected": kept, "difference": max(differences), "scale": scale}


BUILDERS = ("build_alibi_tensor", "build_mpt_alibi_tensor")


def token_by_token(stock: Any, input_ids: Any, settings: dict[str, Any], reference: Any) -> Any:
    """Compute the logits of the unmodified model with the reference's slopes for each query position."""
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
DRAFTS = {"continued": (4,), "decoded": (2, 2, 2)}
"""Shorter drafts than in `forms_process.py`, because MPT limits the length of its input."""


def compute_logits(model: Any, ids: Any, way: Way) -> list[Any]:
    """Return the logits (l, v) of a text (1, l), run in one way; in a batch also those of a second, padded row."""
    length, cache = ids.shape[1] + max(map(sum, way.drafts.values()), default=0), dict[str, Any]()
    place = torch.arange(length)[None] - torch.tensor([0, way.padding][: way.batch])[:, None]

    def run(first: int, end: int, order: list[int], is_draft: bool) -> Any:
        text = (
            ids[0, place[order, first:end].clamp(min=0)]
            if not is_draft
            else ids.flip(1)[[0] * way.batch, : end - first]
        )
        output = model(text, attention_mask=(place[order, :end] >= 0).long(), use_cache=True, **cache)
        cache[cache_argument(model)] = cache_of(output)
        return output.logits[order]

    logits = torch.cat([output for *_, output in run_calls(way, cache, run)], 1)
    return [row[way.padding * number :] for number, row in enumerate(logits)]


def run_slope_forms(model: Any, ids: Any, length: int) -> dict[str, Any]:
    """Return the logits of a text with ALiBi by form, or an error, text.

    Args:
        model: A causal language model. Not all of these families can change their attention implementation.
        ids: The text (1, l).
        length: The original context length.
    """
    # The first chunk is within the original context length; the second is too, by its size, but ends beyond it.
    inside, end, backend = length // 2 or 1, ids.shape[1] - 3, backend_of(model)
    calls = [("one call", end - length), ("continued", length), ("decoded", 3)]
    chunks = [("one call", inside), ("continued", length), ("continued", end - inside - length), ("decoded", 3)]
    ways = [
        Way("chunks", backend, chunks),
        Way("padded", backend, calls, batch=2, padding=SHIFT),
        Way("drafts", backend, calls, drafts=DRAFTS),
        Way("beams", backend, calls, batch=2, padding=SHIFT, swaps=True),
    ]
    forms = dict[str, Any]()
    for way in ways:
        try:
            with torch.no_grad():
                forms[f"{way.name} ({backend})"] = compute_logits(model, ids, way)
        except Exception as error:  # Any exception of the model or its cache is the result.
            forms[f"{way.name} ({backend})"] = describe(error)
    return forms


def compare_slopes(task: dict[str, Any]) -> dict[str, Any]:
    """Load a checkpoint with ALiBi and compare its logits with the reference, in every form.

    The task has `folder`; `stock`, the config.json of the same model without code; `steps`, its only method with
    settings; and `count`, a number of tokens. The expected logits come from the stock model, which decodes token by
    token with the slopes of each position; it shares no code with the checkpoint.

    The original context length is set to a third of the tokens, in the loaded model and for the reference, so that
    few tokens exceed it. The check of the configuration verifies the value in config.json.
    """
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
    off = [(row - expected[: len(row)]).abs().max() for row in rows]
    return float(torch.stack(off).max() / expected.abs().max().clamp(min=1e-30))  # Python's max would lose NaN.
