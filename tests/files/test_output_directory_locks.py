"""One writer for each output, files and their stamps, and what is done where the disk or a name is odd."""

import errno
import os
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from ctxext.errors import CtxextError
from ctxext.files import content
from ctxext.files.content import (
    as_json,
    check_room,
    copy_whole,
    has_stamp,
    open_regular,
    same_value,
    stamp_of,
)
from ctxext.files.output_directory import lock_output, short_name


def descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def test_a_lock_is_there_while_it_is_held_and_leaves_nothing(tmp_path):
    out, before = tmp_path / "out", descriptors()
    path = tmp_path / ".out.ctxext-lock"
    path.write_text("process 99999999 on somewhere_else, long ago and with more words")
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), lock_output(out):  # noqa: PT012
            assert path.read_text().startswith(f"process {os.getpid()} on ")
            with lock_output(out):
                assert path.exists()
            assert path.exists(), "who holds it may take it again, and holds it still"
            assert refused(out)
            raise ZeroDivisionError
        assert [*tmp_path.iterdir()] == []
        assert descriptors() == before
        path.touch()


def refused(out):
    """What another thread is told that wants to write there too."""
    errors = []

    def other():
        try:
            with lock_output(out):
                errors.append(None)
        except CtxextError as error:
            errors.append(error.message)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    return errors[0]


def test_one_output_by_any_of_its_names_is_one(tmp_path, monkeypatch):
    (tmp_path / "place").mkdir()
    (tmp_path / "link").symlink_to("place")
    monkeypatch.chdir(tmp_path)
    with lock_output(tmp_path / "link" / "out"):
        before = descriptors()
        for name in ("place/out", "link/../place/out", tmp_path / "place" / "out"):
            told = refused(Path(name))
            assert told.startswith(f'Another process is writing "{tmp_path}/place/out"')
            assert re.search(rf"\(process {os.getpid()} on \w+\)\.$", told)
        assert descriptors() == before, "a refusal leaves no file open"
        assert refused(Path("place/other")) is None


@pytest.mark.parametrize("said", ["process 12 on host\nand more", "process x on host", "", "\x1b[31m"])
def test_the_holder_of_a_lock_is_reported_without_untrusted_text(said, tmp_path):
    with lock_output(tmp_path / "out"):
        (tmp_path / ".out.ctxext-lock").write_text(said)
        assert refused(tmp_path / "out").endswith('out".')


def test_a_link_instead_of_a_lock_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / ".out.ctxext-lock").symlink_to(tmp_path / "precious")
    with pytest.raises(CtxextError, match="is not writable"), lock_output(tmp_path / "out"):
        pass
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_full_disk_takes_no_lock_away(tmp_path, monkeypatch):
    def full(*given, **named):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(Path, "write_text", full)
    with lock_output(tmp_path / "out"):
        assert f'Another process is writing "{tmp_path / "out"}".' in refused(tmp_path / "out")


def test_names_that_leave_room_for_more():
    assert short_name("a" * 120) == "a" * 120
    for one, other in (("a" * 121, "a" * 122), ("é" * 61, "é" * 62)):
        assert short_name(one) != short_name(other)
        assert len(os.fsencode(short_name(one))) <= 120
        assert short_name(one).startswith(one[:24])


def test_what_is_no_file_is_refused_at_once_and_left_closed(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    before = descriptors()
    for place in (tmp_path / "pipe", tmp_path, Path("/dev/null")):
        with pytest.raises((CtxextError, IsADirectoryError)):
            open_regular(place)
    assert descriptors() == before


def test_the_disk_that_is_written_to_must_have_room(tmp_path, monkeypatch):
    (tmp_path / "from").mkdir()
    (tmp_path / "to").mkdir()
    (tmp_path / "from" / "file").write_bytes(b"12345")
    room = {"from": 0, "to": 5}
    monkeypatch.setattr(
        content.shutil, "disk_usage", lambda place: SimpleNamespace(total=10**9, used=0, free=room[Path(place).name])
    )
    copy_whole(tmp_path / "from" / "file", tmp_path / "to" / "file")
    assert (tmp_path / "to" / "file").read_bytes() == b"12345"
    room["to"] = 4
    with pytest.raises(OSError) as full:  # noqa: PT011
        copy_whole(tmp_path / "from" / "file", tmp_path / "to" / "other")
    assert full.value.errno == errno.ENOSPC
    assert not (tmp_path / "to" / "other").exists()
    check_room(tmp_path / "to", 4)


def test_json_of_any_name():
    text = as_json({"ä": "\udc80", "b": [1.5, None]})
    assert text == '{\n  "ä": "?",\n  "b": [\n    1.5,\n    null\n  ]\n}\n'
    assert same_value(math_nan := float("nan"), float("nan"))
    assert not same_value(math_nan, 1.0)
    assert not same_value(1.0, math_nan)
    assert same_value([1], [1.0])


@pytest.mark.parametrize("unit", [1, 1000, 1_000_000_000])
def test_stamps_outlive_a_file_system_that_rounds_times(unit, tmp_path):
    path, time = tmp_path / "file", 1_700_000_001_123_456_789
    path.write_bytes(b"123")
    rounded = time // unit * unit
    os.utime(path, ns=(rounded, rounded))
    assert stamp_of(path) == [3, rounded]
    assert has_stamp(path, [3, time])
    assert not has_stamp(path, [4, time])
    for other in (time - 2_000_000_000, time + unit, time + 2_000_000_000):
        assert not has_stamp(path, [3, other])
    os.utime(path, ns=(rounded - unit, rounded - unit))
    assert not has_stamp(path, [3, time])


def test_another_container_s_process_ids_are_not_ours(tmp_path, monkeypatch):
    """Containers of one name on a shared disk: a folder of another one stays, whatever its number is here."""
    from ctxext.files import output_directory, processes

    def enter(namespace):
        monkeypatch.setattr(Path, "readlink", lambda path: Path(f"pid:[{namespace}]"))
        return processes.machine_id(), output_directory._host_name()

    machine, ours, theirs = enter("4026531836"), enter("4026532201"), enter("4026532202")
    assert len({machine[0], ours[0], theirs[0]}) == len({machine[1], ours[1], theirs[1]}) == 3
    out, gone = tmp_path / "out", 2**22 + 1
    place = tmp_path / f".out.ctxext-{theirs[1]}-{gone}"
    place.mkdir()
    enter("4026532201")
    output_directory.recover(out)
    assert place.exists()
    enter("4026532202")
    output_directory.recover(out)
    assert not place.exists()
