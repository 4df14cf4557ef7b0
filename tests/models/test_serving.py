"""Evaluation through an inference engine, over a stand-in; tests/engines asks the real one."""

import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
import time
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import stub_vllm
from ctxext.api import Recipe, Settings, evaluate
from ctxext.checkpoint.opening import Checkpoint, open_checkpoint
from ctxext.converters.convert import convert
from ctxext.engines import vllm as engine
from ctxext.engines.vllm import Vllm, engine_dtype
from ctxext.errors import CtxextError
from ctxext.methods import DynamicNtk, LongRope, MsPoE, PositionInterpolation, Yarn
from ctxext.models import serving
from ctxext.models.checkpoint_info import CheckpointInfo
from ctxext.models.model import Loading
from ctxext.models.serving import check_served, load_served, serving_by_vllm
from ctxext.publish.results import build_results
from ctxext.recipes.model_config import model_config

ENGINE = Loading(dtype="fp32", engine="vllm")
SMALL = {"tasks": ("needle",), "lengths": (256,), "depths": (0.0, 1.0), "samples": 2}


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    """The stand-in in the place of vLLM, under the version of a package that is installed."""
    stub_vllm.install(monkeypatch)
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: {"vllm": ["pytest"]})


def error_of(result):
    """What a command that was refused says, with its hint."""
    assert isinstance(result.exception, CtxextError)
    return f"{result.exception.message} {result.exception.hint}"


def cells(report):
    return [
        {(cell["task"], cell["length"], cell["depth"]): cell["correct"] for cell in model["cells"]}
        for model in report["models"]
    ]


@pytest.mark.thorough
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
    assert llm.options["skip_tokenizer_init"]
    assert llm.options["generation_config"] == "vllm"
    assert (llm.options["host"], llm.mode) == ("127.0.0.1", "offline")
    assert all(call["stop_token_ids"] == [1] for call in llm.calls)
    assert llm.ended


@pytest.mark.thorough
def test_the_implementation_that_a_family_needs_is_started(monkeypatch):
    """As `inspect` says: vLLM's own model of some families reads a schedule wrongly."""
    row = serving.serving_by_vllm(open_checkpoint("demo"))
    for arguments, wanted in (("--model-impl transformers", "transformers"), ("", None)):
        monkeypatch.setattr(serving, "serving_by_vllm", lambda _, text=arguments: replace(row, arguments=text))
        evaluate(["demo"], Settings(**SMALL), loading=ENGINE)
        assert stub_vllm.made[-1].options.get("model_impl") == wanted
        assert stub_vllm.made[-1].options["limit_mm_per_prompt"] == {"image": 0, "video": 0, "audio": 0}


@pytest.mark.thorough
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
@pytest.mark.thorough
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


def test_the_engine_receives_these_arguments():
    """A room of its own for each prompt, every token that ends an answer, and of each prompt the tokens given."""
    folder = open_checkpoint("demo").folder
    with closing(Vllm(folder, length=8, dtype="float32", ends=(8, 9))) as served:
        answer = served.server.complete([5, 6, 7], "", max_tokens=5)
        scores = served.score([5, 6, 7])
    assert all(isinstance(token.key, int) for token in answer.tokens)
    first, second = stub_vllm.made[0].calls
    assert (first["prompt"], first["max_tokens"], first["stop_token_ids"]) == ([5, 6, 7], 5, [8, 9])
    assert second["prompt_logprobs"] == 0
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        wanted = model(torch.tensor([[5, 6, 7]])).logits[0].log_softmax(-1)
    assert scores == pytest.approx([float(wanted[0, 6]), float(wanted[1, 7])], abs=1e-5)


@pytest.mark.thorough
def test_the_report_has_the_warnings_of_the_engine(tmp_path):
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


@pytest.mark.parametrize(("number", "message"), [(None, "not finite"), (float("nan"), "NaN")])
@pytest.mark.thorough
def test_numbers_that_are_not_finite_are_refused(monkeypatch, number, message):
    monkeypatch.setattr(stub_vllm, "logprob", lambda _: number)
    with pytest.raises(CtxextError, match=message):
        evaluate(["demo"], Settings(**SMALL), loading=ENGINE)
    assert stub_vllm.made[-1].ended


LOG = """INFO:     Waiting for application startup.
(EngineCore pid=7) ERROR 11-27 12:49:12 [core.py:1] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-27 12:49:12 [core.py:1] ValueError: no such backend
(APIServer pid=5) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (LOG, "no such backend"),
        (
            "1 validation error\n  Value error, no such backend\n    For further information",
            "Value error, no such backend",
        ),
        ("vllm: error: unrecognized arguments: --x", "vllm: error: unrecognized arguments: --x"),
        (
            "pydantic_core._pydantic_core.ValidationError: 1 validation error\n  Value error, b",
            "Value error, b",
        ),
        ("", "it ended without a message"),
    ],
)
def test_errors_of_the_engine_are_one_line(tmp_path, monkeypatch, log, cause):
    def fail(stream):
        stream.write(log.encode())
        return 1

    monkeypatch.setattr(stub_vllm, "fail", fail)
    with pytest.raises(CtxextError, match=rf'vLLM .* cannot load "out": {re.escape(cause)}$'):
        Vllm(tmp_path / "out", length=8, dtype="float32")


PROCESS = """
import os, signal, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        right = self.headers["Authorization"] == "Bearer " + os.environ["VLLM_API_KEY"]
        body = b'{"data": [{"id": "served"}]}' if right else b"{}"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

if "--seed=1" in sys.argv:
    sys.exit("ValueError: no seed")
print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
port = next(word.removeprefix("--port=") for word in sys.argv if word.startswith("--port="))
HTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()
"""


def is_running(worker):
    """Return whether a process runs; one that nobody waits for has no command line."""
    place = Path(f"/proc/{worker}/cmdline")
    return place.exists() and bool(place.read_bytes())


@pytest.mark.thorough
def test_the_process_and_its_workers_end(tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(engine, "vllm_version", lambda: "1")
    (tmp_path / "server.py").write_text(PROCESS)
    monkeypatch.setattr(engine, "_COMMAND", (sys.executable, str(tmp_path / "server.py")))
    served = Vllm(tmp_path, length=8, dtype="float32")
    assert served.server.model == "served"
    worker = int(served._read_log().split()[0])
    assert is_running(worker)
    served.close()
    served.close()
    assert served._process.returncode is not None
    end = time.monotonic() + 10
    while is_running(worker) and time.monotonic() < end:
        time.sleep(0.01)
    assert not is_running(worker)
    with pytest.raises(CtxextError, match=r'vLLM 1 cannot load ".*": no seed$'):
        Vllm(tmp_path, length=8, dtype="float32", arguments={"seed": 1})


@pytest.mark.parametrize("stop", [KeyboardInterrupt, MemoryError])
def test_a_stop_while_it_starts_ends_the_process(tmp_path, monkeypatch, stop):
    monkeypatch.undo()
    monkeypatch.setattr(engine, "vllm_version", lambda: "1")
    (tmp_path / "server.py").write_text("import time; time.sleep(600)")
    monkeypatch.setattr(engine, "_COMMAND", (sys.executable, str(tmp_path / "server.py")))
    started, popen = [], subprocess.Popen

    def connect(*_args, **_options):
        raise stop

    monkeypatch.setattr(subprocess, "Popen", lambda *given, **more: started.append(popen(*given, **more)) or started[0])
    monkeypatch.setattr(engine.Server, "of_started", connect)
    with pytest.raises(stop):
        Vllm(tmp_path, length=8, dtype="float32")
    assert started[0].returncode is not None


def test_arguments_are_options_of_the_command_line():
    options = {
        "dtype": "half",
        "enforce_eager": True,
        "async_scheduling": False,
        "hf_overrides": {"a": 1},
        "seed": None,
    }
    assert [*engine._make_flags({**options, "seed": None, "cuda_graph_sizes": [1, 2]})] == [
        "--dtype=half",
        "--enforce-eager",
        "--no-async-scheduling",
        '--hf-overrides={"a": 1}',
        *("--cuda-graph-sizes", "1", "2"),
    ]
    with pytest.raises(CtxextError, match="contains the option"):
        list(engine._make_flags({"cuda_graph_sizes": ["1", "--tokenizer=x"]}))


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
