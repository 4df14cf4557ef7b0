"""Logits of methods with code on an accelerator, against the unmodified model, and against float32 on the CPU.

    python benchmarks/logits.py [--attention sdpa,flash_attention_2] [--methods dca,mspoe]
    python benchmarks/logits.py --device cpu --shape tiny

A random Llama whose attention is far from uniform, in bfloat16 and float32. Within its context length, the methods that
leave short inputs unchanged are compared with the unmodified model. The others, and all methods beyond this length, are
compared with their own logits in float32 by eager attention on the CPU; "stock" gives the difference of the type alone.
Each text is computed in one call and from a cache: a prefill in pieces, then some tokens one by one. Prints a line of
JSON for each: the largest difference relative to the largest logit, and the share of positions with the same most
likely token.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
from random_models import MAPS, build, convert, describe, drop_missing, print_line, recipe_of, tokens
from transformers import DynamicCache, LlamaConfig

METHODS = ["stock", *MAPS, "mspoe", "distance-aware"]

# Sizes, the model's context length and a length beyond it.
SHAPES = {
    "small": (
        {
            "hidden_size": 512,
            "intermediate_size": 1408,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "initializer_range": 0.07,
        },
        512,
        2048,
    ),
    "tiny": (
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "initializer_range": 0.2,
        },
        64,
        256,
    ),
}
STEPS = 8


def read_whole(model, ids):
    """Return the logits of a text in one call."""
    return model(ids.to(model.device), use_cache=False).logits.float().cpu()


def read_cached(model, ids):
    """Return the logits of a text from a cache: three pieces, then the last tokens one by one."""
    ids, length = ids.to(model.device), ids.shape[1]
    piece = -(-(length - STEPS) // 3)
    parts = [*ids[:, :-STEPS].split(piece, dim=1), *ids[:, -STEPS:].split(1, dim=1)]
    cache = DynamicCache(config=model.config)
    return torch.cat([model(part, past_key_values=cache, use_cache=True).logits for part in parts], 1).float().cpu()


FORMS = {"whole": read_whole, "cached": read_cached}


def compare(logits, expected) -> dict:
    """Return the differences between logits."""
    return {
        "difference": float((logits - expected).abs().max() / expected.abs().max()),
        "same_tokens": float((logits.argmax(-1) == expected.argmax(-1)).float().mean()),
        "is_finite": bool(logits.isfinite().all()),
    }


def make_models(folder: Path, kind: str, *, is_within: bool):
    """Return the unmodified model and a converted one, with the same weights, in float32 on the CPU."""
    stock, model = (build(folder / name, "cpu", torch.float32, "eager") for name in ("stock", kind))
    _, unexpected = model.load_state_dict(stock.state_dict(), strict=False)
    assert not unexpected, unexpected
    for name, tensor in model.named_parameters():
        if name.endswith("distance.weight") and not is_within:  # Its zeros have no effect.
            torch.nn.init.normal_(tensor)
    for tensor in (*stock.parameters(), *model.parameters()):
        tensor.copy_(tensor.bfloat16())  # Both types compute with the same weights.
    return stock, model


def copy_to(model, folder: Path, device: str, dtype, attention: str):
    """Return a copy of a model on a device, with another type and attention."""
    copy = build(folder, device, dtype, attention)
    copy.load_state_dict(model.state_dict())
    return copy


def measure(folder: Path, config, kind: str, options):
    """Yield a method's differences at both lengths, in each form, by attention and type."""
    for length in (config.max_position_embeddings, SHAPES[options.shape][-1]):
        is_within = length == config.max_position_embeddings
        is_unchanged = is_within and kind not in ("stock", "mspoe")
        stock, model = make_models(folder, kind, is_within=is_within)
        ids = tokens(length)
        expected = {} if is_unchanged else dict.fromkeys(FORMS, read_whole(model, ids))
        for attention, dtype in list_variants(options.attention.split(",")):
            line = {
                "method": kind,
                "length": length,
                "attention": attention,
                "dtype": str(dtype).removeprefix("torch."),
            }
            try:
                if is_unchanged:
                    copy = copy_to(stock, folder / "stock", options.device, dtype, attention)
                    expected = {form: read(copy, ids) for form, read in FORMS.items()}
                copy = copy_to(model, folder / kind, options.device, dtype, attention)
                for form, read in FORMS.items():
                    against = "the unmodified model" if is_unchanged else "float32, eager, CPU"
                    yield line | {"form": form, "against": against, **compare(read(copy, ids), expected[form])}
            except Exception as error:
                yield line | {"error": describe(error)}


def list_variants(attentions: list[str]) -> list:
    """Return pairs of attention and type; flash attention computes in 16 bits only."""
    return [
        (attention, dtype)
        for attention in attentions
        for dtype in (torch.bfloat16, torch.float32)
        if dtype == torch.bfloat16 or not attention.startswith("flash")
    ]


@torch.no_grad()
def main() -> None:
    """Print a line for each method, length, attention, type and form."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, xpu or cpu.")
    parser.add_argument("--shape", choices=list(SHAPES), default="small")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--attention", default="sdpa,flash_attention_2")
    options = parser.parse_args()
    if options.device != "cpu":
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    options.attention = ",".join(drop_missing(options.attention.split(",")))
    sizes, length, beyond = SHAPES[options.shape]
    config = LlamaConfig(**sizes, vocab_size=1024, max_position_embeddings=length)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        config.save_pretrained(folder / "stock")
        for kind in options.methods.split(","):
            if kind != "stock":
                convert(folder / kind, config, recipe_of(kind, config, beyond / length))
            for line in measure(folder, config, kind, options):
                print_line(line)


if __name__ == "__main__":
    main()
