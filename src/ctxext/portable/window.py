"""A window: the map of a relation method that reads only the last keys. This file is copied into checkpoints."""

from .relation import Relation
from .sinks import SinksMap


class Window(Relation):
    """Attention of window."""

    name = "window"
    map_class = SinksMap
