"""Whose files lie in OUT, who else writes there, and what is left when something goes wrong."""

import errno
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ctxext.api import Recipe, convert
from ctxext.errors import CtxextError
from ctxext.files import output_directory
from ctxext.files.output_directory import (
    OverwriteOptions,
    beside,
    check_out,
    discard,
    explain_disk_errors,
    give_name,
    recover,
    staging_directory,
    write_whole,
)
from ctxext.methods import Ntk, Yarn

YARN, NTK = Recipe([Yarn(factor=4)]), Recipe([Ntk(factor=2)])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_overwrite_takes_only_what_ctxext_made(llama, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("years")
    with pytest.raises(CtxextError, match=r'did not create: "thesis\.tex"') as caught:
        convert(str(llama), home, YARN, overwrite=True)
    assert "--overwrite-anything" in caught.value.hint
    assert names(home) == ["thesis.tex"]
    convert(str(llama), home, YARN, overwrite_anything=True)
    assert "thesis.tex" not in names(home)
    convert(str(llama), home, NTK, overwrite=True)
    (home / "notes").mkdir()
    (home / "notes" / "mine.txt").write_text("")
    with pytest.raises(CtxextError, match=r'"notes/mine\.txt"'):
        convert(str(llama), home, YARN, overwrite=True)
    assert (home / "notes" / "mine.txt").exists()


def test_a_record_that_is_broken_proves_nothing(llama, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "ctxext.json").write_text("{")
    with pytest.raises(CtxextError, match="did not create"):
        check_out(tmp_path / "out", llama, OverwriteOptions(overwrite=True))


@pytest.mark.parametrize("overwrite", [False, True])
def test_files_put_there_meanwhile_stay(overwrite, llama, tmp_path):
    out = tmp_path / "out"
    if overwrite:
        convert(str(llama), out, NTK)
    with staging_directory(out) as work:
        (work / "result").write_text("hours of work")
        out.mkdir(exist_ok=True)
        (out / "mine.txt").write_text("mine")
        with pytest.raises(CtxextError, match=r'was created by another process.*out-2"'):
            give_name(work, out, overwrite=overwrite)
    assert (out / "mine.txt").read_text() == "mine"
    assert (tmp_path / "out-2" / "result").read_text() == "hours of work"
    assert names(tmp_path) == ["llama", "out", "out-2"]


@pytest.mark.thorough
def test_two_writers_of_one_output(llama, tmp_path):
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom ctxext.files.output_directory import staging_directory\n"
        f"with staging_directory(Path({str(tmp_path / 'out')!r})):\n    print('in', flush=True)\n    time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"in\n"
    with pytest.raises(CtxextError, match="Another process is writing"):
        convert(str(llama), tmp_path / "out", YARN)
    convert(str(llama), tmp_path / "other", YARN)
    process.kill()
    process.wait()
    convert(str(llama), tmp_path / "out", YARN)
    assert names(tmp_path) == ["llama", "other", "out"]


@pytest.mark.thorough
def test_many_converts_at_once_leave_one_result(llama, tmp_path):
    command = [sys.executable, "-m", "ctxext", "convert", str(llama), "out", "-m", "yarn", "--factor", "4", "-q"]
    racing = [subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    said = [process.communicate()[1] for process in racing]
    assert sorted(process.returncode for process in racing) == [0, 1, 1, 1], said
    assert not any("Traceback" in text for text in said)
    assert names(tmp_path) == ["llama", "out"]


def stopped_at(line: int, work: Callable[[], None]) -> bool:
    """Do the work with Ctrl-C at a line of the module or of `shutil`, counted as they run; whether it came to that."""
    files = (output_directory.__file__, shutil.__file__)
    left = line

    def trace(frame, event, _argument):
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            left -= 1
            if left == -1:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except (KeyboardInterrupt, OSError):
        pass  # The error is `rmtree`'s own, of a file that it had just closed.
    finally:
        sys.settrace(before)
    return left < 0


def test_a_folder_that_is_discarded_when_a_signal_comes_is_there_whole_or_not_at_all(tmp_path):
    folder = tmp_path / "out"
    for line in itertools.count():
        (folder / "checkpoint-2").mkdir(parents=True, exist_ok=True)
        (folder / "settings.json").write_text("{}")
        came = stopped_at(line, lambda: discard(folder))
        assert names(tmp_path) in ([], ["out"]), line
        if folder.exists():
            assert names(folder) == ["checkpoint-2", "settings.json"]
        if not came:
            break
    assert line > 10
    assert names(tmp_path) == []


@pytest.mark.thorough
def test_a_result_that_takes_its_name_when_a_signal_comes_is_the_old_or_the_new_one(tmp_path):
    out = tmp_path / "out"

    def write() -> None:
        with output_directory.output_directory(out, [], OverwriteOptions(overwrite_anything=True)) as work:
            (work / "new.txt").write_text("")

    for line in itertools.count():
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        (out / "old.txt").write_text("")
        came = stopped_at(line, write)
        assert names(out) in (["old.txt"], ["new.txt"]), line
        assert {"out"} <= set(names(tmp_path)) <= {"out", ".out.ctxext-lock"}, line  # The next run removes the lock.
        if not came:
            break
    assert line > 10
    assert names(out) == ["new.txt"]
    assert names(tmp_path) == ["out"]


def test_leftovers_of_other_machines_stay(tmp_path):
    out = tmp_path / "out"
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with beside(out) as place:
        mine = place.name.replace(str(os.getpid()), str(gone.pid))
    theirs = f".out.ctxext-elsewhere-{gone.pid}"
    for name in (mine, theirs):
        (tmp_path / name).mkdir()
    (tmp_path / mine / "old").write_text("a file that a kill left")
    out.mkdir()
    recover(out)
    assert names(tmp_path) == [theirs, "out"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO])
def test_what_the_system_refuses_is_one_line(number, tmp_path, monkeypatch):
    def refuse(*_args: object, **_options: object) -> None:
        raise OSError(number, os.strerror(number), str(tmp_path / "x"))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(CtxextError) as caught:
        write_whole(tmp_path / "x", b"")
    assert "\n" not in caught.value.message
    assert str(tmp_path) in caught.value.message
    assert caught.value.hint
    assert names(tmp_path) == []


def test_other_errors_of_the_system_stay_ours(tmp_path):
    with pytest.raises(OSError, match="bad"), explain_disk_errors(tmp_path):
        raise OSError(errno.EBADF, "bad")


def test_long_names(llama, tmp_path, run):
    convert(str(llama), tmp_path / ("o" * 250), YARN)
    assert json.loads((tmp_path / ("o" * 250) / "config.json").read_text())["max_position_embeddings"] == 512
    result = run("convert", llama, tmp_path / ("o" * 256), "-m", "pi", "--factor", 2)
    assert result.exit_code == 1
    assert "too long" in result.exception.message


def test_the_folder_one_is_in(llama, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for out in (".", "..", str(tmp_path / "here")):
        with pytest.raises(CtxextError, match=r"contains the current folder|contains SOURCE"):
            convert(str(llama), out, YARN, overwrite=True)


@pytest.mark.thorough
def test_a_limit_on_the_size_of_files(llama, tmp_path, our_processes):
    script = "import resource, sys\nfrom ctxext.cli.app import main\nsys.argv[0] = 'ctxext'\n"
    script += "resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))\nmain()"
    words = ["convert", str(llama), str(tmp_path / "out"), "-m", "pi", "--factor", "2", "-q"]
    result = our_processes.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr.count("\n")) == (1, 2), result.stderr
    assert "exceeds the maximum size" in result.stderr
    assert names(tmp_path) == ["llama"]
