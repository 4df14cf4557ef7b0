"""Rows of longer tables, each from its formula on numbers that one can check by hand; rounding as torch rounds."""

import numpy as np
import pytest
import torch

from ctxext.recipes.methods.fills import FILLS, _rounded, continued, filled

OLD, NEW = 4, 10
TABLE = np.array([[1.0, 0.0], [2.0, 3.0], [4.0, -1.0], [8.0, 5.0]])


def rows(fill, alpha=0.4, table=TABLE, new=NEW, special=0, dtype="F32", kind="<f4"):
    content = b"".join(filled(memoryview(table.astype(kind).tobytes()), dtype, 2, special, new, fill, alpha))
    return np.frombuffer(content, dtype=kind).reshape(-1, 2)


def test_tile_begins_again():
    assert rows("tile").tolist() == [TABLE[k % OLD].tolist() for k in range(NEW)]


def test_hierarchical_is_two_of_them_weighed():
    """Su 2020: p'_(iL+j) = a u_i + (1 - a) u_j, u_i = (p_i - a p_0) / (1 - a)."""
    a = 0.4
    u = (TABLE - a * TABLE[0]) / (1 - a)
    wanted = [a * u[k // OLD] + (1 - a) * u[k % OLD] for k in range(NEW)]
    filled = rows("hierarchical", a)
    np.testing.assert_allclose(filled, wanted, rtol=1e-6, atol=1e-6)
    assert filled[:OLD].tolist() == TABLE.tolist()


def test_linear_lies_between_neighbours():
    wanted = []
    for k in range(NEW):
        at = min(k * OLD / NEW, OLD - 1)
        low = int(at)
        high = min(low + 1, OLD - 1)
        wanted.append(TABLE[low] + (at - low) * (TABLE[high] - TABLE[low]))
    np.testing.assert_allclose(rows("linear"), wanted, rtol=1e-6)


def test_cubic_goes_through_the_rows_and_follows_a_parabola():
    """Keys 1981: with a = -1/2 parabolas come back exactly, away from the ends that are repeated."""
    parabola = np.array([[k**2 - 3.0 * k + 1, 2.0 * k] for k in range(12)])
    filled = rows("cubic", table=parabola, new=30)
    for k in range(30):
        at = k * 12 / 30
        if 1 <= at <= 10:
            np.testing.assert_allclose(filled[k], [at**2 - 3 * at + 1, 2 * at], rtol=1e-5, atol=1e-5)
    assert filled[0].tolist() == parabola[0].tolist()
    # Between the last two rows the one behind is the last again.
    p, x = parabola[[9, 10, 11, 11]], 0.8
    k = 27
    assert k * 12 / 30 == pytest.approx(10 + x)
    weights = [-0.5 * x + x**2 - 0.5 * x**3, 1 - 2.5 * x**2 + 1.5 * x**3, 0.5 * x + 2 * x**2 - 1.5 * x**3]
    weights.append(-0.5 * x**2 + 0.5 * x**3)
    np.testing.assert_allclose(filled[k], np.array(weights) @ p, rtol=1e-5)


@pytest.mark.parametrize("fill", FILLS)
def test_special_rows_stay_and_all_rows_are_there(fill):
    table = np.concatenate([[[9.0, 9.0], [7.0, 7.0]], TABLE])
    filled = rows(fill, table=table, special=2)
    assert filled.shape == (2 + NEW, 2)
    assert filled[:2].tolist() == table[:2].tolist()
    np.testing.assert_array_equal(filled[2:], rows(fill))


def test_many_rows_are_made_as_few_are():
    table = np.random.default_rng(0).normal(size=(40, 2))
    long = rows("linear", table=table, new=3000)
    assert long.shape == (3000, 2)
    at = 2500 * 40 / 3000
    low = int(at)
    np.testing.assert_allclose(long[2500], table[low] + (at - low) * (table[low + 1] - table[low]), rtol=1e-5)


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
