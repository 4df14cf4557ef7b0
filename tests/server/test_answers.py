"""Forms of requests and answers in which servers differ: refused arguments, refused lengths, and counts of tokens."""

import json

import pytest

from ctxext.errors import CtxextError
from ctxext.server.answers import count_read, read_completion
from ctxext.server.client import MOST_BYTES, Server, ServerError, ServerOptions, find_limit
from openai_server import Served, running

IDS, TEXT = list(range(100, 700)), "word " * 500


def answer(**more):
    return {"choices": [{"text": " yes", "finish_reason": "length"}], "usage": {"prompt_tokens": 600}, **more}


def serving(reply):
    """Return a server whose completions are `reply(content)`: a status and the JSON."""
    served = Served(None, None)
    served.complete = reply
    return served


def contents(served):
    return [content for path, _, content in served.requests if path.endswith("completions")]


def refusing(name, message, status=400):
    """Return a server that refuses an argument in its words."""

    def reply(content):
        return (status, message) if name in content else (200, answer())

    return serving(reply)


@pytest.mark.parametrize("status", [400, 422])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("return_tokens_as_token_ids", "Unrecognized request argument supplied: return_tokens_as_token_ids"),
        ("seed", "litellm.UnsupportedParamsError: together_ai does not support parameters: ['seed']"),
        ("logprobs", "logprobs must be <= 1, the maximum of this model"),
        ("temperature", "Unsupported value: 'temperature' does not support 0 with this model. Only the default (1)."),
        ("stream", "Additional property stream is not allowed"),
        ("max_tokens", "Unsupported parameter: 'max_tokens' is not supported. Use 'max_completion_tokens' instead."),
    ],
)
def test_a_refused_argument_is_left_out_for_good(name, words, status):
    served = refusing(name, {"error": {"message": words, "type": "invalid_request_error"}}, status)
    with running(served) as url:
        server = Server(url)
        for _ in range(2):
            assert server.complete(IDS, TEXT, max_tokens=16).text == " yes"
    *_, last, second = contents(served)
    assert last == second, "learned"
    every = {"prompt", "temperature", "seed", "stream", "max_tokens", "logprobs", "return_tokens_as_token_ids", "model"}
    assert every - last.keys() <= {name, "return_tokens_as_token_ids"}, "nothing else is left out"
    assert last["prompt"] == IDS
    assert server.is_greedy is (name != "temperature")


def test_an_argument_that_only_a_list_names():
    detail = [{"type": "extra_forbidden", "loc": ["body", "seed"], "msg": "Extra inputs are not permitted", "input": 0}]
    served = refusing("seed", {"detail": detail}, 422)
    with running(served) as url:
        Server(url).complete(IDS, TEXT, max_tokens=16)
    assert len(contents(served)) == 2


@pytest.mark.parametrize("name", ["seed", "stream", "temperature", "return_tokens_as_token_ids", "logprobs"])
def test_a_refused_argument_without_a_name(name):
    served = refusing(name, {"error": "Bad Request"})
    with running(served) as url:
        assert Server(url).complete(IDS, TEXT, max_tokens=16).text == " yes"


def test_a_refusal_of_everything_is_the_first_one():
    served = serving(lambda content: (400, {"error": f"No {len(contents(served))}"}))
    with running(served) as url, pytest.raises(ServerError, match=r"returned 400: No 1$"):
        Server(url).complete(IDS, TEXT, max_tokens=16)


@pytest.mark.parametrize("failures", [1, 2, 3])
def test_a_failure_that_passes_leaves_token_ids(failures):
    served = serving(
        lambda content: (
            (500, {"error": "Internal prompt error"}) if len(contents(served)) <= failures else (200, answer())
        )
    )
    with running(served) as url:
        server = Server(url)
        server.complete(IDS, TEXT, max_tokens=16)
    assert server.takes_ids
    assert server._negotiation.form.logprobs == 0


REFUSALS = [
    (400, "This model's maximum context length is 512 tokens. However, you requested 616 tokens.", 512),
    (400, "You passed 600 input tokens. However, the model's context length is only 512.", 512),
    (400, "The decoder prompt (length 600) is longer than the maximum model length of 512.", 512),
    (400, "'max_tokens' or 'max_completion_tokens' is too large: 16. The maximum context length is 512.", 512),
    (400, "the request exceeds the available context size. try increasing the context size or enable context shift", 0),
    (500, "Context size has been exceeded.", 0),
    (400, "Cannot truncate prompt with n_keep (599) >= n_ctx (512)", 512),
    (200, "Trying to keep the first 600 tokens when context the overflows. However, the model is loaded with context "
     "length of only 512 tokens, which is not enough. Try to load the model with a larger context length.", 512),
    (200, "The number of tokens to keep from the initial prompt is greater than the context length", 0),
    (400, "prompt too long; exceeded max context length by 88 tokens", 0),
    (400, "the input length exceeds the context length", 0),
    (422, "Input validation error: `inputs` must have less than 512 tokens. Given: 600", 512),
    (422, "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 512. Given: 600 `inputs` tokens", 512),
    (400, "Request length 600 + 16 is greater than max_seq_len 512", 512),
    (400, "Input length (600 tokens) exceeds the maximum allowed length (512 tokens).", 512),
    (400, "Input tokens exceed the configured limit of 512 tokens. Your messages resulted in 600 tokens.", 512),
    (400, "prompt is too long: 600 tokens > 512 maximum", 512),
    (400, "Requested tokens (616) exceed context window of 512", 512),
    (400, "Prompt contains 600 tokens and 0 draft tokens, too large for model with 512 maximum context length", 512),
    (413, "Payload refused", 0),
]  # fmt: skip


@pytest.mark.parametrize(("status", "words", "limit"), REFUSALS)
@pytest.mark.parametrize("form", ["message", "error", "object", "detail"])
def test_a_refused_length_in_other_words(status, words, limit, form):
    body = {
        "message": {"error": {"message": words, "code": 400}},
        "error": {"error": words},
        "object": {"object": "error", "message": words},
        "detail": {"detail": words},
    }[form]
    served = serving(lambda content: (status, body))
    with running(served) as url, pytest.raises(ServerError) as raised:
        Server(url).complete(IDS, TEXT, max_tokens=16)
    assert find_limit(raised.value, len(IDS)) == limit
    assert len(contents(served)) == 1, "no other form of the request is tried"
    assert words[:100] in raised.value.message


def test_a_limit_in_a_field():
    error = {
        "code": 400,
        "message": "too much",
        "type": "exceed_context_size_error",
        "n_prompt_tokens": 600,
        "n_ctx": 512,
    }
    with running(serving(lambda content: (400, {"error": error}))) as url, pytest.raises(ServerError) as raised:
        Server(url).complete(IDS, TEXT, max_tokens=16)
    assert find_limit(raised.value, len(IDS)) == 512


def test_a_path_that_is_answered_with_200():
    def override(path):
        text = f"Unexpected endpoint or method. (POST {path})"
        return (200, {}, json.dumps({"error": text}).encode()) if path == "/v1/completions" else None

    served = serving(lambda content: (200, {"choices": [{"message": {"content": "yes"}}]}))
    served.override = override
    with running(served) as url:
        server = Server(url)
        assert server.complete(IDS, TEXT, max_tokens=16).text == "yes"
    assert server.is_chat


@pytest.mark.parametrize(
    ("content", "sent", "read"),
    [
        ({"usage": {"prompt_tokens": 600}}, 600, 600),
        ({"usage": {"prompt_tokens": 514}}, 600, 514),
        ({"usage": {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 500}}}, 600, 600),
        ({"usage": {"prompt_tokens": 400, "prompt_tokens_details": {"cached_tokens": 390}}}, 600, 400),
        ({"usage": {"prompt_tokens": 600, "prompt_tokens_details": {"cached_tokens": 599}}}, 600, 600),
        ({"usage": {"input_tokens": 50, "cache_read_input_tokens": 500, "cache_creation_input_tokens": 50}}, 600, 600),
        ({"timings": {"prompt_n": 1, "cache_n": 599}}, 600, 600),
        ({"prompt_eval_count": 514, "eval_count": 16}, 600, 514),
        ({"usage": None}, 600, None),
    ],
)
def test_cached_tokens_are_read_too(content, sent, read):
    completion = read_completion({"choices": [{"text": "a"}], **content}, 16)
    assert count_read(completion, sent, is_text=False) == read


@pytest.mark.parametrize("hides", [True, False])
def test_a_cache_that_is_not_reported_is_no_cut(hides):
    seen = set()

    def reply(content):
        known = tuple(content["prompt"][:2]) in seen
        seen.add(tuple(content["prompt"][:2]))
        return 200, answer(usage={"prompt_tokens": 7 if known or not hides else 600})

    with running(serving(reply)) as url:
        server = Server(url)
        server.complete(IDS, TEXT, max_tokens=1)
        completion = server.complete(IDS, TEXT, max_tokens=1)
        read = server.measure_read(completion, IDS, TEXT, 600)
    assert (read, server.cuts(read, 600)) == ((None, False) if hides else (7, True))


@pytest.mark.parametrize(
    ("choice", "usage", "is_empty"),
    [
        ({"text": "", "finish_reason": "length"}, {"completion_tokens": 0}, True),
        ({"text": "", "finish_reason": "stop"}, {"completion_tokens": 0}, True),
        ({"text": "", "finish_reason": "length"}, {}, True),
        ({"text": None}, {}, True),
        ({"text": "", "finish_reason": "stop"}, {"completion_tokens": 1}, False),
        ({"text": "", "finish_reason": "stop"}, {}, False),
        ({"text": "", "finish_reason": "length"}, {"completion_tokens": 16}, False),
        ({"text": "a"}, {"completion_tokens": 0}, False),
    ],
)
def test_nothing_is_not_an_end(choice, usage, is_empty):
    assert read_completion({"choices": [choice], "usage": usage}, 16).is_empty is is_empty


def test_ids_of_text_keys():
    """The form of mlx_lm.server: ids of tokens are numbers, but text as keys."""
    logprobs = {"tokens": [5], "token_logprobs": [-0.5], "top_logprobs": [{"5": -0.5, "7": -1.5}]}
    (token,) = read_completion({"choices": [{"text": "a", "logprobs": logprobs}]}, 16).tokens
    assert (token.key, token.alternatives) == (5, {5: -0.5, 7: -1.5})


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:1/v1?key=hidden-value", 'The URL "http://127.0.0.1:1/v1" has a query or a fragment.'),
        ("http://127.0.0.1:1/v1#x", 'The URL "http://127.0.0.1:1/v1" has a query or a fragment.'),
        ("http://a..b/v1", '"a..b" is not a host name.'),
        ("http://-a/v1", '"-a" is not a host name.'),
        (f"http://{'a' * 64}/v1", f'"{"a" * 64}" is not a host name.'),
        ("http://127.0.0.1:0/v1", "is not a URL."),
        ("http://127.0.0.1:65536/v1", "is not a URL."),
        ("http://127.0.0.1:port/v1", "is not a URL."),
        ("http://[::1/v1", "is not a URL."),
        ("http://a b/v1", "is not a URL."),
        ("http://a\nb/v1", "is not a URL."),
        ("ftp://a/v1", "is not a URL."),
        ("http:///v1", "is not a URL."),
        ("http://me:hidden-value@h:99999/v1", '"h:99999/v1" is not a URL.'),
    ],
)
def test_a_url_that_is_refused(url, message):
    with pytest.raises(CtxextError) as raised:
        Server(url)
    assert message in raised.value.message
    assert "hidden-value" not in f"{raised.value.message} {raised.value.hint}"


@pytest.mark.parametrize(
    "key", ["sk-0123 4567", "sk-0123\n4567", "sk-0123\r4567", "sk-0123€4567", "sk-0123é4567", "sk\x007"]
)
def test_a_key_that_is_refused(key):
    with pytest.raises(CtxextError) as raised:
        Server("http://127.0.0.1:1/v1", api_key=key)
    text = f"{raised.value.message} {raised.value.hint}"
    assert text.startswith("The API key has a space, a line break or another character")
    assert not any(part in text for part in ("0123", "4567"))


def test_a_user_in_the_url_is_sent_and_does_not_replace_a_key():
    served = Served(None, None)
    with running(served) as url:
        address = url.replace("://", "://me:p%40ss@")
        Server(address)
        with pytest.raises(CtxextError, match="has a user name or a password, and there is an API key"):
            Server(address, api_key="sk-0123456789")
    assert {headers["Authorization"] for _, headers, _ in served.requests} == {"Basic bWU6cEBzcw=="}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e10, 0.0, -1.0])
def test_a_time_limit_that_is_refused(value):
    with pytest.raises(CtxextError, match="timeout must be"):
        ServerOptions(server="http://127.0.0.1:1", timeout=value)


def test_missing_certificates_are_named(monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere/ca")
    with pytest.raises(CtxextError, match='SSL_CERT_FILE="/nowhere/ca" cannot be read: No such file'):
        Server("https://127.0.0.1:1/v1")


def test_only_identity_is_requested():
    served = Served(None, None)
    with running(served) as url:
        Server(url)
    assert served.requests[0][1]["Accept-Encoding"] == "identity"
    assert MOST_BYTES <= 2**22
