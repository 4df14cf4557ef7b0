"""Which faults the tests would not notice: break the package in one place, run quick tests, count what survives.

    python tools/mutate.py                    # 160 mutants of the pure rooms, seed 0
    python tools/mutate.py --rooms outer      # of report, serving, publish, cli and finetune
    python tools/mutate.py --only recipes/methods/ntk.py --count 20
    python tools/mutate.py --planted          # the faults that somebody planted once and no test saw

Each mutant is one change in one file of a copy in a temporary folder; the work tree is only read. Tests run in a fork
of a process that has loaded torch already, and only those of the quick tests that call the function that was changed
(`test_map.py`). Where the change is within a function, the fork has loaded the package and the tests too, and the
function's code is replaced in it (`patches.py`). What is not changed, and why, stands in `mutations.py` and
`mutants.py`.
"""

import argparse
import contextlib
import functools
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from mutants import EQUIVALENT, LEFT, PLANTED, PURE, ROOMS, TESTS, WARM
from mutations import Mutant, mutants_of
from patches import apply, patched
from test_map import WORDS, digest, record, tests_for

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("src/ctxext")
MAP = ROOT / ".mutate.json"
UNPATCHED = 90
SECONDS = 60
"""A mutant that takes more of a processor's time hangs, which its user would notice too; one that waits, ten times."""

Trial = tuple[Mutant, Sequence[Sequence[str]]]


def planted(only: str) -> list[Trial]:
    """The faults of the list, each with the tests that must see it."""
    found = []
    for path, before, after, tests in PLANTED:
        if only not in path:
            continue
        source = (ROOT / PACKAGE / path).read_text(encoding="utf-8")
        if source.count(before) != 1:
            sys.exit(
                f"{path} holds {before!r} {source.count(before)} times, not once: mend the list of planted faults."
            )
        line = source[: source.index(before)].count("\n") + 1
        found.append((Mutant(path, line, "", before, after, source.replace(before, after)), [tests]))
    return found


def files_of(rooms: str) -> list[Path]:
    """The files of some rooms, each once; those of the pure ones belong to them alone."""
    found = dict.fromkeys(path for pattern in ROOMS[rooms] for path in sorted((ROOT / PACKAGE).glob(pattern)))
    pure = set() if rooms == PURE else set(files_of(PURE))
    return [path for path in found if path not in pure]


def population(rooms: str, only: str) -> list[Mutant]:
    """Every mutant of some rooms, but for those of the reviewed lists."""
    return [
        mutant
        for path in files_of(rooms)
        if only in (name := path.relative_to(ROOT / PACKAGE).as_posix())
        for mutant in mutants_of(name, path.read_text(encoding="utf-8"), frozenset(LEFT.get(name, ())))
        if (name, mutant.before, mutant.after) not in EQUIVALENT
    ]


def in_fork(place: Path, log: Path, task: Callable[[], int], seconds: int) -> int:
    """Do something in a process of its own, in the copy; gives its exit code, -1 where it hangs."""
    child = os.fork()
    if not child:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        opened = os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(opened, 1)
        os.dup2(opened, 2)
        os.chdir(place)
        try:
            os._exit(task())
        finally:  # An error must not climb to where the copy is deleted, which is the parent's.
            traceback.print_exc()
            os._exit(UNPATCHED)
    until = time.monotonic() + 10 * seconds
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1


def run_tests(
    place: Path, tests: Sequence[str], patch: Callable[[], None] = lambda: None, seconds: int = SECONDS
) -> int:
    """Run tests on the copy until one fails; gives pytest's code, or a signal, or -1 where they hang."""
    import pytest

    def task() -> int:
        try:
            patch()
        except LookupError as error:
            sys.stdout.write(f"{error}\n")
            return UNPATCHED
        return int(pytest.main(["-x", *WORDS, *tests]))

    return in_fork(place, place / "log.txt", task, seconds)


def test_map(place: Path, rooms: str) -> dict[str, dict]:
    """The map of the quick tests of some rooms, brought up to date."""
    known = json.loads(MAP.read_text()) if MAP.is_file() else {}
    files = {
        path.relative_to(ROOT).as_posix(): digest(path)
        for pattern in TESTS[rooms]
        for path in sorted(ROOT.glob(pattern))
    }
    known = {name: entry for name, entry in known.items() if files.get(name, entry["digest"]) == entry["digest"]}
    for name in sorted(files.keys() - known.keys()):
        out = place / "map.json"
        out.unlink(missing_ok=True)
        in_fork(place, place / "log.txt", lambda name=name, out=out: record(place / PACKAGE, [name], out) or 0, 1800)
        found = json.loads(out.read_text()) if out.is_file() else {"code": -1}
        if found["code"] not in (0, 5):  # 5: no test of the file is a quick one.
            sys.exit(f"{name} fails without any mutant:\n{(place / 'log.txt').read_text()[-3000:]}")
        known[name] = {"digest": files[name], "tests": found["files"].get(name, {})}
        MAP.write_text(json.dumps(known))
    return {name: known[name] for name in files}


def all_are_there(known: dict[str, dict]) -> int:
    """Collect every test of the map: a name that nothing bears would look like a mutant that was caught."""
    import pytest

    tests = [test for entry in known.values() for test in entry["tests"]]
    return int(pytest.main(["--collect-only", *WORDS, *tests]))


def interval(caught: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    z, share = 1.96, caught / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return middle - half, middle + half


def main() -> None:
    """Copy, map, break, count."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--count", type=int, default=160)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--numbers", default="", help="Only these of the sample: 3,17-20,41-.")
    options.add_argument("--rooms", choices=[*ROOMS], default=PURE)
    options.add_argument("--only", default="", help="Files whose path holds this.")
    options.add_argument("--limit", type=float, default=15, help="Seconds of tests for one mutant.")
    options.add_argument("--planted", action="store_true", help="The faults of the list instead.")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        folders = ("src", "tests", "docs", "tools", "examples", "benchmarks")
        files = [path.name for path in ROOT.iterdir() if path.suffix in (".md", ".txt", ".toml", ".yml")]
        for name in (*folders, *files, "Makefile"):
            origin = ROOT / name
            (shutil.copytree if origin.is_dir() else shutil.copy2)(origin, place / name)
        os.environ.update(PYTHONPATH=str(place / "src"), HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        sys.path.insert(0, str(place / "src"))
        for name in WARM:
            __import__(name)
        if chosen.planted:
            trials = planted(chosen.only)
            files = {test.split("::")[0] for _, (tests,) in trials for test in tests}
        else:
            known, found = test_map(place, chosen.rooms), population(chosen.rooms, chosen.only)
            files = set(known)
            if in_fork(place, place / "log.txt", lambda: all_are_there(known), 300):
                sys.exit(f"The map names tests that are not there:\n{(place / 'log.txt').read_text()[-3000:]}")
            picked = random.Random(chosen.seed).sample(found, min(chosen.count, len(found)))
            sys.stdout.write(f"{len(picked)} of {len(found)} mutants of the {chosen.rooms} rooms, seed {chosen.seed}\n")
            trials = [(one, tests_for(known, one.path, one.function, chosen.limit)) for one in picked]
        if run_tests(place, sorted({test for _, parts in trials for part in parts for test in part}), seconds=3600):
            sys.exit(f"The tests fail without any mutant:\n{(place / 'log.txt').read_text()[-3000:]}")
        survived = try_all(place, trials, chosen.numbers, sorted(files))
    sys.exit(bool(survived))


def is_asked(number: int, asked: str) -> bool:
    """Whether a number is one of "3,17-20,41-"; all are where nothing is asked."""
    parts = [part.partition("-") for part in asked.split(",")]
    return not asked or any(
        number == int(low) or (dash and int(low) <= number <= int(high or number)) for low, dash, high in parts
    )


def load_tests(place: Path, files: Sequence[str]) -> None:
    """Load the package and the tests into this process, for the forks to come."""
    import pytest

    here = Path.cwd()
    os.chdir(place)
    with (place / "log.txt").open("w") as log, contextlib.redirect_stdout(log):
        code = pytest.main(["--collect-only", *WORDS, *files])
    os.chdir(here)
    if code:
        sys.exit(f"The tests cannot be collected:\n{(place / 'log.txt').read_text()[-3000:]}")


def try_all(place: Path, trials: Sequence[Trial], asked: str, files: Sequence[str]) -> list[Mutant]:
    """Run each mutant's tests and tell what nobody noticed; gives those."""
    wanted = [(number, mutant, parts) for number, (mutant, parts) in enumerate(trials, 1) if is_asked(number, asked)]
    patches = {
        number: patched((place / PACKAGE / mutant.path).read_text(encoding="utf-8"), mutant.text)
        for number, mutant, _ in wanted
    }
    survived, count, loaded = [], len(wanted), False
    # What runs on import comes first, as the package must not be loaded for it.
    for number, mutant, parts in sorted(wanted, key=lambda row: (patches[row[0]] is not None, row[0])):
        target, started = place / PACKAGE / mutant.path, time.monotonic()
        if patches[number] is not None and not loaded:
            load_tests(place, files)
            loaded = True
        patch = functools.partial(apply, target, patches[number])
        content, then = target.read_bytes(), target.stat()
        target.write_text(mutant.text, encoding="utf-8")
        code, run = 0, 0
        for part in parts:
            if part and not code:
                code, run = run_tests(place, part, patch), run + len(part)
        target.write_bytes(content)
        os.utime(target, ns=(then.st_atime_ns, then.st_mtime_ns))  # So that its compiled form is good again.
        if code == UNPATCHED:
            sys.exit((place / "log.txt").read_text())
        if code == 0:
            survived.append(mutant)
        what = {0: "SURVIVED", 1: "caught", -1: "caught (hangs)", -signal.SIGXCPU: "caught (hangs)"}.get(
            code, f"caught (exit {code})"
        )
        took = time.monotonic() - started
        sys.stdout.write(f"{number}/{len(trials)} {took:.1f} s with {run} tests {what}: {mutant}\n")
        sys.stdout.flush()
    low, high = interval(count - len(survived), count)
    sys.stdout.write(f"{count - len(survived)} of {count} caught: 95 % interval {low:.1%} to {high:.1%}\n")
    for mutant in survived:
        sys.stdout.write(f"survived: {mutant}\n")
    return survived


if __name__ == "__main__":
    main()
