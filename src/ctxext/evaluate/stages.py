"""The order in which several models are measured within a time limit."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """Some samples that some models are measured on before the next stage.

    Attributes:
        models: The names of the models.
        samples: The samples of each cell, and the documents.
        tasks: The names of the tasks; empty for all.
        lengths: The lengths; empty for all.
    """

    models: tuple[str, ...]
    samples: range
    tasks: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()

    def contains(self, task: str, length: int) -> bool:
        """Return whether it measures a task at a length."""
        return (not self.tasks or task in self.tasks) and (not self.lengths or length in self.lengths)


def rounds(num_samples: int) -> Iterator[range]:
    """Yield the samples of each round: one of every cell, then two more, then four, and so on."""
    first, size = 0, 1
    while first < num_samples:
        yield range(first, min(first + size, num_samples))
        first, size = first + size, 2 * size


def stages_in_rounds(models: Sequence[str], num_samples: int) -> list[Stage]:
    """Return a stage for each round, with all models and tasks."""
    return [Stage(tuple(models), samples) for samples in rounds(num_samples)]
