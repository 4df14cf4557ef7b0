"""The time that is left, for models whose prompts cost more the longer they are."""

from types import SimpleNamespace

import pytest

from ctxext.evaluate.run import Meter, break_even
from ctxext.evaluate.settings import Settings

LENGTHS = (4096, 8192, 16384)


def plan(**config):
    sizes = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536}
    info = SimpleNamespace(name="model", checkpoint=SimpleNamespace(config={**sizes, **config}))
    settings = Settings(samples=20, depths=(0.0, 1.0))
    tokens = sum(LENGTHS) * 40
    return SimpleNamespace(
        info=info, lengths=LENGTHS, tasks=("needle",), documents=(), settings=settings, num_samples=120,
        num_tokens=tokens,
    )  # fmt: skip


@pytest.mark.parametrize("real", [5000, 7000, 12000])
def test_the_time_left_is_right_within_a_quarter(real):
    """Prompts whose attention weighs as much as the rest at another length than the sizes say."""
    now, told = [0.0], []
    meter = Meter([plan()], lambda label, done, total: told.append((label, done, total)), 20, lambda: now[0])
    assert told == [("120 prompts and documents of 1,146,880 tokens", 0, meter.total)]
    seconds = {length: 1e-3 * length * (1 + length / real) for length in LENGTHS}
    left = 40 * sum(seconds.values())
    meter.begin()
    for length in LENGTHS:
        for _ in range(40):
            now[0] += seconds[length]
            left -= seconds[length]
            meter.advance("model", [length], "here")
            said = told[-1][0].split("(")[1].split(" left")[0]
            if left > 600:
                amount, unit = said.split()
                assert float(amount) * {"s": 1, "min": 60, "h": 3600}[unit] == pytest.approx(left, rel=0.25)
                assert "half of it with --samples 10" in told[-1][0]
    assert told[-1][1] == told[-1][2]
    assert "0 s left" in told[-1][0]


def test_what_is_done_already_counts_without_time():
    now = [0.0]
    meter = Meter([plan()], None, 20, lambda: now[0])
    meter.skip("model", [4096] * 40, "")
    now[0] = 5.0
    meter.advance("model", [8192], "")
    assert 0 < meter.reached < meter.total


def test_sizes_that_are_not_known():
    assert break_even({}) == break_even({"hidden_size": 64})
    assert break_even({"text_config": plan().info.checkpoint.config}) == pytest.approx(6144, rel=0.1)
