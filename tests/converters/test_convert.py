"""Converting: what is written, what is left alone, and what is left behind when it goes wrong."""

import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ctxext.api import Recipe, convert
from ctxext.converters import convert as convert_module
from ctxext.errors import CtxextError
from ctxext.files.output_directory import beside, recover
from ctxext.methods import DynamicNtk, PositionInterpolation, Yarn
from loaded_models import logits
from small_llama import make_llama, read_json

YARN = Recipe([Yarn(factor=4)])


IDS = torch.arange(40)[None]


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if ".ctxext-" in path.name)


def test_both_dialects_and_all_lengths_agree(llama, tmp_path):
    convert(str(llama), tmp_path / "out", YARN)
    config = read_json(tmp_path / "out" / "config.json")
    schedule = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }
    assert config["rope_scaling"] == schedule
    assert config["rope_parameters"] == {**schedule, "rope_theta": 10000.0}
    assert config["rope_theta"] == 10000.0
    assert config["max_position_embeddings"] == 512
    assert isinstance(config["max_position_embeddings"], int)
    assert config["head_dim"] == 8
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == config["torch_dtype"] == "float32"
    tokenizer = (tmp_path / "out" / "tokenizer_config.json").read_text()
    assert tokenizer == (llama / "tokenizer_config.json").read_text().replace(": 128", ": 512")


def test_dynamic_keeps_the_trained_maximum(llama, tmp_path):
    convert(str(llama), tmp_path / "out", Recipe([DynamicNtk(factor=4)]))
    assert read_json(tmp_path / "out" / "config.json")["max_position_embeddings"] == 128


def shared_with(source: Path, out: Path) -> list[str]:
    inodes = {entry.stat().st_ino for entry in source.iterdir()}
    return [path.name for path in out.iterdir() if path.is_file() and path.stat().st_ino in inodes]


def test_nothing_is_shared_with_the_source(llama, tmp_path):
    (llama / "notes").mkdir()
    (llama / "notes" / "extra.txt").write_text("kept")
    done = convert(str(llama), tmp_path / "out", YARN)
    assert shared_with(llama, tmp_path / "out") == []
    assert set(done.written.ways.values()) <= {"cloned", "copied"}
    assert done.written.notes == ()
    assert (tmp_path / "out" / "notes" / "extra.txt").read_text() == "kept"


def test_requested_hard_links_are_read_only_and_reported(llama, tmp_path):
    (llama / "model.safetensors").chmod(0o666)  # Anybody could write to the result by its other name.
    done = convert(str(llama), tmp_path / "out", YARN, link="hard")
    assert shared_with(llama, tmp_path / "out") == ["model.safetensors"]
    assert done.written.how == "hard-linked"
    assert (llama / "model.safetensors").stat().st_mode & 0o777 == 0o444
    assert (tmp_path / "out" / "model.safetensors").stat().st_mode & 0o777 == 0o444
    assert "read-only" in done.written.notes[0]
    assert "hard links" in (tmp_path / "out" / "README.md").read_text()
    assert read_json(tmp_path / "out" / "ctxext.json")["links"] == {"model.safetensors": "hard-linked"}
    shutil.rmtree(tmp_path / "out")


def test_files_of_other_users_are_copied_and_keep_their_mode(llama, tmp_path, monkeypatch):
    """Their owner could write to the result, and a link would take their write bit."""
    mode, user = (llama / "model.safetensors").stat().st_mode, os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    done = convert(str(llama), tmp_path / "out", YARN, link="hard")
    assert done.written.how != "hard-linked"
    assert shared_with(llama, tmp_path / "out") == []
    assert (llama / "model.safetensors").stat().st_mode == mode


def test_the_hub_cache_and_the_demo_are_never_shared(llama, tmp_path):
    cache = tmp_path / "models--a--b"
    (cache / "blobs").mkdir(parents=True)
    snapshot = cache / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(llama.iterdir())):
        path.rename(cache / "blobs" / f"{number:064x}")
        (snapshot / path.name).symlink_to(cache / "blobs" / f"{number:064x}")
    for source in (str(snapshot), "demo"):
        done = convert(source, tmp_path / f"out-{len(source)}", Recipe([Yarn(factor=4)]), link="hard")
        assert set(done.written.ways.values()) == {"copied"}


def test_a_link_that_does_not_exist_is_named(llama, tmp_path):
    with pytest.raises(CtxextError, match='"magic"') as caught:
        convert(str(llama), tmp_path / "out", YARN, link="magic")
    assert "reflink" in caught.value.hint


@pytest.fixture
def ioctl(monkeypatch):
    """A stand-in for the system's call, as only some file systems have it: gives what it is told, or copies."""
    fcntl, answers = pytest.importorskip("fcntl"), []

    def call(writing, request, reading):
        assert request == 1 << 30 | 4 << 16 | 0x94 << 8 | 9  # _IOW(0x94, 9, int), linux/fs.h
        if answers:
            raise OSError(answers.pop(), "no")
        os.write(writing, os.read(reading, 1 << 30))

    monkeypatch.setattr(fcntl, "ioctl", call)
    return answers


@pytest.mark.parametrize("link", ["auto", "reflink"])
def test_a_clone_is_the_first_choice(link, ioctl, llama, tmp_path):
    done = convert(str(llama), tmp_path / "out", YARN, link=link)
    assert done.written.how == "cloned"
    weights = [folder / "model.safetensors" for folder in (llama, tmp_path / "out")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert weights[0].stat().st_mtime_ns == weights[1].stat().st_mtime_ns
    assert not weights[0].samefile(weights[1])
    assert "links" not in read_json(tmp_path / "out" / "ctxext.json")


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL])
@pytest.mark.thorough
def test_files_are_copied_if_they_cannot_be_cloned_unless_clones_are_required(number, ioctl, llama, tmp_path):
    ioctl.append(number)
    assert convert(str(llama), tmp_path / "out", YARN).written.how == "copied"
    ioctl.append(number)
    with pytest.raises(CtxextError, match="cannot be cloned"):
        convert(str(llama), tmp_path / "clone", YARN, link="reflink")
    assert leftovers(tmp_path) == []
    assert not (tmp_path / "clone").exists()


def test_a_broken_disk_is_not_mistaken_for_one_without_clones(ioctl, llama, tmp_path):
    ioctl.append(errno.EIO)
    with pytest.raises(CtxextError, match="disk reports an error"):
        convert(str(llama), tmp_path / "out", YARN)
    assert leftovers(tmp_path) == []
    assert not (tmp_path / "out").exists()


def test_copy_and_digest(llama, tmp_path):
    before = hashlib.sha256((llama / "model.safetensors").read_bytes()).hexdigest()
    convert(str(llama), tmp_path / "copied", YARN, link="copy")
    convert(str(llama), tmp_path / "linked", YARN, link="hard", digest=True)
    convert(str(llama), tmp_path / "quick", YARN)
    for name, wanted in (("copied", before), ("linked", before), ("quick", None)):
        assert read_json(tmp_path / name / "ctxext.json")["weights"] == {"model.safetensors": wanted}
    assert (tmp_path / "copied" / "model.safetensors").stat().st_ino != (llama / "model.safetensors").stat().st_ino


def test_manifest_has_the_digest_of_every_small_file(llama, tmp_path):
    convert(str(llama), tmp_path / "out", YARN)
    files = read_json(tmp_path / "out" / "ctxext.json")["files"]
    written = {path.name for path in (tmp_path / "out").iterdir()} - {"ctxext.json", "model.safetensors"}
    assert set(files) == written
    for name, digest in files.items():
        assert hashlib.sha256((tmp_path / "out" / name).read_bytes()).hexdigest() == digest


def test_links_fall_back_to_copies(llama, tmp_path, monkeypatch):
    def refuse(*_args):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    done = convert(str(llama), tmp_path / "out", YARN, link="hard")
    assert (done.written.num_linked, done.written.num_copied) == (0, 1)
    assert logits(tmp_path / "out", IDS).shape == (1, 40, 64)


def test_full_disk_leaves_nothing(llama, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=10))
    with pytest.raises(CtxextError, match="No space left"):
        convert(str(llama), tmp_path / "out", YARN, link="copy")
    assert not (tmp_path / "out").exists()
    assert leftovers(tmp_path) == []


def test_interruption_leaves_nothing(llama, tmp_path, monkeypatch):
    def interrupt(*_args, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(convert_module, "_place_weights", interrupt)
    with pytest.raises(KeyboardInterrupt):
        convert(str(llama), tmp_path / "out", YARN)
    assert not (tmp_path / "out").exists()
    assert leftovers(tmp_path) == []


def test_kill_leaves_no_half_made_folder_and_the_next_run_clears_up(llama, tmp_path):
    script = (
        "import sys, time\nfrom ctxext.api import Recipe, convert\nfrom ctxext.methods import Yarn\n"
        "from ctxext.files import output_directory\n"
        "output_directory.give_name = lambda *_, **__: (print('ready', flush=True), time.sleep(60))\n"
        f"convert({str(llama)!r}, {str(tmp_path / 'out')!r}, Recipe([Yarn(factor=4)]), check=False)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out").exists()
    assert len(leftovers(tmp_path)) == 2, "the lock and the folder beside OUT"
    convert(str(llama), tmp_path / "out", YARN)
    assert (tmp_path / "out" / "config.json").exists()
    assert leftovers(tmp_path) == []


def test_a_folder_caught_between_two_renames_comes_back(llama, tmp_path):
    convert(str(llama), tmp_path / "out", YARN)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with beside(tmp_path / "out") as place:
        left = place.with_name(place.name.replace(str(os.getpid()), str(gone.pid)))
    left.mkdir()
    (tmp_path / "out").rename(left / "old")
    recover(tmp_path / "out")
    with pytest.raises(CtxextError, match="not empty"):
        convert(str(llama), tmp_path / "out", YARN)
    assert (tmp_path / "out" / "config.json").exists()


def test_overwrite_replaces_whole(llama, tmp_path):
    convert(str(llama), tmp_path / "out", YARN)
    with pytest.raises(CtxextError, match="not empty"):
        convert(str(llama), tmp_path / "out", YARN)
    convert(str(llama), tmp_path / "out", Recipe([PositionInterpolation(factor=2)]), overwrite=True)
    assert read_json(tmp_path / "out" / "config.json")["rope_scaling"]["rope_type"] == "linear"
    assert leftovers(tmp_path) == []


def test_saving_over_the_result_never_changes_the_source(llama, tmp_path):
    before = {path.name: path.read_bytes() for path in llama.iterdir()}
    convert(str(llama), tmp_path / "out", YARN)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.save_pretrained(tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text("{}")
    assert {path.name: path.read_bytes() for path in llama.iterdir()} == before


def test_scaling_twice_is_refused_by_default(llama, tmp_path):
    convert(str(llama), tmp_path / "yarn", YARN)
    with pytest.raises(CtxextError, match="already extended: yarn ×4 from 128 tokens") as caught:
        convert(str(tmp_path / "yarn"), tmp_path / "again", YARN)
    assert "--replace-scaling" in caught.value.hint
    convert(str(tmp_path / "yarn"), tmp_path / "pi", Recipe([PositionInterpolation(factor=2)]), replace_scaling=True)
    convert(str(llama), tmp_path / "direct", Recipe([PositionInterpolation(factor=2)]))
    replaced, direct = (read_json(tmp_path / name / "config.json") for name in ("pi", "direct"))
    for config in (replaced, direct):
        del config["ctxext"]["source"]
    assert replaced == direct


def test_sharded_checkpoint(tmp_path):
    source = make_llama(tmp_path / "source")
    model = AutoModelForCausalLM.from_pretrained(source)
    (source / "model.safetensors").unlink()
    model.save_pretrained(source, max_shard_size="20KB")
    convert(str(source), tmp_path / "out", Recipe([PositionInterpolation(factor=1)]))
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert torch.equal(logits(tmp_path / "out", IDS), logits(source, IDS))


@pytest.mark.thorough
def test_without_the_check_converting_imports_no_torch(llama, tmp_path):
    script = (
        "import sys\nfrom ctxext.api import Recipe, convert\nfrom ctxext.methods import Yarn\n"
        f"convert({str(llama)!r}, {str(tmp_path / 'out')!r}, Recipe([Yarn(factor=4)]), check=False)\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("model.safetensors", b"\xff" * 40, "truncated"),
        ("config.json", b'{"model_type": ', "not valid JSON"),
        ("config.json", b"[1]", "JSON object"),
        ("config.json", b"{}", "model_type"),
    ],
)
def test_broken_checkpoints_get_one_line(name, content, reason, llama, tmp_path):
    """`tests/checkpoint/test_opening.py` has more of them."""
    (llama / name).write_bytes(content)
    with pytest.raises(CtxextError, match=reason) as caught:
        convert(str(llama), tmp_path / "out", YARN)
    assert "\n" not in caught.value.message
    assert not (tmp_path / "out").exists()


def test_places_that_are_refused(llama, tmp_path):
    (tmp_path / "file").write_text("")
    for out, reason in (
        (llama / "inside", "inside SOURCE"),
        (tmp_path, "contains SOURCE"),
        (tmp_path / "file", "a file"),
    ):
        with pytest.raises(CtxextError, match=reason):
            convert(str(llama), out, YARN, overwrite=True)


def test_a_hub_id_that_cannot_be_reached(tmp_path):
    with pytest.raises(CtxextError, match="neither a folder nor") as caught:
        convert("nobody/nothing-like-this", tmp_path / "out", YARN)
    assert caught.value.hint


@pytest.mark.thorough
def test_time_is_not_in_the_result(llama, tmp_path):
    convert(str(llama), tmp_path / "first", YARN)
    time.sleep(1.1)
    convert(str(llama), tmp_path / "second", YARN)
    for name in ("config.json", "README.md", "ctxext.json"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
