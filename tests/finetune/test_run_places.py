"""Ownership of OUT during a run, and the effect of leftovers on the next run."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ctxext.errors import CtxextError
from ctxext.files.output_directory import beside, foreign_files
from ctxext.finetune import run
from ctxext.finetune.run import training_folder
from tiny_base import QUICK, Stopped, tune

SHORT = dataclasses.replace(QUICK, steps=1)

HOLD = """
import sys, time
from pathlib import Path
from ctxext.files.output_directory import lock_output
with lock_output(Path(sys.argv[1])):
    print("in", flush=True)
    time.sleep(60)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def quick(monkeypatch) -> None:
    """No training: the tests cover the steps before and after it."""
    monkeypatch.setattr(run, "_train", lambda *_args, **_options: (_ for _ in ()).throw(Stopped))


def test_a_second_run_is_refused_before_it_trains_and_named(base, tmp_path, monkeypatch):
    quick(monkeypatch)
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path / "out"], stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"in\n"
        with pytest.raises(CtxextError, match=rf'^Another process is writing ".*" \(process {other.pid} on \w+\)\.$'):
            tune(base, tmp_path / "out")
        other.kill()
    with pytest.raises(Stopped):
        tune(base, tmp_path / "out")
    assert names(tmp_path) == ["out.training"]


@pytest.mark.parametrize("given", [{}, {"overwrite": True}, {"overwrite_anything": True}])
@pytest.mark.thorough
def test_what_is_put_into_out_meanwhile_stays(given, base, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    if "overwrite_anything" in given:
        (out / "before.txt").write_text("may go")

    def put(_line: str) -> None:
        (out / "thesis.txt").write_text("years")

    with pytest.raises(CtxextError, match=r'was created by another process.*the result is in ".*out-2"'):
        tune(base, out, SHORT, notify=put, **given)
    assert (out / "thesis.txt").read_text() == "years"
    assert foreign_files(tmp_path / "out-2") == []
    assert (tmp_path / "out-2" / "model.safetensors").is_file()


@pytest.mark.thorough
def test_only_confirmed_files_may_be_replaced(base, tmp_path):
    out = tmp_path / "out"
    tune(base, out, SHORT, merge=False)
    with pytest.raises(CtxextError, match="not empty"):
        tune(base, out, SHORT)
    tune(base, out, SHORT, merge=False, overwrite=True)
    (out / "adapter" / "mine.txt").write_text("")
    with pytest.raises(CtxextError, match=r'did not create: "adapter/mine\.txt"'):
        tune(base, out, SHORT, overwrite=True)
    tune(base, out, SHORT, overwrite_anything=True)
    assert names(tmp_path) == ["out"]
    assert not (out / "adapter" / "mine.txt").exists()


def test_what_a_kill_leaves_is_in_nobodys_way(base, tmp_path, monkeypatch):
    quick(monkeypatch)
    out = tmp_path / "out"
    folder = training_folder(out)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with beside(folder) as place:
        mine = place.name.replace(str(os.getpid()), str(gone.pid))
    theirs = f".out.training.ctxext-elsewhere-{gone.pid}"
    for name in (mine, theirs, folder.name):
        (tmp_path / name).mkdir()
    (tmp_path / mine / "checkpoint-2").mkdir()
    with pytest.raises(Stopped):
        tune(base, out)
    assert names(tmp_path) == [theirs, "out.training"]
    assert names(folder) == ["settings.json"]


def test_a_run_is_there_with_its_settings_or_not_at_all(base, tmp_path, monkeypatch):
    """After a kill while it creates or clears its folder, the next run can start over."""
    quick(monkeypatch)
    folder = training_folder(tmp_path / "out")
    with pytest.raises(Stopped):
        tune(base, tmp_path / "out")
    (folder / "checkpoint-2").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(run.shutil, "rmtree", lambda *_args, **_options: (_ for _ in ()).throw(Stopped))
        with pytest.raises(Stopped):
            tune(base, tmp_path / "out", overwrite=True)
    assert not folder.exists()
    with pytest.raises(Stopped):
        tune(base, tmp_path / "out")
    assert names(tmp_path) == ["out.training"]
    assert names(folder) == ["settings.json"]


def test_files_of_others_in_the_folder_of_saves_stay(base, tmp_path):
    folder = training_folder(tmp_path / "out")
    folder.mkdir()
    (folder / "mine.txt").write_text("")
    with pytest.raises(CtxextError, match="not created by a run"):
        tune(base, tmp_path / "out", overwrite=True)
    assert names(folder) == ["mine.txt"]


@pytest.mark.parametrize(("saves", "kept"), [((), []), (("checkpoint-2",), ["out.training"])])
def test_a_run_that_fails_keeps_its_saves(base, tmp_path, monkeypatch, saves, kept):
    """Without a save nothing remains; with a save `--resume` continues."""

    def train(base, folder, *_):
        for name in saves:
            (folder / name).mkdir()
        raise CtxextError("The loss is not finite at step 3.")

    monkeypatch.setattr(run, "_train", train)
    with pytest.raises(CtxextError, match="not finite"):
        tune(base, tmp_path / "out")
    assert names(tmp_path) == kept
    assert [path.name for path in tmp_path.glob("out.training/checkpoint-*")] == list(saves)
