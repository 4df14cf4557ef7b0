"""Shared fixtures: a small Llama checkpoint on disk, and the command line run in this process.

CTXEXT_SHUFFLE=SEED runs tests in another order: those of a file together, as they share what they set up.
"""

import atexit
import functools
import gc
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# Where transformers copies the code of checkpoints: not where other test processes do. It reads this when imported.
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="ctxext-modules-")

# Where links that conversions make are noted: not in the home of whoever runs the tests.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="ctxext-state-")

# Transformers 5 starts threads for each checkpoint that it loads, which takes longer than to read a tiny one.
os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"

import pytest
import typer.main
import typer.testing
from typer.testing import CliRunner

import compiled_once
from forked_processes import Processes
from sampled import is_in_part, mark
from small_llama import make_llama

# What is imported while tests are collected is kept compiled, also where Python is told otherwise: compiling all tests
# takes as long as importing torch and transformers.
KEEPS_NO_BYTECODE = sys.dont_write_bytecode
sys.dont_write_bytecode = False

os.environ.setdefault("HF_HUB_OFFLINE", "1")
compiled_once.install()
# The commands are built once: for each command line again that is a third of a quick one.
typer.main.get_command = typer.testing._get_command = functools.cache(typer.main.get_command)
gc.disable()  # Until all tests are collected: what they import stays.
atexit.register(shutil.rmtree, os.environ["HF_MODULES_CACHE"], ignore_errors=True)
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--method NAME`: for the sweep of all families (`recipes/test_registry_families.py`); `--part K/N`: for CI."""
    parser.addoption("--method", help="The method to sweep all families with, beside what is kept of the others.")
    parser.addoption("--part", default="0/1", help="Run the K-th of N parts, from 0, of the thorough and slow tests.")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what the quick tests leave out (`sampled.py`), choose a part, and shuffle files, and the tests of each."""
    for item in items:
        mark(item)
    part = config.getoption("part")
    config.hook.pytest_deselected(items=[item for item in items if not is_in_part(item, part)])
    items[:] = [item for item in items if is_in_part(item, part)]
    if seed := os.environ.get("CTXEXT_SHUFFLE"):
        files: dict[Path, list[pytest.Item]] = {}
        for item in items:
            files.setdefault(item.path, []).append(item)
        rng, groups = random.Random(seed), list(files.values())
        rng.shuffle(groups)
        for group in groups:
            rng.shuffle(group)
        items[:] = [item for group in groups for item in group]


def pytest_collection_finish() -> None:
    """What is loaded by now stays: whoever collects garbage, as each training does, need not look at it again."""
    if "torch" in sys.modules:
        leave_meta_weights()
    sys.dont_write_bytecode = KEEPS_NO_BYTECODE
    gc.collect()
    gc.freeze()
    gc.enable()


def leave_meta_weights() -> None:
    """Draw no weights on the meta device, which holds no numbers: a fifth of loading a tiny model."""
    from torch import nn

    def reset(draw, module) -> None:
        if not module.weight.is_meta:
            draw(module)

    for kind in (nn.Linear, nn.Embedding):
        if not isinstance(vars(kind)["reset_parameters"], functools.partialmethod):
            kind.reset_parameters = functools.partialmethod(functools.partial(reset, kind.reset_parameters))


SHARED: list[Processes] = []


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node) -> None:
    """Workers of pytest-xdist share the process that is forked."""
    if not SHARED:
        SHARED.append(Processes("clean"))
    node.workerinput["forked"] = SHARED[0].place or SHARED[0].start()


def pytest_unconfigure() -> None:
    while SHARED:
        SHARED.pop().end()


@pytest.fixture(scope="session", autouse=True)
def clean_processes(request):
    """Clean processes are forks of one that has torch and transformers loaded."""
    from ctxext.files import isolated

    isolated.subprocess = processes = Processes("clean", getattr(request.config, "workerinput", {}).get("forked"))
    yield processes
    isolated.subprocess = subprocess
    processes.end()


@pytest.fixture(scope="session")
def our_processes(clean_processes):
    """In the place of `subprocess`: forks of a process that has ctxext loaded too."""
    processes = Processes("ours", clean=clean_processes)
    os.environ["CTXEXT_CLEAN"] = clean_processes.listening()
    yield processes
    processes.end()


@pytest.fixture
def real_processes(monkeypatch) -> None:
    """Clean processes are what they are for a user: a new Python each."""
    monkeypatch.setattr("ctxext.files.isolated.subprocess", subprocess)


@pytest.fixture(scope="session", autouse=True)
def sampled_forms():
    """Conversions check attention on one text in the way of most users, which takes less time than the whole check."""
    from ctxext.verify import isolated_checks

    texts_of = isolated_checks._texts

    def sample(*args):
        texts, length = texts_of(*args)
        return [{**texts[-1], "is_sample": True}], length

    isolated_checks._texts = sample
    yield texts_of
    isolated_checks._texts = texts_of


@pytest.fixture(scope="module")
def every_form(sampled_forms):
    """Conversions of a file check every form of attention, as they do for users."""
    from ctxext.verify import isolated_checks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(isolated_checks, "_texts", sampled_forms)
        yield


@pytest.fixture(scope="session", autouse=True)
def intervals_once():
    """Intervals of effective lengths are drawn once for the same answers: many tests report the same ones."""
    from ctxext.report import report

    drawn, effective = {}, report._compute_effective

    def cached(*counts):
        key = repr(counts)
        if key not in drawn:
            drawn[key] = effective(*counts)
        return dict(drawn[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "_compute_effective", cached)
        yield


@pytest.fixture(scope="session")
def llama_source(tmp_path_factory) -> Path:
    """A Llama checkpoint that no test may change."""
    return make_llama(tmp_path_factory.mktemp("source") / "llama")


@pytest.fixture
def llama(tmp_path) -> Path:
    """A Llama checkpoint of the test's own."""
    return make_llama(tmp_path / "llama")


@pytest.fixture
def run(monkeypatch):
    """Run a command line in this process, with its words as the typed ones; errors come back as the user sees them."""
    from ctxext.cli.app import app
    from ctxext.errors import CtxextError

    def call(*words: object):
        typed = [str(word) for word in words]
        monkeypatch.setattr("sys.argv", ["ctxext", *typed])
        result = CliRunner().invoke(app, typed)
        if isinstance(result.exception, CtxextError):
            result.exit_code = 1
        elif result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return call
