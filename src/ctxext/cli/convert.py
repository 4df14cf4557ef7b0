"""`ctxext convert`: extend a checkpoint's context and save the result as a portable checkpoint.

`--method auto` searches for the recipe with a small budget. If that is too small, it compares the published methods.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from ctxext.checkpoint.auto_class import auto_class
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.cli.inspect import serving_line, unconverted_text
from ctxext.cli.methods import build_recipe, help_of_convert, method_parameters
from ctxext.cli.options import SourceArgument, complete_method, complete_recipe, takes_options
from ctxext.cli.output import NOT_WRITTEN, Output, bold, done_line, label_table, mark_line
from ctxext.converters.convert import convert as run
from ctxext.converters.convert import plan_conversion
from ctxext.converters.engine_support import exact_arguments
from ctxext.converters.options import Calibration, ConvertOptions
from ctxext.converters.plan import Plan
from ctxext.errors import CtxextError, NothingMeasuredError
from ctxext.files.length import format_length
from ctxext.files.output_directory import check_out
from ctxext.files.packages import is_installed, untested_notice
from ctxext.files.tensor_files import format_tensor_names
from ctxext.gguf import is_gguf
from ctxext.models.checkpoint_info import KINDS
from ctxext.models.loading import Loading
from ctxext.options import HubOptions, flag_of, option, option_name
from ctxext.recipes.recipe import Recipe, recipe_from_dict

_AUTO = "auto"
_MINUTES = 5.0
_FOR_SEARCH = 0.6
"""Share of the time for the search; the rest is for a comparison if the search measures nothing."""
_NOT_BETTER = "No recipe is significantly better than the unmodified model. Writing the best published one: {}."
_LEAST = 0.1
"""Minimum time for a comparison, in minutes."""
_PANEL = "Search of --method auto"
_UNSET = vars(Calibration())
_LONG_STAGE = 1.0
"""Seconds from which the result names a stage."""


@dataclass(frozen=True)
class Budget:
    """Limits of the search for the recipe."""

    trials: int | None = option(None, help="Maximum number of recipes.", min=1, parser_checks=True, panel=_PANEL)
    minutes: float | None = option(
        None, help=f"Approximate time limit in minutes. Default: {_MINUTES:g} without --trials.", panel=_PANEL
    )


@takes_options(
    order=(..., "text", "device", "dtype", "copy", "trials", "minutes"),
    more=method_parameters(),
    help_for=help_of_convert,
)
def convert(
    source: SourceArgument,
    out: Annotated[
        Path | None, typer.Argument(metavar="OUT", help="Output folder. Default: ./NAME-METHOD-LENGTH.")
    ] = None,
    *,
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            "-m",
            metavar="NAME",
            autocompletion=complete_method,
            help="One of the methods below, or auto to search for the best recipe. Repeat it to apply several in "
            "order. ctxext methods --experimental lists more.",
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option("--recipe", help="Recipe file or name of a preset.", autocompletion=complete_recipe),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the changes without writing them.")] = False,
    copy: Annotated[bool, typer.Option("--copy", help="Same as --link copy.")] = False,
    options: ConvertOptions,
    calibration: Calibration,
    budget: Budget,
    hub: HubOptions,
    output: Output,
    **parameters: Any,
) -> None:
    """Extend a checkpoint's context and save the result as a portable checkpoint.

    Examples:
    ctxext convert demo --method yarn --factor 4

    ctxext convert meta-llama/Llama-3.2-1B out --method ntk --target-length 256k --dry-run

    ctxext convert demo out --method auto --target-length 2k
    """
    started = time.perf_counter()
    if copy and options.link not in ("auto", "copy"):
        raise CtxextError(f"--copy cannot be combined with --link {options.link}.", hint="Remove one of them.")
    options = replace(options, calibration=calibration, link="copy" if copy else options.link)
    values = {name: value for name, value in parameters.items() if value is not None}
    if _wants_search(method or [], recipe, budget, options):
        if is_gguf(source):
            raise CtxextError(
                "--method auto does not support GGUF files.",
                hint="Run ctxext search on the checkpoint, then convert with --recipe FILE.",
            )
        if out is not None:  # Fail before the search, which takes minutes.
            check_out(out, open_checkpoint(source, **vars(hub)).folder, options)
        loading = Loading(device=calibration.device, dtype=calibration.dtype, **vars(hub))
        length = options.original_length
        steps = _search_recipe(source, values, budget, loading, output, original_length=length)
    else:
        steps = build_recipe(method or [], recipe, values)
        if method:
            for step in steps.steps:
                if step.difference:
                    output.note(f"{step.name}: {step.difference}")
        if calibration != Calibration() and not steps.needs_calibration:
            flag = next(
                flag_of(Calibration, name) for name, value in vars(calibration).items() if value != _UNSET[name]
            )
            raise CtxextError(
                f"{flag} has no effect: no step of the recipe measures a head order.",
                hint=f"Remove {flag}, or use a method with --head-order calibrated.",
            )
    if is_gguf(source):
        from ctxext.cli.gguf import convert_file

        if hub.revision is not None:
            raise CtxextError("--revision does not support GGUF files.", hint="Remove --revision.")
        convert_file(source, out, steps, options, output, dry_run=dry_run)
        return
    if dry_run:
        plan = plan_conversion(source, out, steps, options=options, notify=output.note, **vars(hub))
        output.result(plan_data(plan, None), *_plan_lines(plan))
        for caution in (*plan.cautions, *_version_warnings(plan)):
            output.warning(caution)
        return
    with output.progress("converting", stopped=NOT_WRITTEN) as progress:
        done = run(source, out, steps, options=options, progress=progress, notify=output.note, **vars(hub))
    plan, written, seconds = done.plan, done.written, time.perf_counter() - started
    data = {
        **plan_data(plan, str(done.out)),
        "linked": written.num_linked,
        "copied": written.num_copied,
        "weights": dict(written.ways),
        "verification": vars(done.verification) if done.verification else None,
        "seconds": round(seconds, 3),
        "seconds_by_stage": {stage: round(spent, 3) for stage, spent in done.seconds.items()},
    }
    long_stages = [f"{stage} {spent:.1f} s" for stage, spent in done.seconds.items() if spent >= _LONG_STAGE]
    duration = f"{seconds:.2f} s" + (f" ({', '.join(long_stages)})" if long_stages else "")
    trained, length = plan.encoding.trained_length, plan.encoding.usable_length
    lengths = f"{trained} → {length} tokens" if length != trained else f"{trained} tokens (unchanged)"
    checks = []
    if (verification := done.verification) is not None and verification.skipped:
        checks = [mark_line("-", "yellow", f"not verified: {verification.skipped}")]
    elif verification is not None:
        is_rotation = verification.of == "frequencies"
        subject = "frequencies in the installed transformers" if is_rotation else "logits in a clean process"
        difference = f"largest difference {verification.difference:.0e}" if verification.difference else "identical"
        text = f"verified: {subject} match the method ({difference})"
        checks = [mark_line("✓", "green", text)]
        if verification.forms:
            checks.append(Text(f"  compared {verification.coverage}", "dim"))
    lines: list[RenderableType] = [
        done_line(done.out, f"{plan.recipe.summary()}   {lengths}   weights {written.how}   {duration}"),
        *checks,
        f"  engines  {serving_line(plan.serving)}",
    ]
    output.result(data, *lines)
    for caution in (*plan.cautions, *written.notes, *_version_warnings(plan)):
        output.warning(caution)
    of_heads = [step.name for step in plan.recipe.steps if step.kind == "heads"] if length == trained else []
    if of_heads:
        output.note(f"{of_heads[0]} aims at the middle of the {trained} tokens; it does not extend the context.")
    if (kind := KINDS.get(auto_class(plan.model.config))) is not None:
        models = (done.out,) if plan.recipe.rewrites_weights else (source, done.out)  # The source's table is shorter.
        inside = ("--task", "needle,kv", "--depths", "11") if of_heads and kind == "causal" else ()
        output.next_step("ctxext", "eval", *models, *inside, why="Not measured yet")
        if kind == "causal" and (served := _serve_command(plan)):
            output.next_step(*served[:2], done.out, *served[2:], why="Serve it")
    else:
        output.next_step("ctxext", "verify", done.out, "--against", source)
    if of_heads:
        words = ("--method", "yarn", "--factor", "2", *(word for name in of_heads for word in ("--method", name)))
        output.next_step("ctxext", "convert", source, *words, why="Extend the context too")


def _serve_command(plan: Plan) -> list[str]:
    """Return the command that serves the result, without its path; empty if neither transformers nor vLLM does."""
    if not plan.recipe.needs_code:  # `transformers serve` runs no custom code.
        return ["transformers", "serve"]
    arguments = exact_arguments(plan.serving)
    return ["vllm", "serve", *arguments["vLLM"]] if "vLLM" in arguments else []


def _wants_search(methods: Sequence[str], recipe: str | None, budget: Budget, options: ConvertOptions) -> bool:
    """Return whether the recipe comes from a search; raise if the options contradict each other."""
    if _AUTO not in methods:
        if budget != Budget():
            raise CtxextError("--trials and --minutes require --method auto.")
        return False
    others = {
        "another method": len(methods) > 1,
        "--recipe": recipe is not None,
        # A search starts from an unscaled model, and measures head orders on the text of the package.
        "--replace-scaling": options.replace_scaling,
        "--calibration-text": options.calibration.text is not None,
    }
    if other := next((name for name, is_given in others.items() if is_given), None):
        raise CtxextError(f"--method auto cannot be combined with {other}.", hint="Remove one of them.")
    return True


def _search_recipe(
    source: str,
    values: Mapping[str, Any],
    budget: Budget,
    loading: Loading,
    out: Output,
    *,
    original_length: int | None = None,
) -> Recipe:
    """Return the best recipe of a search with a small budget, or else the best published method."""
    if set(values) != {"target_length"}:
        others = ", ".join(option_name(name) for name in values if name != "target_length")
        raise CtxextError(
            f"--method auto cannot be combined with {others}." if others else "--method auto requires --target-length.",
            hint="Use only --target-length, for example --target-length 32k.",
        )
    from ctxext.cli.search import watching  # A conversion with a named method needs none of these.
    from ctxext.search.options import SearchOptions
    from ctxext.search.run import format_results, search

    started = time.monotonic()
    minutes = _MINUTES if budget == Budget() else budget.minutes
    options = SearchOptions(
        target_length=values["target_length"],
        trials=budget.trials,
        minutes=minutes and _FOR_SEARCH * minutes,
        original_length=original_length,
    )
    if is_installed("optuna") or budget.trials is not None:
        try:
            with watching(out) as watch:
                result = search(source, options, loading=loading, watch=watch)
        except NothingMeasuredError as error:
            out.note(f"{error.message} Comparing the published methods instead.")
        else:
            for line in format_results(result.check):
                out.note(line)
            if result.recipe is not None:
                return result.recipe
            published = result.check.published
            if published is not None and published.trial.recipe is not None:
                out.note(_NOT_BETTER.format(published.trial.name))
                rise, half = result.check.answers[published.trial.number].rise(result.check.stock)
                if rise + half > options.keep_short:
                    cost = f"{100 * rise:+z.2f} ± {100 * half:.2f} %"
                    out.warning(
                        f"{published.trial.name} changes the loss at the original context length by {cost}. No "
                        f"published method keeps it within {100 * options.keep_short:g} % with confidence."
                    )
                return published.trial.recipe
    left = None if minutes is None else max(_LEAST, minutes - (time.monotonic() - started) / 60)
    # Use the method that a comparison recommends, or the one closest to being better.
    from ctxext.compare.run import compare

    with out.progress("comparing") as progress:
        report = compare(
            source,
            target_length=options.target_length,
            minutes=left,
            original_length=original_length,
            loading=loading,
            progress=progress,
            notify=out.note,
        )
    content = report["comparison"]
    best = content["taken"] or content["nearest"]
    if best is None:
        raise CtxextError(
            f"The time was too short to measure any method at {format_length(options.target_length)} tokens.",
            hint="Increase --minutes, or choose a --method.",
        )
    out.note(content["verdict"])
    if content["taken"] is None:
        out.note(_NOT_BETTER.format(best))
    return recipe_from_dict(next(row["recipe"] for row in content["models"] if row["name"] == best), best)


def _version_warnings(plan: Plan) -> list[str]:
    """Return a warning if the result contains code and the installed transformers is newer than the tested ones."""
    notice = untested_notice() if plan.recipe.needs_code else ""
    return [f"{notice}. Check the result's code under other versions with ctxext verify."] if notice else []


def plan_data(plan: Plan, out: str | None) -> dict[str, Any]:
    """Return a plan as JSON."""
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
            "written": plan.written_files,
            "weights": [path.as_posix() for path in plan.weights],
            "copied": [path.as_posix() for path in plan.others],
        },
        "serving": [row.to_dict() for row in plan.serving],
        "unconverted": dict(plan.source_commands),
        "cautions": list(plan.cautions),
    }


def _plan_lines(plan: Plan) -> list[Any]:
    table = label_table()
    file = ""
    for change in plan.changes:
        if change.key == "ctxext":
            continue
        if change.file != file:
            file = change.file
            table.add_row(bold(file))
        old, new = (_shorten(value) for value in (change.old, change.new))
        old, new = "(not set)" if change.old is None else old, "(removed)" if change.new is None else new
        table.add_row(f"  {change.key}", f"{old} → {new}")
    size = sum(plan.source.size_of(path) for path in plan.weights)
    added = [tensor.name for tensor in plan.rewritten if tensor.old_shape is None]
    tensors = [str(tensor) for tensor in plan.rewritten if tensor.old_shape is not None]
    tensors += [f"{format_tensor_names(added)} (new)"] if added else []
    changes = "unchanged"
    if plan.recipe.rewrites_weights:
        changes += f" except {', '.join(tensors) or 'the tensors of the method (known after the download)'}"
    table.add_row(bold("weights"), f"{len(plan.weights)} file(s), {size / 1e6:,.1f} MB, {changes}")
    table.add_row(bold("copied"), ", ".join(path.as_posix() for path in plan.others) or "-")
    table.add_row(bold("engines"), serving_line(plan.serving))
    return [table, *unconverted_text(plan.source_commands), "nothing was written"]


def _shorten(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} {_shorten(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return f"({len(value)} entries)" if len(value) > 6 else "[" + ", ".join(map(_shorten, value)) + "]"
    return str(value)
