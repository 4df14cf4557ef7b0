"""Convert a GGUF file: change keys and, if necessary, add small tensors; weights are copied unchanged."""

import contextlib
import filecmp
import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ctxext.checkpoint.families import family_of
from ctxext.converters.options import ConvertOptions
from ctxext.converters.plan import check_length, default_name, describe_replaced, unknown_original_error
from ctxext.errors import CtxextError
from ctxext.files.content import Progress, check_room
from ctxext.files.output_directory import (
    OverwriteOptions,
    beside,
    check_out_file,
    check_parent,
    explain_disk_errors,
    lock_output,
)
from ctxext.files.tensor_files import BLOCK, copy_range
from ctxext.gguf import SUFFIX, is_gguf, part_paths
from ctxext.gguf.header import F32, INT32, Header, Tensor, Value, read_header, value_of
from ctxext.gguf.model import (
    BETA_KEYS,
    BETAS,
    FACTORS,
    LOG_MULTIPLIER,
    ORIGINAL,
    RECIPE_KEY,
    TEMPERATURE,
    TENSORS_KEY,
    Architecture,
    GgufModel,
    Part,
    factors_of,
    is_part,
    open_gguf,
    rotated_pairs,
    rotation_in_llama_cpp,
)
from ctxext.notebook import table
from ctxext.options import accepts_options
from ctxext.recipes.encodings.base import Encoding
from ctxext.recipes.encodings.frequencies import inverse_frequencies
from ctxext.recipes.encodings.rotary import SLIDING_FOLLOWS, Rotary, attention_scaling
from ctxext.recipes.model_config import ModelConfig
from ctxext.recipes.recipe import Recipe, describe_steps
from ctxext.recipes.registry import METHODS
from ctxext.version import __version__

TOLERANCE = 1e-5
"""Largest relative difference of a frequency; GGUF stores the base and the factors as float32."""
_SUPPORTED = "pi, ntk, abf, yarn, ntk-by-parts"


@dataclass(frozen=True)
class GgufPlan:
    """The planned conversion of a GGUF file, with the lists of divisors if there are any."""

    source: GgufModel
    recipe: Recipe
    model: ModelConfig
    header: Header
    factors: tuple[float, ...] | None
    cautions: tuple[str, ...]

    @property
    def changes(self) -> dict[str, tuple[Any, Any]]:
        """The keys that change, except the record: old and new value; None for an absent key."""
        old, new = self.source.header.values, self.header.values
        names = [key for key in {**old, **new} if key != RECIPE_KEY and old.get(key) != new.get(key)]
        return {key: (self.source.header.get(key), self.header.get(key)) for key in names}


@dataclass(frozen=True)
class GgufConversion:
    """A converted GGUF file.

    Attributes:
        out: The file, the first of several if the source is split.
        plan: The plan of the conversion.
        difference: The largest relative difference of a frequency, or of the factor on cos and sin, between the
            written file in llama.cpp and the methods.
    """

    out: Path
    plan: GgufPlan
    difference: float

    def __repr__(self) -> str:
        encoding = self.plan.model.encoding
        lengths = f"{encoding.trained_length} → {encoding.usable_length} tokens"
        return f"GgufConversion({self.out.name!r}: {self.plan.recipe.summary()}, {lengths})"

    def _repr_html_(self) -> str:
        return table({"out": self.out, "recipe": self.plan.recipe.summary(), "difference": f"{self.difference:.0e}"})


@accepts_options(ConvertOptions)
def plan_gguf(source: str | Path, recipe: Recipe, *, options: ConvertOptions) -> GgufPlan:
    """Plan the conversion of a GGUF file, or of a split model by its first file; only headers and divisors are read."""
    model = open_gguf(source, options.original_length)
    if recipe.needs_code:
        names = ", ".join(step.name for step in recipe.steps if step.needs_code())
        raise CtxextError(
            f"{names} needs modeling code, which llama.cpp does not run.",
            hint=f"GGUF files support {_SUPPORTED}. To use {names}, convert the checkpoint for transformers.",
        )
    start = _start(model, options)
    if start is not model.model:
        recipe, _ = recipe.take_over(model.plain)
    recipe = recipe.resolve(start)
    edited = recipe.edit(start)
    if not options.allow_shorter:
        check_length(str(source), model.model.encoding, edited.encoding)
    keys, factors = schedule_of(edited.encoding, model.architecture)
    keys = _keep_temperature(model, keys)
    cautions = recipe.cautions(edited)
    follows = any(family_of({"model_type": name}).sliding_follows for name in model.architecture.model_types)
    if follows and recipe.changes_frequencies and model.header.get(model.key("attention.sliding_window")):
        cautions.append(SLIDING_FOLLOWS)
    if start is not model.model:
        cautions.insert(0, describe_replaced(_schedule_text(model), model.model.encoding, edited.encoding, {}))
    header = model.header
    values, replaced = dict(header.values), dict[str, Any](model.recipe.get("replaced", {}))
    for name, content in keys.items():
        key = model.key(name)
        if key not in replaced and (content is not None or key in values):
            replaced[key] = header.get(key)
        if content is not None:
            values[key] = value_of(content)
        else:
            values.pop(key, None)
    tensors, lists = header.tensors, model.architecture.lists
    present = factors_of(model.files, model.architecture)
    if present:  # Divisors of 1 have no effect and keep the layout of the file.
        rotated = len(rotated_pairs(present))
        factors = (*(factors or (1.0,) * rotated), *present[rotated:])
    if factors is not None:
        replaced.setdefault(FACTORS, list(present) or None)
    if factors is not None and not present:
        for name in lists:
            end = max((tensor.offset + tensor.size for tensor in tensors), default=0)  # Trailing bytes are ignored.
            end += -end % header.alignment
            tensors += (Tensor(name, (len(factors),), F32, end),)
        if TENSORS_KEY in values:  # llama.cpp reads an int32.
            values[TENSORS_KEY] = Value(INT32, struct.pack("<i", model.num_tensors + len(lists)))
    record = {
        "version": __version__,
        "recipe": recipe.to_dict(),
        "trained_length": start.encoding.trained_length,
        "replaced": replaced,
    }
    values[RECIPE_KEY] = value_of(json.dumps(record))
    edited_header = replace(header, values=values, tensors=tensors)
    # Tensors that move by whole blocks can be cloned by the file system.
    room = (header.data_start - len(edited_header.to_bytes())) % BLOCK
    values[RECIPE_KEY] = value_of(json.dumps(record) + " " * room)
    return GgufPlan(model, recipe, edited, replace(edited_header, values=values), factors, tuple(cautions))


def _start(model: GgufModel, options: ConvertOptions) -> ModelConfig:
    """Return the model without a schedule, to which the recipe applies; raise if its schedule must be kept."""
    if not model.recipe and not model.model.encoding.is_scaled:
        return model.model
    if not options.replace_scaling:
        raise CtxextError(
            f'"{model.path}" is already extended: {_schedule_text(model)}.',
            hint="Convert its source, or remove this with --replace-scaling.",
        )
    if model.lacks_original:
        raise unknown_original_error(str(model.path), _schedule_text(model), model.plain.encoding)
    return model.unscaled_model


def _schedule_text(model: GgufModel) -> str:
    """Describe the schedule of a model in a few words, with the file's attention factor."""
    if model.recipe:
        return describe_steps(model.recipe["recipe"]["steps"])
    encoding = model.model.rotary
    summary = encoding.schedule_summary
    if model.lacks_original and encoding.rope_type == "longrope":
        summary = f"longrope by {' and '.join(model.architecture.lists)}"
    attention = float(model.header.get(model.key("rope.scaling.attn_factor")) or 1)
    return summary if attention == 1 else f"{summary} with attention factor {attention:g}"


def _keep_temperature(model: GgufModel, keys: Mapping[str, float | str | None]) -> Mapping[str, float | str | None]:
    """Return the keys with the length from which mistral3 raises its temperature; it shares a key with YaRN."""
    if TEMPERATURE not in model.architecture.reads or not model.header.get(model.key(TEMPERATURE)):
        return keys
    start = model.header.get(model.key(ORIGINAL), model.header.get(model.key("context_length")))
    if keys[ORIGINAL] not in (None, start):
        raise CtxextError(
            f'"{model.path}" raises its attention temperature from {start} tokens, and yarn would start from '
            f"{keys[ORIGINAL]}; llama.cpp has one key for both.",
            hint=f"Add --original-length {start}, or choose pi, ntk or abf.",
        )
    return {**keys, ORIGINAL: start}


def schedule_of(
    encoding: Encoding, architecture: Architecture
) -> tuple[Mapping[str, float | str | None], tuple[float, ...] | None]:
    """Return a schedule in llama.cpp's terms: keys, and the content of the lists of divisors.

    Keys are without the architecture's name; keys with None must be absent. In all architectures they express a base, a
    linear schedule, and YaRN with the paper's betas, without divisors (None). Other schedules that do not depend on the
    length are lists of divisors (plain / actual frequency), in architectures that support them.
    """
    keys: dict[str, float | str | None] = {"context_length": encoding.claimed_length}
    if not isinstance(encoding, Rotary):
        return keys, None
    rotary, numbers, kind = encoding, encoding.parameters, encoding.rope_type
    scaling, scores = attention_scaling(rotary), _score_scaling(rotary)
    keys |= {
        "rope.freq_base": float(rotary.theta),
        "rope.scale_linear": None,
        "rope.scaling.type": None,
        "rope.scaling.factor": None,
        ORIGINAL: None,
        "rope.scaling.attn_factor": None,
        "rope.scaling.finetuned": None,
        LOG_MULTIPLIER: None,
        **dict.fromkeys(BETA_KEYS),
    }
    if kind == "default":
        return keys, None
    has_scores = architecture.family.scales_scores
    if kind == "linear":
        factor = float(numbers["factor"])
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": factor}
        if has_scores and factor > 1:  # Cancels the temperature that the graph applies without YaRN.
            keys[LOG_MULTIPLIER] = (1 / (0.1 * math.log(factor) + 1) - 1) / math.log(factor)
        return keys, None
    betas = (float(numbers.get("beta_fast") or BETAS[0]), float(numbers.get("beta_slow") or BETAS[1]))
    # A list needs no attention factor, which would also apply to sliding-window layers.
    prefers_list = scaling == 1 and architecture.has_sliding_base and architecture.lists
    if kind == "yarn" and betas == BETAS and numbers.get("truncate", True) and not prefers_list:
        factor = float(numbers.get("factor") or rotary.context_length / rotary.schedule_length)
        keys |= {"rope.scaling.type": "yarn", "rope.scaling.factor": factor}
        keys[ORIGINAL] = rotary.schedule_length
        usual = 0.1 * math.log(factor) + 1
        if has_scores and not math.isclose(scores, scaling**2, rel_tol=1e-7):
            keys[LOG_MULTIPLIER], usual = (math.sqrt(scores) / scaling - 1) / math.log(factor), 1.0
        if not math.isclose(scaling, usual, rel_tol=1e-7):
            _check_factor(architecture)
            keys["rope.scaling.attn_factor"] = scaling / usual
        return keys, None
    if rotary.depends_on_length:
        raise CtxextError(
            f"{kind} depends on the length of the text, but llama.cpp has one schedule per run.",
            hint=f"Choose one of {_SUPPORTED}, or a longrope recipe with one list.",
        )
    if not architecture.lists:
        subject = "yarn with other ends of its ramp (betas, or truncate false)" if kind == "yarn" else kind
        raise CtxextError(
            f'{subject} needs a list of frequencies, which llama.cpp does not support for "{architecture.name}".',
            hint=f"Choose one of {_SUPPORTED}; ntk-by-parts is the most similar.",
        )
    plain = inverse_frequencies(replace(rotary, parameters={"rope_type": "default"}))
    factors = tuple(a / b for a, b in zip(plain, inverse_frequencies(rotary), strict=True))
    keys["rope.scaling.type"] = "none"
    if scaling != 1:
        _check_factor(architecture)
        keys["rope.scaling.attn_factor"] = scaling
    return keys, factors


def _check_factor(architecture: Architecture) -> None:
    """Raise if an attention factor would change layers that must stay."""
    if architecture.has_sliding_base:
        raise CtxextError(
            f'llama.cpp would apply the attention factor also to the sliding-window layers of "{architecture.name}".',
            hint="Choose pi, ntk, abf or yarn, which need none.",
        )


def _score_scaling(rotary: Rotary) -> float:
    """Compute DeepSeek's factor on all scores of latent attention: (0.1 · mscale_all_dim · ln(s) + 1)²."""
    weight, factor = rotary.parameters.get("mscale_all_dim") or 0.0, rotary.parameters.get("factor") or 1.0
    return float(0.1 * weight * math.log(factor) + 1) ** 2 if rotary.rope_type == "yarn" else 1.0


def check_methods(model: GgufModel) -> dict[str, str]:
    """Return, by method, why llama.cpp cannot use it with this file; empty if it can. Experimental ones are omitted."""
    start, reasons = model.unscaled_model, {}
    for method in METHODS:
        if method.is_experimental or method.encoding != start.family.encoding:
            continue
        if method.needs_code():
            reasons[method.name] = "needs modeling code"
            continue
        try:
            step = method.example_step(start.encoding)
            schedule_of(step.adapt(start).resolve(start.encoding).edit(start).encoding, model.architecture)
            reasons[method.name] = ""
        except CtxextError as error:
            reasons[method.name] = error.message
    return reasons


@accepts_options(ConvertOptions)
def convert_gguf(
    source: str | Path,
    out: str | Path | None,
    recipe: Recipe,
    *,
    options: ConvertOptions,
    progress: Progress | None = None,
) -> GgufConversion:
    """Convert a GGUF file; quantized tensors are copied and never decoded.

    Args:
        source: The file, or the first of a split model; then all parts are written.
        out: The file to create; NAME-METHOD-LENGTH.gguf in the current folder if None.
        recipe: The recipe to apply.
        options: Options of the conversion. Each field is also a keyword argument.
        progress: Called with the current activity, the bytes done and the bytes in total.
    """
    plan = plan_gguf(source, recipe, options=options)
    count, name = len(plan.source.parts), plan.source.path.name
    stem = name[: -len(SUFFIX)].removesuffix(f"-00001-of-{count:05d}")
    target = Path(out or default_name(stem, plan.recipe, plan.model.encoding) + SUFFIX)
    if not is_gguf(target):
        raise CtxextError(f'OUT "{target}" is not a GGUF file name.', hint=f"Name it {target}{SUFFIX}.")
    targets = [target] if count == 1 else list(part_paths(target, count))
    with explain_disk_errors(target):
        check_parent(target)
        target.parent.mkdir(parents=True, exist_ok=True)
    with explain_disk_errors(target), lock_output(targets[0].resolve()), contextlib.ExitStack() as stack:
        works = [stack.enter_context(beside(place)) / "new" for place in targets]
        _check_places(targets, plan.source, options)
        _write(plan, works, progress)
        written = [Part(work, read_header(work)) for work in works]
        difference = check_rotation(written, plan.source.architecture, plan.model)
        _check_places(targets, plan.source, options, works)
        _give_names(works, targets)
    return GgufConversion(targets[0], plan, difference)


def _check_places(
    targets: Sequence[Path], source: GgufModel, options: OverwriteOptions, works: Sequence[Path] = ()
) -> None:
    """Raise if a file that must be kept would be replaced, by `check_file` for every part.

    Later parts contain no record. They may be replaced if ctxext created their first part, or if they have the content
    that will be written, for example after a killed run. Until the new files are written and passed as `works`, only
    sizes and descriptions of tensors are compared.
    """
    with_parts = replace(options, overwrite_anything=options.replaces)
    is_ours = _is_ours(targets[0])
    for number, (place, part) in enumerate(zip(targets, source.files, strict=True)):
        may_go = bool(number) and place.is_file() and options.replaces
        if may_go and is_ours:
            may_go = is_part(place, number, len(targets))
        elif may_go:
            may_go = filecmp.cmp(place, works[number], shallow=False) if works else _is_like(place, part)
        check_file(place, source.parts, with_parts if may_go else options)


def _is_like(place: Path, part: Part) -> bool:
    """Return whether a file has the size of a part and the same tensors in the same places."""
    try:
        return place.stat().st_size == part.path.stat().st_size and read_header(place).tensors == part.header.tensors
    except (CtxextError, OSError):
        return False


def check_file(place: Path, sources: tuple[Path, ...], options: OverwriteOptions) -> None:
    """Raise if a file cannot be written or must not be replaced."""
    if any(place.exists() and place.samefile(source) for source in sources):
        raise CtxextError(f'OUT "{place}" is SOURCE itself.', hint="Choose another name.")
    check_out_file(place, options, _is_ours, "was not created by ctxext")


def _is_ours(place: Path) -> bool:
    try:
        return RECIPE_KEY in read_header(place).values
    except (CtxextError, OSError):
        return False


def _give_names(works: Sequence[Path], targets: Sequence[Path]) -> None:
    """Rename finished files; a single file replaces an old one atomically.

    The first of several parts is removed first and added last, so that a mixture of old and new parts cannot be loaded.
    Old parts are moved, and restored after an error.
    """
    if len(works) == 1:
        works[0].replace(targets[0])
        return
    try:
        for work, place in zip(works, targets, strict=True):
            if place.exists() or place.is_symlink():
                place.rename(work.with_name("old"))
        for work, place in reversed(list(zip(works, targets, strict=True))):
            work.rename(place)
    except BaseException:
        for work, place in reversed(list(zip(works, targets, strict=True))):
            if not work.exists():
                place.unlink(missing_ok=True)
        raise


def _write(plan: GgufPlan, works: list[Path], progress: Progress | None) -> None:
    files, packed = plan.source.files, plan.header.to_bytes()
    sizes = [part.path.stat().st_size for part in files]
    check_room(works[0].parent, sum(sizes) + len(packed))
    done = 0
    for part, work, size in zip(files, works, sizes, strict=True):
        is_first = part is files[0]
        header = plan.header if is_first else part.header
        with part.path.open("rb") as source, work.open("xb", buffering=0) as target:
            start = part.header.data_start if is_first else 0
            if is_first:
                target.write(packed)
            for piece in copy_range(source, target, start, size - start):
                done += piece
                if progress is not None:
                    progress("copying tensors", done, sum(sizes))
            data_start = len(packed) if is_first else header.data_start
            for tensor in header.tensors if plan.factors is not None else ():
                if tensor.name in plan.source.architecture.lists:
                    target.seek(data_start + tensor.offset)
                    packed_factors = struct.pack(f"<{len(plan.factors or ())}f", *(plan.factors or ()))
                    # The last tensor must be padded too.
                    padding = -len(packed_factors) % header.alignment if header.tensors[-1] is tensor else 0
                    target.write(packed_factors + bytes(padding))
            os.fsync(target.fileno())


def check_rotation(files: Sequence[Part], architecture: Architecture, model: ModelConfig) -> float:
    """Raise if the rotation of written files in llama.cpp differs from the model's schedule.

    Returns the result of `measure_rotation`.
    """
    difference = measure_rotation(files, architecture, model)
    if not difference <= TOLERANCE:
        raise CtxextError(
            f"The rotation in llama.cpp differs from the recipe: a frequency is off by {difference:.1e}.",
            hint="This is a bug in ctxext. Please report it with this command.",
        )
    return difference


def measure_rotation(files: Sequence[Part], architecture: Architecture, model: ModelConfig) -> float:
    """Compare the rotation of files in llama.cpp with a model's schedule.

    Returns the largest relative difference of a frequency or of a factor: on cos and sin, or on all scores.
    """
    if not isinstance(model.encoding, Rotary):
        return 0.0
    rotary = model.encoding
    frequencies, attention = rotation_in_llama_cpp(files, architecture)
    scores = _score_scaling(rotary) if architecture.family.scales_scores else 1.0
    expected = [*inverse_frequencies(rotary), attention_scaling(rotary), scores]
    pairs = zip([*frequencies, *attention], expected, strict=True)
    return max(abs(actual - number) / abs(number) for actual, number in pairs)
