"""Questions about one place in a long text: how samples become prompts, batches and records."""

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ctxext.data.encoding import Encoder
from ctxext.data.prompt import Prompt, encode_parts, lay_out, too_short
from ctxext.errors import CtxextError
from ctxext.evaluate.model import LoadedModel
from ctxext.evaluate.scoring.exact_match import score_depths
from ctxext.evaluate.scoring.generation import generate_exact, generate_matching
from ctxext.evaluate.settings import Settings
from ctxext.evaluate.tasks.base import Key, Record, Task
from ctxext.evaluate.tasks.kv import KeyValue

FREE_TEXT = ("documents",)
"""Tasks whose score looks for an answer inside what the model writes."""

Score = Callable[[LoadedModel, Sequence[Sequence[Prompt]], Sequence[int]], Iterator[tuple[int, list[bool]]]]

_ASKED_RECORDS = 4
"""Records of one key-value text that are asked for, each at another depth, where the text is long enough."""

ANSWER_ROOM = 32
"""Tokens that a model may write where it writes freely."""


@dataclass(frozen=True)
class RetrievalWork:
    """Some samples of one task at one length, at every depth."""

    task: Task
    length: int
    samples: tuple[int, ...]
    settings: Settings

    @property
    def label(self) -> str:
        """What the progress line says."""
        return f"{self.task.name} {self.length}"

    @property
    def keys(self) -> list[Key]:
        """Every sample at every depth."""
        return [
            Key(self.task.name, self.length, depth, sample) for depth in self.settings.depths for sample in self.samples
        ]

    def run(self, loaded: LoadedModel, wanted: set[Key]) -> Iterator[Record]:
        """Ask the questions; one record per depth."""
        depths = self.settings.depths
        numbers = [
            i
            for i, depth in enumerate(depths)
            if any(Key(self.task.name, self.length, depth, sample) in wanted for sample in self.samples)
        ]
        if not numbers:
            return
        score: Score = score_depths
        if self.task.name in FREE_TEXT:
            score = generate_matching
        elif self.settings.generate:
            score = generate_exact
        questions = make_questions(self.task, loaded.encoder, self.length, self.samples, self.settings)
        for number, correct in score(loaded, questions, numbers):
            yield {
                "task": self.task.name,
                "length": self.length,
                "depth": depths[number],
                "samples": list(self.samples),
                "correct": [int(right) for right in correct],
            }


def make_questions(
    task: Task, encoder: Encoder, length: int, samples: Sequence[int], settings: Settings
) -> list[list[Prompt]]:
    """For each sample its prompts, one per depth; the same texts for every model.

    Raises:
        CtxextError: a question does not fit into the length.
    """
    questions = []
    task = fitting(task, encoder, length)
    for sample in samples:
        pieces = task.pieces(_random(settings, task, length, sample))
        parts = encode_parts(pieces, encoder, answer_room=_answer_room(task))
        rng = _random(settings, task, length, sample, "layout")
        questions.append(lay_out(pieces, parts, encoder, length, settings.depths, rng))
    return questions


def fitting(task: Task, encoder: Encoder, length: int) -> Task:
    """The task with as many records to ask for as leave room for a haystack; other tasks as they are."""
    if not isinstance(task, KeyValue):
        return task
    several = dataclasses.replace(task, num_needles=_ASKED_RECORDS)
    size = encode_parts(several.pieces(random.Random(0)), encoder).size
    return several if 2 * size <= length else task


def check_fits(task: Task, encoder: Encoder, lengths: Sequence[int], settings: Settings) -> None:
    """Refuse a length that is too small for a question, before anything is run.

    Raises:
        CtxextError: one does not fit; says how much the largest question needs.
    """
    for length in lengths:
        sizes = [
            encode_parts(task.pieces(_random(settings, task, length, n)), encoder, answer_room=_answer_room(task)).size
            for n in range(settings.samples)
        ]
        if max(sizes) > length:
            error = too_short(length, max(sizes), f'The task "{task.name}"')
            if task.name == "kv" and settings.kv_ids == "uuid":
                error = CtxextError(error.message, hint=f"{error.hint} Or use short ids: --kv-ids number.")
            raise error


def _answer_room(task: Task) -> int:
    return ANSWER_ROOM if task.name in FREE_TEXT else 0


def _random(settings: Settings, task: Task, length: int, sample: int, what: str = "question") -> random.Random:
    return random.Random(f"{settings.seed} {task.name} {length} {sample} {what}")
