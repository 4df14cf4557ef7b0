"""What bounds the context of models that no method is for, and why nothing is done, or what a user can do.

By model type, and for the others by encoding.
"""

from collections.abc import Mapping
from typing import Any

from ctxext.families import Family, text_config

_BY_ENCODING: Mapping[str, str] = {
    "learned": "the table ends where training ended; where this family keeps it was not tried",
    "sinusoidal": "a table of sinusoids that this package did not try to lengthen",
    "relative": "only the distance counts, so no position is out of range",
    "none": "no positions at all: what bounds it is its state, or its window",
}
_CLIPPED = (
    "distances are clipped at max_relative_positions ({max_relative_positions}, where -1 stands for "
    "max_position_embeddings): farther tokens all look equally far, and more rows would have to be trained"
)
_LOGARITHMIC = (
    "distances fall into {position_buckets} logarithmic buckets up to max_relative_positions "
    "({max_relative_positions}, where -1 stands for max_position_embeddings): farther ones share the last, so any "
    "length runs. What training never saw is the length itself, which no key changes"
)
_BY_TYPE: Mapping[str, str] = {
    "deberta": _CLIPPED,
    "deberta-v2": _LOGARITHMIC,
    "transfo-xl": (
        "nothing: it reads by segments and remembers mem_len ({mem_len}) states of those before; a larger mem_len "
        "looks back further"
    ),
    "xlnet": (
        "nothing: its relative sinusoids are computed for any distance; mem_len ({mem_len}) is how many states of "
        "earlier segments it looks back at"
    ),
}
_DEFAULTS: Mapping[str, Any] = {
    "max_relative_positions": -1,
    "position_buckets": -1,
    "mem_len": "not set",
}


class _Numbers(dict[str, Any]):
    def __missing__(self, key: str) -> Any:
        return _DEFAULTS[key]


def bound_of(config: Mapping[str, Any], family: Family) -> str:
    """One sentence, with the numbers of this very configuration."""
    said = _BY_TYPE.get(family.model_type, _BY_ENCODING.get(family.positions, ""))
    return said.format_map(_Numbers(text_config(config, family)))
