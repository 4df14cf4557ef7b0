"""A method's reference, and how its faults are reported."""

import contextlib
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ctxext.errors import CtxextError
from ctxext.recipes.base import Method
from ctxext.verify.references import REFERENCES


def reference_of(method: Method | type[Method]) -> Any:
    """Return a method's reference, an object with the functions that references/README.md lists."""
    if method.name not in REFERENCES:
        raise CtxextError(
            f'"{method.name}" has no reference to be compared with.',
            hint="Write its functions, and list them in REFERENCES in verify/references.",
        )
    return REFERENCES[method.name]


@contextlib.contextmanager
def reference_faults(method: Method | type[Method]) -> Iterator[None]:
    """Report any error of a reference in one line, with the file and line."""
    try:
        yield
    except Exception as error:  # A reference is a formula that anybody may have written.
        trace = traceback.extract_tb(error.__traceback__)
        frames = [frame for frame in trace if Path(frame.filename).parent.name == "references"]
        place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
        raise reference_error([method.name], f"{type(error).__name__}: {error}{place}") from error


def reference_error(names: Sequence[str], detail: str) -> CtxextError:
    """The error for a fault in the reference of some methods."""
    return CtxextError(
        f"The reference of {' and '.join(names)} fails: {' '.join(detail.split())}",
        hint="Nothing is known to be wrong with the checkpoint: mend the reference; --no-verify writes it unchecked.",
    )
