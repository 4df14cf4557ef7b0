"""The thoughts of reasoning models: how a chat template marks and switches them, and the answer after them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ctxext.data.chat_template import read_template, render_chat

MARKS: Mapping[str, str] = {
    **{f"<{name}>": f"</{name}>" for name in ("think", "thinking", "thought", "reasoning", "seed:think")},
    **{"[THINK]": "[/THINK]", "◁think▷": "◁/think▷", "<|START_THINKING|>": "<|END_THINKING|>"},
    **{"<|begin_of_thought|>": "<|end_of_thought|>", "<|inner_prefix|>": "<|inner_suffix|>"},
    **{"<|channel>thought": "<channel|>", "<|channel|>analysis<|message|>": "<|end|>"},
    "to=self<|message|>": "<|eom|>",
}
"""Marks of thoughts in published templates, each with its end."""

SHARED = frozenset({"<|end|>", "<|eom|>"})
"""Ends of thoughts that also end other messages."""

_ANSWERS = ("<|channel|>final<|message|>", "<|START_RESPONSE|>", "to=user<|message|>")
"""Marks of answers, after which nothing is a thought."""

_SWITCHES = ("enable_thinking", "thinking")
"""Variables of published templates that switch thoughts on and off."""

_MESSAGES = ({"role": "user", "content": "Hello"},)


def switch_thoughts(thinks: bool | None) -> dict[str, bool]:
    """Return the variables for a template that switch thoughts on or off; none for the template's default."""
    return {} if thinks is None else dict.fromkeys(_SWITCHES, thinks)


@dataclass(frozen=True)
class Thoughts:
    """The thoughts of a model, by its chat template.

    Attributes:
        marks: The marks of thoughts, each with its end.
        has_switch: Whether thoughts can be switched on and off.
        are_default: Whether the model may think unless they are switched off.
    """

    marks: Mapping[str, str]
    has_switch: bool
    are_default: bool


def read_thoughts(tokenizer: Any) -> Thoughts:
    """Read the marks and the switch of thoughts from a tokenizer's chat template.

    Without any mark in the template, all known ones are recognised, and the model is one that does not think.
    """
    template = read_template(tokenizer)
    marks = {mark: end for mark, end in MARKS.items() if mark in template or (end in template and end not in SHARED)}
    default, on, off = (
        render_chat(tokenizer, _MESSAGES, add_generation_prompt=True, **switch_thoughts(thinks))
        for thinks in (None, True, False)
    )
    has_switch = on != off
    are_default = default == on if has_switch else bool(marks)
    return Thoughts(marks or MARKS, has_switch, are_default)


def find_open_thought(text: str) -> str:
    """Return the mark of a thought that a prompt begins and does not end; empty if there is none."""
    ends = {mark: text.rfind(end) for mark, end in MARKS.items()}
    return max((mark for mark, end in ends.items() if text.rfind(mark) > end), key=text.rfind, default="")


def remove_thoughts(text: str, marks: Mapping[str, str], open_thought: str = "") -> str:
    """Return a generated text without its thoughts, also without one that does not end.

    An end without a beginning ends a thought too: a server may have removed the beginning.

    Args:
        text: The generated text, with special tokens.
        marks: The marks of thoughts, each with its end.
        open_thought: The mark of the thought within which the prompt ends; empty if there is none.
    """
    for mark in _ANSWERS:
        if mark in text:
            return text.rpartition(mark)[2].lstrip()
    ends = {end: mark for mark, end in marks.items() if end not in SHARED}
    kept, inside = list[str](), open_thought
    for part in _split_at(text, [*marks, *marks.values()]):
        if inside:
            inside = "" if part == MARKS.get(inside) else inside
        elif part in marks:
            inside = part
        elif part in ends:
            kept.clear()
        else:
            kept.append(part)
    answer = "".join(kept)
    return answer if answer == text else answer.lstrip()


def has_thoughts(text: str, answer: str, marks: Mapping[str, str]) -> bool:
    """Return whether a generated text has thoughts that are not empty; arguments and result of `remove_thoughts`."""
    every = {*marks, *marks.values(), *_ANSWERS}
    return "".join(part for part in _split_at(text, [*every]) if part not in every).strip() != answer.strip()


def _split_at(text: str, marks: Sequence[str]) -> list[str]:
    """Return the marks in a text and the parts between them, in order; the longest mark first."""
    pattern = "|".join(map(re.escape, sorted(dict.fromkeys(marks), key=len, reverse=True)))
    return re.split(f"({pattern})", text)
