"""`ctxext search` and `ctxext convert --method auto` from the command line."""

import io
import json
import math
import shutil
import sqlite3
import time
from importlib import import_module
from types import SimpleNamespace

import pytest
from rich.console import Console

from ctxext.cli import convert
from ctxext.cli.output import Output
from ctxext.cli.search import watching
from ctxext.errors import CtxextError, NothingMeasuredError
from ctxext.search.measurement import Measurement
from ctxext.search.options import SearchOptions
from ctxext.search.study import SearchState, Trial, choose_best, find_points

SMALL = ("--trials", 2, "--samples", 1, "--checked", 2, "--lengths", 640, "--target-length", 640)
SMALL += ("--methods", "ntk,yarn")


def write(path, text=""):
    path.write_text(text)


def extended(folder):
    from ctxext.api import Recipe, convert
    from ctxext.methods import Yarn

    convert(str(folder / "model"), folder / "long", Recipe([Yarn(factor=2)]))
    shutil.rmtree(folder / "model")
    (folder / "long").rename(folder / "model")


def learned(folder):
    config = json.loads((folder / "model" / "config.json").read_text())
    write(folder / "model" / "config.json", json.dumps({**config, "model_type": "gpt2", "n_positions": 320}))


def studied(folder):
    sqlite3.connect(folder / "best.db").close()


FAR = ("--target-length", "640")
BAD = {
    "no target": ((), None, "Missing option --target-length."),
    "target inside": (("--target-length", "320"), None, "not above the original context length 320"),
    "no such method": ((*FAR, "--methods", "yarm"), None, 'no method "yarm"'),
    "no time": ((*FAR, "--minutes", "0"), None, "minutes must be above 0"),
    "beyond the target": ((*FAR, "--lengths", "1k"), None, "above the target length of 640"),
    "too short": ((*FAR, "--lengths", "100"), None, 'The task "needle" needs at least'),
    "extended": ((*FAR,), extended, "is already extended: yarn ×2"),
    "not rotary": ((*FAR,), learned, "learned position embeddings"),
    "a folder": ((*FAR,), lambda folder: (folder / "best.yaml").mkdir(), "is a folder, not a recipe file"),
    "a recipe there": ((*FAR,), lambda folder: write(folder / "best.yaml"), 'best.yaml" exists already'),
    "no folder": (
        (*FAR,),
        lambda folder: (folder / "best.yaml").symlink_to("no/x"),
        "does not exist or is not writable",
    ),
    "a study there": ((*FAR,), studied, 'best.db" exists already. Continue with --resume'),
    "no study": ((*FAR, "--resume"), None, "does not exist. Remove --resume"),
    "no study to replace": ((*FAR, "--resume", "--overwrite"), None, "Remove --resume"),
    "not a study": ((*FAR, "--resume"), lambda folder: write(folder / "best.db", "text " * 99), "cannot be used"),
    "no data": ((*FAR, "--data", "absent.txt"), None, "There is no file"),
    "little data, an old study": (
        (*FAR, "--data", "little.txt", "--overwrite"),
        lambda folder: (studied(folder), write(folder / "little.txt", "Few.")),
        "no document of 320 tokens",
    ),
    "little data": (
        (*FAR, "--data", "little.txt"),
        lambda folder: write(folder / "little.txt", "Few."),
        "no document of 320 tokens",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_line(run, source, tmp_path, monkeypatch, case):
    words, spoil, message = BAD[case]
    monkeypatch.chdir(tmp_path)
    shutil.copytree(source, tmp_path / "model")
    if spoil:
        spoil(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    result = run("search", "model", "best.yaml", "--samples", 1, "--checked", 2, "--trials", 1, *words, "-q")
    assert isinstance(result.exception, CtxextError), result.output
    assert message in f"{result.exception.message} {result.exception.hint}"
    assert "\n" not in result.exception.message + result.exception.hint
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_without_optuna_the_error_names_the_package(run, source, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = run("search", source, tmp_path / "best.yaml", *FAR)
    assert result.exception.hint == 'pip install "ctxext[search]"'


@pytest.mark.thorough
def test_json_is_alone_on_stdout(run, source, tmp_path):
    out = tmp_path / "best.yaml"
    result = run("search", source, out, *SMALL, "--keep-short", 5, "--json", "--study", tmp_path / "own.db")
    data = json.loads(result.stdout)
    assert data["trials"] == 2
    assert [point["published"] for point in data["published"]] == ["ntk", "yarn"]
    assert sum(one["taken"] for one in data["checked"]["recipes"]) == 1
    assert any(one["published"] for one in data["checked"]["recipes"])
    assert data["checked"]["unmodified"]["prompts"] == 10
    assert (tmp_path / "own.db").exists()
    assert data["files"] == [str(tmp_path / "best.png")]
    again = run("search", source, out, *SMALL, "--keep-short", 5, "--resume", "--study", tmp_path / "own.db", "--json")
    assert json.loads(again.stdout) == data
    other = run("search", source, out, *SMALL, "--keep-short", 4, "--resume", "--study", tmp_path / "own.db")
    assert "other settings: keep_short 5.0, now 4.0" in other.exception.message


def state_of(numbers, stage="trying recipes", seconds=90.4):
    from ctxext.api import Recipe
    from ctxext.methods import Yarn

    stock = Measurement([1.0, 1.0], {64: [3.0]}, {64: [False]}, (64,), 1)
    tried = [
        Trial(n, "yarn" if n == 0 else "", Recipe([Yarn(factor=4 + n)]),
              Measurement([1.001, 1.001], {64: [-math.log1p(-loss)]}, {64: [True]}, (64,), 1), "", 1.0)
        for n, loss in enumerate(numbers)
    ]  # fmt: skip
    points = find_points(tried, stock)
    return SearchState(stage, stock, tried, points, choose_best(points, 0.01), time.monotonic() + seconds)


def test_a_log_has_a_line_for_each_new_best_and_no_other():
    output = Output()
    output.stderr = Console(file=io.StringIO(), width=200)
    with watching(output) as watch:
        for state in (state_of([]), state_of([0.5]), state_of([0.5, 0.6]), state_of([0.5, 0.6, 0.1])):
            watch(state)
    lines = output.stderr.file.getvalue().splitlines()
    assert len(lines) == 3
    assert "3 recipes, 0 stopped early · 90 s left; best yarn ×6 (answers 0.1000" in lines[-1]


@pytest.fixture
def few(monkeypatch):
    """Limit `--method auto` to YaRN and few prompts."""

    def ask(**more):
        less = {"samples": 1, "checked": 2, "methods": ("yarn",), **more}
        monkeypatch.setattr(
            import_module("ctxext.search.options"), "SearchOptions", lambda **given: SearchOptions(**given, **less)
        )

    return ask


@pytest.mark.thorough
def test_auto_converts_with_the_recipe_that_a_search_writes(run, tmp_path, few):
    few(lengths=(1024,), keep_short=0.05)
    words = ("--method", "auto", "--target-length", "1k", "--trials", 1)
    result = run("convert", "demo", tmp_path / "out", *words)
    assert result.exit_code == 0, result.output
    assert "yarn ×2" in result.stdout
    assert "unseen prompts per length" in result.stderr
    assert json.loads((tmp_path / "out" / "ctxext.json").read_text())["recipe"]["description"].startswith("Found by")


def test_auto_converts_with_the_best_published_recipe_if_none_helps(run, source, tmp_path, few):
    few(lengths=(640,))
    result = run("convert", source, tmp_path / "out", "--method", "auto", *FAR, "--trials", 1)
    assert result.exit_code == 0, result.output
    assert (
        "No recipe is significantly better than the unmodified model. Writing the best published one" in result.stderr
    )
    assert recipe_in(tmp_path / "out")["steps"][0]["method"] == "yarn"


def recipe_in(folder):
    return json.loads((folder / "ctxext.json").read_text())["recipe"]


NTK = {"steps": [{"method": "ntk", "factor": 2.0}]}


@pytest.mark.parametrize(
    ("taken", "nearest", "says"),
    [
        ("ntk", "ntk", "3 minutes were too short. Comparing the published methods instead."),
        (None, "ntk", "No recipe is significantly better than the unmodified model. Writing the best published one"),
        (None, None, "The time was too short to measure any method at 640 tokens"),
    ],
)
def test_auto_compares_published_methods_without_time_for_a_search(
    run, source, tmp_path, monkeypatch, taken, nearest, says
):
    asked, clock = [], iter((100.0, 100.0 + 3.5 * 60))

    def too_short(*given, **more):
        raise NothingMeasuredError("3 minutes were too short.")

    def compared(*given, **more):
        asked.append((given, more))
        rows = [{"name": "unmodified", "recipe": None}, {"name": "ntk", "recipe": NTK}]
        return {"comparison": {"models": rows, "taken": taken, "nearest": nearest, "verdict": "Take ntk."}}

    monkeypatch.setattr(import_module("ctxext.search.run"), "search", too_short)
    monkeypatch.setattr(import_module("ctxext.compare.run"), "compare", compared)
    monkeypatch.setattr(convert, "time", SimpleNamespace(monotonic=lambda: next(clock), perf_counter=lambda: 0.0))
    result = run("convert", source, tmp_path / "out", "--method", "auto", *FAR, "--minutes", 5)
    assert asked[0][0] == (str(source),)
    assert asked[0][1]["target_length"] == 640
    assert asked[0][1]["minutes"] == pytest.approx(1.5), "what the search left"
    if nearest is None:
        assert says in result.exception.message
        assert not (tmp_path / "out").exists()
    else:
        assert result.exit_code == 0, result.output
        assert says in result.stderr
        assert recipe_in(tmp_path / "out")["steps"][0]["method"] == "ntk"


BAD_AUTO = {
    ("-m", "auto"): "requires --target-length",
    ("-m", "auto", "--factor", "2"): "cannot be combined with --factor",
    ("-m", "auto", *FAR, "--beta-fast", "16"): "cannot be combined with --beta-fast",
    ("-m", "auto", "-m", "yarn", *FAR): "cannot be combined with another",
    ("-m", "yarn", "--factor", "2", "--trials", "3"): "require --method auto",
}


@pytest.mark.parametrize("words", BAD_AUTO, ids=" ".join)
def test_auto_cannot_be_combined_with_methods(run, source, tmp_path, words):
    result = run("convert", source, tmp_path / "out", *words)
    assert BAD_AUTO[words] in result.exception.message
    assert not (tmp_path / "out").exists()
