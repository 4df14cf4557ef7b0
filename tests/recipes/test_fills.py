"""Longer tables of many rows, and their rounding; converters/test_table.py holds every fill against its reference."""

import numpy as np
import pytest
import torch

from ctxext.recipes.methods.fills import _rounded, continued, filled


def test_many_rows_are_made_as_few_are():
    table = np.random.default_rng(0).normal(size=(40, 2)).astype("<f4")
    content = b"".join(filled(memoryview(table.tobytes()), "F32", 2, 0, 3000, "linear", 0.4))
    rows, at = np.frombuffer(content, "<f4").reshape(3000, 2), 2500 * 40 / 3000
    low = int(at)
    np.testing.assert_allclose(rows[2500], table[low] + (at - low) * (table[low + 1] - table[low]), rtol=1e-5)


def test_bf16_is_rounded_to_the_nearest_and_ties_to_even_as_torch_does():
    bits = np.array(
        [0x3F800000, 0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0xBF818000, 0x3F817FFF], dtype=np.uint32
    )
    values = np.concatenate([bits.view(np.float32), np.random.default_rng(0).normal(size=1000).astype(np.float32)])
    wanted = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert _rounded(values.astype(np.float64), "BF16").tolist() == wanted.tolist()


@pytest.mark.parametrize("width", [6, 7])
def test_sinusoids_go_on(width):
    """Vaswani et al. 2017, section 3.5: sines of p / 10000^(2i/d), then cosines; the old rows stay as they are."""
    old, special, new = 3, 1, 1500
    raw = np.full((special + old, width), 5.0, dtype="<f4").tobytes()
    content = b"".join(continued(memoryview(raw), "F32", width, special, new))
    extended = np.frombuffer(content, dtype="<f4").reshape(-1, width)
    assert extended.shape == (special + new, width)
    assert (extended[: special + old] == 5).all()
    for p in (3, 4, 700, 1499):
        sines = [np.sin(p / 10000 ** (2 * i / width)) for i in range((width + 1) // 2)]
        cosines = [np.cos(p / 10000 ** (2 * i / width)) for i in range(width // 2)]
        np.testing.assert_allclose(extended[special + p], [*sines, *cosines], rtol=1e-5, atol=1e-6)
