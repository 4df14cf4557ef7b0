"""Estimates of the time of a text."""

import pytest

from ctxext.checkpoint.durations import break_even, cost_of, count_work, estimate_seconds, format_duration

CONFIG = {
    "model_type": "llama",
    **{"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 100},
}


def test_the_length_where_attention_costs_as_much_as_all_else():
    """By hand, for 64 hidden units and heads of 16."""
    even = 64 * (2 * (4 + 2) * 16 + 3 * 100) / (4 * 16)
    assert break_even(CONFIG) == even
    assert break_even({"model_type": "gemma3", "text_config": CONFIG | {"head_dim": 16}}) == even
    assert break_even({"model_type": "gptj", "n_embd": 64, "n_head": 4, "intermediate_size": 100}) == 2 * 8 * 16 + 300
    assert break_even({**CONFIG, "head_dim": 8}) == 64 * (2 * 6 * 8 + 300) / (4 * 8)
    assert break_even({**CONFIG, "num_key_value_heads": None}) == 64 * (2 * 8 * 16 + 300) / 64
    assert break_even({}) == break_even({"hidden_size": 64}) == break_even({**CONFIG, "hidden_size": None}) == 8192


def test_long_texts_take_more_per_token():
    assert count_work(100, 100.0) == 200
    assert [cost_of({})(length) for length in (0, 64, 8192)] == [1, 2, 1 + 2 * 8192 // 64]
    cost = lambda length: count_work(length, 100.0)  # noqa: E731
    assert estimate_seconds([100], (100, 3.0), cost) == pytest.approx(3)
    assert estimate_seconds([100, 200], (100, 3.0), cost) == pytest.approx(3 + 3 * (200 * 3) / 200)
    assert estimate_seconds([], (100, 3.0), cost) == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (119.4, "119 s"), (121, "2 min"), (7100, "118 min"), (7260, "2.0 h"), (90061, "25.0 h")],
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


def test_layers_with_a_window_or_a_state_cost_no_more_with_the_length():
    """Work in units of 64 tokens: 1 + 8192 / 64 · (1 + attended / even)."""
    config = {**CONFIG, "model_type": "gemma3_text", "head_dim": 16, "num_hidden_layers": 6, "sliding_window": 512}
    config["layer_types"] = ["sliding_attention"] * 5 + ["full_attention"]
    even = break_even(config)
    attended = (8192 + 5 * (512 + 512)) / 6
    assert cost_of(config)(8192) == 1 + round(8192 * (1 + attended / even) / 64)
    assert cost_of(config)(900) == 1 + round(900 * (1 + 900 / even) / 64)
    config["layer_types"] = ["linear_attention"] * 5 + ["full_attention"]
    assert cost_of({**config, "model_type": "qwen3_next"})(8192) == pytest.approx(
        1 + 8192 * (1 + 8192 / 6 / break_even({**config, "model_type": "qwen3_next"})) / 64, abs=1
    )
