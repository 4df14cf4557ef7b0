"""`inspect` on models that no method is for: what bounds them, with their own numbers."""

import json

import pytest
import torch
from transformers import AutoConfig, MptConfig, MptForCausalLM, T5Config, T5ForConditionalGeneration

from ctxext.checkpoint.families import family_of
from ctxext.converters.inspection import bound_of

CASES = {
    "deberta": ({"max_relative_positions": 300}, "a learned position table"),
    "deberta-v2": ({"position_buckets": 256, "max_relative_positions": -1}, "an absolute table"),
    "xlnet": ({"mem_len": 40, "bi_data": True}, "mem_len (40)"),
    "transfo-xl": ({"mem_len": 1600}, "mem_len (1600)"),
    "mamba": ({}, "its state"),
    "whisper": ({}, "this version cannot extend"),
}


@pytest.mark.parametrize("model_type", CASES)
def test_what_bounds_it(model_type, run, tmp_path):
    numbers, words = CASES[model_type]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **numbers}))
    done = run("inspect", tmp_path, "--json")
    assert done.exit_code == 0
    data = json.loads(done.stdout)
    assert words in data["bound"]
    assert not any(entry["applies"] for entry in data["methods"].values())
    assert words.split()[0] in run("inspect", tmp_path).stdout
    refused = run("convert", tmp_path, tmp_path / "out", "--method", "yarn", "--factor", 2, "--dry-run")
    assert refused.exit_code == 1


@pytest.mark.parametrize("model_type", ["deberta", "deberta-v2", "xlnet"])
def test_missing_values_of_a_configuration_are_defaults_of_transformers(model_type):
    config = {"model_type": model_type}
    usual, family = AutoConfig.for_model(model_type), family_of(config)
    keys = {"max_position_embeddings": family.length_key, "position_buckets": ""}
    names = {key: keys.get(key, key) for key in family.defaults}
    assert {key: getattr(usual, name) for key, name in names.items() if name} == {
        key: value for key, value in family.defaults.items() if names[key]
    }
    if model_type == "xlnet":
        assert "mem_len (not set)" in bound_of(config, family)


def test_relative_keys_are_no_table_of_positions(run, tmp_path):
    config = {"model_type": "bert", "max_position_embeddings": 512, "position_embedding_type": "relative_key"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    data = json.loads(run("inspect", tmp_path, "--json").stdout)
    assert "clipped at 511" in data["encoding"]["description"]
    assert data["methods"]["table"] == {"applies": False, "reason": "its table contains distances, not positions"}
    assert run("convert", tmp_path, "--method", "table", "--factor", 2, "--dry-run").exit_code == 1


def test_inspected_limits_of_t5_and_mpt_are_those_of_the_models():
    """Any length runs; MPT stops at max_seq_len, and with a larger one says the same of what it could read before."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "d_model": 16, "decoder_start_token_id": 0}
    ids = torch.randint(3, 32, (1, 300))
    t5 = T5ForConditionalGeneration(T5Config(**sizes, d_kv=8, d_ff=16, num_layers=1, num_heads=2)).eval()
    mpt = {n: MptForCausalLM(MptConfig(**sizes, n_heads=2, n_layers=2, max_seq_len=n)).eval() for n in (24, 300)}
    mpt[300].load_state_dict(mpt[24].state_dict())
    with torch.no_grad():
        assert t5(ids, decoder_input_ids=ids).logits.isfinite().all()
        with pytest.raises(RuntimeError):
            mpt[24](ids)
        assert torch.equal(mpt[24](ids[:, :24]).logits, mpt[300](ids[:, :24]).logits)
        assert mpt[300](ids).logits.isfinite().all()
        mpt[300].config.attn_config.alibi_bias_max = 16
        assert torch.equal(mpt[24](ids[:, :24]).logits, mpt[300](ids[:, :24]).logits), "nobody reads alibi_bias_max"
