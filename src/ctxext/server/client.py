"""A running server with an OpenAI-compatible API: greedy completions in bounded time and memory.

Covers vLLM, SGLang, llama.cpp, LM Studio, Ollama, TGI, mlx_lm.server and LiteLLM, which differ in the type of a prompt,
in the name of the parameter for log-probabilities, in the arguments that they refuse, and in the form of their answers.
"""

import base64
import functools
import ipaddress
import json
import os
import random
import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import SplitResult, quote, unquote, urlsplit

from ctxext.errors import CtxextError
from ctxext.files.retrying import call_with_retries, count_pause
from ctxext.files.strict import parse_json
from ctxext.options import (
    Rule,
    check_options,
    flag_of,
    is_set,
    option,
    options_of,
    with_documented_options,
)
from ctxext.redaction import redact, remember
from ctxext.server.answers import (
    Completion,
    ServerError,
    ServerTimeout,
    count_read,
    find_gap,
    find_limit,
    is_cut,
    read_completion,
)
from ctxext.server.negotiation import CHAT, Form, Negotiation, Request

if TYPE_CHECKING:
    from pydantic import TypeAdapter

    from ctxext.server.http import Address, Deadline, Response

__all__ = ["MOST_BYTES", "Completion", "Server", "ServerError", "ServerOptions", "ServerTimeout", "find_limit"]

MOST_BYTES = 2**21
"""Largest answer that is read, in bytes: a completion of some tokens with log-probabilities is much shorter."""

_MOST_BYTES_OF_STARTED, _SECONDS_OF_STARTED = 2**30, 3600.0
"""Limits for a server that this process started: it may list every token of a long text, and read it on a CPU."""

_RETRIED = (429, 503)
_SECONDS_OF_IDENTITY = 4.0
_MOST_WORDS, _MOST_MESSAGE = 2000, 300
"""Characters of an error's text that are searched, and that are printed."""

_PANEL = "Server"
_LONGEST_WAIT = 1_000_000
"""Maximum of a timeout in seconds; sockets accept no more than about 10^10."""
_KEY_VARIABLE = "CTXEXT_API_KEY"
_NAMES = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "llamacpp": "llama.cpp",
    "library": "Ollama",
    "organization_owner": "LM Studio",
}
"""Servers by `owned_by` of their list of models."""

_URL_HINT = "Give the base of its OpenAI-compatible API, for example --server http://127.0.0.1:8000/v1."
_KEY_HINT = f"Give the key with --api-key or {_KEY_VARIABLE}."
_HINTS = {401: _KEY_HINT, 403: _KEY_HINT, 404: _URL_HINT}
"""Hints by status."""
_IDENTITIES = (
    ("props", ("llama.cpp", "build_info")),
    ("server_info", ("SGLang", "version")),
    ("get_server_info", ("SGLang", "version")),
    ("api/version", ("Ollama", "version")),
    ("info", ("TGI", "version")),
    ("version", ("vLLM", "version")),
)
"""Paths that report a server: its name, and the key of its version."""
_COMMON = ("version",)
"""Paths that other servers have too, read only if the list of models names the server."""

_SWITCHED_BY_EFFORT = ("Ollama", "LM Studio")
_EFFORTS = {True: "medium", False: "none"}
"""Efforts of reasoning that switch thoughts on and off, for servers that ignore variables of the chat template."""

_BLANK = re.compile(r"[\x00-\x20\x7f-\xa0\u2028-\u202e\u2066-\u2069]+")
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST_NAME = re.compile(rf"(?=.{{1,253}}$){_LABEL}(?:\.{_LABEL})*\.?")
_KEY = re.compile(r"[\x21-\x7e]+")
"""A key that fits into an HTTP header."""


def _find_option_without_server(options: "ServerOptions") -> str | None:
    """Return the flag of an option that is set although there is no server."""
    names = options_of(ServerOptions) if options.server is None else ()
    return next((flag_of(ServerOptions, name) for name in names if is_set(options, name)), None)


@with_documented_options
@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """A running server, and the form of the requests to it."""

    server: str | None = option(
        None,
        help="Base URL of a server with an OpenAI-compatible API, for example http://127.0.0.1:8000/v1.",
        metavar="URL",
        panel=_PANEL,
    )
    model: str | None = option(None, help="Name of the model on the server. Default: its only model.", panel=_PANEL)
    api_key: str | None = option(
        None, help=f"API key. Default: the environment variable {_KEY_VARIABLE}.", panel=_PANEL, kept=False, repr=False
    )
    num_concurrent: int = option(
        1, help="Number of concurrent requests.", panel=_PANEL, min=1, max=1000, parser_checks=True
    )
    max_retries: int = option(
        3, help="Repetitions of a request that a busy server refuses.", panel=_PANEL, min=0, parser_checks=True
    )
    timeout: float = option(
        300, help="Seconds to wait for an answer.", panel=_PANEL, min=0.1, max=_LONGEST_WAIT, parser_checks=True
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(_find_option_without_server, "{found} requires a server.", "Add --server URL."),
    )

    def __post_init__(self) -> None:
        check_options(self)

    @functools.cached_property
    def connection(self) -> "Server":
        """The server, connected at the first use."""
        assert self.server is not None
        return Server(
            self.server,
            model=self.model,
            api_key=self.api_key or os.environ.get(_KEY_VARIABLE),
            timeout=self.timeout,
            max_retries=self.max_retries,
        )


class Server:
    """A client of one model on a server. Several threads may use it after the first completion.

    Args:
        url: The base of the API, for example http://127.0.0.1:8000/v1. A user name and a password in it are sent as
            such; they cannot be combined with a key.
        model: The model's name on the server; None uses its only one.
        api_key: A key, sent to this host only.
        timeout: Seconds for an answer, from the connection to its last byte, with all repetitions of the request.
        max_retries: Number of repetitions of a request that the server is too busy for (429, 503).
        more: Further arguments of each completion.
        most_bytes: Largest answer that is read.

    Attributes:
        host: Host and port, for errors.
        model: The model's name on the server; empty for the server's default.
        name: Name of the server, for example "vLLM"; empty if it is unknown.
        version: Version of the server; empty if it reports none.
        length: The server's limit in tokens; None if it reports none.

    Raises:
        CtxextError: The URL or the key is invalid, the server cannot be reached, or it has no such model.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout: float = 300,
        max_retries: int = 3,
        more: Mapping[str, Any] | None = None,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        remember(api_key)
        parts = _split_url(url)
        password = unquote(parts.password or "")
        remember(parts.password, password)
        self._secrets = [_make_pattern(secret) for secret in (api_key, parts.password, password) if secret]
        self._headers = _make_headers(parts, api_key)
        self._address = _make_address(parts)
        self.host = str(self._address)
        self.timeout, self.max_retries = timeout, max_retries
        self._more, self._most_bytes = more or {}, most_bytes
        path = quote(parts.path.rstrip("/"), safe="/%:@!$&'()*+,;=~")
        self._base = path.removesuffix("/completions").removesuffix("/chat") if path else "/v1"
        self._negotiation = Negotiation()
        self._counts_apart: bool | None = None
        entries = self._list_models()
        self.model = self._choose(model, list(entries))
        entry = entries.get(self.model, {})
        owner = str(entry.get("owned_by") or "").lower()
        self.length: int | None = entry.get("max_model_len")
        self.name, self.version = _NAMES.get(owner, ""), ""
        self._identify()

    @classmethod
    def of_started(cls, url: str, api_key: str, *, more: Mapping[str, Any] | None = None) -> "Server":
        """Connect to a server that this process started and trusts.

        Args:
            url: The address, for example http://127.0.0.1:8000.
            api_key: The key that it was started with.
            more: Further arguments of each completion.
        """
        return cls(
            f"{url}/v1", api_key=api_key, timeout=_SECONDS_OF_STARTED, more=more, most_bytes=_MOST_BYTES_OF_STARTED
        )

    def _list_models(self) -> dict[str, Mapping[str, Any]]:
        """Return the server's list of models by name; empty if it has none."""
        from ctxext.server.http import Deadline
        from ctxext.server.schema import MODELS

        try:
            models = self._send("GET", f"{self._base}/models", None, Deadline(self.timeout), self.max_retries)
        except ServerError as error:
            if error.status not in (200, 404, 405, 500, 501):
                raise
            return {}  # mlx_lm.server has no list without a connection to the Hub.
        models = models if isinstance(models, Mapping) else {"data": models}
        self._check(models, MODELS, "list of models")
        return {entry["id"]: entry for entry in models.get("data") or () if "id" in entry}

    def _choose(self, model: str | None, names: Sequence[str]) -> str:
        """Return the name of the model, empty for the server's default."""
        shown = ", ".join(self._tidy(name)[:80] for name in names[:5])
        if model is not None:
            if names and model not in names:
                raise CtxextError(f'The server has no model "{model}".', hint=f"Its models: {shown}.")
            return model
        if len(names) > 1:
            raise CtxextError(
                f"The server at {self.host} has {len(names)} models.", hint=f"Name one with --model: {shown}."
            )
        return names[0] if names else ""

    def _identify(self) -> None:
        """Read the name and version of the server where it reports them."""
        from ctxext.server.http import Deadline
        from ctxext.server.schema import IDENTITY, find_fault

        deadline = Deadline(min(self.timeout, _SECONDS_OF_IDENTITY))
        root = self._base.removesuffix("/v1")
        for path, (name, key) in _IDENTITIES:
            # Servers of other names have some of these paths too.
            if self.name != name and (self.name or path in _COMMON):
                continue
            try:
                answer = self._send("GET", f"{root}/{path}", None, deadline, 0)
            except ServerTimeout:
                return
            except ServerError:
                continue
            if not isinstance(answer, Mapping) or find_fault(answer, IDENTITY):
                continue
            if version := answer.get(key):
                self.name, self.version = name, self._tidy(version)[:40]
                settings = answer.get("default_generation_settings") or {}
                self.length = settings.get("n_ctx") or answer.get("max_total_tokens") or self.length
                return

    @property
    def label(self) -> str:
        """Name and version of the server."""
        return f"{self.name or 'an unknown server'} {self.version}".strip()

    @property
    def takes_ids(self) -> bool:
        """Whether prompts are sent as token ids, so that the server's tokenizer has no influence."""
        return self._negotiation.form.takes_ids and not self._negotiation.form.is_chat

    @property
    def is_chat(self) -> bool:
        """Whether prompts are sent as messages."""
        return self._negotiation.form.is_chat

    def use_completions(self, *, chat: bool) -> None:
        """Choose the kind of completions; the next one chooses the form of requests again."""
        self._negotiation.begin(CHAT if chat else Form())

    @property
    def is_greedy(self) -> bool:
        """Whether the server accepts temperature 0."""
        return "temperature" not in self._negotiation.form.omitted

    def complete(
        self,
        prompt: Sequence[int],
        text: str,
        *,
        max_tokens: int,
        logprobs: bool = True,
        messages: Sequence[Mapping[str, str]] = (),
        variables: Mapping[str, bool] | None = None,
        keeps_special: bool = False,
    ) -> Completion:
        """Continue a prompt greedily.

        The first completion chooses the form of all requests.

        Args:
            prompt: Token ids, sent to servers that accept them.
            text: The same prompt as text, without the special tokens that the server adds.
            max_tokens: Number of tokens to generate.
            logprobs: Also request log-probabilities.
            messages: The same prompt as messages, for chat completions; by default the text as one message.
            variables: Variables of the chat template, for chat completions.
            keeps_special: Whether the text must contain special tokens, for completions.

        Raises:
            ServerError: The server refuses every form of the request, or its answer is unreadable.
        """
        from ctxext.server.http import Deadline

        deadline = Deadline(self.timeout)
        thinks = any((variables or {}).values())
        effort = _EFFORTS[thinks] if variables and self.name in _SWITCHED_BY_EFFORT else ""
        request = Request(prompt, text, max_tokens, logprobs, messages, variables or {}, effort, keeps_special)

        def ask(form: Form) -> Completion:
            return self._complete(form.build(request), form, max_tokens, deadline)

        return self._negotiation.complete(ask, request)

    def _complete(self, content: Mapping[str, Any], form: Form, max_tokens: int, deadline: "Deadline") -> Completion:
        """Return the answer to a request."""
        from ctxext.server.schema import COMPLETION

        path = f"{self._base}/{'chat/completions' if form.is_chat else 'completions'}"
        model = {"model": self.model} if self.model else {}
        answer = self._send("POST", path, {**model, **content, **self._more}, deadline, self.max_retries)
        self._check(answer, COMPLETION, "answer")
        if (gap := find_gap(answer)) is not None:
            raise ServerError(f"The answer of the server at {self.host} is not a completion: {gap}.", hint=_URL_HINT)
        return read_completion(answer, max_tokens)

    def measure_read(
        self, completion: Completion, prompt: Sequence[int], text: str, sent: int, *, max_tokens: int = 1
    ) -> int | None:
        """Return the number of tokens that the server read of a prompt; None if that is unknown.

        Args:
            completion: The answer to the prompt.
            prompt: The prompt.
            text: The prompt as text.
            sent: The number of its tokens as they were sent.
            max_tokens: The number of tokens that were requested; a server may cut a prompt to have room for them.
        """
        is_text = not self.takes_ids
        read = count_read(completion, sent, is_text=is_text)
        if read is None or not is_cut(read, sent, is_text=is_text):
            return read
        if self._counts_apart is None:
            # Some servers neither count nor report cached tokens. A shuffled prompt is in no cache.
            order = random.Random()
            words = text.split(" ")
            order.shuffle(words)
            shuffled = order.sample(list(prompt), len(prompt))
            try:
                other = self.complete(shuffled, " ".join(words), max_tokens=max_tokens, logprobs=False)
            except ServerError:
                return read
            count = count_read(other, sent, is_text=is_text)
            self._counts_apart = count is not None and not is_cut(count, sent, is_text=is_text)
        return None if self._counts_apart else read

    def cuts(self, read: int | None, sent: int) -> bool:
        """Return whether the server did not read all of a prompt of `sent` tokens."""
        return read is not None and is_cut(read, sent, is_text=not self.takes_ids)

    def request(self, method: str, path: str, content: Mapping[str, Any] | None = None) -> Any:
        """Return the answer to a request outside the OpenAI-compatible API, by its path from the root."""
        from ctxext.server.http import Deadline

        root = self._base.removesuffix("/v1")
        return self._send(method, f"{root}/{path}", content, Deadline(self.timeout), self.max_retries)

    def _send(
        self, method: str, path: str, content: Mapping[str, Any] | None, deadline: "Deadline", max_retries: int
    ) -> Any:
        """Send a request, repeat it while the server is busy, and return the JSON of the answer."""
        from ctxext.server.http import ExpiredError

        body = b"" if content is None else json.dumps(content).encode()

        def find_pause(error: CtxextError, attempt: int) -> float | None:
            if not isinstance(error, ServerError) or error.status not in _RETRIED:
                return None
            seconds = count_pause(error.retry_after, attempt)
            return seconds if seconds < deadline.count_seconds() else None

        try:
            return call_with_retries(
                lambda: self._parse(self._exchange(method, path, body, deadline)), max_retries, find_pause
            )
        except ExpiredError as error:
            message = f"The server at {self.host} did not answer within {self.timeout:g} seconds."
            raise ServerTimeout(message, hint="Check that it is idle, or raise --timeout.") from error

    def _exchange(self, method: str, path: str, body: bytes, deadline: "Deadline") -> "Response":
        """Send a request once."""
        from ctxext.server.http import TooLargeError

        headers = {**self._headers, **({"Content-Type": "application/json"} if body else {})}
        try:
            response = self._address.exchange(method, path, headers, body, deadline=deadline, most=self._most_bytes)
        except TooLargeError as error:
            raise ServerError(f"The server at {self.host} returned more than {self._most_bytes >> 20} MB.") from error
        except OSError as error:
            reason = self._tidy(str(error)) or type(error).__name__
            raise ServerError(f"The server at {self.host} cannot be reached: {reason}", hint=_URL_HINT) from error
        except ValueError as error:
            reason = self._tidy(str(error))
            raise ServerError(
                f"The exchange with the server at {self.host} failed: {reason}", hint=_URL_HINT
            ) from error
        if 300 <= response.status < 400:
            raise ServerError(
                f"The server at {self.host} redirects to another address, which gets neither prompts nor the key.",
                hint="Give the final address with --server.",
                status=response.status,
            )
        encoding = response.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            raise ServerError(
                f'The server at {self.host} answers in the content encoding "{self._tidy(encoding)[:40]}".',
                hint="Use a server or a proxy that respects the header Accept-Encoding: identity.",
            )
        return response

    def _parse(self, response: "Response") -> Any:
        """Return the JSON of an answer; raise if it is not JSON or reports an error, of whichever status."""
        body, status = response.body, response.status
        content, fault = None, "an answer that is not JSON"
        try:
            content = parse_json(body.decode("utf-8"), "answer")
        except UnicodeDecodeError:
            pass
        except CtxextError as error:
            if not isinstance(error.__cause__, (json.JSONDecodeError, RecursionError)):
                fault = f"JSON that cannot be used: {error.message.removesuffix('.')}"
        failure = _find_failure(content)
        if status >= 400 or failure is not None:
            words, names, limit = _read_failure(failure)
            words = self._tidy(words or ("" if content is not None else body.decode("utf-8", "replace")))
            if status < 400:  # LM Studio reports errors with status 200.
                status = 404 if "unexpected endpoint" in words.lower() else 400
                what = "an error"
            else:
                what = str(status)
            refused = ServerError(
                f"The server at {self.host} returned {what}: {words[:_MOST_MESSAGE] or 'no message'}",
                hint=_HINTS.get(status, ""),
                status=status,
                words=f"{words} {self._tidy(names)}",
                limit=limit,
            )
            refused.retry_after = response.headers.get("retry-after")
            raise refused
        if not isinstance(content, (Mapping, list)):
            kind = "HTML" if body.lstrip()[:1] == b"<" else fault
            hint = _URL_HINT
            if body.startswith((b"data:", b"event:")):
                kind, hint = "a stream, which ctxext does not read", "Use a server that also answers as a whole."
            raise ServerError(f"The server at {self.host} returned {kind}.", hint=hint, status=status)
        return content

    def _check(self, content: Any, schema: "TypeAdapter[Any]", what: str) -> None:
        """Raise if an answer has other values than its schema."""
        from ctxext.server.schema import find_fault

        if (fault := find_fault(content, schema)) is None:
            return
        key, value, reason = fault
        shown = self._tidy(json.dumps(value)[: 2 * _MOST_WORDS])
        shown = shown if len(shown) <= 40 else f"{shown[:40]}…"
        place = f'"{self._tidy(key)[:80]}" is {shown}' if key else shown
        message = f"The {what} of the server at {self.host} is malformed: {place}. {reason}."
        raise ServerError(message, hint=_URL_HINT)

    def _tidy(self, text: str) -> str:
        """Return a text of the server in one line, without secrets; they are removed before anything is cut."""
        text = _BLANK.sub(" ", text).strip()
        for pattern in self._secrets:
            text = pattern.sub("…", text)
        return redact(text[:_MOST_WORDS])


def _find_failure(content: Any) -> Any:
    """Return the error that an answer of any status reports; None if it reports none."""
    if not isinstance(content, Mapping) or content.get("object") in ("list", "model"):
        return None
    choices = content.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    inner = choice.get("error") if isinstance(choice, Mapping) else None
    for error in (content.get("error"), inner):
        if error:
            return error
    keys = ("message", "detail", "msg", "errors")
    return next((content[key] for key in keys if content.get(key) and "choices" not in content), None)


def _read_failure(failure: Any) -> tuple[str, str, int]:
    """Return the text of an error, the names and codes in its other fields, and the context length among them."""
    if isinstance(failure, list):  # FastAPI's form has an entry for each value.
        entries = [entry for entry in failure[:8] if isinstance(entry, Mapping)]
        places = [loc if isinstance(loc := entry.get("loc"), list) else [] for entry in entries]
        parts = [
            f"{'.'.join(map(str, place[:8]))}: {entry.get('msg')}" for place, entry in zip(places, entries, strict=True)
        ]
        return "; ".join(parts or [str(part) for part in failure[:8]]), "", 0
    if not isinstance(failure, Mapping):
        return "" if failure is None else str(failure), "", 0
    inner = next((failure[key] for key in ("message", "msg", "detail", "error") if failure.get(key)), "")
    words = _read_failure(inner)[0] if isinstance(inner, (Mapping, list)) and inner is not failure else str(inner)
    names = " ".join(value for key in ("param", "code", "type") if isinstance(value := failure.get(key), str))
    limit = failure.get("n_ctx")
    return words, names, limit if isinstance(limit, int) and not isinstance(limit, bool) else 0


def _make_pattern(secret: str) -> re.Pattern[str]:
    """Return the pattern of a secret, also of one that is broken into lines; a short one counts as a word only."""
    pattern = " ?".join(map(re.escape, secret))
    return re.compile(pattern if len(secret) >= 4 else rf"(?<!\w){pattern}(?!\w)")


def _split_url(url: str) -> SplitResult:
    """Return the parts of the URL of a server.

    Raises:
        CtxextError: It is not a URL, or it has parts that would be lost. The error has neither password nor query.
    """
    shown = re.split(r"[?#]", url.rpartition("@")[2])[0]
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname
    except ValueError:
        parts, port, host = urlsplit(""), None, None
    is_url = parts.scheme in ("http", "https") and host and port != 0 and not _BLANK.search(url) and url.isprintable()
    if not is_url:
        raise CtxextError(f'"{shown}" is not a URL.', hint=_URL_HINT)
    if not _is_host(host or ""):
        raise CtxextError(f'"{_BLANK.sub(" ", host or "")}" is not a host name.', hint=_URL_HINT)
    if "?" in url or "#" in url:
        raise CtxextError(f'The URL "{shown}" has a query or a fragment.', hint=f"{_URL_HINT} {_KEY_HINT}")
    return parts


def _is_host(host: str) -> bool:
    """Return whether a text is an IP address or the name of a host."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        try:
            return _HOST_NAME.fullmatch(host.encode("idna").decode("ascii")) is not None
        except UnicodeError:
            return False
    return True


def _make_headers(parts: SplitResult, api_key: str | None) -> dict[str, str]:
    """Return the headers of all requests.

    Raises:
        CtxextError: The key cannot be sent, or there is also a user name or a password.
    """
    headers = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "ctxext"}
    has_user = parts.username is not None or parts.password is not None
    if api_key and has_user:
        raise CtxextError(
            "The URL has a user name or a password, and there is an API key.",
            hint=f"Give only one of them; the key comes from --api-key or {_KEY_VARIABLE}.",
        )
    if api_key:
        if not _KEY.fullmatch(api_key):
            raise CtxextError(
                "The API key has a space, a line break or another character that a key cannot have.", hint=_KEY_HINT
            )
        headers["Authorization"] = f"Bearer {api_key}"
    elif has_user:
        pair = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
        headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
    return headers


def _make_address(parts: SplitResult) -> "Address":
    """Return the address of a server, with the certificates for it.

    Raises:
        CtxextError: The certificates that the environment names cannot be read.
    """
    import httpcore

    from ctxext.server.http import Address

    context = None
    file, folder = os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")
    if file or folder:
        try:
            if folder and not file and not Path(folder).is_dir():
                raise NotADirectoryError(0, "No such folder")
            context = ssl.create_default_context(cafile=file or None, capath=folder or None)
        except OSError as error:
            name = f'SSL_CERT_FILE="{file}"' if file else f'SSL_CERT_DIR="{folder}"'
            reason = error.strerror or str(error)
            raise CtxextError(
                f"{name} cannot be read: {reason}.", hint="Set it to a file of certificates in PEM, or unset it."
            ) from error
    elif parts.scheme == "https":
        context = httpcore.default_ssl_context()
    host = parts.hostname or ""
    if ":" not in host:
        host = host.encode("idna").decode("ascii")
    return Address(parts.scheme, host, parts.port or {"http": 80, "https": 443}[parts.scheme], context)
