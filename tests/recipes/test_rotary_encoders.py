"""Rotary encoders: schedules on the layers that look over the whole text, by the classes that people load them with."""

import json

import pytest
import torch
from transformers import AutoModel, AutoModelForMaskedLM

import tiny_models
from by_hand import by_hand
from ctxext.api import Recipe, convert
from ctxext.checkpoint.auto_class import MASKED, auto_class
from ctxext.checkpoint.families import sliding_layers
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.converters.plan import make_plan
from ctxext.errors import CtxextError
from ctxext.methods import Yarn
from ctxext.recipes.methods.self_extend import SelfExtend
from ctxext.recipes.model_config import model_config
from ctxext.verify.run import failures, verify
from loaded_models import load, logits
from small_llama import change_json

# Within the original context length, beyond which NomicBERT in older releases of transformers 5 fails.
IDS = torch.randint(5, 128, (1, 60), generator=torch.Generator().manual_seed(0))


def rotations(model):
    """Each rotary embedding's inverse frequencies by layer: of the global ones, of the local ones."""
    by_kind = [], []
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and "original" not in name:
            by_kind["sliding" in name].append(buffer)
    return by_kind


def logits_of(folder):
    return logits(load(folder, AutoModelForMaskedLM), IDS)


def theta_of(folder):
    return model_config(open_checkpoint(str(folder)).config).rotary.theta


@pytest.mark.parametrize("model_type", tiny_models.ENCODERS)
def test_global_layers_change_and_local_ones_stay(model_type, tmp_path):
    source = tiny_models.save(model_type, tmp_path / "source")
    convert(str(source), tmp_path / "out", Recipe([Yarn(factor=4)]))
    assert not failures(verify(str(tmp_path / "out"), against=str(source)))
    wanted = torch.tensor(by_hand(Yarn.name, 4, theta_of(source), 16, 64, 256)[0])
    for auto in (AutoModelForMaskedLM, AutoModel):
        full, local = rotations(auto.from_pretrained(tmp_path / "out"))
        assert len(full) == 1
        torch.testing.assert_close(full[0], wanted, rtol=1e-5, atol=0)
        assert all(map(torch.equal, local, rotations(auto.from_pretrained(source))[1]))
        assert len(local) == (model_type == "modernbert")
    before = logits_of(source)
    assert (logits_of(tmp_path / "out") - before).abs().max() > 1e-3
    convert(str(source), tmp_path / "same", Recipe([Yarn(factor=1)]))
    assert torch.equal(logits_of(tmp_path / "same"), before)


def test_rules_of_layers_and_bases_are_the_classes():
    """As ModernBERT was published: bases above, and one layer of `global_attn_every_n_layers`."""
    config = {"model_type": "modernbert", "global_attn_every_n_layers": 2, "num_hidden_layers": 5, "hidden_size": 64}
    config |= {"global_rope_theta": 5e4, "local_rope_theta": 2e4, "num_attention_heads": 4}
    model = model_config(config)
    assert sliding_layers(config, model.family) == [1, 3]
    assert (model.rotary.theta, model.rotary.trained_length) == (5e4, 8192)
    nested = Yarn(factor=4).edit(model).config["rope_parameters"]
    assert nested["sliding_attention"] == {"rope_type": "default", "rope_theta": 2e4}
    assert (nested["full_attention"]["rope_theta"], nested["full_attention"]["rope_type"]) == (5e4, "yarn")
    assert auto_class(config) == MASKED


def test_methods_with_code_are_refused_with_the_reason(tmp_path):
    source = tiny_models.save("modernbert", tmp_path)
    with pytest.raises(CtxextError, match=r"attention is bidirectional.*such as yarn") as error:
        make_plan(open_checkpoint(str(source)), Recipe([SelfExtend(factor=2)]))
    assert "modernbert" in error.value.message


@pytest.mark.parametrize("name", ["ModernBertModel", "ModernBertForSequenceClassification"])
def test_encoders_with_other_heads_are_converted(name, tmp_path):
    source = tiny_models.save("modernbert", tmp_path / "source")
    change_json(source / "config.json", architectures=[name])
    assert make_plan(open_checkpoint(str(source)), Recipe([Yarn(factor=2)])).model.rotary.context_length == 128


def test_code_of_others_beside_a_schedule_is_named(tmp_path):
    """Nomic's and EuroBERT's first checkpoints carry code, which reads schedules its own way or not at all."""
    source = tiny_models.save("modernbert", tmp_path)
    change_json(source / "config.json", auto_map={"AutoModel": "modeling_hf.Bert"})
    plan = make_plan(open_checkpoint(str(source)), Recipe([Yarn(factor=2)]))
    assert any("without trust_remote_code" in caution for caution in plan.cautions)


def test_a_schedule_of_local_layers_is_not_undone(tmp_path):
    source = tiny_models.save("modernbert", tmp_path / "source")
    path = source / "config.json"
    config = {key: value for key, value in json.loads(path.read_text()).items() if key != "rope_parameters"}
    config["rope_scaling"] = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
    path.write_text(json.dumps(config))
    with pytest.raises(CtxextError, match="its sliding layers would change too"):
        convert(str(source), tmp_path / "out", Recipe([Yarn(factor=4)]), replace_scaling=True)
