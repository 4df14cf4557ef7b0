"""What `ctxext finetune` shows in the end."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxext.cli.output import Output
from ctxext.cli.terminal import done_line
from ctxext.files import Progress

if TYPE_CHECKING:
    from ctxext.finetune.dry_run import Plan
    from ctxext.finetune.run import Finetuned


def with_step_lines(output: Output, progress: Progress) -> Progress:
    """Where no bar can move, a line for each step; what is not a step is told as before."""
    if output.stderr.is_terminal:
        return progress

    def show(label: str, done: int, total: int) -> None:
        if label.startswith("step "):
            output.note(label)
        else:
            progress(label, done, total)

    return show


def tell_plan(output: Output, plan: "Plan") -> None:
    """Show what a training would take, and what to change where it does not fit."""
    from ctxext.finetune.watch import span

    peak, available = plan.peak_memory / 2**30, plan.available_memory / 2**30
    share = 100 * plan.num_trained / plan.num_parameters
    verdict = "" if plan.fits else "   does not fit"
    output.result(
        plan.to_dict(),
        f"sequences  {plan.data.num_sequences:,} of {plan.options.sequence_length:,} and {plan.num_tokens:,} tokens",
        f"trained    {plan.num_trained:,} parameters ({share:.1f} %)",
        f"memory     about {peak:.1f} GiB of {available:.1f} at the peak{verdict}",
        f"time       about {plan.seconds_per_step:.1f} s a step, {span(plan.seconds)} in all",
        f"           from steps at {plan.measured_length // 2:,} and {plan.measured_length:,} tokens",
    )
    if not plan.fits:
        for remedy in plan.remedies:
            output.note(f"  {remedy}")


def tell_result(output: Output, done: "Finetuned", model: str, out: Path, *, merge: bool, report: Any) -> None:
    """Show what was made and the next command."""
    first, last = done.losses[0][1], done.losses[-1][1]
    share = 100 * done.num_trained / done.num_parameters
    kind = "checkpoint" if merge else "adapter"
    output.result(
        {**done.to_dict(), "out": str(out), "evaluation": report},
        done_line(out, f"{kind}   {done.num_trained:,} parameters trained ({share:.1f} %)"),
        f"  loss {first:.3f} → {last:.3f} in {done.options.steps} steps   {done.seconds:.0f} s   curve: {out}/loss.png",
    )
    if not merge:
        output.next_step("ctxext", "merge", model, out / "adapter", "MERGED", why="A full checkpoint")
    elif report is None:
        words = ("--lengths", done.options.length)
        output.next_step("ctxext", "eval", model, out, *words, why="Not measured yet")


def same_command(*more: str) -> list[str]:
    """The command that was typed, with some words behind it that it did not have."""
    words = [Path(sys.argv[0]).name, *sys.argv[1:]]
    if words[0] in ("__main__.py", "-m", "-c"):
        words[0] = "ctxext"
    return [*(word for word in words if word not in more), *more]
