"""Losses on several kinds of text in one call, each reported apart."""

import json

import pytest

from ctxext.api import Settings, compare, evaluate
from ctxext.compare.verdict import collect_results
from ctxext.data.texts import kinds_of_text
from ctxext.errors import CtxextError
from ctxext.models.model import Loading

FP32 = Loading(dtype="fp32")


@pytest.fixture
def places(tmp_path):
    """Two files of two documents each, long enough for 640 tokens."""
    texts = {"prose": "The river was wide and slow. ", "code": "def f(x): return {x: x + 1}\n"}
    for name, text in texts.items():
        lines = [json.dumps({"text": (f"{number}. " + text) * 150}) for number in range(2)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return [str(tmp_path / f"{name}.jsonl") for name in texts]


def test_places_are_named_as_their_files(tmp_path):
    assert kinds_of_text(None) == {"": None}
    assert kinds_of_text("a/b.txt") == {"": "a/b.txt"}
    assert kinds_of_text("a/prose.en.txt, b/code.jsonl,org/set") == {
        "prose": "a/prose.en.txt",
        "code": "b/code.jsonl",
        "set": "org/set",
    }
    (tmp_path / "a,b.txt").write_text("One file.")
    assert kinds_of_text(str(tmp_path / "a,b.txt")) == {"": str(tmp_path / "a,b.txt")}
    with pytest.raises(CtxextError, match='named "a"'):
        Settings(data="x/a.txt,y/a.jsonl")


@pytest.mark.thorough
def test_each_kind_is_what_it_is_alone(checkpoint, places, tmp_path):
    asked = {"tasks": ("perplexity", "short"), "lengths": (128,), "samples": 3, "original_length": 64}
    report = evaluate(checkpoint, Settings(data=",".join(places), **asked), loading=FP32, out=tmp_path / "out")
    both = report["models"][0]["perplexity"]
    alone = [evaluate(checkpoint, Settings(data=place, **asked), loading=FP32)["models"][0] for place in places]
    assert [both["texts"][name] for name in ("prose", "code")] == [model["perplexity"] for model in alone]
    assert both["documents"] == 4
    assert both["lengths"]["128"]["loss"] == pytest.approx(
        sum(m["perplexity"]["lengths"]["128"]["loss"] for m in alone) / 2
    )
    prose, code = (model["short"]["losses"] for model in alone)
    assert report["models"][0]["short"]["losses"] == [prose[0], code[0], prose[1]], "other tasks read the files in turn"
    lines = [json.loads(line) for line in (tmp_path / "out" / "cells.jsonl").read_text().splitlines()]
    assert {line["text"] for line in lines if "buckets" in line} == {"prose", "code"}
    assert report["settings"]["data"]["name"] == "prose.jsonl,code.jsonl"
    assert "prose" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.thorough
def test_a_stopped_run_resumes(checkpoint, places, tmp_path):
    settings = Settings(("perplexity",), (128,), samples=2, data=",".join(places))
    whole = evaluate(checkpoint, settings, loading=FP32, out=tmp_path / "out")
    log = tmp_path / "out" / "cells.jsonl"
    log.write_text("".join(line + "\n" for line in log.read_text().splitlines() if '"samples": [1]' not in line))
    again = evaluate(checkpoint, settings, loading=FP32, out=tmp_path / "out", resume=True)
    assert again["models"][0]["perplexity"] == whole["models"][0]["perplexity"]
    assert len(log.read_text().splitlines()) == 1 + 2 + 4, "a header, two loadings, each document once"


@pytest.mark.parametrize("minutes", [None, 5.0])
@pytest.mark.thorough
def test_compared_by_kind(checkpoint, places, minutes, tmp_path):
    asked = {"tasks": ("perplexity",), "lengths": (640,), "samples": 2}
    report = compare(
        checkpoint, target_length=640, methods=("yarn",), data=",".join(places), loading=FP32, minutes=minutes,
        out=tmp_path / "out", **asked,
    )  # fmt: skip
    yarn = report["comparison"]["models"][1]
    assert list(yarn["beyond_by_text"]) == ["code", "prose"]
    assert yarn["beyond"]["texts"] == 4
    assert {one["texts"] for one in yarn["beyond_by_text"].values()} == {2}
    mean = sum(one["difference"] for one in yarn["beyond_by_text"].values()) / 2
    assert yarn["beyond"]["difference"] == pytest.approx(mean)
    assert "| loss beyond, change | code | prose |" in (tmp_path / "out" / "comparison.md").read_text()


def test_documents_of_different_kinds_are_not_paired():
    def record(model, text, loss, sample=0):
        sums = {"buckets": [[1.0, 1], [loss, 1]], "width": 64, "seconds": 1.0, "samples": [sample]}
        return {"model": model, "task": f"perplexity: {text}", "text": text, "length": 128, "depth": None, **sums}

    mine = collect_results([record("a", "code", 3.0), record("a", "prose", 2.0), record("a", "prose", 2.5, 1)], 64)
    stock = collect_results([record("b", "code", 1.0), record("b", "prose", 2.0), record("b", "prose", 2.0, 1)], 64)
    assert mine.loses_more(stock).texts == 3
    assert {text: one.mean for text, one in mine.loses_more_by_text(stock).items()} == {"code": 2.0, "prose": 0.25}


def test_depths_are_requested_by_the_option_name():
    with pytest.raises(CtxextError) as error:
        Settings(depths=())
    assert error.value.hint.endswith("--depths.")
