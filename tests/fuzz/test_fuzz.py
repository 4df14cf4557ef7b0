"""Whatever strangers wrote: exit code 0, 1 or 2, errors on one line, no traceback, soon, and nothing written elsewhere.

A short seeded run by default; `make fuzz` sets CTXEXT_FUZZ to the number of examples of each test.
"""

import contextlib
import io
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch  # noqa: F401  An import that an alarm stops in the middle would take the process down.
import transformers  # noqa: F401
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ctxext.api import METHODS, Recipe, convert
from ctxext.cli.app import main
from ctxext.methods import MsPoE, Yarn
from ctxext.recipes.param import parameters_of
from hostile import (
    ADAPTER,
    BAD,
    FILES,
    LENGTHS,
    LLAMA,
    LOOKING,
    ODD,
    RECIPE,
    TENSORS,
    TEXTS,
    a_folder,
    checkpoints,
    fuzzing,
    mutated,
    recipes,
    tables,
    weights,
    write,
)

SECONDS = 10
fuzz = fuzzing(8)
LENGTH = st.one_of(st.sampled_from(LENGTHS), st.integers().map(str), st.text(max_size=9))
METHOD = st.sampled_from([method.name for method in METHODS if method.name not in ("longrope", "abf")])


class Hang(BaseException):
    """A command took too long."""


@contextlib.contextmanager
def limited() -> Iterator[None]:
    def ring(*_args: object) -> None:
        raise Hang

    # Seconds of this process, not of the clock: a machine with other work to do is no hang.
    signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def check(place: Path, *words: object, may_write: tuple[str, ...] = (), never: tuple[str, ...] = ()) -> str:
    """Run a command line as `main` does and hold the invariant; gives what it said."""
    before = sorted(place.rglob("*"))
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        limited(),
        mock.patch.dict(os.environ, LOOKING),
        mock.patch.object(threading, "excepthook"),
        mock.patch.object(sys, "unraisablehook"),
        mock.patch.object(sys, "argv", ["ctxext", *map(str, words)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
    said = err.getvalue()
    assert code in (0, 1, 2), said
    assert not [bad for bad in (*BAD, *never) if bad in said + out.getvalue()], said
    if code == 1 and "error: " in said:
        after = said[said.index("error: ") :]
        assert after.count("\n") <= 2, after
    written = [path for path in sorted(place.rglob("*")) if path not in before]
    assert not [path for path in written if path.relative_to(place).parts[0] not in may_write], written
    if code:
        assert not written
    return said


@fuzz
@given(checkpoints(), METHOD, st.booleans())
def test_checkpoints(files, method, replace):
    with a_folder() as place:
        write(place / "in", files)
        check(place, "inspect", place / "in")
        check(place, "inspect", place / "in", "--json")
        words = ["convert", place / "in", "-m", method, *(["--replace-scaling"] * replace)]
        words += [] if method == "mspoe" else ["--factor", 4]
        check(place, *words, "--dry-run")
        check(place, "verify", place / "in", "--no-load")


@fuzz
@given(checkpoints(), LENGTH)
def test_original_lengths(files, length):
    with a_folder() as place:
        write(place / "in", files)
        option = f"--original-length={length}"
        check(place, "inspect", place / "in", option)
        check(place, "convert", place / "in", "-m", "yarn", "--factor", 4, option, "--dry-run")


@fuzz
@given(tables(), st.sampled_from(["table", "range", "yarn"]), st.one_of(st.none(), LENGTH), st.booleans())
def test_tables(files, method, length, is_linear):
    with a_folder() as place:
        write(place / "in", files)
        check(place, "inspect", place / "in")
        words = ["convert", place / "in", place / "out", "-m", method, "--no-verify"]
        words += ["--factor=4"] if length is None else [f"--target-length={length}"]
        words += ["--fill", "linear"] * (is_linear and method == "table")
        check(place, *words, "--dry-run")
        if length is None or len(length) < 4:  # A table of a billion rows is what was asked for.
            check(place, *words, may_write=("out",))
        if (place / "out").exists():
            check(place, "verify", place / "out", "--no-load")


@fuzz
@given(st.data(), METHOD)
def test_numbers(data, method):
    (chosen,) = (each for each in METHODS if each.name == method)
    field = data.draw(st.sampled_from([field.name for field in parameters_of(chosen)] or ["factor"]))
    value = data.draw(st.one_of(LENGTH, ODD.map(str)))
    with a_folder() as place:
        write(place / "in", {"config.json": json.dumps(LLAMA).encode(), "model.safetensors": weights(TENSORS)})
        words = ["convert", place / "in", "-m", method, f"--{field.replace('_', '-')}={value}"]
        check(place, *words, *([] if field in ("factor", "target_length") else ["--factor=4"]), "--dry-run")


@fuzz
@given(mutated(ADAPTER), st.booleans())
def test_adapters_instead_of_a_model(config, with_config):
    with a_folder() as place:
        files = {"adapter_config.json": json.dumps(config).encode(), "adapter_model.safetensors": weights(TENSORS)}
        write(place / "in", files | ({"config.json": json.dumps(LLAMA).encode()} if with_config else {}))
        for words in (["inspect"], ["verify", "--no-load"], ["push", "me/x", "--dry-run"]):
            check(place, words[0], place / "in", *words[1:])
        check(place, "convert", place / "in", "-m", "yarn", "--factor", 4, "--dry-run")


@fuzz
@given(checkpoints(), st.sampled_from(["yarn", "ntk", "pi", "llama3"]))
def test_conversions(files, method):
    with a_folder() as place:
        write(place / "in", files)
        check(place, "convert", place / "in", place / "out", "-m", method, "--factor", 4, may_write=("out",))


@fuzz
@given(st.one_of(mutated(RECIPE), recipes(), recipes(), st.sampled_from(TEXTS), st.text(max_size=30)), st.booleans())
def test_recipes(content, as_json):
    with a_folder() as place:
        write(place / "in", {"config.json": json.dumps(LLAMA).encode(), "model.safetensors": weights(TENSORS)})
        text = content if isinstance(content, str) else (json.dumps if as_json else yaml.safe_dump)(content)
        (place / "recipe.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
        check(place, "convert", place / "in", "--recipe", place / "recipe.yaml", "--dry-run")


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, Path]:
    """Converted checkpoints, by configuration alone and with code."""
    folder = tmp_path_factory.mktemp("fuzz")
    files = {"config.json": json.dumps(LLAMA).encode(), "model.safetensors": weights(TENSORS)}
    write(folder / "in", {**files, **{name: json.dumps(content).encode() for name, content in FILES.items()}})
    for name, step in {"yarn": Yarn(factor=4), "mspoe": MsPoE(first_layer=0, head_order="fixed")}.items():
        convert(str(folder / "in"), folder / name, Recipe([step]), check=False)
    return {name: folder / name for name in ("yarn", "mspoe")}


@fuzz
@given(st.data(), st.sampled_from(["yarn", "mspoe"]), st.sampled_from(["ctxext.json", "config.json"]))
@pytest.mark.thorough
def test_results(results, data, name, file):
    with a_folder() as place:
        shutil.copytree(results[name], place / "in")
        content = data.draw(mutated(json.loads((place / "in" / file).read_text())))
        (place / "in" / file).write_text(json.dumps(content))
        check(place, "verify", place / "in", "--no-load")
        check(place, "inspect", place / "in")
        check(place, "push", place / "in", "me/x", "--dry-run")
        check(place, "convert", place / "in", "-m", "pi", "--factor", 2, "--replace-scaling", "--dry-run")
