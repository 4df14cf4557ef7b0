"""Scores of RULER v2: nemo_skills/evaluation/evaluator/ruler.py (eval_ruler2) and mcq.py of NVIDIA-NeMo/Skills."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

_DOCUMENT = re.compile(r"Document \d+:(?:.*\n)+?\n")
"""A copied document, up to the first empty line."""

_FINAL = re.compile(r"The final answer is (.+)$")
_LABELED = re.compile(r"(?i)[\*\_]{0,2}Answer[\*\_]{0,2}\s*:[\s\*\_]{0,2}\s*([A-Z])(?![a-zA-Z0-9])")
_LETTER = re.compile(r"\b[A-Z]\b")
_BOXED = "\\boxed{"
_LETTERS = str.maketrans({foreign: f" {'ABCD'[at % 4]}" for at, foreign in enumerate("أبجدঅবডঢＡＢＣＤ")})
"""Letters of choices in Arabic, Bengali and Japanese."""


def match_all(text: str, expected: Sequence[str]) -> float:
    """Return the mean over the expected texts: 1 for a text in the answer, else 1 − its word error rate, at least 0."""
    return sum([_match(text.lower(), part.lower()) for part in expected]) / len(expected)


def match_last(text: str, expected: Sequence[str]) -> float:
    """Return the score of `match_all` for the last paragraph of an answer."""
    return match_all(text.split("\n\n")[-1], expected)


def match_any(text: str, expected: Sequence[str]) -> float:
    """Return the best score of any expected text in an answer without the documents that it copies."""
    rest = _DOCUMENT.sub("", text).lower()
    return max(_match(rest, part.lower()) for part in expected)


def match_choice(text: str, expected: Sequence[str]) -> float:
    """Return 1 if an answer chooses the expected letter, else 0."""
    return float(find_choice(text) == expected[0])


class Score(NamedTuple):
    """A function that scores an answer by the expected texts, and its description."""

    compute: Callable[[str, Sequence[str]], float]
    description: str


_SHARE = "1 for an expected text in the answer, else 1 − word error rate"
SCORES: Mapping[str, Score] = {
    "all": Score(match_all, _SHARE),
    "2steps": Score(match_last, f"{_SHARE}, of the last paragraph"),
    "part": Score(match_any, f"{_SHARE}, without copied documents"),
    "multichoice": Score(match_choice, "The chosen letter is correct"),
}
"""The scores by the names of `match_type` and `eval_type` in prepare_init.py."""


def _match(text: str, part: str) -> float:
    if part in text:
        return 1.0
    words, expected = text.split(), part.split()
    # Half of so many words are errors, at least as many as there are expected words.
    if len(words) >= 2 * len(expected):
        return 0.0
    return max(0.0, 1 - _count_edits(words, expected) / len(expected))


def _count_edits(words: Sequence[str], expected: Sequence[str]) -> int:
    """Return the Levenshtein distance of two lists of words."""
    before = list(range(len(expected) + 1))
    for number, word in enumerate(words, start=1):
        row = [number]
        for at, other in enumerate(expected):
            row.append(min(before[at] + (word != other), before[at + 1] + 1, row[at] + 1))
        before = row
    return before[-1]


def find_choice(text: str) -> str | None:
    r"""Return the chosen letter of an answer; None if there is none.

    It is the last capital letter in the last \boxed{}, or after "The final answer is" at the end of the answer, or else
    the letter after the last "Answer:".
    """
    finals = _FINAL.findall(text)
    chosen = (_find_boxed(text) or (finals[-1] if finals else "")).translate(_LETTERS).strip()
    if len(chosen) == 1:
        return chosen.upper()
    if letters := _LETTER.findall(chosen) or _LABELED.findall(text):
        return str(letters[-1]).upper()
    return None


def _find_boxed(text: str) -> str:
    r"""Return the content of the last \boxed{}, empty if there is none or its brace is not closed."""
    begin = text.rfind("\\boxed")
    if begin < 0 or not text.startswith(_BOXED, begin):
        return ""
    begin += len(_BOXED)
    depth = 1
    for at in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[begin:at]
    return ""
