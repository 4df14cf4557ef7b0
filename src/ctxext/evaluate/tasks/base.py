"""What a task is, and the unit in which its work is handed out, done and written down."""

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ctxext.data.prompt import Pieces

if TYPE_CHECKING:
    from ctxext.evaluate.model import LoadedModel

Record = dict[str, Any]
"""One line of results: `task`, `length`, `depth`, the `samples` it covers and what was measured for each."""


class Key(NamedTuple):
    """One sample of one cell."""

    task: str
    length: int
    depth: float | None
    sample: int


def keys_of(record: Record) -> list[Key]:
    """The samples that a record covers."""
    return [Key(record["task"], record["length"], record["depth"], sample) for sample in record["samples"]]


class Work(Protocol):
    """Some samples that run together.

    What is measured for one key must not hang on which other keys are wanted.
    """

    @property
    def label(self) -> str:
        """What the progress line says."""
        ...

    @property
    def keys(self) -> list[Key]:
        """Everything it can measure."""
        ...

    def run(self, loaded: "LoadedModel", wanted: set[Key]) -> Iterator[Record]:
        """Measure what is wanted, one record per cell."""
        ...


class Task(Protocol):
    """A kind of question. Implementations are frozen dataclasses whose fields are the task's settings."""

    @property
    def name(self) -> str:
        """The name on the command line and in reports."""
        ...

    def pieces(self, rng: random.Random) -> Pieces:
        """The text of one question; the same for the same state of `rng`."""
        ...
