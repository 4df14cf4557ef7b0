"""What a conversion would write, worked out before anything is written."""

import importlib.metadata
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxext.checkpoint import Checkpoint
from ctxext.converters.card import render_card
from ctxext.converters.engines import Serving, serving_of
from ctxext.errors import CtxextError
from ctxext.families import Family, read, rotated_layers, sliding_layers, text_config
from ctxext.files import MANIFEST, as_json
from ctxext.recipes.length import format_length
from ctxext.recipes.own_code import CODE_FILES
from ctxext.recipes.recipe import Recipe, describe_step, plain_config
from ctxext.recipes.rotary import ModelConfig, Rotary, model_config, native_type, provenance
from ctxext.version import __version__

_REPLACED = ("config.json", "README.md", MANIFEST)
_UNLIMITED = 10**12
_RECORDED_PACKAGES = ("transformers", "torch", "safetensors", "huggingface_hub")


@dataclass(frozen=True)
class Change:
    """One value that a conversion changes in one file; None stands for "not there"."""

    file: str
    key: str
    old: Any
    new: Any


@dataclass(frozen=True)
class Plan:
    """Everything a conversion would write.

    Attributes:
        source: The checkpoint it starts from.
        recipe: The steps with every number filled in.
        model: The configuration of the result.
        texts: Content of the files whose content is new, by name.
        weights: Files to link or copy unchanged, relative to the source.
        others: Files to copy unchanged, relative to the source.
        changes: What changes in the JSON files, for people.
        serving: Which engines can run the result.
        cautions: What a user of the result must know.
        stock: The configuration with those steps only that stock transformers carries.
    """

    source: Checkpoint
    recipe: Recipe
    model: ModelConfig
    texts: Mapping[str, str]
    weights: tuple[Path, ...]
    others: tuple[Path, ...]
    changes: tuple[Change, ...]
    serving: tuple[Serving, ...]
    cautions: tuple[str, ...]
    stock: ModelConfig

    @property
    def rotary(self) -> Rotary:
        """The encoding of the result."""
        return self.model.rotary


def make_plan(
    source: Checkpoint, recipe: Recipe, *, replace_scaling: bool = False, allow_shorter: bool = False
) -> Plan:
    """Work out a conversion.

    Args:
        source: The checkpoint to convert; its weights are checked by header only.
        recipe: What to apply.
        replace_scaling: Take an existing schedule away first.
        allow_shorter: Accept a result that reads less than the source.

    Raises:
        CtxextError: the checkpoint is broken, cannot carry the recipe, is already extended, or would read less.
    """
    before = model_config(source.config, source.original_length)
    own, model, kept, is_replaced = before, before, dict[str, Any](), False
    if before.code or (before.rotary.is_scaled and recipe.changes_frequencies):
        if not replace_scaling:
            raise already_extended(source, before.rotary)
        is_replaced = True
        own = model = plain_config(before)
        if model.rotary.is_scaled and recipe.changes_frequencies:
            model = plain_config(model)  # Below our own code the source had a schedule of its own.
        _check_original(source, before.rotary, model.rotary)
        recipe, kept = recipe.taking_over(before)
    recipe = recipe.resolved(model)
    source.check_weights()
    edited = recipe.edit(model)
    # What ctxext put there may be taken back; what the model came with may not be lost in silence.
    came_with = own if provenance(source.config).get("recipe") else before
    if not allow_shorter:
        _check_reach(source, came_with.rotary, edited.rotary)
    config = {**edited.config, "ctxext": _provenance(source, recipe, model.rotary, edited.rotary)}
    texts = {"config.json": as_json(config), **_length_files(source, before.rotary, edited.rotary)}
    texts.update(recipe.code_files(model.config))
    gone = {*texts, *_REPLACED, *(CODE_FILES if before.code else ())}
    kept_files = [path for path in source.files if path not in source.weight_files and path.as_posix() not in gone]
    serving = serving_of(edited)
    cautions = cautions_of(source, recipe, edited)
    if is_replaced:
        cautions = (_loss(source, before.rotary, edited.rotary, kept), *cautions)
    texts["README.md"] = render_card(source, recipe, edited.rotary, serving, cautions)
    return Plan(
        source=source,
        recipe=recipe,
        model=edited,
        texts=texts,
        weights=tuple(source.weight_files) or tuple(Path(name) for name in source.remote_sizes),
        others=tuple(kept_files),
        changes=tuple(_changes(source, edited.family, texts)),
        serving=serving,
        cautions=cautions,
        stock=recipe.edit(model, with_code=False),
    )


def already_extended(source: Checkpoint, rotary: Rotary) -> CtxextError:
    """The refusal to scale twice (docs/traps.md, trap 10), which says what there is to lose."""
    noted = provenance(source.config)
    steps = (noted.get("recipe") or {}).get("steps", [])
    if steps:
        origin = noted.get("source")
        replace = "replace the schedule with --replace-scaling."
        return CtxextError(
            f'"{source.name}" is already extended: {", ".join(map(describe_step, steps))} from '
            f"{rotary.trained_length} tokens.",
            hint=f'Start from its source "{origin}", or {replace}' if origin else replace.capitalize(),
        )
    start = "what it was before" if rotary.lacks_original else f"{rotary.trained_length} tokens"
    return CtxextError(
        f'"{source.name}" reads {rotary.usable_length} tokens by a schedule of its own: {rotary.schedule_summary}.',
        hint=f"mspoe, self-extend, dca, adaptive … stand on it. --replace-scaling takes it away, and what the weights "
        f"learned with it, and starts again from {start}.",
    )


def _check_original(source: Checkpoint, before: Rotary, plain: Rotary) -> None:
    """Refuse to start again from a length that nothing says.

    Raises:
        CtxextError: a linear schedule has a factor, and neither its file nor the table of known models a length.
    """
    if before.lacks_original and not plain.is_scaled:
        guess = round(before.claimed_length / float(before.parameters.get("factor") or 1))
        raise CtxextError(
            f'"{source.name}" was stretched by {before.parameters.get("factor"):g} and does not say from which length.',
            hint=f"Say what it was trained on first, for example --original-length {guess}.",
        )


def _check_reach(source: Checkpoint, before: Rotary, after: Rotary) -> None:
    """Refuse to shorten a model in silence.

    Raises:
        CtxextError: the result reads less than the source.
    """
    if after.usable_length >= before.usable_length:
        return
    claims = "declares" if before.declared_length else "reads"
    raise CtxextError(
        f'"{source.name}" {claims} {before.usable_length} tokens, and this would leave {after.usable_length}: factors '
        f"count from its original {after.trained_length}.",
        hint=f"Ask for --target-length {format_length(before.usable_length)} or more, or add --allow-shorter.",
    )


def _loss(source: Checkpoint, before: Rotary, after: Rotary, kept: Mapping[str, Any]) -> str:
    """What --replace-scaling took away, by how much, and what it left."""
    noted = (provenance(source.config).get("recipe") or {}).get("steps", [])
    what = ", ".join(map(describe_step, noted)) or f"{before.schedule_summary}, with which the weights were trained"
    left = f"; kept of it: {', '.join(f'{name} {value}' for name, value in kept.items())}" if kept else ""
    return f"--replace-scaling took away {what}: from {before.usable_length} tokens to {after.usable_length}{left}."


def _provenance(source: Checkpoint, recipe: Recipe, plain: Rotary, edited: Rotary) -> dict[str, Any]:
    """What config.json says of the conversion; a published file names no folder of its maker's machine."""
    return {
        "version": __version__,
        "source": source.public_name,
        "revision": source.revision,
        "trained_length": plain.trained_length,
        "source_theta": plain.theta,
        "source_length": plain.context_length,
        **({"declared_length": edited.declared_length} if edited.declared_length else {}),
        "recipe": recipe.to_dict(),
    }


def manifest(plan: Plan, files: Mapping[str, str], weights: Mapping[str, str | None]) -> dict[str, Any]:
    """The content of ctxext.json.

    Args:
        plan: The conversion.
        files: SHA-256 of each small file, by name.
        weights: SHA-256 of each weight file where it is known, by name.
    """
    return {
        "ctxext": __version__,
        "source": {"name": plan.source.public_name, "revision": plan.source.revision},
        "recipe": plan.recipe.to_dict(),
        "versions": {name: _version(name) for name in _RECORDED_PACKAGES},
        "files": dict(sorted(files.items())),
        "weights": dict(sorted(weights.items())),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _length_files(source: Checkpoint, before: Rotary, after: Rotary) -> dict[str, str]:
    """The tokenizer's and the generation's own lengths, brought into agreement (docs/traps.md, trap 11)."""
    texts = {}
    tokenizer = source.read_json("tokenizer_config.json")
    if tokenizer is not None and 0 < (tokenizer.get("model_max_length") or 0) < _UNLIMITED:
        texts["tokenizer_config.json"] = _with_number(
            source.folder / "tokenizer_config.json", tokenizer, "model_max_length", after.claimed_length
        )
    generation = source.read_json("generation_config.json")
    if generation is not None and generation.get("max_length") == before.claimed_length:
        texts["generation_config.json"] = _with_number(
            source.folder / "generation_config.json", generation, "max_length", after.claimed_length
        )
    return texts


def _with_number(path: Path, content: dict[str, Any], key: str, value: int) -> str:
    """A JSON file's text with one number changed and every other byte as it was, where that is possible."""
    text, count = re.subn(rf'("{key}"\s*:\s*)[0-9.eE+]+', rf"\g<1>{value}", path.read_text(encoding="utf-8"))
    return text if count == 1 else as_json({**content, key: value})


def cautions_of(source: Checkpoint, recipe: Recipe, model: ModelConfig) -> tuple[str, ...]:
    """What a user of a converted checkpoint must know; SOURCE may be the result as well."""
    family = model.family
    cautions = [f"{step.name}: {caution}" for step in recipe.steps if (caution := step.caution_for(model))]
    scales = any(step.kind == "schedule" for step in recipe.steps)
    if family.sliding_follows and sliding_layers(source.config, family) and scales:
        cautions.append("its sliding-window layers read the same schedule as the others, so they change too.")
    if not rotated_layers(source.config, family):
        window = read(source.config, family, "sliding_window")
        cautions.append(f"all its layers see a window of {window} tokens only, which a longer schedule does not widen.")
    if is_new_only(model):
        cautions.append(f"transformers 4.57 does not carry this schedule for {family.model_type}: load it with 5.x.")
    if family.note:
        cautions.append(f"{family.model_type}: {family.note}.")
    if recipe.needs_code:
        cautions.append("the result needs trust_remote_code=True; loading it without fails on purpose.")
    stale = [path.as_posix() for path in source.weight_files if path.suffix in (".gguf", ".onnx")]
    if stale:
        cautions.append(f"{', '.join(stale)} were kept but still hold the source's own rotary settings.")
    if any(path.suffix == ".py" and path.name not in CODE_FILES for path in source.files):
        cautions.append("the source carries its own Python code; it was copied and not run.")
    return tuple(cautions)


def is_new_only(model: ModelConfig) -> bool:
    """Whether transformers 4.57 does not know the family, or does not carry this schedule for it."""
    types = model.family.rope_types_4x
    return types is not None and native_type(model.family, model.rotary.rope_type) not in types


def _changes(source: Checkpoint, family: Family, texts: Mapping[str, str]) -> list[Change]:
    found = []
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        if name not in texts:
            continue
        old, new = source.read_json(name) or {}, json.loads(texts[name])
        found += _differences(name, "", old, new)
        if name == "config.json" and family.text_config:
            found += _differences(name, f"{family.text_config}.", text_config(old, family), text_config(new, family))
    return found


def _differences(file: str, prefix: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    keys = [key for key in {**old, **new} if not (key == "text_config" and prefix == "")]
    return [Change(file, prefix + key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)]
