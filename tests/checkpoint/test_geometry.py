"""Valid sizes of a rotary model, and the context length in config.json."""

import pytest

from ctxext.checkpoint.families import family_of
from ctxext.checkpoint.geometry import check_sizes, claimed_length, default_length
from ctxext.errors import CtxextError

LLAMA = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head_dim": 4},
        {"head_dim": 6},
        {"head_dim": 8, "partial_rotary_factor": 0.5},
        {"layer_types": ["full_attention"] * 2},
        {"layer_types": ["full_attention"] * 3},
        {"no_rope_layers": None},
        {"head_dim": None, "num_key_value_heads": None, "rope_theta": None},
        # Code that needs a family reports its error, and other encodings have no rotated dimensions.
        {"model_type": "unheard-of", "head_dim": 7},
        {"model_type": "bert", "head_dim": 7},
        {"model_type": "gptj", "head_dim": 7, "layer_types": []},
    ],
)
def test_sizes_that_can_be(changes):
    check_sizes({**LLAMA, **changes}, "config.json")


EVEN = "dimensions, expected an even number of at least 4."


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"head_dim": 2}, f'each head rotates "2" {EVEN}'),
        ({"head_dim": 3}, f'each head rotates "3" {EVEN}'),
        ({"head_dim": 7}, f'each head rotates "7" {EVEN}'),
        ({"head_dim": 16, "partial_rotary_factor": 0.125}, f'each head rotates "2" {EVEN}'),
        ({"layer_types": ["full_attention"]}, '"layer_types" has "1" entries, expected one for each of 2 layers.'),
        ({"no_rope_layers": [1]}, '"no_rope_layers" has "1" entries, expected one for each of 2 layers.'),
        ({"layer_rope_theta": []}, '"layer_rope_theta" has "0" entries, expected one for each of 2 layers.'),
        ({"num_hidden_layers": None}, '"num_hidden_layers" is null, expected a number.'),
        ({"rope_parameters": {"rope_theta": 0.5}}, '"rope_theta" is "0.5", expected greater than 1.'),
        # By the family's name.
        ({"model_type": "mpt", "n_layers": None}, '"n_layers" is null, expected a number.'),
        (
            {"model_type": "falcon", "num_kv_heads": 0.5, "new_decoder_architecture": True},
            '"num_kv_heads" is "0.5", expected a valid integer.',
        ),
    ],
)
def test_sizes_that_cannot_be(changes, told):
    with pytest.raises(CtxextError) as caught:
        check_sizes({**LLAMA, **changes}, "x/config.json")
    assert caught.value.message == f'"x/config.json": {told}'


@pytest.mark.parametrize(
    ("model_type", "above", "length"),
    [
        ("cohere", 131072, 131072),
        ("cohere", None, 8192),
        ("cohere2", 131072, 131072),
        ("llama", 131072, 8192),
    ],
)
def test_command_r_has_its_length_under_another_key(model_type, above, length):
    config = {"model_type": model_type, "max_position_embeddings": 8192, "model_max_length": above}
    assert claimed_length(config, family_of(config)) == length


@pytest.mark.parametrize(("model_type", "above", "length"), [("cohere", 131072, None), ("cohere", None, 8192)])
def test_a_length_under_another_key_is_no_default(model_type, above, length):
    config = {"model_type": model_type, "model_max_length": above}
    assert default_length(config, family_of(config)) == length
