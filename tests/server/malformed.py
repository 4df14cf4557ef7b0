"""Malformed answers of a server, over a socket on loopback: every kind has a path, and a new one is a line here.

A kind is a sequence of bytes to send, pauses in seconds, and endless repetitions; `place` is the request that gets it.
`python tests/server/malformed.py URL` asks every kind of a running server, and prints what the client makes of it.
"""

import contextlib
import copy
import gzip
import itertools
import json
import math
import random
import resource
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

KEY = "sk-Q7xW2mPz91LkTr"
TIMEOUT = 1.0
MODELS = {"object": "list", "data": [{"id": "served", "owned_by": "vllm", "max_model_len": 4096}]}
GOOD = {
    "id": "x",
    "choices": [
        {
            "index": 0,
            "text": " a b",
            "finish_reason": "length",
            "logprobs": {
                "tokens": ["token_id:1", "token_id:2"],
                "token_logprobs": [-0.5, -1.5],
                "top_logprobs": [{"token_id:1": -0.5, "token_id:7": -2.0}, {"token_id:2": -1.5}],
            },
        }
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}},
}
CHAT = {
    "choices": [
        {
            "message": {"role": "assistant", "content": " a b"},
            "logprobs": {
                "content": [{"id": 5, "token": " a", "logprob": -0.5, "top_logprobs": [{"id": 5, "logprob": -1}]}]
            },
        }
    ]
}
VALUES = {
    "true": True,
    "text": "\u001b[31m\nred",
    "digits": "1" * 400,
    "huge": 10**399,
    "more digits": int("9" * 4299),
    "negative": -(2**40),
    "fraction": 1.5,
    "NaN": math.nan,
    "infinite": math.inf,
    "list": [[]],
    "object": {"a": {}},
    "surrogate": "\ud800",
    "key": KEY,
}


@dataclass(frozen=True)
class Kind:
    """A malformed answer.

    Attributes:
        name: Its name.
        steps: What is sent: bytes, or a pause in seconds.
        place: The request that gets it: "completions" or "models".
    """

    name: str
    steps: Iterable[bytes | float]
    place: str = "completions"


def http(body: bytes | str, status: int = 200, **headers: str) -> bytes:
    """Return a whole answer; headers have underscores for hyphens."""
    body = body.encode() if isinstance(body, str) else body
    lines = {"Content-Type": "application/json", "Content-Length": str(len(body))}
    lines |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"HTTP/1.1 {status} OK\r\n{head}\r\n".encode() + body


def places_of(content, place=()) -> Iterator[tuple]:
    """Yield the places of all values of a content, depth first."""
    if place:
        yield place
    pairs = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in pairs:
        yield from places_of(value, (*place, key))


def mutate(content, place, value):
    """Return a copy with another value at a place."""
    changed = copy.deepcopy(content)
    inner = changed
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return changed


def mutations() -> Iterator[Kind]:
    """Yield every wrong value at every place of a good answer."""
    for name, good, request in (
        ("completion", GOOD, "completions"),
        ("chat", CHAT, "completions"),
        ("list", MODELS, "models"),
    ):
        for place in places_of(good):
            for label, value in VALUES.items():
                path = ".".join(map(str, place))
                yield Kind(f"{name} {path}={label}", [http(dump(mutate(good, place, value)))], request)


def dump(content) -> str:
    """Return JSON, also of integers that Python refuses to write."""
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return json.dumps(content)
    finally:
        sys.set_int_max_str_digits(limit)


def drip(*parts: bytes, pause: float = 0.05) -> Iterator[bytes | float]:
    """Send the last part again and again, with pauses."""
    *first, last = parts
    yield from first
    while True:
        yield last
        yield pause


def flood(*parts: bytes) -> Iterator[bytes]:
    """Send the last part again and again, as fast as it is read."""
    *first, last = parts
    yield from first
    yield from itertools.repeat(last)


HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
TEXT = json.dumps(GOOD)


def on_the_wire() -> Iterator[Kind]:
    """Yield answers that are wrong below JSON."""
    zipped = gzip.compress(gzip.compress(bytes(2**21)))
    for name, steps in {
        "headers without end": lambda: drip(HEAD, b"X-A: b\r\n"),
        "a header without end": lambda: drip(HEAD + b"X-A: ", b"b"),
        "a status without end": lambda: drip(b"HTTP/1.1 200 ", b"O"),
        "100 without end": lambda: drip(b"HTTP/1.1 100 Continue\r\n\r\n"),
        "103 without end": lambda: drip(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"),
        "a chunk size without end": lambda: drip(CHUNKED, b"0"),
        "a chunk extension without end": lambda: drip(CHUNKED + b"5;", b"a"),
        "chunks of one byte": lambda: drip(CHUNKED, b"1\r\n{\r\n"),
        "trailers without end": lambda: drip(CHUNKED + b"2\r\n{}\r\n0\r\n", b"X-A: b\r\n"),
        "a body that drips": lambda: drip(HEAD + b"Content-Length: 999\r\n\r\n", b" "),
        "a body without a length that drips": lambda: drip(HEAD + b"\r\n", b" "),
        "spaces before the status": lambda: drip(b" "),
        "nothing": lambda: drip(b""),
        "a flood of headers": lambda: flood(HEAD, b"X-A: " + b"b" * 1000 + b"\r\n"),
        "a flood of 100": lambda: flood(b"HTTP/1.1 100 Continue\r\n\r\n" * 50),
        "a flood of zeros": lambda: flood(CHUNKED, b"0" * 1000),
        "a flood of chunks": lambda: flood(CHUNKED, b"1\r\n \r\n" * 500),
        "a flood of trailers": lambda: flood(CHUNKED + b"0\r\n", b"X-A: b\r\n" * 100),
        "a flood": lambda: flood(HEAD + b"Content-Length: 10000000000\r\n\r\n", bytes(2**16)),
        "a flood of brackets": lambda: flood(HEAD + b"\r\n", b"[],{}," * 1000),
        "closed": lambda: iter(()),
        "half a status": lambda: iter([b"HTTP/1."]),
        "half a header": lambda: iter([HEAD + b"Content-Le"]),
        "half a body": lambda: iter([http(TEXT)[:-20]]),
        "half a chunk": lambda: iter([CHUNKED + b"ffff\r\n{"]),
        "a negative chunk": lambda: iter([CHUNKED + b"-5\r\n{}\r\n0\r\n\r\n"]),
        "a chunk of 2^64": lambda: iter([CHUNKED + b"ffffffffffffffff\r\n{}"]),
        "not HTTP": lambda: iter([b"SSH-2.0-OpenSSH\r\n"]),
        "HTTP/0.9": lambda: iter([b"{}"]),
        "TLS": lambda: iter([b"\x15\x03\x01\x00\x02\x02\x28"]),
        "two lengths": lambda: iter([HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}}"]),
        "a negative length": lambda: iter([HEAD + b"Content-Length: -1\r\n\r\n{}"]),
        "a length of 400 digits": lambda: iter([HEAD + b"Content-Length: " + b"9" * 400 + b"\r\n\r\n{}"]),
        "101": lambda: iter([b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n"]),
        "204": lambda: iter([b"HTTP/1.1 204 No Content\r\n\r\n"]),
        "304": lambda: iter([b"HTTP/1.1 304 Not Modified\r\n\r\n"]),
        "999": lambda: iter([http(TEXT, 999)]),
        "status 2000000": lambda: iter([http(TEXT, 2_000_000)]),
        "gzip": lambda: iter([http(gzip.compress(TEXT.encode()), Content_Encoding="gzip")]),
        "gzip in gzip": lambda: iter([http(zipped, Content_Encoding="gzip, gzip")]),
        "gzip of nothing": lambda: drip(
            HEAD + b"Content-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n", b"5\r\n\x00\x00\x00\xff\xff\r\n"
        ),
        "br": lambda: iter([http(b"\x00", Content_Encoding="br")]),
        "an encoding with the key": lambda: iter([http(TEXT, Content_Encoding=KEY)]),
        "latin-1 headers": lambda: iter([http("{", X_A="\xe9".encode().decode("latin-1"))]),
    }.items():
        for place in ("completions", "models"):
            yield Kind(f"{name} ({place})", steps(), place)


def in_the_body() -> Iterator[Kind]:
    """Yield answers of the wrong JSON, errors, and texts that are too long."""
    long_text = {"choices": [{"text": "a" * 1_900_000, "finish_reason": "length"}]}
    many = {"choices": [{"text": "a", "logprobs": {"tokens": ["a"] * 120_000, "token_logprobs": [-1] * 120_000}}]}
    row = {f"t{at}": -1 for at in range(100_000)}
    wide = {"choices": [{"text": "a", "logprobs": {"tokens": ["a"], "token_logprobs": [-1], "top_logprobs": [row]}}]}
    bodies = {
        "2 MB of text": json.dumps(long_text),
        "120,000 tokens": json.dumps(many),
        "100,000 alternatives": json.dumps(wide),
        "a token of 2 MB": dump(mutate(GOOD, ("choices", 0, "logprobs", "tokens", 0), "b" * 1_900_000)),
        "deep": "[" * 200_000,
        "deep and closed": '{"a":' * 5000 + "1" + "}" * 5000,
        "deep in choices": f'{{"choices": [{{"text": {"[" * 90}{"]" * 90}}}]}}',
        "many empty lists": "[" + "[]," * 500_000 + "[]]",
        "many keys": "{" + ",".join(f'"{at}":0' for at in range(120_000)) + "}",
        "the same key": '{"choices": [], "choices": []}',
        "two values": TEXT + TEXT,
        "UTF-16": TEXT.encode("utf-16"),
        "not UTF-8": b'{"choices": [{"text": "\xff"}]}',
        "a byte-order mark": b"\xef\xbb\xbf" + TEXT.encode(),
        "NUL": b"\x00" * 1000,
        "a number": "1",
        "true": "true",
        "null": "null",
        "a text": '"yes"',
        "empty": "",
        "HTML": f"<html>{KEY}</html>",
        "SSE": f"data: {TEXT}\n\ndata: [DONE]\n\n",
        "NaN": "NaN",
        "rows of other lengths": dump(mutate(GOOD, ("choices", 0, "logprobs", "token_logprobs"), [-1.0])),
        "no tokens for logprobs": dump(mutate(GOOD, ("choices", 0, "logprobs"), {"token_logprobs": [-1.0]})),
        "an error": '{"error": "Model not loaded"}',
        "an error in an error": '{"error": {"error": {"error": {"message": "no"}}}}',
        "an error of lists": json.dumps({"error": [[["no"]]]}),
        "an error that is true": '{"error": true}',
        "an error in a choice": '{"choices": [{"error": {"message": "upstream"}, "finish_reason": "error"}]}',
        "an error of 2 MB": json.dumps({"error": {"message": "x" * 1_900_000}}),
        "an error of many lines": json.dumps({"error": {"message": "a\n" * 1000}}),
        "an error with escapes": json.dumps({"error": {"message": "\u001b]0;t\u0007\u202e" * 10}}),
        "an error with the key at the cut": json.dumps({"error": {"message": "x" * 290 + KEY}}),
        "an error with a broken key": json.dumps({"error": {"message": f"Wrong key {KEY[:6]}\n {KEY[6:]}"}}),
        "an error with a limit of 5000 digits": json.dumps({"error": {"message": "context limit " + "9" * 4300}}),
        "an error with a limit that is no number": '{"error": {"message": "context", "n_ctx": true}}',
    }
    for name, body in bodies.items():
        yield Kind(name, [http(body)])
    for name in ("an error with the key at the cut", "an error with a broken key", "an error of 2 MB", "empty"):
        for status in (400, 401, 422, 500):
            yield Kind(f"{status}: {name}", [http(bodies[name], status)])
    yield Kind("500: a text with the key at the cut", [http("y" * 195 + KEY, 500, Content_Type="text/plain")])
    for name in ("nan", "inf", "-5", "1e400", "9" * 400, "Fri, 31 Dec 9999 23:59:59 GMT", "soon", "0", ""):
        yield Kind(f"Retry-After {name[:9]}", [http('{"message": "busy"}', 429, Retry_After=name)])
        yield Kind(f"Retry-After {name[:9]} of models", [http("{}", 503, Retry_After=name)], "models")
    for name, body in {"data true": '{"data": true}', "a list": "[5]", "no names": '{"data": [{}]}'}.items():
        yield Kind(f"models: {name}", [http(body)], "models")


def all_kinds(sample: int | None = None, seed: int = 0) -> list[Kind]:
    """Return all kinds, or of the mutations a sample."""
    changed = list(mutations())
    if sample is not None:
        changed = random.Random(seed).sample(changed, sample)
    return [*on_the_wire(), *in_the_body(), *changed]


def _answer(connection: socket.socket, kinds: list[Kind]) -> None:
    """Answer one request: of the path /NUMBER/v1/models or /NUMBER/v1/completions."""
    with contextlib.suppress(OSError), connection:
        connection.settimeout(20)
        received = b""
        while b"\r\n\r\n" not in received:
            if not (more := connection.recv(2**16)):
                return
            received += more
        head, _, rest = received.partition(b"\r\n\r\n")
        path = head.split(b" ", 2)[1].decode()
        length = next(
            (int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0
        )
        while len(rest) < length and (more := connection.recv(2**16)):
            rest += more
        number, _, request = path.removeprefix("/").partition("/v1/")
        kind = kinds[int(number)] if number.isdigit() else None
        if kind is None or request != kind.place:
            connection.sendall(http(dump(MODELS)) if request == "models" else http("{}", 404))
            return
        for step in kind.steps:
            if isinstance(step, bytes):
                connection.sendall(step)
            else:
                time.sleep(step)


@contextlib.contextmanager
def running(kinds: list[Kind]) -> Iterator[str]:
    """Run the server of all kinds, and return its address without a path."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=128)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=_answer, args=(listening.accept()[0], kinds), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()


def ask(url: str) -> tuple[str, float]:
    """Return what the client makes of a kind, in one word and the message, and the seconds that it took."""
    from ctxext.errors import CtxextError
    from ctxext.server.client import Server

    began = time.monotonic()
    try:
        server = Server(url, api_key=KEY, timeout=TIMEOUT, max_retries=1)
        answer = server.complete([1, 2, 3], "one two", max_tokens=16)
        text = f"completion {check(answer)}"
    except CtxextError as error:
        text = f"error {error.message} {error.hint}"
    except Exception as error:
        text = f"BUG {type(error).__name__} {error}"
    return text, time.monotonic() - began


def check(answer) -> str:
    """Return "" for an answer that the rest of the program can use, else what is wrong with it."""
    from ctxext.server.client import Completion

    assert isinstance(answer, Completion)
    keys = [token.key for token in answer.tokens] + [key for token in answer.tokens for key in token.alternatives]
    values = [value for token in answer.tokens for value in token.alternatives.values()]
    answer.text.encode()
    wrong = [key for key in keys if isinstance(key, bool) or (isinstance(key, int) and not 0 <= key < 2**31)]
    wrong += [value for value in values if not value <= 0.5]
    is_long = len(answer.text) > 16 * 512 or len(answer.tokens) > 16 or len(keys) > 16 * 40
    return f"WRONG {wrong} {is_long}" if wrong or is_long else ""


def main(url: str, count: str) -> None:
    """Ask all kinds, a few at once, and print a line each, then the growth of memory in MB."""
    from ctxext.server import http, schema  # noqa: F401  What is imported is no growth.

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with ThreadPoolExecutor(4) as threads:
        for number, (text, seconds) in enumerate(threads.map(ask, [f"{url}/{at}/v1" for at in range(int(count))])):
            sys.stdout.write(json.dumps([number, text, seconds]) + "\n")
    sys.stdout.write(str((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10))


if __name__ == "__main__":
    main(*sys.argv[1:])
