"""Scores of GraphWalks and MRCR: the overlap of two sets, and of two texts."""

import re
from collections.abc import Collection
from difflib import SequenceMatcher

_LIST = re.compile(r"Final Answer:\s*\[(.*)\]")


def set_f1(chosen: Collection[str], correct: Collection[str]) -> float:
    """The F1 score of a set: 2 × what both have, over what each has; 1 if both are empty."""
    chosen, correct = set(chosen), set(correct)
    total = len(chosen) + len(correct)
    return 2 * len(chosen & correct) / total if total else 1.0


def final_answer(text: str) -> list[str] | None:
    """The list that the last line gives as "Final Answer: [a, b]"; None without one."""
    match = _LIST.search(text.rstrip("\n").split("\n")[-1])
    if match is None:
        return None
    return [item.strip().strip("'\"") for item in match[1].split(",") if item.strip()]


def graphwalks_score(text: str, correct: Collection[str]) -> float:
    """The score of GraphWalks: F1 of the final answer, 0 without one."""
    chosen = final_answer(text)
    return 0.0 if chosen is None else set_f1(chosen, correct)


def mrcr_score(text: str, answer: str, prefix: str) -> float:
    """The score of OpenAI MRCR: how alike the texts behind the prefix are (`SequenceMatcher`), 0 without the prefix."""
    if not text.startswith(prefix):
        return 0.0
    return SequenceMatcher(None, text.removeprefix(prefix), answer.removeprefix(prefix)).ratio()
