"""What people type by mistake: each error names the mistake and what to type instead."""

import json
import shutil
import sys
from importlib import resources

import pytest

from ctxext.cli.app import main
from ctxext.errors import CtxextError


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with files that people mistake for a checkpoint or for text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / "adapter").mkdir(parents=True)
    (tmp_path / "run" / "adapter" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "paper.txt").write_bytes(b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ("eval demo --lengths 512 1024", 'There is no folder "1024".', "--lengths 4k,32k"),
        ("eval demo --task neddle", 'Unknown task "neddle".', 'Did you mean "needle"?'),
        ("eval demo --task ruler-niah", 'Unknown task "ruler-niah".', "niah-multiquery, ruler-vt"),
        ("eval demo --task mrcr-3", 'Unknown task "mrcr-3".', "Tasks of mrcr: mrcr-2, mrcr-4, mrcr-8."),
        ("eval demo --task babilong-x", 'Unknown task "babilong-x".', "Tasks of babilong: babilong-"),
        ("inspect run", '"run" has no config.json.', "Did you mean run/adapter?"),
        ("finetune demo out --data empty.txt --dry-run", "The data contains no text.", "a file with text"),
        ("eval demo --task perplexity --lengths 512 --data empty.txt", '"empty.txt" contains no text.', "--data"),
        ("finetune demo out --data paper.txt --dry-run", '"paper.txt" is not text', "pdftotext"),
        ("compare demo --target-length 2k --minutes 0", "--minutes must be above 0, not 0.", ""),
        ("search demo --target-length 2k --seed -1", "--seed must be a number from 0 to", ""),
        ("eval demo --num-processes 257", '--num-processes must be a number from 1 to 256, not "257".', ""),
        (
            "convert demo out --method mspoe --factor 4",
            "cannot extend the context by --factor",
            "--factor 4 --method mspoe",
        ),
        (
            "convert demo out --method mspoe --target-length 2k",
            "by --target-length",
            "yarn --target-length 2k --method",
        ),
    ],
)
def test_a_mistake_is_named_with_what_to_type_instead(words, message, hint, place, run):
    error = run(*words.split()).exception
    assert isinstance(error, CtxextError)
    assert message in error.message
    assert hint in error.hint


def test_the_source_is_not_the_output(place, run):
    shutil.copytree(str(resources.files("ctxext") / "demo" / "checkpoint"), place / "mine")
    error = run("convert", "mine", "mine", "--method", "yarn", "--factor", "2").exception
    assert (error.message, "Choose a new folder" in error.hint) == ('OUT "mine" is SOURCE itself.', True)


@pytest.mark.parametrize("words", [["help", "verify"], ["help"], ["-V"]])
def test_help_and_version_have_their_usual_words(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ctxext", *words])
    monkeypatch.setattr(
        sys.modules["__main__"], "__package__", None
    )  # Otherwise the program is "python -m pytest.ctxext".
    with pytest.raises(SystemExit) as ended:
        main()
    expected = "ctxext 0" if words == ["-V"] else " ".join(["Usage: ctxext", *words[1:]])
    assert (ended.value.code, expected in capsys.readouterr().out) == (0, True)


def test_help_names_values_and_not_types(run):
    for command in ("eval", "finetune", "search"):
        shown = run(command, "--help").stdout
        assert "<" not in shown
        assert "TOKENS" in shown
        assert "PATH" in shown or command == "search"


def test_mspoe_says_what_it_does_and_how_to_combine_it(place, run):
    done = run("convert", "demo", "out", "--method", "mspoe", "--head-order", "fixed", "--no-verify")
    assert "it does not extend the context" in done.stderr
    assert "ctxext eval demo out --task needle,kv --depths 11" in done.stderr
    assert "ctxext convert demo --method yarn --factor 2 --method mspoe" in done.stderr
