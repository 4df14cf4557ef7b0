"""Schedules as published models have them: read for what they are, and changed only where every key is known."""

import json
import math
import re
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from ctxext.checkpoint.families import FAMILIES, text_config
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.cli.inspect import inspection_data
from ctxext.converters import convert, make_plan
from ctxext.converters.inspection import inspect_checkpoint
from ctxext.errors import CtxextError
from ctxext.recipes import DynamicNtk, Llama3, MsPoE, Ntk, PositionInterpolation, Recipe, Yarn, method_named
from ctxext.recipes.encodings.dialects import known_keys
from ctxext.recipes.encodings.rotary import attention_scaling, model_config
from ctxext.recipes.methods.adaptive import Adaptive
from ctxext.recipes.methods.ntk_by_parts import NtkByParts
from ctxext.recipes.methods.self_extend import SelfExtend
from small_llama import make_llama, read_json
from tiny_models import build

HUNYUAN = ("hunyuan_v1_dense", "hunyuan_v1_moe")
ALPHA = {
    "alpha": 1000.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "type": "dynamic",
}
"""The schedule of Hunyuan 7B and its kin."""
IS_OLD = transformers.__version__.startswith("4.")


def hunyuan(model_type, folder, **schedule):
    """A tiny random model, its config.json with the schedule of its makers."""
    build(model_type).save_pretrained(folder)
    config = read_json(folder / "config.json")
    for key in ("rope_parameters", "rope_scaling"):
        config.pop(key, None)
    config |= {"max_position_embeddings": 64, "rope_theta": 10000.0, "rope_scaling": {**ALPHA, **schedule}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=True).eval()


@torch.no_grad()
def logits(folder, length=60):
    return loaded(folder)(3 + torch.arange(length)[None] % 90).logits


def frequencies(folder, length):
    """What a loaded model rotates by, at a length, and its factor on cosine and sine."""
    modules = dict(loaded(folder).named_modules())
    (module,) = [one for place, one in modules.items() if place.endswith("rotary_emb")][:1]
    module(torch.zeros(1, 1, 1), torch.arange(length)[None])
    return module.inv_freq.clone(), module.attention_scaling


@pytest.mark.parametrize("model_type", HUNYUAN)
def test_alpha_is_a_base_at_every_length(model_type, tmp_path):
    source = hunyuan(model_type, tmp_path / "source")
    rotary = model_config(read_json(source / "config.json")).rotary
    dim = rotary.dim
    assert (rotary.rope_type, rotary.theta) == ("default", 10000.0 * 1000.0 ** (dim / (dim - 2)))
    assert not rotary.is_scaled
    assert f"(10000 · 1000^({dim}/{dim - 2}), by alpha)" in rotary.describe()
    inverse, factor = frequencies(source, 60)
    wanted = torch.tensor([rotary.theta ** (-2 * i / dim) for i in range(dim // 2)])
    torch.testing.assert_close(inverse, wanted, rtol=1e-5, atol=0)
    assert factor == 1


def test_the_base_of_hunyuan_7b_is_what_others_read_too():
    config = {"model_type": "hunyuan_v1_dense", "hidden_size": 4096, "num_attention_heads": 32, "head_dim": 128}
    config |= {"num_hidden_layers": 32, "rope_theta": 10000.0, "rope_scaling": dict(ALPHA)}
    # llama.cpp prints freq_base_train 11158840 for Hunyuan A13B.
    assert round(model_config(config).rotary.theta) == 11158840
    plain = dict(config, rope_scaling={"type": "dynamic", "factor": 2.0})
    assert (model_config(plain).rotary.rope_type, model_config(plain).rotary.theta) == ("dynamic", 10000.0)


METHODS = (PositionInterpolation, Ntk, NtkByParts, Yarn, Llama3)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("model_type", HUNYUAN)
def test_hunyuan_is_converted_from_its_true_base(model_type, method, tmp_path):
    source = hunyuan(model_type, tmp_path / "source")
    before = logits(source)
    same = convert(str(source), tmp_path / "same", Recipe([method(factor=1)]), check=False)
    assert torch.equal(logits(tmp_path / "same"), before)
    assert not [line for line in same.plan.cautions if "4.57" in line]
    convert(str(source), tmp_path / "out", Recipe([method(factor=4)]), check=False)
    dim, theta = 16, 10000.0 * 1000.0 ** (16 / 14)
    plain = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    wanted = {
        "pi": [one / 4 for one in plain],
        "ntk": [(theta * 4 ** (dim / (dim - 2))) ** (-2 * i / dim) for i in range(dim // 2)],
        "llama3": [one / 4 if 64 * one / (2 * math.pi) < 1 else one for one in plain],
    }
    inverse, factor = frequencies(tmp_path / "out", 200)
    assert inverse.shape == (dim // 2,)
    if method.name in wanted:
        inside = [64 * one / (2 * math.pi) for one in plain]
        clear = torch.tensor([method.name != "llama3" or not 1 <= turns <= 4 for turns in inside])
        torch.testing.assert_close(inverse[clear], torch.tensor(wanted[method.name])[clear], rtol=1e-5, atol=0)
    else:
        # Of the pairs that never turn, all are slowed by the factor, whatever the ramp.
        torch.testing.assert_close(inverse[-3:], torch.tensor(plain[-3:]) / 4, rtol=1e-5, atol=0)
        assert factor == pytest.approx(0.1 * math.log(4) + 1 if method is Yarn else 1.0)


@pytest.mark.parametrize("model_type", HUNYUAN)
def test_almost_no_yarn_moves_hunyuan_almost_nothing(model_type, tmp_path):
    source = hunyuan(model_type, tmp_path / "source")
    done = convert(str(source), tmp_path / "out", Recipe([Yarn(factor=1.0001)]))
    assert done.verification is None or not done.verification.difference > 1e-4
    assert (logits(tmp_path / "out") - logits(source)).abs().max() < 1e-3


@pytest.mark.parametrize("model_type", HUNYUAN)
def test_heads_are_scaled_on_the_true_base(model_type, tmp_path):
    source = hunyuan(model_type, tmp_path / "source")
    step = MsPoE(ratio_min=1, ratio_max=1, head_order="fixed", first_layer=0)
    convert(str(source), tmp_path / "out", Recipe([step]))
    assert torch.equal(logits(tmp_path / "out"), logits(source))


@pytest.mark.parametrize("step", [SelfExtend(factor=2), Adaptive(factor=2)], ids=lambda step: step.name)
def test_maps_are_refused_for_what_hunyuan_does(step, tmp_path):
    source = hunyuan("hunyuan_v1_dense", tmp_path / "source")
    with pytest.raises(CtxextError, match="changes queries and keys after it has rotated them"):
        convert(str(source), tmp_path / "out", Recipe([step]))


def test_dynamic_without_alpha_is_said_to_be_for_5_only(tmp_path):
    source = hunyuan("hunyuan_v1_dense", tmp_path / "source")
    plan = make_plan(open_checkpoint(str(source)), Recipe([DynamicNtk(factor=2)]))
    assert "alpha" not in plan.rotary.parameters
    assert any("4.57 does not carry this schedule" in line for line in plan.cautions)


ODD = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "attn_factor": 0.878}


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("step", [Yarn(factor=8), Ntk(factor=8), Adaptive(factor=2)], ids=lambda step: step.name)
def test_an_unknown_key_stops_every_change(step, key, tmp_path):
    """DeepSeek-R1-0528-Qwen3-8B has an attn_factor, which transformers does not read and engines do."""
    make_llama(tmp_path / "source")
    path = tmp_path / "source" / "config.json"
    config = read_json(path)
    for other in ("rope_scaling", "rope_parameters"):
        config.pop(other, None)
    path.write_text(json.dumps(config | {key: {**ODD, "rope_theta": 1e4}, "max_position_embeddings": 128}))
    with pytest.raises(CtxextError, match='has "attn_factor", which') as error:
        make_plan(open_checkpoint(str(tmp_path / "source")), Recipe([step]), replace_scaling=step.name != "adaptive")
    assert "Remove it from" in error.value.hint


def test_an_unknown_key_stays_beside_heads(tmp_path):
    make_llama(tmp_path / "source")
    path = tmp_path / "source" / "config.json"
    config = read_json(path)
    config.pop("rope_parameters", None)
    path.write_text(json.dumps(config | {"rope_scaling": ODD, "max_position_embeddings": 128}))
    step = MsPoE(head_order="fixed", first_layer=0)
    plan = make_plan(open_checkpoint(str(tmp_path / "source")), Recipe([step]))
    written = json.loads(plan.texts["config.json"])
    assert written["rope_parameters"]["attn_factor"] == written["rope_scaling"]["attn_factor"] == 0.878


def test_alpha_is_hunyuan_s_alone(tmp_path):
    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    config |= {"rope_theta": 10000.0, "max_position_embeddings": 64, "rope_scaling": dict(ALPHA)}
    model = model_config(config)
    assert model.rotary.rope_type == "dynamic"
    with pytest.raises(CtxextError, match='has "alpha", which "llama" does not read'):
        model.with_encoding(model.rotary.plain({}))


def test_a_key_beside_nested_schedules_is_seen():
    config = {"model_type": "gemma3_text", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 6}
    plain = {"rope_type": "default", "rope_theta": 1e6}
    nested = {"full_attention": plain, "sliding_attention": {**plain, "rope_theta": 1e4}}
    model = model_config({**config, "head_dim": 16, "rope_parameters": {**nested, "spread": 2}})
    with pytest.raises(CtxextError, match='has "spread"'):
        model.with_encoding(model.rotary)
    model = model_config({**config, "head_dim": 16, "rope_parameters": nested})
    model.with_encoding(model.rotary)


READ = re.compile(r"""rope_(?:scaling|param\w*)(?:\[[a-z_]+\])?(?:\.(?:get|pop|setdefault)\(|\[)\s*["'](\w+)["']""")


def rope_reads():
    """What each model of the installed transformers reads of its rope dict, by the model's folder."""
    root = Path(transformers.__file__).parent
    patterns = ("models/*/modeling_*.py", "models/*/configuration_*.py", "modeling_rope_utils.py")
    reads = defaultdict(set)
    for path in sorted(path for pattern in patterns for path in root.glob(pattern)):
        reads[path.parent.name].update(READ.findall(path.read_text(encoding="utf-8")))
    return {folder: keys for folder, keys in reads.items() if keys}


def test_what_every_family_reads_of_its_schedule_is_known():
    reads = rope_reads()
    for folder in ("hunyuan_v1_dense", "hunyuan_v1_moe"):
        assert "alpha" in reads[folder]
    assert "long_mscale" in reads["phimoe"]
    assert len(reads) > (60 if IS_OLD else 150)
    assert {"factor", "beta_fast", "long_factor", "low_freq_factor"} <= reads["transformers"]
    layers = {name for family in FAMILIES.values() for name in (*family.full_types, *family.sliding_types)}
    unknown = {}
    for folder, keys in reads.items():
        for name in (folder, f"{folder}_text"):
            family = FAMILIES.get(name)
            if family is not None and family.positions == "rotary" and not family.reason:
                left = keys - known_keys(text_config({}, family), family) - layers
                unknown |= {name: left} if left else {}
    assert unknown == {}
    shared = reads["transformers"] - known_keys({}, FAMILIES["llama"]) - layers
    assert not shared, "modeling_rope_utils.py reads more than is known"


OLMO3 = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}


@pytest.mark.parametrize(
    ("said", "factor", "wanted", "kept"),
    [
        (1.2079441541679836, 32, 0.1 * math.log(32) + 1, False),
        (1.2079, 16, 0.1 * math.log(16) + 1, False),
        (1.21, 16, 0.1 * math.log(16) + 1, False),
        (1.2, 16, 1.2, True),
        (1.25, 16, 1.25, True),
        (1.0, 16, 1.0, True),
    ],
)
def test_a_number_of_its_rule_is_worked_out_again(said, factor, wanted, kept, tmp_path):
    make_llama(tmp_path / "source")
    path = tmp_path / "source" / "config.json"
    config = read_json(path)
    config.pop("rope_parameters", None)
    config |= {"rope_scaling": {**OLMO3, "attention_factor": said}, "max_position_embeddings": 256}
    path.write_text(json.dumps(config))
    plan = make_plan(open_checkpoint(str(tmp_path / "source")), Recipe([Yarn(factor=factor)]), replace_scaling=True)
    assert attention_scaling(plan.rotary) == pytest.approx(wanted)
    assert (f"attention_factor {said}" in plan.cautions[0]) == kept


def test_olmo_3_as_loaded_has_the_factor_of_its_new_length(tmp_path):
    build("olmo3").save_pretrained(tmp_path / "source")
    path = tmp_path / "source" / "config.json"
    config = read_json(path)
    config.pop("rope_parameters", None)
    config |= {"rope_scaling": {**OLMO3, "attention_factor": 1.2079441541679836}, "max_position_embeddings": 256}
    path.write_text(json.dumps({**config, "rope_theta": 5e5}))
    convert(str(tmp_path / "source"), tmp_path / "out", Recipe([Yarn(factor=32)]), replace_scaling=True)
    model = loaded(tmp_path / "out")
    scalings = {
        value for module in model.modules() for key, value in vars(module).items() if key.endswith("attention_scaling")
    }
    assert any(value == pytest.approx(0.1 * math.log(32) + 1) for value in scalings)
    assert all(value == pytest.approx(0.1 * math.log(32) + 1) or value == 1 for value in scalings)


LLAMA2 = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32}
VICUNA = {
    **LLAMA2,
    "max_position_embeddings": 4096,
    "max_sequence_length": 16384,
    "rope_scaling": {"factor": 4.0, "type": "linear"},
}
QWEN = {"model_type": "qwen3", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 36}
CARD = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
GLM = {"model_type": "glm4", "hidden_size": 6144, "num_attention_heads": 48, "num_hidden_layers": 61, "head_dim": 128}
QWEN2 = {"model_type": "qwen2", "hidden_size": 896, "num_attention_heads": 14, "num_hidden_layers": 24}
MOE = {"model_type": "qwen2_moe", "hidden_size": 3584, "num_attention_heads": 28, "num_hidden_layers": 28}
LENGTHS = {
    "vicuna-7b-v1.5-16k": (VICUNA, 4096, 16384),
    "qwen3-8b as its card says": (
        {**QWEN, "max_position_embeddings": 40960, "rope_theta": 1e6, "rope_scaling": CARD},
        32768,
        131072,
    ),
    "glm-4-32b as its card says": (
        {**GLM, "max_position_embeddings": 32768, "rope_scaling": {**CARD, "type": "yarn"}},
        32768,
        131072,
    ),
    "qwen2-0.5b": ({**QWEN2, "max_position_embeddings": 131072, "rope_theta": 1e6}, 32768, 32768),
    "qwen2-57b-a14b": ({**MOE, "max_position_embeddings": 131072, "rope_theta": 1e6}, 32768, 32768),
    "internlm3-8b-instruct": (
        {
            "model_type": "internlm3",
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_hidden_layers": 48,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "rope_theta": 5e7,
            "rope_scaling": {"rope_type": "dynamic", "factor": 6.0},
        },
        32768,
        196608,
    ),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_lengths_as_published(name):
    config, trained, reads = LENGTHS[name]
    rotary = model_config(config).rotary
    assert rotary.trained_length == trained
    assert (rotary.context_length if rotary.declared_length else rotary.usable_length) == reads


def test_inspect_says_what_convert_says_of_dynamic(tmp_path):
    """InternLM3 reads 196608 by a dynamic schedule of 6 from 32768."""
    make_llama(tmp_path / "source")
    path = tmp_path / "source" / "config.json"
    config = read_json(path)
    config.pop("rope_parameters", None)
    path.write_text(json.dumps(config | {"rope_scaling": {"rope_type": "dynamic", "factor": 6.0}}))
    source = open_checkpoint(str(tmp_path / "source"))
    data = inspection_data("source", inspect_checkpoint(source))
    assert data["rotary"]["context_length"] == data["encoding"]["context_length"] == 768
    with pytest.raises(CtxextError, match="reads 768 tokens by a schedule of its own"):
        make_plan(source, Recipe([Yarn(factor=4)]))


def vicuna(folder):
    make_llama(folder)
    path = folder / "config.json"
    config = read_json(path)
    config.pop("rope_parameters", None)
    schedule = {"factor": 4.0, "type": "linear"}
    config |= {"max_position_embeddings": 32, "max_sequence_length": 128, "rope_scaling": schedule}
    path.write_text(json.dumps(config))
    return folder


def test_a_linear_schedule_may_start_from_the_maximum(tmp_path):
    source = vicuna(tmp_path / "source")
    done = convert(str(source), tmp_path / "out", Recipe([PositionInterpolation(factor=4)]), replace_scaling=True)
    assert torch.equal(logits(tmp_path / "out"), logits(source))
    assert (done.plan.rotary.trained_length, done.plan.rotary.context_length) == (32, 128)
    convert(str(source), tmp_path / "more", Recipe([Yarn(factor=8)]), replace_scaling=True)
    written = read_json(tmp_path / "more" / "config.json")
    assert written["max_position_embeddings"] == written["max_sequence_length"] == 256
    again = model_config(written).rotary
    assert (again.trained_length, again.context_length) == (32, 256)


def test_heads_on_a_schedule_from_the_maximum_read_the_same_length(tmp_path):
    source = vicuna(tmp_path / "source")
    convert(str(source), tmp_path / "out", Recipe([MsPoE(head_order="fixed", first_layer=0)]), check=False)
    again = model_config(read_json(tmp_path / "out" / "config.json")).rotary
    assert (again.trained_length, again.context_length) == (32, 128)


def test_another_end_says_nothing():
    rotary = model_config({**VICUNA, "max_sequence_length": 2048}).rotary
    assert rotary.lacks_original
    assert method_named("pi").rope_type == rotary.rope_type
