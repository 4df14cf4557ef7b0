"""What a conversion would write, worked out before anything is written."""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxext.checkpoint.families import idle_window, read, text_config
from ctxext.checkpoint.geometry import default_length
from ctxext.checkpoint.loading import hub_kernels
from ctxext.checkpoint.opening import Checkpoint
from ctxext.checkpoint.other_files import VERSIONED, left_out, other_formats
from ctxext.checkpoint.sentence_files import LENGTHS
from ctxext.converters.card import CardFacts, card_metadata, declared_base, render
from ctxext.converters.engines import Serving, serving_of, unconverted_lines
from ctxext.converters.lengths import index_files, length_files
from ctxext.errors import CtxextError
from ctxext.files.content import MANIFEST, as_json, same_value
from ctxext.files.length import format_length
from ctxext.files.output_directory import records_training
from ctxext.files.strict import parse_json
from ctxext.files.tensor_files import NewTensor
from ctxext.recipes.code.own_code import CODE_FILES, runs_by_itself
from ctxext.recipes.encodings.base import Encoding
from ctxext.recipes.encodings.rotary import ModelConfig, Rotary, model_config, native_type, provenance
from ctxext.recipes.recipe import Recipe, describe_step, plain_config, recipe_from_dict
from ctxext.version import __version__

_REPLACED = ("config.json", "README.md", MANIFEST)
_SAME_WEIGHTS = re.compile(
    r"(model|pytorch_model|tf_model|flax_model|rust_model)\b.*\.(safetensors|bin|bin\.index\.json|h5|msgpack|ot|onnx|gguf)$"
)
_FARTHEST = 32
"""The largest scaling factor of the models published with YaRN."""


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
        weights: Files to link or copy, relative to the source.
        rewritten: The tensors among them that are written anew; all else of them is the source's.
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
    rewritten: tuple[NewTensor, ...]
    others: tuple[Path, ...]
    changes: tuple[Change, ...]
    serving: tuple[Serving, ...]
    cautions: tuple[str, ...]
    stock: ModelConfig

    @property
    def encoding(self) -> Encoding:
        """The encoding of the result."""
        return self.model.encoding

    @property
    def rotary(self) -> Rotary:
        """The same where it is rotary."""
        return self.model.rotary

    @property
    def unconverted(self) -> Mapping[str, str]:
        """By engine the line that serves the source as it is, with the recipe on the command line."""
        return unconverted_lines(self.source.name, self.model, self.serving)


def make_plan(
    source: Checkpoint, recipe: Recipe, *, replace_scaling: bool = False, allow_shorter: bool = False
) -> Plan:
    """Work out a conversion, with the weights checked by header only."""
    before, noted = model_config(source.config, source.original_length), provenance(source.config)
    undone, model, kept, is_replaced = before, before, dict[str, Any](), False
    if before.code or (before.encoding.is_scaled and recipe.replaces_encoding):
        if not replace_scaling:
            raise already_extended(source, before.encoding)
        if noted.get("recipe") and recipe_from_dict(noted["recipe"], "config.json").rewrites_weights:
            raise CtxextError(
                f'The recipe of "{source.name}" wrote weights, which no configuration brings back.',
                hint=f'Start from its source "{noted.get("source")}".',
            )
        is_replaced = True
        undone = model = plain_config(before)
        if model.encoding.is_scaled and recipe.replaces_encoding:
            model = plain_config(model)  # Below our own code the source had a schedule of its own.
        _check_original(source, before.encoding, model.encoding)
        recipe, kept = recipe.taking_over(before)
    recipe = recipe.resolved(model)
    source.check_weights()
    weights = tuple(source.weight_files) or tuple(Path(name) for name in source.remote_sizes)
    names, present = [path.as_posix() for path in (*weights, *source.files)], {*map(Path.as_posix, source.files)}
    if not before.code and (taken := sorted(present.intersection(recipe.code_files(model.config)))):
        raise CtxextError(
            f'"{source.name}" has a file "{taken[0]}" of its own, which is the name of the code of this method.',
            hint="Take it out of a copy of the folder, or choose a method without code.",
        )
    edited = recipe.edit(model)
    rewritten = recipe.new_tensors(source, model)
    stale: list[str] = []
    if recipe.rewrites_weights:  # Files that hold the same weights in another form, the old table among them.
        loaded = {path.as_posix() for path in source.loaded_safetensors or map(Path, source.remote_sizes)}
        beside = dict.fromkeys(name for name in names if "/" not in name)
        stale = [name for name in beside if _SAME_WEIGHTS.match(name) and name not in loaded]
    # What ctxext put there may be taken back; what the model came with may not be lost in silence.
    came_with = undone if noted.get("recipe") else before
    if not allow_shorter:
        _check_reach(source, came_with.encoding, edited.encoding)
    others_win = left_out((*weights, *source.files), source.config)
    edited = dataclasses.replace(
        edited, config={key: value for key, value in edited.config.items() if key != VERSIONED}
    )
    trained, declared = noted.get("finetune") or noted.get("source_finetune"), edited.encoding.declared_length
    config = {
        **edited.config,
        "ctxext": {  # A published file names no folder of its maker's machine.
            "version": __version__,
            "source": source.public_name,
            "revision": source.revision,
            **model.encoding.noted(),
            **({"declared_length": declared} if declared else {}),
            "recipe": recipe.to_dict(),
            **({"source_finetune": trained} if trained else {}),
        },
    }
    texts = {"config.json": as_json(config), **length_files(source.folder, before.encoding, edited.encoding)}
    texts.update(recipe.code_files(model.config))
    texts.update(index_files(source.folder, rewritten))
    gone = {*texts, *_REPLACED, *(CODE_FILES if before.code else ()), *stale}
    # The source's records of training, its adapter and its figures do not describe the result.
    gone.update(name for name in names if records_training(source.folder, name))
    gone.update(name for left in others_win.values() for name in left)
    others = [path for path in source.files if path not in source.weight_files and path.as_posix() not in gone]
    kept_files = [path for path in others if not runs_by_itself(path)]
    serving = serving_of(dataclasses.replace(edited, config=config))
    cautions = cautions_of(source, recipe, edited)
    if is_replaced:
        steps = ", ".join(map(describe_step, (noted.get("recipe") or {}).get("steps", [])))
        what = steps or f"{before.encoding.schedule_summary}, with which the weights were trained"
        left = f"; kept of it: {', '.join(f'{name} {value}' for name, value in kept.items())}" if kept else ""
        lengths = f"from {before.encoding.usable_length} tokens to {edited.encoding.usable_length}"
        cautions = (f"--replace-scaling took away {what}: {lengths}{left}.", *cautions)
    if stale:
        cautions += (f"left out, as they hold the old table: {', '.join(stale)}.",)
    cautions += tuple(
        f"left out, as {reason}: {', '.join(dict.fromkeys(left))}." for reason, left in others_win.items()
    )
    if unasked := [path.as_posix() for path in others if runs_by_itself(path)]:
        cautions += (f"left out, as loading the result would run them: {', '.join(unasked)}.",)
    card = CardFacts(
        source=source.public_name,
        revision=source.revision,
        base="" if source.revision else declared_base(source.config),
        inherited=card_metadata(source.folder),
        recipe=recipe,
        encoding=edited.encoding,
        config=edited.config,
        serving=serving,
        unconverted=unconverted_lines(source.public_name, edited, serving),
        cautions=cautions,
        rewritten=[tensor.name for tensor in rewritten],
    )
    changes: list[Change] = []
    stating = dict.fromkeys(name for name, _ in LENGTHS)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", *stating):
        if name in texts:
            old, new = source.read_json(name) or {}, parse_json(texts[name], name)
            changes += _differences(name, "", old, new)
        if name == "config.json" and (inner := edited.family.text_config):
            parts = (text_config(part, edited.family) for part in (old, new))
            changes += _differences(name, f"{inner}.", *parts)
    texts["README.md"] = render(card)
    return Plan(
        source=source,
        recipe=recipe,
        model=edited,
        texts=texts,
        weights=tuple(path for path in weights if path.as_posix() not in gone),
        rewritten=rewritten,
        others=tuple(kept_files),
        changes=tuple(changes),
        serving=serving,
        cautions=cautions,
        stock=recipe.edit(model, with_code=False),
    )


def already_extended(source: Checkpoint, encoding: Encoding) -> CtxextError:
    """The refusal to scale twice (docs/traps.md, trap 10), which says what there is to lose."""
    noted = provenance(source.config)
    steps = (noted.get("recipe") or {}).get("steps", [])
    if steps:
        origin = noted.get("source")
        replace = "replace the schedule with --replace-scaling."
        return CtxextError(
            f'"{source.name}" is already extended: {", ".join(map(describe_step, steps))} from '
            f"{encoding.trained_length} tokens.",
            hint=f'Start from its source "{origin}", or {replace}' if origin else replace.capitalize(),
        )
    start = "what it was before" if encoding.lacks_original else f"{encoding.trained_length} tokens"
    return CtxextError(
        f'"{source.name}" reads {encoding.usable_length} tokens by a schedule of its own: {encoding.schedule_summary}.',
        hint=f"mspoe, self-extend, dca, adaptive … stand on it. --replace-scaling takes it away, and what the weights "
        f"learned with it, and starts again from {start}.",
    )


def _check_original(source: Checkpoint, before: Encoding, plain: Encoding) -> None:
    """Refuse to start again from a length that nothing says."""
    if before.lacks_original and not plain.is_scaled:
        factor = float(before.numbers.get("factor") or 1)
        guess = max(round(before.claimed_length / factor), 1)
        raise CtxextError(
            f'"{source.name}" was stretched by {factor:g} and does not say from which length.',
            hint=f"Say what it was trained on first, for example --original-length {guess}.",
        )


def _check_reach(source: Checkpoint, before: Encoding, after: Encoding) -> None:
    """Refuse to shorten a model in silence."""
    if after.usable_length >= before.usable_length:
        return
    claims = "declares" if before.declared_length else "reads"
    raise CtxextError(
        f'"{source.name}" {claims} {before.usable_length} tokens, and this would leave {after.usable_length}: factors '
        f"count from its original {after.trained_length}.",
        hint=f"Ask for --target-length {format_length(before.usable_length)} or more, or add --allow-shorter.",
    )


def cautions_of(source: Checkpoint, recipe: Recipe, model: ModelConfig) -> tuple[str, ...]:
    """What a user of a converted checkpoint must know; SOURCE may be the result as well."""
    family = model.family
    cautions = [f"{step.name}: {caution}" for step in recipe.steps if (caution := step.caution_for(model))]
    scales = any(step.kind == "schedule" for step in recipe.steps)
    cautions += model.encoding.cautions(source.config, family, is_changed=scales)
    length = max(model.encoding.usable_length, model.encoding.claimed_length)
    window = idle_window(source.config, family, length)
    if window is not None and (read(model.config, family, "sliding_window") or 0) < length:
        cautions.append(
            f"layers with a window see {window} tokens back, which has no effect up to "
            f"{read(source.config, family, 'max_position_embeddings')} tokens but takes effect beyond: set the window "
            f"to {length} in the source's config.json first to keep these layers whole."
        )
    factor = model.encoding.usable_length / model.encoding.trained_length
    if scales and factor > _FARTHEST:
        cautions.append(
            f"the result has {factor:.0f} times the original context length; published yarn models reach {_FARTHEST} "
            "times. Measure it with ctxext eval."
        )
    if usual := default_length(source.config, model.family):
        cautions.append(
            f"the source's config.json names no context length: {usual} tokens are its configuration class's default."
        )
    if is_new_only(model):
        cautions.append(f"transformers 4.57 does not carry this schedule for {family.model_type}: load it with 5.x.")
    if family.note:
        cautions.append(f"{family.model_type}: {family.note}.")
    if recipe.needs_code:
        cautions.append("the result needs trust_remote_code=True; loading it without fails on purpose.")
    if stale := other_formats(source.files):
        cautions.append(f"{', '.join(stale)} were kept but still hold the source's own position settings.")
    python = [path for path in source.files if path.suffix == ".py" and path.name not in CODE_FILES]
    if not all(runs_by_itself(path) for path in python):
        cautions.append("the source carries its own Python code; it was copied and not run.")
    named = source.config.get("auto_map") or {}
    if any(auto.startswith("AutoModel") for auto in named) and not recipe.needs_code:
        cautions.append(
            "load the result without trust_remote_code: code that auto_map names may not read this schedule; "
            "transformers' own class does."
        )
    if kernels := hub_kernels(source.config):
        cautions.append(
            f"config.json asks for {', '.join(kernels)} on the Hub, which transformers may fetch and run where the "
            "result is loaded; nothing of it ran here."
        )
    return tuple(cautions)


def is_new_only(model: ModelConfig) -> bool:
    """Whether transformers 4.57 does not know the family, or does not carry this schedule for it."""
    types, carrier = model.family.rope_types_4x, model.encoding.carrier
    # Where 4.57 is strict about the keys of a schedule, it refuses a factor of 1 too.
    if "factor" in model.family.rope_scaling_keys.get(carrier, ()) and model.encoding.numbers.get("factor") == 1:
        return True
    return types is not None and native_type(model.family, carrier) not in types


def _differences(file: str, prefix: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    keys = [key for key in {**old, **new} if not (key == "text_config" and prefix == "")]
    return [
        Change(file, prefix + key, old.get(key), new.get(key))
        for key in keys
        if not same_value(old.get(key), new.get(key))
    ]
