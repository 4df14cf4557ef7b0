"""A method with code, added in one recipe file and one portable file with its reference: all else follows."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

RUN = Path(__file__).parent / "added_method" / "run.py"


def ctxext(*words, fails=False):
    done = subprocess.run(
        [sys.executable, str(RUN), *map(str, words)], capture_output=True, text=True, check=False, cwd=RUN.parent
    )
    assert (done.returncode != 0) == fails, done.stderr[-2000:]
    return done.stdout + done.stderr


def logits(folder, **options):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    with torch.no_grad():
        return model(torch.arange(3, 40)[None]).logits


@pytest.fixture(scope="module")
def converted(llama_source, tmp_path_factory):
    """The method alone, and with mspoe in both orders, each verified by its references when it was written."""
    root = tmp_path_factory.mktemp("added")
    heads = ["--method", "mspoe", "--head-order", "fixed", "--first-layer", "0"]
    quiet = ["--method", "quiet", "--loudness", "0.25"]
    made = {}
    for name, words in {"alone": quiet, "first": [*quiet, *heads], "last": [*heads, *quiet]}.items():
        told = ctxext("convert", llama_source, root / name, *words)
        assert "clean process" in told, told
        made[name] = root / name
    return made


def test_help_and_docs_know_its_numbers(llama_source):
    assert "--loudness" in ctxext("convert", "--help")
    assert "quiet" in ctxext("methods")
    assert "| `--loudness` | 0.5 | What scores are multiplied by." in ctxext("--docs")
    assert "at most 1" in ctxext("convert", llama_source, "never", "--method", "quiet", "--loudness", "2", fails=True)


def test_it_changes_what_it_says_and_composes(converted, llama_source):
    found = {name: logits(folder, trust_remote_code=True) for name, folder in converted.items()}
    plain = logits(llama_source)
    assert not torch.allclose(found["alone"], plain)
    assert not torch.allclose(found["first"], found["alone"])
    torch.testing.assert_close(found["first"], found["last"])


def test_without_trust_it_does_not_load(converted):
    with pytest.raises((KeyError, ValueError), match="trust_remote_code"):
        logits(converted["alone"])


def test_the_card_claims_nothing_that_was_not_tried(converted):
    card = (converted["alone"] / "README.md").read_text()
    assert "| **quiet** | loudness | 0.25 | What scores are multiplied by. |" in card
    assert "| vLLM | ? not known" in card
    assert "| transformers | ? not known | `trust_remote_code=True`" in card


def test_inspect_and_verify(converted):
    told = json.loads(ctxext("inspect", converted["last"], "--json"))
    assert [step["method"] for step in told["recipe"]["steps"]] == ["mspoe", "quiet"]
    told = ctxext("verify", converted["last"])
    assert "as the method says" in told, told


def test_it_can_be_taken_away_and_saved_again(converted, llama_source, tmp_path):
    ctxext("convert", converted["first"], tmp_path / "plain", "--method", "pi", "--factor", "1", "--replace-scaling")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "ctxext_code" not in config
    assert not list((tmp_path / "plain").glob("*.py"))
    assert torch.equal(logits(tmp_path / "plain"), logits(llama_source))
    model = AutoModelForCausalLM.from_pretrained(converted["last"], trust_remote_code=True, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path / "saved")
    expected = logits(converted["last"], trust_remote_code=True)
    assert torch.equal(logits(tmp_path / "saved", trust_remote_code=True), expected)
