"""What a shell offers for the values of options; nothing here loads a model or torch."""

from collections.abc import Callable, Iterable
from pathlib import Path

Completion = Callable[[str], list[str]]


def complete_method(incomplete: str) -> list[str]:
    """The names of methods, and auto."""
    from ctxext.recipes.registry import METHODS

    return _beginning(incomplete, [*(method.name for method in METHODS), "auto"])


def complete_recipe(incomplete: str) -> list[str]:
    """The presets in the package, and recipe files beside what is typed."""
    from ctxext.recipes.recipe import presets

    folder = Path(incomplete).parent if incomplete else Path()
    try:
        files = [str(path) for path in sorted(folder.iterdir()) if path.suffix in (".yaml", ".yml")]
    except OSError:
        files = []
    return _beginning(incomplete, [*sorted(presets()), *files])


def complete_methods(incomplete: str) -> list[str]:
    """The names of methods in a list with commas."""
    from ctxext.recipes.registry import METHODS

    return _in_list(incomplete, [method.name for method in METHODS])


def complete_tasks(incomplete: str) -> list[str]:
    """The names of tasks in a list with commas."""
    from ctxext.evaluate.tasks.registry import TASKS

    return _in_list(incomplete, TASKS)


COMPLETIONS: dict[str, Completion] = {"--task": complete_tasks, "--eval": complete_tasks, "--methods": complete_methods}
"""By the option that is declared on a dataclass."""


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _in_list(incomplete: str, names: Iterable[str]) -> list[str]:
    """Names for the last entry of a list, without those that it has."""
    before, comma, last = incomplete.rpartition(",")
    taken = before.split(",")
    return [f"{before}{comma}{name}" for name in names if name.startswith(last) and name not in taken]
