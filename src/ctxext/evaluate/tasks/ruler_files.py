"""Original material of RULER from the user's files, read as NVIDIA's scripts read it (scripts/data/synthetic)."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxext.data import prose
from ctxext.errors import CtxextError
from ctxext.files.strict import parse_json, read_text

_FEWEST_WORDS, _LONGEST_WORD = 40, 50


@dataclass(frozen=True)
class Words:
    """The words of keys and lists; a key is an adjective and a noun with a hyphen between them."""

    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]
    words: tuple[str, ...]


_SINGLE = dict.fromkeys((*prose.OBJECTS, *prose.GOODS, *prose.SITES, *prose.TRADES, *prose.ADJECTIVES))
PACKAGE_WORDS = Words(
    tuple(prose.ADJECTIVES),
    tuple(prose.OBJECTS),
    (*_SINGLE, *(f"{adjective}-{noun}" for adjective in prose.ADJECTIVES for noun in prose.OBJECTS)),
)
"""The words of the package."""


@dataclass(frozen=True)
class SetQuestion:
    """A question of a question set.

    Attributes:
        question: The question.
        answers: All correct answers.
        documents: Indices of the documents that are always in the text; the first contains the answer if known.
        related: Indices of the documents that are added before any others.
    """

    question: str
    answers: tuple[str, ...]
    documents: tuple[int, ...]
    related: tuple[int, ...] = ()


@dataclass(frozen=True)
class QuestionSet:
    """The questions and the different documents of SQuAD or HotpotQA."""

    documents: tuple[str, ...]
    questions: tuple[SetQuestion, ...]


def read_essays(path: Path) -> tuple[str, ...]:
    """Read plain text, or JSON with the field `text`, as sentences; all white space is one space, as in niah.py."""
    text = read_text(path)
    if path.suffix == ".json":
        with _explain_form(path, 'a JSON object with the field "text"'):
            text = _check_text(parse_json(text, str(path))["text"])
    sentences = prose.sentences_of(" ".join(text.split()))
    if not sentences:
        raise _empty(path, "text")
    return sentences


def read_words(path: Path) -> Words:
    """Read words, one per line, or JSON.

    JSON is a list of words, an object with words as its values (english_words.json), or an object with lists of words,
    "adjectives" and "nouns" among them (the lists of wonderwords). Without these two, keys are two words of the list.
    """
    content: Any = [line for line in read_text(path).splitlines() if line.strip()]
    if path.suffix == ".json":
        content = parse_json(read_text(path), str(path))
    with _explain_form(path, "a list of words, or a JSON object with lists of words"):
        lists = {"": content} if isinstance(content, list) else dict(content)
        if all(isinstance(value, str) for value in lists.values()):
            lists = {"": list(lists.values())}
        by_name = {name: _unique_words(words) for name, words in lists.items()}
    words = _unique_words([*itertools.chain.from_iterable(by_name.values())])
    read = Words(by_name.get("adjectives", words), by_name.get("nouns", words), words)
    if min(len(words), len(read.adjectives) * len(read.nouns)) < _FEWEST_WORDS:
        raise CtxextError(
            f'"{path}" contains {len(words)} different words.', hint=f"Use a file with at least {_FEWEST_WORDS} words."
        )
    return read


def read_squad(path: Path) -> QuestionSet:
    """Read the answerable questions of SQuAD, with the paragraphs of the same article as related documents."""
    with _explain_form(path, "the JSON file of SQuAD v2 (dev-v2.0.json)"):
        articles = parse_json(read_text(path), str(path))["data"]
        paragraphs = [
            [_check_text(paragraph["context"]) for paragraph in article["paragraphs"]] for article in articles
        ]
        documents, indices = _number_documents(itertools.chain.from_iterable(paragraphs))
        questions = tuple(
            SetQuestion(
                _check_text(entry["question"]),
                tuple(_check_text(answer["text"]) for answer in entry["answers"]),
                (indices[paragraph["context"]],),
                tuple(index for index in map(indices.__getitem__, texts) if index != indices[paragraph["context"]]),
            )
            for article, texts in zip(articles, paragraphs, strict=True)
            for paragraph in article["paragraphs"]
            for entry in paragraph["qas"]
            if entry["answers"] and not entry.get("is_impossible")
        )
    return _check_questions(path, documents, questions)


def read_hotpot(path: Path) -> QuestionSet:
    """Read the questions of HotpotQA, each with its ten paragraphs; those with supporting facts come first."""
    with _explain_form(path, "the JSON file of HotpotQA (hotpot_dev_distractor_v1.json)"):
        entries = parse_json(read_text(path), str(path))
        texts = [{title: f"{title}\n{''.join(lines)}" for title, lines in entry["context"]} for entry in entries]
        documents, indices = _number_documents(text for of_entry in texts for text in of_entry.values())
        questions = []
        for entry, of_entry in zip(entries, texts, strict=True):
            support = {title for title, _ in entry.get("supporting_facts", ())}
            titles = sorted(of_entry, key=lambda title: title not in support)
            in_order = tuple(indices[of_entry[title]] for title in titles)
            questions.append(SetQuestion(_check_text(entry["question"]), (_check_text(entry["answer"]),), in_order))
    return _check_questions(path, documents, tuple(questions))


def _number_documents(texts: Iterator[str]) -> tuple[tuple[str, ...], dict[str, int]]:
    """Return the different documents in alphabetical order, and the index of each."""
    documents = tuple(sorted(set(texts)))
    return documents, {text: index for index, text in enumerate(documents)}


def _check_questions(path: Path, documents: tuple[str, ...], questions: tuple[SetQuestion, ...]) -> QuestionSet:
    if not questions:
        raise _empty(path, "questions with answers")
    return QuestionSet(documents, questions)


def _unique_words(words: Sequence[str]) -> tuple[str, ...]:
    """Return the different words in alphabetical order."""
    unique = sorted({_check_text(word).strip() for word in words} - {""})
    if any(len(word) > _LONGEST_WORD or "\n" in word for word in unique):
        raise ValueError
    return tuple(unique)


def _check_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _empty(path: Path, content: str) -> CtxextError:
    return CtxextError(f'"{path}" contains no {content}.', hint="Check that the file is complete.")


@contextmanager
def _explain_form(path: Path, form: str) -> Iterator[None]:
    """Raise an error that names the required form if a file has another one."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        fault = f": a field {error} is missing" if isinstance(error, KeyError) else ""
        raise CtxextError(f'"{path}" does not have the required form{fault}.', hint=f"Use {form}.") from error
