"""The last keys alone: the map of a relation method. This file travels inside checkpoints."""

from .relation import Relation
from .sinks import SinksMap


class Window(Relation):
    """Attention of window."""

    name = "window"
    map_class = SinksMap
