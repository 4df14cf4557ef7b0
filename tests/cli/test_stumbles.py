"""What people type by mistake: each error names the mistake and what to type instead."""

import itertools
import json
import os
import re
import shutil
import sys
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import pytest

from ctxext.cli.app import main
from ctxext.cli.help import _prose
from ctxext.cli.output import Output, label_table, print_error
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
        ("convert demo demo --method yarn --factor 4", 'OUT "demo" has the name of the demo checkpoint', "demo-2k"),
        ("convert demo demo --method yarn --factor 4 --dry-run", 'OUT "demo" has the name of the demo', "demo-2k"),
        ("merge demo run/adapter ./demo", 'OUT "demo" has the name of the demo checkpoint', "demo-2k"),
        ("demo demo", 'OUT "demo" has the name of the demo checkpoint', "demo-2k"),
        ("eval demo --task perplexity --lengths 512 --out demo", 'OUT "demo" has the name of the demo', "demo-2k"),
        ("search demo demo --target-length 2k", 'OUT "demo" has the name of the demo checkpoint', "demo-2k"),
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


def test_a_folder_named_as_the_demo_is_named(place, run):
    (place / "demo").mkdir()
    error = run("inspect", "demo").exception
    assert (error.message, "it is a folder, not the demo checkpoint" in error.hint) == (
        '"demo" has no config.json.',
        True,
    )


@pytest.fixture
def copied(place, run):
    """A converted folder, copied without the times of its files."""
    run("convert", "demo", "made", "--method", "yarn", "--factor", "2", "--no-verify")
    shutil.copytree("made", "copied", copy_function=shutil.copyfile)
    os.utime("copied/model.safetensors", (1, 1))
    return "copied"


def test_a_copied_folder_names_what_settles_it(copied, run):
    assert "--against demo compares the tensors, and convert --digest" in run("verify", copied, "--no-load").stdout
    error = run("push", copied, "me/it", "--dry-run").exception
    assert "copied without their timestamps" in error.message
    assert error.hint == "Run ctxext verify copied --against demo. If it is correct, push with --no-verify."
    assert "all 38 tensors are identical" in run("verify", copied, "--no-load", "--against", "demo").stdout


def test_a_dry_run_verifies_what_a_push_verifies(place, run):
    """Weights too, which were changed here after their digest was recorded."""
    run("convert", "demo", "made", "--method", "yarn", "--factor", "2", "--no-verify", "--digest")
    weights = bytearray(Path("made/model.safetensors").read_bytes())
    weights[-1] ^= 1
    Path("made/model.safetensors").write_bytes(weights)
    assert "weights: changed" in run("push", "made", "me/it", "--dry-run").exception.message
    assert run("push", "made", "me/it", "--dry-run", "--no-verify").exit_code == 0


def test_the_card_of_a_local_source_names_the_repository(place, run):
    """Readers cannot open a local folder, and a model needs a license."""
    shutil.copytree(str(resources.files("ctxext") / "demo" / "checkpoint"), place / "local")
    (place / "local" / "README.md").unlink()
    run("convert", "local", "made", "--method", "yarn", "--factor", "2", "--no-verify")
    shown = run("push", "made", "me/it", "--dry-run")
    assert "vllm serve me/it" in shown.stdout
    assert "vllm serve local" not in shown.stdout
    assert "warning: The model card has no base_model: its source is a local folder" in shown.stderr
    assert "Add --base USER/NAME." in shown.stderr
    assert "warning: The model card has no license" in shown.stderr
    shown = run("push", "made", "me/it", "--dry-run", "--base", "you/base", "--license", "apache-2.0")
    assert "warning" not in shown.stderr
    assert "license: apache-2.0\nbase_model: you/base\n" in shown.stdout
    assert "$ ctxext convert you/base OUT --method yarn" in shown.stdout
    assert "vllm serve you/base --hf-overrides" in shown.stdout
    assert "PATH_OR_ID" not in shown.stdout
    assert run("push", "made", "me/it", "--dry-run", "--license", "mit", "--json").exit_code == 0


def test_an_edited_card_names_the_repository_too(place, run):
    run("convert", "demo", "made", "--method", "yarn", "--factor", "2", "--no-verify")
    card = Path("made/README.md")
    card.write_text(card.read_text().replace("license: apache-2.0\n", "") + "\nMine.\n")
    shown = run("push", "made", "me/it", "--dry-run")
    assert "README.md was edited by hand" in shown.stderr
    assert "The model card has no license" in shown.stderr
    assert "Add it to README.md." in shown.stderr
    assert 'from_pretrained("me/it")' in shown.stdout
    assert "PATH_OR_ID" not in shown.stdout


def test_the_result_names_the_stage_that_took_long(place, run, monkeypatch):
    """Issue: "weights copied 205 s" was a calibration."""
    clock = itertools.count(step=1.5)
    monkeypatch.setattr("ctxext.converters.convert.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    line = run("convert", "demo", "out", "--method", "mspoe", "--no-verify").stdout.splitlines()[0]
    assert re.search(r"weights (copied|cloned)   [\d.]+ s \(calibration 1\.5 s, weights 1\.5 s\)$", line)


def test_a_checkpoint_with_code_explains_how_to_load_it(place, run):
    """As the KeyError of transformers without trust_remote_code."""
    from transformers import AutoModelForCausalLM

    run("convert", "demo", "out", "--method", "self-extend", "--factor", "2", "--no-verify")
    Path("out/config.json").write_text(
        json.dumps({k: v for k, v in json.loads(Path("out/config.json").read_text()).items() if k != "auto_map"})
    )
    with pytest.raises(KeyError, match="ctxext: load this checkpoint with trust_remote_code=True"):
        AutoModelForCausalLM.from_pretrained("out")
    page = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
    assert "KeyError: 'ctxext: load this checkpoint with trust_remote_code=True'" in page


ERRORS = json.loads((Path(__file__).parents[1] / "resources" / "golden.json").read_text())["errors"]


def test_prose_breaks_between_words(monkeypatch, capsys):
    """All errors, and notes and warnings with their texts, on a terminal of 80 columns."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    output, printed = Output(), {text.partition(" ")[2] for text in ERRORS.values() if "error: " in text}
    assert len(printed) > 100
    for text in printed:
        message, _, hint = text.removeprefix("error: ").partition("\nhint: ")
        print_error(CtxextError(message, hint=hint))
        output.note(message)
        output.warning(message)
        output.result({}, message)
        shown = capsys.readouterr()
        lines = re.sub(r"\x1b\[[\d;]*m", "", shown.err + shown.out).splitlines()
        expected = ["error:", *message.split(), *(["hint:", *hint.split()] if hint else [])]
        assert " ".join(lines).split() == [*expected, *message.split(), "warning:", *message.split(), *message.split()]
        assert all(len(line) <= 80 or " " not in line for line in lines)


def test_labels_and_values_are_never_cut(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    table, path = label_table(), "/a/rather/long" * 9
    table.add_row("hub cache", f"{path} and more")
    Output().result({}, table)
    shown = capsys.readouterr().out
    assert path in "".join(line[11:].rstrip() for line in shown.splitlines())


def test_help_breaks_between_words():
    text = "Refuse a recipe by --keep-short or --target-length, not by half of a word-with-hyphens."
    for width in range(20, 60):
        lines = [line for part in _prose(text, width) for line in part.plain.splitlines()]
        assert " ".join(lines).split() == text.split(), width
