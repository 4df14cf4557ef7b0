"""A rotary encoding read from config.json and written back: the cases in which families and files differ."""

import pytest

from ctxext.checkpoint.families import FAMILIES
from ctxext.errors import CtxextError
from ctxext.methods import Ntk
from ctxext.recipes.encodings.rotary import Rotary, write_rotary
from ctxext.recipes.model_config import is_readable, model_config

SIZES = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 128}
LLAMA = {"model_type": "llama", **SIZES}
SWITCHING = ["full_attention", "sliding_attention"] * 2
GRANITE = {"model_type": "granite_swa", **SIZES, "sliding_window": 8, "layer_types": SWITCHING}


def rewritten(config):
    """What of a configuration is otherwise once its own encoding is written into it."""
    model = model_config(config)
    written = model.with_encoding(model.rotary).config
    return {key: value for key, value in written.items() if config.get(key, ...) != value}


@pytest.mark.parametrize(("length", "is_read"), [(0, False), (-1, False), (1, True), (None, False)])
def test_a_length_is_a_number_above_zero(length, is_read):
    config = {**LLAMA, "max_position_embeddings": length}
    if is_read:
        assert model_config(config).rotary.trained_length == length
        return
    with pytest.raises(CtxextError, match=f'no usable max_position_embeddings: "{length}"'):
        model_config(config)


def test_the_base_is_specified_or_the_default_of_the_family():
    assert model_config(dict(LLAMA)).rotary.theta == 1e4
    assert model_config({**LLAMA, "rope_theta": 5e5}).rotary.theta == 5e5
    compass = {"model_type": "cohere_compass_text", **SIZES}
    with pytest.raises(CtxextError, match="has no rope_theta"):
        model_config(compass)
    assert model_config({**compass, "rope_theta": 5e4}).rotary.theta == 5e4


@pytest.mark.parametrize(
    ("schedule", "top", "original"),
    [
        ({"rope_type": "yarn", "factor": 4.0}, 32, 32),
        ({"rope_type": "yarn", "factor": 4.0}, None, None),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, None, 16),
        ({"rope_type": "linear", "factor": 4.0}, 32, None),
        ({"rope_type": "default"}, 32, None),
    ],
)
def test_a_schedule_has_the_original_length_of_the_top_level(schedule, top, original):
    config = {**LLAMA, "rope_scaling": schedule, "original_max_position_embeddings": top}
    assert model_config(config).rotary.parameters.get("original_max_position_embeddings") == original


def gemma4(**schedule):
    schedule = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25, **schedule}
    config = {"model_type": "gemma4_text", **SIZES, "global_head_dim": 16}
    return model_config({**config, "rope_parameters": {"full_attention": schedule}}).rotary


@pytest.mark.parametrize(
    ("factor", "rope_type"), [(None, "default"), (1, "default"), (1.0, "default"), (2, "proportional")]
)
def test_a_proportional_schedule_without_change_is_plain(factor, rope_type):
    model = gemma4(factor=factor)
    assert (model.rope_type, model.dim, model.span) == (rope_type, 4, 16)


def test_what_sliding_layers_would_read_too_stays_out_of_the_top_level():
    """vLLM gives a `partial_rotary_factor` of the top level to every layer type: log-probabilities are off by 6."""
    schedule = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    config = {"model_type": "gemma4_text", **SIZES, "rope_parameters": {"full_attention": schedule}}
    model = model_config(config)
    written = Ntk(factor=4).resolve(model.rotary).edit(model).config
    assert written["rope_parameters"]["full_attention"]["partial_rotary_factor"] == 0.25
    assert "partial_rotary_factor" not in written


def test_only_the_family_s_own_plain_type_is_plain():
    assert model_config({**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 1.0}}).rotary.rope_type == "linear"


def test_a_schedule_of_other_layers_is_not_that_of_full_attention():
    gemma = {"model_type": "gemma3_text", **SIZES, "num_hidden_layers": 6}
    linear = {"rope_type": "linear", "factor": 2.0}
    for others in ({"sliding_attention": linear}, {"sliding_attention": linear, "rope_type": "default"}):
        assert model_config({**gemma, "rope_parameters": others}).rotary.parameters == {"rope_type": "default"}
    both = {"sliding_attention": {"rope_type": "default"}, "full_attention": linear}
    assert model_config({**gemma, "rope_parameters": both}).rotary.parameters == linear


@pytest.mark.parametrize(
    ("noted", "lengths"),
    [
        ({}, (128, 128, None)),
        ({"trained_length": 32}, (32, 128, None)),  # A raised base: what config.json says is what it reads.
        ({"trained_length": 32, "declared_length": 128}, (32, 32, 128)),  # Code alone: it said so before.
        ({"trained_length": 32, "declared_length": 64}, (32, 128, None)),
        ({"declared_length": 64}, (128, 128, None)),
    ],
)
def test_lengths_recorded_by_ctxext(noted, lengths):
    rotary = model_config({**LLAMA, "ctxext": noted}).rotary
    assert (rotary.trained_length, rotary.context_length, rotary.declared_length) == lengths
    assert rotary.is_scaled == (lengths[1] > lengths[0])


def test_an_original_length_keeps_the_factor_of_a_schedule():
    plain = model_config(dict(LLAMA), 32).rotary
    assert (plain.trained_length, plain.context_length, plain.declared_length) == (32, 32, 128)
    pi = model_config({**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 32).rotary
    assert (pi.trained_length, pi.context_length, pi.declared_length) == (32, 128, None)


PLAIN = {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("config", "written"),
    [
        (LLAMA, {"rope_parameters": PLAIN, "rope_theta": 1e4, "head_dim": 16}),
        # A part of a head: the key above is the family's own.
        (
            {"model_type": "gpt_neox", **SIZES, "rotary_emb_base": 1e4, "head_dim": 16},
            {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.25}, "rotary_pct": 0.25},
        ),
        (
            {"model_type": "gpt_neox_japanese", **SIZES, "rotary_emb_base": 1e4, "head_dim": 16},
            {"rope_parameters": PLAIN},
        ),
        # A whole head is written out where the file does, or where the family's is a part.
        (
            {**LLAMA, "partial_rotary_factor": 1.0},
            {"rope_parameters": {**PLAIN, "partial_rotary_factor": 1.0}, "rope_theta": 1e4, "head_dim": 16},
        ),
        (
            {"model_type": "glm", **SIZES, "rope_theta": 1e4, "head_dim": 16, "partial_rotary_factor": 1.0},
            {"rope_parameters": {**PLAIN, "partial_rotary_factor": 1.0}},
        ),
        (
            {**LLAMA, "rope_theta": 1e4, "head_dim": 16, "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}},
            {"partial_rotary_factor": 0.5},
        ),
        (
            {**LLAMA, "rope_theta": 1e4, "head_dim": 16, "rope_parameters": {**PLAIN, "partial_rotary_factor": 1.0}},
            {"partial_rotary_factor": 1.0},
        ),
        # A class that is scaled by default needs its plain schedule said.
        (
            {"model_type": "apertus", **SIZES, "rope_theta": 1e4, "head_dim": 16, "rope_scaling": {"type": "default"}},
            {"rope_parameters": PLAIN, "rope_scaling": {"rope_type": "default"}},
        ),
        # Nested by layer type: transformers 4 reads no base above, unless the family has two.
        (
            {"model_type": "mellum", **SIZES, "head_dim": 16},
            {
                "rope_parameters": {
                    "sliding_attention": PLAIN,
                    "full_attention": {"rope_type": "default", "rope_theta": 5e5},
                }
            },
        ),
        (
            {"model_type": "modernbert-decoder", **SIZES, "head_dim": 16},
            {
                "rope_parameters": {
                    "sliding_attention": PLAIN,
                    "full_attention": {"rope_type": "default", "rope_theta": 16e4},
                },
                "global_rope_theta": 16e4,
                "local_rope_theta": 1e4,
            },
        ),
        # What the family's own code asks for beside any schedule.
        (
            {"model_type": "phimoe", **SIZES, "rope_theta": 1e4, "head_dim": 16},
            {
                "rope_parameters": {
                    **PLAIN,
                    "original_max_position_embeddings": 128,
                    "short_mscale": 1.0,
                    "long_mscale": 1.0,
                }
            },
        ),
        # Sections of a multimodal model's positions stay beside the schedule.
        (
            {**LLAMA, "rope_theta": 1e4, "head_dim": 16, "rope_scaling": {"type": "default", "mrope_section": [2, 3]}},
            {
                "rope_parameters": {**PLAIN, "mrope_section": [2, 3]},
                "rope_scaling": {"rope_type": "default", "mrope_section": [2, 3]},
            },
        ),
    ],
    ids=lambda value: value.get("model_type", ""),
)
def test_what_is_written(config, written):
    assert rewritten(config) == written


def test_a_schedule_that_was_replaced_leaves_nothing_behind():
    schedule = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    model = model_config({**LLAMA, "original_max_position_embeddings": 32, "rope_scaling": schedule})
    assert model.with_encoding(model.rotary).config["original_max_position_embeddings"] == 32
    plain = model.with_encoding(model.rotary.restore_source({})).config
    assert not {"rope_scaling", "original_max_position_embeddings"} & plain.keys()
    assert (plain["max_position_embeddings"], plain["rope_parameters"]) == (32, PLAIN)
    assert model.rotary.restore_source({"source_theta": 5e5}).theta == 5e5


def test_a_base_for_each_layer_changes_in_those_that_rotate():
    model = model_config({**GRANITE, "layer_rope_theta": [5e5, 1e4, 0, 5e5]})
    assert model.rotary.theta == 5e5
    raised = model.with_encoding(Rotary(**{**vars(model.rotary), "theta": 1e6}))
    assert raised.config["layer_rope_theta"] == [1e6, 1e4, 0, 5e5]
    assert model.config["layer_rope_theta"] == [5e5, 1e4, 0, 5e5]


def test_a_family_without_such_a_schedule_refuses_it():
    config = {"model_type": "phi3", **SIZES}
    model = model_config(config)
    yarn = model.rotary.with_parameters({"rope_type": "yarn", "factor": 2.0})
    with pytest.raises(CtxextError, match='"phi3": its code does not support the rope type "yarn"') as caught:
        write_rotary(config, model.family, yarn)
    assert "ctxext inspect" in caught.value.hint


def test_a_nested_text_model_is_written_in_place():
    whole = {"model_type": "got_ocr2", "max_position_embeddings": 7, "text_config": dict(LLAMA)}
    model = model_config(whole).with_context_length(256)
    assert (model.config["text_config"]["max_position_embeddings"], model.config["max_position_embeddings"]) == (256, 7)
    assert (whole["text_config"], model.rotary.context_length) == (LLAMA, 256)
    written = model.with_encoding(model.rotary).config
    assert written["text_config"]["rope_parameters"] == PLAIN
    assert "rope_parameters" not in written


def test_what_sliding_layers_make_of_a_schedule():
    def cautions_of(config, is_changed=True):
        model = model_config(config)
        return model.rotary.cautions(model.config, model.family, is_changed=is_changed)

    (follows,) = cautions_of(GRANITE)
    assert "sliding-window layers use the same schedule" in follows
    assert cautions_of(GRANITE, is_changed=False) == ()
    assert cautions_of({**GRANITE, "layer_types": ["full_attention"] * 4}) == ()
    assert cautions_of({"model_type": "gemma3_text", **SIZES, "num_hidden_layers": 6, "sliding_window": 8}) == ()
    mistral = {"model_type": "mistral", **SIZES, "sliding_window": 8}
    (blind,) = cautions_of(mistral, is_changed=False)
    assert "a sliding window of 8 tokens" in blind
    assert cautions_of({**mistral, "sliding_window": None}) == ()


def test_whether_code_or_a_schedule_extends_it():
    plain = model_config(dict(LLAMA))
    assert not plain.is_extended
    assert model_config({**LLAMA, "ctxext": {"trained_length": 32}}).is_extended
    assert model_config({**LLAMA, "ctxext_code": {"steps": []}}).is_extended
    broken = model_config({**LLAMA, "ctxext_code": ["steps"]})
    assert (broken.code, broken.is_extended) == ({}, False)


def test_encodings_that_are_not_rotary():
    bert = model_config({"model_type": "bert", "max_position_embeddings": 512})
    with pytest.raises(
        CtxextError, match='"bert" has learned position embeddings; rotary position embeddings are required'
    ):
        _ = bert.rotary
    with pytest.raises(CtxextError, match='"mamba" has no position embeddings, and config'):
        model_config({"model_type": "mamba"})


@pytest.mark.parametrize(
    ("model_type", "readable"),
    [
        *((name, True) for name in ("llama", "bert", "marian", "t5", "bloom", "cohere2", "xlnet")),
        *((name, False) for name in ("whisper", "mamba")),
    ],
)
def test_which_encodings_are_read(model_type, readable):
    assert is_readable({"model_type": model_type}, FAMILIES[model_type]) == readable
