"""The true reason for every refusal, and the same one from `inspect` and from `convert`."""

import json
from pathlib import Path

import pytest

import tiny_models
from ctxext.api import METHODS, Recipe
from ctxext.checkpoint.families import FAMILIES, INNER, OTHERS, family_of
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.converters.inspection import inspect_checkpoint
from ctxext.converters.plan import make_plan
from ctxext.errors import CtxextError
from ctxext.methods import Yarn
from ctxext.recipes.encodings.base import POSITIONS
from ctxext.recipes.model_config import model_config
from portable_checkpoints import plain_source
from published_models import NAMES, published, write_config
from releases import IS_OLDER

DATA = Path(__file__).resolve().parents[1] / "resources"
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 4,
    "max_position_embeddings": 65536,
    "rope_theta": 10000.0,
}
ROBERTA = {
    "model_type": "xlm-roberta",
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_hidden_layers": 4,
    "max_position_embeddings": 8194,
    "pad_token_id": 1,
}
NESTED = {"sliding_attention": {"rope_type": "default", "rope_theta": 50000.0}, "full_attention": None}
GRANITE = {**LLAMA, "model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"] * 2}
AUTO_MAP = {"AutoConfig": "configuration_x.X"}


def opened(config, folder):
    return open_checkpoint(str(write_config(config, folder / "source")))


def reasons(config, folder):
    return inspect_checkpoint(opened(config, folder)).methods


def refused(config, folder):
    with pytest.raises(CtxextError) as caught:
        inspect_checkpoint(opened(config, folder))
    return caught.value.message


def test_a_note_of_training_in_a_schedule_blocks_nothing(tmp_path):
    """NousResearch's YaRN models have `finetuned: true`, which no code reads."""
    yarn = {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096, "finetuned": True}
    for key in ("rope_scaling", "rope_parameters"):
        source = opened({**LLAMA, key: yarn}, tmp_path / key)
        plan = make_plan(source, Recipe([Yarn(factor=32)]), replace_scaling=True)
        assert plan.model.rotary.parameters["factor"] == 32
    with pytest.raises(CtxextError, match='has "finetuned_by"'):
        make_plan(
            opened({**LLAMA, "rope_scaling": {**yarn, "finetuned_by": 1}}, tmp_path / "x"),
            Recipe([Yarn(factor=32)]),
            replace_scaling=True,
        )


@pytest.mark.parametrize(("kind", "positions"), [("rotary", "rotary"), ("alibi", "alibi"), ("other", "none")])
def test_an_encoder_with_custom_positions_is_refused(kind, positions, tmp_path):
    """jina-embeddings-v3's file has the model type of a family with a table, and rotates."""
    config = {**ROBERTA, "position_embedding_type": kind, "auto_map": AUTO_MAP}
    assert family_of(config).positions == positions
    methods = reasons(config, tmp_path)
    assert all(methods.values())
    assert "distances, not positions" not in "".join(methods.values())
    assert f'position_embedding_type is "{kind}"' in family_of(config).reason
    if positions == "rotary":
        assert methods["yarn"] == family_of(config).reason
    assert family_of({**ROBERTA, "position_embedding_type": "absolute"}).reason == ""
    assert (
        "distances, not positions"
        in reasons({**ROBERTA, "position_embedding_type": "relative_key"}, tmp_path / "two")["table"]
    )


def test_a_rotary_model_has_no_table_of_distances(tmp_path):
    for kind, positions in (("rope", "rotary"), ("nope", "none")):
        methods = reasons({**GRANITE, "position_embedding_type": kind}, tmp_path / kind)
        assert methods["table"] == f"it has {POSITIONS[positions]}, not {POSITIONS['learned']}"


def test_an_unknown_model_is_unknown_before_its_keys_are_read(tmp_path):
    config = {**LLAMA, "model_type": "step3p5", "rope_theta": [5e6, 1e4, 1e4, 1e4], "auto_map": AUTO_MAP}
    assert '"step3p5" is no' in refused(config, tmp_path)
    assert "it needs the code in its checkpoint" in refused(config, tmp_path)
    assert 'Unknown model type "brandnew"' in refused({**config, "model_type": "brandnew", "auto_map": None}, tmp_path)
    assert '"rope_theta" is' in refused({**config, "model_type": "llama"}, tmp_path)


def test_a_number_is_named_as_the_file_names_it(tmp_path):
    config = {**LLAMA, "model_type": "bailing_hybrid", "model_max_length": float("inf")}
    assert '"model_max_length" is "inf"' in refused(config, tmp_path)
    config = {**LLAMA, "model_type": "gpt2", "n_positions": "x", "n_ctx": 5}
    assert '"n_positions" is' in refused(config, tmp_path)


@pytest.mark.parametrize("model_type", ["cohere_compass_text", "gemma3_text"])
@pytest.mark.parametrize("null", NESTED)
def test_layers_with_a_null_schedule_do_not_rotate(model_type, null, tmp_path):
    config = {**LLAMA, "model_type": model_type, "sliding_window": 16, "rope_parameters": {**NESTED, null: None}}
    config["rope_parameters"]["full_attention"] = None if null == "full_attention" else NESTED["sliding_attention"]
    config["layer_types"] = ["sliding_attention", "full_attention"] * 2
    reason = f'"{null}" of rope_parameters is null, so these layers do not rotate'
    assert reasons(config, tmp_path)["yarn"] == reason
    with pytest.raises(CtxextError, match="do not rotate"):
        make_plan(opened(config, tmp_path / "two"), Recipe([Yarn(factor=4)]))


def kept():
    return json.loads((DATA / "sweep" / "transformers-5.json").read_text())["families"]


QUICK = ("llama", "hunyuan_v1_dense", "hrm_text", "moshi", "zamba2", "deepseek_v3", "falcon", "phi3")


@pytest.mark.parametrize(
    "model_type",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.thorough)
        for name in (*tiny_models.FAMILIES, *tiny_models.ENCODERS)
    ],
)
def test_inspect_offers_what_converts(model_type, tmp_path):
    """Against the sweep of every family with every method, which converts a tiny model of each."""
    _, config = plain_source(model_type, tmp_path / "source")
    family = family_of(config)
    for method in METHODS:
        if words := kept().get(model_type, {}).get(method.name):
            assert (method.refusal(config, family) == "") == (words == "right"), (method.name, words)


def problem_of(step, source):
    """Why a step gives no plan for a source without weights; empty if it gives one."""
    try:
        Recipe([step]).edit(model_config(source.config, source.original_length))
    except CtxextError as error:
        return error.message
    return ""


@pytest.mark.parametrize(
    "config",
    [published(name)["config"] for name in NAMES]
    + [
        json.loads(line)["config"] for line in (DATA / "published.jsonl").read_text().splitlines() if '"config"' in line
    ],
    ids=lambda config: config["model_type"],
)
def test_published_models_are_offered_what_can_be_planned(config, tmp_path):
    """Every method that `inspect` offers gives a plan, and every other one is refused, for the same reason."""
    try:
        source = opened(config, tmp_path)
        inspection = inspect_checkpoint(source)
    except CtxextError:
        return
    if inspection.model is None:
        assert all(inspection.methods.values())
        return
    for method in METHODS:
        reason, encoding = inspection.methods[method.name], inspection.model.encoding
        if method.encoding != inspection.family.encoding:
            assert reason
        elif problem := problem_of(method.example_step(encoding), source):
            # Its schedule has to be replaced first, and an older transformers lacks some families.
            is_unknown = IS_OLDER and problem.startswith("The installed transformers has no")
            assert encoding.is_scaled or is_unknown or (reason and reason in problem), (method.name, problem)
        else:
            assert not reason, method.name


def test_the_types_of_nested_models_are_reported_as_such():
    part = next(name for name, what in OTHERS.items() if what == "something else")
    with pytest.raises(CtxextError, match="no Auto class for language models loads it"):
        family_of({"model_type": part})
    assert not set(INNER) & set(FAMILIES)
