"""Whole searches on a tiny model: reproducible, resumable, and without a recommendation if no recipe helps."""

import dataclasses
import subprocess
import sys
import time
from importlib import import_module

import pytest
import yaml

from ctxext.api import SearchOptions, load_recipe, search
from ctxext.files.processes import machine_id
from ctxext.report.pictures import as_png
from ctxext.search import study as study_module
from ctxext.search.options import StudyPlace
from ctxext.search.space import build_space
from ctxext.search.study import Study

METHODS = ("ntk", "yarn", "longrope", "mspoe")
QUICK = SearchOptions(
    target_length=640,
    lengths=(640,),
    trials=6,
    samples=1,
    num_depths=2,
    checked=2,
    keep_short=5.0,
    seed=3,
    methods=METHODS,
)


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


@pytest.fixture(scope="module", autouse=True)
def soon_not_random():
    """The sampler learns from the first trials on, so that its draws depend on all earlier ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study_module, "_RANDOM_AT_FIRST", 1)
        yield


def trials_of(result):
    return [(one.published, one.recipe.to_dict() if one.recipe else None, one.refusal) for one in result.state.trials]


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    """An uninterrupted search."""
    return search(str(source), QUICK, out=tmp_path_factory.mktemp("whole") / "best.yaml")


@pytest.mark.thorough
def test_the_same_seed_and_trials_give_the_same_recipe(source, tmp_path, whole):
    again = search(str(source), QUICK)
    assert trials_of(again) == trials_of(whole)
    assert again.check.stock == whole.check.stock
    assert again.check.answers == whole.check.answers
    assert again.check.winner.trial.recipe == whole.check.winner.trial.recipe
    other = search(str(source), dataclasses.replace(QUICK, seed=4))
    assert trials_of(other)[-2:] != trials_of(whole)[-2:]


@pytest.mark.parametrize("dead_at", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.thorough
def test_a_killed_search_resumes_with_the_same_result(source, tmp_path, whole, monkeypatch, dead_at):
    measure, calls = study_module.measure, []

    def dying(*args):
        calls.append(1)
        if len(calls) == dead_at:
            raise Killed
        return measure(*args)

    monkeypatch.setattr(study_module, "measure", dying)
    out = tmp_path / "best.yaml"
    with pytest.raises(Killed):
        search(str(source), QUICK, out=out)
    assert not out.exists()
    result = search(str(source), QUICK, out=out, resume=True)
    assert trials_of(result) == trials_of(whole), "a trial was lost, repeated or changed"
    assert result.check.winner.trial.recipe == whole.check.winner.trial.recipe


def is_beaten(measurement, search):
    """Return whether another recipe dominates, whatever the results of the remaining prompts."""
    rise = measurement.rise(search.state.stock)[0]
    return any(point.dominates(measurement.least_loss, rise) for point in search.state.points)


@pytest.mark.thorough
def test_published_recipes_are_measured_to_the_end(whole):
    published = {one.published: one for one in whole.state.trials if one.published}
    assert set(published) == {"ntk", "yarn", "mspoe"}, "longrope's starting curve is a guess"
    for one in published.values():
        assert one.measurement is None or one.measurement.is_whole or is_beaten(one.measurement, whole)
    best = min(point.loss for point in whole.state.points if point.trial.published)
    assert whole.state.best.loss <= best


def test_a_recipe_is_measured_once(source, monkeypatch):
    asked = []
    original = study_module.measure
    monkeypatch.setattr(study_module, "measure", lambda *given: asked.append(given[0].name) or original(*given))
    monkeypatch.setattr(study_module, "_mutate", lambda rng, value, space: value)
    options = dataclasses.replace(QUICK, methods=("pi",), trials=4)
    result = search(str(source), options)
    recipes = [one.recipe.to_dict() for one in result.state.trials if one.recipe]
    assert len(recipes) > len({str(recipe) for recipe in recipes}) == len(asked), "one was drawn twice, as it is here"


@pytest.mark.thorough
def test_a_model_that_nothing_helps_is_left_alone(source, tmp_path, run, monkeypatch):
    monkeypatch.setattr(import_module("ctxext.report.pictures"), "as_png", as_png)
    out = tmp_path / "best.yaml"
    for older in (out, out.with_suffix(".db")):
        older.write_text("an older one")
    words = ["--overwrite", "--target-length", 640, "--lengths", 640, "--trials", 2, "--samples", 1, "--checked", 2]
    words += ["--methods", "yarn,mspoe"]
    result = run("search", source, out, *words, "-q")
    assert result.exit_code == 0, result.output
    assert "No recipe is significantly better than the unmodified model" in result.stdout
    assert not out.exists()
    assert (tmp_path / "best.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.thorough
def test_a_recipe_of_another_process_is_left_to_it(source, tmp_path):
    from ctxext.checkpoint.opening import open_checkpoint

    space = build_space(open_checkpoint(str(source)), 1280)
    mine, theirs = (Study(StudyPlace(path=tmp_path / "shared.db"), space, 0, 0.01) for _ in range(2))
    for study in (mine, theirs):
        study.begin({"source": "tiny"})
    trial, parameters = theirs.ask()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        trial.set_user_attr("owner", [machine_id(), other.pid, time.time()])
        mine.rescue()
        assert mine.ask()[1] != parameters
        other.communicate(b"\n")
    mine.rescue()
    drawn = [mine.ask()[1] for _ in range(len(space.starts()) - 1)]
    assert drawn.count(parameters) == 1, "what a dead process was trying is lined up again"


@pytest.mark.thorough
def test_the_demo_gets_a_recipe_file_that_converts(tmp_path, run):
    out = tmp_path / "best.yaml"
    words = ["--target-length", "1k", "--lengths", "1k", "--trials", 1, "--methods", "yarn", "--samples", 1]
    words += ["--checked", 2]
    result = run("search", "demo", out, *words, "--keep-short", "0.05")
    assert result.exit_code == 0, result.output
    assert f"ctxext convert demo OUT --recipe {out}" in result.stderr
    text = out.read_text()
    assert text.startswith("# Measured on 10 unseen prompts per length:\n#   unmodified: loss of an")
    assert load_recipe(str(out)).description.startswith("Found by ctxext search on demo for 1024 tokens; 1 recipes")
    assert yaml.safe_load(text)["steps"][0]["method"] == "yarn"
    converted = run("convert", "demo", tmp_path / "long", "--recipe", out)
    assert converted.exit_code == 0, converted.output
    assert "Found by ctxext search" in (tmp_path / "long" / "ctxext.json").read_text()
