"""The eval sets of a search: needle prompts at each length, and documents at the original context length."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from ctxext.data.encoding import Encoder
from ctxext.data.prompt import Prompt
from ctxext.data.prose import sentences_of
from ctxext.data.texts import read_corpus, read_texts
from ctxext.errors import CtxextError
from ctxext.evaluate.settings import Settings
from ctxext.evaluate.tasks.needle import Needle
from ctxext.evaluate.tasks.retrieval import check_fits, make_questions
from ctxext.search.options import SearchOptions

_APART = 1_000_000
"""Added to the seed for each eval set, so that none shares a prompt with another or with `ctxext eval`."""

_PART = 2
"""Questions at each depth and length in a part of an eval set."""

_MAX_TEXTS = 10_000
_MAX_CHARACTERS = 20_000_000


@dataclass(frozen=True)
class EvalSet:
    """Questions and documents.

    Attributes:
        questions: By prompt length in tokens, shortest first: for each question its prompts, one per depth.
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
        """Questions at each depth and length."""
        return len(self.questions[self.lengths[0]])

    @property
    def num_depths(self) -> int:
        """Prompts of each question, which share a text."""
        return len(self.questions[self.lengths[0]][0])

    @property
    def num_prompts(self) -> int:
        """Prompts of each length."""
        return sum(map(len, self.questions[self.lengths[0]]))

    def parts(self) -> "Iterator[EvalSet]":
        """A few questions of each length at a time, with documents until there are no more of those."""
        starts = range(0, self.num_questions, _PART)
        size = -(-2 * len(self.documents) // len(starts))
        for place, start in enumerate(starts):
            questions = {length: asked[start : start + _PART] for length, asked in self.questions.items()}
            yield EvalSet(questions, self.documents[place * size : (place + 1) * size])


def make_eval_sets(encoder: Encoder, options: SearchOptions, trained_length: int) -> tuple[EvalSet, EvalSet, EvalSet]:
    """The eval sets of the trials, of the run-off among the best recipes, and of the last check.

    Raises:
        CtxextError: a length is too short for a question, or the data cannot be read or is too little.
    """
    samples = (options.samples, 2 * options.samples, options.checked)
    counts = [max(2, count) for count in (2 * options.samples, 8 * options.samples, 4 * options.checked)]
    documents = _documents(encoder, options, trained_length, counts)
    sentences = _own_sentences(options.data)
    eval_sets = []
    for number, (count, text) in enumerate(zip(samples, sentences, strict=True)):
        seed = _seed(options, number)
        settings = Settings(tasks=("needle",), samples=count, depths=options.depths, seed=seed)
        # One needle for each depth: a single text then serves all depths, whose common beginning is run once.
        task = Needle(num_needles=max(2, options.num_depths), text=text)
        lengths = options.lengths_from(trained_length)
        check_fits(task, encoder, lengths, settings)
        questions = {length: make_questions(task, encoder, length, range(count), settings) for length in lengths}
        eval_sets.append(EvalSet(questions, documents[number]))
    first, second, third = eval_sets
    return first, second, third


def _seed(options: SearchOptions, number: int) -> int:
    return options.seed + (number + 1) * _APART


def _documents(
    encoder: Encoder, options: SearchOptions, trained_length: int, counts: Sequence[int]
) -> list[torch.Tensor]:
    """The documents of each eval set, fewer than counted if the data has fewer. Eval sets share none."""
    if options.data is None:
        return [
            torch.tensor(_read(None, encoder, count, trained_length, _seed(options, number)))
            for number, count in enumerate(counts)
        ]
    documents = _read(options.data, encoder, len(counts) * max(counts), trained_length, 0)
    if len(documents) < 2 * len(counts):
        raise CtxextError(
            f'"{options.data}" holds {len(documents)} documents of {trained_length} tokens; a search needs '
            f"{2 * len(counts)}, some of them for its last check.",
            hint="Give more text with --data.",
        )
    return [torch.tensor(documents[number :: len(counts)][:count]) for number, count in enumerate(counts)]


def _read(data: str | None, encoder: Encoder, count: int, length: int, seed: int) -> list[list[int]]:
    return read_corpus(data, encoder, count=count, length=length, most=length, seed=seed).documents


def _own_sentences(data: str | None) -> list[tuple[str, ...]]:
    """The user's text as sentences, a third for each eval set; none where the package's prose is used."""
    if data is None:
        return [(), (), ()]
    sentences = sentences_of("\n\n".join(islice(read_texts(data), _MAX_TEXTS))[:_MAX_CHARACTERS])
    size = len(sentences) // 3
    if not size:
        raise CtxextError(f'"{data}" holds too little text to hide needles in.', hint="Give a text of some pages.")
    return [sentences[number * size : (number + 1) * size] for number in range(3)]
