"""Schedules as published models have them: read for what they are, and changed only where every key is known."""

import math
import re
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import transformers

from by_hand import by_hand
from ctxext.api import Recipe, convert
from ctxext.checkpoint.families import FAMILIES, text_config
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.converters.inspection import inspect_checkpoint
from ctxext.converters.plan import is_new_only, make_plan
from ctxext.errors import CtxextError
from ctxext.methods import DynamicNtk, Llama3, MsPoE, Ntk, PositionInterpolation, Yarn
from ctxext.recipes.encodings.dialects import known_keys
from ctxext.recipes.encodings.rotary import _COPIES, attention_scaling
from ctxext.recipes.methods.adaptive import Adaptive
from ctxext.recipes.methods.ntk_by_parts import NtkByParts
from ctxext.recipes.methods.self_extend import SelfExtend
from ctxext.recipes.model_config import model_config
from ctxext.recipes.registry import method_named
from ctxext.verify.rotation import rotations
from loaded_models import load, logits
from small_llama import make_llama, read_json, scheduled
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


def hunyuan(model_type, folder, **schedule):
    """A tiny random model, its config.json with the schedule of its makers."""
    build(model_type).save_pretrained(folder)
    return scheduled(folder, max_position_embeddings=64, rope_theta=10000.0, rope_scaling={**ALPHA, **schedule})


IDS = 3 + torch.arange(60)[None] % 90


def frequencies(folder, length):
    """What a loaded model rotates by, at a length, and its factor on cosine and sine."""
    modules = dict(load(folder).named_modules())
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
    before = logits(source, IDS)
    same = convert(str(source), tmp_path / "same", Recipe([method(factor=1)]), check=False)
    assert torch.equal(logits(tmp_path / "same", IDS), before)
    assert not [line for line in same.plan.cautions if "4.57" in line]
    convert(str(source), tmp_path / "out", Recipe([method(factor=4)]), check=False)
    inverse, factor = frequencies(tmp_path / "out", 200)
    wanted, scaling = by_hand(method.name, 4, 10000.0 * 1000.0 ** (16 / 14), 16, 64, 200)
    assert inverse.tolist() == pytest.approx(wanted, rel=1e-5)
    assert factor == pytest.approx(scaling)


@pytest.mark.parametrize("model_type", HUNYUAN)
@pytest.mark.thorough
def test_heads_are_scaled_on_the_true_base(model_type, tmp_path):
    source = hunyuan(model_type, tmp_path / "source")
    step = MsPoE(ratio_min=1, ratio_max=1, head_order="fixed", first_layer=0)
    convert(str(source), tmp_path / "out", Recipe([step]))
    assert torch.equal(logits(tmp_path / "out", IDS), logits(source, IDS))


@pytest.mark.parametrize("step", [SelfExtend(factor=2), Adaptive(factor=2)], ids=lambda step: step.name)
def test_maps_are_refused_for_what_hunyuan_does(step, tmp_path):
    source = hunyuan("hunyuan_v1_dense", tmp_path / "source")
    with pytest.raises(CtxextError, match="changes queries and keys after it has rotated them"):
        convert(str(source), tmp_path / "out", Recipe([step]))


def test_dynamic_without_alpha_is_reported_as_transformers_5_only(tmp_path):
    source = hunyuan("hunyuan_v1_dense", tmp_path / "source")
    plan = make_plan(open_checkpoint(str(source)), Recipe([DynamicNtk(factor=2)]))
    assert "alpha" not in plan.model.rotary.parameters
    assert any("4.57 does not support this schedule" in line for line in plan.cautions)


def test_dynamic_by_1_is_reported_as_transformers_5_only_for_strict_families():
    """OLMo's and OLMo 2's class of 4.57 wants a factor above 1."""
    model = model_config({"model_type": "olmo2"})
    for factor in (1, 2):
        assert is_new_only(DynamicNtk(factor=factor).resolve(model.rotary).edit(model)) == (factor == 1)


ODD = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "attn_factor": 0.878}


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("step", [Yarn(factor=8), Ntk(factor=8), Adaptive(factor=2)], ids=lambda step: step.name)
def test_an_unknown_key_stops_every_change(step, key, tmp_path):
    """DeepSeek-R1-0528-Qwen3-8B has an attn_factor, which transformers does not read and engines do."""
    scheduled(make_llama(tmp_path / "source"), **{key: {**ODD, "rope_theta": 1e4}}, max_position_embeddings=128)
    with pytest.raises(CtxextError, match='has "attn_factor", which') as error:
        make_plan(open_checkpoint(str(tmp_path / "source")), Recipe([step]), replace_scaling=step.name != "adaptive")
    assert "Remove it from" in error.value.hint


def test_an_unknown_key_stays_beside_heads(tmp_path):
    scheduled(make_llama(tmp_path / "source"), rope_scaling=ODD, max_position_embeddings=128)
    step = MsPoE(head_order="fixed", first_layer=0)
    plan = make_plan(open_checkpoint(str(tmp_path / "source")), Recipe([step]))
    written = plan.model.config
    assert written["rope_parameters"]["attn_factor"] == written["rope_scaling"]["attn_factor"] == 0.878


def test_alpha_is_hunyuan_s_alone(tmp_path):
    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    config |= {"rope_theta": 10000.0, "max_position_embeddings": 64, "rope_scaling": dict(ALPHA)}
    model = model_config(config)
    assert model.rotary.rope_type == "dynamic"
    with pytest.raises(CtxextError, match='has "alpha", which no known version of transformers reads for "llama"'):
        model.with_encoding(model.rotary.restore_source({}))


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


def reads_of(expression):
    """What an expression finds in the code of each model with a rotary family, by the model's folder."""
    root = Path(transformers.__file__).parent
    patterns = ("models/*/modeling_*.py", "models/*/configuration_*.py", "modeling_rope_utils.py")
    reads = defaultdict(set)
    for path in sorted(path for pattern in patterns for path in root.glob(pattern)):
        if path.parent != root and not families_in(path.parent.name):
            continue
        reads[path.parent.name].update("".join(match.groups("")) for match in expression.finditer(path.read_text()))
    return {folder: keys for folder, keys in reads.items() if keys}


def families_in(folder):
    """The rotary families of a folder of models that can be converted."""
    named = (FAMILIES.get(name) for name in (folder, f"{folder}_text"))
    return [family for family in named if family is not None and family.positions == "rotary" and not family.reason]


def test_what_every_family_reads_of_its_schedule_is_known():
    reads = reads_of(READ)
    for folder in ("hunyuan_v1_dense", "hunyuan_v1_moe"):
        assert "alpha" in reads[folder]
    assert "long_mscale" in reads["phimoe"]
    assert len(reads) > 80
    assert {"factor", "beta_fast", "long_factor", "low_freq_factor"} <= reads["transformers"]
    layers = {name for family in FAMILIES.values() for name in (*family.full_types, *family.sliding_types)}
    unknown = {}
    for folder, keys in reads.items():
        for family in families_in(folder):
            left = keys - known_keys(text_config({}, family), family) - layers
            unknown |= {family.model_type: left} if left else {}
    assert unknown == {}
    shared = reads["transformers"] - known_keys({}, FAMILIES["llama"]) - layers
    assert not shared, "modeling_rope_utils.py reads more than is known"


CONFIG_READ = re.compile(
    r"""config\.([a-z_0-9]+)|getattr\((?:self\.)?config, "(\w+)"|kwargs\.(?:get|pop)\("(\w+)"|^    (\w+): """
    r"""|^        (\w+)(?:: [^=\n]+ )?=[^=]""",
    re.MULTILINE,
)
"""An attribute of a configuration, or a field or argument of its class."""
OF_POSITIONS = re.compile(
    "rope_|_rope|rotary|theta|nope|partial|alibi|position_embedding_type|max_pos|max_seq_len$|original_max|n_positions"
    "|attn_temp|attn_scale|floor_scale"
)
COMMON = {
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "max_position_embeddings",
    "original_max_position_embeddings",
}
NO_FREQUENCY = {
    "position_embedding_type": "4.57 sets it to rope in granitemoe",
    "rope_deltas": "a name in the code",
    "rope_init_fn": "a name in the code",
    "rotary_emb": "a name in the code",
    "rotary_pos_emb": "a name in the code",
    "default_rope_params": "a name in the code",
    "rope_interleave": "the order of a pair's halves",
    "swa_rope_theta": "the sliding layers' base",
    "_rope_type_labels": "names of layer types",
    "attn_temperature_tuning": "whether queries are scaled by their row",
    "attn_scale": "by how much",
    "floor_scale": "from which row on",
    "n_positions": "in comments",
}
"""Keys about positions that change no frequency of the full-attention layers."""
UNREAD = {"minimax_m3_vl_text": {"rotary_dim"}}
"""Fields that a family's code does not read."""


def config_keys(family):
    """The keys of config.json about positions that are known for a family."""
    names = ("length_key", "theta_key", "partial_key", "rotary_dim_key", "local_theta_key", "layer_theta_key")
    keys = {getattr(family, name) for name in names} | {
        part for key in family.aliases.values() for part in key.split(".")
    }
    keys |= {"qk_rope_head_dim", "qk_nope_head_dim"} if family.shared_rotary_key else set()
    keys |= {"no_rope_layers", "no_rope_layer_interval"} if family.rotated == "no_rope_layers" else set()
    return keys | COMMON | _COPIES | family.switches.keys()


def test_what_every_family_reads_of_its_configuration_is_known():
    reads = reads_of(CONFIG_READ)
    assert "alibi" in reads["falcon"]
    assert "use_mem_rope" in reads["zamba2"]
    assert "partial_rotary_factor" in reads["stablelm"]
    unknown = {}
    for folder, keys in reads.items():
        about = {key for key in keys if OF_POSITIONS.search(key)} - NO_FREQUENCY.keys()
        for family in families_in(folder):
            if left := about - config_keys(family) - UNREAD.get(family.model_type, set()):
                unknown[family.model_type] = left
    assert unknown == {}


def test_both_copies_of_a_base_are_written(tmp_path):
    """LFM2 was published with `theta` beside `rope_theta`, and transformers 4.57 reads the former."""
    config = {
        "model_type": "lfm2",
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "vocab_size": 64,
    }
    config |= {"num_key_value_heads": 2, "full_attn_idxs": [1], "theta": 1e6, "rope_theta": 1e6}
    model = model_config({**config, "max_position_embeddings": 64})
    step = Ntk(factor=4)
    written = step.resolve(model.rotary).edit(model).config
    base = 1e6 * 4 ** (8 / 6)
    assert written["theta"] == written["rope_theta"] == written["rope_parameters"]["rope_theta"] == pytest.approx(base)
    for entry in rotations(written, [64])[64]:
        assert min(entry.frequencies) == pytest.approx(base ** (-6 / 8), rel=1e-5)


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
def test_an_attention_factor_by_the_rule_is_computed_again(said, factor, wanted, kept, tmp_path):
    schedule = {**OLMO3, "attention_factor": said}
    scheduled(make_llama(tmp_path / "source"), rope_scaling=schedule, max_position_embeddings=256)
    plan = make_plan(open_checkpoint(str(tmp_path / "source")), Recipe([Yarn(factor=factor)]), replace_scaling=True)
    assert attention_scaling(plan.model.rotary) == pytest.approx(wanted)
    assert (f"attention_factor {said}" in plan.cautions[0]) == kept


def test_olmo_3_as_loaded_has_the_factor_of_its_new_length(tmp_path):
    build("olmo3").save_pretrained(tmp_path / "source")
    schedule = {**OLMO3, "attention_factor": 1.2079441541679836}
    scheduled(tmp_path / "source", rope_scaling=schedule, max_position_embeddings=256, rope_theta=5e5)
    convert(str(tmp_path / "source"), tmp_path / "out", Recipe([Yarn(factor=32)]), replace_scaling=True)
    model = load(tmp_path / "out")
    scalings = {
        value for module in model.modules() for key, value in vars(module).items() if key.endswith("attention_scaling")
    }
    assert any(value == pytest.approx(0.1 * math.log(32) + 1) for value in scalings)
    assert all(value == pytest.approx(0.1 * math.log(32) + 1) or value == 1 for value in scalings)


QWEN = {"model_type": "qwen3", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 36}
CARD = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
GLM = {"model_type": "glm4", "hidden_size": 6144, "num_attention_heads": 48, "num_hidden_layers": 61, "head_dim": 128}
MOE = {"model_type": "qwen2_moe", "hidden_size": 3584, "num_attention_heads": 28, "num_hidden_layers": 28}
LENGTHS = {
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
    "qwen2-57b-a14b": ({**MOE, "max_position_embeddings": 131072, "rope_theta": 1e6}, 32768, 32768),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_lengths_as_published(name):
    config, trained, reads = LENGTHS[name]
    rotary = model_config(config).rotary
    assert rotary.trained_length == trained
    assert (rotary.context_length if rotary.declared_length else rotary.usable_length) == reads


def test_inspect_and_convert_report_the_same_of_dynamic(tmp_path):
    """InternLM3 reads 196608 by a dynamic schedule of 6 from 32768."""
    scheduled(make_llama(tmp_path / "source"), rope_scaling={"rope_type": "dynamic", "factor": 6.0})
    source = open_checkpoint(str(tmp_path / "source"))
    data = inspect_checkpoint(source).to_dict("source")
    assert data["rotary"]["context_length"] == data["encoding"]["context_length"] == 768
    with pytest.raises(CtxextError, match="already has a schedule for 768 tokens"):
        make_plan(source, Recipe([Yarn(factor=4)]))


def vicuna(folder):
    lengths = {"max_position_embeddings": 32, "max_sequence_length": 128}
    return scheduled(make_llama(folder), rope_scaling={"factor": 4.0, "type": "linear"}, **lengths)


def test_a_linear_schedule_may_start_from_the_maximum(tmp_path):
    source = vicuna(tmp_path / "source")
    done = convert(str(source), tmp_path / "out", Recipe([PositionInterpolation(factor=4)]), replace_scaling=True)
    assert torch.equal(logits(tmp_path / "out", IDS), logits(source, IDS))
    assert (done.plan.model.rotary.trained_length, done.plan.model.rotary.context_length) == (32, 128)
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


def test_an_unrelated_length_key_is_ignored():
    vicuna = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32}
    vicuna |= {"max_position_embeddings": 4096, "rope_scaling": {"factor": 4.0, "type": "linear"}}
    rotary = model_config({**vicuna, "max_sequence_length": 2048}).rotary
    assert rotary.lacks_original
    assert method_named("pi").rope_type == rotary.rope_type
