"""What the system refuses: full disks, limits, permissions, names. One line, exit code 1, nothing half-made.

Root may do anything, so that permissions are tried by a run that gave root's rights away.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from forks import TOKEN, Server, lay_models, server_with_hub

pytestmark = pytest.mark.slow

TRAINED = ("--length", "64", "--steps", "3", "--batch-size", "2", "--rank", "4", "--save-every", "2", "-q")
ASKED = ("-t", "passkey", "--lengths", "200", "--samples", "1", "--depths", "2", "-q")
TRIED = ("--target-length", "640", "--trials", "2", "--samples", "1", "--checked", "2", "--keep-short", "1", "-q")
COMMANDS = ("convert", "calibrated", "merge", "eval", "finetune", "search", "push")
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can mount, and give its rights away")


@pytest.fixture(scope="module")
def made() -> Iterator[Path]:
    """What commands work on, where everybody may read it."""
    place = Path(tempfile.mkdtemp())
    yield lay_models(place)
    shutil.rmtree(place)


@pytest.fixture(scope="module")
def server(made) -> Iterator[Server]:
    with server_with_hub(made) as started:
        words = ["finetune", made / "base", made / "tuned", "--data", made / "numbers.jsonl", *TRAINED, "--no-merge"]
        done = started(words)
        assert done["code"] == 0, done["said"]
        subprocess.run(["chmod", "-R", "a+rX", str(made)], check=True)
        yield started


@pytest.fixture
def place() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def words_of(name: str, made: Path, out: Path) -> list[object]:
    """A command line that writes OUT, or beside it."""
    return {
        "convert": ["convert", made / "source", out, "-m", "yarn", "--factor", 4, "-q"],
        "calibrated": ["convert", made / "tiny", out, "-m", "mspoe", "--first-layer", 0, "--no-verify", "-q"],
        "merge": ["merge", made / "base", made / "tuned" / "adapter", out, "-q"],
        "eval": ["eval", made / "tiny", *ASKED, "--out", out],
        "finetune": ["finetune", made / "base", out, "--data", made / "numbers.jsonl", *TRAINED],
        "search": ["search", made / "tiny", f"{out}.yaml", *TRIED],
        "push": ["push", out, "me/tiny", "--token", TOKEN, "-q"],
    }[name]


def one_line(done: dict) -> str:
    """Hold that a run was refused in one line and a hint."""
    said = done["said"]
    assert done["code"] == 1, said
    assert "Traceback" not in said, said
    assert said[said.rindex("error: ") :].count("\n") <= 2, said
    return said


@pytest.mark.parametrize("limit", [0, 300, 3000, 9000])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_limit_on_the_size_of_files(name, limit, made, server, place):
    if name == "push":
        shutil.copytree(made / "base", place / "out")
    done = server(words_of(name, made, place / "out"), limits={"RLIMIT_FSIZE": limit})
    if name == "push" and limit >= 3000:  # What it writes is smaller.
        assert done["code"] == 0, done["said"]
        return
    one_line(done)
    if name in ("convert", "calibrated", "merge"):
        assert list(place.iterdir()) == []


@as_root
@pytest.mark.parametrize("size", ["8k", "64k"])
@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "push"])
def test_a_full_disk(name, size, made, server, place):
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(place)], check=False)
    if mounted.returncode:
        pytest.skip("nothing can be mounted here")
    try:
        done = server(words_of(name, made, place / "out"))
        if name == "eval" and size == "64k":  # Its report fits.
            assert done["code"] == 0, done["said"]
        else:
            assert "space" in one_line(done) or "full" in done["said"]
        if name in ("convert", "calibrated", "merge"):
            assert list(place.iterdir()) == []
    finally:
        subprocess.run(["umount", str(place)], check=True)


@as_root
@pytest.mark.parametrize("kind", ["btrfs", "xfs"])
@pytest.mark.parametrize("link", ["auto", "reflink"])
def test_file_systems_that_clone(link, kind, made, server, tmp_path):
    """With the real call: blocks are shared until one side is written, and the source keeps what it had."""
    if not shutil.which(f"mkfs.{kind}"):
        pytest.skip(f"mkfs.{kind} is not installed")
    disk, place = tmp_path / "disk", tmp_path / "mounted"
    place.mkdir()
    with disk.open("wb") as file:
        file.truncate(512 << 20)
    subprocess.run([f"mkfs.{kind}", "-q", str(disk)], check=True)
    if subprocess.run(["mount", "-o", "loop", str(disk), str(place)], check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        shutil.copytree(made / "source", place / "source")
        words = words_of("convert", made, place / "out")
        done = server([words[0], place / "source", *words[2:], "--link", link])
        assert done["code"] == 0, done["said"]
        assert "cloned" in done["said"]
        content = (place / "source" / "model.safetensors").read_bytes()
        assert (place / "out" / "model.safetensors").read_bytes() == content
        with (place / "out" / "model.safetensors").open("r+b") as file:
            file.seek(len(content) - 1)
            file.write(bytes([content[-1] ^ 1]))
        assert (place / "source" / "model.safetensors").read_bytes() == content
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("kind", ["long", "loop", "in a file", "nowhere"])
def test_names_that_cannot_be_made(kind, name, made, server, place):
    (place / "loop").symlink_to(place / "loop")
    (place / "file").write_text("")
    outs = {"long": place / ("x" * 300), "loop": place / "loop" / "out", "in a file": place / "file" / "out"}
    one_line(server(words_of(name, made, outs.get(kind, Path("/proc/out")))))
    assert sorted(path.name for path in place.iterdir()) == ["file", "loop"]


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("search", "push")])
def test_a_name_of_250_letters_is_one(name, made, server, place):
    out = place / ("x" * 250)
    done = server(words_of(name, made, out))
    assert done["code"] == 0, done["said"]
    assert out.is_dir()


@pytest.mark.parametrize("name", ["convert", "calibrated", "merge", "finetune"])
def test_the_folder_one_is_in_is_not_replaced(name, made, server, place):
    (place / "mine.txt").write_text("")
    given = words_of(name, made, Path())
    assert "contains the current folder" in one_line(server([*given, "--overwrite-anything"], **{"in": str(place)}))
    assert [path.name for path in place.iterdir()] == ["mine.txt"]


@as_root
@pytest.mark.parametrize("name", COMMANDS)
def test_a_folder_that_may_not_be_written(name, made, server, place):
    if name == "push":  # Has digests to note in it.
        shutil.copytree(made / "base", place / "out")
        (place / "out").chmod(0o555)
    place.chmod(0o555)
    one_line(server(words_of(name, made, place / "out"), nobody=True))


@as_root
@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "push"])
@pytest.mark.parametrize("file", [".", "config.json", "model.safetensors", "tokenizer_config.json"])
def test_files_that_may_not_be_read(file, name, made, server, place):
    given = words_of(name, made, place / "out")
    shutil.copytree(given[1], place / "copy")
    (place / "copy" / file).chmod(0)
    one_line(server([given[0], place / "copy", *given[2:]], nobody=True))
    (place / "copy" / file).chmod(0o755)


@as_root
@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_adapters_that_may_not_be_read(file, made, server, place):
    shutil.copytree(made / "tuned" / "adapter", place / "adapter")
    (place / "adapter" / file).chmod(0)
    one_line(server(["merge", made / "base", place / "adapter", place / "out"], nobody=True))
