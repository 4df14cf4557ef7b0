"""The edges of what a stranger's file may say: the last value that is read, and the first that is not."""

import math

import pytest

from ctxext.checkpoint.geometry import check_sizes
from ctxext.errors import CtxextError
from ctxext.files.schemas import (
    CONFIG,
    GENERATION_CONFIG,
    MANIFEST,
    SCALING,
    SHARD_INDEX,
    SIZES,
    TOKENIZER_CONFIG,
    TRAINER_STATE,
    check_config,
    check_schema,
)

NOT_COUNTS = (0, -1, 1.5, 1.0, "4", True, 10**12)
NOT_LENGTHS = (0, -1, 1e3, "128", True, 10**10 + 1)
NOT_FACTORS = (0, -1.0, "4", True, math.inf, math.nan, 1e40)
LOGGED = [{"step": 1, "loss": 0.5, "eval_loss": None}]
STATE = {"global_step": 2, "max_steps": 3, "epoch": 0.5, "log_history": LOGGED, "stateful_callbacks": {}}
LATER = {"step": 2, "loss": 0.5}
SHA = "0123456789abcdef" * 4
STEP = {"method": "yarn"}
CODE = {"rope": {"rope_type": "default"}}
BAD_LAYERS = (1, {"head_dim": "x"}, {"head_dim": -1})
EDGES = [
    (CONFIG, "hidden_size", (1, 10_000_000, None), NOT_COUNTS),
    (CONFIG, "num_hidden_layers", (1, 10_000), (0, 1.5, "2", 10**9)),
    (CONFIG, "attn_layer_indices", ([0, 1], []), ([-1], ["0"], [10**9])),
    (CONFIG, "num_attention_heads", (4, [4, 0]), (*NOT_COUNTS, [-1], [10**9], ["4"], {})),
    (CONFIG, "no_rope_layers", ([1, 0, True], []), (["1"], [0.5])),
    (CONFIG, "max_position_embeddings", (1, 10**10), NOT_LENGTHS),
    (CONFIG, "rope_theta", (1.01, 2, 1e30), (1, 1.0, *NOT_FACTORS)),
    (CONFIG, "partial_rotary_factor", (1, 1.0, 1e-9), (0, 1.001, "half", math.nan)),
    (CONFIG, "layer_rope_theta", ([None, 1e4, 0.5],), ([math.inf], ["x"])),
    (CONFIG, "layer_types", (["full_attention"], []), ([1], "x")),
    (CONFIG, "architectures", ([], ["x" * 10_000]), (["x" * 20_000], [1], "x")),
    (CONFIG, "ctxext", ({}, {"recipe": {"steps": [STEP]}}), ({"recipe": {"steps": []}},)),
    (CONFIG, "ctxext", ({"recipe": {"steps": [STEP] * 100}},), ({"recipe": {"steps": [STEP] * 101}},)),
    (CONFIG, "ctxext", (), ({"trained_length": 0}, {"recipe": {}})),
    (
        CONFIG,
        "ctxext_code",
        ({**CODE, "steps": [STEP] * 100},),
        ({**CODE, "steps": []}, {**CODE, "steps": [STEP] * 101}),
    ),
    (CONFIG, "ctxext_code", ({**CODE, "steps": [{**STEP, "per_prompt": True}]},), ({"steps": [STEP]}, CODE)),
    (SIZES, "num_attention_heads", (1, None), (*NOT_COUNTS, [4])),
    (SIZES, "num_key_value_heads", (0, 1, None), ([1], "2", 1.5, -1)),
    (SIZES, "attention_layers", ([0, 3], None), (3, ["0"], [-1], [[0]])),
    (SIZES, "kv_lora_rank", (0, 1, 10_000_000, None), (-1, 1.5, "4", True, 10**8)),
    (SIZES, "sliding_window", (0, 1, 10**10, None), (-1, 1.5, [16], "4", True, 10**10 + 1)),
    (SIZES, "per_layer_config", ({}, {"0": {"head_dim": 0}, "1": None}), ([], *({"0": bad} for bad in BAD_LAYERS))),
    (SCALING, "rope_type", ("yarn", None), (7, ["yarn"])),
    (SCALING, "factor", (0.5, 1, 1e30), NOT_FACTORS),
    (SCALING, "attention_factor", (0, -1.5, 1e300), (math.inf, math.nan, "1", True)),
    (SCALING, "long_factor", ([0.5, 2], []), ([0], [math.inf], ["2"], 2.0)),
    (SCALING, "truncate", (True, False, None), (1, "true")),
    (GENERATION_CONFIG, "max_length", (1, None), NOT_LENGTHS),
    (
        MANIFEST,
        "files",
        ({"a": SHA}, {}),
        tuple({"a": bad} for bad in (SHA[1:], SHA + "0", SHA.upper(), None, "g" * 64)),
    ),
    (MANIFEST, "weights", ({"a": SHA, "b": None},), ({"a": 1},)),
    (MANIFEST, "stamps", ({"a": [0, 1]},), ({"a": [1]}, {"a": [1, 2, 3]}, {"a": [-1, 2]})),
    (MANIFEST, "rewritten", ({"a": [0]},), ({"a": [-1]},)),
    (
        TRAINER_STATE,
        "log_history",
        (LOGGED, [*LOGGED, {"step": 0}], [LATER], [*LOGGED, LATER]),
        ([], [{}], [{"step": 1}], [{"step": -1}], None),
    ),
    # Losses are those of steps from the first to the one that was reached.
    (TRAINER_STATE, "log_history", (), ([{"step": 0, "loss": 1.0}], [{"step": 0, "loss": 1.0}, LATER])),
    (TRAINER_STATE, "log_history", (), ([{"step": 3, "loss": 1.0}], [*LOGGED, {"step": 3, "loss": 1.0}])),
    (TRAINER_STATE, "global_step", (1, 2, 3), (0, 4, -1, "2")),
    (TRAINER_STATE, "max_steps", (2, 100), (1, 0, None)),
]


@pytest.mark.parametrize(("schema", "key", "good", "bad"), EDGES)
def test_edges(schema, key, good, bad):
    whole = STATE if schema is TRAINER_STATE else {}
    for value in good:
        check_schema({**whole, key: value}, schema, "file.json")
    for value in bad:
        with pytest.raises(CtxextError, match=f'"file.json"(:| lacks) "{key}|losses of the steps until'):
            check_schema({**whole, key: value}, schema, "file.json")


@pytest.mark.parametrize("nested", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("part", ["", "text_config."])
def test_a_schedule_is_read_from_every_place(nested, part):
    def config(schedule):
        return {"text_config": {nested: schedule}} if part else {nested: schedule}

    check_config(config({"factor": 2.0, "full_attention": {"factor": 3.0}}))
    with pytest.raises(CtxextError, match=f'"{part}{nested}.factor" is "0", expected'):
        check_config(config({"factor": 0}))
    with pytest.raises(CtxextError, match=f'"{part}{nested}.full_attention.factor" is "0", expected'):
        check_config(config({"factor": 2.0, "full_attention": {"factor": 0}}))


@pytest.mark.parametrize("is_inside", [False, True])
def test_classes_beside_code_are_words(is_inside):
    """transformers takes a list there too, but this package never wrote one."""
    block = {"ctxext_code": {**CODE, "steps": [STEP]}}
    block = {"text_config": block} if is_inside else block
    check_config({**block, "auto_map": {"AutoModel": "x.Y"}})
    check_config({"auto_map": {"AutoTokenizer": ["x.Y", None]}})
    with pytest.raises(CtxextError, match=r"auto_map\.AutoModel"):
        check_config({**block, "auto_map": {"AutoModel": ["x.Y", None]}})


def test_the_line_names_the_key_alone_and_stays_a_line():
    with pytest.raises(CtxextError) as caught:
        check_schema({"num_attention_heads": ["x\n" * 5000]}, CONFIG, "config.json")
    assert '"num_attention_heads' in caught.value.message
    assert "constrained" not in caught.value.message
    assert len(caught.value.message) < 200
    with pytest.raises(CtxextError, match="valid list") as caught:
        check_schema({"architectures": "y" * 50}, CONFIG, "config.json")
    assert "y" * 50 in caught.value.message


@pytest.mark.parametrize(
    ("content", "schema", "told"),
    [
        ({"weight_map": {"w": 1}}, SHARD_INDEX, '"weight_map.w" is "1", expected a valid string.'),
        ({"model_max_length": "x"}, TOKENIZER_CONFIG, '"model_max_length" is "\'x\'", expected a valid integer.'),
        ({"num_attention_heads": "4"}, CONFIG, '"num_attention_heads" is "\'4\'", expected a valid integer.'),
        ({"no_rope_layers": [0.5]}, CONFIG, '"no_rope_layers.0" is "0.5", expected a valid integer.'),
        ({"ctxext_code": {"steps": [STEP]}}, CONFIG,
         '"ctxext_code" is "{\'steps\': [{\'method\': \'yarn\'}]}", expected rope or hidden values.'),
    ],
)  # fmt: skip
def test_the_whole_line(content, schema, told):
    with pytest.raises(CtxextError) as caught:
        check_schema(content, schema, "file.json")
    assert caught.value.message == f'"file.json": {told}'


def test_the_line_of_a_missing_key():
    with pytest.raises(CtxextError) as caught:
        check_schema({"ctxext": {"recipe": {}}}, CONFIG, "config.json")
    assert caught.value.message == '"config.json" lacks "ctxext.recipe.steps".'


@pytest.mark.parametrize(
    ("model_type", "key", "value"),
    [
        ("qwen2", "num_key_value_heads", [1]),
        ("llama4_text", "no_rope_layer_interval", None),
        ("llama4_text", "attention_chunk_size", [16]),
        ("jamba", "attn_layer_period", 0),
        ("jamba", "attn_layer_offset", "x"),
        ("bamba", "attn_layer_indices", 3),
        ("granitemoehybrid", "num_hidden_layers", None),
        ("gemma3_text", "sliding_window", "wide"),
        ("gemma4_text", "per_layer_config", {"0": {"head_dim": [8]}}),
        ("mpt", "n_heads", [4]),
        ("gpt2", "n_layer", {}),
        ("llama", "hidden_size", None),
        ("deepseek_v3", "kv_lora_rank", "x"),
        ("deepseek_v3", "qk_rope_head_dim", None),
    ],
)
def test_a_size_is_one_whatever_its_family_calls_it(model_type, key, value):
    """These were read as they stood, and ended in an exception somewhere behind."""

    def read(config):
        check_config(config, "x.json")
        check_sizes(config, "x.json")

    read({"model_type": model_type})
    with pytest.raises(CtxextError, match=r'^"(x|config)\.json": "[a-z_.0]+" '):
        read({"model_type": model_type, key: value})
