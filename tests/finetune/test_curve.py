"""The picture of a training."""

import pytest

from ctxext.evaluate.report.colours import series_style
from ctxext.finetune.curve import draw_losses, smoothed


def test_smoothing_keeps_a_slope_and_flattens_noise():
    steps = range(1, 201)
    assert smoothed(steps, [float(step) for step in steps]) == pytest.approx([float(step) for step in steps])
    noisy = [float(step % 2) for step in steps]
    assert max(abs(value - 0.5) for value in smoothed(steps, noisy)[10:-10]) < 0.1


def test_sixteen_curves_are_told_apart_and_a_single_step_can_be_drawn(tmp_path):
    assert len({series_style(number) for number in range(16)}) == 16
    draw_losses([(1, 2.0)], [64], tmp_path / "one.png")
    draw_losses([(step, 2.0) for step in range(1, 41)], [2 ** (step // 3) for step in range(40)], tmp_path / "many.png")
    assert (tmp_path / "many.png").read_bytes().startswith(b"\x89PNG")
