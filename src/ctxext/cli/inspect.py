"""`ctxext inspect`: show the position encoding and context length of a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass

from ctxext.checkpoint.geometry import MAXIMUM
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.cli.methods import experimental_names
from ctxext.cli.options import SourceArgument, takes_options
from ctxext.cli.output import Output, bold, label_table
from ctxext.converters.engine_support import MARKS, Serving
from ctxext.converters.inspection import Inspection, inspect_checkpoint
from ctxext.files.length import format_length, read_words
from ctxext.gguf import is_gguf
from ctxext.options import HubOptions, original_length_option
from ctxext.recipes.recipe import describe_steps
from ctxext.recipes.registry import method_named

_ENCODINGS = {
    "learned": "learned position embeddings: a table with one row per position",
    "sinusoidal": "sinusoidal position embeddings",
    "alibi": "ALiBi: attention biases proportional to the distance",
    "buckets": "learned biases or embeddings for buckets of distances (T5, DeBERTa)",
    "memory": "relative positions and a memory of earlier segments",
    "relative": "relative positions",
    "none": "no position encoding",
}


@dataclass(frozen=True, kw_only=True)
class Opening(HubOptions):
    """Options for opening a checkpoint."""

    original_length: int | None = original_length_option()

    def __post_init__(self) -> None:
        read_words(self)


@takes_options(without=("verbose",))
def inspect(
    source: SourceArgument,
    *,
    options: Opening,
    output: Output,
) -> None:
    """Show a checkpoint's position encoding, context length and applicable methods. Does not load weights.

    Examples:
    ctxext inspect demo

    ctxext inspect Qwen/Qwen3-8B --json
    """
    if is_gguf(source):
        from ctxext.cli.gguf import inspect_file

        inspect_file(source, options.original_length, output)
        return
    checkpoint = open_checkpoint(source, weights=False, **vars(options))
    inspection = inspect_checkpoint(checkpoint)
    table = label_table()
    for label, text in _rows(inspection).items():
        table.add_row(bold(label), text)
    output.result(inspection.to_dict(source), table, *unconverted_text(inspection.source_commands))
    able = [name for name, reason in inspection.methods.items() if not reason]
    if inspection.model and not inspection.model.is_extended and able:
        length = format_length(4 * inspection.model.encoding.trained_length)
        method = "yarn" if "yarn" in able else able[0]
        option = "--mem-len" if hasattr(method_named(method), "mem_len") else "--target-length"
        words = ("--method", method, option, length, "--dry-run")
        output.next_step("ctxext", "convert", source, *words)


def _rows(inspection: Inspection) -> dict[str, str]:
    model = inspection.family.model_type
    if inspection.num_parameters:
        model += f" · {_count(inspection.num_parameters)} parameters"
    rows = {"model": model, "encoding": _encoding(inspection)}
    if inspection.bound:
        rows["bounds"] = inspection.bound
    if inspection.model is not None and inspection.model.encoding.limits_inputs:
        rows["context length"] = _context_length(inspection)
    if inspection.pipeline is not None:
        rows["pipeline"] = f"{inspection.pipeline}; limit {min(inspection.windows.values())} tokens"
    if inspection.rotary is not None:
        origin = inspection.rotary.length_origin
        if inspection.rotary.lacks_original:
            origin = f"{MAXIMUM}; the length before its schedule is unknown, specify it with --original-length"
        rows["original"] = f"{inspection.rotary.trained_length} tokens ({origin})"
    sizes = inspection.attention
    rows["attention"] = "not specified in config.json"
    if sizes["heads"] is not None and sizes["head_dim"] is not None:
        full, sliding, layers = (sizes[key] for key in ("full_attention_layers", "sliding_layers", "layers"))
        kinds = f"{full} of {layers} layers full" + (f", {sliding} sliding" if sliding else "")
        heads = f"{sizes['heads']} heads, {sizes['key_heads']} KV heads of size {sizes['head_dim']}"
        rows["attention"] = f"{heads} · {kinds}"
    if inspection.cache_bytes and any(inspection.cache_bytes.values()):
        memory = " · ".join(f"{format_length(n)} {_size(size)}" for n, size in inspection.cache_bytes.items())
        rows["cache"] = f"{memory}   (16 bits, one sequence)"
    if inspection.recipe:
        rows["recipe"] = describe_steps(inspection.recipe["steps"])
        rows["engines"] = serving_line(inspection.serving)
    if inspection.caution:
        rows["caution"] = inspection.caution
    experimental = experimental_names()
    able = [name for name, reason in inspection.methods.items() if not reason]
    rows["methods"] = " ".join(name for name in able if name not in experimental) or "-"
    if more := " ".join(name for name in able if name in experimental):
        rows["experimental"] = more
    reasons: dict[str, list[str]] = {}
    for name, reason in inspection.methods.items():
        if reason and name not in experimental:
            reasons.setdefault(reason, []).append(name)
    for number, (reason, names) in enumerate(reasons.items()):
        rows["not applicable" if number == 0 else " " * number] = f"{', '.join(names)}: {reason}"
    return rows


def _encoding(inspection: Inspection) -> str:
    if inspection.model is None:
        return _ENCODINGS.get(inspection.positions, "rotary, but it cannot be rescaled")
    unfinished = ""
    if inspection.rotary is not None and inspection.unfinished_pairs is not None:
        pairs = f"{inspection.unfinished_pairs} of {inspection.rotary.dim // 2} pairs"
        unfinished = f", {pairs} never complete a rotation in {inspection.rotary.trained_length} tokens"
    return inspection.model.encoding.describe() + unfinished


def _context_length(inspection: Inspection) -> str:
    assert inspection.model is not None
    claims = set(inspection.windows.values())
    agree = "files agree" if len(claims) == 1 else ", ".join(f"{k}: {v}" for k, v in inspection.windows.items())
    encoding = inspection.model.encoding
    if inspection.recipe and inspection.model.is_extended:
        is_longer = encoding.usable_length > encoding.trained_length
        state = "extended by ctxext" if is_longer else "not extended, heads scaled by its modeling code"
    elif encoding.is_scaled:
        state = f"extended by its schedule, {encoding.schedule_summary}"
    elif encoding.declared_length:
        state = f"not extended; {encoding.declared_length} are declared, but no schedule extends it"
    else:
        state = "not extended"
    if inspection.default_length:
        agree = "not in config.json: the default of its configuration class"
    return f"{encoding.usable_length} tokens, {state} ({agree})"


def _count(number: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:,.1f} {unit}"
    return str(number)


def _size(number: int) -> str:
    return f"{number / 2**30:,.1f} GiB" if number >= 2**30 else f"{number / 2**20:,.1f} MiB"


def serving_line(serving: tuple[Serving, ...]) -> str:
    """Format the inference engines and their status in one line."""
    return "   ".join(f"{row.engine} {MARKS[row.status]}" + (f" ({row.note})" if row.note else "") for row in serving)


def unconverted_text(lines: Mapping[str, str]) -> list[str]:
    """Return the commands that serve the source without converting it, each on a line that can be copied."""
    commands = [f"  {line}" for line in lines.values()]
    if "vLLM" in lines:
        commands.append("  (a draft model does not inherit --hf-overrides: pass it separately, or convert)")
    return ["The source can also be served without converting it:", *commands] if commands else []
