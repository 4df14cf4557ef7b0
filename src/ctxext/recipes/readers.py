"""How each encoding other than rotary is read from config.json."""

from collections.abc import Callable, Mapping

from ctxext.families import Family
from ctxext.recipes.biases import read_alibi, read_buckets
from ctxext.recipes.encoding import Config, Encoding
from ctxext.recipes.learned import COMPUTED, LAYOUTS, read_computed, read_learned

OTHER_READERS: Mapping[str, Callable[[Config, Family, int | None], Encoding]] = {
    "learned": read_learned,
    "sinusoidal": read_computed,
    "alibi": read_alibi,
    "buckets": read_buckets,
}
"""By the name that families have for theirs."""


def is_read(family: Family) -> bool:
    """Whether one of them knows the family."""
    if family.positions in ("learned", "sinusoidal"):
        return family.model_type in {**LAYOUTS, **COMPUTED}
    return family.positions in OTHER_READERS
