"""Tiny checkpoints that every release reads: each method and form of config.json, on one family per layout."""

import json
from collections.abc import Iterator
from pathlib import Path

import tiny_encodings
import tiny_models
from ctxext.api import Recipe, convert
from ctxext.checkpoint.families import family_of
from ctxext.errors import CtxextError
from ctxext.methods import AdjustedBase, MsPoE, SelfExtend, Yarn
from ctxext.recipes.model_config import model_config
from ctxext.recipes.registry import METHODS
from small_llama import change_json

ROTARY = (
    "llama",  # one base, one schedule
    "gemma3",  # two bases, nested
    "gemma3_text",  # two bases, flat
    "qwen3",
    "phi3",  # its own keys of longrope
    "gpt_neox",  # a part of each head rotates
    "qwen3_moe",
    "deepseek_v3",  # latent attention
    "mllama",  # a text model within a larger one, which has a class of its own
    "modernbert",  # an encoder with a base for its local layers
)
OTHERS = (
    "bloom",  # ALiBi
    "deberta",  # a table of distances
    "deberta-v2",
    "deberta-v3",  # buckets of distances
    "xlnet",  # a memory of earlier segments
)
PUBLISHED = {
    "qwen3_moe": {"num_experts": 4},
    "modernbert": {"layer_types": ["full_attention", "sliding_attention"], "global_attn_every_n_layers": 3},
}
"""Keys that published checkpoints have and that transformers 5 saves under another name or omits."""
COMBINED = (
    [Yarn(factor=4), MsPoE(head_order="prompt")],
    [AdjustedBase(theta=1e6, target_length=128), SelfExtend(factor=4)],
)


def sources(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the unconverted checkpoints by family; `folder` is created."""
    folder.mkdir(parents=True)
    for family in ROTARY:
        source = tiny_models.save(family, folder / family)
        change_json(source / "config.json", **PUBLISHED.get(family, {}))
        yield family, source
    for family in OTHERS:
        yield family, tiny_encodings.save(family, folder / family)


def recipes(source: Path) -> Iterator[tuple[str, Recipe]]:
    """Yield each method that a checkpoint supports, with its example's parameters, and combinations of two."""
    config = json.loads((source / "config.json").read_text())
    encoding = model_config(config).encoding
    for method in METHODS:
        if not method.refusal(config, family_of(config)):
            yield method.name, Recipe([method.example_step(encoding)])
    for steps in COMBINED:
        yield "+".join(step.name for step in steps), Recipe(steps)


def build(folder: Path, families: tuple[str, ...] = (), methods: tuple[str, ...] = ()) -> dict[str, Path]:
    """Convert the checkpoints of some families (all by default) with some methods; return the folders by name.

    Names are FAMILY-METHOD, or FAMILY alone for an unconverted checkpoint as ctxext would write it.
    """
    folders = {}
    for family, source in sources(folder / "sources"):
        if families and family not in families:
            continue
        for name, recipe in recipes(source):
            if methods and name not in methods:
                continue
            out = folder / f"{family}-{name}"
            try:
                convert(str(source), out, recipe, check=False)
            except CtxextError:
                continue  # tests/recipes/test_registry_families.py has the reason of each.
            folders[out.name] = out
    return folders
