"""SIGKILL at any moment: the result is complete, or absent and the next run finishes it, equal to one nobody killed.

200 kills, half of them between two events of the run (`fork_server.py`), half by the clock; all seeded.
"""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from forks import MSPOE, TOKEN, Server, lay_models, server_with_hub

pytestmark = pytest.mark.slow

TIMED = ("seconds", "duration", "tokens_per_second", "peak_memory", "memory", "stamps", "minutes", "files")
TRAINED = ("--length", "64", "--steps", "5", "--batch-size", "2", "--rank", "4", "--save-every", "2", "-q")
ASKED = ("-t", "passkey", "--lengths", "200,300", "--samples", "2", "--depths", "2")
TRIED = ("--target-length", "640", "--trials", "4", "--samples", "1", "--checked", "2", "-q")


@dataclass(frozen=True)
class Job:
    """A command that is killed.

    Attributes:
        words: The command line, of the folder it works in.
        again: The words that the next run has more, of that folder.
        result: What it leaves, of that folder; None where it is not there.
        before: What is there when it begins, of that folder.
    """

    words: Callable[[Path], list[object]]
    result: Callable[[Path], Any]
    again: Callable[[Path], list[object]] = lambda place: []
    before: Callable[[Path], None] = lambda place: None


@pytest.fixture(scope="session")
def sources(tmp_path_factory) -> Path:
    """A source and a converted base, data, an adapter, a model with a tokenizer for questions."""
    return lay_models(tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="session")
def server(tmp_path_factory, sources) -> Iterator[Server]:
    with server_with_hub(tmp_path_factory.mktemp("server")) as started:
        base, out = sources / "base", sources / "tuned"
        for words in (
            ["convert", sources / "source", sources / "mspoe", *MSPOE, "--no-verify"],
            ["finetune", base, out, "--data", sources / "numbers.jsonl", *TRAINED, "--no-merge"],
        ):
            done = started(words)
            assert done["code"] == 0, done["said"]
        yield started


def plain(content: Any) -> Any:
    """A report without what differs from run to run: times, and the digests of files that hold some."""
    if isinstance(content, dict):
        return {key: plain(value) for key, value in content.items() if key not in TIMED}
    return [plain(value) for value in content] if isinstance(content, list) else content


def files(folder: Path) -> dict[str, Any] | None:
    """Every file of a folder; times are left out of JSON, and pictures are only there."""
    if not folder.exists():
        return None
    contents = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.suffix == ".json":
            contents[name] = plain(json.loads(path.read_text()))
        elif path.suffix == ".jsonl":
            contents[name] = [plain(json.loads(line)) for line in path.read_text().splitlines()]
        elif path.is_file():
            contents[name] = path.suffix if path.suffix in (".png", ".html") else path.read_bytes()
    return contents


def report(place: Path) -> Any:
    path = place / "out" / "report.json"
    return plain(json.loads(path.read_text())) if path.exists() else None


def recipe(place: Path) -> Any:
    """The recipe where one was found; and what every trial was, once a study has them all."""
    path = place / "best.yaml"
    return path.read_text() if path.exists() else None


def jobs(sources: Path, server: Server) -> dict[str, Job]:
    """What is killed, and how often: 200 in all."""
    source, base, tiny = sources / "source", sources / "base", sources / "tiny"
    yarn = ["-m", "yarn", "--factor", "4", "-q"]

    def pushed(place: Path) -> Any:
        pushed_files = files(server.hub.repositories["me/tiny"]) if "me/tiny" in server.hub.repositories else None
        return pushed_files if pushed_files and "config.json" in pushed_files else None

    def unpushed(place: Path) -> None:
        shutil.copytree(base, place / "base")
        if "me/tiny" in server.hub.repositories:
            shutil.rmtree(server.hub.repositories.pop("me/tiny").parent)

    return {
        "convert": Job(lambda place: ["convert", source, place / "out", *yarn], lambda place: files(place / "out")),
        "overwrite": Job(
            lambda place: ["convert", source, place / "out", *yarn, "--overwrite"],
            lambda place: files(place / "out"),
            before=lambda place: shutil.copytree(base, place / "out"),
        ),
        "verified": Job(
            lambda place: ["convert", source, place / "out", *MSPOE, "-q"],
            lambda place: files(place / "out"),
        ),
        "merge": Job(
            lambda place: ["merge", base, sources / "tuned" / "adapter", place / "out", "-q"],
            lambda place: files(place / "out"),
        ),
        "eval": Job(
            lambda place: ["eval", tiny, *ASKED, "--out", place / "out", "-q"],
            report,
            again=lambda place: ["--resume"],
        ),
        "finetune": Job(
            lambda place: ["finetune", base, place / "out", "--data", sources / "numbers.jsonl", *TRAINED],
            lambda place: files(place / "out"),
            again=lambda place: ["--resume"] if (place / "out.training").exists() else [],
        ),
        "search": Job(
            lambda place: ["search", tiny, place / "best.yaml", *TRIED, "--keep-short", "1"],
            recipe,
            again=lambda place: ["--resume"] if (place / "best.db").exists() else [],
        ),
        "push": Job(lambda place: ["push", place / "base", "me/tiny", "--token", TOKEN, "-q"], pushed, before=unpushed),
    }


NUMBERS = {"convert": 40, "overwrite": 30, "verified": 10, "merge": 40, "eval": 30, "finetune": 20, "search": 10}
NUMBERS["push"] = 20
assert sum(NUMBERS.values()) == 200
unkilled: dict[str, tuple[Any, int, float]] = {}


@pytest.mark.parametrize(("name", "number"), [(name, n) for name, count in NUMBERS.items() for n in range(count)])
def test_killed(name, number, sources, server, tmp_path_factory):
    job = jobs(sources, server)[name]
    if name not in unkilled:
        place = tmp_path_factory.mktemp(f"{name}-whole")
        job.before(place)
        done = server(job.words(place))
        assert done["code"] == 0, done["said"]
        unkilled[name] = (job.result(place), done["events"], done["seconds"])
    wanted, events, seconds = unkilled[name]
    rng = random.Random(f"{name} {number}")
    place = tmp_path_factory.mktemp(f"{name}-{number}")
    job.before(place)
    old = job.result(place)
    until = {"events": rng.randint(1, events)} if number % 2 else {"seconds": rng.uniform(0, seconds)}
    killed = server(job.words(place), **until)
    assert killed["code"] in (-9, 0), killed["said"]
    left = job.result(place)
    assert left in (None, old, wanted), f"half-made after {until}"
    if left != wanted or name == "search":
        done = server([*job.words(place), *job.again(place)])
        assert done["code"] == 0, f"after {until}: {done['said']}"
    assert job.result(place) == wanted, until
    hidden = [path.name for path in place.iterdir() if path.name.startswith(".")]
    assert not hidden or left == wanted, hidden
