"""Evaluation through an inference engine, over a stand-in; tests/engines asks the real one."""

import importlib.metadata
import importlib.util
import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

import stub_vllm
from ctxext import Recipe, Settings, evaluate
from ctxext.checkpoint.opening import Checkpoint, open_checkpoint
from ctxext.converters.convert import convert
from ctxext.engines.vllm import Engine, engine_dtype
from ctxext.errors import CtxextError
from ctxext.evaluate import served
from ctxext.evaluate.checkpoint_info import CheckpointInfo
from ctxext.evaluate.model import Loading
from ctxext.evaluate.served import check_served, load_served, serving_by_vllm
from ctxext.methods import DynamicNtk, LongRope, MsPoE, PositionInterpolation, Yarn
from ctxext.publish.results import build_results
from ctxext.recipes.model_config import model_config

ENGINE = Loading(dtype="fp32", engine="vllm")
SMALL = {"tasks": ("needle",), "lengths": (256,), "depths": (0.0, 1.0), "samples": 2}


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    """The stand-in in the place of vLLM, under the version of a package that is installed."""
    stub = stub_vllm.module()
    monkeypatch.setitem(sys.modules, "vllm", stub)
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: {"vllm": ["pytest"]})
    return stub


def error_of(result):
    """What a command that was refused says, with its hint."""
    assert isinstance(result.exception, CtxextError)
    return f"{result.exception.message} {result.exception.hint}"


def cells(report):
    return [
        {(cell["task"], cell["length"], cell["depth"]): cell["correct"] for cell in model["cells"]}
        for model in report["models"]
    ]


def test_the_same_cells_as_transformers(tmp_path):
    asked = Settings(
        tasks=("needle", "kv", "documents"),
        lengths=(256, 640),
        depths=(0.0, 1.0),
        samples=1,
        kv_ids="number",
        allow_beyond=True,
    )
    scored = evaluate(["demo"], asked, loading=Loading(dtype="fp32"))
    served = evaluate(["demo"], asked, loading=ENGINE, out=tmp_path / "out")
    assert cells(served) == cells(scored)
    assert 0 < sum(cells(served)[0].values()) < len(cells(served)[0]) * 2, "all or nothing is no comparison"
    (llm,) = stub_vllm.made
    assert llm.options["enable_prefix_caching"]
    assert llm.options["max_model_len"] == 640
    assert llm.options["hf_overrides"] == {"max_position_embeddings": 640}
    assert len(llm.calls) == 6, "one call per task and length"
    # Prompts of one question stand side by side and begin alike.
    first, second = llm.calls[0][:2]
    assert first[:100] == second[:100]
    assert llm.ended


def test_the_implementation_that_a_family_needs_is_started(monkeypatch):
    """As `inspect` says: vLLM's own model of some families reads a schedule wrongly."""
    row = served.serving_by_vllm(open_checkpoint("demo"))
    for arguments, wanted in (("--model-impl transformers", "transformers"), ("", None)):
        monkeypatch.setattr(served, "serving_by_vllm", lambda _, text=arguments: replace(row, arguments=text))
        evaluate(["demo"], Settings(**SMALL), loading=ENGINE)
        assert stub_vllm.made[-1].options.get("model_impl") == wanted
        assert stub_vllm.made[-1].options["limit_mm_per_prompt"] == {"image": 0, "video": 0, "audio": 0}


def test_engine_and_version_are_named(tmp_path):
    report = evaluate(["demo"], Settings(**SMALL), loading=ENGINE, out=tmp_path / "out")
    header = json.loads((tmp_path / "out" / "cells.jsonl").read_text().splitlines()[0])["header"]
    assert header["loading"]["engine"] == "vllm"
    assert header["versions"]["vllm"] == pytest.__version__
    named = f"vLLM {pytest.__version__}"
    assert report["models"][0]["engine"] == named
    assert named in (tmp_path / "out" / "report.html").read_text()
    card = build_results(report, report["models"][0], [])
    assert f"run by {named}" in card.body
    assert "answers generated" in card.body
    assert "--engine vllm" in card.command
    assert "--generate" not in card.command
    assert "engine" not in json.dumps(evaluate(["demo"], Settings(**SMALL))["loading"])


@pytest.mark.parametrize(
    ("changes", "loading", "message"),
    [
        ({"tasks": ("needle", "short", "perplexity")}, {}, "it cannot measure short and perplexity"),
        ({"harness": ("longbench",)}, {}, "--harness cannot be combined with"),
        ({}, {"device": "cpu"}, "chooses device"),
        ({}, {"attention": "eager"}, "chooses device"),
    ],
)
def test_what_it_cannot_do_is_refused(changes, loading, message, monkeypatch):
    with pytest.raises(CtxextError, match=message):
        evaluate(["demo"], Settings(**{**SMALL, **changes}), loading=Loading(engine="vllm", **loading))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(CtxextError, match="starts its processes itself"):
        evaluate(["demo"], Settings(**SMALL), loading=Loading(engine="vllm"))
    assert not stub_vllm.made


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (DynamicNtk(factor=4), 'vLLM does not serve "out": vLLM returned numbers that are not finite'),
        (MsPoE(head_order="prompt", first_layer=0), 'vLLM does not serve "out": needs --head-order calibrated'),
    ],
)
def test_a_checkpoint_that_it_does_not_serve_is_refused(tmp_path, step, message):
    convert("demo", tmp_path / "out", Recipe([step]), check=False)
    with pytest.raises(CtxextError, match=message):
        evaluate([str(tmp_path / "out")], Settings(**SMALL), loading=ENGINE)


@pytest.mark.parametrize("lengths", [(256, 1024), (1024, 256), (256, 1025, 300)])
def test_the_longest_length_decides_what_it_has_positions_for(lengths):
    """For YaRN the table ends with its context length; a plain model gets as many as the longest length asks for."""
    demo = open_checkpoint("demo")
    yarn = Recipe([Yarn(factor=2)]).resolve(model_config(demo.config)).edit(model_config(demo.config))
    served = CheckpointInfo("out", Checkpoint("out", demo.folder, yarn.config), 512, 1024)
    plain = CheckpointInfo("demo", demo, 512, 512)
    with pytest.raises(CtxextError, match="supports only 1024 tokens") if max(lengths) > 1024 else nullcontext():
        check_served(served, lengths)
    check_served(plain, lengths)
    load_served(plain, ENGINE, lengths).close()
    (llm,) = stub_vllm.made
    assert llm.options["max_model_len"] == max(lengths)
    assert llm.options["hf_overrides"] == {"max_position_embeddings": max(lengths)}


def test_what_the_engine_is_asked_for():
    """A room of its own for each prompt, every token that ends an answer, and of each prompt the tokens given."""
    asked = []

    def generate(prompts, params, use_tqdm):
        asked.append((prompts, params))
        read = lambda ids: [None, *({token: stub_vllm.logprob(-token)} for token in ids[1:])]  # noqa: E731
        one = SimpleNamespace(token_ids=(4, 9), logprobs=[{4: stub_vllm.logprob(0)}, {9: stub_vllm.logprob(0)}])
        return [SimpleNamespace(outputs=[one], prompt_logprobs=read(p["prompt_token_ids"])) for p in prompts]

    engine = Engine.__new__(Engine)
    engine._vllm, engine._llm = stub_vllm, SimpleNamespace(generate=generate)
    assert engine.write([[1, 2], [3]], [5, 7], ends=(8, 9)) == [[4, 9], [4, 9]]
    prompts, params = asked.pop()
    assert prompts == [{"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [3]}]
    assert [(each.max_tokens, each.stop_token_ids, each.temperature) for each in params] == [
        (5, [8, 9], 0),
        (7, [8, 9], 0),
    ]
    assert engine.log_probabilities([[1, 2, 3], [5, 6]]) == [[-2, -3], [-6]]


def test_what_must_be_minded_is_said(tmp_path):
    factors = tuple([1.0] * 4 + [4.0] * 12)
    convert("demo", tmp_path / "out", Recipe([LongRope(factor=4, short_factor=(1.0,) * 16, long_factor=factors)]))
    report = evaluate([str(tmp_path / "out")], Settings(**SMALL), loading=ENGINE)
    assert "long list is used at any length" in report["models"][0]["mind"]


def test_a_remark_on_a_checkpoint_that_is_served_exactly_need_not_be_minded():
    demo = open_checkpoint("demo")
    linear = (
        Recipe([PositionInterpolation(factor=2)]).resolve(model_config(demo.config)).edit(model_config(demo.config))
    )
    info = CheckpointInfo("out", Checkpoint("out", demo.folder, linear.config), 512, 1024)
    assert serving_by_vllm(info.checkpoint).remark
    model = load_served(info, ENGINE, (256,))
    assert model.remark == ""
    assert "mind" not in model.facts()
    model.close()


def test_numbers_that_are_not_finite_are_refused(monkeypatch):
    monkeypatch.setattr(stub_vllm, "logprob", lambda number: stub_vllm.types.SimpleNamespace(logprob=float("nan")))
    with pytest.raises(CtxextError, match="not finite"):
        evaluate(["demo"], Settings(**SMALL), loading=ENGINE)


def test_errors_of_the_engine_are_one_line(tmp_path, vllm):
    def broken(**options):
        raise RuntimeError(
            "1 validation error for ModelConfig\n  Value error, no such backend\n    For further information see"
        )

    vllm.LLM = broken
    with pytest.raises(CtxextError, match=r'vLLM .* cannot load "out": Value error, no such backend$'):
        Engine(tmp_path / "out", length=8, dtype="float32")


def test_command_line(run, tmp_path):
    words = ["--engine-args", '{"tensor_parallel_size": 1}', "--lengths", "256", "--depths", "1", "--samples", "1"]
    result = run("eval", "demo", "--engine", "vllm", *words, "--out", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["settings"]["tasks"] == ["needle"]
    assert stub_vllm.made[0].options["tensor_parallel_size"] == 1
    assert "is not a JSON object" in error_of(run("eval", "demo", "--engine", "vllm", "--engine-args", "[1]"))
    assert 'Unknown engine "sglang"' in error_of(run("eval", "demo", "--engine", "sglang"))
    assert "Add --engine vllm" in error_of(run("eval", "demo", "--engine-args", '{"seed": 1}'))


def test_without_it_one_line_and_a_hint(monkeypatch, run):
    monkeypatch.delitem(sys.modules, "vllm")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = run("eval", "demo", "--engine", "vllm")
    assert "vLLM is not installed." in error_of(result)
    assert "ctxext[vllm]" in error_of(result)


def test_auto_is_what_transformers_would_compute_in():
    assert engine_dtype({"dtype": "float32"}, "auto") == "float32"
    assert engine_dtype({}, "auto") == "float32"
    assert engine_dtype({"torch_dtype": "torch.float16"}, "fp16") == "float16"
    assert engine_dtype({"text_config": {"dtype": "float16"}}, "auto") in ("float16", "float32")
