"""No command runs or fetches what a stranger's folder names, unless `--trust-remote-code` says so.

The doors are those of transformers 4.57 and 5.24 (docs/security.md). The first test shows that the canaries
sing: loaded as it came, a folder runs or fetches what stands behind a door. All others find nothing.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import doors
import pytest
import transformers
from doors import DOORS, INNER, TOGETHER, WITH_CODE

from ctxext.recipes.code.own_code import module_of
from ctxext.verify import rotation
from openai_server import Served, running
from tiny_base import write_jsonl

SMALL = ("--lengths", 300, "--samples", 1, "--depths", 1, "-q")
TRAINING = ("--length", 64, "--steps", 1, "--batch-size", 1, "--rank", 2, "--short-share", 0, "-q")


@pytest.mark.parametrize(
    ("door", "sings"),
    [
        (doors.custom_generate, "custom_generate"),
        (doors.classes, "classes"),
        (doors.tokenizer, "tokenizer"),
        (doors.attention, "kernel: them/attention"),
        (doors.classes_on_the_hub, "network: "),
        (doors.tokenizer_on_the_hub, "network: "),
    ],
)
def test_loaded_as_it_came_a_folder_runs_or_fetches_it(door, sings, strangers, record):
    folder = strangers(door)
    is_tokenizer = door in (doors.tokenizer, doors.tokenizer_on_the_hub)
    auto = transformers.AutoTokenizer if is_tokenizer else transformers.AutoModelForCausalLM
    with contextlib.suppress(OSError, ValueError, ImportError):
        auto.from_pretrained(folder, trust_remote_code=True)
    assert sings in record.read_text()


@pytest.fixture
def silent(record, run):
    """A command line that must end without a canary, with exit code 0 unless it may be refused."""

    def call(*words: object, may_fail: bool = False) -> None:
        line, result = f"ctxext {' '.join(map(str, words))}", run(*words)
        assert record.read_text() == "", line
        assert may_fail or result.exit_code == 0, f"{line}: {result.exception} {result.output}"

    return call


def convert_words(method: str) -> tuple[object, ...]:
    calibrated = ("--head-order", "calibrated") if method == "mspoe" else ()
    return ("--method", method, "--factor", 2, *calibrated, "-q")


@pytest.mark.parametrize("method", [pytest.param("yarn", marks=pytest.mark.slow), "bifocal"])
@pytest.mark.thorough
def test_what_is_converted_verified_and_measured_stays_silent(method, strangers, silent, tmp_path):
    """Issue: `custom_generate/generate.py` of a source ran in `convert` and in `verify`."""
    source, out = strangers(*TOGETHER), tmp_path / f"out-{method}"
    silent("inspect", source)
    silent("convert", source, out, *convert_words(method))
    assert not (out / "custom_generate").exists()
    silent("verify", out, "--against", source)
    # Whoever publishes a converted folder can put there what no conversion does.
    doors.custom_generate(out)
    silent("verify", out, may_fail=True)
    silent("eval", source, out, "--task", "passkey", *SMALL, "--out", tmp_path / "report")
    silent("push", out, "me/model", "--dry-run", "--no-verify", may_fail=True)


@pytest.mark.parametrize("door", INNER, ids=lambda door: door.__name__)
def test_a_configuration_inside_another_stays_silent(door, strangers, silent, tmp_path, monkeypatch):
    """Issue: `convert` and `verify` contacted the Hub for a backbone, or asked whether to run its code."""
    monkeypatch.setattr(rotation, "measured_rotations", lambda *_: None)  # The class itself is built.
    source, out = strangers(door), tmp_path / "out"
    silent("inspect", source, may_fail=True)
    silent("convert", source, out, *convert_words("yarn"), may_fail=True)
    silent("verify", out if out.exists() else source, may_fail=True)
    silent("eval", source, "--task", "passkey", *SMALL, "--out", tmp_path / "report", may_fail=True)


@pytest.mark.parametrize("door", [*WITH_CODE, doors.classes_on_the_hub, doors.tokenizer_on_the_hub])
def test_custom_code_of_the_source_is_not_run(door, strangers, silent, tmp_path):
    source, out = strangers(door), tmp_path / "out"
    silent("inspect", source)
    silent("convert", source, out, *convert_words("bifocal"))
    silent("verify", out, may_fail=True)
    silent("eval", source, "--task", "passkey", *SMALL, "--out", tmp_path / "report", may_fail=True)
    silent("eval", out, "--task", "passkey", *SMALL, "--out", tmp_path / "report-2", may_fail=True)


@pytest.fixture
def converter(tmp_path) -> Path:
    """A folder with a converter that trusts what it converts."""
    folder = tmp_path / "llama.cpp"
    folder.mkdir()
    (folder / "convert_hf_to_gguf.py").write_text(doors.CONVERTER)
    return folder


@pytest.fixture
def served(clean):
    """The URL of a server with the clean model."""
    model = transformers.AutoModelForCausalLM.from_pretrained(clean)
    with running(Served(model.eval(), transformers.AutoTokenizer.from_pretrained(clean))) as url:
        yield url


def export_words(folder: Path, converter: Path) -> tuple[object, ...]:
    return "export", "gguf", folder, folder.with_suffix(".gguf"), "--llama-cpp", converter


@pytest.mark.parametrize("door", [doors.tokenizer, doors.tokenizer_beside, doors.classes_beside, doors.processors])
@pytest.mark.thorough
def test_a_converter_that_trusts_a_folder_finds_no_code(door, strangers, record, run, converter):
    """Issue: `export gguf` ran Python that tokenizer_config.json named."""
    folder = strangers(door)
    result = run(*export_words(folder, converter))
    assert "converted nothing" in result.exception.message, result.output
    assert record.read_text() == ""


def call_with_fetching_packages(record: Path, *words: object) -> None:
    """Run a command whose bitsandbytes fetches while it is imported, with all processes watched."""
    path = os.pathsep.join(map(str, (doors.FAKES, doors.FETCHING)))
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "ctxext", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert {*record.read_text().split("\n")} <= {"imported", ""}, words


@pytest.mark.thorough
def test_what_is_imported_fetches_nothing(clean, record, tmp_path):
    """Issue: `finetune` and `merge` took a native kernel from the Hub, as peft imports bitsandbytes."""
    data, out = write_jsonl(tmp_path / "data.jsonl"), tmp_path / "tuned"
    call_with_fetching_packages(record, "convert", clean, tmp_path / "converted", *convert_words("yarn"))
    call_with_fetching_packages(record, "verify", tmp_path / "converted")
    call_with_fetching_packages(record, "finetune", clean, out, "--data", data, *TRAINING)
    assert record.read_text() == "imported\n"
    call_with_fetching_packages(record, "merge", clean, out / "adapter", tmp_path / "merged", "-q")
    assert record.read_text() == "imported\nimported\n"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["yarn", "bifocal"])  # Carried by configuration, and by code.
@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_every_door_with_every_command(
    door, method, watched_processes, strangers, silent, clean, converter, served, tmp_path
):
    """Each door alone, in the source and in a converted folder, through every command; all processes are new ones."""
    source, out, data = strangers(door), tmp_path / "out", write_jsonl(tmp_path / "data.jsonl")
    report, words = ("--out", tmp_path / "report"), convert_words(method)
    silent("inspect", source, may_fail=True)
    silent("convert", source, out, *words, may_fail=True)
    if not out.exists():
        silent("convert", clean, out, *words)
    copied: Path = tmp_path / f"{tmp_path.name}-converted"
    shutil.copytree(out, copied)
    shutil.rmtree(copied / "custom_generate", ignore_errors=True)
    shutil.rmtree(copied / "additional_chat_templates", ignore_errors=True)
    door(copied)
    for folder in (out, copied):
        silent("inspect", folder, may_fail=True)
        silent("verify", folder, may_fail=True)
        silent("eval", folder, "--task", "passkey", *SMALL, *report, may_fail=True)
        silent(
            "finetune", folder, tmp_path / f"{folder.name}-dry", "--data", data, *TRAINING, "--dry-run", may_fail=True
        )
        silent("finetune", folder, tmp_path / f"{folder.name}-tuned", "--data", data, *TRAINING, may_fail=True)
        if (adapter := tmp_path / f"{folder.name}-tuned" / "adapter").is_dir():
            silent("merge", folder, adapter, tmp_path / f"{folder.name}-merged", "-q", may_fail=True)
        silent("push", folder, "me/model", "--dry-run", "--no-verify", may_fail=True)
        silent(*export_words(folder, converter), may_fail=True)
        silent("verify", folder, "--server", served, "--minutes", 0.05, "-q", may_fail=True)
    silent(*export_words(source, converter), may_fail=True)
    compared = ("--samples", 1, "--lengths", 300, "--target-length", 640, "--out", tmp_path / "compared", "-q")
    silent("compare", source, *compared, "--methods", "ntk,bifocal", may_fail=True)
    silent("eval", source, "--task", "passkey", *SMALL, *report, may_fail=True)
    bounds = ("--trials", 2, "--samples", 1, "--checked", 2, "--lengths", 640, "--target-length", 640)
    silent("search", source, tmp_path / "best.yaml", *bounds, "--methods", "ntk,bifocal", "-q", may_fail=True)


@pytest.mark.parametrize(
    ("place", "module"),
    [
        ("modeling_ctxext.CtxextModel", "modeling_ctxext"),
        ("them/model--modeling_ctxext.CtxextModel", ""),
        ("modeling_ctxext.x--theirs.Model", ""),
        ("modeling_ctxext.x/y--theirs.Model", ""),
        (["modeling_ctxext.CtxextModel"], ""),
        (None, ""),
    ],
)
def test_an_entry_of_auto_map_is_ours_only_without_a_repository(place, module):
    assert module_of(place) == module
