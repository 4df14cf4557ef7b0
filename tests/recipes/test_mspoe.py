"""The settings of Ms-PoE for the code of a checkpoint: a ratio for each KV head of each layer that takes part."""

import pytest

from ctxext.errors import CtxextError
from ctxext.methods import MsPoE
from ctxext.recipes.methods.mspoe import ranks_from_scores, ratio_grid
from ctxext.recipes.model_config import model_config

LLAMA = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA |= {"num_hidden_layers": 3, "max_position_embeddings": 128, "rope_theta": 500.0}


def settings(config=LLAMA, **numbers):
    return MsPoE(**{"head_order": "fixed", "first_layer": 1, **numbers}).settings(model_config(dict(config)))


def test_ratios_from_the_smallest_to_the_largest():
    assert ratio_grid(1.2, 1.8, 4) == pytest.approx([1.2, 1.4, 1.6, 1.8])
    assert ratio_grid(1.2, 1.8, 1) == [1.2]
    assert ratio_grid(1.2, 1.8, 4, released=True) == pytest.approx([1.2, 1.35, 1.5, 1.65])


def test_the_most_aware_head_has_the_smallest_ratio_and_ties_are_ordered():
    assert ranks_from_scores([0.1, 0.9, 0.5]) == [2, 0, 1]
    assert ranks_from_scores([0.5, 0.5, 0.9]) == [1, 2, 0]


def test_what_is_written():
    assert settings(ratio_min=1, ratio_max=3) == {
        "ratios": [1.0, 3.0],
        "layers": [1, 2],
        "schedule": "ntk",
        "rescale": "uniform",
        "variant": "paper",
        "ranks": [[0, 1], [0, 1]],
    }
    parts = settings(schedule="by-parts", ramp_fast=9, ramp_slow=2)
    assert {key: parts[key] for key in ("trained_length", "theta", "beta_fast", "beta_slow")} == {
        "trained_length": 128,
        "theta": 500.0,
        "beta_fast": 9.0,
        "beta_slow": 2.0,
    }
    middle = settings(schedule="linear", rescale="middle", rescale_start=4, rescale_end=9)
    assert middle["rescale"] == [4, 9]
    assert "ranks" not in settings(head_order="prompt")
    assert settings(head_order="calibrated", ranks=((1, 0), (0, 1)))["ranks"] == [[1, 0], [0, 1]]


@pytest.mark.parametrize("wrong", [None, ((0, 1),), ((0, 0), (0, 1)), ((0, 1), (0, 2)), ((0, 1), (0, 1), (0, 1))])
def test_an_order_of_another_model_is_refused(wrong):
    with pytest.raises(CtxextError, match="needs 2 layers with 2 ratio numbers each"):
        settings(head_order="calibrated", ranks=wrong)


def test_layers_that_take_part():
    assert settings(first_layer=0)["layers"] == [0, 1, 2]
    assert settings(first_layer=2)["layers"] == [2]
    with pytest.raises(CtxextError, match="No layer from 3 on") as caught:
        settings(first_layer=3)
    assert caught.value.hint == "--first-layer 2 or less."


def test_a_model_with_windows_in_all_layers():
    with pytest.raises(CtxextError, match="Every layer with a rotary embedding has a sliding window, and these layers"):
        settings({**LLAMA, "model_type": "mistral", "sliding_window": 8})


def test_families_on_which_awareness_cannot_be_seen():
    phi = {**LLAMA, "model_type": "phi"}
    for order in ("calibrated", "prompt"):
        with pytest.raises(CtxextError, match='"phi" supports a fixed order only: its attention exposes') as caught:
            settings(phi, head_order=order)
        assert caught.value.hint == "--head-order fixed"
    assert settings(phi, head_order="fixed")["ranks"] == [[0, 1], [0, 1]]
    # Who measured an order elsewhere may give it.
    assert settings(phi, head_order="calibrated", ranks=((1, 0), (0, 1)))["ranks"] == [[1, 0], [0, 1]]


def test_a_search_may_draw_the_ratios_in_either_order():
    rotary = model_config(dict(LLAMA)).rotary
    for low, high in ((1.5, 3.0), (3.0, 1.5)):
        step = MsPoE.from_search({"ratio_min": low, "ratio_max": high, "first_layer": 1}, rotary, 4.0)
        assert (step.ratio_min, step.ratio_max, step.first_layer) == (1.5, 3.0, 1)


def test_the_released_code_s_grid_is_for_models_without_groups():
    with pytest.raises(CtxextError, match="does not support grouped queries"):
        settings(variant="released")
    assert settings({**LLAMA, "num_key_value_heads": 4}, variant="released", ratio_min=1, ratio_max=3)["ratios"] == [
        1.0, 1.5, 2.0, 2.5
    ]  # fmt: skip


def test_mspoe_keeps_the_context_length():
    encoding = model_config(dict(LLAMA)).encoding
    assert MsPoE().length_after(encoding) == 128


def test_which_may_be_trained():
    assert [MsPoE(head_order=order).depends_on_prompt for order in ("prompt", "calibrated", "fixed")] == [
        True,
        False,
        False,
    ]
    assert [MsPoE(head_order=order).is_trainable for order in ("prompt", "calibrated", "fixed")] == [False, True, True]
