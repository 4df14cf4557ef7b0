"""Eval sets of a search, and the measurement of a recipe on them; the cheapest part comes first.

An eval set has needle prompts at each length, and documents at the original context length.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from pydantic import TypeAdapter

from ctxext.data.encoding import Encoder
from ctxext.data.prompt import Prompt
from ctxext.data.prose import sentences_of
from ctxext.data.texts import read_corpus, read_texts
from ctxext.errors import CtxextError
from ctxext.models.answers import answer_losses
from ctxext.models.model import LoadedModel
from ctxext.models.token_losses import token_losses
from ctxext.report.intervals import mean_interval
from ctxext.search.options import SearchOptions
from ctxext.tasks.needle import Needle
from ctxext.tasks.retrieval import check_fits, make_questions
from ctxext.tasks.settings import Settings

_APART = 1_000_000
"""Offset of the seed for each eval set: none shares a prompt with another or with `ctxext eval`."""

_PART = 2
"""Number of questions at each depth and length in each part of an eval set."""

_MAX_TEXTS = 10_000
_MAX_CHARACTERS = 20_000_000


@dataclass(frozen=True)
class EvalSet:
    """Questions and documents.

    Attributes:
        questions: Questions by prompt length in tokens, shortest first; each question has one prompt per depth.
        documents: Token ids of shape (documents, original context length).
    """

    questions: Mapping[int, Sequence[Sequence[Prompt]]]
    documents: torch.Tensor

    @property
    def lengths(self) -> tuple[int, ...]:
        """Prompt lengths in tokens, shortest first."""
        return tuple(self.questions)

    @property
    def num_questions(self) -> int:
        """Number of questions at each depth and length."""
        return len(self.questions[self.lengths[0]])

    @property
    def num_depths(self) -> int:
        """Number of prompts of each question, which share a text."""
        return len(self.questions[self.lengths[0]][0])

    @property
    def num_prompts(self) -> int:
        """Number of prompts of each length."""
        return sum(map(len, self.questions[self.lengths[0]]))

    def parts(self) -> "Iterator[EvalSet]":
        """Yield parts with a few questions of each length, and documents until none are left."""
        starts = range(0, self.num_questions, _PART)
        size = -(-2 * len(self.documents) // len(starts))
        for place, start in enumerate(starts):
            questions = {length: entries[start : start + _PART] for length, entries in self.questions.items()}
            yield EvalSet(questions, self.documents[place * size : (place + 1) * size])


def make_eval_sets(encoder: Encoder, options: SearchOptions, trained_length: int) -> tuple[EvalSet, EvalSet, EvalSet]:
    """Make the eval sets of the trials, of the finalists, and of the final evaluation."""
    samples = (options.samples, 2 * options.samples, options.checked)
    counts = (options.num_documents, 4 * options.num_documents, 4 * options.checked)
    documents = _read_documents(encoder, options, trained_length, counts)
    sentences = _read_sentences(options.data)
    eval_sets = []
    for number, (count, text) in enumerate(zip(samples, sentences, strict=True)):
        seed = _make_seed(options, number)
        settings = Settings(tasks=("needle",), samples=count, depths=options.depths, seed=seed)
        # With one needle per depth, all depths share a text, and its common prefix runs once.
        task = Needle(num_needles=max(2, options.num_depths), text=text)
        lengths = options.list_lengths(trained_length)
        check_fits(task, encoder, lengths, settings)
        questions = {length: make_questions(task, encoder, length, range(count), settings) for length in lengths}
        eval_sets.append(EvalSet(questions, documents[number]))
    first, second, third = eval_sets
    return first, second, third


def _make_seed(options: SearchOptions, number: int) -> int:
    return options.seed + (number + 1) * _APART


def _read_documents(
    encoder: Encoder, options: SearchOptions, trained_length: int, counts: Sequence[int]
) -> list[torch.Tensor]:
    """Return the documents of each eval set, fewer than `counts` if the data has fewer; eval sets share none."""
    if options.data is None:
        return [
            torch.tensor(_read(None, encoder, count, trained_length, _make_seed(options, number)))
            for number, count in enumerate(counts)
        ]
    documents = _read(options.data, encoder, len(counts) * max(counts), trained_length, 0)
    if len(documents) < 2 * len(counts):
        raise CtxextError(
            f'"{options.data}" contains {len(documents)} documents of {trained_length} tokens; a search needs '
            f"{2 * len(counts)}.",
            hint="Add more text to --data.",
        )
    return [torch.tensor(documents[number :: len(counts)][:count]) for number, count in enumerate(counts)]


def _read(data: str | None, encoder: Encoder, count: int, length: int, seed: int) -> list[list[int]]:
    return read_corpus(data, encoder, count=count, length=length, most=length, seed=seed)


def _read_sentences(data: str | None) -> list[tuple[str, ...]]:
    """Read the sentences of the user's text, a third for each eval set; none if the package's prose is used."""
    if data is None:
        return [(), (), ()]
    sentences = sentences_of("\n\n".join(islice(read_texts(data), _MAX_TEXTS))[:_MAX_CHARACTERS])
    size = len(sentences) // 3
    if not size:
        raise CtxextError(f'"{data}" contains too little text to hide needles in.', hint="Use a text of several pages.")
    return [sentences[number * size : (number + 1) * size] for number in range(3)]


_ROUND = 8
"""Number of questions at each depth and length between checks whether to continue."""


@dataclass(frozen=True)
class Measurement:
    """Measurement of a model on an eval set.

    Attributes:
        short: Mean loss of each document in nats per token.
        answers: Mean loss of each answer's tokens in nats, by prompt length.
        correct: Whether each prompt is answered, by prompt length.
        lengths: All lengths of the eval set; those that were not reached have no answers.
        num_prompts: Number of prompts of the eval set at each length.
        per_text: Number of consecutive prompts about the same text.
    """

    short: list[float]
    answers: Mapping[int, list[float]]
    correct: Mapping[int, list[bool]]
    lengths: tuple[int, ...]
    num_prompts: int
    per_text: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether the whole eval set was measured."""
        return sum(map(len, self.answers.values())) == self.num_prompts * len(self.lengths)

    @property
    def losses(self) -> dict[int, float]:
        """Mean bounded loss of the answers, by length."""
        return {length: mean(list(map(bound_loss, losses))) for length, losses in self.answers.items()}

    @property
    def loss(self) -> float:
        """Mean bounded loss over all lengths; lengths that were not reached count like the last measured one.

        Infinite if no needle was measured.
        """
        losses = list(self.losses.values())
        if not losses:
            return math.inf
        return mean([*losses, *[losses[-1]] * (len(self.lengths) - len(losses))])

    @property
    def least_loss(self) -> float:
        """Lower bound of the loss, whatever the results of the remaining prompts."""
        known = math.fsum(bound_loss(loss) for losses in self.answers.values() for loss in losses)
        return known / (self.num_prompts * len(self.lengths))

    def __add__(self, other: "Measurement") -> "Measurement":
        """Join the measurements of two parts of one eval set."""
        return Measurement(
            self.short + other.short,
            {length: losses + other.answers[length] for length, losses in self.answers.items()},
            {length: answers + other.correct[length] for length, answers in self.correct.items()},
            self.lengths,
            self.num_prompts + other.num_prompts,
            self.per_text,
        )

    def exact(self, length: int) -> float:
        """Return the share of answered prompts of a length."""
        return mean([float(right) for right in self.correct[length]])

    @property
    def share(self) -> float:
        """Share of answered prompts, as the mean over all lengths."""
        return mean([self.exact(length) for length in self.correct])

    def rise(self, stock: "Measurement") -> tuple[float, float]:
        """Compute the relative rise of the loss on documents over the source's, and half its 95 % interval."""
        differences = [loss - before for loss, before in zip(self.short, stock.short, strict=True)]
        middle, half = mean_interval(differences)
        return middle / mean(stock.short), half / mean(stock.short)

    def gain(self, stock: "Measurement") -> tuple[float, float]:
        """Compute the decrease of an answer's bounded loss from the source's, and half its 95 % interval, by text."""
        texts = []
        for length, answers in self.answers.items():
            gains = [
                bound_loss(before) - bound_loss(after)
                for after, before in zip(answers, stock.answers[length], strict=True)
            ]
            texts += [mean(gains[start : start + self.per_text]) for start in range(0, len(gains), self.per_text)]
        return mean_interval(texts)


_MEASUREMENT = TypeAdapter(Measurement)
"""Reader of the measurements of a study; building it takes 200 times as long as a read."""


def read_measurement(content: Mapping[str, Any]) -> Measurement:
    """Read a measurement from the JSON of a study, written by `dataclasses.asdict`; lengths are text in JSON."""
    return _MEASUREMENT.validate_python(content)


def bound_loss(nats: float) -> float:
    """Map the loss of an answer to a range from 0, if the model is certain of it, to 1, if it is certain of another.

    The result is one minus the probability of its tokens (their geometric mean). In nats, a single confident miss would
    outweigh many other answers, and the few hardest prompts would decide the choice of a recipe.
    """
    return -math.expm1(-nats)


def mean(values: list[float]) -> float:
    """Compute the mean with an exact sum, so that it does not depend on the order."""
    return math.fsum(values) / len(values)


def measure(
    loaded: LoadedModel, eval_set: EvalSet, is_hopeless: Callable[[Measurement], bool] | None = None
) -> Measurement:
    """Measure a model: documents first, then rounds of needles, each from the shortest prompts to the longest.

    `is_hopeless` is called before each length of each round; if it returns true, the rest is skipped.
    """
    size = loaded.rows_that_fit(eval_set.documents.shape[1])
    starts = range(0, len(eval_set.documents), size)
    document_losses = list[float]()
    for start in starts:  # Numbers, because a kept tensor would lie where freed logits were.
        losses_of_batch = token_losses(loaded, eval_set.documents[start : start + size].to(loaded.device))
        document_losses += losses_of_batch.mean(1).tolist()
    measurement = Measurement(document_losses, {}, {}, eval_set.lengths, eval_set.num_prompts, eval_set.num_depths)
    for first in range(0, eval_set.num_questions, _ROUND):
        for length, questions in eval_set.questions.items():
            if is_hopeless is not None and is_hopeless(measurement):
                return measurement
            losses, correct, batch = list[float](), list[bool](), questions[first : first + _ROUND]
            size = loaded.rows_that_fit(length)
            for start in range(0, len(batch), size):
                # Keep the order of the prompts, whatever prefixes the model shared.
                by_depth = sorted(answer_losses(loaded, batch[start : start + size]))
                losses += itertools.chain.from_iterable(zip(*(values for _, values, _ in by_depth), strict=True))
                correct += itertools.chain.from_iterable(zip(*(right for _, _, right in by_depth), strict=True))
            answers = {**measurement.answers, length: measurement.answers.get(length, []) + losses}
            right = {**measurement.correct, length: measurement.correct.get(length, []) + correct}
            measurement = dataclasses.replace(measurement, answers=answers, correct=right)
    return measurement
