"""What a model was trained on: read where it is said, known where it is not, and given where the user knows better."""

import json

import pytest

from ctxext.api import Recipe, convert
from ctxext.checkpoint.families import family_of
from ctxext.checkpoint.geometry import known_model, known_models
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.cli.methods import build_recipe
from ctxext.errors import CtxextError
from ctxext.finetune.base import open_base
from ctxext.methods import Llama3, MsPoE, Ntk, Yarn
from ctxext.models.checkpoint_info import open_infos
from ctxext.recipes.methods.self_extend import SelfExtend
from ctxext.recipes.model_config import model_config
from ctxext.recipes.recipe import load_recipe
from ctxext.search.space import build_space
from ctxext.verify.run import failures, verify
from published_models import published, write
from small_llama import make_llama, read_json

PLAIN_MSPOE = MsPoE(head_order="fixed", first_layer=0)


def test_the_table_names_its_sources():
    for known in known_models():
        assert known.names
        assert known.facts
        assert len(known.source) > 20
        for model_type in known.model_types:
            assert family_of({"model_type": model_type}).positions == "rotary"


@pytest.mark.parametrize("key", ["rope_theta", "max_position_embeddings", "sliding_window"])
def test_a_model_with_different_facts_is_not_recognized(key):
    config = dict(published("mistral-7b-v0.1")["config"])
    assert model_config(config).rotary.trained_length == 8192
    config[key] = 1e6 if key == "rope_theta" else 16384
    assert model_config(config).rotary.trained_length == config["max_position_embeddings"]


def test_an_option_overrides_all_recorded_lengths(tmp_path):
    for name, given in (("mistral-7b-v0.1", 16384), ("llama-3.1-8b", 4096), ("qwen2.5-7b-instruct", 8192)):
        rotary = model_config(published(name)["config"], given).rotary
        assert (rotary.trained_length, rotary.length_origin) == (given, "--original-length")
        # The schedule that is there goes on counting from its own.
        assert rotary.schedule_length == (8192 if name == "llama-3.1-8b" else given)


def test_the_shipped_recipes_give_what_they_cite():
    qwen = model_config(published("qwen3-8b")["config"])
    rotary = load_recipe("qwen-yarn-x4").resolve(qwen).edit(qwen).rotary
    assert (rotary.parameters["original_max_position_embeddings"], rotary.context_length) == (32768, 131072)
    assert rotary.parameters["factor"] == 4.0
    llama = model_config(published("meta-llama-3-8b")["config"])
    made = load_recipe("llama-3.1-128k").resolve(llama).edit(llama)
    cited = published("llama-3.1-8b")["config"]
    assert made.config["rope_scaling"] == cited["rope_scaling"]
    assert made.config["max_position_embeddings"] == cited["max_position_embeddings"]


@pytest.mark.thorough
def test_factor_and_length_may_be_separate(llama, tmp_path):
    with pytest.raises(CtxextError, match="--factor cannot be combined with --target-length") as caught:
        build_recipe(["llama3"], None, {"factor": 8.0, "target_length": "2k"})
    assert "recipe file" in caught.value.hint
    done = convert(str(llama), tmp_path / "out", Recipe([Llama3(factor=8, target_length=2048)]))
    assert (done.plan.model.rotary.parameters["factor"], done.plan.model.rotary.context_length) == (8.0, 2048)
    assert "as requested; the factor of 8 gives 1024" in done.plan.cautions[0]
    assert not failures(verify(str(tmp_path / "out")))
    same = convert(str(llama), tmp_path / "same", Recipe([Llama3(factor=8, target_length=1024)]))
    assert same.plan.recipe.steps[0].target_length is None
    assert not same.plan.cautions
    with pytest.raises(CtxextError, match="disagree"):
        convert(str(llama), tmp_path / "never", Recipe([SelfExtend(factor=2, target_length=1024)]))


@pytest.mark.parametrize(
    ("step", "length", "declares"),
    [
        (PLAIN_MSPOE, 128, 128),
        (SelfExtend(factor=4), 256, None),
        (Yarn(factor=4), 256, None),
        (Ntk(factor=4), 256, None),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_what_is_declared_and_what_was_trained_stay_apart(step, length, declares, llama, tmp_path):
    """A model that declares 128 tokens and was trained on 64."""
    done = convert(str(llama), tmp_path / "out", Recipe([step]), original_length=64, check=False)
    config = read_json(tmp_path / "out" / "config.json")
    assert config["max_position_embeddings"] == length
    assert config["ctxext"]["trained_length"] == 64
    again = model_config(config).rotary
    assert (again.trained_length, again.declared_length) == (64, declares)
    assert again.context_length == done.plan.model.rotary.context_length == (64 if declares else 256)
    assert '"model_max_length": ' + str(length) in (tmp_path / "out" / "tokenizer_config.json").read_text()
    assert not failures(verify(str(tmp_path / "out"), against=str(llama), load=False))


def test_less_than_it_declares_is_refused(llama, tmp_path):
    with pytest.raises(CtxextError, match="declares 128 tokens, but the result would have 96"):
        convert(str(llama), tmp_path / "out", Recipe([Yarn(factor=1.5)]), original_length=64)
    convert(str(llama), tmp_path / "out", Recipe([Yarn(factor=1.5)]), original_length=64, allow_shorter=True)


SAID = {
    "qwen3-8b": ("40960 are declared", "32768 tokens (published for Qwen/Qwen3-8B: model card"),
    "llama-3.1-8b": ("extended by its schedule, llama3 ×8 from 8192", "8192 tokens (original_max_position_embeddings)"),
    "gemma-3-4b-it": ("extended by its schedule, linear ×8 from 32768", "published for google/gemma-3-4b-pt: Gemma 3"),
    "c4ai-command-r-v01": ("131072 tokens, not extended", "131072 tokens (model_max_length)"),
    "mistral-7b-v0.3": ("32768 tokens, not extended", "32768 tokens (max_position_embeddings)"),
}


@pytest.mark.parametrize("name", SAID)
def test_inspect_prints_the_length_and_its_source(name, run, tmp_path):
    result = run("inspect", write(name, tmp_path / name))
    for words in SAID[name]:
        assert words in " ".join(result.stdout.split())
    inspection = json.loads(run("inspect", tmp_path / name, "--original-length", "2k", "--json").stdout)["rotary"]
    assert (inspection["trained_length"], inspection["trained_length_from"]) == (2048, "--original-length")


def test_what_measures_searches_and_trains_counts_from_it(tmp_path):
    (info,) = open_infos(["demo"], original_length=256)
    assert (info.trained_length, info.context_length) == (256, 512)
    assert build_space(open_checkpoint("demo", original_length=256), 2048).factor == 8
    convert("demo", tmp_path / "out", Recipe([Yarn(factor=4)]), check=False)
    base = open_base(str(tmp_path / "out"), None, original_length=256)
    assert (base.model.rotary.trained_length, base.model.rotary.context_length) == (256, 2048)


def test_a_dry_run_shows_cautions(run, tmp_path):
    source = make_llama(tmp_path / "llama", rope_scaling={"rope_type": "linear", "factor": 2.0})
    words = ["--method", "yarn", "--factor", "4", "--replace-scaling", "--original-length", "64", "--dry-run"]
    result = run("convert", source, *words)
    assert "removed linear ×2 from 64 tokens" in " ".join(result.stderr.split())
    assert "from 128 tokens to 256" in " ".join(result.stderr.split())


def language_model(name, **changes):
    """A published configuration as it stands inside another, without a class of its own."""
    config = {**published(name)["config"], **changes}
    return {key: value for key, value in config.items() if key != "architectures"}


QWEN3, MISTRAL = language_model("qwen3-8b"), language_model("mistral-7b-v0.1")
QWEN2 = language_model("qwen2.5-7b-instruct", max_position_embeddings=131072)
LFM2 = {"model_type": "lfm2", "max_position_embeddings": 128000, "rope_theta": 1000000.0, "hidden_size": 2048}


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"model_type": "internvl", "text_config": QWEN3}, 32768),
        ({"model_type": "llava", "text_config": QWEN2}, 32768),
        ({"model_type": "internvl", "text_config": {**QWEN2, "model_type": None}}, None),
        ({"model_type": "internvl", "text_config": {key: QWEN2[key] for key in QWEN2 if key != "model_type"}}, 32768),
        ({"model_type": "llava", "text_config": {**QWEN3, "model_type": "llama"}}, 40960),
        ({"model_type": "ovis2", "text_config": QWEN2}, 32768),
        ({"model_type": "vipllava", "text_config": MISTRAL}, 8192),
        (LFM2, 32768),
        ({**LFM2, "model_type": "lfm2_moe"}, 32768),
        ({"model_type": "lfm2_vl", "text_config": LFM2}, 32768),
        ({"model_type": "idefics3", "text_config": {"model_type": "llama", "max_position_embeddings": 131072}}, 131072),
    ],
)
def test_a_known_language_model_is_known_inside_another(config, length):
    if length is None:
        with pytest.raises(CtxextError, match="model_type"):
            model_config(config)
    else:
        assert model_config(config).rotary.trained_length == length


def test_the_table_answers_for_the_types_of_another_format():
    """A GGUF file names an architecture, is read by the rules of Llama, and states no window."""
    config = {**QWEN3, "model_type": "llama"}
    family = family_of(config)
    assert known_model(config, family, {}) is None
    assert known_model(config, family, {}, model_types=("qwen3",)).original_length == 32768
    old = {**MISTRAL, "model_type": "llama"}
    old.pop("sliding_window")
    assert known_model(old, family, {}, model_types=("llama", "mistral")) is None
    known = known_model(old, family, {}, model_types=("llama", "mistral"), unstated=("sliding_window",))
    assert known.original_length == 8192
    assert known.origin.startswith("published for mistralai/Mistral-7B-v0.1: ")
