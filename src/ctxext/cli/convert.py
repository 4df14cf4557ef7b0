"""`ctxext convert`: rewrite a checkpoint's rotary encoding and save it as a portable checkpoint."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.table import Table

from ctxext.checkpoint.auto_class import auto_class
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.cli.auto import Budget, searched_recipe, wants_search
from ctxext.cli.inspect import serving_line, unconverted_text
from ctxext.cli.methods import build_recipe, help_of_convert, method_parameters
from ctxext.cli.options import SourceArgument, complete_method, complete_recipe, takes_options
from ctxext.cli.output import Output, bold, done_line, marked
from ctxext.converters.convert import convert as run
from ctxext.converters.convert import plan_conversion
from ctxext.converters.options import Calibration, ConvertOptions
from ctxext.converters.plan import Plan
from ctxext.errors import CtxextError
from ctxext.evaluate.checkpoint_info import KINDS
from ctxext.evaluate.loading import Loading
from ctxext.files.output_directory import check_out
from ctxext.files.packages import untested_notice
from ctxext.files.tensor_files import grouped
from ctxext.gguf import is_gguf
from ctxext.options import HubOptions


@takes_options(
    order=(..., "text", "device", "dtype", "copy", "trials", "minutes"),
    more=method_parameters(),
    help_for=help_of_convert,
)
def convert(
    source: SourceArgument,
    out: Annotated[
        Path | None, typer.Argument(metavar="OUT", help="The folder to make; by default ./NAME-METHOD-LENGTH.")
    ] = None,
    *,
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            "-m",
            metavar="NAME",
            autocompletion=complete_method,
            help="One of the methods below; repeat it to apply several in order. auto searches; ctxext methods "
            "--experimental lists more.",
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option("--recipe", help="A recipe file, or the name of a preset.", autocompletion=complete_recipe),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change and write nothing.")] = False,
    copy: Annotated[bool, typer.Option("--copy", help="The same as --link copy.")] = False,
    options: ConvertOptions,
    calibration: Calibration,
    budget: Budget,
    hub: HubOptions,
    output: Output,
    **numbers: Any,
) -> None:
    """Rewrite a checkpoint's encoding of positions and save it as a portable one. Only table and range write weights.

    Examples:
    ctxext convert demo --method yarn --factor 4

    ctxext convert meta-llama/Llama-3.2-1B out --method ntk --target-length 256k --dry-run

    ctxext convert demo out --method auto --target-length 2k
    """
    started = time.perf_counter()
    if copy and options.link not in ("auto", "copy"):
        raise CtxextError(f"--copy contradicts --link {options.link}.", hint="Leave one of them out.")
    options = replace(options, calibration=calibration, link="copy" if copy else options.link)
    given = {name: value for name, value in numbers.items() if value is not None}
    if wants_search(method or [], budget):
        if is_gguf(source):
            raise CtxextError(
                "A search loads a checkpoint, not a GGUF file.",
                hint="Search the checkpoint; --recipe takes what it writes.",
            )
        if out is not None:  # Before minutes of search.
            check_out(out, open_checkpoint(source, **vars(hub)).folder, options)
        loading = Loading(device=calibration.device, dtype=calibration.dtype, **vars(hub))
        length = options.original_length
        steps = searched_recipe(source, given, budget, loading, output, original_length=length)
    else:
        steps = build_recipe(method or [], recipe, given)
        if method:
            for step in steps.steps:
                if step.difference:
                    output.note(f"{step.name}: {step.difference}")
    if is_gguf(source):
        from ctxext.cli.gguf import convert_file

        convert_file(source, out, steps, options, output, dry_run=dry_run)
        return
    if dry_run:
        plan = plan_conversion(source, out, steps, options=options, tell=output.note, **vars(hub))
        output.result(plan_data(plan, None), *_plan_lines(plan))
        for caution in (*plan.cautions, *_untested(plan)):
            output.warning(caution)
        return
    with output.progress("") as progress:
        done = run(source, out, steps, options=options, progress=progress, tell=output.note, **vars(hub))
    plan, written, seconds = done.plan, done.written, time.perf_counter() - started
    data = {
        **plan_data(plan, str(done.out)),
        "linked": written.num_linked,
        "copied": written.num_copied,
        "weights": dict(written.ways),
        "verification": vars(done.verification) if done.verification else None,
        "seconds": round(seconds, 3),
    }
    trained, reach = plan.encoding.trained_length, plan.encoding.usable_length
    lengths = f"{trained} → {reach} tokens" if reach != trained else f"{trained} tokens as before"
    checked = []
    if (verification := done.verification) is not None and verification.skipped:
        checked = [marked("-", "yellow", f"not verified: {verification.skipped}")]
    elif verification is not None:
        is_rotation = verification.of == "frequencies"
        how = "the installed transformers rotates" if is_rotation else "in a clean process: logits"
        says = f"verified, {how} as the method says (largest difference {verification.difference:.0e})"
        checked = [marked("✓", "green", says)]
    lines: list[RenderableType] = [
        done_line(done.out, f"{plan.recipe.summary()}   {lengths}   weights {written.how}   {seconds:.2f} s"),
        *checked,
        f"  serves in  {serving_line(plan.serving)}",
    ]
    output.result(data, *lines)
    for caution in (*plan.cautions, *written.notes, *_untested(plan)):
        output.warning(caution)
    if auto_class(plan.model.config) in KINDS:
        models = (done.out,) if plan.recipe.rewrites_weights else (source, done.out)  # The source's own table ends.
        output.next_step("ctxext", "eval", *models, why="Not measured yet")
    else:
        output.next_step("ctxext", "verify", done.out, "--against", source)


def _untested(plan: Plan) -> list[str]:
    """Return a warning if the result carries code and the installed transformers is newer than the tested ones."""
    notice = untested_notice() if plan.recipe.needs_code else ""
    return [f"{notice}; ctxext verify checks the result's code under other versions."] if notice else []


def plan_data(plan: Plan, out: str | None) -> dict[str, Any]:
    """A plan as JSON."""
    return {
        "source": plan.source.name,
        "revision": plan.source.revision,
        "out": out,
        "recipe": plan.recipe.to_dict(),
        "trained_length": plan.encoding.trained_length,
        "context_length": plan.encoding.context_length,
        "changes": [vars(change) for change in plan.changes],
        "rewritten": {tensor.name: list(tensor.shape) for tensor in plan.rewritten},
        "files": {
            "written": plan.written,
            "weights": [path.as_posix() for path in plan.weights],
            "copied": [path.as_posix() for path in plan.others],
        },
        "serving": [row.to_dict() for row in plan.serving],
        "unconverted": dict(plan.unconverted),
        "cautions": list(plan.cautions),
    }


def _plan_lines(plan: Plan) -> list[Any]:
    table = Table.grid(padding=(0, 2))
    file = ""
    for change in plan.changes:
        if change.key == "ctxext":
            continue
        if change.file != file:
            file = change.file
            table.add_row(bold(file))
        old, new = (_short(value) for value in (change.old, change.new))
        old, new = "(not there)" if change.old is None else old, "(removed)" if change.new is None else new
        table.add_row(f"  {change.key}", f"{old} → {new}")
    size = sum(plan.source.size_of(path) for path in plan.weights)
    added = [tensor.name for tensor in plan.rewritten if tensor.old_shape is None]
    tensors = [str(tensor) for tensor in plan.rewritten if tensor.old_shape is not None]
    tensors += [f"{grouped(added)}, which are new"] if added else []
    changes = "unchanged"
    if plan.recipe.rewrites_weights:
        changes += f" but for {', '.join(tensors) or 'what the method writes, once they are fetched'}"
    table.add_row(bold("weights"), f"{len(plan.weights)} file(s), {size / 1e6:,.1f} MB, {changes}")
    table.add_row(bold("kept"), ", ".join(path.as_posix() for path in plan.others) or "-")
    table.add_row(bold("serves in"), serving_line(plan.serving))
    return [table, *unconverted_text(plan.unconverted), "nothing written"]


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} {_short(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return f"({len(value)} entries)" if len(value) > 6 else "[" + ", ".join(map(_short, value)) + "]"
    return str(value)
