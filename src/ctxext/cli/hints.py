"""Hints for the running command: code that several commands share may name an option that only some of them have."""

import re
from collections.abc import Callable, Collection, Iterable

_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
_OTHER_PROGRAMS = re.compile(r"\b(hf|pip|curl|git|lm_eval) ")
_NAMED_ALONE = ("convert", "eval", "inspect", "verify")
"""Commands that a hint may name without the name of the program: "Convert its source with --factor 2"."""

Options = Callable[[str], Collection[str]]
"""Function from the name of a command to its options."""


def fit_hint(hint: str, command: str, options: Options, commands: Iterable[str]) -> str:
    """Return a hint without the alternatives that need an option of another command.

    A sentence consists of alternatives: "A, or B". One that names another command may name its options.

    Args:
        hint: The hint.
        command: The running command.
        options: Returns the options of a command.
        commands: All commands.
    """
    if {*_OPTION.findall(hint)} <= {*options(command)}:
        return hint
    every = {option for name in commands for option in options(name)}
    sentences = re.split(r"(?<=[.;]) ", hint)
    fitting = (_fit_sentence(sentence, command, options, every, commands) for sentence in sentences)
    return " ".join(filter(None, fitting))


def _fit_sentence(
    sentence: str, command: str, options: Options, every: Collection[str], commands: Iterable[str]
) -> str:
    known = {option for name in (command, *_find_commands(sentence, commands)) for option in options(name)}
    if _OTHER_PROGRAMS.search(sentence) or known.issuperset({*_OPTION.findall(sentence)} & {*every}):
        return sentence
    parts = re.split(r",? or (?!more\b|less\b|fewer\b)", sentence.rstrip("."))
    fitting = ", or ".join(part for part in parts if known.issuperset({*_OPTION.findall(part)} & {*every}))
    return fitting and f"{fitting[0].upper()}{fitting[1:]}."


def _find_commands(sentence: str, commands: Iterable[str]) -> list[str]:
    alone = [name for name in _NAMED_ALONE if re.search(rf"\b{name}\b", sentence, re.IGNORECASE)]
    return [*alone, *(name for name in commands if f"ctxext {name}" in sentence)]
