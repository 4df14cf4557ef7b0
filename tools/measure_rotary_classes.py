"""Compare the rotary embeddings of transformers' classes with the formulas, and record the classes that agree.

Run it with each tested version of transformers:

    PYTHONPATH=src:tests python tools/measure_rotary_classes.py [--write] [FAMILY ...]

A rope type is recorded if the class rotates by the formulas of `ctxext.verify.rotary_classes`, for parameters drawn
from all of its ranges. With `--write` the entries of this version are replaced in rotary_classes.json. An entry is
valid for every version with the same code, so run it with the newest version of each line last.
"""

import json
import math
import random
import sys
from collections.abc import Mapping
from typing import Any

import transformers

import tiny_models
from ctxext.checkpoint.families import FAMILIES, Family
from ctxext.verify import rotary_classes
from ctxext.verify.rotation import Rotation, difference, rotations

DRAWS = 16
"""Schedules of each rope type that a class must agree with."""

Config = dict[str, Any]


def drawn_number(key: str, rng: random.Random) -> float:
    """Draw a parameter of a schedule: any value of its range, or one end of it."""
    low, high = rotary_classes.RANGES[key]
    if rng.random() < 0.1:
        return rng.choice((low, high))
    if rng.random() < 0.2:
        return rng.randint(math.ceil(low), math.floor(min(high, 1e9)))
    return math.exp(rng.uniform(math.log(low), math.log(high))) if low > 0 else rng.uniform(low, high)


def drawn_config(base: Mapping[str, Any], rope_type: str, rng: random.Random) -> Config:
    """Draw a configuration with a schedule of this type, from all the parameters that `rotary_classes` covers."""
    config = {key: value for key, value in base.items() if key not in ("rope_scaling", "rope_parameters")}
    dim = rng.choice((8, 16, 32, 48, 64, 80, 96, 128, 192, 256, 512))
    config["head_dim"] = dim
    length = rng.choice((64, 100, 512, 2048, 4096, 32768, 131072, 1 << 20))
    needed, allowed = rotary_classes.KEYS[rope_type]
    numbers: Config = {}
    for key in sorted(needed | {key for key in allowed if rng.random() < 0.5}):
        if key == "original_max_position_embeddings":
            numbers[key] = length
        elif key == "truncate":
            numbers[key] = rng.random() < 0.5
        elif key in ("short_mscale", "long_mscale"):
            numbers[key] = 1.0
        elif key in ("short_factor", "long_factor"):
            numbers[key] = [drawn_number(key, rng) for _ in range(dim // 2)]
        else:
            numbers[key] = drawn_number(key, rng)
    reached = length
    if "original_max_position_embeddings" in numbers:
        reached = round(length * numbers["factor"])
        numbers["factor"] = reached / length
    theta = drawn_number("rope_theta", rng)
    schedule = {"rope_type": rope_type, **numbers}
    config |= {"max_position_embeddings": reached, "rope_theta": theta}
    config["rope_parameters"] = {"rope_theta": theta, **schedule}
    if rope_type != "default":
        config["rope_scaling"] = dict(schedule)
    if rope_type == "longrope":
        config["original_max_position_embeddings"] = length
    return config


def disagreement(config: Config) -> str:
    """Return the difference between the class and the formulas; empty if they agree."""
    rotary = rotary_classes.flat_rotary(config)
    if rotary is None:
        return "the drawn configuration is not one that is answered for"
    lengths = sorted({rotary.trained_length // 2, rotary.trained_length, rotary.usable_length})
    wanted = rotary_classes.formulas(rotary, lengths)
    for length, entries in rotations(config, lengths).items():
        if [entry.layer_type for entry in entries] != [""]:
            return f"{len(entries)} rotary embeddings or types of layers"
        off = difference(Rotation("", "", entries[0].frequencies, entries[0].scaling), *wanted[length])
        if not off < rotary_classes.TOLERANCE:
            return f"{off:.1e} at {length} tokens"
    return ""


def agreeing(model_type: str, draws: int = DRAWS, seed: int = 0) -> tuple[list[str], dict[str, str]]:
    """Return the rope types for which a class rotates by the formulas, and the problem of each other rope type."""
    base = {"model_type": model_type, **tiny_models.tiny_config(model_type).to_diff_dict()}
    left_out: dict[str, str] = {}
    for rope_type in rotary_classes.KEYS:
        rng = random.Random(f"{seed} {model_type} {rope_type}")
        for _ in range(draws):
            try:
                problem = disagreement(drawn_config(base, rope_type, rng))
            except Exception as error:  # A class may raise anything for a schedule.
                problem = f"{type(error).__name__}: {error}"
            if problem:
                left_out[rope_type] = problem
                break
    return [name for name in rotary_classes.KEYS if name not in left_out], left_out


def is_plain(family: Family) -> bool:
    """Return whether a family has one flat schedule for all its layers, in the keys of Llama.

    Only such families are measured.
    """
    plain = Family(model_type=family.model_type)
    odd = (
        *("positions", "text_config", "length_key", "theta_key", "partial_key", "rotary_dim_key", "nested_rope"),
        *("local_theta_key", "layer_theta_key", "plain_type", "rope_scaling", "rope_scaling_keys", "required_keys"),
        *("explicit_default", "explicit_head_dim", "shared_rotary_key", "rotated", "scalable", "reason", "aliases"),
    )
    partial = {**family.defaults, **family.defaults_4x}.get("partial_rotary_factor", 1.0)
    return partial == 1 and all(getattr(family, name) == getattr(plain, name) for name in odd)


def candidates() -> list[str]:
    """Return the families that can be measured.

    They have flat schedules and one folder of files in the installed transformers.
    """
    known = [name for name, family in FAMILIES.items() if is_plain(family) and name in tiny_models.FAMILIES]
    return [name for name in known if rotary_classes.digest_of(name)]


def main(words: list[str]) -> None:
    """Measure, and print or write."""
    names, entries = [word for word in words if word != "--write"], {}
    for model_type in names or candidates():
        rope_types, left_out = agreeing(model_type)
        sys.stdout.write(f"{model_type}: {', '.join(rope_types) or 'none'} {left_out or ''}\n")
        if rope_types:
            entries[rotary_classes.digest_of(model_type)] = {
                "family": model_type,
                "transformers": transformers.__version__,
                "rope_types": rope_types,
            }
    if "--write" in words:
        kept = json.loads(rotary_classes.RECORD.read_text(encoding="utf-8")) if rotary_classes.RECORD.exists() else {}
        done = {entry["family"] for entry in entries.values()} if names else None
        kept = {
            digest: entry
            for digest, entry in kept.items()
            if entry["transformers"] != transformers.__version__ or (done is not None and entry["family"] not in done)
        }
        order = sorted({**kept, **entries}.items(), key=lambda item: (item[1]["family"], item[1]["transformers"]))
        lines = ",\n".join(f"  {json.dumps(digest)}: {json.dumps(entry)}" for digest, entry in order)
        rotary_classes.RECORD.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
