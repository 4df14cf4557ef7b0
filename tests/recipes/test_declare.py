"""A longer declared length, for models without positions over long distances: nothing but the length changes."""

import json

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import tiny_models
from ctxext.api import Recipe, convert, verify
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.converters.convert import card_of
from ctxext.converters.engine_support import serving_of, source_commands
from ctxext.converters.inspection import inspect_checkpoint
from ctxext.converters.plan import make_plan
from ctxext.errors import CtxextError
from ctxext.methods import Declare, Yarn
from ctxext.recipes.model_config import model_config
from ctxext.verify.conversion import Conversion
from ctxext.verify.isolated_checks import LoadReport
from ctxext.verify.run import check_frequencies
from loaded_models import logits
from published_models import write_config
from small_llama import read_json

OLD, NEW = tiny_models.MAX_POSITIONS, 1 << 20
SIZES = {
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M*",
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 1,
    },
    "granitemoehybrid": {**tiny_models.OVERRIDES["granitemoehybrid"], "position_embedding_type": None},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"]},
    "llama4_text": {"no_rope_layers": [1, 0]},
    "cohere2": {},
    "exaone4": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16},
    "exaone_moe": {},
    "afmoe": {},
    "smollm3": {"no_rope_layers": [0, 0]},
    "zamba2": {**tiny_models.OVERRIDES["zamba2"], "use_mem_rope": False},
    "lara_mini": tiny_models.OVERRIDES["lara_mini"],
    "beam": {},
}
"""Families of published models without positions over long distances, and the sizes of tiny ones."""
ROTATION = {"module": "model.rotary_emb", "layer_type": "", "scaling": 1.0}
BUILT = [name for name in SIZES if name in CONFIG_MAPPING]


def save(name, folder):
    before = dict(tiny_models.OVERRIDES)
    tiny_models.OVERRIDES[name] = SIZES[name]
    try:
        tiny_models.save(name, folder)
    finally:
        tiny_models.OVERRIDES.clear()
        tiny_models.OVERRIDES.update(before)
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": OLD}))
    (folder / "generation_config.json").write_text(json.dumps({"max_length": OLD, "eos_token_id": 2}))
    return folder


IDS = torch.arange(2 * OLD)[None] % 90 + 5


@pytest.mark.parametrize("name", BUILT)
def test_a_family(name, tmp_path):
    source, out = save(name, tmp_path / "source"), tmp_path / "out"
    assert not inspect_checkpoint(open_checkpoint(str(source))).methods["declare"]
    done = convert(str(source), out, Recipe([Declare(target_length=NEW)]))
    old, new = read_json(source / "config.json"), read_json(out / "config.json")
    lengths = {"max_position_embeddings", "model_max_length"}
    changed = {key: value for key, value in new.items() if value != old.get(key) and key != "ctxext"}
    assert set(changed) <= lengths
    assert set(changed.values()) == {NEW}
    assert all(new[key] == NEW for key in lengths & old.keys())
    assert read_json(out / "tokenizer_config.json") == {"model_max_length": NEW}
    assert read_json(out / "generation_config.json") == {"max_length": NEW, "eos_token_id": 2}
    assert any("nothing was learned" in caution for caution in done.plan.cautions)
    card = (out / "README.md").read_text()
    assert f"Only the declared context length is raised, from {OLD} to {NEW} tokens" in card
    assert f"--max-model-len {NEW}" in card
    for ids in (IDS[:, :OLD], IDS):
        assert torch.equal(logits(out, ids, use_cache=False), logits(source, ids, use_cache=False))
    seen = inspect_checkpoint(open_checkpoint(str(out)))
    assert (seen.model.encoding.trained_length, seen.model.encoding.usable_length) == (OLD, NEW)
    with pytest.raises(CtxextError, match="is already extended: declare ×16384 from 64 tokens"):
        convert(str(out), tmp_path / "again", Recipe([Declare(target_length=2 * NEW)]))


WINDOWS = {"cohere2": "sliding_window", "exaone4": "sliding_window", "exaone_moe": "sliding_window"}
WINDOWS |= {"afmoe": "sliding_window", "lara_mini": "sliding_window", "beam": "sliding_window"}
WINDOWS |= {"llama4_text": "attention_chunk_size"}


@pytest.mark.parametrize("name", [name for name in WINDOWS if name in CONFIG_MAPPING])
@pytest.mark.parametrize("window", [OLD - 1, OLD, OLD + 1, 8 * OLD, None])
def test_a_window_beyond_the_original_length_is_named(name, window, tmp_path):
    """Its layers rotate, so that they see distances that were never trained: in convert, card and inspect."""
    source = save(name, tmp_path / "source")
    config = read_json(source / "config.json")
    if window is not None:
        config[WINDOWS[name]] = window
    (source / "config.json").write_text(json.dumps(config))
    if name == "exaone4" and window is None:
        config[WINDOWS[name]] = 16
    plan = make_plan(open_checkpoint(str(source)), Recipe([Declare(factor=4)]))
    words = f"their window of {window} tokens covers distances that they were not trained on"
    is_wide = window is not None and window > OLD
    assert any(words in caution for caution in plan.cautions) == is_wide
    assert (words in card_of(plan)) == is_wide
    assert (words in inspect_checkpoint(open_checkpoint(str(source))).caution) == is_wide
    advice = [caution for caution in plan.cautions if "first set the window to" in caution]
    assert not advice, "a wider window would be beyond the original length"


@pytest.mark.parametrize("name", ["jamba", "cohere2", "llama4_text"])
def test_verify_loads_it_and_compares_the_rotation(name, tmp_path):
    source, out = save(name, tmp_path / "source"), tmp_path / "out"
    convert(str(source), out, Recipe([Declare(factor=4)]), digest=True)
    findings = verify(out, against=source)
    assert {finding.status for finding in findings} == {"passed"}, findings
    assert ("frequencies" in {finding.check for finding in findings}) == (name != "jamba")


def test_verify_finds_another_rotation_and_another_length(tmp_path):
    source, out = save("cohere2", tmp_path / "source"), tmp_path / "out"
    convert(str(source), out, Recipe([Declare(factor=4)]))
    config = read_json(out / "config.json")
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    for more, checks in (
        ({"max_position_embeddings": 2 * OLD}, {"files", "configuration", "lengths"}),
        ({"rope_parameters": rope, "rope_scaling": rope}, {"files", "configuration"}),
    ):
        (out / "config.json").write_text(json.dumps({**config, **more}))
        assert {finding.check for finding in verify(out, load=False) if finding.status == "failed"} == checks
    model = Conversion(open_checkpoint(str(out)))
    vars(model)["load_report"] = LoadReport("", rotary=[{**ROTATION, "frequencies": [0.5, 0.25]}])
    assert check_frequencies(model).status == "failed"


def test_a_rotation_that_depends_on_the_length_is_refused(tmp_path):
    """Under 4.57 and 5, the `dynamic` schedule of the sliding layers starts at the length of config.json."""
    source = save("cohere2", tmp_path / "source")
    config = read_json(source / "config.json")
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    (source / "config.json").write_text(json.dumps({**config, "rope_parameters": rope, "rope_scaling": rope}))
    with pytest.raises(CtxextError, match="would rotate differently at the new length"):
        convert(str(source), tmp_path / "out", Recipe([Declare(factor=4)]))


def test_the_nested_text_model_of_llama_4():
    text = {"model_type": "llama4_text", "num_hidden_layers": 4, "max_position_embeddings": 8192}
    model = model_config({"model_type": "llama4", "text_config": text})
    done = Declare(factor=2).edit(model)
    assert done.config == {"model_type": "llama4", "text_config": {**text, "max_position_embeddings": 16384}}
    (line,) = source_commands("ORG/NAME", done, serving_of(done)).values()
    nested = '\'{"text_config": {"max_position_embeddings": 16384}}\''
    assert line == f"vllm serve ORG/NAME --hf-overrides {nested} --max-model-len 16384"


def test_an_option_sets_the_original_length():
    model = model_config({"model_type": "jamba", "max_position_embeddings": 262144}, 8192)
    assert not model.is_extended
    assert Declare(factor=64).edit(model).config["max_position_embeddings"] == 524288


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "llama"}, "it has rotary position embeddings, which a longer length alone does not extend"),
        ({"model_type": "mamba"}, "config.json contains no context length"),
        ({"model_type": "exaone4", "num_hidden_layers": 4}, ""),
        ({"model_type": "exaone4", "layer_types": ["full_attention"] * 32, "sliding_window": None}, "it has rotary"),
    ],
)
def test_models_that_it_is_for(config, reason, tmp_path):
    refusal = inspect_checkpoint(open_checkpoint(str(write_config(config, tmp_path / "x")))).methods["declare"]
    assert refusal.startswith(reason)
    assert bool(refusal) == bool(reason)


def test_a_schedule_is_refused_with_a_hint(tmp_path):
    source = save("cohere2", tmp_path / "source")
    with pytest.raises(CtxextError, match='"cohere2" has nothing to rescale: its full-attention layers') as caught:
        convert(str(source), tmp_path / "out", Recipe([Yarn(factor=4)]))
    assert caught.value.hint == "Raise its declared length with --method declare, then measure the model."
