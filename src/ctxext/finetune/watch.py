"""What is measured, shown and written while a training runs, and how it is stopped between two steps."""

import json
import math
import signal
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from transformers import TrainerCallback

from ctxext.checkpoint.head import Head
from ctxext.data.encoding import Encoder
from ctxext.errors import CtxextError
from ctxext.evaluate.settings import Settings
from ctxext.evaluate.tasks.needle import Needle
from ctxext.evaluate.tasks.retrieval import check_fits, make_questions
from ctxext.files.processes import peak_memory
from ctxext.finetune.options import Reporter
from ctxext.finetune.stopping import Terminated, raise_terminated

STEPS = "steps.jsonl"
"""One line for each step: loss, learning rate, gradient norm, speed, memory."""


NUM_PARTS = 4
"""Number of equal parts of a sequence for the loss by position."""

_NEEDLES = Settings(tasks=("needle",), samples=2)


class PositionLosses:
    """Adds up the loss of each part of the positions, over all batches of an evaluation."""

    def __init__(self) -> None:
        self.sums = torch.zeros(2, NUM_PARTS, dtype=torch.float64)

    def add(self, part: int, total: torch.Tensor, count: int) -> None:
        """The summed loss of so many tokens that lie in a part."""
        self.sums[:, part] += torch.tensor([float(total), count], dtype=torch.float64)

    def take(self, device: torch.device) -> list[float | None]:
        """The mean of each part over all processes, None where nothing is learned; then it begins again."""
        sums, self.sums = self.sums, torch.zeros_like(self.sums)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            sums = sums.float().to(device)
            torch.distributed.all_reduce(sums)
        return [float(total / count) if count else None for total, count in sums.T.cpu()]


class NeedleProbe:
    """Asks a causal language model that is being trained for needles, in prompts of the target length.

    Its head uses the model's forward as it was before it returned the loss.
    """

    def __init__(self, head: Head, tokenizer: Any, length: int, seed: int) -> None:
        self.head, self.length = head, length
        encoder, task = Encoder(tokenizer), Needle(num_needles=len(_NEEDLES.depths))
        check_fits(task, encoder, [length], _NEEDLES)
        numbers = range(seed * _NEEDLES.samples, (seed + 1) * _NEEDLES.samples)
        questions = make_questions(task, encoder, length, numbers, _NEEDLES)
        self.prompts = [prompt for question in questions for prompt in question]

    @torch.no_grad()
    def __call__(self) -> float:
        """The share of prompts whose answer would be written."""
        return sum(map(self._is_answered, self.prompts)) / len(self.prompts)

    def _is_answered(self, prompt: Any) -> bool:
        ids = torch.tensor([prompt.ids], device=self.head.model.device)
        asked = slice(-prompt.num_answer - 1, -1)
        logits = self.head(self.head.read(ids)[:, asked], ids[:, asked])
        return bool((logits[0].argmax(-1) == ids[0, -prompt.num_answer :]).all())


def needle_probe(head: Head, tokenizer: Any, length: int, seed: int, num_processes: int) -> NeedleProbe | None:
    """What asks for needles; None where no question fits, or where processes may hold parts of the model."""
    try:
        return NeedleProbe(head, tokenizer, length, seed) if num_processes == 1 else None
    except CtxextError:
        return None


class LiveLine(TrainerCallback):  # type: ignore[misc]
    """Shows and writes each step and each evaluation, and stops where the loss is lost.

    Args:
        reporter: Gets a line with the time left after each step, and one for each evaluation.
        tokens_per_step: Tokens of a step over all processes.
        path: A file that gets a line for each of both.
        by_position: What the loss of an evaluation adds up to.
        needle: Asks for needles; None where it cannot be asked.
    """

    def __init__(
        self,
        reporter: Reporter,
        tokens_per_step: int,
        path: Path,
        by_position: PositionLosses,
        needle: NeedleProbe | None = None,
    ) -> None:
        self.reporter, self.tokens_per_step, self.path = reporter, tokens_per_step, path
        self.by_position, self.needle = by_position, needle
        self.started, self.first_step = 0.0, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock, and forget the steps behind the save that is gone on from."""
        self.started, self.first_step = time.perf_counter(), state.global_step
        if state.is_world_process_zero:
            lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.is_file() else []
            kept = [line for line in lines if _step_of(line) <= self.first_step]
            self.path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Show and write a step."""
        logs = logs or {}
        loss = logs.get("loss")
        if loss is None:
            return
        if not math.isfinite(loss):
            raise CtxextError(
                f"The loss is not finite at step {state.global_step}.", hint="Lower --learning-rate, or use --dtype."
            )
        if not state.is_world_process_zero:
            return
        seconds = max(time.perf_counter() - self.started, 1e-9)
        num_done = max(1, state.global_step - self.first_step)
        speed, memory = num_done * self.tokens_per_step / seconds, peak_memory(args.device)
        left = seconds / num_done * (state.max_steps - state.global_step)
        figures = {name: logs[name] for name in ("loss", "learning_rate", "grad_norm") if name in logs}
        line = {"step": state.global_step, **figures, "tokens_per_second": round(speed, 1), "memory": memory}
        self._write({**line, "seconds": round(seconds, 3)})
        if self.reporter.progress is not None:
            text = f"step {state.global_step} / {state.max_steps} · loss {loss:.3f} · {speed:,.0f} tokens/s · "
            text = f"{text}{memory / 2**30:.1f} GiB · {span(left)} left"
            self.reporter.progress(text, state.global_step, state.max_steps)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Ask for needles too, and show and write all of it."""
        loss, parts = metrics["eval_loss"], self.by_position.take(args.device)
        results = {"step": state.global_step, "eval_loss": loss, "eval_loss_by_position": parts}
        said = ", ".join("–" if part is None else f"{part:.3f}" for part in parts)
        text = f"step {state.global_step}: loss {loss:.3f} on the evaluation data ({said} by position)"
        if self.needle is not None:
            results["needle"] = share = self.needle()
            text += f", {share:.0%} of {len(self.needle.prompts)} needles at {self.needle.length:,} tokens"
        if not state.is_world_process_zero:
            return
        self._write(results)
        if self.reporter.tell is not None:
            self.reporter.tell(text)

    def _write(self, line: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class StopAfterStep(TrainerCallback):  # type: ignore[misc]
    """While this context is entered, Ctrl-C and SIGTERM end the training after the current sequences, with a save.

    Where more sequences of the same step were to come, the step is left: the last whole one is saved, with the random
    state that it left behind, and a resumed run does the other anew. A grace period may be shorter than a step.

    A second Ctrl-C ends it at once. A second SIGTERM changes nothing: launchers forward the signal that the scheduler
    sends to every process anyway, and SIGKILL follows when the grace period is over.
    """

    def __init__(self) -> None:
        self.asked = 0  # The signal that asked for the end.
        self._before: dict[int, Any] = {}
        self._saved_step = 0
        self._random: dict[str, torch.Tensor] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number, replaceable in _REPLACEABLE.items():
            if signal.getsignal(number) in replaceable:
                self._before[number] = signal.signal(number, self._ask)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in list(self._before):
            self._restore(number)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = max(self.asked, number)
        self._restore(signal.SIGINT)

    def _restore(self, number: int) -> None:
        if number in self._before:
            signal.signal(number, self._before.pop(number))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the step that the run goes on from: it is saved."""
        self._saved_step = state.global_step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the random state, for a save of the step before."""
        self._random = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._random["cuda"] = torch.cuda.get_rng_state()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the step if that was asked for, and save the one before."""
        if not self._agreed(args):
            return
        torch.set_rng_state(self._random["cpu"])
        if "cuda" in self._random:
            torch.cuda.set_rng_state(self._random["cuda"])
        control.should_training_stop = True
        control.should_save = state.global_step > self._saved_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save and stop if that was asked for."""
        if self._agreed(args):
            control.should_save = control.should_training_stop = True

    def _agreed(self, args: Any) -> bool:
        """Return whether a process was asked to end: the signal may reach one before the others."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            asked = torch.tensor(self.asked, device=args.device)
            torch.distributed.all_reduce(asked, op=torch.distributed.ReduceOp.MAX)
            self.asked = int(asked)
        return bool(self.asked)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the step that is saved."""
        self._saved_step = state.global_step

    def check(self, *, is_complete: bool) -> None:
        """End the run if it was stopped; after SIGTERM there is no time for what follows the last step."""
        if self.asked == signal.SIGTERM:
            raise Terminated
        if self.asked and not is_complete:
            raise KeyboardInterrupt


_REPLACEABLE: dict[int, tuple[Any, ...]] = {
    signal.SIGINT: (signal.default_int_handler,),
    signal.SIGTERM: (signal.SIG_DFL, raise_terminated),
}
"""Signals with the handlers that are replaced during training; others belong to the program around it."""


def span(seconds: float) -> str:
    """A time for people."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def _step_of(line: str) -> float:
    """A line's step; infinity of one that a kill tore."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return math.inf
    return step if isinstance(step, int) else math.inf
