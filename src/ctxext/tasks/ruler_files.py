"""Original material of RULER from the user's files, read as NVIDIA's scripts read it (scripts/data/synthetic)."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ctxext.data import prose
from ctxext.errors import CtxextError
from ctxext.files.strict import read_text

_FEWEST_WORDS = 40


@dataclass(frozen=True)
class Words:
    """The words of keys and lists; a key is an adjective and a noun with a hyphen between them."""

    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]
    words: tuple[str, ...]

    def draw_key(self, rng: random.Random) -> str:
        """Draw the key of a needle."""
        return f"{rng.choice(self.adjectives)}-{rng.choice(self.nouns)}"


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
        related: Indices of the documents that are added before any others, if they are not in `documents`.
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
    from ctxext.tasks.entries import ESSAYS, check_entry, read_json

    if path.suffix == ".json":
        text = check_entry(read_json(path), ESSAYS, f'"{path}"', 'Use a JSON object with the field "text".')["text"]
    else:
        text = read_text(path)
    sentences = prose.split_sentences(" ".join(text.split()), path)
    if not sentences:
        raise _empty(path, "text")
    return sentences


def read_words(path: Path) -> Words:
    """Read words, one per line, or JSON.

    JSON is a list of words, an object with words as its values (english_words.json), or an object with lists of words,
    "adjectives" and "nouns" among them (the lists of wonderwords). Without these two, keys are two words of the list.
    """
    from ctxext.tasks.entries import WORD_LIST, WORD_LISTS, check_entry, read_json

    place, hint = f'"{path}"', "Use a list of words, or a JSON object with lists of words."
    content = read_json(path) if path.suffix == ".json" else read_text(path).removeprefix("\ufeff").split("\n")
    if isinstance(content, dict) and all(isinstance(value, str) for value in content.values()):
        content = list(content.values())
    if isinstance(content, list):
        lists = {"": check_entry(content, WORD_LIST, place, hint)}
    else:
        lists = check_entry(content, WORD_LISTS, place, hint)
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
    from ctxext.tasks.entries import SQUAD, check_entry, read_json

    content = check_entry(read_json(path), SQUAD, f'"{path}"', "Use the JSON file of SQuAD v2 (dev-v2.0.json).")
    paragraphs = [[paragraph["context"] for paragraph in article["paragraphs"]] for article in content["data"]]
    documents, indices = _number_documents(itertools.chain.from_iterable(paragraphs))
    questions = []
    for article, texts in zip(content["data"], paragraphs, strict=True):
        related = tuple(map(indices.__getitem__, texts))  # One tuple for all questions of an article.
        for paragraph in article["paragraphs"]:
            for entry in paragraph["qas"]:
                answers = tuple(answer["text"] for answer in entry["answers"])
                if answers and not entry.get("is_impossible"):
                    document = indices[paragraph["context"]]
                    questions.append(SetQuestion(entry["question"], answers, (document,), related))
    return _check_questions(path, documents, tuple(questions))


def read_hotpot(path: Path) -> QuestionSet:
    """Read the questions of HotpotQA, each with its ten paragraphs; those with supporting facts come first."""
    from ctxext.tasks.entries import HOTPOT, check_entry, read_json

    hint = "Use the JSON file of HotpotQA (hotpot_dev_distractor_v1.json)."
    entries = check_entry(read_json(path), HOTPOT, f'"{path}"', hint)
    texts = [[(title, f"{title}\n{''.join(lines)}") for title, lines in entry["context"]] for entry in entries]
    documents, indices = _number_documents(text for of_entry in texts for _, text in of_entry)
    questions = []
    for entry, of_entry in zip(entries, texts, strict=True):
        support = {title for title, _ in entry.get("supporting_facts") or ()}
        in_order = dict.fromkeys(
            indices[text] for title, text in sorted(of_entry, key=lambda one: one[0] not in support)
        )
        questions.append(SetQuestion(entry["question"], (entry["answer"],), tuple(in_order)))
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
    return tuple(sorted({word.strip() for word in words} - {""}))


def _empty(path: Path, content: str) -> CtxextError:
    return CtxextError(f'"{path}" contains no {content}.', hint="Check that the file is complete.")
