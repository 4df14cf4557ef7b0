"""Cost of relation maps in vLLM: prefill and decoding beyond the window against the engine's unmodified model.

    VLLM_CPU_KVCACHE_SPACE=1 python benchmarks/plugin.py [--lengths 8192,32768] [--methods self-extend,dca] [--rounds 3]

A random Llama (4 layers, 8 heads and 2 KV heads of 64, width 512, window 2048) and its conversions ×16, all in vLLM's
transformers backend, one thread, prompts of random tokens in chunks of 2048. Times are processor seconds, the smallest
of rounds in which the models take turns within one process. A step is the difference between 17 and 1 new tokens after
a prompt with cached keys. Also prints the largest difference of a log-probability from transformers' by length.
"""

import argparse
import os
import sys
import tempfile
from functools import partial
from pathlib import Path

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}

import torch
from random_models import convert, in_turns, load, map_recipe, table
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.append(str(Path(__file__).parents[1] / "tests/engines"))
from offline_vllm import Engine

SIZES = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4, "num_attention_heads": 8}
WINDOW, FACTOR, STEPS = 2048, 17, 16
ARGUMENTS = {"model_impl": "transformers", "max_num_batched_tokens": 2048, "gpu_memory_utilization": 0.2}


def make(root: Path, kinds: list[str]) -> dict[str, Path]:
    """Write the unmodified model and its conversions, which link its weights.

    The unmodified model declares the conversions' context length, so that the engine accepts prompts beyond its own.
    """
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=1024, max_position_embeddings=WINDOW)
    model = LlamaForCausalLM(config)
    for kind in kinds:
        convert(root / kind, config, map_recipe(kind, FACTOR))
    config.max_position_embeddings = WINDOW * FACTOR
    model.save_pretrained(root / "stock")
    for kind in kinds:
        os.link(root / "stock" / "model.safetensors", root / kind / "model.safetensors")
    return {kind: root / kind for kind in ("stock", *kinds)}


def random_prompt(length: int, seed: int) -> list[int]:
    """Return random token ids."""
    return torch.randint(0, 1024, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def measure(engines: dict[str, Engine], length: int, rounds: int) -> dict[str, dict[str, float]]:
    """Measure the seconds of a prefill and the milliseconds of a decode step."""
    seeds = {kind: iter(range(1, 1 + rounds)) for kind in engines}  # A new prompt every round, so that none is cached.
    prefills = {
        kind: lambda engine=engine, seed=seeds[kind]: engine.write([random_prompt(length, next(seed))], [1])
        for kind, engine in engines.items()
    }
    columns = {f"prefill {length}, s": in_turns(prefills, rounds)}
    asked = random_prompt(length, rounds)[:-STEPS]  # Cached since the last prefill.
    for engine in engines.values():
        engine.write([asked], [1 + STEPS])
    for rooms in (1, 1 + STEPS):
        turns = {kind: partial(engine.write, [asked], [rooms]) for kind, engine in engines.items()}
        columns[str(rooms)] = in_turns(turns, max(rounds, 5))
    short, long = columns.pop("1"), columns.pop(str(1 + STEPS))
    columns[f"step at {length}, ms"] = {kind: 1000 * (long[kind] - short[kind]) / STEPS for kind in engines}
    return columns


@torch.no_grad()
def compute_expected(folder: Path, length: int) -> torch.Tensor:
    """Return the log-probabilities of a prompt's tokens in transformers.

    Call it before the engines are created: vLLM changes classes of transformers.
    """
    ids = random_prompt(length, 0)
    scores = load(folder)(torch.tensor([ids])).logits[0].log_softmax(-1)
    return scores[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--methods", default="self-extend,dca")
    parser.add_argument("--lengths", default="8192,32768")
    parser.add_argument("--eager", action="store_true", help="Do not compile the model.")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lengths = [int(length) for length in options.lengths.split(",")]
    arguments = {**ARGUMENTS, "enforce_eager": True} if options.eager else ARGUMENTS
    with tempfile.TemporaryDirectory() as name:
        folders = make(Path(name), options.methods.split(","))
        wanted = {kind: compute_expected(folder, lengths[0]) for kind, folder in folders.items()}
        engines = {
            kind: Engine(folder, length=max(lengths) + 64, dtype=options.dtype, trust=True, arguments=arguments)
            for kind, folder in folders.items()
        }
        print(f"vLLM {engines['stock'].version}, torch {torch.__version__}, one thread, {options.dtype}, {SIZES}")
        columns: dict[str, dict[str, float]] = {}
        for length in lengths:
            columns |= measure(engines, length, options.rounds)
            print(table(columns), flush=True)
        for kind, engine in engines.items():
            scores = torch.tensor(engine.log_probabilities([random_prompt(lengths[0], 0)])[0])
            print(f"{kind}: largest difference at {lengths[0]}: {float((scores - wanted[kind]).abs().max()):.1e}")


if __name__ == "__main__":
    main()
