"""Multimodal models with a schedule in their text part only, run with an image in the prompt."""

import json
import re

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

import multimodal_models
from by_hand import by_hand
from ctxext.api import Recipe, convert
from ctxext.checkpoint.auto_class import MULTIMODAL
from ctxext.checkpoint.families import _THINKERS, FAMILIES
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.converters.engine_support import source_commands
from ctxext.converters.plan import make_plan
from ctxext.errors import CtxextError
from ctxext.methods import DynamicNtk, Llama3, Ntk, PositionInterpolation, Yarn
from ctxext.recipes.methods.ntk_by_parts import NtkByParts
from ctxext.recipes.methods.self_extend import SelfExtend
from ctxext.recipes.model_config import model_config
from ctxext.verify.run import failures, verify
from small_llama import read_json

STEPS = (PositionInterpolation, Ntk, Yarn, NtkByParts, Llama3, DynamicNtk)
QUICK = "qwen3_vl"


def loaded(folder):
    model, info = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model.eval()


def rotary_tables(model):
    """Return frequencies and factor of rotary embeddings: of the text part's full attention, and of all others."""
    extended, others = {}, {}
    for name, module in model.named_modules():
        if "otary" not in type(module).__name__:
            continue
        for key, table in module.named_buffers():
            if not key.endswith("inv_freq") or "original" in key:
                continue
            kept = any(word in f"{name}.{key}" for word in ("visual", "vision", "patch", "local", "sliding"))
            scaling = getattr(module, key.replace("inv_freq", "attention_scaling"), 1.0)
            (others if kept else extended)[f"{name}.{key}"] = (table[table > 0], scaling)
    return extended, others


def check(name, folder, methods):
    """Convert a family by YaRN (Gemma 4: NTK), by no method, and by others; run the first two with an image."""
    source = multimodal_models.save(name, folder / "source")
    before, model = multimodal_models.logits(loaded(source)), model_config(read_json(source / "config.json"))
    assert before.isfinite().all()
    length, reads = model.rotary.trained_length, model.rotary.usable_length
    replaces, kind = model.rotary.is_scaled, Ntk if name == "gemma4" else Yarn
    convert(str(source), folder / "out", Recipe([kind(target_length=4 * reads)]), replace_scaling=replaces)
    assert not failures(verify(str(folder / "out")))
    after = loaded(folder / "out")
    longer = multimodal_models.logits(after)
    assert longer.isfinite().all()
    assert (longer - before).abs().max() > 1e-3
    factor = 4 * reads / length
    span = 32 if kind is Ntk else None
    wanted, scaling = by_hand(kind.name, factor, 10000.0, model.rotary.dim, length, 4 * reads, span)
    if model.family.scales_scores and kind is Yarn and not replaces:  # The whole score is scaled instead.
        scaling = 1.0
    (extended, others), (_, kept) = rotary_tables(after), rotary_tables(loaded(source))
    assert extended
    for table, factor_of_layer in extended.values():
        torch.testing.assert_close(table, torch.tensor(wanted), rtol=1e-5, atol=0)
        assert factor_of_layer == pytest.approx(scaling)
    assert others.keys() == kept.keys()
    assert all(torch.equal(others[key][0], kept[key][0]) for key in kept)
    step = Yarn(target_length=reads) if replaces else kind(factor=1)
    convert(str(source), folder / "same", Recipe([step]), replace_scaling=replaces)
    assert torch.equal(multimodal_models.logits(loaded(folder / "same")), before)
    if model.family.loader == MULTIMODAL:
        untested = "code for models that AutoModelForImageTextToText loads is untested"
        with pytest.raises(CtxextError, match=re.escape(SelfExtend.refusal(model.config, model.family) or untested)):
            make_plan(open_checkpoint(str(source)), Recipe([SelfExtend(factor=2)]))
    for kind in methods if name != "gemma4" else ():  # Conversions are compared with the method's reference.
        out = folder / kind.name
        convert(str(source), out, Recipe([kind(target_length=2 * reads)]), replace_scaling=replaces)
        written = read_json(out / "config.json")
        stated = read_json(source / "config.json")
        assert {key for key in stated if stated[key] != written.get(key)} <= {"text_config", "dtype"}


@pytest.mark.parametrize("name", [QUICK, "gemma4", "mistral4"])
def test_a_family(name, tmp_path):
    if name not in multimodal_models.NAMES:
        pytest.skip("unknown to this transformers")
    check(name, tmp_path, ())


@pytest.mark.thorough
@pytest.mark.parametrize("name", multimodal_models.NAMES)
def test_every_family(name, tmp_path):
    if (name, transformers.__version__) == ("llama4", "5.24.0"):
        pytest.skip("the unmodified model fails in this version: its output lacks image_outputs")
    check(name, tmp_path, STEPS)


def test_every_family_that_this_class_loads_is_tried():
    tried = {multimodal_models.TYPES.get(name, name) for name in multimodal_models.CONFIGS}
    assert {name for name, family in FAMILIES.items() if family.loader == MULTIMODAL} <= tried
    assert len(tried) >= 12


@pytest.mark.thorough
@pytest.mark.parametrize("whole", _THINKERS)
def test_the_thinker_of_an_omni_model_is_loaded_as_in_the_hint(whole, tmp_path):
    with pytest.raises(CtxextError, match="multimodal") as error:
        model_config({"model_type": whole})
    assert _THINKERS[whole] in error.value.hint
    if f"{whole}_thinker" not in multimodal_models.NAMES:
        pytest.skip("unknown to the Auto classes of this transformers")
    thinker = multimodal_models.build(f"{whole}_thinker")
    thinker.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(
        {f"thinker.{key}": weight for key, weight in weights.items()}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    config = {"model_type": whole, "thinker_config": read_json(tmp_path / "config.json")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = getattr(transformers, _THINKERS[whole]).from_pretrained(tmp_path)
    assert model.state_dict().keys() == thinker.state_dict().keys()
    assert all(torch.equal(weight, model.state_dict()[key]) for key, weight in thinker.state_dict().items())


FLAT = {"model_type": "qwen2_5_vl", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
FLAT |= {"max_position_embeddings": 64, "rope_theta": 1e6, "vision_config": {}}
FLAT |= {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}


def test_a_flat_configuration_keeps_its_sections():
    """Published Qwen2-VL and Qwen2.5-VL have the keys of their text part at the top level."""
    model = model_config(FLAT)
    assert (model.rotary.rope_type, model.rotary.is_scaled) == ("default", False)
    for step in (Yarn(factor=4), Ntk(factor=4)):
        written = step.resolve(model.rotary).edit(model).config
        assert "text_config" not in written
        for key in ("rope_scaling", "rope_parameters"):
            assert written[key]["mrope_section"] == [2, 3, 3]
        assert written["rope_parameters"]["rope_theta"] == written["rope_theta"]


def test_the_override_of_a_line_is_nested(tmp_path):
    source = multimodal_models.save(QUICK, tmp_path / "source")
    plan = make_plan(open_checkpoint(str(source)), Recipe([Yarn(factor=4)]))
    line = source_commands("SOURCE", plan.model, plan.serving)["vLLM"]
    override = json.loads(line.split("--hf-overrides '")[1].split("'")[0])
    assert override["text_config"]["max_position_embeddings"] == 256
    assert override["text_config"]["rope_parameters"]["factor"] == 4
    assert override["text_config"]["rope_parameters"]["mrope_section"] == [4, 2, 2]
