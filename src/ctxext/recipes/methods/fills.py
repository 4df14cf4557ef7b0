"""Fills: rules that compute the rows of a longer position table from the old rows, each as a weighted sum.

A fill returns, for the new positions k, the old rows and their weights, both (positions, terms); L is the old number of
positions and N the new number. Weights sum to 1; rows with a weight of 0 are not read. A row of a single term is copied
byte for byte.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]
    Terms = tuple[Array, Array]

_ROWS_AT_ONCE = 1024


def tile(k: "Array", old: int, new: int) -> "Terms":
    """Repeat the old rows: p'_k = p_(k mod L). Beltagy et al., Longformer, section 5."""
    import numpy as np

    return (k % old)[:, None], np.ones((len(k), 1))


def linear(k: "Array", old: int, new: int) -> "Terms":
    """Interpolate row k · L / N of the old table between its two neighbours; the last row is repeated."""
    import numpy as np

    at = np.minimum(k * old / new, old - 1)
    below = np.floor(at).astype(np.int64)
    part = at - below
    return np.stack([below, below + 1], axis=1), np.stack([1 - part, part], axis=1)


Fill = Callable[["Array", int, int], "Terms"]
FILLS: Mapping[str, Fill] = {"tile": tile, "linear": linear}
"""The choices of `--fill`."""


def tile_distances(row: "Array", old: int, new: int) -> "Terms":
    """Repeat the rows of each side: row k + d of 2k rows is that of the distance d, from −k to k−1."""
    import numpy as np

    distance = row - new // 2
    near = np.where(distance < 0, -1 - (-1 - distance) % (old // 2), distance % (old // 2))
    return (near + old // 2)[:, None], np.ones((len(row), 1))


DISTANCE_FILLS: Mapping[str, Fill] = {"tile": tile_distances, "linear": linear}
"""The same choices for the rows of distances. With `linear`, distance 0 stays in the middle of both tables."""

KEEPS_ROWS = ("tile",)
"""Fills that leave the first L rows bit-identical."""

DTYPES: Mapping[str, str] = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""Supported number formats, and the numpy type that reads their bytes."""


def fill_rows(raw: memoryview, dtype: str, width: int, special: int, new: int, fill: Fill) -> Iterator[bytes]:
    """Yield the bytes of the longer table, some rows at a time.

    Sums are computed in float64 and rounded once. `special` rows precede that of position 0 and are copied; `new` is
    the number of the new table's other rows.
    """
    import numpy as np

    table = np.frombuffer(raw, dtype=(DTYPES[dtype], (width,)))
    yield table[:special].tobytes()
    rows, old = table[special:], len(table) - special
    for start in range(0, new, _ROWS_AT_ONCE):
        which, weights = fill(np.arange(start, min(start + _ROWS_AT_ONCE, new)), old, new)
        computed = rows[which[:, 0]].copy()
        counted = weights != 0
        alone = counted.sum(axis=1) == 1
        copied = which[np.arange(len(which)), counted.argmax(axis=1)]
        computed[alone] = rows[copied[alone]]
        for row in np.flatnonzero(~alone):
            used = np.flatnonzero(counted[row])
            values = rows[which[row, used]]
            if dtype == "BF16":
                values = (values.astype(np.uint32) << 16).view(np.float32)
            computed[row] = _round_to(weights[row, used] @ values.astype(np.float64), dtype)
        yield computed.tobytes()


def continue_sinusoids(raw: memoryview, dtype: str, width: int, special: int, new: int) -> Iterator[bytes]:
    """Yield the bytes of a longer table of sinusoids: the old rows, then those of the next positions.

    Row p is sin(p / 10000^(2i/d)) for i < d/2, then the cosines. Vaswani et al. 2017, section 3.5. The arguments are
    those of `filled`.
    """
    import numpy as np

    yield bytes(raw)
    old = len(raw) // (width * np.dtype(DTYPES[dtype]).itemsize) - special
    half = (width + 1) // 2
    for start in range(old, new, _ROWS_AT_ONCE):
        positions = np.arange(start, min(start + _ROWS_AT_ONCE, new))[:, None]
        sines = np.sin(positions / 10000 ** (2 * np.arange(half) / width))
        cosines = np.cos(positions / 10000 ** (2 * np.arange(width // 2) / width))
        yield _round_to(np.concatenate([sines, cosines], axis=1), dtype).tobytes()


def _round_to(values: "Array", dtype: str) -> "Array":
    """Round float64 numbers to another format, to the nearest, ties to even."""
    import numpy as np

    if dtype != "BF16":
        return values.astype(DTYPES[dtype])
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
