"""Help: the list of commands is what the commands say, and nothing is cut on a screen of 80 columns."""

import inspect
import re

import pytest
import typer

from ctxext.cli.app import SUMMARIES, app

COMMANDS = typer.main.get_command(app).commands


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize("name", SUMMARIES)
def test_the_list_says_what_the_command_says(name, run):
    callback = COMMANDS[name].callback
    assert inspect.getdoc(callback).splitlines()[0] == SUMMARIES[name]
    assert SUMMARIES[name] in " ".join(run("--help").stdout.split())


@pytest.mark.parametrize("name", SUMMARIES)
def test_no_name_is_cut(name, run):
    words = ["--help-all"] if any(option.name == "help_all" for option in COMMANDS[name].params) else ["--help"]
    text = run(name, *words).stdout
    lines = text.splitlines()
    assert max(map(len, [line for line in lines if not line.startswith(("  ctxext ", "  accelerate "))])) <= 80
    shown = set(re.findall(r"(?<![\w-])--?[a-z][a-z0-9-]*", text))
    for parameter in COMMANDS[name].params:
        if parameter.param_type_name == "option" and not parameter.hidden:
            assert {*parameter.opts, *parameter.secondary_opts} <= shown
    assert "…" not in "".join(line for line in lines if line.lstrip().startswith("-") and "<" not in line)
    assert "<bool>" not in text
    assert not re.search(r"\[\[|\{|list\[", lines[0])
