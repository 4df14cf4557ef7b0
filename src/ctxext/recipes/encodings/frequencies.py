"""Expected inverse frequencies of a loaded model's rotary encoding, in plain Python."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from ctxext.errors import CtxextError
from ctxext.recipes.encodings.rotary import Rotary, attention_scaling


def inverse_frequencies(rotary: Rotary, length: int | None = None) -> list[float]:
    """Compute the inverse frequencies θ_i of a schedule, one per rotated pair of dimensions.

    Args:
        rotary: The encoding.
        length: The length in tokens of the sequence, for schedules that depend on it; the trained length if None.
    """
    rule = _RULES.get(rotary.rope_type)
    if rule is None:
        raise CtxextError(f'The inverse frequencies of rope type "{rotary.rope_type}" are unknown.')
    plain = [rotary.theta ** (-2 * i / rotary.span) for i in range(rotary.dim // 2)]
    try:
        return rule(rotary, rotary.parameters, plain, length or rotary.trained_length)
    except KeyError as error:
        raise CtxextError(f'The schedule "{rotary.rope_type}" lacks "{error.args[0]}".') from error
    except (TypeError, ValueError, ArithmeticError) as error:
        raise CtxextError(f'The schedule "{rotary.rope_type}" is invalid: {error}.') from error


def is_neutral(rotary: Rotary) -> bool:
    """Return whether a schedule leaves the plain frequencies unchanged at any length, except for rounding."""
    plain = inverse_frequencies(rotary.with_parameters({"rope_type": "default"}))
    both = (inverse_frequencies(rotary, length) for length in (rotary.trained_length, 2 * rotary.trained_length))
    return attention_scaling(rotary) == 1 and all(
        math.isclose(new, old, rel_tol=1e-12)
        for frequencies in both
        for new, old in zip(frequencies, plain, strict=True)
    )


_Rule = Callable[[Rotary, Mapping[str, Any], list[float], int], list[float]]


def _default(rotary: Rotary, numbers: Mapping[str, Any], plain: list[float], length: int) -> list[float]:
    return plain


def _linear(rotary: Rotary, numbers: Mapping[str, Any], plain: list[float], length: int) -> list[float]:
    return [theta / numbers["factor"] for theta in plain]


def _dynamic(rotary: Rotary, numbers: Mapping[str, Any], plain: list[float], length: int) -> list[float]:
    trained, factor, dim = rotary.context_length, numbers["factor"], rotary.dim
    base = rotary.theta * (factor * max(length, trained) / trained - (factor - 1)) ** (dim / (dim - 2))
    return [base ** (-2 * i / dim) for i in range(dim // 2)]


def _yarn(rotary: Rotary, numbers: Mapping[str, Any], plain: list[float], length: int) -> list[float]:
    """Apply section 3.2, with bounds rounded outwards and clamped at 0 and d - 1 as in transformers.

    See docs/traps.md, trap 6. With `truncate` false (gpt-oss) they are not rounded. The ramp has the d of the
    exponents.
    """
    span, trained = rotary.span, rotary.schedule_length
    factor = numbers.get("factor") or rotary.context_length / trained

    def dimension_rotating(rotations: float) -> float:
        return span * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(rotary.theta))

    first = dimension_rotating(numbers.get("beta_fast") or 32)
    last = dimension_rotating(numbers.get("beta_slow") or 1)
    if numbers.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    low, high = max(first, 0), min(last, span - 1)
    width = (high - low) or 0.001
    shares = [1 - min(max((i - low) / width, 0.0), 1.0) for i in range(rotary.dim // 2)]
    return [theta * share + theta / factor * (1 - share) for theta, share in zip(plain, shares, strict=True)]


def _llama3(rotary: Rotary, numbers: Mapping[str, Any], plain: list[float], length: int) -> list[float]:
    low, high, factor = numbers["low_freq_factor"], numbers["high_freq_factor"], numbers["factor"]

    def scale(theta: float) -> float:
        rotations = rotary.schedule_length * theta / (2 * math.pi)
        share = min(max((rotations - low) / (high - low), 0.0), 1.0)
        return float(theta * share + theta / factor * (1 - share))

    return [scale(theta) for theta in plain]


def _longrope(rotary: Rotary, numbers: Mapping[str, Any], plain: list[float], length: int) -> list[float]:
    factors = numbers["long_factor" if length > rotary.schedule_length else "short_factor"]
    return [theta / factor for theta, factor in zip(plain, factors, strict=True)]


_RULES: Mapping[str, _Rule] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}
