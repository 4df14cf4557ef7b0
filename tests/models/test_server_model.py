"""`ctxext eval --server`: the retrieval tasks through a server on loopback, as in transformers."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ctxext.api import Settings, evaluate
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.errors import CtxextError
from ctxext.models.loading import Loading
from ctxext.publish.results import build_results
from ctxext.server.client import ServerOptions
from openai_server import Served, running

KEY = "sk-0123456789abcdef"
SMALL = {"depths": (0.0, 1.0), "kv_ids": "number", "allow_beyond": True}
ASKED = Settings(tasks=("needle", "kv"), lengths=(256,), samples=3, **SMALL)
MORE = Settings(tasks=("needle", "kv"), lengths=(256, 640), samples=2, **SMALL)


@pytest.fixture(scope="module")
def demo():
    folder = open_checkpoint("demo").folder
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def scored():
    return evaluate(["demo"], MORE, loading=Loading(dtype="fp32"))


def cells(report):
    return {(cell["task"], cell["length"], cell["depth"]): cell["correct"] for cell in report["models"][0]["cells"]}


def served_by(url, **options):
    return Loading(server=ServerOptions(server=url, api_key=KEY, **options))


@pytest.mark.parametrize("options", [{}, {"takes_ids": False}, {"counts": False}])
def test_the_same_score_as_in_transformers(demo, scored, options, tmp_path):
    served = Served(*demo, **options)
    with running(served) as url:
        report = evaluate(["demo"], MORE, loading=served_by(url, num_concurrent=3), out=tmp_path / "out")
    assert cells(report) == cells(scored)
    assert 0 < sum(cells(report).values()) < 16, "all or nothing is no comparison"
    (model,) = report["models"]
    assert (model["engine"], model["served_model"]) == ("vLLM 0.0", "served")
    assert model["prompts"] == ("token ids" if served.takes_ids else "text")
    assert "dtype" not in model
    assert report["versions"]["server"] == "vLLM 0.0"
    written = (tmp_path / "out" / "cells.jsonl").read_text() + json.dumps(report)
    assert KEY not in written
    page = (tmp_path / "out" / "report.html").read_text()
    assert "served by vLLM 0.0" in page
    assert "vLLM 0.0, served" in page
    card = build_results(report, model, [])
    assert "computed by vLLM 0.0, which served served" in card.body
    assert "--server URL" in card.command
    assert "None" not in card.body


@pytest.mark.thorough
def test_requests_run_at_once(demo):
    served = Served(*demo)
    with running(served) as url:
        evaluate(["demo"], ASKED, loading=served_by(url, num_concurrent=2))
    sent = [content for path, _, content in served.requests if path == "/v1/completions"]
    assert len(sent) == 13, "one request chooses the form"
    assert all(content["temperature"] == 0 for content in sent)
    assert all(len(content["prompt"]) + content["max_tokens"] == 256 for content in sent[1:])
    assert served.most_at_once == 2


@pytest.mark.thorough
def test_resumed(demo, tmp_path, monkeypatch):
    served, seen = Served(*demo), []

    def override(path):
        seen.append(path)
        return (500, {}, b"{}") if path == "/v1/completions" and seen.count(path) == 6 else None

    served.override = override
    with running(served) as url:
        out = tmp_path / "out"
        with pytest.raises(CtxextError, match="returned 500"):
            evaluate(["demo"], ASKED, loading=served_by(url), out=out)
        before = len(served.requests)
        report = evaluate(["demo"], ASKED, loading=served_by(url, timeout=99), out=out, resume=True)
    assert len([path for path, *_ in served.requests[before:] if path == "/v1/completions"]) == 1 + 12 - 4
    assert sum(cell["samples"] for cell in report["models"][0]["cells"]) == 12
    served.override = lambda path: (200, {}, b'{"version": "0.1"}') if path == "/version" else None
    with running(served) as url, pytest.raises(CtxextError, match=r"server vLLM 0\.0, now vLLM 0\.1"):
        evaluate(["demo"], ASKED, loading=served_by(url), out=out, resume=True)


@pytest.mark.thorough
def test_a_busy_server(demo, scored):
    served, busy = Served(*demo), [429, 503]
    served.override = lambda path: (
        (busy.pop(), {"Retry-After": "0.1"}, b"{}") if busy and path == "/v1/completions" else None
    )
    with running(served) as url:
        assert cells(evaluate(["demo"], MORE, loading=served_by(url))) == cells(scored)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chat_only": True}, "vLLM 0.0 has chat completions only, but these prompts begin the answer"),
        ({"length": 200, "cuts": True}, "The server read only 1"),
        ({"length": 200}, "maximum context length is 200"),
        ({"listed_length": 200}, "The server supports 200 tokens, but a prompt length is 256."),
    ],
)
def test_what_a_server_cannot_do(demo, options, message):
    tokenizer = demo[1]
    with running(Served(*demo, **options)) as url, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "chat_template", "{{ messages[0]['content'] }}")
        with pytest.raises(CtxextError, match=message):
            evaluate(["demo"], ASKED, loading=served_by(url))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--task", "short"), "A server only generates answers: it cannot measure short."),
        (("--harness", "longbench"), "--harness cannot be combined with --server."),
        (("--engine", "vllm"), "--engine cannot be combined with --server."),
        (("--dtype", "fp32"), "--dtype cannot be combined with --server."),
        (("demo",), "A server serves one model, not 2."),
    ],
)
def test_combinations_without_a_meaning(run, words, message):
    with running(Served(None, None)) as url:
        assert run("eval", "demo", "--server", url, *words).exception.message == message


def test_the_command(run, demo, tmp_path):
    with running(Served(*demo)) as url:
        words = ("--lengths", "256", "--samples", "1", "--depths", "0,", "--out", tmp_path / "out")
        result = run("eval", "demo", "--server", url, "--api-key", KEY, *words)
    assert result.exit_code == 0
    assert "Computed by vLLM 0.0." in result.stderr
    assert run("eval", "demo", "--num-concurrent", "2").exception.message == "--num-concurrent requires a server."


@pytest.mark.parametrize(
    ("choice", "usage"),
    [({"finish_reason": "length"}, {"completion_tokens": 0}), ({"finish_reason": "stop"}, {"completion_tokens": 0})],
)
@pytest.mark.thorough
def test_nothing_at_all_is_no_wrong_answer(demo, choice, usage):
    body = json.dumps({"choices": [{"text": "", **choice}], "usage": usage}).encode()
    served = Served(*demo, override=lambda path: (200, {}, body) if path == "/v1/completions" else None)
    with running(served) as url, pytest.raises(CtxextError, match="The server generated no token after a prompt of 2"):
        evaluate(["demo"], ASKED, loading=served_by(url))
