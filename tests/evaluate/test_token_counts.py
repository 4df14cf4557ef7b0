"""`ctxext eval --server` without a checkpoint: the lengths of prompts come from the server's counts."""

import json
import re

import pytest
from transformers import AutoTokenizer

from ctxext.api import Settings, evaluate
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.errors import CtxextError
from ctxext.models.loading import Loading
from ctxext.report.findings import findings
from ctxext.report.page import render_page
from ctxext.server.client import ServerOptions
from openai_server import Served, running

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}<assistant>"
ASKED = {"tasks": ("needle",), "lengths": (1500, 6000), "samples": 2, "depths": (0.0, 1.0)}


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(open_checkpoint("demo").folder)
    tokenizer.chat_template = CHAT
    return tokenizer


def find_number(content):
    """Return the answer to a question about a needle."""
    text = content["messages"][-1]["content"]
    asked = re.search(r"What is the special magic number for (.+?)\?", text)
    found = asked and re.search(rf"number for {asked[1]} is: (\d+)", text)
    return {"content": found[1] if found else "1"}, "stop"


def ask(url, out=None, **settings):
    return evaluate([], Settings(**{**ASKED, **settings}), loading=Loading(server=ServerOptions(server=url)), out=out)


@pytest.mark.parametrize("task", ["needle", "kv", "niah-single-2", "documents", "graphwalks", "mrcr-2"])
@pytest.mark.parametrize("more", [{}, {"chat_only": True}])
def test_prompts_have_the_requested_number_of_the_servers_tokens(tokenizer, task, more):
    served = Served(None, tokenizer, reply=find_number, **more)
    with running(served) as url:
        report = ask(url, tasks=(task,), lengths=(6000,))
    (model,) = report["models"]
    room = model["forms"][task]["room"]
    counts = [count + room for cell in model["cells"] for count in cell["read"]]
    assert all(0.9 * 6000 <= count <= 1.06 * 6000 for count in counts), counts
    assert all(path == "/v1/chat/completions" for path, *_ in served.requests if path.endswith("completions"))
    if task == "needle":
        assert all(cell["share"] == 1 for cell in model["cells"])


def test_the_report_has_the_counts(tokenizer, tmp_path):
    with running(Served(None, tokenizer, reply=find_number)) as url:
        report = ask(url, tmp_path)
        resumed = evaluate(
            [], Settings(**ASKED), loading=Loading(server=ServerOptions(server=url)), out=tmp_path, resume=True
        )
    assert resumed["models"] == report["models"]
    (model,) = report["models"]
    assert (model["name"], model["summary"], model["served_model"]) == ("served", "as served", "served")
    counts = [count for cell in model["cells"] if cell["length"] == 6000 for count in cell["read"]]
    low, high = min(counts) + 256, max(counts) + 256
    sentence = next(text for text in findings(report) if text.startswith("The tokenizer is unknown"))
    assert f"6,000: {low:,} to {high:,}." in sentence
    assert "The tokenizer is unknown" in render_page(report)


def test_a_cut_prompt_is_found(tokenizer):
    with (
        running(Served(None, tokenizer, reply=find_number, length=4000, cuts=True)) as url,
        pytest.raises(CtxextError, match=r"The server read only 3,\d+ of about 5,\d+ tokens of a prompt"),
    ):
        ask(url)


@pytest.mark.parametrize(
    ("server", "settings", "message"),
    [
        ({"counts": False}, {}, r"does not report how many tokens a prompt has\."),
        ({"override": lambda path: (404, {}, b"{}") if "chat" in path else None}, {}, "has no chat completions"),
        ({}, {"prompt": "base"}, "--prompt base needs the tokenizer of the served model"),
        ({}, {"lengths": ()}, 'The context length of "served" is unknown'),
        ({"listed_length": 2000}, {}, '"served" supports 2000 tokens, but a prompt length is 6000'),
    ],
)
def test_what_needs_the_checkpoint(tokenizer, server, settings, message):
    with running(Served(None, tokenizer, reply=find_number, **server)) as url, pytest.raises(CtxextError) as raised:
        ask(url, **settings)
    assert re.search(message, raised.value.message)


def test_a_server_that_does_not_count_its_cache(tokenizer):
    served = Served(None, tokenizer, reply=find_number)
    complete = served.complete

    def count_little(content):
        status, answer = complete(content)
        return status, {**answer, "usage": {"prompt_tokens": 9}}

    served.complete = count_little
    with running(served) as url, pytest.raises(CtxextError, match="counts only 9 tokens of a prompt of about 2,048"):
        ask(url)


def test_the_command(run, tokenizer, tmp_path):
    words = ("--lengths", "1500", "--samples", "1", "--depths", "0,", "--out", tmp_path / "out")
    with running(Served(None, tokenizer, reply=find_number)) as url:
        result = run("eval", "--server", url, *words)
    assert result.exit_code == 0, result.stderr
    assert "The tokenizer is unknown" in " ".join(result.stdout.split())
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["models"][0]["forms"]["needle"]["estimate"]["size"] > 1


def test_a_missing_model(run):
    assert run("eval").exception.message == "Missing argument MODEL."
    with running(Served(None, None)) as url:
        hint = run("eval", "nowhere", "--server", url).exception.hint
    assert hint.endswith("Without the checkpoint, omit MODEL: lengths then follow the server's counts.")
