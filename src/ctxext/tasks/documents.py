"""Multi-document question answering, with the gold document moved through the positions."""

import dataclasses
import functools
import itertools
import random
import re
import string
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from typing_extensions import override

from ctxext.data import prose
from ctxext.data.encoding import Encoder
from ctxext.data.prompt import Pieces, Prompt, QuestionText
from ctxext.errors import CtxextError
from ctxext.tasks.base import SeveralNeedles, leaves_room

if TYPE_CHECKING:
    from ctxext.tasks.entries import DocumentQuestion

OPENING = (
    "Write a high-quality answer for the given question using only the provided search results "
    "(some of which might be irrelevant).\n\n"
)
DOCUMENT = "Document [{number}](Title: {title}) {text}\n"
ASK = "\nQuestion: {question}\nAnswer:"
FACTS = (
    ("The {key} is kept in {place}.", "Where is the {key} kept?", " {place}", "says where the {key} is kept"),
    (
        "The owner of the {key} is {person}.",
        "Who is the owner of the {key}?",
        " {person}",
        "names the owner of the {key}",
    ),
)


_MOST = 30
"""Maximum number of questions per text: half of the nouns, which leaves some for the other documents."""


@dataclass(frozen=True)
class Passage:
    """One search result; `is_gold` marks the one with the answer."""

    title: str
    text: str
    is_gold: bool = False

    def unit(self, number: int, form: str = DOCUMENT) -> str:
        """Format the document for a prompt."""
        return form.format(number=number, title=self.title, text=self.text)


@dataclass(frozen=True)
class Question:
    """A question with its documents; each of `answers` is correct."""

    question: str
    answers: tuple[str, ...]
    documents: tuple[Passage, ...]

    @property
    def gold(self) -> Passage:
        """The document with the answer."""
        return next(document for document in self.documents if document.is_gold)


@dataclass(frozen=True, kw_only=True)
class Documents(SeveralNeedles):
    """Answer a question from one of many documents.

    The wording is that of the Lost in the Middle release. Documents have random numbers, which reveal nothing about the
    position, and a document has the same number at every position.

    Attributes:
        questions: Questions read with `read_questions`; empty for random facts.
        ask: The answer for random facts: "which" is the number of the document, "fact" its fact, "any" either.
        num_needles: Number of documents of a text with a question, at most 30. Each answers a question that no other
            document answers, and one reading serves them all. It is 1 in a text that is too short.
    """

    name: str = "documents"
    description: str = "One of many documents answers the question. Correct if the generated text contains the answer."
    shows: str = "answering questions over many documents"
    options: tuple[str, ...] = ("num_needles", "documents", "repeat_question")
    is_written: bool = True
    answer_room: int = 32
    opening: str = OPENING
    document: str = DOCUMENT
    ask_for: str = ASK
    questions: tuple[Question, ...] = ()
    ask: str = "any"
    num_needles: int = 1

    def with_options(self, options: Mapping[str, Any]) -> Self:
        """Return the task with the user's options; generated questions are about facts, as a user's are."""
        return super().with_options({**options, "ask": "fact", "num_needles": min(options["num_needles"], _MOST)})

    def fit_to_length(self, encoder: Encoder, length: int) -> Self:
        """Return the task with one question per text if several would leave no room for a haystack."""
        return self if leaves_room(self, encoder, length) else dataclasses.replace(self, num_needles=1)

    @override
    def pieces(self, rng: random.Random) -> Pieces:
        numbers = _draw_numbers(random.Random(rng.getrandbits(64)))
        gold_numbers = [next(numbers) for _ in range(self.num_needles)]
        if self.questions:
            chosen = self._choose_questions(rng)
            others = self._draw_distractors(chosen, random.Random(rng.getrandbits(64)))
            golds = [item.gold for item in chosen]
            drawn = [(item.question, f" {item.answers[0]}", item.answers) for item in chosen]
        else:
            golds, generated, others = self.draw_documents(rng, gold_numbers)
            drawn = [(question, answer, (answer.strip(),)) for question, answer in generated]
        questions = tuple(
            QuestionText(self.ask_for.format(question=question), answer, answers) for question, answer, answers in drawn
        )
        gold_numbers += [next(numbers) for _ in golds[self.num_needles :]]
        return Pieces(
            opening=self.opening,
            haystack=(document.unit(number, self.document) for document, number in zip(others, numbers, strict=False)),
            needles=tuple(gold.unit(number, self.document) for gold, number in zip(golds, gold_numbers, strict=False)),
            questions=questions,
            padding="\n",
        )

    def draw_documents(
        self, rng: random.Random, gold_numbers: Sequence[int]
    ) -> tuple[list[Passage], list[tuple[str, str]], Iterator[Passage]]:
        """Draw documents with answers, numbered by `gold_numbers`, their questions and answers, and other documents."""
        golds, questions, nouns = list[Passage](), list[tuple[str, str]](), set[str]()
        while len(golds) < len(gold_numbers):
            key = prose.object_name(rng)
            if key.split()[-1] in nouns:
                continue
            nouns.add(key.split()[-1])
            gold, both = random_document(rng, key, gold_numbers[len(golds)])
            golds.append(gold)
            questions.append(both[{"which": 0, "fact": 1, "any": rng.randrange(2)}[self.ask]])
        return golds, questions, _draw_documents(random.Random(rng.getrandbits(64)), nouns)

    def _choose_questions(self, rng: random.Random) -> list[Question]:
        """Draw questions that only their own gold document answers; fewer if the file has no more."""
        chosen = [rng.choice(self.questions)]
        candidates = rng.sample(self.questions, len(self.questions)) if self.num_needles > 1 else []
        for new in candidates:
            if len(chosen) < self.num_needles and not any(
                best_subspan_match(new.gold.text, old.answers) or best_subspan_match(old.gold.text, new.answers)
                for old in chosen
            ):
                chosen.append(new)
        return chosen

    def grade(self, text: str, prompt: Prompt) -> float:
        """Return 1 if the generated text contains an answer, else 0."""
        return float(best_subspan_match(text, prompt.answers))

    def _draw_distractors(self, chosen: Sequence[Question], rng: random.Random) -> Iterator[Passage]:
        """Yield the distractors of the questions, then documents of other questions, none with another's answer."""

        def answers_another(document: Passage, source: Question | None = None) -> bool:
            return any(
                document.text == question.gold.text or best_subspan_match(document.text, question.answers)
                for question in chosen
                if question is not source
            )

        for in_turn in itertools.zip_longest(*(question.documents for question in chosen)):
            for document, source in zip(in_turn, chosen, strict=True):
                if document is not None and not document.is_gold and not answers_another(document, source):
                    yield document
        others = [question for question in self.questions if question not in chosen] or chosen
        pool = [document for question in others for document in question.documents if not answers_another(document)]
        while pool:  # With an empty pool the haystack ends, and `lay_out` raises that it is too short.
            yield rng.choice(pool)


def random_document(
    rng: random.Random, key: str, number: int, *, bare: bool = False
) -> tuple[Passage, list[tuple[str, str]]]:
    """Draw a document about `key` and two questions, about the document's number and about its fact.

    Sentences of prose may surround the fact, unless the document is `bare`.
    """
    fact, question, answer, clause = rng.choice(FACTS)
    fill = {"key": key, "place": rng.choice(prose.PLACES), "person": prose.person_name(rng)}
    text = [prose.sentence(rng), fact.format(**fill), prose.sentence(rng)][rng.randrange(2) : rng.randrange(2, 4)]
    if bare:
        text = [fact.format(**fill)]
    document = Passage(f"News from {rng.choice(prose.PLACES)}", " ".join(text), is_gold=True)
    which = f"Which document {clause.format(**fill)}?"
    return document, [(which, f" Document [{number}"), (question.format(**fill), answer.format(**fill))]


def best_subspan_match(text: str, answers: Iterable[str]) -> bool:
    """Return whether the text contains an answer, scored as in the Lost in the Middle release.

    Case, punctuation, articles and extra spaces are ignored. Unlike there, an answer of nothing else never matches.
    """
    normalized = _normalize(text)
    return any(answer in normalized for answer in _normalize_all(tuple(answers)))


@functools.lru_cache(maxsize=1024)
def _normalize_all(answers: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(filter(None, map(_normalize, answers)))


def _normalize(text: str) -> str:
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def read_questions(path: Path) -> tuple[Question, ...]:
    """Read JSON lines with the fields of the Lost in the Middle release.

    The fields are `question`, `answers`, and `ctxs` with `title`, `text` and optionally `isgold` or `hasanswer`.
    Without these, the gold document is the first one that contains an answer.
    """
    from ctxext.tasks.entries import DOCUMENT_QUESTION, read_entries

    entries = read_entries(path, DOCUMENT_QUESTION, _FORM)
    questions = tuple(_make_question(place, entry) for place, entry in entries)
    if not questions:
        raise CtxextError(f'"{path}" contains no questions.', hint="Use a file with one JSON object per line.")
    return questions


_FORM = "Each line is a JSON object with question, answers (a list) and ctxs (a list of title, text)."


def _make_question(place: str, entry: "DocumentQuestion") -> Question:
    answers, contexts = tuple(entry["answers"]), entry["ctxs"]
    if not _normalize_all(answers):
        raise CtxextError(f'{place} has only articles and punctuation in its "answers".', hint=_FORM)
    marks: list[bool] = []
    for mark in ("isgold", "hasanswer"):
        marks = marks if any(marks) else [bool(context.get(mark)) for context in contexts]
    if not any(marks):
        marks = [best_subspan_match(context["text"], answers) for context in contexts]
    if not any(marks):
        raise CtxextError(f'{place} has no document with an answer in "ctxs".', hint='Mark one with "isgold": true.')
    gold = marks.index(True)
    documents = (Passage(c["title"], c["text"], index == gold) for index, c in enumerate(contexts))
    return Question(entry["question"], answers, tuple(documents))


def _draw_documents(rng: random.Random, without: Collection[str]) -> Iterator[Passage]:
    while True:
        key = prose.object_name(rng)
        if key.split()[-1] not in without:
            yield random_document(rng, key, 0)[0]


def _draw_numbers(rng: random.Random) -> Iterator[int]:
    """Yield endless different numbers, first of three digits, then of four, and so on."""
    num_digits = 3
    while True:
        numbers = list(range(10 ** (num_digits - 1), 10**num_digits))
        rng.shuffle(numbers)
        yield from numbers
        num_digits += 1
