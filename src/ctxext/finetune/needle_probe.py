"""Needle evaluation during training."""

from typing import Any

import torch

from ctxext.checkpoint.head import Head
from ctxext.data.encoding import Encoder
from ctxext.tasks.needle import Needle
from ctxext.tasks.retrieval import check_fits, make_questions
from ctxext.tasks.settings import Settings

_NEEDLES = Settings(tasks=("needle",), samples=2)


class NeedleProbe:
    """Needle evaluation of a causal language model during training, with prompts of the target length.

    Its head uses the model's original forward, not the one that returns the loss.
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
        """Return the share of prompts with the right answer by greedy prediction."""
        return sum(map(self._is_answered, self.prompts)) / len(self.prompts)

    def _is_answered(self, prompt: Any) -> bool:
        ids = torch.tensor([prompt.ids], device=self.head.model.device)
        answer = slice(-prompt.num_answer - 1, -1)
        logits = self.head(self.head.read(ids)[:, answer], ids[:, answer])
        return bool((logits[0].argmax(-1) == ids[0, -prompt.num_answer :]).all())
