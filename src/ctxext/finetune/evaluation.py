"""What is measured while a training runs: the loss on other data, by position, and the needle at the target length."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from ctxext.data.encoding import Encoder
from ctxext.errors import CtxextError
from ctxext.evaluate.settings import Settings
from ctxext.evaluate.tasks.needle import Needle
from ctxext.evaluate.tasks.retrieval import check_fits, make_questions
from ctxext.finetune.loss import logits_of

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
    """Asks a model that is being trained for needles at the target length.

    Args:
        model: The causal language model whose forward returns the loss; adapters may be inside.
        forward: Its forward, as it was before the loss was replaced.
        tokenizer: Its tokenizer.
        length: Tokens of a prompt.
        seed: Decides the questions.
    """

    def __init__(self, model: Any, forward: Any, tokenizer: Any, length: int, seed: int) -> None:
        self.model, self.forward, self.length = model, forward, length
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
        ids = torch.tensor([prompt.ids], device=self.model.device)
        output = self.model.base_model(input_ids=ids, use_cache=False)
        asked = slice(-prompt.num_answer - 1, -1)
        hidden = output.last_hidden_state[:, asked]
        logits = logits_of(self.model, self.forward, type(output), ids[:, asked], hidden)
        return bool((logits[0].argmax(-1) == ids[0, -prompt.num_answer :]).all())


class Evaluations(TrainerCallback):  # type: ignore[misc]
    """Writes and shows the results of each evaluation.

    Args:
        by_position: What the loss adds up to.
        needle: Asks for needles; None where it cannot be asked.
        path: A file that gets a line for each evaluation.
        tell: Called with a sentence.
    """

    def __init__(
        self,
        by_position: PositionLosses,
        needle: NeedleProbe | None,
        path: Path,
        tell: Callable[[str], None] | None,
    ) -> None:
        self.by_position, self.needle, self.path, self.tell = by_position, needle, path, tell

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Ask for needles too, and say all of it."""
        parts = self.by_position.take(args.device)
        results = {"step": state.global_step, "eval_loss": metrics["eval_loss"], "eval_loss_by_position": parts}
        said = ", ".join("–" if part is None else f"{part:.3f}" for part in parts)
        text = f"step {state.global_step}: loss {metrics['eval_loss']:.3f} on the evaluation data ({said} by position)"
        if self.needle is not None:
            results["needle"] = share = self.needle()
            text += f", {share:.0%} of {len(self.needle.prompts)} needles at {self.needle.length:,} tokens"
        if not state.is_world_process_zero:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(results) + "\n")
        if self.tell is not None:
            self.tell(text)


def needle_probe(
    model: Any, forward: Any, tokenizer: Any, length: int, seed: int, num_processes: int
) -> NeedleProbe | None:
    """What asks for needles; None where no question fits, or where processes may hold parts of the model."""
    if num_processes > 1:
        return None
    try:
        return NeedleProbe(model, forward, tokenizer, length, seed)
    except CtxextError:
        return None
