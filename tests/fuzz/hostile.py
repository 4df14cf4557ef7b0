"""Strategies: checkpoints, recipes and cards as nobody should write them, each a mutation of a whole one."""

import contextlib
import copy
import dataclasses
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from ctxext.api import METHODS
from ctxext.checkpoint.families import FAMILIES, Family
from ctxext.checkpoint.geometry import known_models
from ctxext.cli.app import FAULT, NO_MEMORY, TOO_DEEP, TRACEBACK
from ctxext.files.schemas import CONFIG, SCALING, SIZES
from ctxext.recipes.code.guards import SENTINEL

BAD = ("Traceback", "\x1b", FAULT, NO_MEMORY, TOO_DEEP)
"""What no command may say, whatever it was given."""

LOOKING = {TRACEBACK: "1"}
"""The environment: whoever reads what was found wants to see where."""

EXAMPLES = int(os.environ.get("CTXEXT_FUZZ", "0"))


def fuzzing(few: int) -> settings:
    """So many examples of a test, always the same, unless CTXEXT_FUZZ asks for others."""
    return settings(
        max_examples=EXAMPLES or few,
        derandomize=not EXAMPLES,
        deadline=None,
        database=None,
        phases=(Phase.generate,),  # What is found is read, not shrunk: that takes longer than finding it.
        suppress_health_check=list(HealthCheck),
    )


@contextlib.contextmanager
def a_folder() -> Iterator[Path]:
    """A folder for one example."""
    folder = Path(tempfile.mkdtemp())
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
HIDDEN: dict[str, Any] = {
    "rope_parameters": {"rope_type": SENTINEL, "rope_theta": 10000.0},
    "rope_scaling": {"rope_type": SENTINEL, "rope_theta": 10000.0},
    "auto_map": {"AutoModelForCausalLM": "modeling_ctxext.CtxextLlamaForCausalLM"},
    "architectures": ["CtxextLlamaForCausalLM"],
}
"""What stands beside a block for code of ours."""

CODE: dict[str, Any] = {"rope": {"rope_type": "default"}, "hidden": {"hidden_act": "silu"}}
RATIOS: dict[str, Any] = {"ratios": [1.2, 1.8], "layers": [0, 1], "schedule": "linear", "rescale": "uniform"}
CONFIGS: tuple[dict[str, Any], ...] = (
    LLAMA,
    {**LLAMA, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    {
        **LLAMA,
        "model_type": "phi3",
        "original_max_position_embeddings": 32,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
    },
    {**LLAMA, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
    {"model_type": "gemma3", "text_config": {**LLAMA, "model_type": "gemma3_text", "sliding_window": 16}},
    {**LLAMA, "model_type": "gemma3_text", "layer_types": ["sliding_attention", "full_attention"]},
    {**LLAMA, "model_type": "smollm3", "no_rope_layers": [1, 0], "no_rope_layer_interval": 2},
    {"model_type": "dbrx", "d_model": 32, "n_heads": 4, "n_layers": 2, "attn_config": {"rope_theta": 1e4}},
    {"model_type": "falcon", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "alibi": False},
    {**LLAMA, "model_type": "gpt_neox", "rotary_pct": 0.25, "rotary_emb_base": 10000},
    {**LLAMA, "model_type": "zamba2", "use_mem_rope": True, "layers_block_type": ["hybrid", "mamba"]},
    {**LLAMA, "model_type": "jais2"},
    {
        **LLAMA,
        "model_type": "qwen2",
        "dual_chunk_attention_config": {"chunk_size": 64, "local_size": 8, "original_max_position_embeddings": 64},
    },
    {**LLAMA, "model_type": "llama4_text", "attention_chunk_size": 32, "no_rope_layers": [1, 0]},
    {"model_type": "t5", "d_model": 8, "relative_attention_max_distance": 128, "relative_attention_num_buckets": 32},
    {"model_type": "mpt", "d_model": 8, "n_heads": 2, "n_layers": 1, "max_seq_len": 64, "attn_config": {"alibi": True}},
    {"model_type": "bloom", "hidden_size": 8, "n_head": 2, "n_layer": 1},
    {"model_type": "deberta-v2", "hidden_size": 8, "max_relative_positions": -1, "position_buckets": 256},
    {**LLAMA, "model_type": "deepseek_v3", "qk_rope_head_dim": 4, "qk_nope_head_dim": 4},
    {**LLAMA, **HIDDEN, "ctxext_code": {**CODE, "steps": [{"method": "mspoe", "per_prompt": True, **RATIOS}]}},
)
TABLES: tuple[tuple[dict[str, Any], str, int], ...] = (
    ({"model_type": "gpt2", "n_positions": 64, "n_ctx": 64, "n_head": 2, "n_embd": 8, "n_layer": 1}, "wpe.weight", 64),
    ({"model_type": "bert", "hidden_size": 8}, "bert.embeddings.position_embeddings.weight", 64),
    (
        {"model_type": "roberta", "hidden_size": 8, "pad_token_id": 1, "max_position_embeddings": 66},
        "embeddings.position_embeddings.weight",
        66,
    ),
    ({"model_type": "opt", "hidden_size": 8}, "model.decoder.embed_positions.weight", 66),
    ({"model_type": "bart", "d_model": 8, "is_encoder_decoder": True}, "encoder.embed_positions.weight", 66),
    ({"model_type": "led", "max_encoder_position_embeddings": 64}, "led.encoder.embed_positions.weight", 64),
    ({"model_type": "clip", "text_config": {"model_type": "clip_text_model"}}, "position_embedding.weight", 64),
    ({"model_type": "marian", "d_model": 8, "is_encoder_decoder": True}, "model.encoder.embed_positions.weight", 64),
    ({"model_type": "m2m_100", "d_model": 8, "is_encoder_decoder": True}, "w", 64),
    ({"model_type": "xglm", "d_model": 8}, "w", 64),
)
"""Configurations with a table of positions, the name of its tensor, and how many rows of 8 numbers it has."""

ADAPTER = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "base_model_name_or_path": "x/y"}
LENGTHS = ("0", "-1", "1", "63", "64", "128", "32k", "1e9", "x", "", "nan", "9" * 30, "1M", "0.5k", "\x1b[31m", "½")
TENSORS = {"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}
FILES: dict[str, Any] = {
    "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 128},
    "generation_config.json": {"max_length": 128},
    "model.safetensors.index.json": {"metadata": {"total_size": 16}, "weight_map": {"w": "model.safetensors"}},
}
RECIPE: dict[str, Any] = {
    "description": "x",
    "steps": [{"method": "yarn", "factor": 4.0, "beta_fast": 32}, {"method": "abf", "theta": 1e6}],
}
CARD: dict[str, Any] = {"license": "mit", "language": ["en"], "tags": ["tiny"], "datasets": "x"}

ODD = st.one_of(
    st.sampled_from(
        [None, True, False, 0, -1, 1, 2, 3, 7, 1.5, -0.5, 1e308, 10**9, 10**30, -(10**30), float("nan"), float("inf")]
    ),
    st.sampled_from(
        ["", "x", "yarn", "4", "default", "\x1b[31m", "[/x]", "../../etc/passwd", "a\nb", "\u202e", "é" * 9]
    ),
    st.sampled_from([[], [1], [[]], ["x"], [None], {}, {"x": 1}, {"rope_type": 7}, [1.0] * 5000, {"": {}}]),
    st.integers(),
    st.floats(),
    st.text(max_size=9),
)
DEEP = st.integers(1, 500).map(lambda depth: json.loads("[" * depth + "]" * depth))
LONG = st.sampled_from(["x" * 100_000, "9" * 300, [1] * 20_000, ["full_attention"] * 20_000, [{}] * 3000])
SCHEDULE = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["linear", "dynamic", "yarn", "longrope", "llama3", "default", "proportional"])},
    optional={
        key: st.sampled_from([1, 4.0, 2.0, 128, 1e30, 1e-9, 0.5, [1.0] * 4, None])
        for key in SCALING.fields
        if key != "rope_type"
    },
)
ODDER = st.one_of(ODD, ODD, DEEP, LONG, SCHEDULE, SCHEDULE.map(lambda each: {"full_attention": each}))
"""Values for keys whose place in a configuration is known: nested, long, and schedules that nearly make sense."""

TEXTS = (
    "",
    "[]",
    "{",
    "[" * 100_000,
    '{"a":' * 3000 + "1" + "}" * 3000,
    '{"model_type": "llama", "model_type": "gpt2"}',
    '{"model_type": "\\ud800"}',
    '{"model_type": NaN}',
    '{"hidden_size": ' + "9" * 5000 + "}",
    "\ufeff{}",
    "null",
    '"x"',
)


def places(tree: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a tree of dicts and lists."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [here] * bool(here) + [place for key, value in items for place in places(value, (*here, key))]


@st.composite
def mutated(draw: Any, tree: Any) -> Any:
    """A tree with one to three values replaced, taken away or added."""
    tree = json.loads(json.dumps(tree))
    for _ in range(draw(st.integers(1, 3))):
        paths = places(tree)
        if not paths:
            break
        *way, last = draw(st.sampled_from(paths))
        place = tree
        for key in way:
            place = place[key]
        if draw(st.integers(0, 5)):
            place[last] = copy.deepcopy(draw(ODD))
        else:
            del place[last]
    return tree


def known_configs() -> list[dict[str, Any]]:
    """Configurations that look like the published models of the table."""
    configs = []
    for known in known_models():
        facts = {key: value[0] if isinstance(value, list) else value for key, value in known.facts.items()}
        schedule = {key: facts.pop(key) for key in ("rope_type", "factor") if key in facts}
        config = {**LLAMA, "model_type": known.model_types[0], **facts}
        configs.append({**config, "rope_parameters": {"rope_theta": config["rope_theta"], **schedule}})
    return configs


def put(config: dict[str, Any], key: str, value: Any) -> None:
    """Set a key whose name may be dotted."""
    *way, last = key.split(".")
    for part in way:
        config[part] = config[part] if isinstance(config.get(part), dict) else {}
        config = config[part]
    config[last] = value


OTHER_KEYS = ("quantization_config", "is_encoder_decoder", "pad_token_id", "eos_token_id", "hidden_act", "dtype")
OTHER_KEYS += ("attention_k_eq_v", "multi_query", "position_embedding_type", "dual_chunk_attention_config", "mem_len")
OTHER_KEYS += ("max_relative_positions", "position_buckets", "attn_config.alibi_bias_max", "n_ctx", "num_labels")
ALL_KEYS = sorted({*CONFIG.fields, *SIZES.fields, *SCALING.fields, *OTHER_KEYS})


def keys_of(family: Family) -> list[str]:
    """What a family reads under names of its own."""
    rules = [family.layers.get(rule) for rule in ("key", "every", "offset", "indices", "letters")]
    own = [family.length_key, family.theta_key, *family.aliases.values(), *family.defaults, "rope_scaling"]
    return [*own, "rope_parameters", "layer_types", *(rule for rule in rules if rule)]


@st.composite
def family_configs(draw: Any) -> dict[str, Any]:
    """A configuration of any family, under its own names, with one to three keys as nobody should write them."""
    family = FAMILIES[draw(st.sampled_from(sorted(FAMILIES)))]
    config: dict[str, Any] = {**LLAMA, "model_type": family.model_type}
    for key in ("architectures", "rope_scaling", *(["rope_parameters"] * draw(st.booleans()))):
        del config[key]
    for key, own in family.aliases.items():
        if key in config:
            put(config, own, config.pop(key))
    for _ in range(draw(st.integers(1, 3))):
        put(config, draw(st.sampled_from(draw(st.sampled_from([ALL_KEYS, keys_of(family)])))), draw(ODDER))
    if family.text_config and draw(st.booleans()):
        return {"model_type": family.model_type, family.text_config: config}
    return config


@st.composite
def recipes(draw: Any) -> dict[str, Any]:
    """A recipe of any methods, its numbers as nobody should write them."""
    steps = []
    for method in draw(st.lists(st.sampled_from(METHODS), min_size=1, max_size=3)):
        names = [field.name for field in dataclasses.fields(method)]
        chosen = draw(st.lists(st.sampled_from(names), max_size=3)) if names else []
        steps.append({"method": method.name, "factor": 4, **{name: draw(st.one_of(ODD, LONG)) for name in chosen}})
        if "factor" not in names:
            del steps[-1]["factor"]
    return {"steps": steps}


@st.composite
def tables(draw: Any) -> dict[str, bytes]:
    """The files of a checkpoint with a table of positions, its numbers as nobody should write them."""
    config, name, rows = draw(st.sampled_from(TABLES))
    config = {"max_position_embeddings": 64, "vocab_size": 9, **config}
    header = {name: {"dtype": "F32", "shape": [rows, 8], "data_offsets": [0, 32 * rows]}}
    if draw(st.booleans()):
        config = draw(mutated(config))
    else:
        header[name] = draw(mutated(header[name]))
    return {
        "config.json": json.dumps(config).encode(),
        "model.safetensors": weights(header, 32 * rows),
        "tokenizer_config.json": json.dumps({"model_max_length": 64}).encode(),
    }


@st.composite
def checkpoints(draw: Any, *, large: bool = True) -> dict[str, bytes]:
    """The files of a checkpoint, one of them broken; that it is a published model's only where nothing loads it."""
    config = draw(st.sampled_from((*CONFIGS, *(known_configs() if large else ()))))
    files = {"config.json": config, **FILES}
    texts = {name: json.dumps(content).encode() for name, content in files.items()}
    texts["model.safetensors"] = weights(TENSORS)
    texts["README.md"] = b"---\nlicense: mit\n---\n# x\n"
    kind = draw(st.sampled_from(["config", "config", "config", "file", "text", "header", "card", "bytes", "notes"]))
    if kind == "config":
        texts["config.json"] = json.dumps(draw(mutated(config))).encode()
    elif kind == "file":
        name = draw(st.sampled_from(sorted(FILES)))
        texts[name] = json.dumps(draw(mutated(FILES[name]))).encode()
    elif kind == "text":
        texts[draw(st.sampled_from(sorted(files)))] = draw(st.sampled_from(TEXTS)).encode("utf-8", "surrogatepass")
    elif kind == "header":
        texts["model.safetensors"] = weights(draw(mutated(TENSORS)))
    elif kind == "card":
        texts["README.md"] = b"---\n" + json.dumps(draw(mutated(CARD))).encode() + b"\n---\n"
    elif kind == "notes":
        noted = {"version": "1", "source": "x", "trained_length": 32, "source_theta": 1e4, "recipe": RECIPE}
        texts["config.json"] = json.dumps({**config, "ctxext": draw(mutated(noted))}).encode()
    else:
        name = draw(st.sampled_from(sorted(texts)))
        cut = draw(st.integers(0, len(texts[name])))
        texts[name] = texts[name][:cut] + draw(st.binary(max_size=9)) + texts[name][cut:][draw(st.integers(0, 9)) :]
    return texts


def weights(header: Any, size: int = 16) -> bytes:
    """A safetensors file of so many bytes, zeros, with this header."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(size)


def write(folder: Path, files: dict[str, bytes]) -> None:
    """Make the folder."""
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
