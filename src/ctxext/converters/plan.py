"""The plan of a conversion, computed before any file is written."""

import dataclasses
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ctxext.checkpoint.families import idle_window, read, text_config
from ctxext.checkpoint.geometry import default_length
from ctxext.checkpoint.loading import hub_kernels
from ctxext.checkpoint.opening import Checkpoint
from ctxext.checkpoint.other_files import LENGTHS, VERSIONED, find_excluded_files, other_formats
from ctxext.converters.engine_support import Serving, limit_of_4x, serving_of, source_commands
from ctxext.converters.lengths import index_files, length_files
from ctxext.errors import CtxextError
from ctxext.files.content import MANIFEST, same_value
from ctxext.files.length import format_length
from ctxext.files.output_directory import records_training
from ctxext.files.strict import parse_json
from ctxext.files.tensor_files import NewTensor
from ctxext.recipes.code.own_code import CODE_FILES, runs_by_itself
from ctxext.recipes.encodings.base import Encoding, provenance
from ctxext.recipes.encodings.rotary import sliding_layers_follow
from ctxext.recipes.model_config import ModelConfig, beyond_training, model_config
from ctxext.recipes.recipe import Recipe, describe_steps, plain_config, recipe_from_dict, starting_model
from ctxext.version import __version__

_LOG = logging.getLogger(__name__)

_REPLACED = ("config.json", "README.md", MANIFEST)
_SAME_WEIGHTS = re.compile(
    r"(model|pytorch_model|tf_model|flax_model|rust_model)\b.*\.(safetensors|bin|bin\.index\.json|h5|msgpack|ot|onnx|gguf)$"
)
_FARTHEST = 32
"""The largest scaling factor of the models published with YaRN."""


@dataclass(frozen=True)
class Change:
    """One value that a conversion changes in one file; None if it is absent."""

    file: str
    key: str
    old: Any
    new: Any


@dataclass(frozen=True)
class Plan:
    """Planned result of a conversion.

    Attributes:
        source: The source checkpoint.
        recipe: The steps with all parameters resolved.
        start: The configuration before the steps: the source's, without its schedule if that is replaced.
        stock: The configuration with only the steps that transformers implements without code.
        model: The configuration of the result, as written to config.json.
        texts: Content of the other files with new content, by name, without the card.
        weights: Files to link or copy, relative to the source.
        rewritten: The tensors among them that are rewritten; all others are unchanged.
        others: Files to copy unchanged, relative to the source.
        replaced: Description of the scaling removed from the source; empty if none was.
        excluded_files: Files of the source that the result omits, by reason.
    """

    source: Checkpoint
    recipe: Recipe
    start: ModelConfig
    stock: ModelConfig
    model: ModelConfig
    texts: Mapping[str, str]
    weights: tuple[Path, ...]
    rewritten: tuple[NewTensor, ...]
    others: tuple[Path, ...]
    replaced: str
    excluded_files: Mapping[str, Sequence[str]]

    @property
    def encoding(self) -> Encoding:
        """The encoding of the result."""
        return self.model.encoding

    @property
    def written_files(self) -> list[str]:
        """The names of all files with new content, sorted."""
        return sorted([*self.texts, *_REPLACED])

    @cached_property
    def changes(self) -> tuple[Change, ...]:
        """The changes in the JSON files, for display."""
        old, new, family = self.source.read_json("config.json") or {}, self.model.config, self.model.family
        changes = _differences("config.json", "", old, new)
        if inner := family.text_config:
            changes += _differences("config.json", f"{inner}.", *(text_config(part, family) for part in (old, new)))
        for name in dict.fromkeys(("generation_config.json", "tokenizer_config.json", *(name for name, _ in LENGTHS))):
            if name in self.texts:
                changes += _differences(name, "", self.source.read_json(name) or {}, parse_json(self.texts[name], name))
        return tuple(changes)

    @cached_property
    def serving(self) -> tuple[Serving, ...]:
        """Status of the result in each engine."""
        return serving_of(self.model)

    @cached_property
    def cautions(self) -> tuple[str, ...]:
        """Warnings for users of the result."""
        left = (f"omitted, because {reason}: {', '.join(files)}." for reason, files in self.excluded_files.items())
        replaced = [self.replaced] if self.replaced else []
        return (*replaced, *cautions_of(self.source, self.recipe, self.model), *left)

    @property
    def source_commands(self) -> Mapping[str, str]:
        """By engine the command that serves the unconverted source with the recipe."""
        return source_commands(self.source.name, self.model, self.serving)


def default_name(source: str, recipe: Recipe, encoding: Encoding) -> str:
    """Return the name of a conversion: that of its source, the methods and the length."""
    methods = "-".join(step.name for step in recipe.steps)
    return f"{source or 'model'}-{methods}-{format_length(encoding.usable_length)}"


def make_plan(
    source: Checkpoint, recipe: Recipe, *, replace_scaling: bool = False, allow_shorter: bool = False
) -> Plan:
    """Plan a conversion; weights are checked by their headers only."""
    before = model_config(source.config, source.original_length)
    start, recipe, inherited = _find_start(source, before, recipe, replace_scaling=replace_scaling)
    recipe = recipe.resolve(start)
    _LOG.debug("planning %s from %s", recipe.to_dict()["steps"], start.encoding)
    stock = recipe.edit(start, with_code=False)  # What no method supports is refused before weights are read.
    model = recipe.add_code(stock)
    source.check_weights()
    code = recipe.code_files(start.config)
    if not before.code and (taken := sorted({path.as_posix() for path in source.files}.intersection(code))):
        raise CtxextError(
            f'"{source.name}" already has a file "{taken[0]}", which this method would write.',
            hint="Remove it from a copy of the folder, or choose a method without code.",
        )
    rewritten = recipe.new_tensors(source, start)
    if not allow_shorter:
        # An extension by ctxext may be removed; the context of the source model must not be lost silently.
        is_ours = start is not before and provenance(source.config).get("recipe")
        check_length(source.name, (plain_config(before) if is_ours else before).encoding, model.encoding)
    lengths = dict[str, str]()
    if model.encoding.limits_inputs:
        old, new = before.encoding.claimed_length, model.encoding.claimed_length
        lengths = length_files(source.folder, old, new, is_extended=model.encoding.is_scaled)
    texts = {**lengths, **code, **index_files(source.folder, rewritten)}
    replaced = ""
    if start is not before:
        trained = f"{before.encoding.schedule_summary}, with which the weights were trained"
        replaced = describe_replaced(
            _describe_recorded_steps(source) or trained, before.encoding, model.encoding, inherited
        )
    weights, others, omitted = _sort_files(source, recipe, texts, has_code=bool(before.code))
    return Plan(
        source=source,
        recipe=recipe,
        start=start,
        stock=stock,
        model=_add_record(source, recipe, start, model),
        texts=texts,
        weights=weights,
        rewritten=rewritten,
        others=others,
        replaced=replaced,
        excluded_files=omitted,
    )


def _find_start(
    source: Checkpoint, before: ModelConfig, recipe: Recipe, *, replace_scaling: bool
) -> tuple[ModelConfig, Recipe, Mapping[str, Any]]:
    """Return the configuration to start from, the recipe with inherited parameters, and those parameters."""
    start = starting_model(before, recipe)
    if start is before:
        return before, recipe, {}
    if not replace_scaling:
        raise already_extended(source, before.encoding)
    record = provenance(source.config)
    if record.get("recipe") and recipe_from_dict(record["recipe"], "config.json").rewrites_weights:
        raise CtxextError(
            f'The recipe of "{source.name}" changed weights, which cannot be restored.',
            hint=f'Start from its source "{record.get("source")}".',
        )
    if before.encoding.lacks_original and not start.encoding.is_scaled:
        factor = f"{float(before.encoding.numbers.get('factor') or 1):g}"
        raise unknown_original_error(source.name, factor, before.encoding)
    return start, *recipe.take_over(before)


def _add_record(source: Checkpoint, recipe: Recipe, start: ModelConfig, model: ModelConfig) -> ModelConfig:
    """Return the configuration of the result with its source and recipe recorded."""
    record, declared = provenance(source.config), model.encoding.declared_length
    trained = record.get("finetune") or record.get("source_finetune")
    config = {
        **{key: value for key, value in model.config.items() if key != VERSIONED},
        "ctxext": {  # A published file must not contain a local path.
            "version": __version__,
            "source": source.public_name,
            "revision": source.revision,
            **start.encoding.to_record(),
            **({"declared_length": declared} if declared else {}),
            "recipe": recipe.to_dict(),
            **({"source_finetune": trained} if trained else {}),
        },
    }
    return dataclasses.replace(model, config=config)


def _sort_files(
    source: Checkpoint, recipe: Recipe, texts: Collection[str], *, has_code: bool
) -> tuple[tuple[Path, ...], tuple[Path, ...], Mapping[str, Sequence[str]]]:
    """Return the weight files and other files to keep, and the omitted files by reason."""
    weights = tuple(source.weight_files) or tuple(Path(name) for name in source.remote_sizes)
    names = [path.as_posix() for path in (*weights, *source.files)]
    stale: list[str] = []
    if recipe.rewrites_weights:  # Omit other formats of the weights: they contain the old table.
        loaded = {path.as_posix() for path in source.loaded_safetensors or map(Path, source.remote_sizes)}
        top_level = dict.fromkeys(name for name in names if "/" not in name)
        stale = [name for name in top_level if _SAME_WEIGHTS.match(name) and name not in loaded]
    misleading = find_excluded_files((*weights, *source.files), source.config)
    omitted = {*texts, *_REPLACED, *(CODE_FILES if has_code else ()), *stale}.union(*misleading.values())
    # The source's records of training, its adapter and its figures do not describe the result.
    omitted.update(name for name in names if records_training(source.folder, name))
    others = [path for path in source.files if path not in source.weight_files and path.as_posix() not in omitted]
    reasons = {
        "they contain the old table": stale,
        **{reason: [*dict.fromkeys(files)] for reason, files in misleading.items()},
        "loading the result would run them": [path.as_posix() for path in others if runs_by_itself(path)],
    }
    return (
        tuple(path for path in weights if path.as_posix() not in omitted),
        tuple(path for path in others if not runs_by_itself(path)),
        {reason: files for reason, files in reasons.items() if files},
    )


def _describe_recorded_steps(source: Checkpoint) -> str:
    """Describe the steps that ctxext recorded in a checkpoint; empty if there are none."""
    return describe_steps((provenance(source.config).get("recipe") or {}).get("steps", []))


def describe_replaced(removed: str, before: Encoding, after: Encoding, inherited: Mapping[str, Any]) -> str:
    """Describe the scaling that --replace-scaling removed and the parameters that the recipe inherited."""
    parameters = ", ".join(f"{name} {value}" for name, value in inherited.items())
    remaining = f"; inherited parameters: {parameters}" if parameters else ""
    lengths = f"from {before.usable_length} tokens to {after.usable_length}"
    return f"--replace-scaling removed {removed}: {lengths}{remaining}."


def already_extended(source: Checkpoint, encoding: Encoding, *, can_replace: bool = True) -> CtxextError:
    """Return the error for a second scaling (docs/traps.md, trap 10), with a hint for replacing the first.

    Args:
        source: The checkpoint.
        encoding: Its encoding.
        can_replace: Whether the command has --replace-scaling.
    """
    removal = "ctxext convert MODEL OUT --method NAME --replace-scaling"
    if steps := _describe_recorded_steps(source):
        origin = provenance(source.config).get("source")
        replace = "replace the schedule with --replace-scaling." if can_replace else f"replace the recipe: {removal}"
        return CtxextError(
            f'"{source.name}" is already extended: {steps} from {encoding.trained_length} tokens.',
            hint=f'Start from its source "{origin}", or {replace}' if origin else replace.capitalize(),
        )
    start = "the unscaled model" if encoding.lacks_original else f"{encoding.trained_length} tokens"
    hint = (
        "Choose a method that keeps the schedule, such as mspoe, self-extend, dca or adaptive, or remove it with "
        f"--replace-scaling (may hurt a model trained with it) and start from {start}."
    )
    return CtxextError(
        f'"{source.name}" already has a schedule for {encoding.usable_length} tokens: {encoding.schedule_summary}.',
        hint=hint if can_replace else f"Replace it without a search (may hurt a model trained with it): {removal}",
    )


def unknown_original_error(name: str, schedule: str, encoding: Encoding) -> CtxextError:
    """Return the error for replacing a schedule, described in a few words, with an unknown original length."""
    guess = max(round(encoding.claimed_length / float(encoding.numbers.get("factor") or 1)), 1)
    # A list of divisors has no factor that the original length could be computed from.
    example = f", for example --original-length {guess}" if encoding.feature == "linear" else " with --original-length"
    return CtxextError(
        f'"{name}" is scaled by {schedule} from an unknown original length.', hint=f"Add its original length{example}."
    )


def check_length(name: str, before: Encoding, after: Encoding) -> None:
    """Raise if the result has a shorter context than the source with this name."""
    if after.usable_length >= before.usable_length:
        return
    claims = "declares" if before.declared_length else "supports"
    raise CtxextError(
        f'"{name}" {claims} {before.usable_length} tokens, but the result would have '
        f"{after.usable_length}: factors apply to its original {after.trained_length}.",
        hint=f"Use --target-length {format_length(before.usable_length)} or more, or add --allow-shorter.",
    )


def cautions_of(source: Checkpoint, recipe: Recipe, model: ModelConfig) -> tuple[str, ...]:
    """Return the warnings for users of a converted checkpoint; `source` may also be the result."""
    family = model.family
    cautions = recipe.cautions(model)
    scales = any(step.kind == "schedule" for step in recipe.steps)
    cautions += model.encoding.cautions(source.config, family, is_changed=recipe.changes_frequencies)
    length = max(model.encoding.usable_length, model.encoding.claimed_length)
    sliding_follow = recipe.changes_frequencies and sliding_layers_follow(source.config, family, model.encoding)
    window = idle_window(source.config, family, length)
    if window is not None and (read(model.config, family, "sliding_window") or 0) < length:
        widen = f": to avoid this, first set the window to {length} in the source's config.json" * sliding_follow
        cautions.append(
            f"the sliding window of {window} tokens has no effect up to "
            f"{read(source.config, family, 'max_position_embeddings')} tokens, but limits its layers beyond{widen}."
        )
    if not sliding_follow and (beyond := beyond_training(model)):
        cautions.append(beyond)
    factor = model.encoding.usable_length / model.encoding.trained_length
    if scales and factor > _FARTHEST:
        cautions.append(
            f"the result has {factor:.0f} times the original context length; published yarn models reach {_FARTHEST} "
            "times. Measure it with ctxext eval."
        )
    if usual := default_length(source.config, model.family):
        cautions.append(
            f"the source's config.json contains no context length: {usual} tokens is the default of its class."
        )
    if is_new_only(model):
        cautions.append(f"transformers 4.57 does not support this schedule for {family.model_type}: load it with 5.x.")
    if first := first_release_of_5(model):
        cautions.append(
            f"{_FAULTS[model.encoding.feature][1].format(family.model_type)}: load it with {first} or newer."
        )
    if family.note:
        cautions.append(f"{family.model_type}: {family.note}.")
    if recipe.needs_code:
        cautions.append("the result needs trust_remote_code=True; loading it without fails on purpose.")
    if stale := other_formats(source.files):
        cautions.append(f"{', '.join(stale)} were copied and still contain the position settings of the source.")
    python = [path for path in source.files if path.suffix == ".py" and path.name not in CODE_FILES]
    if not all(runs_by_itself(path) for path in python):
        cautions.append("the source contains Python code, which was copied but not run.")
    named = source.config.get("auto_map") or {}
    if any(auto.startswith("AutoModel") for auto in named) and not recipe.needs_code:
        cautions.append(
            "load the result without trust_remote_code: the code in auto_map may not support this schedule; the class "
            "of transformers does."
        )
    if kernels := hub_kernels(source.config):
        cautions.append(
            f"config.json refers to {', '.join(kernels)} on the Hub, which transformers may fetch and run when the "
            "result is loaded; ctxext did not run it."
        )
    return tuple(cautions)


_FAULTS = {
    "longrope": ("5.21", "transformers 5.0 to 5.20 fail on the second long text with this schedule for {}"),
    "yarn": ("5.9", "transformers 5.0 to 5.8 cannot load this schedule for {}"),
}
"""Faults with a rope type in families that have a schedule per layer type, and the release that has none."""


def first_release_of_5(model: ModelConfig) -> str:
    """Return the first release of transformers 5 that reads this schedule; empty if all do."""
    return _FAULTS[model.encoding.feature][0] if model.family.nested_rope and model.encoding.feature in _FAULTS else ""


def is_new_only(model: ModelConfig) -> bool:
    """Return whether transformers 4.57 does not support the family, or this schedule for it."""
    # If 4.57 validates the keys of a schedule, it also rejects a factor of 1.
    keys = model.family.rope_scaling_keys.get(model.encoding.feature, ())
    return ("factor" in keys and model.encoding.numbers.get("factor") == 1) or bool(limit_of_4x(model))


def _differences(file: str, prefix: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    keys = [key for key in {**old, **new} if not (key == "text_config" and prefix == "")]
    return [
        Change(file, prefix + key, old.get(key), new.get(key))
        for key in keys
        if not same_value(old.get(key), new.get(key))
    ]
