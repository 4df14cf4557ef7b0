"""`ctxext eval --server --prompt chat`: messages instead of tokens, thoughts, cut answers, and what a server lacks."""

import json
import re
import shutil

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from ctxext.api import Settings, evaluate
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.errors import CtxextError
from ctxext.models.loading import Loading
from ctxext.publish.results import build_results
from ctxext.report.findings import findings
from ctxext.report.page import render_page
from ctxext.server.client import ServerOptions
from openai_server import Served, running

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}{% if add_generation_prompt %}"
PLAIN, THINKS = CHAT + "<assistant>{% endif %}", CHAT + "<assistant><think>\n{% endif %}"
ASKED = {"tasks": ("needle",), "lengths": (900,), "samples": 2, "depths": (0.0, 1.0), "prompt": "chat"}


@pytest.fixture
def chat_model(tmp_path):
    """Return a function that saves the demo with a chat template, and what serves it."""

    def save(template):
        folder = tmp_path / "chatty"
        shutil.copytree(open_checkpoint("demo").folder, folder)
        (folder / "chat_template.jinja").write_text(template)
        return str(folder), (AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))

    return save


def find_number(content):
    """Return the number that the user's message asks for."""
    text = content["messages"][-1]["content"]
    if text == "One":  # The first request, which chooses the form.
        return "1"
    key = re.search(r"What is the special magic number for (.+?)\?", text)[1]
    return re.search(rf"number for {key} is: (\d+)", text)[1]


def knows(content):
    return {"content": f"The special magic number is {find_number(content)}."}, "stop"


def thinks_apart(content):
    return {"content": "I do not know.", "reasoning_content": find_number(content)}, "stop"


def thinks_aloud(content):
    return {"content": f"12345 or {find_number(content)}?</think>\n\nIt is {find_number(content)}."}, "stop"


def thinks_nothing(content):
    return {"content": f"<think>\n\n</think>\n\nIt is {find_number(content)}."}, "stop"


def is_cut(content):
    return {"content": f"Is it {find_number(content)}? Or"}, "length"


def share(report):
    (model,) = report["models"]
    return sum(cell["correct"] for cell in model["cells"]) / sum(cell["samples"] for cell in model["cells"])


def ask(model, url, out=None, **settings):
    loading = Loading(server=ServerOptions(server=url))
    return evaluate([model], Settings(**{**ASKED, "allow_beyond": True, **settings}), loading=loading, out=out)


@pytest.mark.parametrize("options", [{"chat_only": True}, {"chat_only": True, "counts": False}])
@pytest.mark.parametrize(
    ("template", "reply", "expected", "cut"),
    [(PLAIN, knows, 1, 0), (PLAIN, thinks_apart, 0, 0), (THINKS, thinks_aloud, 1, 0), (THINKS, is_cut, 0, 4)],
)
def test_a_server_with_chat_only(chat_model, options, template, reply, expected, cut, tmp_path):
    model, loaded = chat_model(template)
    served = Served(*loaded, **options, reply=reply)
    settings = {"lengths": (5000,)} if template == THINKS else {}
    with running(served) as url:
        report = ask(model, url, tmp_path / "out", **settings)
    assert share(report) == expected
    (entry,) = report["models"]
    assert entry["prompts"] == "messages"
    assert entry["forms"] == {"needle": {"form": "chat", "room": 4096 if template == THINKS else 256, "thinks": None}}
    assert sum(cell.get("cut", 0) for cell in entry["cells"]) == cut
    sent = [content for path, _, content in served.requests if path == "/v1/chat/completions"][1:]
    assert len(sent) == 4
    for content in sent:
        assert (content["temperature"], content["seed"], content["stream"]) == (0, 0, False)
        assert content["max_tokens"] == entry["forms"]["needle"]["room"]
        ids = loaded[1].apply_chat_template(content["messages"], add_generation_prompt=True)["input_ids"]
        assert abs(len(ids) + content["max_tokens"] - report["settings"]["lengths"][0]) <= 2
    ended = "4 of 4 answers to needle ended at the limit of 4,096 tokens"
    sentence = f"{entry['name']}: {ended}, without the full score."
    assert (sentence in findings(report)) == bool(cut)
    page = render_page(report)
    assert "Each prompt is a chat message; the model answers freely" in page
    assert "chat message" in build_results(report, entry, []).body
    assert "--prompt chat" in build_results(report, entry, []).command


def test_thoughts_are_switched_by_variables_of_the_template(chat_model):
    model, loaded = chat_model(CHAT + "<assistant>{% if enable_thinking|default(true) %}<think>{% endif %}{% endif %}")
    for options, variables in (
        ({"no_think": True}, {"enable_thinking": False, "thinking": False}),
        ({"reason": 300}, {"enable_thinking": True, "thinking": True}),
    ):
        served = Served(*loaded, chat_only=True, reply=knows)
        with running(served) as url:
            ask(model, url, samples=1, **options)
        assert served.requests[-1][2]["chat_template_kwargs"] == variables


@pytest.mark.parametrize(("reply", "count"), [(thinks_aloud, 4), (thinks_apart, 4), (knows, 0), (thinks_nothing, 0)])
def test_thoughts_that_cannot_be_switched_off_are_counted(chat_model, reply, count, tmp_path):
    """TGI has no switch, for example."""
    model, loaded = chat_model(PLAIN)
    with running(Served(*loaded, chat_only=True, reply=reply)) as url:
        reports = [
            ask(model, url, tmp_path / str(no_think), no_think=no_think, lengths=(900,)) for no_think in (True, False)
        ]
    (entry,) = reports[0]["models"]
    sentence = f"{entry['name']}: 4 of 4 answers to needle have thoughts, although they are switched off."
    assert sum(cell.get("thought", 0) for cell in entry["cells"]) == count
    assert [sentence in findings(report) for report in reports] == [bool(count), False]
    assert (sentence in render_page(reports[0])) == bool(count)


def test_a_server_that_refuses_variables(chat_model):
    model, loaded = chat_model(PLAIN)
    served = Served(*loaded, chat_only=True, reply=knows)
    complete = served.complete

    def refuse(content):
        if "chat_template_kwargs" in content:
            return 400, {"error": {"message": "Unrecognized request argument supplied: chat_template_kwargs"}}
        return complete(content)

    served.complete = refuse
    with running(served) as url:
        assert share(ask(model, url, no_think=True)) == 1


def test_a_server_with_both_continues_tokens(chat_model):
    """The prompt is that of our own template, to the token."""
    model, loaded = chat_model(PLAIN)
    served = Served(*loaded)
    with running(served) as url:
        report = ask(model, url, samples=1)
    assert report["models"][0]["prompts"] == "token ids"
    sent = [content for path, _, content in served.requests if path == "/v1/completions"][1:]
    assert len(sent) == 2
    assert all("messages" not in content and len(content["prompt"]) == 900 - 256 for content in sent)


@pytest.mark.thorough
def test_a_cut_prompt_is_found(chat_model):
    model, loaded = chat_model(PLAIN)
    served = Served(*loaded, chat_only=True, length=800, cuts=True)
    with (
        running(served) as url,
        pytest.raises(CtxextError, match=r"The server read only \d+ of \d+ tokens of a prompt"),
    ):
        ask(model, url, samples=1, depths=(0.0,))


def test_a_server_that_only_streams_is_one_line(chat_model):
    model, loaded = chat_model(PLAIN)
    body = b'data: {"choices": [{"delta": {"content": "One"}}]}\n\ndata: [DONE]\n\n'
    served = Served(*loaded, override=lambda path: (200, {}, body) if path.endswith("completions") else None)
    with running(served) as url, pytest.raises(CtxextError, match="a stream, which ctxext does not read"):
        ask(model, url)


def test_the_two_forms_are_never_one_result(chat_model, tmp_path):
    model, loaded = chat_model(PLAIN)
    with running(Served(*loaded, chat_only=True, reply=knows)) as url:
        ask(model, url, tmp_path / "out")
        loading = Loading(server=ServerOptions(server=url))
        settings = Settings(**{**ASKED, "prompt": "base"}, allow_beyond=True)
        with pytest.raises(CtxextError, match="cannot be resumed"):
            evaluate([model], settings, loading=loading, out=tmp_path / "out", resume=True)


def test_the_command(run, chat_model, tmp_path):
    model, loaded = chat_model(THINKS)
    words = ("--lengths", "900", "--samples", "1", "--depths", "0,", "--out", tmp_path / "out", "--allow-beyond")
    with running(Served(*loaded, chat_only=True, reply=is_cut)) as url:
        result = run("eval", model, "--server", url, *words, "--reason", "300")
        assert "needs more tokens for answers: --reason 4096." in " ".join(result.stderr.split())
        assert "within" not in result.stderr, "thoughts are not scored"
        report = json.loads((tmp_path / "out" / "report.json").read_text())
        assert report["settings"]["reason"] == 300
        result = run("eval", model, "--server", url, *words, "--overwrite", "--reason")
        assert result.exception.message.startswith('The task "needle" needs at least 4'), "4,096 by default"
