"""Material of RULER v2 from the user's files: the questions of MMLU, and the questions and documents of HotpotQA."""

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ctxext.data.records import read_records
from ctxext.errors import CtxextError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

DOWNLOAD = (
    'hf download cais/mmlu --repo-type dataset --include "all/test*" "all/auxiliary_train*" --local-dir DIR/mmlu && '
    'hf download hotpotqa/hotpot_qa --repo-type dataset --include "distractor/*" --local-dir DIR/hotpotqa'
)
"""The command that downloads both data sets to `DIR`."""

_Row = TypeVar("_Row")
_SPACE = re.compile(r"\s+")


@dataclass(frozen=True)
class ChoiceQuestion:
    """A question of MMLU with its four choices, and the letter of the correct one."""

    text: str
    letter: str


@dataclass(frozen=True)
class HopQuestion:
    """A question of HotpotQA.

    Attributes:
        question: The question.
        answer: The correct answer.
        documents: The documents that support the answer.
        distractors: The other documents of the question.
    """

    question: str
    answer: str
    documents: tuple[str, ...]
    distractors: tuple[str, ...]


@functools.lru_cache(maxsize=4)
def read_choice_questions(files: tuple[Path, ...]) -> tuple[ChoiceQuestion, ...]:
    """Read the questions of a split of MMLU, in order."""
    from ctxext.tasks.entries import MMLU_ROW

    questions = []
    for _, row in _read_rows(files, MMLU_ROW):
        choices = (f"{letter}. {choice}" for letter, choice in zip("ABCD", row["choices"], strict=True))
        text = _SPACE.sub(" ", "\n".join((row["question"], *choices)))
        questions.append(ChoiceQuestion(text, "ABCD"[row["answer"]]))
    return _check_count(files, tuple(questions))


@functools.lru_cache(maxsize=2)
def read_documents(files: tuple[Path, ...]) -> tuple[str, ...]:
    """Read the different documents of a split of HotpotQA, in the order of their first questions."""
    from ctxext.tasks.entries import HOTPOT_ROW

    titled = (_list_documents(**row["context"]) for _, row in _read_rows(files, HOTPOT_ROW))
    return _check_count(files, tuple(dict.fromkeys(text for _, text in chain.from_iterable(titled))))


@functools.lru_cache(maxsize=2)
def read_hop_questions(files: tuple[Path, ...]) -> tuple[HopQuestion, ...]:
    """Read the questions of a split of HotpotQA, in order."""
    from ctxext.tasks.entries import HOTPOT_ROW

    questions = []
    for place, row in _read_rows(files, HOTPOT_ROW):
        support, titled = {*row["supporting_facts"]["title"]}, _list_documents(**row["context"])
        golds = tuple(text for title, text in titled if title in support)
        if not golds:
            raise CtxextError(f'{place} has no document of its "supporting_facts".', hint=DOWNLOAD)
        others = tuple(text for title, text in titled if title not in support)
        questions.append(HopQuestion(row["question"], row["answer"], golds, others))
    return _check_count(files, tuple(questions))


def _list_documents(title: Sequence[str], sentences: Sequence[Sequence[str]]) -> list[tuple[str, str]]:
    """Return the title and the text of each document."""
    return [(name, f"{name}\n{''.join(lines)}") for name, lines in zip(title, sentences, strict=False)]


def _read_rows(files: Sequence[Path], schema: "TypeAdapter[_Row]") -> Iterator[tuple[str, _Row]]:
    from ctxext.tasks.entries import check_entry

    for file in files:
        for place, record in read_records(str(file)):
            yield place, check_entry(record, schema, place, DOWNLOAD)


_Entries = TypeVar("_Entries", bound=tuple[object, ...])


def _check_count(files: Sequence[Path], entries: _Entries) -> _Entries:
    if not entries:
        raise CtxextError(f'"{files[0]}" is empty.', hint=DOWNLOAD)
    return entries
