"""Tiny random checkpoints of every rotary causal language model family that transformers has.

Two layers, width 32, four heads of 16 dimensions on two key heads, 128 tokens, 64 positions. Everything that differs
between families is data: `SIZES` holds one small value for each configuration key that any family uses, and
`OVERRIDES` what a single family needs beyond that. A hybrid family gets one layer of its other kind and one
full-attention layer, so that a change of its rotary embedding is always visible in its logits.
"""

import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

NUM_LAYERS = 2
MAX_POSITIONS = 64
VOCABULARY = 128

# Every model type whose text model rotates queries and keys, in any supported version of transformers.
ROTARY = """
    afmoe apertus apertus1p5_text arcee aria_text axk1 axk2 bailing_hybrid bamba beam bitnet blt codegen cohere
    cohere2 cohere2_moe cohere_compass_text cwm dbrx deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 diffllama doge
    dory dots1 dots3_note dots3_note_text emu3 ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe falcon falcon_h1
    flex_olmo flint fuyu gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text gemma4 gemma4_assistant gemma4_text
    gemma4_unified gemma4_unified_assistant gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa got_ocr2
    gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_swa granitemoe granitemoe_swa granitemoehybrid
    granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax internlm3 iquestcoder
    jais2 jetmoe kolibri1 laguna lara_mini lfm2 lfm2_moe lfm3 llama llama4 llama4_text longcat_flash mellum
    mimo_v2_flash minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral mllama
    modernbert-decoder moshi moss_transcribe_diarize nanochat nemotron olmo olmo2 olmo3 olmo_hybrid olmoe persimmon
    phi phi3 phi4_multimodal phimoe qwen2 qwen2_moe qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text
    qwen3_moe qwen3_next qwen4_exp qwen4_exp_text recurrent_gemma roformer sarvam_mla sarvam_moe seed_oss smollm3
    solar_open stablelm starcoder2 vaultgemma youtu zamba2 zaya
""".split()  # noqa: SIM905

# Families that cannot be built tiny, and why.
NOT_BUILT: dict[str, str] = {
    "gemma3n": "its vision tower needs the timm library; gemma3n_text is the same text model",
    "gemma4_assistant": "a drafting head, which reads the states of another model",
    "gemma4_unified_assistant": "a drafting head, which reads the states of another model",
}

# One small value for every key; a family takes those that its configuration has.
SIZES: dict[str, Any] = {
    "attention_chunk_size": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "expert_ffn_hidden_size": 32,
    "ffn_dim": 64,
    "ffn_hidden_size": 64,
    "first_k_dense_replace": 1,
    "head_dim": 16,
    "hidden_size": 32,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 64,
    "intermediate_size": 64,
    "intermediate_size_mlp": 64,
    "kv_channels": 16,
    "kv_lora_rank": 16,
    "linear_head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_num_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_value_head_dim": 16,
    "mamba_chunk_size": 16,
    "mamba_d_head": 16,
    "mamba_d_ssm": 64,
    "mamba_d_state": 16,
    "mamba_n_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "max_seq_len": MAX_POSITIONS,
    "max_window_layers": 1,
    "model_max_length": MAX_POSITIONS,
    "moe_intermediate_size": 32,
    "moe_num_experts": 4,
    "moe_topk": 2,
    "moe_k": 2,
    "n_embd": 64,
    "n_group": 1,
    "n_head": 4,
    "n_layer": NUM_LAYERS,
    "n_positions": MAX_POSITIONS,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_attention_heads": 4,
    "num_dense_layers": 1,
    "num_expert_group": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "num_hidden_layers": NUM_LAYERS,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 0,
    "num_local_experts": 4,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "o_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_head_dim": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "query_pre_attn_scalar": 16,
    "rotary_dim": 8,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "sliding_window": 16,
    "topk_group": 1,
    "v_head_dim": 16,
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    # Towers for images and sound, which some families build beside the text model.
    "depth": 1,
    "encoder_layers": 1,
    "image_size": 16,
    "num_channels": 3,
    "original_max_position_embeddings": MAX_POSITIONS,
    "out_hidden_size": 32,
    "patch_size": 8,
}

# Families without a `head_dim` key: width 64 gives heads of 16 dimensions, so that a quarter of them can rotate.
WIDE: dict[str, Any] = {"hidden_size": 64}

_PLAIN: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
_GLOBAL_HEADS: dict[str, Any] = {
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
}
_INDEXER: dict[str, Any] = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
}
_TOWER: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_blocks": 1}

OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"hidden_size": 64, "mamba_d_head": 32, "attn_layer_indices": [1]},
    "blt_global_transformer": {"hidden_size": 128, "head_dim": 32},
    "blt_local_decoder": {"hidden_size": 64, "hidden_size_global": 128},
    "blt_local_encoder": {"hidden_size": 64, "hidden_size_global": 128},
    "blt_patcher": WIDE,
    "blt": {"encoder_hash_byte_group_vocab": VOCABULARY, "local_attention_window_len": MAX_POSITIONS},
    "cohere_compass_text": {"rope_parameters": {"full_attention": dict(_PLAIN)}},
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": NUM_LAYERS,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 0},
    "dots3_note_vision_encoder": {"adapter_in_dim": 64, "adapter_out_dim": 32, "pyramid_num_routed": [-1, -1]},
    "dots3_note_audio_encoder": {"whisper_adapter_in_dim": 32, "whisper_adapter_out_dim": 32},
    "dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 32,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "gemma3n_text": {
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
        "activation_sparsity_pattern": None,
    },
    "gemma4_text": _GLOBAL_HEADS,
    "gemma4_unified_text": _GLOBAL_HEADS,
    "granitemoehybrid": {
        "hidden_size": 64,
        "mamba_d_head": 32,
        "layer_types": ["mamba", "attention"],
        "position_embedding_type": "rope",
    },
    "exaone4": {"layer_types": ["full_attention", "full_attention"], "sliding_window": None},
    "gpt_neox": {"hidden_size": 128},
    "helium": {"hidden_size": 64},
    "lara_mini": {"layer_types": ["sliding_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {"no_rope_layers": [1, 0]},
    "longcat_flash": {"num_layers": 1, "zero_expert_num": 1, "n_routed_experts": 4},
    "modernbert": {"hidden_size": 64, "local_attention": 16, "cls_token_id": 1, "sep_token_id": 2},
    "mimo_v2_flash": {"head_dim": 24, "v_head_dim": 24, "swa_head_dim": 24, "swa_v_head_dim": 24},
    "ministral3": {
        "rope_parameters": {**_PLAIN, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": MAX_POSITIONS}
    },
    "minimax": {"sliding_window": None},
    "mllama_text_model": {"rope_scaling": {"rope_type": "default"}},
    "moshi": {"sliding_window": MAX_POSITIONS},
    "phi4_multimodal": {"audio_config": _TOWER, "vision_config": {**_TOWER, "crop_size": 16}},
    "qwen3_5_moe_text": {"head_dim": 32},
    "qwen3_5_text": {"head_dim": 32},
    "qwen3_next": {"head_dim": 32},
    "qwen4_exp_text": _INDEXER,
    "recurrent_gemma": {"hidden_size": 64, "block_types": ["recurrent", "attention"]},
    "stablelm": {"hidden_size": 128},
    "zamba2": {"layers_block_type": ["hybrid", "hybrid"], "use_mem_rope": True},
    "zaya": {"num_experts_per_tok": 1},
}


def _overrides(model_type: str, config: PretrainedConfig) -> dict[str, Any]:
    """The small sizes that this configuration, and each configuration inside it, knows."""
    values: dict[str, Any] = {}
    fields = config.to_dict()
    for key, value in fields.items():
        inner = getattr(config, key) if isinstance(value, dict) else None
        if isinstance(inner, PretrainedConfig):
            values[key] = {"model_type": inner.model_type, **_overrides(inner.model_type, inner)}
        elif key in SIZES and not (value is None and key in {"pad_token_id", "q_lora_rank"}):
            values[key] = SIZES[key]
    rope_key = "rope_parameters" if "rope_parameters" in fields else "rope_scaling"
    if (fields.get(rope_key) or {}).get("rope_type", "default") in {"llama3", "longrope", "yarn"}:
        values[rope_key] = dict(_PLAIN)
    kinds = list(dict.fromkeys(fields.get("layer_types") or []))
    if kinds:
        full = next((kind for kind in kinds if kind == "full_attention"), kinds[-1])
        values["layer_types"] = [next((kind for kind in kinds if kind != full), full), full]
    if "hidden_size" in values and "head_dim" not in fields and "qk_rope_head_dim" not in fields:
        values.update(WIDE)
    if "qk_rope_head_dim" in fields and "num_key_value_heads" in fields:
        values["num_key_value_heads"] = values["num_attention_heads"]
    values.update(OVERRIDES.get(model_type, {}))
    return values


def tiny_config(model_type: str) -> PretrainedConfig:
    """A configuration of this family that builds in milliseconds."""
    kind = CONFIG_MAPPING[model_type]
    return kind(**_overrides(model_type, kind()))


def build(model_type: str, seed: int = 0, auto: Any = None) -> PreTrainedModel:
    """A random model of this family, in eval mode and float32, whose attention is far from uniform.

    By default it is the text model; `auto` is an auto class of transformers that builds another.
    """
    torch.manual_seed(seed)
    config = tiny_config(model_type)
    if auto is not None:
        model = auto.from_config(config, dtype=torch.float32)
    else:
        auto = AutoModelForMaskedLM if model_type in ENCODERS else AutoModelForCausalLM
        kind = auto._model_mapping[type(config)]
        if kind.config_class is not type(config):
            config = config.get_text_config(decoder=True)
        model = kind._from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2:
                weight.normal_(0.0, _spread(name), generator=generator)
            else:
                weight += 0.2 * torch.randn(weight.shape, generator=generator)
    return model.eval()


def _spread(name: str) -> float:
    """The standard deviation of a weight: large for queries and keys, so that attention is far from uniform."""
    if re.search(r"embed|wte|emb\b", name):
        return 0.5
    return 0.4 if re.search(r"q_|k_|qkv|query|key|attn|attention", name) else 0.2


def save(model_type: str, folder: Path, seed: int = 0) -> Path:
    """Write such a model as a checkpoint, the way the installed transformers does."""
    model = build(model_type, seed)
    model.save_pretrained(folder)
    if model.config.model_type != model_type:
        # The text model of a larger one: checkpoints in the wild carry the configuration of the whole.
        config = tiny_config(model_type)
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
    return folder


FAMILIES: list[str] = [name for name in ROTARY if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and name not in NOT_BUILT]

# Encoders, which predict masked tokens.
ENCODERS: list[str] = [name for name in ("eurobert", "gte", "modernbert", "nomic_bert") if name in CONFIG_MAPPING]

# Families whose full-attention layers have no positions, in the form that is built here: nothing to extend.
NO_ROTATED_LAYERS = (
    "afmoe",
    "beam",
    "cohere2",
    "cohere2_moe",
    "exaone_moe",
    "flint",
    "kolibri1",
    "lara_mini",
    "llama4",
    "llama4_text",
)
