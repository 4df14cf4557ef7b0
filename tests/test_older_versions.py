"""Checkpoints that 0.1.0 wrote go on loading, verifying and training; tests/data/v0.1.0 holds small ones."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from ctxext.checkpoint import open_checkpoint
from ctxext.errors import CtxextError
from ctxext.finetune.base import open_base
from ctxext.recipes.own_code import runs_only_own_code
from ctxext.recipes.rotary import model_config
from ctxext.verify import verify
from tiny_base import QUICK, tune

FOLDER = Path(__file__).parent / "data" / "v0.1.0"
LOGITS = json.loads((FOLDER / "logits.json").read_text())


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
