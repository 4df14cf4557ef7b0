"""Checkpoints that earlier versions wrote go on loading, verifying and training; tests/data holds small ones."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import ctxext.portable
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.errors import CtxextError
from ctxext.finetune.base import open_base
from ctxext.recipes.code.own_code import carries_code, own_code, runs_only_own_code
from ctxext.recipes.code.released import releases
from ctxext.recipes.encodings.rotary import model_config
from ctxext.verify import verify
from tiny_base import QUICK, tune

FOLDER = Path(__file__).parent / "data" / "v0.1.0"
LOGITS = json.loads((FOLDER / "logits.json").read_text())
LATER = {"v0.2.0": json.loads((FOLDER.parent / "v0.2.0" / "logits.json").read_text())}
LAID_OUT = [(version, name) for version, logits in LATER.items() for name in logits]


def lay_out(version: str, name: str, folder: Path) -> Path:
    """A checkpoint of a later version; files that several share are kept once, named by the start of their digest."""
    data = FOLDER.parent / version
    shutil.copytree(data / name, folder)
    record = json.loads((folder / "ctxext.json").read_text())
    for file, digest in {**record["files"], **record["weights"]}.items():
        if not (folder / file).exists():
            shutil.copyfile(data / "shared" / f"{digest[:8]}-{file}", folder / file)
    return folder


@pytest.mark.parametrize(("version", "name"), LAID_OUT)
def test_one_of_a_later_version_loads_and_answers_as_it_did(version, name, tmp_path):
    folder = lay_out(version, name, tmp_path / "older")
    # The sdpa of transformers 4 leaves Gemma 2's cap on scores out (docs/traps.md, 24).
    exact = {"attn_implementation": "eager"} if name == "gemma2" else {}
    options = {"trust_remote_code": True, "dtype": torch.float32, **exact}
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    with torch.no_grad():
        found = model(torch.arange(3, 103)[None] % 64).logits[0, -1]
    torch.testing.assert_close(found, torch.tensor(LATER[version][name]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("version", "name"), LAID_OUT)
def test_verify_knows_one_of_a_later_version(version, name, tmp_path):
    checkpoint = open_checkpoint(str(lay_out(version, name, tmp_path / "older")))
    found = {finding.check: finding for finding in verify(str(checkpoint.folder), load=False)}
    assert {check: finding.detail for check, finding in found.items() if finding.status == "failed"} == {}
    assert found["code"].status == found["configuration"].status == "passed"
    if carries_code(checkpoint):
        assert runs_only_own_code(checkpoint)


@pytest.mark.slow
@pytest.mark.parametrize(("version", "name"), LAID_OUT)
def test_one_of_a_later_version_verifies_by_loading(version, name, tmp_path):
    folder = lay_out(version, name, tmp_path / "older")
    findings = verify(str(folder))
    assert [finding for finding in findings if finding.status == "failed"] == []
    compared = "logits" if carries_code(open_checkpoint(str(folder))) else "frequencies"
    assert compared in {finding.check for finding in findings if finding.status == "passed"}


@pytest.mark.parametrize(("version", "name"), [("v0.2.0", "self-extend"), ("v0.2.0", "bloom")])
def test_one_byte_more_is_nobody_s_and_no_release_s_files_are_mixed(version, name, tmp_path):
    folder = lay_out(version, name, tmp_path / "older")
    checkpoint = open_checkpoint(str(folder))
    files = own_code(checkpoint)
    assert set(files) == {path.name for path in folder.glob("*.py")}
    for file in files:
        content = (folder / file).read_bytes()
        (folder / file).write_bytes(content + b"\n")
        assert not runs_only_own_code(checkpoint), file
        # What this version would write there belongs to another set, unless nothing changed.
        today = Path(ctxext.portable.__file__).parent / file
        if today.exists() and today.read_bytes() != content:
            (folder / file).write_bytes(today.read_bytes())
            assert not runs_only_own_code(checkpoint), file
        (folder / file).write_bytes(content)
    assert runs_only_own_code(checkpoint)


def test_every_recorded_release_has_checkpoints_here():
    assert {f"v{version}" for version in releases()} == set(LATER)


@pytest.mark.skipif(transformers.__version__.startswith("4."), reason="its tokenizer was saved by transformers 5")
@pytest.mark.parametrize("name", ["yarn-self-extend", pytest.param("distance-aware", marks=pytest.mark.slow)])
def test_one_of_0_2_0_can_be_fine_tuned(name, tmp_path):
    base = lay_out("v0.2.0", name, tmp_path / "older")
    tune(base, tmp_path / "tuned", dataclasses.replace(QUICK, steps=2, save_every=2, learning_rate=1e-3))
    for file in base.glob("*.py"):
        assert (tmp_path / "tuned" / file.name).read_bytes() == file.read_bytes()
    assert not [finding for finding in verify(str(tmp_path / "tuned"), load=False) if finding.status == "failed"]
    assert runs_only_own_code(open_checkpoint(str(tmp_path / "tuned")))


@pytest.mark.parametrize("name", LOGITS)
def test_it_loads_and_answers_as_it_did(name):
    model = AutoModelForCausalLM.from_pretrained(FOLDER / name, trust_remote_code=True, dtype=torch.float32).eval()
    ids = torch.arange(3, 43)[None] % model.config.get_text_config().vocab_size
    with torch.no_grad():
        found = model(ids).logits[0, -1]
    torch.testing.assert_close(found, torch.tensor(LOGITS[name]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", LOGITS)
def test_verify_knows_it(name):
    found = {finding.check: finding for finding in verify(str(FOLDER / name))}
    assert {check: finding.detail for check, finding in found.items() if finding.status == "failed"} == {}
    assert found["code"].status == found["configuration"].status == found["logits"].status == "passed"
    assert runs_only_own_code(open_checkpoint(str(FOLDER / name)))


def test_a_changed_file_is_not_ours(tmp_path):
    shutil.copytree(FOLDER / "mspoe-fixed", tmp_path / "changed")
    with (tmp_path / "changed" / "modeling_mspoe.py").open("a") as file:
        file.write("\n# one byte more\n")
    assert not runs_only_own_code(open_checkpoint(str(tmp_path / "changed")))
    found = {finding.check: finding for finding in verify(str(tmp_path / "changed"), load=False)}
    assert found["code"].status == "failed"


def test_it_is_read_as_this_version_writes_it():
    model = model_config(open_checkpoint(str(FOLDER / "yarn-mspoe")).config)
    assert model.rotary.rope_type == "yarn"
    assert model.code["steps"][0]["method"] == "mspoe"
    assert model.is_extended


@pytest.mark.skipif(transformers.__version__.startswith("4."), reason="its tokenizer was saved by transformers 5")
def test_it_can_be_fine_tuned(tmp_path):
    tune(FOLDER / "yarn-mspoe", tmp_path / "tuned", QUICK)
    assert (tmp_path / "tuned" / "modeling_mspoe.py").read_bytes() == (
        FOLDER / "yarn-mspoe" / "modeling_mspoe.py"
    ).read_bytes()
    assert not [finding for finding in verify(str(tmp_path / "tuned")) if finding.status == "failed"]


def test_what_chooses_by_the_prompt_is_not_trained():
    with pytest.raises(CtxextError, match="again for each prompt"):
        open_base(str(FOLDER / "mspoe-prompt"), None)
