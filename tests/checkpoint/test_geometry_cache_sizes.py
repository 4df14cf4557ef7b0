"""Cache sizes of `inspect`: computed by hand for published models, and compared with caches of transformers.

Further models are in tests/resources/configs (`recipes/test_registry_published_models.py`).
"""

import json
import math
from pathlib import Path

import pytest
import torch

import tiny_models
from ctxext.checkpoint.families import family_of, full_attention_layers, sliding_layers
from ctxext.checkpoint.geometry import cache_numbers
from published_models import published
from releases import IS_OLDER

LENGTH = 40
# Families without a comparable cache of keys and values in their tiny model, and the reason.
NOT_COMPARED = {
    "blt": "four models in one",
    "deepseek_v4": "it compresses keys over windows of tokens",
    "mimo_v2_flash": "a saved tiny model has lost the KV heads of its sliding layers",
    "recurrent_gemma": "it keeps its cache in its layers",
    "roformer": "an encoder without a cache",
}
LARGER_BEFORE = {"deepseek_v3", "gemma3n_text"}
"""Families whose cache has full heads, or all tokens, in older releases of transformers 5."""

ZAMBA = {
    "model_type": "zamba",
    "num_hidden_layers": 76,
    "attn_layer_period": 6,
    "attn_layer_offset": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "hidden_size": 3584,
    "attention_head_dim": 448,
}
NEMOTRON_H = {
    "model_type": "nemotron_h",
    "num_hidden_layers": 52,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "head_dim": 128,
}
MLLAMA = {
    "model_type": "mllama",
    "text_config": {
        "model_type": "mllama_text_model",
        "num_hidden_layers": 40,
        "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
        "max_position_embeddings": 131072,
    },
}
LLAMA_4_SCOUT = {
    "model_type": "llama4",
    "text_config": {
        "model_type": "llama4_text",
        "num_hidden_layers": 48,
        "no_rope_layers": [],
        "attention_chunk_size": 8192,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "hidden_size": 5120,
        "head_dim": 128,
        "max_position_embeddings": 10485760,
    },
}
GEMMA_3N = {
    "model_type": "gemma3n_text",
    "num_hidden_layers": 35,
    "num_kv_shared_layers": 15,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "sliding_window": 512,
}
# Heads of the full-attention layers: 512 wide and 2 of them; of the others: 256 and 4.
GEMMA_4 = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_global_key_value_heads": 2,
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "sliding_window": 512,
}
# As in transformers 5: the differences of each layer.
GEMMA_4_PRUNED = {
    **{key: value for key, value in GEMMA_4.items() if "global" not in key},
    "per_layer_config": {
        "0": {"num_key_value_heads": 1, "head_dim": 64},
        "5": {"num_key_value_heads": 1, "head_dim": 128},
        "11": {"head_dim": 512},
    },
}
MIMO_V2_FLASH = {
    "model_type": "mimo_v2_flash",
    "num_hidden_layers": 48,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "swa_num_key_value_heads": 8,
    "head_dim": 192,
    "swa_head_dim": 160,  # The published model has 192 here too.
    "v_head_dim": 128,
    "sliding_window": 128,
}


@pytest.mark.parametrize(
    ("config", "layers", "length", "numbers"),
    [
        (ZAMBA, (13, 0), 4096, 13 * 2 * 16 * 448 * 4096),
        (NEMOTRON_H, (4, 0), 8192, 4 * 2 * 8 * 128 * 8192),
        (MLLAMA, (32, 0), 8192, 32 * 2 * 8 * 128 * 8192),
        (LLAMA_4_SCOUT, (12, 36), 131072, 2 * 8 * 128 * (12 * 131072 + 36 * 8192)),
        (published("mistral-7b-v0.1")["config"], (0, 32), 1000, 32 * 2 * 8 * 128 * 1000),
        # The last 15 layers, 3 of them with full attention, use the cache of others.
        (GEMMA_3N, (7, 28), 32768, 2 * 2 * 256 * (4 * 32768 + 16 * 512)),
        (GEMMA_4, (2, 10), 8192, 2 * (2 * 2 * 512 * 8192 + 10 * 4 * 256 * 512)),
        (
            GEMMA_4_PRUNED,
            (2, 10),
            8192,
            2 * ((1 * 128 + 4 * 512) * 8192 + (1 * 64 + 9 * 4 * 256) * 512),
        ),
        (MIMO_V2_FLASH, (9, 39), 4096, 9 * 4 * (192 + 128) * 4096 + 39 * 8 * (160 + 128) * 128),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else None,
)
def test_known_models(config, layers, length, numbers):
    family = family_of(config)
    assert (len(full_attention_layers(config, family)), len(sliding_layers(config, family))) == layers
    assert cache_numbers(config, family, length) == numbers


def test_the_last_layers_borrow_and_not_the_first():
    """Gemma 3n: layers of both kinds at each end, so that the sharing end matters."""
    types = ["full_attention", *["sliding_attention"] * 3, "full_attention", *["sliding_attention"] * 3]
    config = {**GEMMA_3N, "num_hidden_layers": 8, "layer_types": types}
    for shared, full, sliding in ((0, 2, 6), (3, 2, 3), (4, 1, 3), (7, 1, 0)):
        numbers = cache_numbers({**config, "num_kv_shared_layers": shared}, family_of(config), 4096)
        assert numbers == 2 * 2 * 256 * (full * 4096 + sliding * 512), shared


def kept(cache) -> int:
    """Count the elements in a cache of transformers."""
    pairs = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in cache.layers]
    return sum(math.prod(one.shape) for pair in pairs for one in pair if isinstance(one, torch.Tensor))


def test_layers_that_run_again_keep_their_keys_again():
    """Dory: 8 pairs of attention and MLP before the loop, 20 in it, 8 after it; every fourth has full attention."""
    config = {"model_type": "dory", "sliding_window": 512}
    per_token = 2 * 4 * 256
    for loops, full, sliding in ((None, 14, 42), (1, 9, 27), (3, 19, 57)):
        looped = {**config, **({"n_recurrent_loops": loops} if loops else {})}
        assert cache_numbers(looped, family_of(looped), 4096) == per_token * (full * 4096 + sliding * 512), loops
    last = {**config, "recurrent_kv_cache_mode": "last_loop"}
    assert cache_numbers(last, family_of(last), 4096) == per_token * (9 * 4096 + 27 * 512)


@pytest.mark.parametrize("model_type", [name for name in tiny_models.FAMILIES if name not in NOT_COMPARED])
def test_the_estimated_cache_size_of_every_family_is_right(model_type, tmp_path):
    tiny_models.tiny_config(model_type).save_pretrained(tmp_path)
    config = json.loads((Path(tmp_path) / "config.json").read_text())
    family, model = family_of(config), tiny_models.build(model_type)
    with torch.no_grad():
        numbers = kept(model(input_ids=torch.arange(LENGTH)[None] % 90 + 5, use_cache=True).past_key_values)
    ours = cache_numbers(config, family, LENGTH)
    # transformers stores one token less than the window, which includes the next one.
    per_row = [cache_numbers(config, family, n) - cache_numbers(config, family, n - 1) for n in (2, LENGTH)]
    less = per_row[0] - per_row[1]
    if IS_OLDER and model_type in LARGER_BEFORE:
        assert numbers >= ours - less
    else:
        assert numbers == ours - less
