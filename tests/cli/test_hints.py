"""Hints name only options of the running command, or of another command that they name."""

import ast
import functools
import re
import sys
from pathlib import Path

import pytest

import ctxext
from ctxext.cli.app import SUMMARIES, main, options_of
from ctxext.cli.hints import fit_hint
from ctxext.errors import CtxextError

OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
EVERY = {option for name in SUMMARIES for option in options_of(name)}


def texts_of(call):
    """The constant parts of the hint of an error: of each of its alternatives one text."""
    hints = [keyword.value for keyword in call.keywords if keyword.arg == "hint"] + call.args[1:2]
    for hint in hints:
        if isinstance(hint, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in hint.values)
        else:
            constants = (node.value for node in ast.walk(hint) if isinstance(node, ast.Constant))
            yield from (text for text in constants if isinstance(text, str))


@functools.cache
def hints():
    """The hints of ctxext that contain options."""
    return {
        text
        for path in Path(ctxext.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "").endswith(("Error", "BadRecord", "_error"))
        for text in texts_of(node)
        if OPTION.search(text)
    }


def test_hints_are_found():
    assert len(hints()) > 100
    assert any("--allow-beyond" in hint for hint in hints())


@pytest.mark.parametrize("command", SUMMARIES)
def test_a_command_prints_no_option_of_another_command(command):
    """In a sentence that names another command or program, its options are meant."""
    known, changed = options_of(command), 0
    for hint in hints():
        fitted = fit_hint(hint, command, options_of, SUMMARIES)
        changed += fitted != hint
        for sentence in re.split(r"(?<=[.;]) ", fitted):
            if re.search(
                r"ctxext|\b(convert|eval|inspect|verify|hf|pip|git|curl|lm_eval) ?\b", sentence, re.IGNORECASE
            ):
                continue
            assert not {*OPTION.findall(sentence)} & EVERY - known, (hint, fitted)
        if {*OPTION.findall(hint)} <= known:
            assert fitted == hint
    assert changed, "no command has all options"


@pytest.mark.parametrize(
    ("command", "hint", "fitted"),
    [
        ("merge", "Use another base, or keep the adapter separate with --no-merge.", "Use another base."),
        ("finetune", "Use another base, or keep it with --no-merge.", "Use another base, or keep it with --no-merge."),
        ("search", "Use shorter --lengths, or --allow-beyond.", "Use shorter --lengths."),
        ("search", "Convert its source, or remove this with --replace-scaling.", None),
        ("finetune", "Convert its source with --factor 2 first.", "Convert its source with --factor 2 first."),
        ("merge", "Try --dtype bf16 or --dtype fp32, or check the weights.", "Check the weights."),
        ("merge", "Raise --minutes.", ""),
        ("eval", "hf download x --local-dir DIR && ctxext eval … --nolima DIR", None),
    ],
)
def test_alternatives(command, hint, fitted):
    assert fit_hint(hint, command, options_of, SUMMARIES) == (hint if fitted is None else fitted)


def test_the_command_line_prints_the_fitting_part(monkeypatch, capsys):
    def fail():
        raise CtxextError("It fails.", hint="Check it, or keep the adapter separate with --no-merge.")

    monkeypatch.setattr("ctxext.cli.app.app", fail)
    for command, expected in (
        ("merge", "Check it."),
        ("finetune", "Check it, or keep the adapter separate with --no-"),
    ):
        monkeypatch.setattr(sys, "argv", ["ctxext", command, "a", "b"])
        with pytest.raises(SystemExit):
            main()
        assert f"hint:  {expected}" in capsys.readouterr().err
