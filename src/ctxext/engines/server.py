"""A running server with an OpenAI-compatible API: greedy completions in bounded time and memory.

Covers vLLM, SGLang, llama.cpp, LM Studio, Ollama, TGI, mlx_lm.server and LiteLLM, which differ in the type of a prompt,
in the name of the parameter for log-probabilities, and in the form of their answers.
"""

import dataclasses
import functools
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ctxext.errors import CtxextError
from ctxext.options import check_numbers, option, option_name, with_documented_options
from ctxext.redaction import remember

MOST_BYTES = 2**24
"""Largest answer that is read, in bytes: a completion of some tokens with log-probabilities is much shorter."""

_TOP = 5
"""Alternatives per token: OpenAI's limit for completions, which all servers support."""
_RETRIED = (429, 503)
_MOST_WAIT = 30.0
_SECONDS_OF_IDENTITY = 10.0
_PANEL = "Server"
_KEY_VARIABLE = "CTXEXT_API_KEY"
_NAMES = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "llamacpp": "llama.cpp",
    "library": "Ollama",
    "organization_owner": "LM Studio",
}
"""Servers by `owned_by` of their list of models."""
_LENGTH_ERROR = re.compile(r"context|too long|longer than|exceed|maximum|max_\w*tokens|must be <=", re.IGNORECASE)
_LIMIT = re.compile(r"(?:context|maximum|limit|<=)[^\d]{0,40}(\d[\d,]*)", re.IGNORECASE)
"""The limit in a refusal of a long prompt; the other numbers are the length of the prompt and of its parts."""


class ServerError(CtxextError):
    """A request that a server refuses or answers in an unreadable form.

    Attributes:
        status: HTTP status; 0 without an answer.
    """

    def __init__(self, message: str, *, hint: str = "", status: int = 0) -> None:
        super().__init__(message, hint=hint)
        self.status = status


class ServerTimeout(ServerError):
    """A request without a whole answer within the time limit."""


@dataclass(frozen=True)
class Token:
    """A generated token.

    Attributes:
        key: Its id, or its text if the server returns no id.
        alternatives: Log-probabilities in nats by id or text, of the most probable tokens.
    """

    key: int | str
    alternatives: Mapping[int | str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Completion:
    """The answer to a prompt.

    Attributes:
        text: The generated text.
        tokens: The generated tokens; empty without log-probabilities.
        prompt_tokens: The number of prompt tokens that the server reports; None if it reports none.
    """

    text: str
    tokens: tuple[Token, ...] = ()
    prompt_tokens: int | None = None


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
    num_concurrent: int = option(1, help="Number of concurrent requests.", panel=_PANEL, min=1)
    max_retries: int = option(3, help="Repetitions of a request that a busy server refuses.", panel=_PANEL, min=0)
    timeout: float = option(300, help="Seconds to wait for an answer.", panel=_PANEL, min=0.1)

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.server is None:
            for each in dataclasses.fields(self):
                if getattr(self, each.name) != each.default:
                    raise CtxextError(f"{option_name(each.name)} requires a server.", hint="Add --server URL.")

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
        url: The base of the API, for example http://127.0.0.1:8000/v1.
        model: The model's name on the server; None uses its only one.
        api_key: A key, sent to this host only.
        timeout: Seconds without an answer after which a request fails.
        max_retries: Number of repetitions of a request that the server is too busy for (429, 503).

    Attributes:
        host: Host and port, for errors.
        model: The model's name on the server; empty for the server's default.
        name: Name of the server, for example "vLLM"; empty if it is unknown.
        version: Version of the server; empty if it reports none.
        length: The server's limit in tokens; None if it reports none.

    Raises:
        CtxextError: The URL is invalid, the server cannot be reached, or it has no such model.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout: float = 300,
        max_retries: int = 3,
    ) -> None:
        import httpx

        remember(api_key)
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise CtxextError(f'"{url}" is not a URL.', hint=_URL_HINT) from error
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise CtxextError(f'"{url}" is not a URL.', hint=_URL_HINT)
        remember(parsed.password)
        self.host = f"{parsed.host}:{parsed.port or {'http': 80, 'https': 443}[parsed.scheme]}"
        self.timeout, self.max_retries = timeout, max_retries
        base = str(parsed).rstrip("/").removesuffix("/completions").removesuffix("/chat")
        self._http = httpx.Client(
            base_url=f"{base}/v1/" if parsed.path == "/" else f"{base}/",
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=timeout,
            follow_redirects=False,
            # A proxy from the environment would read prompts and keys, but certificates from there are used.
            trust_env=False,
            verify=httpx.create_ssl_context(),
        )
        self._is_chat = False
        self._takes_ids = True
        self._is_settled = False
        self._logprobs: Mapping[str, Any] = _LOGPROBS[0]
        entries = self._list_models()
        self.model = self._choose(model, list(entries))
        entry = entries.get(self.model, {})
        owner = str(entry.get("owned_by", "")).lower()
        self.length = _read_length(entry)
        self.name, self.version = _NAMES.get(owner, ""), ""
        self._identify()

    def _list_models(self) -> dict[str, Mapping[str, Any]]:
        """Return the server's list of models by name; empty if it has none."""
        try:
            models = self._send("GET", "models", None)
        except ServerError as error:
            if error.status not in (200, 404, 405, 500, 501):
                raise
            return {}  # mlx_lm.server has no list without a connection to the Hub.
        entries = models.get("data") if isinstance(models, Mapping) else None
        return {str(entry["id"]): entry for entry in entries or () if isinstance(entry, Mapping) and "id" in entry}

    def _choose(self, model: str | None, names: Sequence[str]) -> str:
        """Return the name of the model, empty for the server's default."""
        if model is not None:
            if names and model not in names:
                raise CtxextError(f'The server has no model "{model}".', hint=f"Its models: {', '.join(names[:5])}.")
            return model
        if len(names) > 1:
            hint = f"Name one with --model: {', '.join(names[:5])}."
            raise CtxextError(f"The server at {self.host} has {len(names)} models.", hint=hint)
        return names[0] if names else ""

    def _identify(self) -> None:
        """Read the name and version of the server where it reports them."""
        root = str(self._http.base_url).rstrip("/").removesuffix("/v1")
        for path, read in _IDENTITIES:
            # Servers of other names have some of these paths too.
            if self.name != read[0] and (self.name or path in _COMMON):
                continue
            try:
                answer = self._send("GET", f"{root}/{path}", None, is_identity=True)
            except ServerError:
                continue
            if isinstance(answer, Mapping) and isinstance(version := answer.get(read[1]), str):
                self.name, self.version = read[0], version[:40]
                settings = answer.get("default_generation_settings")
                if isinstance(settings, Mapping) and isinstance(settings.get("n_ctx"), int):
                    self.length = settings["n_ctx"]
                return

    @property
    def label(self) -> str:
        """Name and version of the server."""
        return f"{self.name or 'an unknown server'} {self.version}".strip()

    def complete(self, prompt: Sequence[int], text: str, *, max_tokens: int, logprobs: bool = True) -> Completion:
        """Continue a prompt greedily.

        Args:
            prompt: Token ids, sent to servers that accept them.
            text: The same prompt as text, without the special tokens that the server adds.
            max_tokens: Number of tokens to generate.
            logprobs: Also request log-probabilities.

        Raises:
            ServerError: The server refuses every form of the request, or its answer is unreadable.
        """
        while True:
            content: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0, "seed": 0, "stream": False}
            content |= {"model": self.model} if self.model else {}
            if self._is_chat:
                content["messages"] = [{"role": "user", "content": text}]
                content |= {"logprobs": True, "top_logprobs": _TOP} if logprobs and self._logprobs else {}
            else:
                content["prompt"] = list(prompt) if self._takes_ids else text
                content |= self._logprobs if logprobs else {}
            try:
                completion = _read_completion(self._send("POST", self._path, content))
            except ServerError as error:
                # After the first success, an error has another reason than the form of the request.
                if self._is_settled or not self._adapt(error, len(prompt), logprobs=logprobs):
                    raise
            else:
                self._is_settled = True
                return completion

    @property
    def _path(self) -> str:
        return "chat/completions" if self._is_chat else "completions"

    @property
    def takes_ids(self) -> bool:
        """Whether prompts are sent as token ids, so that the server's tokenizer has no influence."""
        return self._takes_ids and not self._is_chat

    @property
    def is_chat(self) -> bool:
        """Whether the server has chat completions only."""
        return self._is_chat

    def _adapt(self, error: ServerError, length: int, *, logprobs: bool) -> bool:
        """Choose the next form of a request after a refusal; return whether there is one."""
        if error.status in (400, 404, 405, 422, 500, 501) and find_limit(error, length) is None:
            if logprobs and "logprob" in error.message.lower() and self._logprobs:
                self._logprobs = next(iter(_LOGPROBS[_LOGPROBS.index(self._logprobs) + 1 :]), {})
                return True
            if self._takes_ids and not self._is_chat:
                self._takes_ids = False
                return True
            if not self._is_chat and error.status in (404, 405, 501):
                self._is_chat, self._logprobs = True, _LOGPROBS[0]
                return True
        return False

    def _send(self, method: str, path: str, content: Mapping[str, Any] | None, *, is_identity: bool = False) -> Any:
        """Send a request, and return the JSON of the answer.

        Args:
            method: GET or POST.
            path: A path below the base of the API, or a whole URL on the same host.
            content: The JSON to send.
            is_identity: Whether the request may fail, so that it is neither repeated nor waited for.
        """
        import httpx

        max_retries = 0 if is_identity else self.max_retries
        timeout = min(self.timeout, _SECONDS_OF_IDENTITY) if is_identity else self.timeout
        for attempt in range(max_retries + 1):
            try:
                with self._http.stream(method, path, json=content, timeout=timeout) as response:
                    body = self._read_body(response)
            except httpx.TimeoutException as error:
                message = f"The server at {self.host} did not answer within {self.timeout:g} seconds."
                raise ServerTimeout(message, hint="Check that it is idle, or raise --timeout.") from error
            except httpx.HTTPError as error:
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                raise ServerError(f"The server at {self.host} cannot be reached: {reason}", hint=_URL_HINT) from error
            if response.status_code in _RETRIED and attempt < max_retries:
                time.sleep(_wait(response.headers.get("retry-after"), attempt))
                continue
            return self._parse(response.status_code, path, body)
        raise AssertionError("unreachable")

    def _read_body(self, response: Any) -> bytes:
        """Read the body of an answer, within limits of time and size."""
        if response.is_redirect:
            raise ServerError(
                f"The server at {self.host} redirects to another address, which gets neither prompts nor the key.",
                hint="Give the final address with --server.",
                status=response.status_code,
            )
        began, body = time.monotonic(), bytearray()
        for piece in response.iter_bytes():
            body += piece
            if len(body) > MOST_BYTES:
                raise ServerError(f"The server at {self.host} returned more than {MOST_BYTES >> 20} MB.")
            if time.monotonic() - began > self.timeout:
                raise ServerTimeout(
                    f"The server at {self.host} did not finish its answer within {self.timeout:g} seconds.",
                    hint="Check that it is idle, or raise --timeout.",
                )
        return bytes(body)

    def _parse(self, status: int, path: str, body: bytes) -> Any:
        """Return the JSON of a body; raise if it is not JSON or reports an error."""
        try:
            content = json.loads(body)
        except (ValueError, RecursionError):
            content = None
        if status >= 400:
            raise ServerError(
                f"The server at {self.host} returned {status}: {_read_error(content, body)}",
                hint=_HINTS.get(status, ""),
                status=status,
            )
        if not isinstance(content, (Mapping, list)):
            kind = "HTML" if body.lstrip()[:1] == b"<" else "an answer that is not JSON"
            raise ServerError(f"The server at {self.host} returned {kind}.", hint=_URL_HINT, status=status)
        return content

    def close(self) -> None:
        """Close the connections."""
        self._http.close()


_URL_HINT = "Give the base of its OpenAI-compatible API, for example --server http://127.0.0.1:8000/v1."
_KEY_HINT = f"Give the key with --api-key or {_KEY_VARIABLE}."
_HINTS = {401: _KEY_HINT, 403: _KEY_HINT, 404: _URL_HINT}
"""Hints by status."""
_LOGPROBS: tuple[Mapping[str, Any], ...] = (
    {"logprobs": _TOP, "return_tokens_as_token_ids": True},
    {"logprobs": _TOP},
    {"logprobs": True, "top_logprobs": _TOP},
)
"""The parameters for log-probabilities: vLLM's and OpenAI's for completions, and that of mlx_lm.server."""
_IDENTITIES = (
    ("props", ("llama.cpp", "build_info")),
    ("get_server_info", ("SGLang", "version")),
    ("api/version", ("Ollama", "version")),
    ("version", ("vLLM", "version")),
)
"""Paths that report a server: its name, and the key of its version."""
_COMMON = ("version",)
"""Paths that other servers have too, read only if the list of models names the server."""


def find_limit(error: ServerError, length: int) -> int | None:
    """Return the limit of a server in tokens, if the error is its refusal of a prompt of `length` tokens; else None.

    0 stands for a refusal without a limit.
    """
    if error.status not in (400, 413, 422, 500) or not _LENGTH_ERROR.search(error.message):
        return None
    numbers = [int(number.replace(",", "")) for number in _LIMIT.findall(error.message.partition(": ")[2])]
    return next((number for number in numbers if 1 < number < length), 0)


def _read_length(entry: Mapping[str, Any]) -> int | None:
    """Return the context length that a list of models reports: vLLM's and SGLang's key."""
    length = entry.get("max_model_len")
    return length if isinstance(length, int) else None


def _wait(text: str | None, attempt: int) -> float:
    """Return the seconds to wait before a retry: from the Retry-After header, else doubled with each attempt."""
    try:
        seconds = float(text or "")
    except ValueError:
        seconds = 2.0**attempt
    return min(max(seconds, 0.1), _MOST_WAIT)


def _read_error(content: Any, body: bytes) -> str:
    """Return the message of an error in one line."""
    error = (
        content.get("error", content.get("message", content.get("detail"))) if isinstance(content, Mapping) else None
    )
    text = error.get("message") if isinstance(error, Mapping) else error
    lines = str(text if text else body[:200].decode("utf-8", "replace")).split("\n")
    return " ".join(lines[0].split())[:300] or "no message"


def _read_completion(content: Any) -> Completion:
    """Read an answer in any of the servers' forms."""
    try:
        choice = content["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        tokens = tuple(_read_tokens(choice.get("logprobs")))
        usage = content.get("usage")
        count = usage.get("prompt_tokens") if isinstance(usage, Mapping) else None
        return Completion(str(text or ""), tokens, count if isinstance(count, int) else None)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ServerError(
            f"The server's answer is not a completion: {type(error).__name__} {error}", hint=_URL_HINT
        ) from error


def _read_tokens(logprobs: Any) -> list[Token]:
    """Read the generated tokens, in the form of chat completions or in that of completions."""
    if not logprobs:
        return []
    if logprobs.get("content"):
        return [
            Token(
                _get_key(entry),
                {_get_key(one): float(one["logprob"]) for one in [entry, *entry.get("top_logprobs", ())]},
            )
            for entry in logprobs["content"]
        ]
    rows = logprobs.get("top_logprobs") or [{}] * len(logprobs["tokens"])
    found = zip(logprobs["tokens"], logprobs["token_logprobs"], rows, strict=True)
    return [
        Token(
            _parse_token(token),
            {_parse_token(key): float(value) for key, value in {**(row or {}), token: probability}.items()},
        )
        for token, probability, row in found
    ]


def _get_key(entry: Mapping[str, Any]) -> int | str:
    """Return the id of a token if the server reports it (llama.cpp), else its text."""
    identity = entry.get("id")
    return identity if isinstance(identity, int) else _parse_token(entry["token"])


def _parse_token(token: Any) -> int | str:
    """Return the id of `token_id:5`, vLLM's form for ids; else the text."""
    if isinstance(token, int):
        return token
    prefix, _, number = str(token).partition("token_id:")
    return int(number) if not prefix and number.isdigit() else str(token)
