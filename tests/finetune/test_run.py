"""Whole runs: their results, stopping and resuming, and refusals."""

import json
import math
import shutil
import signal
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ctxext.api import Recipe, TrainingData, TrainingOptions, convert, merge, verify
from ctxext.errors import CtxextError
from ctxext.finetune.base import open_base
from ctxext.finetune.prepare import check_mergeable
from ctxext.finetune.run import training_folder
from ctxext.finetune.saves import find_newest_save
from ctxext.methods import MsPoE, PositionInterpolation, Yarn
from ctxext.publish.push import plan_push
from ctxext.recipes.model_config import model_config
from tiny_base import QUICK, Stopped, Tokens, change, documents, load, logits, make_base, save_llama, stop_after, tune


def adapter(out):
    return load_file(out / "adapter" / "adapter_model.safetensors")


def furthest(one, two):
    assert one.keys() == two.keys()
    return max(float((one[name] - two[name]).abs().max()) for name in one)


def test_it_learns_and_reports(base, tmp_path):
    lines, steps = [], []
    out = tmp_path / "out"
    options = change(steps=30, learning_rate=1e-2, batch_size=4, micro_batch=2)
    done = tune(base, out, options, is_drawn=True, notify=lines.append, progress=lambda *state: steps.append(state))
    long = [loss for step, loss in done.losses if step % 5]
    assert sum(long[-5:]) / 5 < sum(long[:5]) / 5 - 0.2
    assert lines[0] == "data: 24 documents, 3,120 tokens → 48 sequences of 64; 48 tokens dropped"
    assert lines[1:-1] == ["      and 48 of 32 tokens", "      each sequence is used 2.0 times"]
    assert lines[-1] == "training on cpu in fp32"
    assert (done.device, done.dtype) == ("cpu", "fp32")
    assert [state[1] for state in steps if "loss" in state[0]] == list(range(1, 31))
    stages = [label for label, *_ in steps if "loss" not in label]
    assert stages[:4] == ["loading the libraries", "loading the model", "reading the data", "starting"]
    assert "tokens/s" in next(label for label, *_ in steps if "loss" in label)
    report = json.loads((out / "finetune.json").read_text())
    assert report["data"]["num_sequences"] == 48
    assert len(report["losses"]) == 30
    lines = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [tuple(entry) for entry in report["losses"]]
    assert lines[0].keys() >= {"learning_rate", "grad_norm", "tokens_per_second", "memory", "seconds"}
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert not training_folder(out).exists()
    assert "was not evaluated" in (out / "README.md").read_text()


@pytest.mark.thorough
def test_a_second_training_reports_itself(base, tmp_path):
    """A trained base contains a report and an evaluation of its own weights, which are not those of the result."""
    tune(base, tmp_path / "first", change(steps=2))
    (tmp_path / "first" / "evaluation").mkdir()
    (tmp_path / "first" / "evaluation" / "report.json").write_text("{}")
    (tmp_path / "first" / "notes.txt").write_text("kept")
    done = tune(tmp_path / "first", tmp_path / "second", change(steps=3))
    report = json.loads((tmp_path / "second" / "finetune.json").read_text())
    assert [tuple(entry) for entry in report["losses"]] == list(done.losses)
    assert len((tmp_path / "second" / "steps.jsonl").read_text().splitlines()) == len(done.losses) == 3
    assert not (tmp_path / "second" / "evaluation").exists()
    assert (tmp_path / "second" / "notes.txt").read_text() == "kept"
    merge(tmp_path / "first", tmp_path / "second" / "adapter", tmp_path / "again")
    recipe = Recipe([Yarn(factor=8)])
    convert(str(tmp_path / "first"), tmp_path / "longer", recipe, replace_scaling=True, check=False)
    left = {"finetune.json", "steps.jsonl", "loss.png", "adapter", "evaluation"}
    assert left <= {path.name for path in (tmp_path / "first").iterdir()}
    names = {path.name for path in (tmp_path / "longer").iterdir()}
    assert not left & names
    assert {"notes.txt", "model.safetensors"} <= names
    assert not (tmp_path / "again" / "finetune.json").exists()
    assert (tmp_path / "again" / "notes.txt").exists()


@pytest.mark.thorough
def test_accumulation_and_checkpointing_change_nothing(base, tmp_path):
    tune(base, tmp_path / "one", change(batch_size=4, pack="run-on"))
    tune(base, tmp_path / "two", change(batch_size=4, pack="run-on", micro_batch=4, checkpointing=True, piece=9))
    assert furthest(adapter(tmp_path / "one"), adapter(tmp_path / "two")) < 1e-5


@pytest.mark.parametrize("dropout", [0.0, pytest.param(0.3, marks=pytest.mark.thorough)])
@pytest.mark.thorough
def test_killed_and_resumed_equals_a_straight_run(base, tmp_path, dropout, our_processes):
    options = change(dropout=dropout, save_every=2)
    tune(base, tmp_path / "straight", options)
    script = (
        "import os, signal, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "from pathlib import Path\nfrom tiny_base import QUICK, tune\nimport dataclasses\n"
        "def stop(text, done, total):\n    if done == 5: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"options = dataclasses.replace(QUICK, dropout={dropout}, save_every=2)\n"
        f"tune(Path({str(base)!r}), Path({str(tmp_path / 'killed')!r}), options, progress=stop)\n"
    )
    result = our_processes.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert not (tmp_path / "killed").exists()
    assert find_newest_save(training_folder(tmp_path / "killed"), 6).newest.name == "checkpoint-4"
    lines, steps = [], []
    progress = lambda text, step, total: steps.append(step) if "loss" in text else None  # noqa: E731
    done = tune(base, tmp_path / "killed", options, resume=True, notify=lines.append, progress=progress)
    assert steps == [5, 6]
    assert "resuming after step 4" in lines
    written = (tmp_path / "killed" / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in written] == [1, 2, 3, 4, 5, 6]
    assert furthest(adapter(tmp_path / "killed"), adapter(tmp_path / "straight")) < 1e-6
    straight = json.loads((tmp_path / "straight" / "finetune.json").read_text())["losses"]
    assert torch.allclose(torch.tensor(done.losses), torch.tensor(straight), atol=1e-4)


@pytest.fixture(scope="module")
def stopped(base, tmp_path_factory):
    """Leftovers of a run that was stopped after the third step, with a save of the second."""
    out = tmp_path_factory.mktemp("stopped") / "out"
    with pytest.raises(Stopped):
        tune(base, out, change(save_every=2), progress=stop_after(3))
    return training_folder(out)


@pytest.mark.parametrize("content", [b"", b"not a save", "list"])
@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_a_damaged_save_is_reported_in_one_line(base, stopped, tmp_path, name, content):
    out = tmp_path / "out"
    file = shutil.copytree(stopped, training_folder(out)) / "checkpoint-2" / name
    assert file.is_file()
    if content == "list":
        torch.save([1, 2], file)
    else:
        file.write_bytes(content)
    with pytest.raises(CtxextError, match=rf"No save in .* is usable. checkpoint-2: {name} ") as error:
        tune(base, out, change(save_every=2), resume=True)
    assert "--overwrite" in error.value.hint


@pytest.mark.parametrize(("share", "steps", "rising"), [(0.03, 10, 1), (0.1, 25, 3), (0.1, 20, 2), (0.0, 20, 0)])
def test_warm_up_is_rounded_up(share, steps, rising):
    """A short run has one too, unless it is disabled."""
    assert TrainingOptions(length=64, steps=steps, warmup=share).warmup_steps == rising


@pytest.mark.thorough
def test_resume_refuses_other_settings_and_another_recipe(base, stopped, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(stopped, training_folder(out))
    kept = sorted(path.name for path in training_folder(out).iterdir())
    with pytest.raises(CtxextError, match="other settings: rank 4, now 8"):
        tune(base, out, change(rank=8), resume=True)
    other = make_base(tmp_path / "pi", PositionInterpolation(factor=4))
    with pytest.raises(CtxextError, match=r"other settings: model digest [0-9a-f]+, now [0-9a-f]+"):
        tune(other, out, resume=True)
    with pytest.raises(CtxextError, match="other settings: data name"):
        tune(base, out, resume=True, data=Tokens(documents(), name="else"))
    with pytest.raises(CtxextError, match="unfinished run"):
        tune(base, out)
    assert sorted(path.name for path in training_folder(out).iterdir()) == kept
    assert tune(base, out, change(save_every=1), resume=True)


@pytest.mark.thorough
def test_more_steps_continue_from_the_last_save(base, tmp_path):
    out, steps, lines = tmp_path / "out", [], []
    with pytest.raises(Stopped):
        tune(base, out, change(save_every=2), progress=stop_after(5))
    progress = lambda text, step, total: steps.append(step) if "loss" in text else None  # noqa: E731
    done = tune(base, out, change(steps=9, save_every=2), resume=True, progress=progress, notify=lines.append)
    assert "resuming after step 4" in lines
    assert steps == [5, 6, 7, 8, 9]
    assert [step for step, _ in done.losses] == list(range(1, 10))
    rates = [json.loads(line)["learning_rate"] for line in (out / "steps.jsonl").read_text().splitlines()]
    # A cosine of nine steps, with warmup in the first.
    assert rates[-1] == pytest.approx(5e-3 * (1 + math.cos(math.pi * 7 / 8)) / 2)


def test_a_quantized_base_is_refused_before_it_is_trained(base, tmp_path):
    """Its matrices have other types, and in 4 bits other shapes; only a separate adapter can be trained."""
    shutil.copytree(base, tmp_path / "quantized")
    path, name = tmp_path / "quantized" / "model.safetensors", "model.layers.0.self_attn.q_proj.weight"
    tensors = load_file(path)
    model = load(base)
    for stored in (tensors[name].to(torch.int8), torch.zeros(512, 1, dtype=torch.uint8)):
        save_file({**tensors, name: stored}, path, metadata={"format": "pt"})
        with pytest.raises(CtxextError, match=f'Cannot merge into "{name}": it is stored as U?I?8') as caught:
            check_mergeable(open_base(str(tmp_path / "quantized"), 64), model)
        assert "--no-merge" in caught.value.hint


@pytest.mark.parametrize(
    ("options", "way"),
    [
        ({}, "restart"),
        ({"positions": "pose"}, "run-on"),
    ],
)
@pytest.mark.thorough
def test_the_suggested_packing_fits_the_other_options(base, tmp_path, options, way):
    records = [{"prompt": f"w{2 + n} w5 ", "completion": "w7 w8"} for n in range(8)]
    lines = []
    data = TrainingData(records=tuple(records))
    tune(base, tmp_path / "out", change(steps=1, **options), data=data, merge=False, notify=lines.append)
    assert any(f"--pack {way} to pack documents" in line for line in lines)


def test_nothing_to_resume(base, tmp_path):
    with pytest.raises(CtxextError, match="No unfinished run"):
        tune(base, tmp_path / "out", resume=True)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_trained_is_refused(base, tmp_path):
    source = save_llama(tmp_path / "stock")
    prompt = make_base(tmp_path / "prompt", MsPoE(first_layer=0, head_order="prompt"))
    out = tmp_path / "out"
    for model, options, message in (
        (source, change(length=64), "--length 64 is above the context length"),
        (base, change(length=256), "--length 256 is above the context length"),
        (prompt, change(length=32), "depends on the prompt"),
        (base, change(targets=("q_prj",)), "q_prj"),
        (tmp_path / "nowhere", QUICK, "no folder"),
    ):
        with pytest.raises(CtxextError, match=message) as caught:
            tune(model, out, options)
        assert message != "q_prj" or 'Did you mean "q_proj"?' in caught.value.hint
    assert not out.exists()
    assert not training_folder(out).exists()


@pytest.mark.thorough
def test_a_source_is_trained_within_its_window(tmp_path):
    """Its card, its files and the loaded model show that the context is not extended."""
    source, lines, out = save_llama(tmp_path / "stock"), [], tmp_path / "out"
    tune(source, out, change(length=None, learning_rate=1e-2), notify=lines.append)
    assert lines[0] == "stock is not extended; its context length remains 32 tokens"
    config = json.loads((out / "config.json").read_text())
    assert config["max_position_embeddings"] == 32
    assert model_config(config).is_extended is False
    card = (out / "README.md").read_text()
    assert "# stock, fine-tuned\n" in card
    assert "Fine-tuned from `stock`. The context length is unchanged: 32 tokens." in card
    assert "extended" not in card.partition("## Usage")[0]
    assert "trained within its context length" in (out / "adapter" / "README.md").read_text()
    assert (logits(load(out), length=32) - logits(load(source), length=32)).abs().max() > 1e-3
    assert [finding for finding in verify(str(out)) if finding.status == "failed"] == []
    page = plan_push(out, "me/stock-tuned").texts["README.md"].decode()
    assert "ctxext finetune stock OUT" in page
    assert not any(word in page for word in ("`None`", "extended", "long-context", "## Papers", "means |"))
    tune(out, tmp_path / "again", change(length=None, steps=1))


def test_missing_hardware_is_reported(base, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(CtxextError, match="needs bitsandbytes") as caught:
        tune(base, tmp_path / "out", change(quantize="4bit"))
    assert caught.value.hint == 'pip install "ctxext[quantize]"'
    monkeypatch.setattr(import_module("ctxext.finetune.arguments"), "find_spec", lambda name: None)
    with pytest.raises(CtxextError, match="--report-to trackio needs a package"):
        tune(base, tmp_path / "out", change(report_to="trackio"))
    assert list(tmp_path.iterdir()) == []


def test_a_loss_that_is_lost_stops_the_run(tmp_path):
    base = make_base(tmp_path)
    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"][:] = float("nan")
    (base / "model.safetensors").unlink()
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CtxextError, match=r"not finite|cannot be computed"):
        tune(base, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"positions": "pose", "length": 128},
        {"pack": "restart"},
        {"pack": "run-on", "checkpointing": True},
    ],
    ids=lambda options: "-".join(str(value) for value in options.values()),
)
@pytest.mark.thorough
def test_every_way_to_train_makes_a_model(base, tmp_path, options):
    done = tune(base, tmp_path / "out", change(steps=2, **options))
    assert all(0 < loss < 10 for _, loss in done.losses)
    assert (logits(load(tmp_path / "out")) - logits(load(base))).abs().max() > 1e-4


def test_adapter_alone(base, tmp_path):
    tune(base, tmp_path / "out", change(steps=1), merge=False)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("adapter", "finetune.json", "loss.png", "steps.jsonl")
    ]
    card = (tmp_path / "out" / "adapter" / "README.md").read_text()
    assert 'base_model: "base"' in card
    assert "ctxext convert source base --method yarn --factor 4" in card
    with pytest.raises(CtxextError, match="--full has no adapter"):
        tune(base, tmp_path / "full", change(full=True), merge=False)
