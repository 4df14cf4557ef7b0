"""Which faults the tests would not notice: break the package in one place, run a few quick tests, count what survives.

    python tools/mutate.py                    # 160 mutants of the pure rooms, seed 0
    python tools/mutate.py --only recipes/ntk.py --count 20
    python tools/mutate.py --planted          # the faults that somebody planted once and no test saw

Each mutant is one change in one file of a copy in a temporary folder; the work tree is only read. Tests run in a fork
of a process that has loaded torch already, one after the other, so that a mutant takes seconds. Not changed are texts,
annotations, declarations (`search=`, decorators) and the arguments of errors.
"""

import argparse
import ast
import copy
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mutants import PLANTED, ROOMS, WARM

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("src/ctxext")
SECONDS = 120
"""A mutant that takes more of a processor's time hangs, which its user would notice too; one that waits, ten times."""

_SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add,
    ast.Pow: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "floor": "ceil", "ceil": "floor"}
_DECLARED = ("help", "search", "paper")


@dataclass(frozen=True)
class Mutant:
    """One change in one file of the package.

    Attributes:
        path: The file, relative to the package.
        line: Where it begins.
        before: What stood there.
        after: What stands there now.
        text: The whole file, changed.
    """

    path: str
    line: int
    before: str
    after: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before!r} -> {self.after!r}"


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in a node's place."""
    new = copy.deepcopy(node)
    match new:
        case ast.Compare():
            for number, operator in enumerate(new.ops):
                if type(operator) in _SWAPS:
                    other = copy.deepcopy(new)
                    other.ops[number] = _SWAPS[type(operator)]()
                    yield other
        case ast.BinOp() | ast.BoolOp() if type(new.op) in _SWAPS and not _is_text(new):
            new.op = _SWAPS[type(new.op)]()
            yield new
        case ast.AugAssign() if type(new.op) in _SWAPS:
            new.op = _SWAPS[type(new.op)]()
            yield new
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield new.operand
        case ast.Constant(value=bool()):
            yield ast.Constant(not new.value)
        case ast.Constant(value=int() | float()):
            yield ast.Constant(new.value + 1)
        case ast.Call(func=ast.Name(id=name)) if name in _CALLS:
            new.func = ast.Name(_CALLS[name])
            yield new
        case ast.Call(func=ast.Attribute(attr=name)) if name in _CALLS:
            new.func.attr = _CALLS[name]
            yield new
        case ast.IfExp():
            new.test = ast.UnaryOp(ast.Not(), new.test)
            yield new
        case ast.Raise() | ast.Expr(value=ast.Call()):
            yield ast.Pass()
        case ast.Continue():
            yield ast.Break()
        case ast.Break():
            yield ast.Continue()


def _is_text(node: ast.AST) -> bool:
    """Whether a sum is one of texts, which no other operator takes."""
    return any(
        isinstance(part, ast.JoinedStr) or (isinstance(part, ast.Constant) and isinstance(part.value, str))
        for part in (node, getattr(node, "left", node), getattr(node, "right", node))
    )


def places(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node that runs, and is not a text, an annotation or a declaration."""
    for child in ast.iter_child_nodes(tree):
        match child:
            case ast.JoinedStr() | ast.arg():
                continue
            case ast.Call(func=ast.Name(id="CtxextError" | "TypeVar" | "cast")):
                continue
            case ast.keyword(arg=name) if name in _DECLARED:
                continue
        if child in getattr(tree, "decorator_list", ()) or child in (
            getattr(tree, "annotation", None),
            getattr(tree, "returns", None),
        ):
            continue
        yield child
        if isinstance(child, ast.If):  # Its test is a place of its own: the whole statement is too long to show.
            yield ast.copy_location(ast.IfExp(child.test, ast.Constant(True), ast.Constant(False)), child.test)
        yield from places(child)


def mutants_of(path: str) -> Iterator[Mutant]:
    """Every mutant of a file of the package."""
    source = (ROOT / PACKAGE / path).read_text(encoding="utf-8")
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in places(ast.parse(source)):
        if not hasattr(node, "end_col_offset"):
            continue
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        before = source.encode()[begin:end].decode()
        for new in changes(node):
            after = ast.unparse(ast.fix_missing_locations(new))
            if isinstance(node, ast.expr):
                after = f"({after})"
            text = (source.encode()[:begin] + after.encode() + source.encode()[end:]).decode()
            yield Mutant(path, node.lineno, before, after, text)


def planted(only: str) -> Iterator[tuple[Mutant, tuple[str, ...]]]:
    """The faults of the list, each with the tests that must see it."""
    for path, before, after, tests in PLANTED:
        if only not in path:
            continue
        source = (ROOT / PACKAGE / path).read_text(encoding="utf-8")
        if source.count(before) != 1:
            sys.exit(
                f"{path} holds {before!r} {source.count(before)} times, not once: mend the list of planted faults."
            )
        line = source[: source.index(before)].count("\n") + 1
        yield Mutant(path, line, before, after, source.replace(before, after)), tests


def sample(count: int, seed: int, only: str) -> list[tuple[Mutant, tuple[str, ...]]]:
    """Mutants of the pure rooms, as many of a file as it is long."""
    found = [
        (mutant, tests)
        for pattern, tests in ROOMS.items()
        for path in sorted((ROOT / PACKAGE).glob(pattern))
        if only in (name := path.relative_to(ROOT / PACKAGE).as_posix())
        for mutant in mutants_of(name)
    ]
    return random.Random(seed).sample(found, min(count, len(found)))


def run_tests(place: Path, tests: Sequence[str], log: Path) -> int:
    """Run tests on the copy in a process of their own; gives pytest's code, -1 where they hang."""
    child = os.fork()
    if not child:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        opened = os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(opened, 1)
        os.dup2(opened, 2)
        os.chdir(place)
        import pytest

        # Short tracebacks: writing long ones takes longer than the tests.
        words = ["-x", "-q", "--tb=line", "-p", "no:xdist", "-m", "not slow and not engine", *tests]
        os._exit(int(pytest.main(words)))
    until = time.monotonic() + 10 * SECONDS
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1


def main() -> None:
    """Copy, check that the tests pass, break, count."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--count", type=int, default=160)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--start", type=int, default=1, help="Go on at this mutant of the sample, after a stop.")
    options.add_argument("--only", default="", help="Files whose path holds this.")
    options.add_argument("--planted", action="store_true", help="The faults of the list instead.")
    chosen = options.parse_args()
    trials = (
        list(planted(chosen.only))
        if chosen.planted
        else sample(chosen.count, chosen.seed, chosen.only)[chosen.start - 1 :]
    )
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for name in ("src", "tests", "docs", "tools", "pyproject.toml"):
            origin = ROOT / name
            (shutil.copytree if origin.is_dir() else shutil.copy2)(origin, place / name)
        os.environ.update(PYTHONPATH=str(place / "src"), HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        sys.path.insert(0, str(place / "src"))
        for name in WARM:
            __import__(name)
        survived = try_all(place, trials)
    sys.stdout.write(f"{len(trials) - len(survived)} of {len(trials)} caught\n")
    for mutant in survived:
        sys.stdout.write(f"survived: {mutant}\n")
    sys.exit(bool(survived))


def try_all(place: Path, trials: Sequence[tuple[Mutant, tuple[str, ...]]]) -> list[Mutant]:
    """Run each mutant's tests, once without it first; gives those that nobody noticed."""
    survived, log = [], place / "log.txt"
    for tests in dict.fromkeys(tests for _, tests in trials):
        if run_tests(place, tests, log):
            sys.exit(f"The tests fail without any mutant:\n{log.read_text()[-3000:]}")
    for number, (mutant, tests) in enumerate(trials, 1):
        target, started = place / PACKAGE / mutant.path, time.monotonic()
        content, then = target.read_bytes(), target.stat()
        target.write_text(mutant.text, encoding="utf-8")
        code = run_tests(place, tests, log)
        target.write_bytes(content)
        os.utime(target, ns=(then.st_atime_ns, then.st_mtime_ns))  # So that its compiled form is good again.
        if code == 0:
            survived.append(mutant)
        what = {0: "SURVIVED", 1: "caught", -1: "caught (hangs)", -signal.SIGXCPU: "caught (hangs)"}.get(
            code, f"caught (exit {code})"
        )
        sys.stdout.write(f"{number}/{len(trials)} {time.monotonic() - started:.1f} s {what}: {mutant}\n")
        sys.stdout.flush()
    return survived


if __name__ == "__main__":
    main()
