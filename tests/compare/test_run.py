"""A comparison in memory is what converting and evaluating each method gives."""

import functools
import itertools
import json
import re
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

import tiny_encodings
from aligned import aligned
from ctxext.api import Recipe, Settings, compare, convert, evaluate
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.compare import run as compare_run
from ctxext.compare.candidates import STOCK, CompareOptions
from ctxext.errors import CtxextError, NothingMeasuredError
from ctxext.evaluate import run as evaluate_run
from ctxext.evaluate.run import Run
from ctxext.methods import NtkAlibi, Range, Table, Yarn
from ctxext.models import model as evaluate_model
from ctxext.models.model import LoadedModel, Loading
from ctxext.models.recipe_applier import RecipeApplier
from ctxext.recipes.recipe import recipe_from_dict
from ctxext.tasks.needle import Needle, PassKey
from ctxext.tasks.retrieval import RetrievalWork
from ctxext.tasks.settings import even_depths

ASKED = {
    "tasks": ("needle", "perplexity", "short"),
    "lengths": (640,),
    "depths": (0.0, 1.0),
    "samples": 2,
    "num_needles": 4,
}
METHODS = ("yarn", "self-extend", "mspoe")
FP32 = Loading(dtype="fp32")


def figures(model):
    """What was measured of a model, without times."""
    cells = [{key: value for key, value in cell.items() if key != "seconds"} for cell in model["cells"]]
    return cells, model["perplexity"], model["short"]["losses"], model["context_length"], model["summary"]


@pytest.mark.thorough
def test_the_same_cells_as_convert_and_eval(tmp_path):
    """A method of the configuration, a relation map and heads with scales, whose order is calibrated, on the demo."""
    report = compare("demo", target_length=1024, methods=METHODS, loading=FP32, out=tmp_path / "out", **ASKED)
    compared = {model["name"]: model for model in report["models"]}
    assert list(compared) == [STOCK, *METHODS]
    folders = []
    for name in METHODS:
        step = {"method": name, **({"target_length": 1024} if name != "mspoe" else {})}
        folders.append(convert("demo", tmp_path / name, recipe_from_dict({"steps": [step]}, name), check=False).out)
    alone = evaluate(["demo", *map(str, folders)], Settings(allow_beyond=True, **ASKED), loading=FP32)
    for model in alone["models"]:
        mine = compared[STOCK if model["name"] == "demo" else model["name"]]
        assert figures(mine) == figures(model), model["name"]
        assert mine["recipe"] == model["recipe"]
    for name in METHODS:
        assert compared[name]["short"]["against"] == {
            **next(model for model in alone["models"] if model["name"] == name)["short"]["against"],
            "model": STOCK,
        }
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == json.loads(json.dumps(report))
    text = (tmp_path / "out" / "comparison.md").read_text()
    assert report["comparison"]["verdict"] in text
    page = (tmp_path / "out" / "report.html").read_text()
    differences = re.search(r'aria-label="Differences from the unmodified model".*?</table>', page, re.DOTALL)[0]
    assert re.findall(r'<tr data-model="(.*?)">', differences) == [*METHODS]
    assert "| self-extend |" in text
    lines = [json.loads(line) for line in (tmp_path / "out" / "bench.jsonl").read_text().splitlines()]
    assert [line["method"] for line in lines] == [STOCK, *METHODS]
    assert lines[1]["time_against_unmodified"] == report["comparison"]["models"][1]["time"] > 0
    for line, model in zip(lines, report["models"], strict=True):
        (cell,) = line["cells"]
        assert (cell["questions"], cell["share"]) == (4, sum(each["correct"] for each in model["cells"]) / 4)


def test_a_text_has_a_needle_at_every_depth():
    """So that it is read once."""
    settings = CompareOptions(target_length=1024).settings("causal", 512)
    (needle,) = settings.retrieval_tasks()
    assert needle.num_needles == len(settings.depths) == 10
    assert needle.count_texts(10) == 1


@pytest.fixture
def tiny(checkpoint):
    """A comparison of a tiny random model, 512 tokens to 1024."""

    def run(**more):
        asked = {"tasks": ("passkey", "short"), "lengths": (320, 640), "depths": (0.5,), "samples": 4, **more}
        return compare(str(checkpoint), target_length=1024, methods=("yarn", "self-extend", "table"), **asked)

    return run


@pytest.mark.thorough
def test_all_candidates_share_one_copy_of_the_weights(tiny, tmp_path, monkeypatch):
    loaded = []
    monkeypatch.setattr(Run, "_measure", lambda run, model, work, done: loaded.append(model.model.lm_head.weight))
    report = tiny()
    assert {weight.data_ptr() for weight in loaded} == {loaded[0].data_ptr()}
    assert [row["name"] for row in report["comparison"]["models"]] == [STOCK, "yarn", "self-extend", "table"]
    assert "learned" in report["comparison"]["models"][-1]["refused"]
    assert report["comparison"]["taken"] is None


@pytest.mark.thorough
def test_a_comparison_resumes(tiny, tmp_path, monkeypatch):
    tiny = functools.partial(tiny, samples=2)
    whole = tiny(out=tmp_path / "out")
    lines = (tmp_path / "out" / "cells.jsonl").read_text().splitlines()
    (tmp_path / "out" / "cells.jsonl").write_text("\n".join(lines[: len(lines) // 2]) + "\n")
    with pytest.raises(CtxextError, match="already contains results"):
        tiny(out=tmp_path / "out")
    again = tiny(out=tmp_path / "out", resume=True)
    assert [figures(model)[0] for model in again["models"]] == [figures(model)[0] for model in whole["models"]]
    monkeypatch.setattr(Run, "_measure", None)
    assert tiny(out=tmp_path / "out", resume=True)["comparison"]["verdict"] == again["comparison"]["verdict"]


def test_other_results_are_refused_before_the_model_is_loaded(tiny, tmp_path, monkeypatch):
    """`table` was refused, so it is no difference."""
    monkeypatch.setattr(evaluate_model, "load_model", None)
    settings = CompareOptions(
        target_length=1024, tasks=("passkey", "short"), lengths=(320, 640), depths=(0.5,), samples=4
    ).settings("causal", 512)
    names = (STOCK, "yarn", "self-extend")

    def write(settings, names):
        header = {"settings": settings.to_dict(), "models": [{"name": name} for name in names]}
        (tmp_path / "cells.jsonl").write_text(json.dumps({"header": header}) + "\n")

    write(settings, names)
    for more, message in [
        ({}, "already contains results"),
        ({"resume": True, "samples": 2}, "samples 4, now 2"),
        ({"resume": True, "overwrite": True}, "cannot be combined"),
    ]:
        with pytest.raises(CtxextError, match=message):
            tiny(out=tmp_path, **more)
    write(settings, (*names, "dca"))
    with pytest.raises(CtxextError, match="models dca,self-extend,unmodified,yarn, now self-extend,unmodified,yarn"):
        tiny(out=tmp_path, resume=True)
    write(settings, names)
    with pytest.raises(TypeError):  # The model is loaded.
        tiny(out=tmp_path, resume=True)


@pytest.mark.thorough
def test_at_the_time_limit_all_have_the_same_questions_and_the_rest_is_reported(tiny, monkeypatch):
    """The clock goes on by two seconds whenever it is asked, so that the minute ends in the second round."""
    rounds = []
    ticks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: 2.0 * next(ticks), perf_counter=lambda: 0.0)
    for module in (compare_run, evaluate_run):
        monkeypatch.setattr(module, "time", clock)
    real = Run._measure
    monkeypatch.setattr(Run, "_measure", lambda *given: rounds.append(given) or real(*given))
    report = tiny(minutes=1)
    counts = {model["name"]: sum(cell["samples"] for cell in model["cells"]) for model in report["models"]}
    assert 0 < min(counts.values()) <= max(counts.values()) < 8
    reached = report["comparison"]["not_reached"]
    assert any("passkey: the time was enough for" in sentence for sentence in reached)
    first = [given[1].name for given in rounds[:3]]
    assert sorted(first) == sorted([STOCK, "yarn", "self-extend"]), "each is asked before any is asked more"


@pytest.fixture
def slow(monkeypatch):
    """A clock that only reading moves: by some seconds for each token that the unmodified model reads."""
    now, pace = [0.0], [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=lambda: now[0], process_time=lambda: 1e9 * now[0])
    for module in (compare_run, evaluate_model, evaluate_run):
        monkeypatch.setattr(module, "time", clock)
    load = evaluate_model.load_model

    def load_slow(*given):
        def count(_model, _arguments, options):
            now[0] += pace[0] * options["input_ids"].numel()

        loaded = load(*given)
        loaded.model.register_forward_pre_hook(count, with_kwargs=True)
        return loaded

    monkeypatch.setattr(evaluate_model, "load_model", load_slow)
    return now, pace


@pytest.mark.thorough
def test_a_text_that_does_not_fit_is_refused_before_running(tiny, slow, monkeypatch, run, checkpoint, tmp_path):
    now, pace = slow
    pace[0] = 0.5
    monkeypatch.setattr(Run, "_measure", None)
    with pytest.raises(NothingMeasuredError, match=r"are left, and one text of 640 tokens takes about \d+ min"):
        tiny(minutes=2)
    assert now[0] < 60, "some tokens are enough to know"
    words = ["--target-length", "1k", "--methods", "yarn", "--task", "passkey", "--minutes", "2", "--lengths", "640"]
    result = run("compare", checkpoint, *words, "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.thorough
def test_what_fits_is_estimated_first(tiny, slow, monkeypatch):
    told, (now, pace) = [], slow
    monkeypatch.setattr(Run, "_measure", lambda *given: None)
    pace[0] = 0.02
    tiny(minutes=30, notify=told.append)
    assert re.match(r"The comparison takes about \d+ min; the time limit is 30 min\.", told[0])
    now[0], pace[0] = 0.0, 0.05
    tiny(minutes=6, notify=told.append)
    assert re.match(r"The whole comparison takes about \d+ min; the time limit is 6 min \(--minutes\)\.", told[1])
    assert re.search(r"First: unmodified, yarn(, self-extend)? at 640 tokens on \d texts?\.", told[1])


@pytest.mark.thorough
def test_a_comparison_that_measured_nothing_ends_with_1(run, checkpoint, tmp_path, monkeypatch):
    words = ["--target-length", "1k", "--methods", "yarn", "--task", "passkey", "--lengths", "320", "--samples", "1"]
    assert run("compare", checkpoint, *words, "--out", tmp_path / "out").exit_code == 0
    monkeypatch.setattr(Run, "_measure", lambda *given: None)
    result = run("compare", checkpoint, *words, "--out", tmp_path / "none")
    assert "No method was measured" in result.stdout
    assert result.exit_code == 1


@pytest.mark.thorough
def test_models_that_the_time_no_longer_allows_are_missed(tiny, monkeypatch):
    """Each group fits by its sum, and the second model no longer does when its turn comes."""
    estimated = []

    def estimate(run, name, work, loaded, done):
        estimated.append(name)
        return 1e9 if len(estimated) == 5 else 0.0

    monkeypatch.setattr(Run, "_estimate", estimate)
    report = tiny(minutes=5, samples=1, tasks=("passkey",), lengths=(640,))
    assert estimated == [STOCK, "yarn", "self-extend", STOCK, "yarn"]
    assert report["num_missed"] == 2


@pytest.mark.parametrize(
    ("task", "num_depths", "can_share", "texts"),
    [
        (Needle(num_needles=5), 5, True, 1),
        (Needle(num_needles=4), 5, True, 2),
        (Needle(num_needles=4), 5, False, 5),
        (PassKey(), 5, True, 3),
        (PassKey(), 1, True, 1),
    ],
)
def test_the_texts_that_questions_read(task, num_depths, can_share, texts):
    work = RetrievalWork(task, 512, (0, 1), Settings(depths=even_depths(num_depths)))
    others = [512 // 32] * 2 * (num_depths - texts)
    assert work.list_readings(work.keys, can_share=can_share) == [512] * 2 * texts + others


OTHERS = {
    "gpt2": [Table(target_length=48, fill="linear"), Table(target_length=48, fill="tile")],
    "opt": [Table(target_length=48, fill="linear")],
    "bloom": [NtkAlibi(target_length=48)],
    "xglm": [Range(target_length=48)],
}


def loaded(folder):
    return aligned(AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval())


@pytest.mark.parametrize("family", OTHERS)
def test_other_encodings_are_applied_as_in_conversion(family, tmp_path):
    """Rows that a method writes are made in memory as a conversion writes them."""
    source = tiny_encodings.save(family, tmp_path / "source")
    stock = loaded(source)
    applier = RecipeApplier(
        LoadedModel(STOCK, stock, None, can_share=False), open_checkpoint(str(source)), tmp_path / "bench"
    )
    before = tiny_encodings.logits(stock, 12)
    for number, step in enumerate(OTHERS[family]):
        convert(source, tmp_path / str(number), step, check=False)
        applied = applier.apply(applier.prepare(Recipe([step]))).model
        assert torch.equal(
            tiny_encodings.logits(applied, 48), tiny_encodings.logits(loaded(tmp_path / str(number)), 48)
        )
    assert torch.equal(tiny_encodings.logits(stock, 12), before)


def test_a_table_is_measured_within_its_rows_and_longer_with_a_method(tmp_path):
    source = tiny_encodings.save_tokenizer(tiny_encodings.save("gpt2", tmp_path / "gpt2", more={"n_positions": 128}))
    asked = {"tasks": ("perplexity", "short"), "samples": 2}
    report = compare(str(source), target_length=256, methods=("table",), **asked)
    assert [model["lengths"] for model in report["models"]] == [[128], [128, 256]]
    table = report["comparison"]["models"][1]
    assert table["inside"]["loss"] == 0.0, "the first rows stay"
    assert table["recipe"]["steps"][0]["fill"] == "tile"


def test_a_converted_checkpoint_is_compared_with_itself(tmp_path):
    out = convert("demo", tmp_path / "out", Yarn(target_length=1024), check=False).out
    report = compare(str(out), target_length=1024, methods=("mspoe",), tasks=("short",), samples=1)
    assert [model["name"] for model in report["models"]] == [STOCK, "mspoe"]
    assert report["comparison"]["models"][1]["inside"] is not None


def test_unmodified_mpt_is_not_measured_beyond_its_biases(tmp_path):
    source = tiny_encodings.save_tokenizer(tiny_encodings.save("mpt", tmp_path / "mpt", more={"max_seq_len": 128}))
    report = compare(str(source), target_length=256, methods=("ntk-alibi",), tasks=("perplexity",), samples=2)
    assert [model["lengths"] for model in report["models"]] == [[128], [128, 256]]
    with pytest.raises(CtxextError, match="supports 128 tokens"):
        evaluate(str(source), Settings(tasks=("perplexity",), lengths=(256,), allow_beyond=True))


@pytest.mark.thorough
def test_the_command_shows_what_the_report_holds(run, checkpoint, tmp_path):
    words = ["--target-length", "1k", "--methods", "yarn,table", "--task", "passkey,short", "--lengths", "320,640"]
    words += ["--samples", "1", "--depths", "1", "--out", tmp_path / "out"]
    result = run("compare", checkpoint, *words)
    assert result.exit_code == 0, result.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    for part in ("320 tokens", "640 tokens", "found, points", "cost inside", "table does not apply: ", "supported by"):
        assert part in result.stdout, result.stdout
    assert report["comparison"]["verdict"] in " ".join(result.stdout.split())
    assert "comparison.md" in result.stderr
    yarn = report["comparison"]["models"][1]
    assert yarn["convert"] == ["--method", "yarn", "--target-length", "1k"]
    assert yarn["time"] > 0
    assert yarn["memory"] is None or yarn["memory"] > 0.5
    again = run("compare", checkpoint, *words, "--resume", "--json", "-q")
    assert json.loads(again.stdout)["comparison"]["verdict"] == report["comparison"]["verdict"]
    assert again.stderr == ""
    assert "Missing option --target-length" in run("compare", checkpoint).exception.message


@pytest.mark.thorough
def test_the_demo_is_a_small_comparison(run, tmp_path):
    result = run("demo", tmp_path / "out", "--samples", 1, "--json", "-q")
    assert result.exit_code == 0, result.stderr
    shown = json.loads(result.stdout)
    assert set(shown) == {"samples", "lengths", "exact_match", "shows", "report"}
    assert list(shown["exact_match"]) == ["unmodified", "pi", "ntk", "yarn", "mspoe", "mspoe-by-parts"]
    assert {length: len(shares) for length, shares in shown["exact_match"]["yarn"].items()} == {"512": 5, "2048": 5}
    assert (tmp_path / "out" / "report" / "report.html").exists()
