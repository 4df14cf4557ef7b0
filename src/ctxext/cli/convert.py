"""`ctxext convert`: rewrite a checkpoint's rotary encoding and save it as a portable checkpoint."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ctxext.checkpoint.auto_class import auto_class
from ctxext.checkpoint.new_tensor import grouped
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.cli.auto import MinutesOption, TrialsOption, searched_recipe, wants_search
from ctxext.cli.method_options import build_recipe
from ctxext.cli.options import (
    JsonOption,
    OriginalLengthOption,
    OverwriteAnythingOption,
    OverwriteOption,
    QuietOption,
    RevisionOption,
    SourceArgument,
    TokenOption,
    VerboseOption,
    length_in,
)
from ctxext.cli.output import Output
from ctxext.cli.terminal import bold, done_line, marked
from ctxext.converters.calibration import Calibration, by_index, calibrated
from ctxext.converters.convert import Conversion, carry_out
from ctxext.converters.engines import MARKS, Serving
from ctxext.converters.links import check_link
from ctxext.converters.plan import Change, Plan, make_plan
from ctxext.evaluate.checkpoint_info import KINDS
from ctxext.recipes.length import format_length
from ctxext.recipes.registry import METHODS
from ctxext.system.output_directory import check_out

_CALIBRATION = "Calibration of the head order"


def convert(
    source: SourceArgument,
    out: Annotated[
        Path | None, typer.Argument(metavar="[OUT]", help="The folder to make; by default ./NAME-METHOD-LENGTH.")
    ] = None,
    *,
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            "-m",
            help=f"{', '.join(m.name for m in METHODS if not m.is_experimental)}; repeat it to apply several in order. "
            "auto searches; ctxext methods --experimental lists more.",
        ),
    ] = None,
    recipe: Annotated[str | None, typer.Option("--recipe", help="A recipe file, or the name of a preset.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change and write nothing.")] = False,
    overwrite: OverwriteOption = False,
    overwrite_anything: OverwriteAnythingOption = False,
    replace_scaling: Annotated[
        bool,
        typer.Option(
            "--replace-scaling",
            help="Take the source's own schedule away first, and what its weights learned with it; says what that is.",
        ),
    ] = False,
    allow_shorter: Annotated[
        bool, typer.Option("--allow-shorter", help="Accept a result that reads less than the source.")
    ] = False,
    original_length: OriginalLengthOption = None,
    link: Annotated[
        str,
        typer.Option(
            "--link",
            help="How the weights come into OUT: auto (cloned where the disk can, else copied), reflink, hard, symlink "
            "or copy. After hard and symlink an edit of OUT's weights is an edit of SOURCE's.",
        ),
    ] = "auto",
    copy: Annotated[bool, typer.Option("--copy", help="The same as --link copy.")] = False,
    digest: Annotated[bool, typer.Option("--digest", help="Record the SHA-256 of the weights; reads them.")] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify/--no-verify",
            help="Check that transformers rotates as the method says; load code in a clean process.",
        ),
    ] = True,
    calibration_text: Annotated[
        Path | None,
        typer.Option(
            help="Text or JSONL file for --head-order calibrated; by default the package's.",
            rich_help_panel=_CALIBRATION,
        ),
    ] = None,
    device: Annotated[
        str, typer.Option("--device", help="auto, cpu, cuda or mps.", rich_help_panel=_CALIBRATION)
    ] = "auto",
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            help="auto (as saved; on a CPU what it is fast in), bf16, fp16, fp32.",
            rich_help_panel=_CALIBRATION,
        ),
    ] = "auto",
    trials: TrialsOption = None,
    minutes: MinutesOption = None,
    revision: RevisionOption = None,
    token: TokenOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    **options: Any,
) -> None:
    """Rewrite a checkpoint's encoding of positions and save it as a portable one. Only table and range write weights.

    Examples:
    ctxext convert demo --method yarn --factor 4

    ctxext convert meta-llama/Llama-3.2-1B out --method ntk --target-length 256k --dry-run

    ctxext convert demo out --method auto --target-length 2k
    """
    link = "copy" if copy else link
    check_link(link)
    output, started = Output(as_json=as_json, quiet=quiet, verbose=verbose), time.perf_counter()
    given = {name: value for name, value in options.items() if value is not None}
    is_searched = wants_search(method or [], trials, minutes)
    steps = None if is_searched else build_recipe(method or [], recipe, given)
    trained = length_in(original_length)
    checkpoint = open_checkpoint(source, revision=revision, token=token, weights=not dry_run, original_length=trained)
    if out is not None:
        check_out(out, checkpoint.folder, overwrite=overwrite, overwrite_anything=overwrite_anything)
    if steps is None:
        hub = {"device": device, "dtype": dtype, "revision": revision, "token": token}
        steps = searched_recipe(source, given, (trials, minutes), hub, output, original_length=trained)
    with output.progress("") as progress:
        if dry_run and (planned := by_index(steps)) is not steps:
            output.note("converting would load the model once to order its heads; the plan shows them by index.")
            steps = planned
        elif not dry_run:
            if by_index(steps) is not steps:
                output.note("Loading the model once to order its heads; where it does not fit, --head-order fixed.")
            calibration = Calibration(calibration_text, device, dtype)
            steps = calibrated(
                checkpoint,
                steps,
                calibration,
                replace_scaling=replace_scaling,
                allow_shorter=allow_shorter,
                progress=progress,
            )
        plan = make_plan(checkpoint, steps, replace_scaling=replace_scaling, allow_shorter=allow_shorter)
        out = out or default_out(plan)
        if dry_run:
            output.result(plan_data(plan, None), *_plan_lines(plan))
            for caution in plan.cautions:
                output.warning(caution)
            return
        done = carry_out(
            plan,
            out,
            link=link,
            digest=digest,
            overwrite=overwrite,
            overwrite_anything=overwrite_anything,
            check=verify,
            progress=progress,
        )
    _tell(output, done, source, out, time.perf_counter() - started)


def _tell(output: Output, done: Conversion, source: str, out: Path, seconds: float) -> None:
    """Show what was made, what its user must know, and the next command."""
    plan, written = done.plan, done.written
    data = {
        **plan_data(plan, str(out)),
        "linked": written.num_linked,
        "copied": written.num_copied,
        "weights": dict(written.ways),
        "verification": vars(done.verification) if done.verification else None,
        "seconds": round(seconds, 3),
    }
    trained, reach = plan.encoding.trained_length, plan.encoding.usable_length
    lengths = f"{trained} → {reach} tokens" if reach != trained else f"{trained} tokens as before"
    lines: list[RenderableType] = [
        done_line(out, f"{plan.recipe.summary()}   {lengths}   weights {written.how}   {seconds:.2f} s"),
        *_verification_lines(done),
        f"  serves in  {serving_line(plan.serving)}",
    ]
    output.result(data, *lines)
    for caution in (*plan.cautions, *written.notes):
        output.warning(caution)
    if auto_class(plan.model.config) in KINDS:
        models = (out,) if plan.recipe.rewrites_weights else (source, out)  # The source's own table ends.
        output.next_step("ctxext", "eval", *models, "--lengths", _lengths(plan), why="Not measured yet")
    else:
        output.next_step("ctxext", "verify", out, "--against", source)


def _verification_lines(done: Conversion) -> list[Text]:
    found = done.verification
    if found is None:
        return []
    if found.skipped:
        return [marked("-", "yellow", f"not verified: {found.skipped}")]
    how = "the installed transformers rotates" if found.of == "frequencies" else "in a clean process: logits"
    return [marked("✓", "green", f"verified, {how} as the method says (largest difference {found.difference:.0e})")]


def default_out(plan: Plan) -> Path:
    """The folder's name where none was given: the source's name, the methods and the new length."""
    name = Path(plan.source.name).name or "model"
    methods = "-".join(step.name for step in plan.recipe.steps)
    return Path(f"{name}-{methods}-{format_length(plan.encoding.usable_length)}")


def _lengths(plan: Plan) -> str:
    lengths = dict.fromkeys((plan.encoding.trained_length, plan.encoding.usable_length))
    return ",".join(map(format_length, lengths))


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
            "written": sorted([*plan.texts, "ctxext.json"]),
            "weights": [path.as_posix() for path in plan.weights],
            "copied": [path.as_posix() for path in plan.others],
        },
        "serving": [row.to_dict() for row in plan.serving],
        "unconverted": dict(plan.unconverted),
        "cautions": list(plan.cautions),
    }


def serving_line(serving: tuple[Serving, ...]) -> str:
    """Which engines run it, in one line."""
    return "   ".join(f"{row.engine} {MARKS[row.status]}" + (f" ({row.note})" if row.note else "") for row in serving)


def unconverted_text(lines: Mapping[str, str]) -> list[str]:
    """The commands that serve the source itself, each on a line that can be copied."""
    told = [f"  {line}" for line in lines.values()]
    return ["the source itself can be served so, without converting it:", *told] if told else []


def _plan_lines(plan: Plan) -> list[Any]:
    table = Table.grid(padding=(0, 2))
    file = ""
    for change in plan.changes:
        if change.key == "ctxext":
            continue
        if change.file != file:
            file = change.file
            table.add_row(bold(file))
        table.add_row(f"  {change.key}", _change_text(change))
    size = sum(plan.source.size_of(path) for path in plan.weights)
    table.add_row(bold("weights"), f"{len(plan.weights)} file(s), {size / 1e6:,.1f} MB, {_what_changes(plan)}")
    table.add_row(bold("kept"), ", ".join(path.as_posix() for path in plan.others) or "-")
    table.add_row(bold("serves in"), serving_line(plan.serving))
    return [table, *unconverted_text(plan.unconverted), "nothing written"]


def _what_changes(plan: Plan) -> str:
    """Which tensors the weights will have otherwise."""
    added = [tensor.name for tensor in plan.rewritten if tensor.old_shape is None]
    told = [str(tensor) for tensor in plan.rewritten if tensor.old_shape is not None]
    told += [f"{grouped(added)}, which are new"] if added else []
    if plan.recipe.rewrites_weights:
        return f"unchanged but for {', '.join(told) or 'what the method writes, once they are fetched'}"
    return "unchanged"


def _change_text(change: Change) -> str:
    old = "(not there)" if change.old is None else _short(change.old)
    return f"{old} → " + ("(removed)" if change.new is None else _short(change.new))


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} {_short(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return f"({len(value)} entries)" if len(value) > 6 else "[" + ", ".join(map(_short, value)) + "]"
    return str(value)
