"""Run by `clean_load.py`, never imported by ctxext: compares the buckets of a checkpoint's class with a reference.

The task has `folder`, `numbers`, the step, `reference`, its file, and `source`, the source's `distance` and
`num_buckets`. Buckets depend on config.json alone, so a very small model with the checkpoint's configuration
reads a text longer than any distance that it distinguishes, up to 2000 tokens, and the lookups in its tables of biases
are compared.
"""

import functools
from typing import Any

from .script import answer, reference_at

SMALL = {"d_model": 8, "d_kv": 4, "d_ff": 8, "vocab_size": 16, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 1}
SMALL |= {"num_experts": 1, "num_sparse_encoder_layers": 0, "num_sparse_decoder_layers": 0}
TABLE = "relative_attention_bias"


def noted(lookups: list[tuple[bool, Any]], is_encoder: bool, _: Any, args: Any) -> None:
    """Keep the buckets that a table is asked for."""
    lookups.append((is_encoder, args[0]))


def looked_up(folder: str, length: int) -> list[tuple[bool, Any]]:
    """For each table whether its stack is bidirectional, and the buckets (queries, keys) that are looked up."""
    import torch
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(folder)
    for name, value in SMALL.items():
        if hasattr(config, name):
            setattr(config, name, value)
    lookups = list[tuple[bool, Any]]()
    model = AutoModel.from_config(config).eval()
    for name, module in model.named_modules():
        if name.endswith(f".{TABLE}") and "global" not in name:
            note = functools.partial(noted, lookups, name.startswith("encoder"))
            module.register_forward_pre_hook(note)
    ids = torch.ones(1, length, dtype=torch.long)
    with torch.no_grad():
        model(input_ids=ids, decoder_input_ids=ids)
    return lookups


def compare(task: dict[str, Any]) -> dict[str, Any]:
    """Compare every bucket that a model looks up with the reference."""
    reference, source = reference_at(task["reference"]), task["source"]
    length = min(int(source["distance"] * task["numbers"]["factor"]) + 20, 2000)
    wrong, distances, lookups = set(), set(), looked_up(task["folder"], length)
    for is_encoder, buckets in lookups:
        queries, keys = buckets.shape[-2:]
        offset = queries if keys == 3 * queries else 0  # LongT5 looks from a block at itself and its neighbours.
        for query in {0, queries // 2, queries - 1}:
            for key, bucket in enumerate(buckets.reshape(-1, queries, keys)[0, query].tolist()):
                relative = key - offset - query
                if not is_encoder and relative > 0:
                    continue  # Masked.
                place = reference.bucket(task["numbers"], {**source, "bidirectional": is_encoder}, relative)
                distances.add(relative)
                # Where the logarithm is a whole number, its last bit decides.
                if bucket not in (int(place - 1e-4), int(place + 1e-4)):
                    wrong.add(relative)
    return {"stacks": len(lookups), "distances": len(distances), "wrong": sorted(wrong, key=abs)}


if __name__.endswith("__main__"):
    answer(compare)
