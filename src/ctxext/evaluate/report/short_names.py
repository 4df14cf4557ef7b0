"""Names of models, shortened to what tells them apart."""

import re
from collections import Counter
from collections.abc import Sequence

_LONG = 24
_COMMON = 0.8
"""A part that so many of the names have tells nothing."""
_SEPARATORS = re.compile(r"[-_]+")


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Each name without its owner and the parts that nearly all have; whole where none is long, or there is but one.

    A name that is nothing but such parts stays whole behind its owner, and so do all if two would be called alike.
    """
    if len(names) < 2 or max(map(len, names)) <= _LONG:
        return {name: name for name in names}
    bare = {name: name.rpartition("/")[2] for name in names}
    counts = Counter(part for own in bare.values() for part in set(_SEPARATORS.split(own)))
    short = {}
    for name, own in bare.items():
        kept = [part for part in _SEPARATORS.split(own) if counts[part] < _COMMON * len(names)]
        short[name] = "-".join(kept) or own
    for found in (short, bare):
        if len(set(found.values())) == len(names):
            return found
    return {name: name for name in names}
