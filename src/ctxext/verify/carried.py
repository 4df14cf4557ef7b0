"""Whether the installed transformers turns by what was written: before anything is converted, and without weights.

Versions differ in which schedules the code of a family reads; one that is not read is passed over in silence. So the
stock model is built from the configuration, and its rotary embeddings are held against the methods' references.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ctxext.checkpoint.families import Family
from ctxext.errors import CtxextError
from ctxext.recipes.encodings.frequencies import inverse_frequencies
from ctxext.recipes.encodings.rotary import ModelConfig, attention_scaling
from ctxext.recipes.recipe import Recipe
from ctxext.verify.reference import expected_frequencies
from ctxext.verify.rotation import Rotation, rotations

_TOLERANCE = 2e-5


def check_carried(recipe: Recipe, source: Mapping[str, Any], plain: ModelConfig, stock: ModelConfig) -> float | None:
    """Hold what the installed transformers makes of a configuration against what the recipe says.

    Args:
        recipe: What is applied, resolved.
        source: The content of the source's config.json, without code: what the sliding layers keep.
        plain: The configuration that the recipe starts from.
        stock: The configuration with the recipe's steps that stock transformers carries.

    Returns:
        The largest relative difference from the recipe's inverse frequencies; None where it changes none.

    Raises:
        CtxextError: transformers does not know the family, or rotates by something else.
    """
    if not recipe.changes_frequencies:
        return None
    family, largest = plain.family, 0.0
    lengths = sorted({max(plain.rotary.trained_length // 2, 2), stock.rotary.usable_length})
    before, after = rotations(source, lengths), rotations(stock.config, lengths)
    for length in lengths:
        wanted = expected_rotation(recipe, plain, stock, length)
        was = {(entry.module, entry.layer_type): entry for entry in before[length]}
        for entry in after[length]:
            change = _change(entry, was.get((entry.module, entry.layer_type)))
            if _is_sliding(entry, family, change):
                if change > _TOLERANCE:
                    raise _refused(family, f"{entry.module} of its sliding layers would rotate otherwise too")
                continue
            difference = _difference(entry, *wanted)
            if not difference < _TOLERANCE:
                steps = ", ".join(step.summary() for step in recipe.steps if not step.needs_code())
                problem = f"{entry.module} would differ from {steps} by {difference:.1e}"
                raise _refused(family, f"{steps} would have no effect" if change < _TOLERANCE else problem)
            largest = max(largest, difference)
    if not after[lengths[0]]:
        raise _refused(family, "no rotary embedding was found in it")
    return largest


def expected_rotation(
    recipe: Recipe, plain: ModelConfig, result: ModelConfig, length: int
) -> tuple[Sequence[float], float]:
    """Inverse frequencies and the factor on cos and sin that a loaded model must rotate by.

    By the methods' references; by the formulas of the stock types where the source's own schedule was kept.

    Args:
        recipe: What was applied, resolved.
        plain: The configuration that it started from.
        result: The configuration that it made.
        length: For a sequence of how many tokens.

    Raises:
        CtxextError: a step has no reference, or the kept schedule is not one of the stock types.
    """
    if plain.rotary.is_scaled:
        return inverse_frequencies(result.rotary, length), attention_scaling(result.rotary)
    return expected_frequencies(recipe.steps, plain.rotary, length)


def _change(entry: Rotation, was: Rotation | None) -> float:
    """How far a rotary embedding is from what it was; infinite where there was none of this name."""
    return math.inf if was is None else _difference(entry, was.frequencies, was.scaling)


def _is_sliding(entry: Rotation, family: Family, change: float) -> bool:
    """Whether a rotary embedding serves layers with a window, which keep their own."""
    if family.layer_theta_key and entry.module.rpartition(".")[2].isdigit():  # One for each base, by number.
        return change < _TOLERANCE
    return any(word in f"{entry.module}.{entry.layer_type}" for word in ("local", *family.sliding_types))


def _difference(entry: Rotation, wanted: Sequence[float], scaling: float) -> float:
    """The largest relative difference of a frequency or of the factor; infinite where there are others."""
    frequencies = [frequency for frequency in entry.frequencies if frequency > 0]
    if len(frequencies) != len(set(wanted)):
        return math.inf
    return largest_difference([*zip(frequencies, sorted(set(wanted)), strict=True), (entry.scaling, scaling)])


def largest_difference(pairs: Iterable[tuple[float, float]]) -> float:
    """The largest relative difference of two numbers; infinite where one is no number, which `max` would pass over."""
    differences = [abs(one / other - 1) for one, other in pairs]
    return math.inf if any(map(math.isnan, differences)) else max(differences)


def _refused(family: Family, reason: str) -> CtxextError:
    import transformers

    return CtxextError(
        f'transformers {transformers.__version__} does not carry this for "{family.model_type}": {reason}.',
        hint="Try another version of transformers, or another method; --no-verify writes it all the same.",
    )
