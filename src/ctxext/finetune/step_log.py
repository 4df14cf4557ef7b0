"""The log and the live line of a training run, one line per step."""

import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

from ctxext.checkpoint.durations import format_duration
from ctxext.errors import CtxextError
from ctxext.files.offline import forbid_network
from ctxext.files.processes import peak_memory
from ctxext.finetune.loss import PositionLosses
from ctxext.finetune.options import Reporter, TrainingOptions

with forbid_network():
    from transformers import TrainerCallback
from ctxext.finetune.needle_probe import NeedleProbe

STEPS = "steps.jsonl"
"""Log with one line per step: loss, learning rate, gradient norm, speed, memory."""


class LiveLine(TrainerCallback):  # type: ignore[misc]
    """Callback that reports and logs each step and each evaluation, and raises if the loss is not finite.

    Args:
        reporter: Receives a line with the time left after each step, and a line per evaluation.
        options: The options of the run.
        path: Log file with a line per step and per evaluation.
        by_position: Sums of an evaluation's loss by position.
        needle: Needle evaluation; None if it is not possible.
    """

    def __init__(
        self,
        reporter: Reporter,
        options: TrainingOptions,
        path: Path,
        by_position: PositionLosses,
        needle: NeedleProbe | None = None,
    ) -> None:
        self.reporter, self.path = reporter, path
        sizes = (options.find_stage(step)[0].sequence_length for step in range(options.num_steps))
        self.tokens_before = [0, *itertools.accumulate(options.batch_size * size for size in sizes)]
        """Tokens before each step, over all processes."""
        self.by_position, self.needle = by_position, needle
        self.started, self.first_step = 0.0, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock, and remove logged steps after the save that the run resumes from."""
        self.started, self.first_step = time.perf_counter(), state.global_step
        if state.is_world_process_zero:
            text = self.path.read_text(encoding="utf-8", errors="replace") if self.path.is_file() else ""
            lines = text.removeprefix("\ufeff").split("\n")
            earlier = [line for line in lines if _read_step(line) <= self.first_step]
            self.path.write_text("".join(f"{line}\n" for line in earlier), encoding="utf-8")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Report and log a step; raise if its loss is not finite."""
        logs = logs or {}
        loss = logs.get("loss")
        if loss is None:
            return
        if not math.isfinite(loss):
            raise CtxextError(
                f"The loss is not finite at step {state.global_step}.", hint="Lower --learning-rate, or change --dtype."
            )
        if not state.is_world_process_zero:
            return
        seconds = max(time.perf_counter() - self.started, 1e-9)
        before = self.tokens_before
        speed = (before[state.global_step] - before[self.first_step]) / seconds
        left = (before[-1] - before[state.global_step]) / speed
        memory = peak_memory(args.device)
        figures = {name: logs[name] for name in ("loss", "learning_rate", "grad_norm") if name in logs}
        line = {"step": state.global_step, **figures, "tokens_per_second": round(speed, 1), "memory": memory}
        self._write({**line, "seconds": round(seconds, 3)})
        if self.reporter.progress is not None:
            text = f"step {state.global_step} / {state.max_steps} · loss {loss:.3f} · {speed:,.0f} tokens/s · "
            text = f"{text}{memory / 2**30:.1f} GiB · {format_duration(left)} left"
            self.reporter.progress(text, state.global_step, state.max_steps)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Run the needle evaluation, and report and log all results."""
        loss, parts = metrics["eval_loss"], self.by_position.take(args.device)
        results = {"step": state.global_step, "eval_loss": loss, "eval_loss_by_position": parts}
        formatted = ", ".join("–" if part is None else f"{part:.3f}" for part in parts)
        text = f"step {state.global_step}: loss {loss:.3f} on the evaluation data ({formatted} by position)"
        if self.needle is not None:
            results["needle"] = share = self.needle()
            text += f", {share:.0%} of {len(self.needle.prompts)} needles at {self.needle.length:,} tokens"
        if not state.is_world_process_zero:
            return
        self._write(results)
        if self.reporter.notify is not None:
            self.reporter.notify(text)

    def _write(self, line: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _read_step(line: str) -> float:
    """Read the step of a log line; infinity for a line that is incomplete after a kill."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return math.inf
    return step if isinstance(step, int) else math.inf
