"""No command runs or fetches what a stranger's folder names, unless `--trust-remote-code` says so.

The doors are those that transformers 4.57 and 5.23 have (docs/security.md). The first test shows that the canaries
sing: loaded as it came, a folder runs or fetches what stands behind a door. All others find nothing.
"""

import contextlib
import shutil
from pathlib import Path

import doors
import pytest
import transformers
from doors import DOORS, TOGETHER, WITH_CODE

from tiny_base import write_jsonl

IS_4 = transformers.__version__.startswith("4.")
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
def test_loaded_as_it_came_a_folder_runs_or_fetches_it(door, sings, strangers, record, monkeypatch):
    folder = strangers(door)
    monkeypatch.setattr("time.sleep", lambda _: None)  # The Hub's client waits before it tries again.
    is_tokenizer = door in (doors.tokenizer, doors.tokenizer_on_the_hub)
    auto = transformers.AutoTokenizer if is_tokenizer else transformers.AutoModelForCausalLM
    with contextlib.suppress(OSError, ValueError, ImportError):
        auto.from_pretrained(folder, trust_remote_code=True)
    assert sings in record.read_text()


@pytest.mark.skipif(not IS_4, reason="transformers 5 asks for trust")
def test_transformers_4_runs_custom_generate_without_trust(strangers, record):
    transformers.AutoModelForCausalLM.from_pretrained(strangers(doors.custom_generate))
    assert "custom_generate" in record.read_text()


@pytest.fixture
def silent(record, run):
    """A command line that must end without a canary; gives its exit code."""

    def call(*words: object) -> int:
        result = run(*words)
        assert record.read_text() == "", f"ctxext {' '.join(map(str, words))}"
        return result.exit_code

    return call


def convert_words(method: str) -> tuple[object, ...]:
    calibrated = ("--head-order", "calibrated") if method == "mspoe" else ()
    return ("--method", method, "--factor", 2, *calibrated, "-q")


@pytest.mark.parametrize("method", ["yarn", "bifocal"])
def test_what_is_converted_verified_and_measured_stays_silent(method, strangers, silent, tmp_path):
    """Issue: `custom_generate/generate.py` of a source ran in `convert` and in `verify`."""
    source, out = strangers(*TOGETHER), tmp_path / f"out-{method}"
    assert silent("inspect", source) == 0
    assert silent("convert", source, out, *convert_words(method)) == 0
    assert not (out / "custom_generate").exists()
    assert silent("verify", out, "--against", source) == 0
    # Whoever publishes a converted folder can put there what no conversion does.
    doors.custom_generate(out)
    assert silent("verify", out) in (0, 1)
    assert silent("eval", source, out, "--task", "passkey", *SMALL, "--out", tmp_path / "report") == 0
    assert silent("push", out, "me/model", "--dry-run", "--no-verify") in (0, 1, 2)


def test_what_is_trained_merged_and_searched_stays_silent(strangers, silent, tmp_path):
    source, out, data = strangers(*TOGETHER), tmp_path / "out", write_jsonl(tmp_path / "data.jsonl")
    assert silent("convert", source, out, *convert_words("bifocal")) == 0
    for door in (doors.custom_generate, doors.kernels, doors.places):
        if not (out / "custom_generate").exists() or door is not doors.custom_generate:
            door(out)
    assert silent("finetune", out, tmp_path / "tuned", "--data", data, *TRAINING) == 0
    assert not (tmp_path / "tuned" / "custom_generate").exists()
    assert silent("merge", out, tmp_path / "tuned" / "adapter", tmp_path / "merged", "-q") == 0
    words = ("--trials", 1, "--samples", 1, "--checked", 1, "--lengths", 640, "--target-length", 640)
    assert silent("search", source, tmp_path / "best.yaml", *words, "--methods", "ntk", "-q") == 0


@pytest.mark.parametrize("door", [*WITH_CODE, doors.classes_on_the_hub, doors.tokenizer_on_the_hub])
def test_code_of_the_source_s_own_stays_silent(door, strangers, silent, tmp_path):
    source, out = strangers(door), tmp_path / "out"
    assert silent("inspect", source) == 0
    assert silent("convert", source, out, *convert_words("bifocal")) == 0
    assert silent("verify", out) in (0, 1)
    assert silent("eval", source, "--task", "passkey", *SMALL, "--out", tmp_path / "report") in (0, 1)
    assert silent("eval", out, "--task", "passkey", *SMALL, "--out", tmp_path / "report-2") in (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["yarn", "bifocal", "mspoe"])
@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_every_door_with_every_command(door, method, strangers, silent, clean, tmp_path):
    """Each door alone, in the source and in a converted folder, through every command."""
    source, out, data = strangers(door), tmp_path / "out", write_jsonl(tmp_path / "data.jsonl")
    report, words = ("--out", tmp_path / "report"), convert_words(method)
    silent("inspect", source)
    silent("convert", source, out, *words)
    if not out.exists():
        assert silent("convert", clean, out, *words) == 0
    copied: Path = tmp_path / f"{tmp_path.name}-converted"
    shutil.copytree(out, copied)
    shutil.rmtree(copied / "custom_generate", ignore_errors=True)
    shutil.rmtree(copied / "additional_chat_templates", ignore_errors=True)
    door(copied)
    for folder in (out, copied):
        silent("inspect", folder)
        silent("verify", folder)
        silent("eval", folder, "--task", "passkey", *SMALL, *report)
        silent("finetune", folder, tmp_path / f"{folder.name}-dry", "--data", data, *TRAINING, "--dry-run")
        silent("finetune", folder, tmp_path / f"{folder.name}-tuned", "--data", data, *TRAINING)
        if (adapter := tmp_path / f"{folder.name}-tuned" / "adapter").is_dir():
            silent("merge", folder, adapter, tmp_path / f"{folder.name}-merged", "-q")
        silent("push", folder, "me/model", "--dry-run", "--no-verify")
    silent("eval", source, "--task", "passkey", *SMALL, *report)
    bounds = ("--trials", 2, "--samples", 1, "--checked", 1, "--lengths", 640, "--target-length", 640)
    silent("search", source, tmp_path / "best.yaml", *bounds, "--methods", "ntk,bifocal", "-q")
