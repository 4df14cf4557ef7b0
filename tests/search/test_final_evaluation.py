"""End of a search: time limit, final evaluation, and the recipe that answers the most prompts."""

import math
import re
import time
from dataclasses import replace

import pytest

from ctxext.api import Recipe, SearchOptions, search
from ctxext.errors import CtxextError
from ctxext.methods import Ntk, Yarn
from ctxext.models import model as evaluate_model
from ctxext.recipes.registry import method_named
from ctxext.search import final_evaluation, measurement, study
from ctxext.search.final_evaluation import check, rank_finalists
from ctxext.search.measurement import make_eval_sets, measure
from ctxext.search.study import Point, Trial

OPTIONS = SearchOptions(target_length=640, samples=2, num_depths=2, checked=4, keep_short=0.01)


@pytest.fixture(scope="module")
def eval_set(applier):
    return make_eval_sets(applier.stock.encoder, OPTIONS, 320)[1]


@pytest.mark.thorough
def test_models_measured_alternately_answer_as_if_measured_separately(applier, eval_set):
    """Code of several recipes is in memory at once, written to one folder in turn."""
    recipes = [Recipe([Yarn(factor=2)]), Recipe([method_named("self-extend")(factor=4)]), Recipe([Ntk(factor=2)])]
    points = [
        Point(Trial(number, "yes", recipe, measure(applier.apply(recipe), eval_set), "", 1.0), 0.5, 0.0, 0.0)
        for number, recipe in enumerate(recipes)
    ]
    checked = check(applier, eval_set, points, points, 5.0, math.inf)
    assert list(checked.answers) == [0, 1, 2]
    for number, answered in checked.answers.items():
        alone = points[number].trial.measurement
        for length in answered.answers:
            assert sorted(answered.answers[length]) == pytest.approx(sorted(alone.answers[length]), abs=1e-4)
    assert len({answered.loss for answered in checked.answers.values()}) == 3
    kept = rank_finalists(applier, eval_set, points, 5.0, math.inf)
    assert kept[0].trial.number == min(checked.answers, key=lambda number: checked.answers[number].loss)


@pytest.mark.thorough
def test_every_recipe_gets_the_same_questions_at_any_time_limit(applier, eval_set, monkeypatch):
    recipe = Recipe([Yarn(factor=2)])
    trial = Trial(0, "yarn", recipe, measure(applier.apply(recipe), eval_set), "", 1.0)
    checked = check(applier, eval_set, [Point(trial, 0.5, 0.0, 0.0)], [], 5.0, time.monotonic() - 1)
    assert checked.stock.num_prompts == checked.answers[0].num_prompts == 4
    assert eval_set.num_prompts == 8


@pytest.mark.parametrize("minutes", [2, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.thorough
def test_the_time_limit_includes_all_stages(source, monkeypatch, minutes):
    """With a clock that advances by half a second per prompt."""
    now = [0.0]

    def slow(loaded, questions, *more):
        result = measure(loaded, questions, *more)
        now[0] += 0.5 * sum(map(len, result.answers.values()))
        return result

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for module in (measurement, study, final_evaluation):
        monkeypatch.setattr(module, "measure", slow)
    options = SearchOptions(target_length=640, minutes=minutes, samples=4, checked=40, num_depths=1, keep_short=5.0)
    result = search(str(source), options)
    assert 0.7 * 60 * minutes < now[0] < 1.15 * 60 * minutes
    assert result.check.answers
    assert result.check.stock.num_prompts < 40, "as many as there was time for"
    assert result.state.points


@pytest.fixture
def slow_reading(monkeypatch):
    """A clock that advances by half a second per token."""
    now, load = [0.0], evaluate_model.load_model

    def load_slow(*given):
        def count(_model, _arguments, options):
            now[0] += 0.5 * options["input_ids"].numel()

        loaded = load(*given)
        loaded.model.register_forward_pre_hook(count, with_kwargs=True)
        return loaded

    monkeypatch.setattr(evaluate_model, "load_model", load_slow)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.mark.thorough
def test_too_little_time_is_reported_at_the_start(source, slow_reading):
    with pytest.raises(CtxextError, match=r"10 minutes are too short: .* one recipe take about \d+ min") as raised:
        search(str(source), SearchOptions(target_length=640, minutes=10, samples=2, checked=2))
    assert slow_reading[0] < 60
    minutes = int(re.search(r"--minutes (\d+)", raised.value.hint)[1])
    assert minutes > 10


@pytest.mark.thorough
def test_a_search_measures_less_if_the_time_is_short(source, slow_reading, tmp_path):
    """200 minutes are 24,000 tokens; two documents and a text of each length are 1,600 for each of 12 recipes."""
    stages, options = [], SearchOptions(target_length=640, minutes=200, trials=2, num_depths=2)
    found = search(str(source), options, out=tmp_path / "r.yaml", watch=lambda state: stages.append(state.stage))
    assert "the time is enough for" in " ".join(stages)
    samples = found.state.stock.num_prompts // 2
    assert samples < SearchOptions(target_length=640).samples
    stages.clear()
    longer = replace(options, minutes=900, trials=3)
    again = search(
        str(source), longer, out=tmp_path / "r.yaml", resume=True, watch=lambda state: stages.append(state.stage)
    )
    assert "the time is enough for" not in " ".join(stages), "the study chose"
    assert again.state.stock.num_prompts == found.state.stock.num_prompts, "a resumed study has the same questions"
    with pytest.raises(CtxextError, match="1 minutes are too short"):
        search(str(source), replace(options, minutes=1, trials=4), out=tmp_path / "r.yaml", resume=True)
