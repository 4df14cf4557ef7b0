"""Load a method's reference, and compute the inverse frequencies that a recipe's loaded model must have."""

import contextlib
import importlib.util
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from ctxext.errors import CtxextError
from ctxext.recipes.base import Method
from ctxext.recipes.encodings.rotary import Rotary

_FOLDER = Path(__file__).with_name("references")


def reference_file(method: Method | type[Method]) -> Path:
    """Where a method's reference is: the file of its name in `references/`.

    Raises:
        CtxextError: it has none.
    """
    path = _FOLDER / f"{method.name.replace('-', '_')}.py"
    if not path.is_file():
        raise CtxextError(f'"{method.name}" has no reference to be compared with.', hint=f"Write {path.name}.")
    return path


def reference_of(method: Method | type[Method]) -> ModuleType:
    """A method's reference, as a module.

    Raises:
        CtxextError: it has none, or it cannot be imported.
    """
    path = reference_file(method)
    # Named as a module of that folder, so that it can import the files beside it.
    spec = importlib.util.spec_from_file_location(f"ctxext.verify.references.{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with reference_faults(method):
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def reference_faults(method: Method | type[Method]) -> Iterator[None]:
    """Report any error of a reference in one line, with the file and line.

    Raises:
        CtxextError: something was raised.
    """
    try:
        yield
    except Exception as error:  # A reference is a formula that anybody may have written.
        path = reference_file(method)
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        place = path.name if line is None else f"{path.name}, line {line}"
        raise reference_error([method.name], f"{type(error).__name__}: {error} ({place})") from error


def reference_error(names: Sequence[str], detail: str) -> CtxextError:
    """The error for a fault in a reference.

    Args:
        names: The methods that use the reference.
        detail: The exception and its place.
    """
    return CtxextError(
        f"The reference of {' and '.join(names)} fails: {' '.join(detail.split())}",
        hint="Nothing is known to be wrong with the checkpoint: mend the reference; --no-verify writes it unchecked.",
    )


def expected_frequencies(steps: Sequence[Method], plain: Rotary, at: int) -> tuple[list[float], float]:
    """Inverse frequencies and the factor on cos and sin that resolved steps make of a plain encoding.

    Args:
        steps: The steps of a recipe; those that leave frequencies alone are passed over.
        plain: The encoding that they start from, unscaled.
        at: For a sequence of how many tokens.

    Raises:
        CtxextError: a step has no reference, or its reference fails.
    """
    model = {"theta": plain.theta, "dim": plain.dim, "span": plain.span, "length": plain.trained_length}
    frequencies, scaling = [plain.theta ** (-2 * i / plain.span) for i in range(plain.dim // 2)], 1.0
    for step in steps:
        if step.kind == "base":
            reference = reference_of(step)
            with reference_faults(step):
                model["theta"] = reference.base(step.to_dict(), model)
            frequencies = [model["theta"] ** (-2 * i / plain.span) for i in range(plain.dim // 2)]
        elif step.kind == "schedule":
            reference = reference_of(step)
            with reference_faults(step):
                frequencies, scaling = reference.schedule(step.to_dict(), model, at)
    return frequencies, scaling
