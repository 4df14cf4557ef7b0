"""Finds a method's reference, and works out what a recipe's loaded model must rotate by."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from ctxext.errors import CtxextError
from ctxext.recipes.base import Method
from ctxext.recipes.rotary import Rotary

_FOLDER = Path(__file__).with_name("references")


def reference_file(method: Method | type[Method]) -> Path:
    """Where a method's reference is: beside the others, or where a method from elsewhere says.

    Raises:
        CtxextError: it has none.
    """
    path = Path(getattr(method, "reference", None) or _FOLDER / f"{method.name.replace('-', '_')}.py")
    if not path.is_file():
        raise CtxextError(f'"{method.name}" has no reference to be compared with.', hint=f"Write {path.name}.")
    return path


def reference_of(method: Method | type[Method]) -> ModuleType:
    """A method's reference, as a module.

    Raises:
        CtxextError: it has none.
    """
    path = reference_file(method)
    spec = importlib.util.spec_from_file_location(f"ctxext_reference_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def expected_frequencies(steps: Sequence[Method], plain: Rotary, at: int) -> tuple[list[float], float]:
    """Inverse frequencies and the factor on cos and sin that resolved steps make of a plain encoding.

    Args:
        steps: The steps of a recipe; those that leave frequencies alone are passed over.
        plain: The encoding that they start from, unscaled.
        at: For a sequence of how many tokens.

    Raises:
        CtxextError: a step has no reference.
    """
    model = {"theta": plain.theta, "dim": plain.dim, "span": plain.span, "length": plain.trained_length}
    frequencies, scaling = [plain.theta ** (-2 * i / plain.span) for i in range(plain.dim // 2)], 1.0
    for step in steps:
        if step.kind == "base":
            model["theta"] = reference_of(step).base(step.to_dict(), model)
            frequencies = [model["theta"] ** (-2 * i / plain.span) for i in range(plain.dim // 2)]
        elif step.kind == "schedule":
            frequencies, scaling = reference_of(step).schedule(step.to_dict(), model, at)
    return frequencies, scaling
