"""The commands from the command line."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib import import_module

import pytest
import torch
import yaml
from typer.testing import CliRunner

from ctxext.cli.app import app
from ctxext.errors import CtxextError
from ctxext.evaluate.run import Run
from ctxext.files import processes
from ctxext.finetune import run as finetune_run
from tiny_base import documents, load, logits, save_llama, write_jsonl

OPTIONS = ("--length", "64", "--steps", "3", "--batch-size", "2", "--rank", "4", "--learning-rate", "5e-3")
PROGRAM = (
    # Background processes of a shell ignore Ctrl-C, and their children inherit that.
    "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\nfrom ctxext.cli.app import app\napp()\n"
)


def run(*words):
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def data(tmp_path):
    return write_jsonl(tmp_path / "numbers.jsonl")


@pytest.mark.thorough
def test_one_json_object_and_the_rest_on_stderr(base, data, tmp_path):
    result = run("finetune", base, tmp_path / "out", "--data", data, *OPTIONS, "--json", "--eval", "short")
    content = json.loads(result.stdout)
    assert content["data"]["num_sequences"] == 6
    assert content["options"]["rank"] == 4
    assert len(content["losses"]) == 3
    assert [model["name"] for model in content["evaluation"]["models"]][:2] == ["base", "out"]
    assert (tmp_path / "out" / "evaluation" / "report.html").exists()
    assert "data: 6 of 24 documents (25.0 %), 780 of about 3," in result.stderr
    assert "tokens/s" in result.stderr
    settings = json.loads((tmp_path / "out" / "finetune.json").read_text())
    assert settings["data"]["name"] == "numbers.jsonl"
    assert len(settings["data"]["sha256"]) == 64
    assert str(tmp_path) not in (tmp_path / "out" / "finetune.json").read_text()


@pytest.mark.thorough
def test_quiet_leaves_only_the_result(base, data, tmp_path):
    result = run("finetune", base, tmp_path / "out", "--data", data, *OPTIONS, "-q")
    assert result.stderr.strip() == ""
    assert "parameters trained" in result.stdout


@pytest.mark.thorough
def test_an_adapter_can_be_merged_separately(base, data, tmp_path):
    result = run("finetune", base, tmp_path / "lora", "--data", data, *OPTIONS, "--no-merge")
    assert f"ctxext merge {base} {tmp_path / 'lora'}/adapter MERGED" in result.stderr
    result = run("merge", base, tmp_path / "lora" / "adapter", tmp_path / "merged", "--json")
    assert json.loads(result.stdout)["changed"] == 14
    assert (logits(load(tmp_path / "merged")) - logits(load(base))).abs().max() > 1e-3


@pytest.mark.thorough
def test_demo_documents_are_made_for_any_tokenizer(base, tmp_path):
    result = run("finetune", base, tmp_path / "out", "--data", "demo", *OPTIONS, "--json")
    assert json.loads(result.stdout)["data"]["num_sequences"] == 6
    assert f"Not measured yet: ctxext eval {base} {tmp_path / 'out'}" in result.stderr


@pytest.mark.thorough
def test_what_the_time_did_not_allow_is_named_with_a_command(base, data, tmp_path, monkeypatch):
    monkeypatch.setattr(Run, "_estimate", lambda run, name, work, *given: 1e9 if work.keys[0].sample else 0.0)
    out = tmp_path / "out"
    words = ("finetune", base, out, "--data", data, *OPTIONS)
    result = run(*words, "--eval", "short")
    shown = " ".join(result.stderr.split())
    command = f"ctxext eval {base} {out} --task short"
    assert f"The time was not enough for 27 prompts and documents. Measure all: {command}" in shown
    card = (out / "README.md").read_text()
    assert "up to 10 samples per cell" in card
    assert "samples: 1\n" in card


@pytest.mark.thorough
def test_an_evaluation_that_fails_leaves_the_training(base, data, tmp_path, monkeypatch):
    """One process evaluates; the other training processes have ended by then."""
    counts, train = [], finetune_run.finetune

    def trained(*args, **options):
        done = train(*args, **options)
        monkeypatch.setenv("WORLD_SIZE", "2")
        return done

    def fails(*_args, **_options):
        counts.append(processes.num_processes())
        raise CtxextError("No room.")

    monkeypatch.setattr(finetune_run, "finetune", trained)
    monkeypatch.setattr(import_module("ctxext.evaluate.run"), "plan_run", fails)
    words = ("finetune", base, tmp_path / "out", "--data", data, *OPTIONS, "--eval", "short")
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert isinstance(result.exception, CtxextError)
    assert "was written, but its evaluation failed" in result.stderr
    assert (tmp_path / "out" / "finetune.json").is_file()
    assert counts == [1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--data", "nowhere.txt"), "There is no file"),
        (("--data", "nowhere"), "neither a file nor an accessible data set"),
        ((), "--data is missing"),
        # It does not fit into the 32 tokens that this base was trained on.
        (("--data", "{data}", "--eval", "needle"), 'task "needle" needs at least'),
        (("--data", "{data}", "--eval", "short", "--no-merge"), "cannot be combined with --no-merge"),
        (("--data", "{data}", "--targets", "q_proj,o_prj"), "o_prj"),
        (("--data", "{empty}"), "no text"),
        (("--data", "demo", "--epochs", "2"), "demo is endless"),
        (("--data", "{data}:0.5", "--data", "demo:0.5"), "cannot be mixed"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(base, data, tmp_path, words, message):
    (tmp_path / "empty.txt").write_text("")
    filled = [word.format(data=data, empty=tmp_path / "empty.txt") for word in words]
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(CtxextError, match=message):
        run("finetune", base, tmp_path / "out", "--steps", "1", *filled)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.thorough
def test_interrupted_and_resumed(base, data, tmp_path):
    """Ctrl-C saves the last whole step and prints the command to resume, for any number of steps between saves."""
    words = ["finetune", base, tmp_path / "out", "--data", data, *OPTIONS, "--steps", "400", "--save-every", "1000"]
    command = [sys.executable, "-c", PROGRAM, *map(str, words)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    folder = tmp_path / "out.training"
    steps = folder / "steps.jsonl"
    while process.poll() is None and not (steps.is_file() and steps.read_text()):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode != 0
    assert f"ctxext {' '.join(map(str, words))} --resume" in errors
    assert not (tmp_path / "out").exists()
    done = len(steps.read_text().splitlines())
    assert 0 < done < 400
    assert [path.name for path in folder.glob("checkpoint-*")] == [f"checkpoint-{done}"]
    with pytest.raises(CtxextError, match="other settings: rank"):
        run(*words, "--rank", "3", "--resume")
    assert folder.exists()


@pytest.mark.parametrize(("processes", "says"), [("1", "Resume with"), ("2", "Resume under the same launcher with")])
def test_a_launcher_s_words_are_not_the_command_s(base, data, tmp_path, monkeypatch, processes, says):
    """Each process knows its own part of what was typed."""

    def stopped(*given, **named):
        (tmp_path / "out.training").mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(finetune_run, "finetune", stopped)
    monkeypatch.setenv("WORLD_SIZE", processes)
    assert f"Stopped. {says}: " in run("finetune", base, tmp_path / "out", "--data", data).stderr


@pytest.mark.thorough
def test_a_dry_run_trains_nothing(base, data, tmp_path):
    before = sorted(path.name for path in tmp_path.iterdir())
    result = run("finetune", base, tmp_path / "out", "--data", data, *OPTIONS, "--dry-run")
    assert "memory     about" in result.stdout
    assert "measuring two steps of " in result.stderr
    assert "time       about" in result.stdout
    content = json.loads(
        run("finetune", base, tmp_path / "out", "--data", data, *OPTIONS, "--dry-run", "--json").stdout
    )
    assert content["num_trained"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.thorough
def test_epochs_see_all_of_the_data(base, data, tmp_path):
    """6 documents of two sequences each: two epochs of batches of four are 6 steps."""
    write_jsonl(data, count=6)
    words = ("--length", "64", "--epochs", "2", "--batch-size", "4", "--rank", "4", "--short-share", "0", "--no-merge")
    result = run("finetune", base, tmp_path / "out", "--data", data, *words, "--json")
    content = json.loads(result.stdout)
    assert content["options"]["steps"] == len(content["losses"]) == 6
    assert content["data"]["num_documents"] == 6
    assert "each sequence is used 2.0 times" in result.stderr


@pytest.mark.thorough
def test_the_loss_on_other_data_is_measured_at_every_save(base, data, tmp_path):
    """It equals the loss of the finished adapter on the same sequences."""
    other = write_jsonl(tmp_path / "other.jsonl", count=2, seed=9)
    words = ("--save-every", "2", "--steps", "4", "--short-share", "0", "--eval-data", other, "--dtype", "fp32")
    result = run("finetune", base, tmp_path / "out", "--data", data, *OPTIONS, *words)
    lines = [json.loads(line) for line in (tmp_path / "out" / "steps.jsonl").read_text().splitlines()]
    measured = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
    assert list(measured) == [2, 4]
    assert "evaluation on 4 sequences every 2 steps" in result.stderr
    assert f"step 4: loss {measured[4]:.3f} on the evaluation data" in result.stderr
    rows = torch.tensor(documents(2, seed=9))[:, :128].reshape(4, 64)
    with torch.no_grad():
        expected = load(tmp_path / "out")(rows, labels=rows).loss.item()
    assert abs(measured[4] - expected) < 1e-4


@pytest.mark.thorough
def test_a_run_is_written_as_a_file_that_runs_again(base, data, tmp_path):
    words = ("--targets", "q_proj,v_proj", "--no-merge", "-q", "--token", "of-no-known-form")
    run("finetune", base, tmp_path / "one", "--data", f"{data}:2", *OPTIONS, *words)
    saved = tmp_path / "one.run.yaml"
    assert yaml.safe_load(saved.read_text())["learning-rate"] == 5e-3
    assert not [word for word in ("quiet", "token", "of-no-known-form") if word in saved.read_text()]
    run("finetune", base, tmp_path / "two", "--config", saved)
    run("finetune", base, tmp_path / "three", "--config", saved, "--seed", "1", "--merge")
    adapters = [
        (tmp_path / name / "adapter" / "adapter_model.safetensors").read_bytes() for name in ("one", "two", "three")
    ]
    assert adapters[0] == adapters[1] != adapters[2]
    assert (tmp_path / "two.run.yaml").read_text() == saved.read_text()
    assert (tmp_path / "three" / "config.json").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stpes: 3", 'Unknown option "stpes" in'),
        ("quiet: true", 'Unknown option "quiet"'),
        ("- steps", "contains no options"),
        ("steps: [", "not valid YAML"),
    ],
)
def test_a_file_of_options_is_checked(base, tmp_path, text, message):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(CtxextError, match=message):
        run("finetune", base, tmp_path / "out", "--config", tmp_path / "run.yaml")


def test_one_command_converts_trains_in_stages_and_evaluates(data, tmp_path):
    """The source is evaluated at the lengths of the result, and the card contains the results."""
    source, out = save_llama(tmp_path / "source"), tmp_path / "out"
    stages = json.dumps([{"steps": 2, "window": 16}, {"steps": 1, "window": 32, "checkpointing": True}])
    words = ("--method", "yarn", "--factor", "2", "--positions", "pose", "--stages", stages, "--eval", "perplexity")
    result = run(
        "finetune", source, out, "--data", data, *words, "--batch-size", "1", "--rank", "4", "--pack", "run-on"
    )
    assert "stage 1 of 2: 2 steps," in result.stderr
    report = json.loads((out / "evaluation" / "report.json").read_text())
    assert [(entry["name"], entry["lengths"]) for entry in report["models"]] == [
        ("source", [32, 64]),
        ("out", [32, 64]),
    ]
    card = (out / "README.md").read_text()
    assert "was not evaluated" not in card
    assert "report/perplexity" in card
    assert run("verify", out).exit_code == 0
    again = run("finetune", source, tmp_path / "again", "--data", data, "--config", tmp_path / "out.run.yaml")
    assert "stage 2 of 2: 1 step," in again.stderr
    weights = [load(place).state_dict() for place in (out, tmp_path / "again")]
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())
