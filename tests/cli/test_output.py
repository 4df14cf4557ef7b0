"""What strangers wrote reaches the terminal as text: no colours, no movements of the cursor, no markup."""

import io
import json
import sys

import pytest
from rich.color import ColorSystem
from rich.progress import Progress
from rich.text import Text

from ctxext.cli.output import Output, print_error
from ctxext.console import SafeConsole, time_left_column
from ctxext.errors import CtxextError
from ctxext.redaction import RedactedStream
from small_llama import change_json

ESCAPE = "\x1b]0;owned\x07\x1b[31mred"


@pytest.mark.parametrize("text", [ESCAPE, "a\rb", "\u202eabc", "\udc80", "\x9b31m"])
def test_controls_are_written_out(text, capsys):
    output = Output()
    output.result({}, text)
    output.note(text)
    output.warning(text)
    output.next_step(text)
    print_error(CtxextError(text, hint=text))
    shown = capsys.readouterr()
    bad = set("\x1b\x07\r\u202e\udc80\x9b")
    assert not bad & set(shown.out + shown.err)
    assert "\\x" in shown.out + shown.err or "\\u" in shown.out + shown.err or text == "a\rb"


def test_untrusted_markup_is_printed_as_text(capsys):
    Output().result({}, "[bold]x[/bold] [/nothing] :smile: [red")
    assert capsys.readouterr().out == "[bold]x[/bold] [/nothing] :smile: [red\n"


def test_errors_stay_on_one_line(capsys):
    print_error(CtxextError("first\nsecond\n" + "x" * 9999, hint="a\nb"))
    shown = capsys.readouterr().err
    assert shown.count("\n") == 2
    assert len(shown) < 2200


def test_json_can_be_written_whatever_a_name_holds(capsys):
    Output(as_json=True).result({"name": "\udc80\x1b"})
    assert json.loads(capsys.readouterr().out) == {"name": "\udc80\x1b"}


def test_configurations_cannot_talk_to_the_terminal(run, llama, tmp_path):
    change_json(llama / "config.json", rope_parameters={"rope_type": f"[/x]{ESCAPE}", "rope_theta": 1e4})
    for words in (["inspect", llama], ["convert", llama, tmp_path / "[/o]", "-m", "pi", "--factor", 2, "--dry-run"]):
        result = run(*words)
        assert "\x1b" not in result.stdout + result.stderr


def test_every_stage_prints_a_line_at_its_start(capsys):
    with Output().progress("converting") as advance:
        for label, done in (("one", 0), ("one", 1), ("one", 3), ("two", 0), ("two", 0), ("three", 0)):
            advance(label, done, 3)
    assert capsys.readouterr().err.splitlines() == [
        "converting: one 0 %",
        "converting: one 30 %",
        "converting: one 100 %",
        "converting: two 0 %",
        "converting: three 0 %",
    ]


@pytest.mark.parametrize("label", ["stock needle 512 (42 s left)", "step 3 / 9 · 1 min 05 s left"])
def test_a_progress_bar_shows_one_time(label):
    """Its own estimate is left out if the label specifies one."""
    with Progress(time_left_column()) as bar:
        bar.add_task("evaluating", total=4)
        column, task = bar.columns[0], bar.tasks[0]
        assert column.render(task).plain == ""
        bar.update(task.id, completed=1)
        bar.update(task.id, completed=2)
        assert column.render(task).plain.endswith(" left")
        task.description = f"evaluating {label}"
        assert column.render(task).plain == ""


@pytest.mark.parametrize("as_json", [False, True])
def test_no_way_out_shows_a_token(as_json, capsys, monkeypatch):
    """Each way by which a text leaves the program goes through the streams that take tokens out of it."""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, RedactedStream(getattr(sys, name)))
    secret = "hf_NobodyGaveThisSecret"
    output = Output(as_json=as_json)
    output.result({"text": f"a {secret} b"}, f"a {secret} b")
    for notify in (output.note, output.warning, output.next_step):
        notify(f"a {secret} b")
    with output.progress(f"a {secret} b") as advance:
        advance("", 1, 1)
    print_error(CtxextError(f"a {secret} b", hint=f"a {secret} b"))
    shown = capsys.readouterr()
    assert "a hf_… b" in shown.out
    assert shown.err.count("a hf_… b") == 6
    assert secret[3:] not in shown.out + shown.err


def test_a_warning_of_a_library_cannot_talk_to_the_terminal():
    """Issue: matplotlib warned of a character that its font lacks, and passed ESC on."""
    stream = io.StringIO()
    safe = RedactedStream(stream)
    for text in (
        ESCAPE,
        "Glyph 27 (\x1b) missing from font(s)",
        "\x1b[2J",
        "\x1b[31mred\x1b[0m",
        "\x9b31m",
        "\u202eabc",
    ):
        safe.write(f"warning: {text}\n")
    assert not set("\x1b\x07\x9b\u202e") & set(stream.getvalue())
    begun = len(stream.getvalue())
    for bar in ("\r 50 %", "\n", "\x1b[A", "\x1b[A\x1b[A"):  # tqdm's movements between bars.
        safe.write(bar)
    assert stream.getvalue()[begun:] == "\r 50 %\n\x1b[A\x1b[A\x1b[A"


def test_a_console_of_ours_keeps_its_colours(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", RedactedStream(stream))
    console = SafeConsole(stderr=True)
    console._force_terminal, console._color_system = True, ColorSystem.STANDARD
    console.print(Text(f"bold {ESCAPE}", style="bold"))
    assert stream.getvalue().startswith("\x1b[1mbold \\x1b]0;owned\\x1b[31mred\x1b[0m")
    assert stream.getvalue().count("\x1b") == 2
