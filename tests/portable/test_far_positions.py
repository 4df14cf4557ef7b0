"""One row at a million tokens: as exact as the family's own arithmetic at the positions to which a map turns it."""

import numpy as np
import pytest
import torch

from relation_cases import RELATIONS, Call, as_numpy, base_rotated, states, stock
from relation_reference import relation, rotate, rotated_factor, temperature

LENGTH, LAST = 131072, 1_000_000
INVERSE = np.float32(500000.0 ** (-np.arange(8) / 8))
METHODS = {
    "self-extend": {"window": 16384},
    "bifocal": {"window": 8192},
    "dca": {"chunk_size": 98304, "local": 16384},
    "rerope": {"window": 32768, "temperature": "logn"},
    "string": {"shift": 43690, "window": 4096},
    "sinks": {"sinks": 4, "window": 65536},
    "adaptive": {
        "base": INVERSE.tolist(),
        "factors": [2, 4, 8],
        "inverse_frequencies": [[w / (1 + (s - 1) * i / 7) for i, w in enumerate(INVERSE.tolist())] for s in (2, 4, 8)],
        "attention_factors": [1.07, 1.14, 1.21],
    },
}


class Far(Call):
    def inverse(self):
        return torch.from_numpy(INVERSE)


def positions_of(settings):
    """Positions spread over the whole text, at every border of the last row, and the row itself."""
    borders = [settings[key] for key in ("window", "shift", "chunk_size") if key in settings]
    near = [LAST - border + i for border in borders for i in (-2, -1, 0, 1, 2)]
    return sorted({0, 1, 2, 3, 4, 5, *range(77, LAST, 99991), *near, LAST - 2, LAST - 1, LAST})


@pytest.mark.parametrize("name", METHODS)
def test_a_row_at_a_million_tokens(name):
    settings = {"method": name, "original_length": LENGTH, "target_length": 8 * LENGTH, **METHODS[name]}
    where = positions_of(settings)
    query, key, value = states(len(where))
    positions = torch.tensor([where])
    rotated = base_rotated(query, key, positions, inverse=torch.from_numpy(INVERSE))
    method = next(cls for cls in RELATIONS if cls.name == name)(settings)
    output, _ = method.attend(stock, Far(positions), *rotated, value, None)

    # The formula's positions, by the family's own arithmetic: float32 times float32, rounded once.
    q, k, v = as_numpy(query[0, 0, -1], key[0, 0], value[0, 0])
    scores, read = [], []
    for j, n in enumerate(where):
        angles = relation(settings, 0, LAST, n, INVERSE.tolist())
        if angles is not None:
            q_turned, k_turned = (rotate(x, np.float32(a)) for x, a in zip((q, k[j]), angles, strict=True))
            warm = temperature(settings, 0, LAST) * rotated_factor(settings, 0, LAST) ** 2
            scores.append(q_turned @ k_turned / 4 * warm)
            read.append(j)
    weights = np.exp(np.array(scores) - max(scores))
    expected = weights / weights.sum() @ v[read]
    assert np.abs(output[0, -1, 0].double().numpy() - expected).max() < 1e-5
