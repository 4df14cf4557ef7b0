"""What numbers of the command line may be at all, beside what each command asks of its own."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ctxext.errors import CtxextError

_MOST: Mapping[str, int] = {
    "seed": 2**32 - 1,  # The widest that numpy takes.
    "steps": 10_000_000,  # Each is looked at before the first.
    **dict.fromkeys(("samples", "checked", "num_needles", "batch_size", "rank"), 1_000_000),
}
_OTHERS = 10**10
"""As long as the longest context; what is worked out with it stays finite."""


def check_numbers(options: Any) -> None:
    """Refuse numbers that nothing can be computed with.

    Args:
        options: A dataclass; its whole and broken numbers are looked at.

    Raises:
        CtxextError: one is not finite or too large, or a seed is negative.
    """
    for field in dataclasses.fields(options):
        value, most = getattr(options, field.name), _MOST.get(field.name, _OTHERS)
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        if not abs(value) <= most or (field.name == "seed" and value < 0):  # NaN is no more so.
            least = "0" if field.name == "seed" else f"-{most}"
            raise CtxextError(f'{field.name} must be a number from {least} to {most}, not "{value}".')
