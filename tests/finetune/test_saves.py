"""Saves of a stopped run: the newest usable one is found, and what is skipped is reported."""

import contextlib
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from ctxext.errors import CtxextError
from ctxext.finetune.run import training_folder
from ctxext.finetune.saves import adapt_state, clear_save, find_newest_save
from tiny_base import Stopped, change, stop_after, tune

STATE = "trainer_state.json"
OPTIONS = change(save_every=2)


@pytest.fixture(scope="module")
def stopped(base, tmp_path_factory):
    """Leftovers of a run that was stopped after the fifth of six steps, with saves of the second and fourth."""
    out = tmp_path_factory.mktemp("stopped") / "out"
    with pytest.raises(Stopped):
        tune(base, out, OPTIONS, progress=stop_after(5))
    return training_folder(out)


@pytest.fixture
def folder(stopped, tmp_path):
    return shutil.copytree(stopped, tmp_path / "out.training")


def cut(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def change_state(save, **values):
    state = json.loads((save / STATE).read_text()) | values
    (save / STATE).write_text(json.dumps({key: value for key, value in state.items() if value != "gone"}))


def lose_adapter_weight(save):
    file = save / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors.pop(next(iter(tensors)))
    save_file(tensors, file)


PARTS = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "adapter_model.safetensors", "adapter_config.json", STATE)
FAULTS = {
    **{f"{name} missing": lambda save, name=name: (save / name).unlink() for name in PARTS},
    **{f"{name} empty": lambda save, name=name: (save / name).write_bytes(b"") for name in PARTS},
    **{f"{name} cut": lambda save, name=name: cut(save / name) for name in PARTS},
    **{f"{name} folder": lambda save, name=name: ((save / name).unlink(), (save / name).mkdir()) for name in PARTS},
    "optimizer list": lambda save: torch.save([1, 2], save / "optimizer.pt"),
    "random state without numpy's": lambda save: torch.save({"cpu": 1}, save / "rng_state.pth"),
    "adapter config a list": lambda save: (save / "adapter_config.json").write_text("[]"),
    "no files": lambda save: (shutil.rmtree(save), save.mkdir()),
    "a file": lambda save: (shutil.rmtree(save), save.write_text("")),
    "a dangling link": lambda save: (shutil.rmtree(save), save.symlink_to("nowhere")),
    "another step": lambda save: change_state(save, global_step=3),
    "step as text": lambda save: change_state(save, global_step="4"),
    "no log": lambda save: change_state(save, log_history="gone"),
    "log of text": lambda save: change_state(save, log_history="all"),
    "callbacks a list": lambda save: change_state(save, stateful_callbacks=[1]),
    "a metric of text": lambda save: change_state(save, best_metric=[1]),
    "a best save that is no path": lambda save: change_state(save, best_model_checkpoint=7),
    "epoch not a number": lambda save: change_state(save, epoch="NaN"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_unusable_save_is_skipped_and_the_one_before_is_used(folder, name):
    FAULTS[name](folder / "checkpoint-4")
    saves = find_newest_save(folder, 6)
    assert saves.newest.name == "checkpoint-2"
    (note,) = saves.notes
    assert note.startswith("skipped checkpoint-4: ")


@pytest.mark.parametrize(
    "name", ["checkpoint-backup", "checkpoint-0012", "checkpoint-5.old", "checkpoint-", "checkpoint-٥"]
)
def test_other_names_are_no_saves(folder, name):
    shutil.copytree(folder / "checkpoint-4", folder / name)
    saves = find_newest_save(folder, 6)
    assert (saves.newest.name, saves.notes) == ("checkpoint-4", (f"skipped {name}: it is not named as a save",))


def test_a_newer_format_s_keys_are_ignored(folder):
    change_state(folder / "checkpoint-4", num_replicas=2, stateful_callbacks={})
    saves = find_newest_save(folder, 6)
    assert saves.newest.name == "checkpoint-4"
    assert saves.notes == ("ignored in checkpoint-4: num_replicas of another version of transformers",)


def test_without_a_usable_save_a_run_never_begins_again_in_silence(folder):
    for step in (2, 4):
        (folder / f"checkpoint-{step}" / "optimizer.pt").unlink()
    with pytest.raises(
        CtxextError, match=r"No save in .* is usable\. checkpoint-4: optimizer\.pt is missing\."
    ) as error:
        find_newest_save(folder, 6)
    assert "--overwrite" in error.value.hint
    for step in (2, 4):  # As after kills during the first save.
        (folder / f"checkpoint-{step}" / STATE).unlink()
    saves = find_newest_save(folder, 6)
    assert saves.newest is None
    assert saves.notes == tuple(f"skipped checkpoint-{step}: it has no {STATE}" for step in (4, 2))


def test_existing_files_at_a_save_are_removed(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / STATE).write_text("{}")
    (tmp_path / "link").symlink_to("kept")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "file").write_text("")
    for name in ("link", "dangling", "file", "absent"):
        clear_save(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept" / STATE).exists()
    clear_save(tmp_path / "kept")
    assert not any((tmp_path / "kept").iterdir())


@pytest.mark.parametrize(
    ("spoil", "notes", "first"),
    [
        (lambda save: change_state(save, num_replicas=2, stateful_callbacks={}), ["ignored in checkpoint-4"], 5),
        (lambda save: shutil.copytree(save, save.with_name("checkpoint-backup")), ["skipped checkpoint-backup"], 5),
        (lose_adapter_weight, ["skipped checkpoint-4"], 3),
        (lambda save: (shutil.rmtree(save), save.write_text("")), ["skipped checkpoint-4"], 3),
    ],
    ids=["unknown key", "other folder", "weight", "file"],
)
def test_a_resumed_run_ends_as_an_uninterrupted_one(base, folder, tmp_path, spoil, notes, first):
    straight = tune(base, tmp_path / "straight", OPTIONS)
    spoil(folder / "checkpoint-4")
    lines, steps = [], []
    progress = lambda text, step, total: steps.append(step) if "loss" in text else None  # noqa: E731
    done = tune(base, tmp_path / "out", OPTIONS, resume=True, notify=lines.append, progress=progress)
    told = [line for line in lines if line.startswith(("skipped", "ignored"))]
    assert [line.startswith(note) for line, note in zip(told, notes, strict=True)] == [True]
    assert f"resuming after step {first - 1}" in lines
    assert steps == list(range(first, 7))
    assert done.losses[-1] == straight.losses[-1]
    one, two = (load_file(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in ("straight", "out"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_state_is_adapted_once(folder):
    save, arguments = folder / "checkpoint-4", SimpleNamespace(train_batch_size=3)
    arguments.main_process_first = lambda **_: contextlib.nullcontext()
    change_state(save, num_replicas=2)
    adapt_state(save, arguments)
    state = json.loads((save / STATE).read_text())
    assert (state["train_batch_size"], state["global_step"]) == (3, 4)
    assert "num_replicas" not in state
    stamp = (save / STATE).stat().st_mtime_ns
    adapt_state(save, arguments)
    assert (save / STATE).stat().st_mtime_ns == stamp


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("sequences-64.bin", None, "missing or does not contain 10 sequences"),
        ("sequences-32.bin", b"1234", "missing or does not contain"),
        ("sequences.json", b"[]", "damaged"),
        ("sequences.json", b"{}", "does not contain 0 sequences"),
        ("settings.json", b'{"half', "not valid JSON"),
    ],
)
def test_damaged_sequences_and_settings_end_in_one_line(base, folder, tmp_path, name, content, message):
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(CtxextError, match=message):
        tune(base, tmp_path / "out", OPTIONS, resume=True)


@pytest.mark.thorough
def test_a_damaged_log_of_steps_loses_only_its_lines(base, folder, tmp_path):
    log = folder / "steps.jsonl"
    lines = log.read_bytes().splitlines()
    log.write_bytes(
        b"\xef\xbb\xbf" + b"\n".join([lines[0], b"\xff\xfe", b'"text"', b'{"step": NaN}', *lines[1:4], b'{"st'])
    )
    tune(base, tmp_path / "out", OPTIONS, resume=True)
    kept = [json.loads(line)["step"] for line in (tmp_path / "out" / "steps.jsonl").read_text().splitlines()]
    assert kept == [1, 2, 3, 4, 5, 6]
