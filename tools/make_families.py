"""Write src/ctxext/checkpoint/families.json from the installed transformers.

    python tools/make_families.py

`BY_HAND` contains the facts that the classes of transformers do not. Entries that are not read from these classes stay
unchanged: the rope types that take effect (measured by tools/measure_rope_types.py), the facts of transformers 4.57,
which reads checkpoints but has no new families, and families that transformers 5 removed.
"""

import inspect
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "src" / "ctxext" / "checkpoint/families.json"

KEYS = (
    "rope_theta",
    "max_position_embeddings",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "num_hidden_layers",
    "head_dim",
    "partial_rotary_factor",
    "attention_chunk_size",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "qk_rope_head_dim",
    "kv_lora_rank",
    "alibi",
    "multi_query",
    "new_decoder_architecture",
    "position_embedding_type",
    "use_mem_rope",
)
PERIOD_KEYS = (
    "sliding_window_pattern",
    "global_attn_every_n_layers",
    "full_attention_interval",
    "no_rope_layer_interval",
    "layer_group_size",
)
REFUSALS = (TypeError, ValueError, KeyError, IndexError, RuntimeError, StrictDataclassError)
KEPT = ("rope_types", "rope_types_4x", "defaults_4x")
NO_LONGER = "transformers 5 does not support it"
DEPTHS = (8, 9, 24, 25, 49)

# Kinds of the model types that are not causal language models, for the message that refuses them.
KINDS = (
    ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "a sequence-to-sequence model"),
    ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "a multimodal model, which AutoModelForImageTextToText loads"),
    ("MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", "a multimodal model"),
    ("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", "a speech model"),
    ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", "a masked language model"),
    ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", "an image model"),
)

POSITIONS = {
    "learned": """
        bart bert bert-generation big_bird bigbird_pegasus biogpt blenderbot blenderbot-small camembert data2vec-text
        electra ernie git gpt-sw3 gpt2 gpt_bigcode gpt_neo mbart megatron-bert mvp openai-gpt opt plbart prophetnet
        qdqbert reformer rembert roberta roberta-prelayernorm roc_bert trocr whisper xlm xlm-prophetnet xlm-roberta
        xlm-roberta-xl xmod
    """,
    "sinusoidal": "ctrl marian musicgen musicgen_melody pegasus speech_to_text_2 xglm",
    "alibi": "bloom mpt",
    "relative": "cpmant inkling2_loop_text inkling2_text inkling_text mega transfo-xl",
    "memory": "xlnet",
    "none": "falcon_mamba jamba kimi_linear mamba mamba2 nemotron_h rwkv xlstm zamba",
}

ALL_TYPES = ["default", "linear", "dynamic", "yarn", "longrope", "llama3"]
NO_FULL = "its full-attention layers have no position embedding, and its sliding layers keep their own"
NEW_NESTED: dict[str, Any] = {"nested_rope": True, "rope_scaling": False}
OWN_SINUSOIDS = "its attention computes the sinusoids itself, and no key of config.json changes their frequencies"
MODERNBERT = {**NEW_NESTED, "theta_key": "global_rope_theta", "local_theta_key": "local_rope_theta"}
DRAFTER = "it is a draft model that reads the states of another model"

NOT_ROPE = {"position_embedding_type": ["rope", "transformers 4.57 then builds no rotary embedding, and 5 builds one"]}
LONG_CONTEXT = "transformers 4.57 then raises the base 8-fold, and 5 does not; write the base and set it to false"

BY_HAND: dict[str, dict[str, Any]] = {
    "afmoe": {"rotated": "sliding", "reason": NO_FULL},
    "beam": {**NEW_NESTED, "rotated": "sliding", "reason": NO_FULL},
    "bloom": {
        "length_key": "seq_length",
        "aliases": {
            "hidden_size": "n_embed",
            "max_position_embeddings": "seq_length",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
        # BLOOM (2211.05100); the class has no length.
        "defaults": {
            "hidden_size": 64,
            "max_position_embeddings": 2048,
            "num_attention_heads": 8,
            "num_hidden_layers": 2,
        },
    },
    "blt": {"reason": "it consists of four transformers over bytes and patches, each with separate positions"},
    "codegen": {"reason": OWN_SINUSOIDS, "scalable": False},
    "cohere2": {"rotated": "sliding", "reason": NO_FULL},
    "cohere2_moe": {"rotated": "sliding", "reason": NO_FULL},
    "cohere_compass_text": NEW_NESTED,
    "dbrx": {"aliases": {"num_key_value_heads": "attn_config.kv_n_heads", "rope_theta": "attn_config.rope_theta"}},
    "deepseek_v4": {
        **NEW_NESTED,
        "full_types": ["compress"],
        "sliding_types": ["main"],
        "reason": "its compressed attention shares one rotated key with its compressor, which is untested",
    },
    "dots3_note_text": {
        **NEW_NESTED,
        "full_types": ["indexed_attention"],
        "local_theta_key": "swa_rope_theta",
        "reads_top_theta": True,
    },
    "dory": {
        **NEW_NESTED,
        # Its config.json counts attention and MLP as two layers, and its class halves the numbers of layers.
        "layers": {"period": ["sliding_attention", "mlp"] * 3 + ["full_attention", "mlp"]},
        "defaults": {"n_input_layers": 16, "n_output_layers": 16, "n_recurrent_loops": 2},
        "reason": "it counts attention and MLP as two layers and runs some of them several times, which is untested",
    },
    "exaone": {"aliases": {"num_hidden_layers": "num_layers"}},  # From the code of its first checkpoints.
    "exaone4": {"rotated": "unless_window"},
    "exaone_moe": {"rotated": "sliding", "reason": NO_FULL},  # Its window is required.
    "falcon": {
        "explicit_head_dim": False,
        "aliases": {"num_key_value_heads": "num_kv_heads"},
        "switches": {"alibi": [False, "alibi"]},
    },
    "flint": {"rotated": "sliding", "reason": NO_FULL},
    "gemma3_text": {"nested_rope": True, "local_theta_key": "rope_local_base_freq"},
    "gemma3n_text": {"nested_rope": True, "local_theta_key": "rope_local_base_freq"},
    "gemma4_assistant": {"reason": DRAFTER},
    "gemma4_text": {**NEW_NESTED, "plain_type": "proportional", "defaults": {"global_head_dim": 512}},
    "gemma4_unified_assistant": {"reason": DRAFTER},
    "gemma4_unified_text": {**NEW_NESTED, "plain_type": "proportional", "defaults": {"global_head_dim": 512}},
    "gpt_neo": {
        "local_layers": {"keys": ["attention_types", "attention_layers"], "window": "window_size", "default": 256}
    },
    "gpt_neox": {"theta_key": "rotary_emb_base", "partial_key": "rotary_pct"},
    "gpt_neox_japanese": {"theta_key": "rotary_emb_base", "partial_key": "rotary_pct"},
    "gptj": {"reason": OWN_SINUSOIDS, "scalable": False},
    "granitemoe": {"disputed": NOT_ROPE},
    "granitemoehybrid": {"switches": {"position_embedding_type": ["rope", "none"]}},
    "granitemoeshared": {"disputed": NOT_ROPE},
    "granite_swa": {"rotated": "layer_theta_key", "layer_theta_key": "layer_rope_theta"},
    "granitemoe_swa": {"rotated": "layer_theta_key", "layer_theta_key": "layer_rope_theta"},
    "kolibri1": {"rotated": "sliding", "reason": NO_FULL},  # It fails without its window.
    "laguna": NEW_NESTED,
    "lfm3": {**NEW_NESTED, "plain_type": "proportional"},
    "lara_mini": {"rotated": "sliding", "reason": NO_FULL},
    "llama4_text": {"rotated": "no_rope_layers"},
    "longcat_flash": {
        "aliases": {"num_hidden_layers": "num_layers"},
        "defaults": {"num_hidden_layers": 28, "layers_per_block": 2},
    },
    "mellum": NEW_NESTED,
    "mimo_v2_flash": {**NEW_NESTED, "local_theta_key": "swa_rope_theta"},
    "jamba": {
        "layers": {"every": "attn_layer_period", "offset": "attn_layer_offset", "otherwise": "linear_attention"},
        "defaults": {"attn_layer_period": 8, "attn_layer_offset": 4},
    },
    "kimi_linear": {
        "layers": {"indices": "linear_attn_config.full_attn_layers", "first": 1, "otherwise": "linear_attention"}
    },
    "mllama": {
        "layers": {"indices": "cross_attention_layers", "listed": "cross_attention", "otherwise": "full_attention"},
        "defaults": {"cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38]},
    },
    "mpt": {
        "length_key": "max_seq_len",
        "aliases": {
            "hidden_size": "d_model",
            "max_position_embeddings": "max_seq_len",
            "num_attention_heads": "n_heads",
            "num_hidden_layers": "n_layers",
        },
        "defaults": {
            "hidden_size": 2048,
            "max_position_embeddings": 2048,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
        },
    },
    "nemotron_h": {"layers": {"letters": "hybrid_override_pattern"}, "aliases": {"layer_types": "layers_block_type"}},
    "minimax_m2": {"rotary_dim_key": "rotary_dim"},
    "mllama_text_model": {"explicit_default": True},
    "modernbert": MODERNBERT,
    "modernbert-decoder": {
        **MODERNBERT,
        "note": "transformers 4.57 gives the sliding layers the base of the others",
    },
    "olmo": {"rope_scaling_keys": {"linear": ["type", "factor"], "dynamic": ["type", "factor"]}},
    "olmo2": {"rope_scaling_keys": {"linear": ["type", "factor"], "dynamic": ["type", "factor"]}},
    "olmo3": {"nested_rope": True},
    "olmo_hybrid": {"null_disables": True},
    "paligemma": {"bidirectional": "assumed"},
    "phi3": {"rope_scaling_keys": {"longrope": ["type", "short_factor", "long_factor"]}},
    "phi4_multimodal": {"rope_scaling_keys": {"longrope": ["type", "short_factor", "long_factor"]}},
    "phimoe": {"required_keys": ["original_max_position_embeddings", "short_mscale", "long_mscale"]},
    "ministral3": {"required_keys": ["original_max_position_embeddings"]},
    "recurrent_gemma": {"reason": "all its attention is local, so nothing limits its context but the window"},
    "roformer": {"reason": OWN_SINUSOIDS, "scalable": False},
    "smollm3": {"rotated": "no_rope_layers"},
    "zamba": {
        "layers": {
            "every": "attn_layer_period",
            "offset": "attn_layer_offset",
            "otherwise": "linear_attention",
            "prefix": ["linear_attention", "linear_attention", "hybrid"],
        },
        "aliases": {"head_dim": "attention_head_dim", "layer_types": "layers_block_type"},
        "defaults": {"attn_layer_period": 6, "attn_layer_offset": 4, "head_dim_multiple": 2},
    },
    "xlnet": {
        "length_key": "mem_len",
        "aliases": {
            "hidden_size": "d_model",
            "max_position_embeddings": "mem_len",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
        "defaults": {
            "bi_data": False,
            "clamp_len": -1,
            "max_position_embeddings": 512,
            "reuse_len": None,
            "same_length": False,
            "use_mems_eval": True,
        },
        "supported_values": {
            "bi_data": [[False], "each half of a batch then has distances of its own direction"],
            "clamp_len": [[-1, 0], "farther states of the memory then share one distance"],
            "reuse_len": [[None, 0], "the memory then has gaps, as it keeps only the first states of each segment"],
            "same_length": [[False], "no query then reads more states than before"],
            "use_mems_eval": [[True], "it keeps no states of earlier segments"],
        },
    },
    "zamba2": {
        "defaults": {"head_dim_multiple": 2, "hybrid_layer_ids": [6, 12, 18, 24, 30, 36, 42, 47, 51]},
        "layers": {"indices": "hybrid_layer_ids", "otherwise": "linear_attention"},
        "switches": {"use_mem_rope": [True, "none"]},
        "disputed": {"use_long_context": [False, LONG_CONTEXT]},
        "lengths_by_key": {"use_long_context": 16384},
    },
    "zaya": {**NEW_NESTED, "full_types": ["hybrid"], "sliding_types": ["hybrid_sliding"]},
}


T5_KEYS = {
    "head_dim": "d_kv",
    "hidden_size": "d_model",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "num_heads",
    "num_hidden_layers": "num_layers",
}
# Trained lengths for a config.json without n_positions: T5 (1910.10683, 3.1.2), mT5 (2010.11934, 3.2), LongT5
# (2112.07916).
T5_LENGTHS = {"longt5": 4096, "mt5": 1024, "switch_transformers": 512, "t5": 512, "umt5": 512}
DEBERTA: dict[str, Any] = {
    "positions": "learned",
    "defaults": {
        "max_position_embeddings": 512,
        "max_relative_positions": -1,
        "position_biased_input": True,
        "position_buckets": -1,
        "relative_attention": False,
    },
    "supported_values": {
        "relative_attention": [[True], "its only positions are those of an absolute table"],
        "position_biased_input": [[False], "methods do not extend its absolute table, which it has besides distances"],
    },
}
# Encoders and encoder-decoders that have a method or a documented encoding of positions.
NOT_CAUSAL: dict[str, dict[str, Any]] = {
    "albert": {"positions": "learned"},
    "clip": {"positions": "learned", "text_config": "text_config", "text_type": "clip_text_model"},
    "clip_text_model": {"positions": "learned"},
    "distilbert": {
        "positions": "learned",
        "aliases": {"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
    },
    "led": {
        "positions": "learned",
        "length_key": "max_encoder_position_embeddings",
        "aliases": {"num_attention_heads": "encoder_attention_heads", "num_hidden_layers": "encoder_layers"},
    },
    "longformer": {"positions": "learned"},
    "m2m_100": {"positions": "sinusoidal"},
    "deberta": DEBERTA,
    "deberta-v2": {**DEBERTA, "positions_by_key": {"position_buckets": "buckets"}},
    **{
        name: {
            "positions": "buckets",
            "length_key": "n_positions",
            "aliases": T5_KEYS,
            "defaults": {
                "max_position_embeddings": length,
                "relative_attention_max_distance": 128,
                "relative_attention_num_buckets": 32,
            },
        }
        for name, length in T5_LENGTHS.items()
    },
}


# Multimodal models with a schedule only in their text part, which AutoModelForCausalLM does not load.
WHOLE = "AutoModelForImageTextToText"
MULTIMODAL = """
    aria glm4v glm4v_moe idefics3 internvl kimi_k25 lfm2_vl llava mistral3 ovis2 paligemma qwen2_5_omni_thinker
    qwen2_5_vl qwen2_vl qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe smolvlm vipllava
""".split()  # noqa: SIM905


# Language models that transformers loads for generation only inside a multimodal model.
INNER: dict[str, dict[str, Any]] = {
    # With a plain schedule the class rotates the whole head, its attention only the shared part: it cannot run.
    "mistral4": {
        "plain_type": "linear",
        "required_keys": ["original_max_position_embeddings", "llama_4_scaling_beta"],
    },
}


SCALES_IN_SOME = ("deepseek_v2",)  # Older releases of transformers 5 do not scale its scores.
ONE_TEXT = ("ovis2",)  # transformers 4.57 builds a Qwen2 there, whatever the type.


# Encoders with a rotary embedding that reads a schedule.
MASKED = "AutoModelForMaskedLM"
ENCODERS = ("eurobert", "gte", "modernbert", "nomic_bert")


def mapping(name: str) -> dict[str, Any]:
    """Return one of transformers' tables from model type to class name."""
    return dict(getattr(modeling_auto, name, {}))


def causal_types() -> list[str]:
    """Return the model types that AutoModelForCausalLM loads and that have a configuration in this version."""
    return sorted(name for name in mapping("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES") if name in CONFIG_MAPPING_NAMES)


def families_of(names: Iterable[str], loader: str) -> dict[str, Any]:
    """Return the families of these names that exist in this version, with the Auto class that loads them."""
    return {name: {**family(name), "loader": loader} for name in names if name in CONFIG_MAPPING_NAMES}


def config_of(model_type: str, **values: Any) -> Any:
    """Return the configuration of a model type with its class defaults, except for the given values."""
    return CONFIG_MAPPING[model_type](**values)


def text_layout(model_type: str) -> dict[str, Any]:
    """Return the layout of the language model's configuration in a multimodal one; empty for other models."""
    kind = CONFIG_MAPPING[model_type]
    key, text = text_part(kind())
    if key is None:
        return {}
    found: dict[str, Any] = {"text_config": key, "text_type": text.model_type}
    if kind.sub_configs[key] is AutoConfig and model_type not in ONE_TEXT:
        found["any_text"] = True
    if text_part(kind.from_dict({"max_position_embeddings": 777}))[1].max_position_embeddings == 777:
        found["flat_text"] = True
    return found


def text_part(config: Any) -> tuple[str | None, Any]:
    """Return the key that the language model's configuration is nested under, if any, and the configuration."""
    text = config.get_text_config(decoder=True)
    if text is config:
        return None, config
    return next((key for key in config.sub_configs if getattr(config, key, None) is text), None), text


def value_of(config: Any, key: str) -> Any:
    """Return the value of a key; None if it is not a plain value for the whole model."""
    fields = config.to_dict()
    value = fields[key] if key in fields else getattr(config, key, None)
    return value if isinstance(value, int | float | str | bool | type(None)) else None


def schedule(config: Any, names: list[str]) -> dict[str, Any]:
    """Return the rope dict that layers of one of the given types read."""
    whole = value_or_dict(config, "rope_parameters") or value_or_dict(config, "rope_scaling")
    nested = next((whole[name] for name in names if isinstance(whole.get(name), dict)), None)
    return nested if nested is not None else ({} if any(isinstance(v, dict) for v in whole.values()) else whole)


def value_or_dict(config: Any, key: str) -> dict[str, Any]:
    """Return a dict attribute; empty if there is none."""
    value = getattr(config, key, None)
    return dict(value) if isinstance(value, dict) else {}


def defaults_of(kind: type, by_hand: dict[str, Any]) -> dict[str, Any]:
    """Return the class defaults of the keys that families.py reads, without values derived from other keys."""
    config = kind()
    found = {key: value_of(config, key) for key in (*KEYS, *PERIOD_KEYS)}
    full = schedule(config, by_hand.get("full_types", ["full_attention"]))
    theta_key = by_hand.get("theta_key", "rope_theta")
    found["rope_theta"] = full.get("rope_theta") or value_of(config, theta_key) or value_of(config, "rope_theta")
    found["partial_rotary_factor"] = full.get("partial_rotary_factor") or value_of(
        config, by_hand.get("partial_key", "partial_rotary_factor")
    )
    sliding = schedule(config, by_hand.get("sliding_types", ["sliding_attention"]))
    if by_hand.get("nested_rope"):
        key = by_hand.get("local_theta_key", "")
        found["local_partial_rotary_factor"] = sliding.get("partial_rotary_factor")
        found["local_rope_theta"] = sliding.get("rope_theta") or value_of(config, key) or found["rope_theta"]
    heads, hidden = value_of(config, "num_attention_heads"), value_of(config, "hidden_size")
    for key, changed, size in (
        ("num_key_value_heads", "num_attention_heads", heads),
        ("head_dim", "hidden_size", hidden),
    ):
        if isinstance(size, int) and is_derived(kind, key, changed, size):
            found.pop(key)
    return {key: value for key, value in found.items() if value is not None}


def is_derived(kind: type, key: str, changed: str, size: int) -> bool:
    """Return whether a class computes `key` from `changed`: doubling `changed` changes the value of `key`."""
    try:
        return bool(value_of(kind(), key) != value_of(kind(**{changed: 2 * size}), key))
    except REFUSALS:
        return False


def types_at(kind: type, depth: int, **values: Any) -> list[str] | None:
    """Return the layer types of a model with `depth` layers; None if the class gives none."""
    try:
        config = kind(num_hidden_layers=depth, **values)
    except REFUSALS:
        return None
    found = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    return list(found) if found and len(found) == depth else None


def layers_of(kind: type, source: str) -> dict[str, Any]:
    """Return the rule for the layer types of a class: a prefix, a repeated pattern, and a last layer."""
    seen = {depth: types_at(kind, depth) for depth in DEPTHS}
    fields = kind().to_dict()
    if "attn_layer_indices" in fields:
        return {"indices": "attn_layer_indices", "otherwise": "linear_attention"}
    if "full_attn_idxs" in source_of(kind):
        return {"indices": "full_attn_idxs", "otherwise": "conv", "absent": "full_attention"}
    if "max_window_layers" in fields:
        return {"window": "above"}
    if any(types is None for types in seen.values()):
        return {"window": "all"} if "sliding_window" in fields and "sliding_window" in source else {}
    rule = next((rule for rule in rules(seen) if all(tile(rule, depth) == seen[depth] for depth in DEPTHS)), None)
    if rule is None:
        return {}
    for key in PERIOD_KEYS:
        if any(types_at(kind, 25, **{key: length}) not in (None, seen[25]) for length in (3, 5)):
            rule["key"] = key
    plain = {"period": ["full_attention"]}
    return {} if rule == plain else rule


def rules(seen: dict[int, Any]) -> Any:
    """Yield candidate rules for layer types, the simplest first."""
    longest = seen[max(seen)]
    lasts = {types[-1] for types in seen.values()}
    for last in (None, *(sorted(lasts) if len(lasts) == 1 else [])):
        for prefix in range(4):
            for period in range(1, 9):
                rule: dict[str, Any] = {"period": longest[prefix : prefix + period]}
                if prefix:
                    rule["prefix"] = longest[:prefix]
                if last:
                    rule["last"] = last
                yield rule


def tile(rule: dict[str, Any], depth: int) -> list[str]:
    """Return the layer types of a model with `depth` layers by a rule."""
    prefix, period = rule.get("prefix", []), rule["period"]
    types = [*prefix, *(period[index % len(period)] for index in range(depth))][:depth]
    return [*types[:-1], rule["last"]] if "last" in rule else types


def family(model_type: str) -> dict[str, Any]:
    """Return the entry of one family: everything that differs from the usual."""
    for positions, names in POSITIONS.items():
        if model_type in names.split():
            return {"positions": positions, **BY_HAND.get(model_type, {})}
    if "assistant" in model_type:
        return dict(BY_HAND[model_type])
    key, text = text_part(config_of(model_type))
    kind, by_hand = type(text), {**(BY_HAND | INNER).get(text.model_type, {}), **BY_HAND.get(model_type, {})}
    source = modeling_source(kind)
    if not re.search(r"[Rr]otary|inv_freq", source) and model_type not in ("internlm3", "iquestcoder"):
        raise SystemExit(f"{model_type} has no rotary embedding: specify its positions in POSITIONS")
    defaults = {**defaults_of(kind, by_hand), **by_hand.get("defaults", {})}
    layout = text_layout(model_type) if key else {}
    found: dict[str, Any] = {"layers": layers_of(kind, source), **by_hand, **layout, "defaults": defaults}
    aliases = {
        name: alias for name, alias in getattr(kind, "attribute_map", {}).items() if name in (*KEYS, "layer_types")
    }
    found["aliases"] = {**aliases, **by_hand.get("aliases", {})}
    if "max_position_embeddings" in aliases:
        found["length_key"] = aliases["max_position_embeddings"]
    if "qk_rope_head_dim" in defaults:
        found["shared_rotary_key"] = True
    if "mscale_all_dim" in source and model_type not in SCALES_IN_SOME:
        found["scales_scores"] = True
    if (
        not by_hand.get("nested_rope")
        and by_hand.get("rotated", "") not in ("sliding", "unless_window")
        and has_windows(found["layers"])
    ):
        found["sliding_follows"] = True
    if model_type.startswith("gemma"):
        found.setdefault("bidirectional", "read")
    default = schedule(text, by_hand.get("full_types", ["full_attention"]))
    if default.get("rope_type", "default") not in ("default", "proportional"):
        found["explicit_default"] = True
        unread = ("type", "max_position_embeddings")
        found["default_schedule"] = {key: value for key, value in default.items() if key not in unread}
        defaults["rope_theta"] = getattr(kind, "default_theta", None) or defaults["rope_theta"]
    return {name: value for name, value in found.items() if value not in (None, {}, [])}


def has_windows(rule: dict[str, Any]) -> bool:
    """Return whether a family can have both sliding and full-attention layers."""
    return rule.get("window") == "above" or "sliding_attention" in rule.get("period", ())


def source_of(kind: type) -> str:
    """Return the source of a configuration class."""
    return inspect.getsource(kind)


def modeling_source(kind: type) -> str:
    """Return the source of the modeling file beside a configuration, or of the class of another family (EXAONE)."""
    folder = Path(inspect.getfile(kind)).parent
    files = sorted(folder.glob("modeling_*.py"))
    if not files and (name := mapping("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES").get(kind.model_type)):
        files = [Path(inspect.getfile(getattr(transformers, name)))]
    return "".join(file.read_text(encoding="utf-8") for file in files)


def others() -> dict[str, str]:
    """Return the kind of each remaining model type that AutoModelForCausalLM does not load."""
    causal = set(mapping("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"))
    found = {}
    for model_type in sorted(set(CONFIG_MAPPING_NAMES) - causal - {*NOT_CAUSAL, *MULTIMODAL, *ENCODERS}):
        kind = next((words for table, words in KINDS if model_type in mapping(table)), "something else")
        found[model_type] = kind
    return found


def main() -> None:
    """Write the table."""
    made = {model_type: family(model_type) for model_type in causal_types()}
    made |= families_of(MULTIMODAL, WHOLE) | families_of(ENCODERS, MASKED)
    table = json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.is_file() else {"families": {}}
    inner = {name: {**family(name), "rope_types_4x": []} for name in INNER}
    save({"families": with_newer(table["families"], {**made, **NOT_CAUSAL}), "inner": inner, "others": others()})
    print(f"{TABLE.name}: {len(made)} families")


def save(table: dict[str, Any]) -> None:
    """Write the table with one value per line."""
    text = json.dumps(table, indent=1, sort_keys=True)
    TABLE.write_text(re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", flat, text) + "\n", encoding="utf-8")


def flat(match: re.Match[str]) -> str:
    """Return a matched list on one line."""
    return "[" + re.sub(r"\s+", " ", match.group(1)) + "]"


def with_newer(families: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
    """Merge the families of transformers' classes with the table.

    Args:
        families: The families in the table.
        made: The families from the classes.
    """
    found = {}
    for name, entry in made.items():
        is_new = name not in families and entry.get("positions", "rotary") == "rotary"
        known = {"rope_types_4x": []} if is_new else families.get(name, {})
        found[name] = {**entry, **{key: known[key] for key in KEPT if key in known}}
    for name, entry in families.items():
        if name not in found:
            found[name] = {**entry, "reason": entry.get("reason") or NO_LONGER}
    return found


if __name__ == "__main__":
    main()
