"""Tiny random multimodal models, and an image for each of them.

Two layers of width 64 in the text part and one in the tower; four by four patches of eight pixels.
"""

import copy
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

IMAGE, BEGIN, END = 5, 7, 8
TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "rope_theta": 10000.0,
}
EXPERTS: dict[str, Any] = {
    "decoder_sparse_step": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "topk_group": 1,
}
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "image_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_channels": 3,
    "num_hidden_layers": 1,
    "patch_size": 8,
}
PATCHES: dict[str, Any] = {
    "deepstack_visual_indexes": [0],
    "depth": 1,
    "embed_dim": 32,
    "fullatt_block_indexes": [0],
    "hidden_size": 32,
    "image_size": 32,
    "in_channels": 3,
    "in_chans": 3,
    "intermediate_size": 32,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": 64,
    "patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
ONE_TOKEN = {"image_token_id": IMAGE, "image_token_index": IMAGE}
SECTIONS = {"image_token_id": IMAGE, "video_token_id": 6, "vision_start_token_id": BEGIN, "vision_end_token_id": END}
OMNI: dict[str, Any] = {
    **SECTIONS,
    "image_token_index": IMAGE,
    "audio_config": {"d_model": 32, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "encoder_layers": 1},
}
GLM = {**SECTIONS, "image_start_token_id": BEGIN, "image_end_token_id": END}


def text(model_type: str, **values: Any) -> dict[str, Any]:
    """A text part of another family."""
    return {"model_type": model_type, **TEXT, **values}


def tower(model_type: str, **values: Any) -> dict[str, Any]:
    """A tower of another family."""
    return {"model_type": model_type, **TOWER, **values}


def sections(*sizes: int, **values: Any) -> dict[str, Any]:
    """A plain schedule with sections of positions."""
    return {"rope_scaling": {"rope_type": "default", "mrope_section": list(sizes), **values}}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
BY_TYPE = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16, "num_kv_shared_layers": 0}
HYBRID = {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
CONFIGS: dict[str, dict[str, Any]] = {
    "aria": {
        **ONE_TOKEN,
        "text_config": text("aria_text", moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1),
        "vision_config": tower("idefics3_vision"),
        "projector_patch_to_query_dict": {16: 4},
    },
    "gemma3n": {
        **ONE_TOKEN,
        "vision_soft_tokens_per_image": 1,
        "text_config": text(
            "gemma3n_text",
            **MIXED,
            activation_sparsity_pattern=[0.0, 0.0],
            laurel_rank=4,
            vocab_size_per_layer_input=128,
            hidden_size_per_layer_input=8,
        ),
        "vision_config": {"architecture": "mobilenetv3_small_050", "hidden_size": 288, "vocab_offset": 96},
        "audio_config": {"conf_num_hidden_layers": 1, "hidden_size": 32, "vocab_offset": 112},
    },
    "gemma4": {
        **ONE_TOKEN,
        "audio_config": None,
        "text_config": text(
            "gemma4_text",
            **MIXED,
            global_head_dim=32,
            vocab_size_per_layer_input=128,
            hidden_size_per_layer_input=8,
            rope_parameters=BY_TYPE,
        ),
        "vision_config": {**TOWER, "num_key_value_heads": 2, "pooling_kernel_size": 2, "position_embedding_size": 16},
    },
    "glm4v": {**GLM, "text_config": {**TEXT, "partial_rotary_factor": 0.5, **sections(2, 1, 1)}},
    "glm4v_moe": {**GLM, "text_config": {**TEXT, **EXPERTS, "partial_rotary_factor": 0.5, **sections(2, 1, 1)}},
    "idefics3": {**ONE_TOKEN, "text_config": text("llama"), "vision_config": TOWER, "scale_factor": 2},
    "internvl": {
        **ONE_TOKEN,
        "text_config": text("qwen2"),
        "vision_config": tower("internvl_vision", image_size=[32, 32], patch_size=[8, 8]),
        "downsample_ratio": 0.5,
    },
    "kimi_k25": {
        **ONE_TOKEN,
        "text_config": text("deepseek_v3", **EXPERTS, **LATENT, num_key_value_heads=4),
        "vision_config": {**TOWER, "pos_emb_height": 4, "pos_emb_width": 4, "pos_emb_time": 1},
        "projection_hidden_size": 32,
    },
    "lfm2_vl": {
        **ONE_TOKEN,
        "text_config": text("lfm2", **HYBRID),
        "vision_config": tower("siglip2_vision_model", num_patches=16),
        "downsample_factor": 2,
    },
    "llama4": {  # Published ones rotate in chunked layers only, and are refused.
        **ONE_TOKEN,
        "text_config": text(
            "llama4_text",
            layer_types=["chunked_attention", "full_attention"],
            no_rope_layers=[1, 1],
            num_local_experts=2,
            attention_chunk_size=32,
        ),
        "vision_config": {
            **TOWER,
            "intermediate_size": 128,
            **dict.fromkeys(["vision_output_dim", "projector_input_dim", "projector_output_dim"], 32),
        },
    },
    "llava": {
        **ONE_TOKEN,
        "text_config": text("llama"),
        "vision_config": tower("clip_vision_model"),
        "vision_feature_layer": -1,
    },
    "mistral3": {
        **ONE_TOKEN,
        "text_config": text("mistral"),
        "vision_config": tower("pixtral"),
        "spatial_merge_size": 2,
    },
    "ministral3": {
        **ONE_TOKEN,
        "text_config": text("ministral3", rope_parameters={**YARN, "llama_4_scaling_beta": 0.1}),
        "vision_config": tower("pixtral"),
        "spatial_merge_size": 2,
    },
    "mistral4": {
        **ONE_TOKEN,
        "text_config": text(
            "mistral4",
            **{**EXPERTS, **LATENT, "head_dim": 32},
            num_key_value_heads=4,
            rope_parameters={**YARN, "llama_4_scaling_beta": 0.1},
        ),
        "vision_config": tower("pixtral"),
        "spatial_merge_size": 2,
    },
    "ovis2": {
        **ONE_TOKEN,
        "text_config": text("qwen2"),
        "vision_config": {**TOWER, "hidden_stride": 2, "num_visual_indicator_tokens": 5, "vocab_size": 32},
        "hidden_size": 64,
        "vocab_size": 128,
        "visual_indicator_token_ids": [10, 11, 12, 13, 14],
    },
    "paligemma": {
        **ONE_TOKEN,
        "text_config": text("gemma"),
        "vision_config": tower("siglip_vision_model"),
        "projection_dim": 64,
    },
    "qwen2_vl": {
        **SECTIONS,
        "text_config": {**TEXT, **sections(2, 3, 3, type="mrope")},
        "vision_config": {**PATCHES, "hidden_size": 64},
    },
    "qwen2_5_vl": {
        **SECTIONS,
        "text_config": {**TEXT, **sections(2, 3, 3, type="mrope")},
        "vision_config": {**PATCHES, "window_size": 32},
    },
    "qwen2_5_omni_thinker": {
        **OMNI,
        "text_config": {**TEXT, **sections(2, 3, 3, type="mrope")},
        "vision_config": {**PATCHES, "window_size": 32},
    },
    "qwen3_omni_moe_thinker": {
        **OMNI,
        "text_config": {**TEXT, **EXPERTS, **sections(4, 2, 2, mrope_interleaved=True)},
    },
    "qwen3_vl": {**SECTIONS, "text_config": {**TEXT, **sections(4, 2, 2, mrope_interleaved=True)}},
    "qwen3_vl_moe": {**SECTIONS, "text_config": {**TEXT, **EXPERTS, **sections(4, 2, 2, mrope_interleaved=True)}},
    "qwen3_5": {
        **SECTIONS,
        "text_config": {
            **TEXT,
            "head_dim": 32,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "rope_parameters": {
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
                **sections(2, 1, 1)["rope_scaling"],
            },
        },
    },
    "smolvlm": {**ONE_TOKEN, "text_config": text("llama"), "vision_config": TOWER, "scale_factor": 2},
    "vipllava": {
        **ONE_TOKEN,
        "text_config": text("llama"),
        "vision_config": tower("clip_vision_model"),
        "vision_feature_layers": [-1, -1],
    },
}
"""Families whose text part alone reads the schedule."""
TYPES = {"ministral3": "mistral3", "mistral4": "mistral3"}
"""The model types of those whose text part is of another family than above."""
NAMES = [
    name
    for name, config in CONFIGS.items()
    if TYPES.get(name, name) in CONFIG_MAPPING_NAMES
    and (name != "gemma3n" or importlib.util.find_spec("timm"))  # Which its tower is built of.
    and config["text_config"].get("model_type", "llama") in CONFIG_MAPPING_NAMES
]
"""Those that the installed transformers has."""


def build(name: str) -> PreTrainedModel:
    """A random model in float32, whose attention is far from uniform."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[TYPES.get(name, name)](**copy.deepcopy({"vision_config": PATCHES, **CONFIGS[name]}))
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter, weight in model.named_parameters():
            if weight.ndim >= 2 and re.search(r"q_|k_|qkv|embed_tokens", parameter):
                weight.normal_(0.0, 0.4)
    return model


def save(name: str, folder: Path) -> Path:
    """The same as a checkpoint."""
    build(name).save_pretrained(folder)
    return folder


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    """The logits of a prompt with an image between words."""
    core = model if hasattr(model, "get_image_features") else model.model
    image = _image(core)
    is_fixed = "image_grid_thw" in image or core.config.model_type in ("llama4", "ovis2")
    count = 4 if is_fixed else _count(core.get_image_features(**image))
    ids = torch.tensor([[1, 9, BEGIN, *[IMAGE] * count, END, *range(20, 80)]])
    asked = {
        key for part in (model, getattr(model, "model", model)) for key in inspect.signature(part.forward).parameters
    }
    kinds = {key: (ids == IMAGE).long() for key in ("mm_token_type_ids", "token_type_ids") if key in asked}
    return model(input_ids=ids, attention_mask=torch.ones_like(ids), **image, **kinds).logits


def _image(core: Any) -> dict[str, torch.Tensor]:
    """An image as the model's own processor would give it."""
    generator = torch.Generator().manual_seed(0)
    asked = inspect.signature(core.get_image_features).parameters
    if "image_position_ids" in asked:
        places = torch.tensor([[(x, y) for y in range(4) for x in range(4)]])
        return {"pixel_values": torch.rand(1, 16, 3 * 8 * 8, generator=generator), "image_position_ids": places}
    if "image_grid_thw" in asked:
        shape = (3, 8, 8) if core.config.model_type == "kimi_k25" else (2 * 3 * 8 * 8,)
        pixels = torch.randn(16, *shape, generator=generator)
        return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]])}
    if "spatial_shapes" in asked:
        pixels = torch.randn(1, 16, 3 * 8 * 8, generator=generator)
        shapes = {"spatial_shapes": torch.tensor([[4, 4]]), "pixel_attention_mask": torch.ones(1, 16, dtype=torch.long)}
        return {"pixel_values": pixels, **shapes}
    pixels = torch.randn(1, 3, 32, 32, generator=generator)
    if "image_sizes" in asked:
        return {"pixel_values": pixels, "image_sizes": torch.tensor([[32, 32]])}
    several = core.config.model_type in ("idefics3", "smolvlm")
    return {"pixel_values": pixels[None] if several else pixels}


def _count(features: Any) -> int:
    """How many tokens an image becomes."""
    if isinstance(features, torch.Tensor):
        return features.reshape(-1, features.shape[-1]).shape[0]
    if isinstance(features, list | tuple):
        parts = [part for part in features if isinstance(part, torch.Tensor)]
        return sum(map(_count, parts))
    return _count(features.last_hidden_state if features.pooler_output is None else features.pooler_output)
