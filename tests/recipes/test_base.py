"""What every step says and does, whatever its method: whom it is for, how far it reaches, what it takes over."""

import dataclasses

import pytest

from ctxext.api import METHODS, Recipe
from ctxext.checkpoint.families import FAMILIES, family_of
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.converters.plan import make_plan
from ctxext.errors import CtxextError
from ctxext.methods import MsPoE, Ntk, Yarn
from ctxext.recipes.encodings.rotary import Rotary
from ctxext.recipes.methods.abf import AdjustedBase
from ctxext.recipes.methods.adaptive import Adaptive
from ctxext.recipes.methods.bifocal import Bifocal
from ctxext.recipes.methods.buckets import WiderBuckets
from ctxext.recipes.methods.distance_aware import DistanceAware
from ctxext.recipes.methods.rerope import ReRope
from ctxext.recipes.methods.table import Table
from ctxext.recipes.model_config import model_config
from ctxext.recipes.recipe import step_from_dict
from ctxext.recipes.registry import method_named
from small_llama import read_json

LENGTH = 128
LLAMA = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
LLAMA |= {"max_position_embeddings": LENGTH}
HEADS = MsPoE(first_layer=0, head_order="fixed")
ROTARY = Rotary(theta=1e4, dim=8, span=8, trained_length=LENGTH, context_length=LENGTH, parameters={})
EXAMPLES = {
    "rotary": LLAMA,
    "learned": {"model_type": "bert"},
    "sinusoidal": {"model_type": "marian"},
    "alibi": {"model_type": "bloom"},
    "buckets": {"model_type": "t5"},
    "memory": {"model_type": "xlnet"},
}
CALLED = {
    "rotary": "rotary position embeddings",
    "learned": "learned position embeddings",
    "sinusoidal": "sinusoidal position embeddings",
    "alibi": "ALiBi biases",
    "buckets": "buckets of distances with learned biases or embeddings",
    "memory": "sinusoids of distances and a memory of earlier segments",
}


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_method_is_refused_for_other_encodings_with_a_reason(method):
    for encoding, config in EXAMPLES.items():
        refusal = method.refusal(config, family_of(config))
        if encoding == method.encoding:
            assert refusal == ""
        else:
            needed = CALLED.get(method.encoding)
            reason = f", not {needed}" if needed else ", which a longer length alone does not extend"
            assert refusal == f"it has {CALLED[encoding]}{reason}"


@pytest.mark.parametrize("method", [MsPoE, DistanceAware, Adaptive], ids=lambda method: method.name)
@pytest.mark.parametrize(
    ("model_type", "told"),
    [("fuyu", "its language model is another family's"), ("codegen", "sinusoids itself"), ("deepseek_v3", "latent")],
)
def test_families_that_code_does_not_support(method, model_type, told):
    assert told in method.refusal({"model_type": model_type}, FAMILIES[model_type])


def test_code_is_for_layers_that_look_back_over_everything():
    sliding = {"model_type": "mistral", "num_hidden_layers": 2, "sliding_window": 8, "max_position_embeddings": LENGTH}
    told = "every layer with a rotary embedding has a sliding window, and these layers are not changed"
    assert MsPoE.refusal(sliding, FAMILIES["mistral"]) == told
    assert MsPoE.refusal({**sliding, "sliding_window": None}, FAMILIES["mistral"]) == ""
    with pytest.raises(CtxextError, match=f'"mistral" does not support mspoe: {told}'):
        MsPoE().edit(model_config({**sliding, "rope_theta": 1e4, "head_dim": 8}))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, '"use_bidirectional_attention": true'),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, '"use_bidirectional_attention": true'),
        ({"model_type": "gemma4_text", "use_bidirectional_attention": "all"}, '"use_bidirectional_attention": "all"'),
        ({"model_type": "gemma3", "text_config": {"use_bidirectional_attention": True}}, "use_bidirectional_attention"),
        ({"model_type": "paligemma", "text_config": {"model_type": "gemma"}}, "use_bidirectional_attention"),
        ({"model_type": "llama", "is_causal": False}, '"is_causal": false'),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": False}, ""),
        ({"model_type": "gemma4_text", "use_bidirectional_attention": "vision"}, ""),
        ({"model_type": "llama", "use_bidirectional_attention": True}, ""),
    ],
)
@pytest.mark.parametrize("name", ["self-extend", "adaptive", "sinks", "distance-aware"])
def test_bidirectional_decoders_are_refused_with_the_key_that_makes_them_so(config, said, name):
    reason = method_named(name).refusal(config, family_of(config))
    assert said in reason
    assert ("is for causal attention" in reason) == bool(said)


def test_a_schedule_that_a_family_does_not_support():
    family = FAMILIES["phi3"]
    assert Yarn.refusal({}, family) == 'its code does not support the rope type "yarn" (supported: default, longrope)'
    assert AdjustedBase.refusal({}, family) == ""


def test_the_context_length_after_a_step():
    assert Yarn(factor=2.5).length_after(ROTARY) == 320
    assert Yarn(target_length=300).resolve(ROTARY).length_after(ROTARY) == 300
    assert Yarn(factor=2, target_length=300).length_after(ROTARY) == 300
    assert MsPoE().length_after(ROTARY) == LENGTH


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (Yarn(factor=2.5), "yarn ×2.5"),
        (Yarn(target_length=300), "yarn to 300"),
        (Yarn(factor=2, target_length=300), "yarn ×2 to 300"),
        (AdjustedBase(theta=1, factor=2), "abf ×2 theta 1"),
        (DistanceAware(), "distance-aware"),
        (ReRope(factor=2.5), "rerope ×2.5"),
        (ReRope(target_length=512), "rerope to 512"),
        (ReRope(factor=2, temperature="logn"), "rerope ×2 (logn)"),
        (Adaptive(factor=2, temperature="yarn"), "adaptive ×2 (yarn) around yarn"),
        (Bifocal(factor=2), "bifocal ×2"),
        (Table(factor=2), "table ×2 (tile)"),
        (Table(factor=2, fill="linear"), "table ×2 (linear)"),
        (MsPoE(head_order="prompt"), "mspoe 1.2–1.8 ntk (prompt order)"),
    ],
)
def test_a_step_in_a_few_words(step, said):
    assert step.summary() == said


SCHEDULE = {"rope_type": "yarn", "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 0.0, "beta_fast": 8.0}


@pytest.mark.parametrize(
    ("step", "schedule", "made_by", "taken"),
    [
        (Yarn(factor=2), SCHEDULE, None, {"mscale": 0.7, "mscale_all_dim": 0.0, "beta_fast": 8.0}),
        (Yarn(target_length=300), SCHEDULE, None, {"mscale": 0.7, "mscale_all_dim": 0.0, "beta_fast": 8.0}),
        (Yarn(factor=2, mscale=1, beta_fast=9), SCHEDULE, None, {"mscale_all_dim": 0.0}),
        (Yarn(factor=2, mscale=1, beta_fast=9), SCHEDULE, "yarn", {"mscale_all_dim": 0.0}),
        (Yarn(factor=2), SCHEDULE, "ntk-by-parts", {}),
        (Yarn(factor=2), {**SCHEDULE, "rope_type": "linear"}, None, {}),
        (Yarn(factor=2), {**SCHEDULE, "rope_type": "linear"}, "yarn", {}),
    ],
)
def test_what_a_step_keeps_of_the_schedule_it_replaces(step, schedule, made_by, taken):
    assert step.inherit_from(schedule, made_by) == taken


@pytest.mark.parametrize(
    ("numbers", "factor"), [({}, 4), ({"factor": 6.0}, 6), ({"factor": 4.0}, 4), ({"factor": 2.0}, 4)]
)
def test_a_search_never_falls_below_the_target_length(numbers, factor):
    assert Yarn.from_search({"beta_fast": 9.0, **numbers}, ROTARY, 4.0) == Yarn(factor=factor, beta_fast=9)


def test_numbers_have_the_declared_type_however_they_were_written():
    assert repr(Yarn(factor=2).factor) == "2.0"
    assert repr(Yarn(target_length=300.0).target_length) == "300"
    assert MsPoE(ranks=[[0, 1]]).ranks == ((0, 1),)


def test_a_step_as_a_recipe_file_has_it():
    step = step_from_dict({"method": "mspoe", "ranks": [[0, 1], [1, 0]], "ratio_max": 2}, "here")
    written = step.to_dict()
    assert (written["method"], written["ranks"], written["ratio_max"]) == ("mspoe", [[0, 1], [1, 0]], 2.0)
    assert "ratios" not in written
    assert Yarn(factor=2).to_dict() == {"method": "yarn", "factor": 2.0}


def test_wider_buckets():
    t5 = model_config({"model_type": "t5", "n_positions": 100, "relative_attention_num_buckets": 32})
    made = WiderBuckets(factor=2.5).edit(t5)
    assert (made.encoding.distance, made.encoding.context_length) == (320, 250)
    assert made.config["relative_attention_max_distance"] == 320
    assert "inputs of more than 8 tokens change" in WiderBuckets(factor=2).caution_for(t5)
    with pytest.raises(CtxextError, match="no buckets to widen: it has rotary position embeddings, not buckets"):
        WiderBuckets(factor=2).edit(model_config(LLAMA))
    assert not WiderBuckets.is_published, "nothing was measured"


def test_code_with_a_longer_context_declares_it():
    """Only then: a model that declares more than it was trained on goes on declaring it."""
    declares = {**LLAMA, "max_position_embeddings": 4096}
    for step, length in ((ReRope(factor=2), 2 * LENGTH), (HEADS, 4096)):
        model = step.edit(model_config(declares, LENGTH))
        assert model.config["max_position_embeddings"] == model.encoding.claimed_length == length


@pytest.mark.parametrize("order", ["prompt", "fixed"])
def test_what_chooses_by_the_prompt_is_marked(order):
    step = dataclasses.replace(HEADS, head_order=order).edit(model_config(LLAMA)).code["steps"][0]
    assert step.get("per_prompt") == (True if order == "prompt" else None)


def test_the_files_that_travel():
    assert Recipe([Yarn(factor=2)]).code_files(LLAMA) == {}
    files = Recipe([Yarn(factor=2), MsPoE()]).code_files(LLAMA)
    shared = {"configuration_ctxext.py", "method.py", "private_copy.py", "modeling_family.py"}
    assert files.keys() == {"modeling_ctxext.py", "mspoe.py", *shared}
    stub = files["modeling_ctxext.py"]
    assert "from .modeling_family import family\n" in stub
    assert "from .mspoe import MsPoE\n" in stub
    assert 'family(__name__, "transformers.models.llama.modeling_llama", [MsPoE])' in stub
    alibi = step_from_dict({"method": "ntk-alibi", "factor": 2}, "here")
    assert Recipe([alibi]).code_files({"model_type": "bloom"}).keys() == {
        "modeling_ctxext.py", "row_slopes.py", "private_copy.py", "modeling_alibi.py"
    }  # fmt: skip


@pytest.mark.parametrize("first", [AdjustedBase(theta=1e5, factor=4), Ntk(factor=4)], ids=["abf", "ntk"])
def test_a_step_after_a_raised_window_still_knows_the_trained_length(llama, first):
    source = open_checkpoint(str(llama))
    last = (
        Yarn(factor=4)
        if isinstance(first, AdjustedBase)
        else MsPoE(schedule="by-parts", first_layer=0, head_order="fixed")
    )
    config = make_plan(source, Recipe([first, last])).stock.config
    full = Recipe([first, last]).edit(model_config(source.config)).config
    known = full["rope_parameters"].get("original_max_position_embeddings")
    known = known or full["ctxext_code"]["steps"][0]["trained_length"]
    assert known == read_json(llama / "config.json")["max_position_embeddings"] == 128
    assert config["max_position_embeddings"] == full["max_position_embeddings"] == 512
    assert "ctxext" not in full
