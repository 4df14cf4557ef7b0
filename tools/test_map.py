"""Which quick test calls which functions of the package, written down once per test file.

A fork runs the test files that are new or changed since, and notes every call into the package, by file and name of
the function, so that a map outlives lines that move. Processes that a test starts note theirs in a file, by a
`sitecustomize` on their path; those that are started without it are not seen.
"""

import hashlib
import json
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

WORDS = ("-q", "--tb=line", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", "not slow and not engine")
"""Short tracebacks: writing long ones takes longer than the tests."""


_FIRST, _SHORT = 30, 0.3
_OF_DECLARATIONS = ("tests/cli/test_other_commands.py", "tests/recipes/test_declarations.py", "tests/test_docs.py")
"""Files of tests that read what classes say of themselves, which calls none of their functions."""

_CALLS = "CTXEXT_CALLS"
"""The variable that tells a process which a test starts where to note its calls."""

_IN_PROCESSES = f"""
import os, sys, threading

place = os.environ.get({_CALLS!r})
if place:
    package = os.environ["{_CALLS}_OF"]
    out = os.open(place, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    files, seen = {{}}, set()

    def trace(frame, event, given):
        code = frame.f_code
        name = code.co_filename
        if name not in files:
            files[name] = name[len(package):].lstrip("/") if name.startswith(package) else None
        if files[name] is not None and (name, code.co_name) not in seen:
            seen.add((name, code.co_name))
            try:
                os.write(out, f"{{files[name]}}::{{code.co_name}}\\n".encode())
            except OSError:
                pass

    sys.settrace(trace)
    threading.settrace(trace)
"""


class Recorder:
    """A plugin for pytest that notes calls and seconds of each test."""

    def __init__(self, package: str, noted: Path) -> None:
        self.package, self.noted = package, noted
        self.names: dict[str, str | None] = {}
        self.calls: set[str] = set()
        self.own: dict[str, set[str]] = {}
        self.shared: dict[str, set[str]] = defaultdict(set)
        self.seconds: dict[str, float] = defaultdict(float)

    def trace(self, frame: Any, event: str, given: Any) -> None:
        """Note one call."""
        code = frame.f_code
        if code.co_filename not in self.names:
            inside = code.co_filename.startswith(self.package)
            self.names[code.co_filename] = code.co_filename[len(self.package) :].lstrip("/") if inside else None
        if (path := self.names[code.co_filename]) is not None:
            self.calls.add(f"{path}::{code.co_name}")

    def _during(self, item: pytest.Item) -> Iterator[None]:
        self.calls, started = set(), time.monotonic()
        self.noted.unlink(missing_ok=True)
        sys.settrace(self.trace)
        threading.settrace(self.trace)
        yield
        sys.settrace(None)
        threading.settrace(None)
        self.seconds[item.nodeid] += time.monotonic() - started
        if self.noted.is_file():  # By processes that the test started.
            self.calls.update(self.noted.read_text().split())

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        """What fixtures call is every test's of the file that may use them."""
        yield from self._during(item)
        self.shared[item.nodeid.split("::")[0]] |= self.calls

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """What a test itself calls."""
        yield from self._during(item)
        self.own[item.nodeid] = self.calls

    def found(self) -> dict[str, dict[str, Any]]:
        """By test file, by test: seconds, and the functions that are called."""
        files: dict[str, dict[str, Any]] = defaultdict(dict)
        for test, calls in self.own.items():
            name = test.split("::")[0]
            files[name][test] = [round(self.seconds[test], 3), sorted(calls | self.shared[name])]
        return files


def record(package: Path, files: list[str], out: Path) -> None:
    """Run test files and write what they call; in a process of its own.

    Args:
        package: The package's folder.
        files: The test files.
        out: The JSON file to write.
    """
    folder, noted = out.with_name("recorder"), out.with_name("calls.txt")
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(_IN_PROCESSES)
    os.environ.update({_CALLS: str(noted), f"{_CALLS}_OF": str(package)})
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    recorder = Recorder(str(package), noted)
    code = pytest.main([*WORDS, *files], plugins=[recorder])
    out.write_text(json.dumps({"code": int(code), "files": recorder.found()}))


def digest(path: Path) -> str:
    """By which a changed test file is known."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def tests_for(known: dict[str, Any], path: str, function: str, limit: float) -> list[list[str]]:
    """The tests that call a function; of what runs on import those that call anything of the file.

    Args:
        known: The map, by test file.
        path: The file, relative to the package.
        function: The function; empty for what runs on import.
        limit: So many seconds of tests at most.

    Returns:
        First some short ones that call little else, as they see most; then the others, the quickest first.
    """
    wanted, found = f"{path}::{function}", []
    for entry in known.values():
        for test, (seconds, calls) in entry["tests"].items():
            reads = test.startswith(_OF_DECLARATIONS) or any(call.startswith(f"{path}::") for call in calls)
            if wanted in calls if function else reads:
                found.append((seconds, len(calls), test))
    found.sort()
    total, within = 0.0, []
    for row in found:
        total += row[0]
        if total > limit:
            break
        within.append(row)
    first = [test for _, _, test in sorted((row for row in within if row[0] < _SHORT), key=lambda row: row[1])[:_FIRST]]
    return [first, [test for _, _, test in within if test not in first]]
