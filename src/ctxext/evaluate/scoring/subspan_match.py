"""Whether an answer stands somewhere in what a model wrote, as the Lost in the Middle release scores it."""

import re
import string
from collections.abc import Iterable


def best_subspan_match(text: str, answers: Iterable[str]) -> bool:
    """Whether an answer is contained in the text, whatever the case, punctuation, articles and extra spaces."""
    normalized = _normalize(text)
    return any(_normalize(answer) in normalized for answer in answers)


def _normalize(text: str) -> str:
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())
