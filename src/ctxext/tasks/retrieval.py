"""Questions about one place in a long text: prompts, batches and records of their samples."""

import random
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from typing_extensions import override

from ctxext.data.encoding import Encoder
from ctxext.data.prompt import Pieces, Prompt, too_short
from ctxext.errors import CtxextError
from ctxext.models.model import LoadedModel
from ctxext.tasks.base import Key, Record, RetrievalTask, Work
from ctxext.tasks.settings import Settings

_QUESTION = 32
"""A further question about a text copies its cache, which takes about as long as reading one token of this many."""
_USUAL_ANSWER = 8
"""Tokens of a usual answer."""


@dataclass(frozen=True)
class RetrievalWork(Work):
    """Some samples of one task at one length, at every depth."""

    task: RetrievalTask
    samples: tuple[int, ...]
    settings: Settings

    @property
    def keys(self) -> list[Key]:
        """Every sample at every depth."""
        return [Key(self.task.name, self.length, depth, sample) for depth in self._depths for sample in self.samples]

    @property
    def _depths(self) -> tuple[float | None, ...]:
        return self.settings.depths if self.task.has_depths else (None,)

    @override
    def list_readings(self, keys: Collection[Key], *, can_share: bool) -> list[int]:
        depths = Counter(key.sample for key in keys)
        count = self.task.count_texts if can_share else int
        texts = sum(count(num_depths) for num_depths in depths.values())
        return [self.length] * texts + [-(-self.length // _QUESTION)] * (len(keys) - texts)

    @override
    def count_written(self, keys: Collection[Key]) -> int:
        if not (self.task.is_generated or self.settings.generate):
            return 0
        usual = max(_USUAL_ANSWER, self.task.answer_room // (2 if self.task.stays_right else 1))
        return len(keys) * usual

    def run(self, loaded: LoadedModel, keys: set[Key]) -> Iterator[Record]:
        """Run the questions and yield one record per depth."""
        depths = self._depths
        numbers = [
            i
            for i, depth in enumerate(depths)
            if any(Key(self.task.name, self.length, depth, sample) in keys for sample in self.samples)
        ]
        if not numbers:
            return
        questions = make_questions(self.task, loaded.encoder, self.length, self.samples, self.settings)
        for number, correct, cut, read, thought in self.task.score(
            loaded, questions, numbers, generate=self.settings.generate
        ):
            texts = [self.task.number_text(sample) for sample in self.samples]
            groups = [list(question[number].groups) for question in questions]
            yield {
                "task": self.task.name,
                "length": self.length,
                "depth": depths[number],
                "samples": list(self.samples),
                **({"texts": texts} if texts != list(self.samples) else {}),
                **({"groups": groups} if any(groups) else {}),
                "correct": [int(right) if right in (0, 1) else right for right in correct],
                **({"cut": [*map(int, cut)]} if any(cut) else {}),
                **({"read": [*read]} if read else {}),
                **({"thought": [*map(int, thought)]} if any(thought) else {}),
            }


def make_questions(
    task: RetrievalTask, encoder: Encoder, length: int, samples: Sequence[int], settings: Settings
) -> list[list[Prompt]]:
    """Make the prompts of each sample, one per depth; every model gets the same texts."""
    questions, encoder = list[list[Prompt]](), encoder.use_form(task.form)
    task = task.fit_to_length(encoder, length)
    for sample in samples:
        pieces = _draw_pieces(task, length, sample, settings)
        rng = _make_rng(settings, task, length, sample, "layout")
        depths = settings.depths if task.has_depths else (rng.random(),)
        prompts = task.prompts(pieces, encoder, length, depths, rng)
        questions.append(task.select_question(prompts, sample % task.questions_per_text))
    return questions


def _draw_pieces(task: RetrievalTask, length: int, sample: int, settings: Settings) -> Pieces:
    pieces = task.draw(_make_rng(settings, task, length, sample), sample)
    is_repeated = settings.repeat_question and "repeat_question" in task.options
    return pieces.with_question_first() if is_repeated else pieces


def num_questions(task: RetrievalTask, settings: Settings) -> int:
    """Return the number of different questions per length; tasks with depths have each question at every depth."""
    return settings.samples * (1 if task.has_depths else len(settings.depths))


def check_fits(
    task: RetrievalTask,
    encoder: Encoder,
    lengths: Sequence[int],
    settings: Settings,
    context_length: int | None = None,
) -> int:
    """Return the number of tokens of the longest prompt; raise if a prompt is too long, before any model is loaded.

    Args:
        task: The task.
        encoder: The tokenizer.
        lengths: Prompt lengths.
        settings: Samples, depths and seed.
        context_length: The limit for prompts that may be longer than their length; None for no limit.
    """
    longest, encoder = 0, encoder.use_form(task.form)
    for length in lengths:
        fitted = task.fit_to_length(encoder, length)
        count = num_questions(task, settings)
        sizes = [fitted.size(_draw_pieces(fitted, length, number, settings), encoder) for number in range(count)]
        longest = max(longest, *sizes)
        if task.is_exact and max(sizes) > length:
            error = too_short(length, max(sizes), f'The task "{task.name}"')
            raise CtxextError(error.message, hint=f"{error.hint} {task.advice}".rstrip())
        if context_length is not None and max(sizes) > max(length, context_length):
            raise CtxextError(
                f'Prompts of "{task.name}" at {length} have up to {max(sizes)} tokens with their answers, but the '
                f"context length is {context_length}.",
                hint="Use shorter --lengths, or --allow-beyond.",
            )
    return longest


def _make_rng(
    settings: Settings, task: RetrievalTask, length: int, sample: int, stream: str = "question"
) -> random.Random:
    name = task.same_questions_as or task.name
    return random.Random(f"{settings.seed} {name} {length} {sample // task.questions_per_text} {stream}")
