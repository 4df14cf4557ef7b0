"""`--serve-factor`: trained with one factor of a schedule, written with another."""

import dataclasses

import pytest
import torch

from ctxext import Finding, Recipe, convert
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.cli.finetune import _served_length
from ctxext.errors import CtxextError
from ctxext.finetune import base as base_module
from ctxext.finetune.base import open_base
from ctxext.finetune.run import training_folder
from ctxext.methods import Yarn
from small_llama import read_json
from tiny_base import QUICK, load, logits, save_llama, tune

EIGHT = dataclasses.replace(QUICK, steps=2, serve_factor=8)


def test_it_is_the_training_converted_afterwards(base, tmp_path):
    tune(base, tmp_path / "plain", dataclasses.replace(EIGHT, serve_factor=None))
    convert(str(tmp_path / "plain"), tmp_path / "later", Recipe([Yarn(factor=8)]), replace_scaling=True)
    tune(base, tmp_path / "out", EIGHT)
    assert torch.equal(logits(load(tmp_path / "out")), logits(load(tmp_path / "later")))
    assert (logits(load(tmp_path / "out")) - logits(load(tmp_path / "plain"))).abs().max() > 1e-3
    written, later = read_json(tmp_path / "out" / "config.json"), read_json(tmp_path / "later" / "config.json")
    assert {key: written[key] for key in written if key != "ctxext"} == {
        key: later[key] for key in later if key != "ctxext"
    }
    assert written["max_position_embeddings"] == 8 * 32
    assert read_json(tmp_path / "out" / "tokenizer_config.json")["model_max_length"] == 8 * 32
    noted, of_base = written["ctxext"], open_checkpoint(str(base)).config["ctxext"]
    assert noted["recipe"] == later["ctxext"]["recipe"] == read_json(tmp_path / "out" / "ctxext.json")["recipe"]
    assert noted["source"] == of_base["source"]
    assert _served_length(tmp_path / "out") == 8 * 32
    trained = read_json(tmp_path / "plain" / "config.json")["ctxext"]["finetune"]
    assert trained["steps"] == 2
    assert later["ctxext"]["source_finetune"] == trained
    assert noted["finetune"]["schedule"] == "trained with yarn ×4, and written with yarn ×8"
    assert "trained with yarn ×4, and written with yarn ×8" in (tmp_path / "out" / "README.md").read_text()


def test_what_cannot_be_served_is_refused_before_training(base, tmp_path):
    plain = open_base(str(save_llama(tmp_path / "plain")), None)
    with pytest.raises(CtxextError, match="a schedule written by ctxext"):
        base_module.make_output_config(plain, 8)
    with pytest.raises(CtxextError, match="below the factor of the training: yarn ×4"):
        base_module.make_output_config(open_base(str(base), None), 2)
    with pytest.raises(CtxextError, match="--serve-factor cannot be combined with --no-merge"):
        tune(base, tmp_path / "out", EIGHT, merge=False)


def test_a_wrong_result_gets_no_name(base, tmp_path, monkeypatch):
    monkeypatch.setattr(base_module, "verify", lambda folder: [Finding("frequencies", "failed", "off by 2")])
    with pytest.raises(CtxextError, match="frequencies: off by 2") as error:
        tune(base, tmp_path / "out", EIGHT)
    assert not (tmp_path / "out").exists()
    assert "--resume" in error.value.hint
    monkeypatch.undo()
    tune(base, tmp_path / "out", dataclasses.replace(EIGHT, serve_factor=None), resume=True)
    assert read_json(tmp_path / "out" / "config.json")["max_position_embeddings"] == 4 * 32
    assert not training_folder(tmp_path / "out").exists()
