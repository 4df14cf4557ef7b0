"""Whether a generated text contains an answer, as the Lost in the Middle release scores it."""

import re
import string
from collections.abc import Iterable, Sequence

_WORDS = re.compile(r"[\W_]+")


def best_subspan_match(text: str, answers: Iterable[str]) -> bool:
    """Whether the text contains an answer, regardless of case, punctuation, articles and extra spaces."""
    normalized = _normalize(text)
    return any(_normalize(answer) in normalized for answer in answers)


def share_contained(text: str, wanted: Sequence[str]) -> float:
    """The share of words or numbers that the text contains, each as a whole, regardless of case and punctuation."""
    words = f" {_WORDS.sub(' ', text.lower())} "
    num_contained = sum(f" {_WORDS.sub(' ', part.lower()).strip()} " in words for part in wanted)
    return num_contained / len(wanted)


def share_of_substrings(text: str, wanted: Sequence[str]) -> float:
    """The share of texts that are in the text, regardless of case: RULER's `string_match_all`."""
    return sum(part.lower() in text.lower() for part in wanted) / len(wanted)


def _normalize(text: str) -> str:
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())
