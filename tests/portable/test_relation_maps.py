"""Tiles cover every key that a query reads exactly once, as far, middle or near, for maps with extreme settings."""

import importlib
import random
from types import SimpleNamespace

import pytest
import torch

from ctxext.portable.relation_maps import Beyond, Map, stages
from relation_cases import LENGTH, METHODS, RELATIONS, map_of, step


def made(name, **settings):
    method = RELATIONS[name]
    module = importlib.import_module(f"ctxext.portable.{method.code[0].name.removesuffix('.py')}")
    return getattr(module, method.code_class)({**METHODS[name], "original_length": LENGTH, **settings})


EXTREME = [
    *(("dca", {"chunk_size": size, "local": size - chunk}) for size in (2, 3, 64) for chunk in (1, 2, size - 1)),
    *(("self-extend", {"window": window, "group": group}) for window in (1, 2, 40, 63) for group in (None, 1, 1000)),
    *(("self-extend", {"window": 600, "original_length": length}) for length in (601, 610, 900)),
    *(("bifocal", {"window": window}) for window in (0, 1, 63)),
    *(("rerope", {"window": window}) for window in (1, 63, 64, 600)),
    *(("sinks", {"sinks": sinks, "window": window}) for sinks in (0, 1, 30) for window in (1, 2, 600)),
    *(("window", {"window": window}) for window in (1, 2, 63, 600)),
    ("adaptive", {"factors": [1.02, 1.04, 64], "inverse_frequencies": [METHODS["adaptive"]["base"]] * 3}),
]


@pytest.mark.parametrize(("name", "settings"), EXTREME, ids=[f"{n}-{list(s.values())}"[:60] for n, s in EXTREME])
def test_each_key_is_read_once_by_the_right_part(name, settings):
    rng = random.Random(str(settings))
    rules = map_of(made(name, temperature=rng.choice(["none", "logn"]), **settings))
    check(rules, rng, 300 if 600 in settings.values() else 140)


@pytest.mark.parametrize("name", METHODS)
def test_each_case(name):
    method = RELATIONS[step(name)["method"]]
    module = importlib.import_module(f"ctxext.portable.{method.code[0].name.removesuffix('.py')}")
    check(map_of(getattr(module, method.code_class)(step(name))), random.Random(name))


class Borders(Map):
    """A map with any borders, which move and stop as they like."""

    def __init__(self, steps, widths):
        super().__init__({"original_length": 8}, 8)
        self.steps, self.widths = steps, widths

    def beyond(self, m):
        middle = torch.tensor(self.steps).cumsum(0)[m]
        near = torch.minimum(middle + torch.tensor(self.widths)[m], m + 1)
        return Beyond(
            torch.ones_like(m) + m // 50, torch.minimum(middle, near), torch.minimum(middle, near), near, m, m
        )


@pytest.mark.thorough
def test_borders_that_move_in_any_way():
    for seed in range(40):
        rng = random.Random(seed)
        pick = rng.choice([(0, 1), (0, 0, 0, 1), (1, 1, 1, 0), (0, 1, 1, 5), (1,)])
        steps = [rng.choice(pick) for _ in range(120)]
        widths = [rng.choice([0, 3])] * 120 if seed % 2 else sorted(rng.randrange(9) for _ in range(120))
        rules = Borders([0] * 8 + steps[8:], widths)
        read(rules, 8, 120)
        read(rules, 60, 61)


def check(rules, rng, most=140):
    """A prompt in one call, chunks, and single queries, at and after the first that changes."""
    first = rules.first
    starts = [rng.randrange(first, first + 150)]
    for start, stop in [
        *((first, first + count) for count in (1, 2, 65, most)),
        *((at, first + 151) for at in starts),
    ]:
        read(rules, start, stop)


def read(rules, start, stop):
    """Compare the pairs that the tiles cover with the borders of each query."""
    count = torch.zeros(3, stop - start, stop, dtype=torch.long)
    m, n = torch.arange(start, stop)[None], torch.arange(stop)
    rows, done = rules.rows(m, m), 0
    for level, end, shown in stages(rules, start, stop):
        for part, low_row, high_row, low, high, form in shown:
            assert start <= low_row < high_row <= stop, "queries of the call"
            assert 0 <= low < high <= stop, "keys there are"
            assert low_row <= max(done, start), "each query gets a first tile before any other"
            assert low_row >= done or high_row <= done, "and all queries of a tile are alike in that"
            done = max(done, high_row)
            queries, keys = torch.arange(high_row - low_row)[:, None], torch.arange(high - low)
            if form == "causal":
                assert len(queries) == high - low
                shows = keys <= queries
            elif form == "band":
                shows = (keys > queries) & (keys <= queries + high - low - len(queries))
            else:
                shows = torch.ones(len(queries), high - low, dtype=torch.bool)
            count[["far", "middle", "near"].index(part), low_row - start : high_row - start, low:high] += shows
            assert part != "far" or high <= end
            assert bool((rows.level[0, low_row - start : high_row - start] == level).all())
    far, middle, near = (border[0][:, None] for border in rows[1:4])
    expected = torch.stack([n < far, (n >= middle) & (n < near), (n >= near) & (n <= m[0][:, None])])
    assert torch.equal(count, expected.long()), SimpleNamespace(start=start, stop=stop)
