"""`convert`, `inspect` and `verify` for GGUF files instead of checkpoints."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from rich.text import Text

from ctxext.cli.output import NOT_WRITTEN, Output, bold, done_line, format_relative, label_table, mark_line
from ctxext.converters.inspection import encoding_data, methods_data, rotary_data
from ctxext.converters.options import ConvertOptions
from ctxext.errors import CtxextError
from ctxext.files.length import format_length
from ctxext.gguf.convert import GgufPlan, check_methods, convert_gguf, plan_gguf
from ctxext.gguf.model import GgufModel, describe, open_gguf, quantization
from ctxext.gguf.verify import verify_gguf
from ctxext.recipes.encodings.rotary import Rotary
from ctxext.recipes.recipe import Recipe, describe_steps


def convert_file(
    source: str, out: Path | None, recipe: Recipe, options: ConvertOptions, output: Output, *, dry_run: bool
) -> None:
    """Convert a GGUF file, or print the planned changes."""
    started = time.perf_counter()
    if options.link not in ("auto", "copy", "reflink"):
        raise CtxextError(
            f"--link {options.link} does not support GGUF files, which contain schedule and weights together.",
            hint="Remove --link.",
        )
    if options.digest or not options.check:
        flag, reason = ("--digest", "record no digests") if options.digest else ("--no-verify", "are always verified")
        raise CtxextError(f"{flag} does not support GGUF files, which {reason}.", hint=f"Remove {flag}.")
    if dry_run:
        plan = plan_gguf(source, recipe, options=options)
        table = label_table()
        for key, (old, new) in plan.changes.items():
            table.add_row(f"  {key}", f"{_format_value(old)} → {_format_value(new)}")
        content = plan_data(plan, None)
        output.result(content, bold(plan.source.path.name), table, f"  {_tensors_text(plan)}", "nothing was written")
        for caution in plan.cautions:
            output.warning(caution)
        return
    with output.progress("converting", stopped=NOT_WRITTEN) as progress:
        done = convert_gguf(source, out, recipe, options=options, progress=progress)
    plan, encoding = done.plan, done.plan.model.encoding
    seconds = time.perf_counter() - started
    lengths = f"{encoding.trained_length} → {encoding.usable_length} tokens"
    lines = [
        done_line(done.out, f"{plan.recipe.summary()}   {lengths}   {seconds:.2f} s"),
        mark_line("✓", "green", f"llama.cpp check passed ({format_relative(done.difference)})"),
        Text(f"  {_tensors_text(plan)}"),
    ]
    data = {**plan_data(plan, str(done.out)), "difference": done.difference, "seconds": round(seconds, 3)}
    output.result(data, *lines)
    for caution in plan.cautions:
        output.warning(caution)
    output.next_step("llama-server", "-m", done.out, "-c", encoding.usable_length)


def plan_data(plan: GgufPlan, out: str | None) -> dict[str, Any]:
    """Return a plan as JSON."""
    encoding = plan.model.encoding
    return {
        "source": str(plan.source.path),
        "out": out,
        "architecture": plan.source.architecture.name,
        "recipe": plan.recipe.to_dict(),
        "trained_length": encoding.trained_length,
        "context_length": encoding.usable_length,
        "changes": [{"key": key, "old": old, "new": new} for key, (old, new) in plan.changes.items()],
        "factors": list(plan.factors) if plan.factors is not None else None,
        "cautions": list(plan.cautions),
    }


def _tensors_text(plan: GgufPlan) -> str:
    count = plan.source.num_tensors
    lists = " and ".join(plan.source.architecture.lists)
    added = "" if plan.factors is None else f"; added {lists} with {len(plan.factors)} divisors"
    return f"{count} tensors unchanged{added}"


def _format_value(value: Any) -> str:
    if value is None:
        return "(not set)"
    return f"{value:.8g}" if isinstance(value, float) else str(value)


def inspect_file(source: str, original_length: int | None, output: Output) -> None:
    """Print the position encoding and context length of a GGUF file, and the methods that apply."""
    model = open_gguf(source, original_length)
    table = label_table()
    reasons = check_methods(model)
    for label, text in _rows(model, reasons).items():
        table.add_row(bold(label), text)
    output.result(inspection_data(model, reasons), table)
    if not model.recipe and not model.model.encoding.is_scaled:
        length = format_length(4 * model.model.encoding.trained_length)
        method = "yarn" if isinstance(model.model.encoding, Rotary) else "declare"
        output.next_step("ctxext", "convert", source, "--method", method, "--target-length", length, "--dry-run")


def inspection_data(model: GgufModel, reasons: Mapping[str, str]) -> dict[str, Any]:
    """Return an inspection as JSON, with the reason for each method that GGUF cannot represent."""
    encoding = model.model.encoding
    rotary = encoding if isinstance(encoding, Rotary) else None
    return {
        "source": str(model.path),
        "architecture": model.architecture.name,
        "quantization": quantization(model),
        "parts": len(model.parts),
        "rotary": rotary and {**rotary_data(rotary), "trained_length_from": model.plain.rotary.length_origin},
        "encoding": encoding_data(encoding),
        "methods": methods_data(reasons),
        "recipe": model.recipe.get("recipe"),
    }


def _rows(model: GgufModel, reasons: Mapping[str, str]) -> Mapping[str, str]:
    encoding = model.model.encoding
    rows = {"model": describe(model), "encoding": encoding.describe()}
    if model.lacks_original:
        start = "original length unknown; specify it with --original-length"
    else:
        start = f"{encoding.trained_length} before any schedule"
        origin = getattr(model.plain.encoding, "length_origin", "")
        start += f" ({origin})" if origin.startswith("published for") else ""
    rows["context length"] = f"{encoding.usable_length} tokens, {start}"
    if model.recipe:
        rows["recipe"] = describe_steps(model.recipe["recipe"]["steps"])
    rows["methods"] = ", ".join(name for name, why in reasons.items() if not why)
    rows["not applicable"] = ", ".join(name for name, why in reasons.items() if why)
    return rows


def verify_file(path: str, against: str | None, output: Output) -> None:
    """Check a converted GGUF file; exit code 1 if a check fails."""
    with output.progress("verifying", stopped="") as progress:
        checks = verify_gguf(path, against, progress)
    marks = {True: ("✓", "green"), False: ("✗", "red")}
    lines = [Text.assemble(marks[check.is_passed], f"  {check.name:<15}{check.detail}") for check in checks]
    passed = all(check.is_passed for check in checks)
    output.result({"passed": passed, "checks": [vars(check) for check in checks]}, *lines)
    if not passed:
        raise typer.Exit(1)
