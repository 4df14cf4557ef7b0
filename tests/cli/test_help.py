"""Help: the list of commands is what the commands say, and nothing is cut on a screen of 80 columns."""

import contextlib
import inspect
import json
import re
import shlex
import sys
from importlib import import_module
from pathlib import Path

import pytest
import typer

from ctxext.api import METHODS
from ctxext.cli.app import SUMMARIES, app, main
from ctxext.cli.interrupts import INTERRUPTED
from ctxext.cli.methods import example_of, option_name
from ctxext.methods import LongRope, MsPoE, Yarn
from ctxext.recipes.param import parameters_of

COMMANDS = typer.main.get_command(app).commands


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize("name", SUMMARIES)
def test_the_list_of_commands_matches_their_help(name, run):
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
    names = [re.split(r"\s{2,}", line.strip())[0] for line in lines if line.lstrip().startswith("-")]
    assert "…" not in "".join(name for name in names if "<" not in name)
    assert "<bool>" not in text
    assert not re.search(r"\[\[|\{|list\[", lines[0])


def test_a_method_shows_its_options_alone(run):
    text = run("convert", "--help").stdout
    assert "--target-length" in text
    assert "--beta-fast" not in text
    assert all(f"  {method.name} " in text for method in METHODS if not method.is_experimental)
    text = run("convert", "--method", "yarn", "--help").stdout
    assert "--beta-fast" in text
    assert "--ratio-min" not in text
    assert Yarn.paper in text
    assert "0.1 · ln(s) + 1" in " ".join(text.split())
    assert "--ratio-min" in run("convert", "-mmspoe", "-h").stdout
    assert "--trials" in run("convert", "--method=auto", "-h").stdout
    assert "--ratio-min" in run("convert", "--help-all").stdout
    assert run("convert", "--method", "yarm", "--help").exit_code == 1


def test_the_short_help_option_needs_no_app():
    command = typer.main.get_command(app).commands["inspect"]
    with pytest.raises(typer.Exit):
        command.make_context("inspect", ["-h"])


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_method_is_shown_in_full(method, run):
    text = " ".join(run("methods", method.name).stdout.split())
    assert method.paper in text
    assert example_of(method) in text
    for field in parameters_of(method):
        assert option_name(field.name) in text


@pytest.mark.parametrize("method", [m for m in METHODS if m.encoding == "rotary" and m is not LongRope])
def test_the_example_of_a_method_runs(method, run):
    words = example_of(method).split()[1:]
    options = ("--head-order", "fixed") if method is MsPoE else ()  # What a model would be loaded for.
    result = run(*words, *options, "--dry-run")
    assert result.exit_code == 0, result.exception


def test_the_help_of_mspoe_begins_with_differences_from_the_paper(run, tmp_path):
    text = " ".join(run("methods", "mspoe").stdout.split())
    assert text.index("unlike the paper") < text.index("summary ")
    for words in ("--recipe mspoe-paper", "0 of 30", "found 26 and raised", "source found 27", "0.635", "0.013"):
        assert words in text
    measured = Path(__file__).parents[2] / "docs" / "results" / "smollm2.md"
    rows = {row.split("|")[1].strip(): row for row in measured.read_text().splitlines() if row.count("|") > 4}
    assert "0: 0 %" in rows["linear, prompt order (the paper's, and the default of 0.1.0)"]
    assert "+0.635" in rows["linear, prompt order (the paper's, and the default of 0.1.0)"]
    assert "26: 87 %" in rows["ntk, calibrated order"]
    assert "+0.0132" in rows["ntk, calibrated order"]
    told = run("convert", "demo", tmp_path / "out", "-m", "mspoe", "--head-order", "fixed", "--dry-run").stderr
    assert "--recipe mspoe-paper" in told
    told = run("convert", "demo", tmp_path / "out", "--recipe", "mspoe-paper", "--dry-run").stderr
    assert "as ntk does" not in told


def test_errors_are_json_with_the_json_option(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ctxext", "inspect", "nowhere", "--json"])
    with pytest.raises(SystemExit) as stop:
        main()
    shown = capsys.readouterr()
    assert stop.value.code == 1
    error = json.loads(shown.out)["error"]
    assert "nowhere" in error["message"]
    assert set(error) == {"message", "hint"}
    assert error["message"] in shown.err


def test_a_stopped_evaluation_names_resume(monkeypatch, run, tmp_path, capsys):
    def stopped(*given, out, **others):
        out.mkdir(exist_ok=True)
        raise KeyboardInterrupt

    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr("os._exit", leave)
    monkeypatch.setattr(import_module("ctxext.evaluate.run"), "evaluate", stopped)
    monkeypatch.setattr(import_module("ctxext.compare.run"), "compare", stopped)
    monkeypatch.chdir(tmp_path)
    for words, more in (
        (["eval", "demo", "--task", "needle"], "--out report --resume"),
        (["eval", "demo", "--task=needle", "-o", "a b"], "--resume"),
        (["compare", "demo", "--target-length", "2k"], "--out report-2 --resume"),
    ):
        expected = f"{shlex.join(['ctxext', *words])} {more}"
        monkeypatch.setattr(sys, "argv", ["ctxext", *words, "--overwrite"])
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == INTERRUPTED
        assert expected in capsys.readouterr().err


def test_a_stopped_search_prints_a_command_that_resumes(monkeypatch, run, tmp_path):
    """With --overwrite beside --resume it would delete the study that it should continue."""
    out, told = tmp_path / "best.yaml", []

    @contextlib.contextmanager
    def at_once(notify):
        told.append(notify)
        yield

    def stopped(*given, study, **others):
        study.path.touch()
        told[0]()
        raise KeyboardInterrupt

    monkeypatch.setattr("ctxext.cli.search.exit_on_interrupt", at_once)
    monkeypatch.setattr("ctxext.cli.search.search", stopped)
    words = ["search", "demo", str(out), "--target-length", "2k", "--trials", "3"]
    monkeypatch.setattr(sys, "argv", ["ctxext", *words, "--overwrite"])
    shown = " ".join(run(*words, "--overwrite").stderr.split())
    assert shlex.join(["ctxext", *words, "--resume"]) in shown
    assert "--overwrite" not in shown
