"""Check that the installed transformers applies a configuration's rotation, before converting and without weights.

The code of a family supports different schedules in each version and silently ignores the others. So the stock model
is built from the configuration, and its rotary embeddings are compared with the methods' references. Only these
embeddings, which are small, are in memory; the rest of the model is on the meta device, so models of any size fit.
"""

import dataclasses
import inspect
import math
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxext.checkpoint.families import Family, base_of_module, find_family, serves_sliding
from ctxext.checkpoint.loading import forbid_downloads, hub_backbones, quiet_transformers, stock_class
from ctxext.errors import CtxextError
from ctxext.recipes.base import Method
from ctxext.recipes.encodings.frequencies import inverse_frequencies
from ctxext.recipes.encodings.rotary import Rotary, attention_scaling
from ctxext.recipes.model_config import ModelConfig
from ctxext.recipes.recipe import Recipe
from ctxext.redaction import shorten
from ctxext.verify.references import REFERENCES
from ctxext.verify.rotary_classes import TOLERANCE as MEASURED_TOLERANCE
from ctxext.verify.rotary_classes import measured_rotations

TOLERANCE = 2e-5
"""Largest relative difference of a frequency or of the factor on cos and sin."""
OTHER_TOWERS = ("vision", "visual", "audio")
"""Words in the names of modules outside the language model."""


@dataclass(frozen=True)
class Rotation:
    """The rotation of one rotary embedding.

    Attributes:
        module: Its name in the model.
        layer_type: The type of layer, if one module serves several.
        frequencies: Its distinct inverse frequencies in ascending order; 0 for dimensions that do not rotate.
        scaling: The factor on cosine and sine.
    """

    module: str
    layer_type: str
    frequencies: tuple[float, ...]
    scaling: float


def check_rotation(recipe: Recipe, source: Mapping[str, Any], plain: ModelConfig, stock: ModelConfig) -> float | None:
    """Compare the rotation in the installed transformers with the recipe.

    Args:
        recipe: The recipe to apply, resolved.
        source: The content of the source's config.json, without code; the sliding layers keep its rotation.
        plain: The configuration that the recipe starts from.
        stock: The configuration with the recipe's steps that stock transformers supports.

    Returns:
        The largest relative difference from the recipe's inverse frequencies; None if it changes none.
    """
    if not recipe.changes_frequencies:
        return None
    family, largest = plain.family, 0.0
    lengths = sorted({max(plain.rotary.trained_length // 2, 2), stock.rotary.usable_length})
    # A measured class need not be run. If the difference is too large by the formulas, the class itself is run.
    if (measured := measured_rotations(stock.config, family, lengths)) is not None:
        for length, (frequencies, scaling) in measured.items():
            rotation = Rotation("", "", tuple(sorted(set(frequencies))), scaling)
            largest = max(largest, difference(rotation, *expected_rotation(recipe, plain, stock, length)))
        if largest < TOLERANCE - MEASURED_TOLERANCE:
            return largest
        largest = 0.0
    before, after = rotations(source, lengths), rotations(stock.config, lengths)
    for length in lengths:
        expected = expected_rotation(recipe, plain, stock, length)
        was = {_identity(entry, source, family): entry for entry in before[length]}
        for entry in after[length]:
            unscaled = was.get(_identity(entry, stock.config, family))
            change = math.inf if unscaled is None else difference(entry, unscaled.frequencies, unscaled.scaling)
            if serves_sliding(stock.config, family, entry.module, entry.layer_type):
                base = base_of_module(stock.config, family, entry.module)
                if change > TOLERANCE and base is not None and family.sliding_follows:
                    own = expected_rotation(recipe, _with_base(plain, base), _with_base(stock, base), length)
                    change = difference(entry, *own)
                if change > TOLERANCE:
                    raise _unsupported_error(family, f"{entry.module} of its sliding layers would change too")
                continue
            off = difference(entry, *expected)
            if not off < TOLERANCE:
                steps = ", ".join(step.summary() for step in recipe.steps if not step.needs_code())
                problem = f"{entry.module} would differ from {steps} by {off:.1e}"
                raise _unsupported_error(family, f"{steps} would have no effect" if change < TOLERANCE else problem)
            largest = max(largest, off)
    if not after[lengths[0]]:
        raise _unsupported_error(family, "it has no rotary embedding")
    return largest


def check_kept_rotation(source: Mapping[str, Any], result: ModelConfig) -> float:
    """Check that the installed transformers rotates a result as its source, in every layer that rotates.

    Some schedules depend on the context length in config.json.

    Args:
        source: The content of the source's config.json.
        result: The configuration of the result.

    Returns:
        The largest relative difference of an inverse frequency or of the factor on cos and sin.
    """
    lengths = sorted({max(result.encoding.trained_length // 2, 2), result.encoding.context_length})
    before, after, largest = rotations(source, lengths), rotations(result.config, lengths), 0.0
    for length in lengths:
        for old, new in zip(before[length], after[length], strict=True):
            largest = max(largest, change := difference(new, old.frequencies, old.scaling))
            if change > TOLERANCE:
                raise _unsupported_error(result.family, f"{new.module} would rotate differently at the new length")
    return largest


def expected_rotation(
    recipe: Recipe, plain: ModelConfig, result: ModelConfig, length: int
) -> tuple[Sequence[float], float]:
    """Return the inverse frequencies and the factor on cos and sin that a loaded model must have at a length in tokens.

    They are computed by the methods' references, or by transformers' formulas if the source's schedule was kept.
    """
    if plain.rotary.is_scaled:
        return inverse_frequencies(result.rotary, length), attention_scaling(result.rotary)
    return expected_frequencies(recipe.steps, plain.rotary, length)


def expected_frequencies(steps: Sequence[Method], plain: Rotary, at: int) -> tuple[list[float], float]:
    """Compute the inverse frequencies and the factor on cos and sin after applying steps to a plain encoding.

    The steps are resolved, and `at` is the length in tokens.
    """
    model = {"theta": plain.theta, "dim": plain.dim, "span": plain.span, "length": plain.trained_length}
    frequencies, scaling = [plain.theta ** (-2 * i / plain.span) for i in range(plain.dim // 2)], 1.0
    for step in steps:
        if step.kind not in ("base", "schedule"):
            continue
        reference = reference_of(type(step))
        with report_reference_errors(type(step)):
            if step.kind == "schedule":
                frequencies, scaling = reference.schedule(step.to_dict(), model, at)
            else:
                model["theta"] = reference.base(step.to_dict(), model)
                frequencies = [model["theta"] ** (-2 * i / plain.span) for i in range(plain.dim // 2)]
    return frequencies, scaling


def reference_of(method: Method | type[Method]) -> Any:
    """Return a method's reference, an object with the functions in references/README.md."""
    if method.name not in REFERENCES:
        raise CtxextError(
            f'"{method.name}" has no reference implementation.',
            hint="Add its functions to REFERENCES in verify/references.",
        )
    return REFERENCES[method.name]


@contextmanager
def report_reference_errors(method: Method | type[Method]) -> Iterator[None]:
    """Report any error of a reference in one line, with the file and line."""
    try:
        yield
    except Exception as error:  # References are contributed formulas and may raise anything.
        trace = traceback.extract_tb(error.__traceback__)
        frames = [frame for frame in trace if Path(frame.filename).parent.name == "references"]
        place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
        raise reference_error([method.name], f"{type(error).__name__}: {error}{place}") from error


def reference_error(names: Sequence[str], detail: str) -> CtxextError:
    """Return the error for a fault in the reference of some methods."""
    return CtxextError(
        f"The reference of {' and '.join(names)} fails: {' '.join(detail.split())}",
        hint="Fix the reference; the checkpoint may be correct. --no-verify converts without this check.",
    )


def _identity(entry: Rotation, config: Mapping[str, Any], family: Family) -> tuple[Any, str]:
    """Return what a rotary embedding has in common with that of another configuration: its name, or its base."""
    base = base_of_module(config, family, entry.module)
    return entry.module if base is None else base, entry.layer_type


def _with_base(model: ModelConfig, base: float) -> ModelConfig:
    return dataclasses.replace(model, encoding=dataclasses.replace(model.rotary, theta=base))


def difference(entry: Rotation, expected: Sequence[float], scaling: float) -> float:
    """Return the largest relative difference of a frequency or of the factor; infinite if the counts differ."""
    frequencies = [frequency for frequency in entry.frequencies if frequency > 0]
    if len(frequencies) != len(set(expected)):
        return math.inf
    return largest_difference([*zip(frequencies, sorted(set(expected)), strict=True), (entry.scaling, scaling)])


def largest_difference(pairs: Iterable[tuple[float, float]]) -> float:
    """Return the largest relative difference of two numbers; infinite for NaN, which `max` ignores."""
    differences = [abs(actual / expected - 1) for actual, expected in pairs]
    return math.inf if any(map(math.isnan, differences)) else max(differences)


def _unsupported_error(family: Family, reason: str) -> CtxextError:
    import transformers

    return CtxextError(
        f'transformers {transformers.__version__} does not support this for "{family.model_type}": {reason}.',
        hint="Use another version of transformers, or another method. --no-verify converts without this check.",
    )


def rotations(config: Mapping[str, Any], lengths: Sequence[int]) -> dict[int, list[Rotation]]:
    """Return the rotation of each rotary embedding in the language model of a configuration without code, by length."""
    rotary = [
        (name, module)
        for name, module in stock_model(config).named_modules()
        if "otary" in type(module).__name__ and not any(word in name for word in OTHER_TOWERS)
    ]
    return {
        length: [_read_rotation(*entry, kind, length) for entry in rotary for kind in _layer_types(entry[1])]
        for length in lengths
    }


def stock_model(config: Mapping[str, Any]) -> Any:
    """Build the unmodified model of a configuration on the meta device, with its rotary embeddings in memory."""
    from transformers import __version__ as version

    try:
        kind, described = stock_class(config, find_family(config).loader)
        with quiet_transformers(), forbid_downloads():
            return _build_on_meta(kind, described)
    except Exception as error:  # Any exception of transformers is the result.
        reason = shorten(str(error), 200) or type(error).__name__
        raise CtxextError(
            f'transformers {version} cannot build "{config.get("model_type")}" from this configuration: {reason}',
            hint=f'config.json names the backbone "{", ".join(named)}", which is not downloaded. Describe it there.'
            if (named := hub_backbones(config))
            else "",
        ) from error


def _build_on_meta(kind: Any, config: Any) -> Any:
    import torch
    from transformers import activations

    # Constructors of some activations read the values of tensors.
    small = {
        kind for kind in vars(activations).values() if isinstance(kind, type) and issubclass(kind, torch.nn.Module)
    }
    with torch.device("meta"), _build_in_memory(small):
        model = kind._from_config(config, dtype=torch.float32)
        with _build_in_memory({type(module) for module in model.modules() if "otary" in type(module).__name__}):
            return kind._from_config(config, dtype=torch.float32)


@contextmanager
def _build_in_memory(kinds: set[type]) -> Iterator[None]:
    """Build modules of these classes on the CPU, regardless of the device of the others."""
    import torch

    originals = {kind: kind.__init__ for kind in kinds}  # type: ignore[misc]

    def build_on_cpu(original: Any) -> Any:
        def init(*args: Any, **kwargs: Any) -> None:
            with torch.device("cpu"):
                original(*args, **kwargs)

        return init

    try:
        for kind, original in originals.items():
            kind.__init__ = build_on_cpu(original)  # type: ignore[misc]
        yield
    finally:
        for kind, original in originals.items():
            kind.__init__ = original  # type: ignore[misc]


def _layer_types(module: Any) -> Sequence[str]:
    """Return the layer types that a rotary embedding distinguishes; by default one without a name."""
    names = [name.removesuffix("_inv_freq") for name, _ in module.named_buffers() if name.endswith("_inv_freq")]
    return [name for name in names if name != "original" and not name.endswith("_original")] or [""]


def _read_rotation(name: str, module: Any, layer_type: str, length: int) -> Rotation:
    import torch

    positions = torch.tensor([[1, max(length, 2) - 1]])
    schedule = getattr(getattr(module, "config", None), "rope_scaling", None) or {}
    # In some families only attentions have the attribute.
    if hasattr(module, "mrope_section") or "mrope_section" in schedule:
        positions = positions.expand(3, 1, 2)
    arguments = {"x": torch.zeros(1, 2, 1), "position_ids": positions, "layer_type": layer_type, "seq_len": length}
    parameters = inspect.signature(module.forward).parameters
    with torch.no_grad():
        out = module(**{key: value for key, value in arguments.items() if key in parameters})
    rotation = torch.complex(*(part.double() for part in out)) if isinstance(out, tuple) else out.to(torch.complex128)
    row = rotation[1] if rotation.ndim == 2 else rotation.flatten(0, -3)[0, 0]  # One row per position, or per token.
    angles = row.angle()
    return Rotation(name, layer_type, tuple(sorted(set(angles.tolist()))), float(row.abs().max()))
