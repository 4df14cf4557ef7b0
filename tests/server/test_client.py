"""Failures of servers: one clear line each, in bounded time and memory, without the key."""

import json
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

import pytest

from ctxext.errors import CtxextError
from ctxext.server.client import MOST_BYTES, Server, ServerError, ServerOptions, find_limit
from openai_server import Served, running

KEY = "sk-0123456789abcdef"
JSON = {"Content-Type": "application/json"}


def answers(status=200, body=b"{}", headers=JSON, path="/v1/completions"):
    """Return a server that answers one path like this, and the others as usual."""
    return Served(None, None, override=lambda asked: (status, dict(headers), body) if asked == path else None)


def error_of(served, **options):
    """Return the error of a completion, with its hint."""
    with running(served) as url, pytest.raises(CtxextError) as raised:
        Server(url, api_key=KEY, **{"timeout": 5, "max_retries": 0, **options}).complete([1, 2], "one", max_tokens=1)
    text = f"{raised.value.message} {raised.value.hint}"
    assert KEY not in text
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("served", "message"),
    [
        (answers(500, b'{"error": {"message": "CUDA error"}}'), "returned 500: CUDA error"),
        (answers(500, b""), "returned 500: no message"),
        (answers(200, b"<html>Welcome</html>"), "returned HTML. Give the base of its OpenAI-compatible API"),
        (answers(200, b'{"choices": [{"te'), "returned an answer that is not JSON"),
        (answers(200, b'{"choices": []}'), 'is malformed: "choices" is []. List should have at least 1 item'),
        (answers(200, b'{"choices": [{"text": "a", "logprobs": 5}]}'), '"choices[0].logprobs" is 5. Input should be a'),
        (answers(200, b'{"choices": [{}]}'), "is not a completion: It has no text."),
        (answers(200, b'{"id": 5}'), 'is malformed: {"id": 5}. It lacks "choices".'),
        (answers(200, b"[" * 100_000), "returned an answer that is not JSON"),
        (answers(401, b'{"error": "Wrong key ' + KEY.encode() + b'"}'), "returned 401: Wrong key … Give the key with"),
        (answers(200, b"x" * (MOST_BYTES + 1)), "returned more than 2 MB."),
        (answers(429, b'{"message": "Busy"}'), "returned 429: Busy"),
        (
            answers(200, json.dumps({"data": [{"id": "one"}, {"id": "two"}]}).encode(), path="/v1/models"),
            "has 2 models. Name one with --model: one, two.",
        ),
    ],
)
def test_a_failure_is_one_line(served, message):
    assert message in error_of(served)


def test_a_server_without_an_answer_times_out():
    ended = threading.Event()
    served = answers()
    served.override = lambda path: ended.wait(20) and None if path == "/v1/completions" else None
    began = time.monotonic()
    try:
        assert "did not answer within 1 seconds" in error_of(served, timeout=1)
    finally:
        ended.set()
    assert time.monotonic() - began < 5


@pytest.mark.thorough
def test_ten_gigabytes_are_not_read():
    script = f"""if True:
        import resource, socket, threading
        from ctxext.server.client import Server
        from ctxext.errors import CtxextError
        listening = socket.create_server(("127.0.0.1", 0))
        def answer():
            while True:
                other, _ = listening.accept()
                other.recv(65536)
                try:
                    other.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 10000000000\\r\\n\\r\\n")
                    for _ in range(10_000):
                        other.sendall(bytes(1_000_000))
                except OSError:
                    pass
        threading.Thread(target=answer, daemon=True).start()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            Server(f"http://127.0.0.1:{{listening.getsockname()[1]}}/v1", api_key="{KEY}")
        except CtxextError as error:
            print(error.message)
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
    """
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    message, megabytes = result.stdout.splitlines()
    assert message.endswith("returned more than 2 MB.")
    assert int(megabytes) < 100


@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions"])
def test_a_redirect_gets_no_key(path):
    with ExitStack() as stack:
        second = Served(None, None)
        other = stack.enter_context(running(second))
        first = answers(307, b"", {"Location": f"{other}/completions"}, path=path)
        assert "redirects to another address" in error_of(first)
    assert second.requests == []
    assert first.requests[0][1]["Authorization"] == f"Bearer {KEY}"


def test_requests_to_a_busy_server_are_repeated():
    served, codes = Served(None, None), [503, 429]
    body = json.dumps({"choices": [{"text": " yes"}]}).encode()

    def override(path):
        if path == "/v1/completions":
            return (codes.pop(), {"Retry-After": "0.1"}, b"{}") if codes else (200, {}, body)
        return None

    served.override = override
    with running(served) as url:
        assert Server(url).complete([1], "one", max_tokens=1).text == " yes"
    assert codes == []


@pytest.mark.parametrize(
    ("message", "limit"),
    [
        ("This model's maximum context length is 512 tokens. However, you requested 16 output tokens and 565.", 512),
        ("request (565 tokens) exceeds the available context size (512 tokens), try increasing it", 512),
        ("The input (565 tokens) is longer than the model's context length (512 tokens).", 512),
        ("`inputs` tokens + `max_new_tokens` must be <= 512. Given: 565 `inputs` tokens", 512),
        ("the prompt is too long", 0),
        ("prompt must be a string", None),
    ],
)
def test_the_limit_of_a_refusal(message, limit):
    error = ServerError(f"The server at host:1 returned 400: {message}", status=400)
    assert find_limit(error, 565) == limit


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("", "/v1/models"),
        ("/", "/v1/models"),
        ("/v1/", "/v1/models"),
        ("/v1/completions", "/v1/models"),
        ("/v1/chat/completions", "/v1/models"),
        ("/api/v3", "/api/v3/models"),
    ],
)
def test_the_base_of_the_api(given, sent):
    served = Served(None, None)
    with running(served) as url:
        Server(url.removesuffix("/v1") + given)
    assert served.requests[0][0] == sent


def test_the_key_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("CTXEXT_API_KEY", KEY)
    served = Served(None, None)
    with running(served) as url:
        options = ServerOptions(server=url)
        assert options.connection is options.connection
        assert KEY not in repr(options)
    assert served.requests[0][1]["Authorization"] == f"Bearer {KEY}"


@pytest.mark.thorough
def test_no_secret_is_printed():
    """The key and the password of the URL, in the output of the command."""
    served = answers(401, f'{{"error": "Wrong key {KEY}"}}'.encode(), path="/v1/models")
    with running(served) as url:
        address = url.replace("://", "://me:pass-word@")
        command = [sys.executable, "-m", "ctxext", "verify", "demo", "--json", "--server"]
        words = [(url, "--api-key", KEY), (address, "--api-key", KEY), (address, "--api-key", KEY, "--model")]
        results = [subprocess.run([*command, *more], capture_output=True, text=True, check=False) for more in words]
    output = "".join(result.stdout + result.stderr for result in results)
    assert [result.returncode for result in results][:2] == [1, 1]
    assert "Wrong key …" in output
    assert "The URL has a user name or a password, and there is an API key." in output
    assert KEY not in output
    assert "pass-word" not in output


def test_an_unknown_model():
    with running(Served(None, None)) as url, pytest.raises(CtxextError) as raised:
        Server(url, model="other")
    assert (raised.value.message, raised.value.hint) == ('The server has no model "other".', "Its models: served.")
