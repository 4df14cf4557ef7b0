"""`ctxext eval --server --prompt chat` on servers that are not installed here, as their sources describe them."""

import shutil

import pytest
from transformers import AutoTokenizer

from chat_servers import SERVERS, TEMPLATE, StandIn
from ctxext.api import Settings, evaluate
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.errors import CtxextError
from ctxext.models.loading import Loading
from ctxext.server.client import Server, ServerOptions
from openai_server import running


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The demo with a chat template, and its tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "chatty"
    shutil.copytree(open_checkpoint("demo").folder, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return str(folder), AutoTokenizer.from_pretrained(folder)


def ask(model, served, **settings):
    """Evaluate on a stand-in, and return the model's part of the report."""
    asked = {"tasks": ("needle",), "lengths": (900,), "samples": 1, "depths": (0.0,), "prompt": "chat", "reason": 300}
    settings = Settings(**{**asked, **settings}, allow_beyond=True)
    with running(served) as url:
        (entry,) = evaluate([model], settings, loading=Loading(server=ServerOptions(server=url)))["models"]
    return entry


def list_sent(served, path="/v1/chat/completions"):
    """Return the requests after the first one, which chooses the form."""
    return [content for sent, _, content in served.requests if sent == path][1:]


@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.parametrize("name", SERVERS)
def test_answers_in_chat(model, name, knows):
    """Thoughts are not scored."""
    folder, tokenizer = model
    served = StandIn(SERVERS[name], tokenizer, chat_only=True, knows=knows)
    entry = ask(folder, served)
    assert [cell["correct"] for cell in entry["cells"]] == [knows]
    assert entry["engine"] == f"{name} {SERVERS[name].version}".strip()
    assert entry["prompts"] == "messages"
    assert served.is_thinking[-1]
    (sent,) = list_sent(served)
    assert (sent["temperature"], sent["seed"], sent["max_tokens"], sent["stream"]) == (0, 0, 300, False)


@pytest.mark.parametrize("name", SERVERS)
def test_thoughts_are_switched_off(model, name):
    folder, tokenizer = model
    served = StandIn(SERVERS[name], tokenizer, chat_only=True)
    entry = ask(folder, served, reason=None, no_think=True)
    assert [cell["correct"] for cell in entry["cells"]] == [1]
    assert served.is_thinking[-1] == (SERVERS[name].switch == "")


@pytest.mark.parametrize("name", SERVERS)
def test_completions_get_the_template_once(model, name):
    """Ollama puts the prompts of completions into the template too, so it gets messages."""
    folder, tokenizer = model
    served = StandIn(SERVERS[name], tokenizer)
    entry = ask(folder, served)
    kinds = {"template": "messages", "text": "text", "ids": "token ids"}
    assert entry["prompts"] == kinds[SERVERS[name].completions]
    assert [cell["correct"] for cell in entry["cells"]] == [1]
    if SERVERS[name].completions == "template":
        assert all("<user>" not in sent["messages"][0]["content"] for sent in list_sent(served))
        with pytest.raises(CtxextError, match=r"Ollama 0\.33\.0 puts every prompt into a chat template, but"):
            ask(folder, StandIn(SERVERS[name], tokenizer), prompt="base", reason=None)


@pytest.mark.parametrize("name", SERVERS)
def test_a_refused_prompt_is_one_line(model, name):
    folder, tokenizer = model
    with pytest.raises(CtxextError) as raised:
        ask(folder, StandIn(SERVERS[name], tokenizer, chat_only=True, length=700))
    assert "\n" not in raised.value.message
    assert "700" in raised.value.message
    assert raised.value.hint == "Raise its context length, or use shorter --lengths."


@pytest.mark.parametrize("name", [name for name, server in SERVERS.items() if server.cuts])
def test_a_cut_prompt_is_found(model, name):
    folder, tokenizer = model
    with pytest.raises(CtxextError, match=r"The server read only \d+ of \d+ tokens of a prompt"):
        ask(
            folder,
            StandIn(SERVERS[name], tokenizer, chat_only=True, length=700, cuts=True),
            reason=250,
            lengths=(1200,),
        )


@pytest.mark.parametrize("name", SERVERS)
def test_its_name(model, name):
    with running(StandIn(SERVERS[name], model[1])) as url:
        server = Server(url)
    assert (server.name, server.version) == (SERVERS[name].name, SERVERS[name].version)
