"""Try every rope type on a tiny model of every rotary family, and record those that take effect in families.json.

Run it after tools/make_families.py:

    PYTHONPATH=src:tests python tools/measure_rope_types.py [--write] [FAMILY ...]

A rope type takes effect if the full-attention layers of the loaded model rotate by the angles of the formula. If the
family distinguishes sliding layers, they must rotate as before.
"""

import copy
import json
import math
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedModel

import tiny_models
from ctxext.checkpoint.families import Family, family_of, find_family, read, rotary_dim, rotated_layers, serves_sliding
from make_families import ALL_TYPES, TABLE, save

TRAINED, FACTOR, LENGTH = tiny_models.MAX_POSITIONS, 4.0, 200
KEPT = ("partial_rotary_factor", "mrope_section", "mrope_interleaved", "llama_4_scaling_beta")
Angles = dict[str, tuple[torch.Tensor, float]]


def parameters(rope_type: str, pairs: int, family: Family) -> dict[str, Any]:
    """Return the rope dict of a type, without theta."""
    if rope_type == "default":
        return {"rope_type": family.plain_type}
    found: dict[str, Any] = {"rope_type": rope_type}
    if rope_type == "longrope":
        found["short_factor"] = [1.0] * pairs
        found["long_factor"] = [1.5 + 0.5 * index for index in range(pairs)]
    found["factor"] = FACTOR
    if rope_type in ("yarn", "llama3", "longrope"):
        found["original_max_position_embeddings"] = TRAINED
    if rope_type == "llama3":
        found.update(low_freq_factor=1.0, high_freq_factor=4.0)
    return found


def expected(rope_type: str, theta: float, pairs: int, span: int) -> tuple[torch.Tensor, float]:
    """Compute the angles of position 1 and the factor on cosine and sine by the formulas of the papers.

    Args:
        rope_type: The schedule; "default" means the base of NTK-aware scaling.
        theta: The base before scaling.
        pairs: The number of angles.
        span: The dimension in the exponent: twice the pairs, except for partial rotation over a whole head.
    """
    steps = torch.arange(0, 2 * pairs, 2, dtype=torch.float64)
    base = theta ** (-steps / span)
    if rope_type == "default":
        return (theta * FACTOR ** (span / (span - 2))) ** (-steps / span), 1.0
    if rope_type in ("linear", "proportional"):
        return base / FACTOR, 1.0
    if rope_type == "dynamic":
        grown = theta * (FACTOR * LENGTH / TRAINED - (FACTOR - 1)) ** (span / (span - 2))
        return grown ** (-steps / span), 1.0
    if rope_type == "longrope":
        lists = torch.tensor([1.5 + 0.5 * index for index in range(pairs)], dtype=torch.float64)
        return base / lists, math.sqrt(1 + math.log(FACTOR) / math.log(TRAINED))
    rotations = TRAINED * base / (2 * math.pi)
    if rope_type == "llama3":
        kept = ((rotations - 1) / (4 - 1)).clamp(0, 1)
        return kept * base + (1 - kept) * base / FACTOR, 1.0
    low, high = (span * math.log(TRAINED / (beta * 2 * math.pi)) / (2 * math.log(theta)) for beta in (32, 1))
    low, high = max(math.floor(low), 0), min(math.ceil(high), span - 1)
    ramp = ((torch.arange(pairs, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)
    return base * (1 - ramp) + base / FACTOR * ramp, 0.1 * math.log(FACTOR) + 1


def written(config: dict[str, Any], family: Family, rope_type: str) -> dict[str, Any]:
    """Return config.json with a schedule, in the v4 and v5 formats, by the rules in the family's data."""
    edited = copy.deepcopy(config)
    text: dict[str, Any] = edited.get(family.text_config or "", edited)
    old = dict(text.get("rope_parameters") or {})
    theta, span, pairs = shape(config, family)
    if rope_type == "default":
        theta *= FACTOR ** (span / (span - 2))
    elif rope_type != "dynamic":
        text[family.length_key] = int(TRAINED * FACTOR)
    plain = parameters(rope_type, pairs, family)
    if family.nested_rope:
        inner = old.get(family.full_types[0]) or {}
        plain = {**{key: inner[key] for key in KEPT if key in inner}, **plain}
        local = read(config, family, "local_rope_theta")
        nested = {name: value for name, value in old.items() if isinstance(value, Mapping)}
        for name in family.sliding_types if local else ():
            nested.setdefault(name, {"rope_type": "default", "rope_theta": local})
        text["rope_parameters"] = {**nested, **{name: {**plain, "rope_theta": theta} for name in family.full_types}}
    else:
        plain = {**{key: old[key] for key in KEPT if key in old}, **plain}
        for key in family.required_keys:
            plain.setdefault(key, TRAINED if key.startswith("original") else expected(rope_type, theta, pairs, span)[1])
        text["rope_parameters"] = {**plain, "rope_theta": theta}
    text.pop("rope_scaling", None)
    if family.rope_scaling and (rope_type != "default" or family.explicit_default):
        text["rope_scaling"] = strict(family, plain)
    if thetas := text.get(family.layer_theta_key or ""):
        for index in rotated_layers(config, family):
            thetas[index] = theta
    if family.rope_scaling or family.local_theta_key:
        text[family.theta_key] = theta
    if rope_type == "longrope":
        text["original_max_position_embeddings"] = TRAINED
    return edited


def strict(family: Family, plain: dict[str, Any]) -> dict[str, Any]:
    """Return the rope dict without the keys that 4.57 rejects."""
    keys = family.rope_scaling_keys.get(plain["rope_type"])
    whole = {**plain, "type": plain["rope_type"]}
    return {key: whole[key] for key in keys} if keys else dict(plain)


def shape(config: Mapping[str, Any], family: Family) -> tuple[float, int, int]:
    """Return the base, the dimension in the exponent, and the number of angles."""
    dim = rotary_dim(config, family)
    span = read(config, family, "head_dim") if family.plain_type == "proportional" else dim
    return float(read(config, family, "rope_theta")), span, (dim + 1) // 2


def angles(model: PreTrainedModel) -> Angles:
    """Return the angles of position 1 and the factor on cosine and sine of each rotary module.

    They are taken from a real forward pass.
    """
    seen: Angles = {}

    def watch(name: str) -> Any:
        def hook(module: torch.nn.Module, given: Any, named: Any, out: Any) -> None:
            words = [name, *(item for item in (*given, *named.values()) if isinstance(item, str))]
            angle = (
                torch.complex(*(part.double() for part in out)) if isinstance(out, tuple) else out.to(torch.complex128)
            )
            row = angle.reshape(-1, *angle.shape[-2:])[0] if angle.shape[-2] == LENGTH else angle.flatten(2)[0]
            seen[".".join(words)] = (row[1].angle().unique(), float(row[1].abs().max()))

        return hook

    hooks = [
        module.register_forward_hook(watch(name), with_kwargs=True)
        for name, module in model.named_modules()
        if "otary" in type(module).__name__ and "ision" not in type(module).__name__
    ]
    cached = {} if type(model).__name__.endswith("ForMaskedLM") else {"use_cache": False}
    with torch.no_grad():
        model(input_ids=torch.arange(LENGTH)[None] % 90 + 5, **cached)
    for hook in hooks:
        hook.remove()
    return seen


def load(config: dict[str, Any]) -> PreTrainedModel:
    """Build a model with random weights from a config.json, which is read from disk like a checkpoint's."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        found = AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, find_family(config).loader)._model_mapping[type(found)]
    if kind.config_class is not type(found):
        found = found.get_text_config(decoder=True)
    torch.manual_seed(0)
    return kind._from_config(found, dtype=torch.float32).eval()


def verdict(config: dict[str, Any], family: Family, rope_type: str, before: Angles) -> str:
    """Return the effect of a rope type in the loaded model: "ok", or the problem."""
    theta, span, pairs = shape(config, family)
    try:
        after = angles(load(written(config, family, rope_type)))
    except Exception as error:  # Any exception of transformers is the result.
        return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    want, scaling = expected(rope_type, theta, pairs, span)
    want = (
        torch.cat([want, torch.zeros(1, dtype=torch.float64)])
        if family.plain_type == "proportional" and span > 2 * pairs
        else want
    )
    for name, (found, factor) in after.items():
        local = serves_sliding(config, family, name)
        was, was_factor = before.get(name, (want, scaling))
        if local or (family.layer_theta_key and rope_type == "default" and close(found, was)):
            if not (close(found, was) and math.isclose(factor, was_factor, rel_tol=1e-5)):
                return "changes the sliding layers too"
        elif not close(found, want.unique()):
            return "has no effect" if close(found, was) else "other angles than the formula's"
        elif not math.isclose(factor, scaling, rel_tol=1e-5):
            return f"attention factor {factor:.4f}, not {scaling:.4f}"
    return "ok"


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two sets of angles are equal in float32."""
    return one.shape == other.shape and torch.allclose(one, other.to(one.dtype), rtol=2e-5, atol=1e-9)


def measure(model_type: str) -> dict[str, str]:
    """Return the verdict on each rope type for one family."""
    with tempfile.TemporaryDirectory() as folder:
        config = tiny_models.tiny_config(model_type)
        config.save_pretrained(folder)
        content = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
    family = family_of(content)
    if family.reason or family.positions != "rotary":
        return {}
    types = [*ALL_TYPES, *(["proportional"] if family.plain_type == "proportional" else [])]
    before = angles(load(content))
    return {rope_type: verdict(content, family, rope_type, before) for rope_type in types}


def note(family: dict[str, Any], able: list[str], found: Mapping[str, str]) -> None:
    """Record the rope types that take effect in a family."""
    family.pop("rope_types", None)
    if found and able != ALL_TYPES:
        family["rope_types"] = able


def main() -> None:
    """Print the problems, and with --write record the rope types that take effect."""
    transformers.logging.set_verbosity_error()
    names = [name for name in sys.argv[1:] if not name.startswith("-")] or tiny_models.FAMILIES
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    for name in names:
        found = measure(name)
        wrong = {rope_type: words for rope_type, words in found.items() if words != "ok"}
        print(name, json.dumps(wrong) if wrong else "ok", flush=True)
        note(table["families"][name], [rope_type for rope_type, words in found.items() if words == "ok"], found)
    if "--write" in sys.argv:
        save(table)


if __name__ == "__main__":
    main()
