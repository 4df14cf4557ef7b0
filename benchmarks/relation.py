"""What relation maps cost: attention alone beside stock sdpa on one thread, past the window, inside it and decoding.

    python benchmarks/relation.py [--rounds 3] [--large] [--methods self-extend,dca]

Times are processor seconds, the smallest of rounds that take turns within one process. Attention alone: queries and
keys come rotated, as from a model. `--large` adds 12288 tokens of a 135M model's shape.
"""

import argparse
import os
import sys
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "portable"))

import torch
from transformers import DynamicCache

import relation_cases

SHAPES = {"prefill": (4096, 1024, 8, 8), "large": (12288, 8192, 9, 3)}


def methods(length: int, total: int, pairs: int) -> dict[str, dict]:
    """The settings of every method for a window and a target length."""
    base = [10000.0 ** (-i / pairs) for i in range(pairs)]
    factors = [factor for factor in (2, 4, 8) if factor * length // 2 < total]
    lists = [[w / (1 + (factor - 1) * i / (pairs - 1)) for i, w in enumerate(base)] for factor in factors]
    relation_cases.BASE = base
    return {
        "self-extend": {"window": length // 8},
        "bifocal": {"window": length // 16},
        "dca": {"chunk_size": length, "local": length // 8},
        "rerope": {"window": length // 4, "temperature": "logn"},
        "string": {"shift": length // 3, "window": length // 8},
        "sinks": {"sinks": 4, "window": length - 4},
        "adaptive": {"base": base, "factors": factors, "inverse_frequencies": lists, "attention_factors": factors},
    }


def best(run, rounds: int) -> float:
    """The smallest processor time of some rounds, in milliseconds."""
    times = []
    for _ in range(rounds):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return min(times) * 1e3


def made(name: str, settings: dict, length: int):
    """A method with its settings."""
    cls = next(cls for cls in relation_cases.RELATIONS if cls.name == name)
    return cls({"method": name, "original_length": length, **settings})


def prefill(total: int, length: int, heads: int, groups: int, names: list[str], rounds: int) -> None:
    """Print the ratio to stock for each method, at `total` tokens and inside the window."""
    cases = methods(length, total, 32)
    query, key, value = relation_cases.states(total, heads, groups, 64)
    positions = torch.arange(total)[None]
    query, key = relation_cases.base_rotated(query, key, positions)
    inside = [tensor[:, :, :length].clone() for tensor in (query, key, value)]
    made_all = {name: made(name, settings, length) for name, settings in cases.items() if not names or name in names}

    def attend(method, tensors):
        call = relation_cases.Call(positions[:, : tensors[0].shape[2]])
        return method.attend(stock, call, *tensors, None)

    runs = {"stock": lambda: stock(query, key, value, None), "stock inside": lambda: stock(*inside, None)}
    for name, method in made_all.items():
        runs[name] = lambda method=method: attend(method, (query, key, value))
        runs[f"{name} inside"] = lambda method=method: attend(method, inside)
    times = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(best(run, 1))
    base, base_inside = min(times["stock"]), min(times["stock inside"])
    print(f"attention of {total} tokens, window {length}, {heads} heads on {groups}: stock {base:.0f} ms")
    for name in made_all:
        own, own_inside = min(times[name]) / base, min(times[f"{name} inside"]) / base_inside
        print(f"  {name:12} {own:.3f} x  inside {own_inside:.3f} x")


def stock(query, key, value, mask, **kwargs):
    """Transformers' sdpa: heads that share a key are handed on as they are."""
    attend = torch.nn.functional.scaled_dot_product_attention
    if query.shape[2] == 1:
        query = query.unflatten(1, (key.shape[1], -1)).flatten(2, 3)
        return attend(query, key, value).flatten(1, 2)[:, None], None
    return attend(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2), None


def decode(total: int, length: int, heads: int, groups: int, names: list[str], rounds: int, steps: int = 32) -> None:
    """Print the ratio to stock of one decoding step at `total` cached keys, the cache's own copying included."""
    cases = methods(length, total + 1, 32)
    query, key, value = relation_cases.states(total + steps, heads, groups, 64)
    query, key = relation_cases.base_rotated(query, key, torch.arange(total + steps)[None])

    def run(method, backend):
        cache = DynamicCache()
        cache.update(key[:, :, :total], value[:, :, :total], 0)
        for i in range(total, total + steps):
            if i == total + 1:  # The first step turns everything once.
                start = time.process_time()
            k, v = cache.update(key[:, :, i : i + 1], value[:, :, i : i + 1], 0)
            q = query[:, :, i : i + 1]
            call = relation_cases.Call(torch.tensor([[i]]), cache=cache, backend=backend)
            (stock if method is None else method.attend)(*(() if method is None else (stock, call)), q, k, v, None)
        return (time.process_time() - start) / (steps - 1) * 1e3

    base = min(run(None, "sdpa") for _ in range(rounds))
    print(f"one step at {total} cached, window {length}, {heads} heads on {groups}: stock {base:.2f} ms")
    for name, settings in cases.items():
        if not names or name in names:
            own = [
                min(run(made(name, settings, length), backend) for _ in range(rounds)) for backend in ("sdpa", "other")
            ]
            print(f"  {name:12} tiles {own[0] / base:.3f} x  one call {own[1] / base:.3f} x")


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--methods", default="")
    parser.add_argument("--large", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = [name for name in options.methods.split(",") if name]
    with torch.no_grad():
        prefill(*SHAPES["prefill"], names, options.rounds)
        decode(*SHAPES["prefill"], names, options.rounds)
        if options.large:
            prefill(*SHAPES["large"], names, options.rounds)


if __name__ == "__main__":
    main()
