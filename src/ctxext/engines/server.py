"""A running server with an OpenAI-compatible API: greedy completions with log-probabilities, in bounded time and memory.

Covers vLLM, SGLang, llama.cpp, LM Studio, Ollama, TGI, mlx_lm.server and LiteLLM, which differ in the type of a prompt,
in the name of the parameter for log-probabilities, and in the form of their answers.
"""

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ctxext.errors import CtxextError

MOST_BYTES = 2**24
"""Largest answer that is read, in bytes: a completion of some tokens with log-probabilities is much shorter."""

_TOP = 5
"""Alternatives per token: OpenAI's limit for completions, which all servers support."""
_RETRIED = (429, 503)
_MOST_WAIT = 30.0
_NAMES = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "llamacpp": "llama.cpp",
    "library": "Ollama",
    "organization_owner": "LM Studio",
}
"""Servers by `owned_by` of their list of models."""
_LENGTH_ERROR = re.compile(r"context|too long|exceed|maximum|max_model_len|n_ctx|max_total_tokens", re.IGNORECASE)
_NUMBER = re.compile(r"\d[\d,]*")


class ServerError(CtxextError):
    """A request that a server refuses or answers in an unreadable form.

    Attributes:
        status: HTTP status; 0 without an answer.
    """

    def __init__(self, message: str, *, hint: str = "", status: int = 0) -> None:
        super().__init__(message, hint=hint)
        self.status = status


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


class Server:
    """A client of one model on a server.

    Args:
        url: The base of the API, for example http://127.0.0.1:8000/v1.
        model: The model's name on the server; None uses its only one.
        api_key: A key, sent to this host only.
        timeout: Seconds without an answer after which a request fails.
        retries: Number of repetitions of a request that the server is too busy for (429, 503).
    """

    def __init__(
        self, url: str, *, model: str | None = None, api_key: str | None = None, timeout: float = 600, retries: int = 5
    ) -> None:
        import httpx

        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise CtxextError(f'"{url}" is not a URL.', hint=_URL_HINT) from error
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise CtxextError(f'"{parsed.copy_with(password=None)}" is not a URL.', hint=_URL_HINT)
        self.host, self.timeout, self.retries = f"{parsed.host}:{parsed.port or parsed.scheme}", timeout, retries
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(
            base_url=url.rstrip("/") + "/", headers=headers, timeout=timeout, follow_redirects=False, trust_env=False
        )
        self._is_chat = False
        self._takes_ids = True
        self._logprobs: Mapping[str, Any] = _LOGPROBS[0]
        entries = self._models()
        self.model = self._choose(model, list(entries))
        entry = entries.get(self.model, {})
        owner = str(entry.get("owned_by", "")).lower()
        self.length = _length_of(entry)
        self.name, self.version = _NAMES.get(owner, ""), ""
        self._identify()

    def _models(self) -> dict[str, Mapping[str, Any]]:
        """Return the server's list of models by name; empty if it has none."""
        try:
            models = self.get("models")
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
            if self.name not in ("", read[0]):
                continue
            try:
                answer = self.get(f"{root}/{path}")
            except ServerError:
                continue
            if isinstance(answer, Mapping) and isinstance(version := answer.get(read[1]), str):
                self.name, self.version = self.name or read[0], version[:40]
                settings = answer.get("default_generation_settings")
                if isinstance(settings, Mapping) and isinstance(settings.get("n_ctx"), int):
                    self.length = settings["n_ctx"]
                return

    @property
    def label(self) -> str:
        """Name and version of the server."""
        return f"{self.name or 'the server'} {self.version}".strip()

    def get(self, path: str) -> Any:
        """Return the JSON that a path contains."""
        return self._send("GET", path, None)

    def complete(self, prompt: Sequence[int], text: str, *, max_tokens: int, logprobs: bool = True) -> Completion:
        """Continue a prompt greedily.

        Args:
            prompt: Token ids, sent to servers that accept them.
            text: The same prompt as text, without the special tokens that the server adds.
            max_tokens: Number of tokens to generate.
            logprobs: Also request log-probabilities.
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
                return _completion(self._send("POST", self._path, content))
            except ServerError as error:
                if not self._adapt(error, len(prompt), logprobs=logprobs):
                    raise

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
        if error.status in (400, 404, 405, 422, 500, 501) and exceeded_length(error, length) is None:
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

    def _send(self, method: str, path: str, content: Mapping[str, Any] | None) -> Any:
        import httpx

        for attempt in range(self.retries + 1):
            try:
                with self._http.stream(method, path, json=content) as response:
                    body = self._body(response)
            except httpx.TimeoutException as error:
                message = f"The server at {self.host} did not answer within {self.timeout:g} seconds."
                raise ServerError(message, hint="Check that it is idle, or raise --timeout.") from error
            except httpx.HTTPError as error:
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                raise ServerError(f"The server at {self.host} cannot be reached: {reason}", hint=_URL_HINT) from error
            if response.status_code in _RETRIED and attempt < self.retries:
                time.sleep(_wait(response.headers.get("retry-after"), attempt))
                continue
            return self._parsed(response.status_code, path, body)
        raise AssertionError("unreachable")

    def _body(self, response: Any) -> bytes:
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
                raise ServerError(
                    f"The server at {self.host} did not finish its answer within {self.timeout:g} seconds.",
                    hint="Check that it is idle, or raise --timeout.",
                )
        return bytes(body)

    def _parsed(self, status: int, path: str, body: bytes) -> Any:
        try:
            content = json.loads(body)
        except (ValueError, RecursionError):
            content = None
        if status >= 400:
            raise ServerError(
                f"The server at {self.host} returned {status}: {_error_text(content, body)}",
                hint="Give the key with --api-key." if status in (401, 403) else "",
                status=status,
            )
        if not isinstance(content, (Mapping, list)):
            kind = "HTML" if body.lstrip()[:1] == b"<" else "an answer that is not JSON"
            raise ServerError(f"The server at {self.host} returned {kind} for {path}.", hint=_URL_HINT, status=status)
        return content

    def close(self) -> None:
        """Close the connections."""
        self._http.close()


_URL_HINT = "Give the base of its OpenAI-compatible API, for example --server http://127.0.0.1:8000/v1."
_LOGPROBS: tuple[Mapping[str, Any], ...] = (
    {"logprobs": _TOP, "return_tokens_as_token_ids": True},
    {"logprobs": _TOP},
    {"logprobs": True, "top_logprobs": _TOP},
)
"""The parameters for log-probabilities: vLLM's and OpenAI's for completions, and that of mlx_lm.server."""
_IDENTITIES = (
    ("version", ("vLLM", "version")),
    ("props", ("llama.cpp", "build_info")),
    ("get_server_info", ("SGLang", "version")),
    ("api/version", ("Ollama", "version")),
    ("info", ("TGI", "version")),
)
"""Paths at which servers report themselves: the name, and the key of the version."""


def exceeded_length(error: ServerError, length: int) -> int | None:
    """Return the limit of a server in tokens, if the error is its refusal of a prompt of `length` tokens; else None.

    0 stands for a refusal without a limit.
    """
    if error.status not in (400, 413, 422, 500) or not _LENGTH_ERROR.search(error.message):
        return None
    numbers = [int(number.replace(",", "")) for number in _NUMBER.findall(error.message.partition(": ")[2])]
    return max((number for number in numbers if 1 < number < length), default=0)


def _length_of(entry: Mapping[str, Any]) -> int | None:
    """Return the context length that a list of models reports: vLLM's and SGLang's key."""
    length = entry.get("max_model_len")
    return length if isinstance(length, int) else None


def _wait(text: str | None, attempt: int) -> float:
    try:
        seconds = float(text or "")
    except ValueError:
        seconds = 2.0**attempt
    return min(max(seconds, 0.1), _MOST_WAIT)


def _error_text(content: Any, body: bytes) -> str:
    error = (
        content.get("error", content.get("message", content.get("detail"))) if isinstance(content, Mapping) else None
    )
    text = error.get("message") if isinstance(error, Mapping) else error
    lines = str(text if text else body[:200].decode("utf-8", "replace")).split("\n")
    return " ".join(lines[0].split())[:300] or "no message"


def _completion(content: Any) -> Completion:
    """Read an answer in any of the servers' forms."""
    try:
        choice = content["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        tokens = tuple(_tokens(choice.get("logprobs")))
        usage = content.get("usage")
        count = usage.get("prompt_tokens") if isinstance(usage, Mapping) else None
        return Completion(str(text or ""), tokens, count if isinstance(count, int) else None)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ServerError(
            f"The server's answer is not a completion: {type(error).__name__} {error}", hint=_URL_HINT
        ) from error


def _tokens(logprobs: Any) -> list[Token]:
    if not logprobs:
        return []
    if logprobs.get("content"):
        return [
            Token(_key(entry), {_key(one): float(one["logprob"]) for one in [entry, *entry.get("top_logprobs", ())]})
            for entry in logprobs["content"]
        ]
    rows = logprobs.get("top_logprobs") or [{}] * len(logprobs["tokens"])
    found = zip(logprobs["tokens"], logprobs["token_logprobs"], rows, strict=True)
    return [
        Token(
            _id_or_text(token),
            {_id_or_text(key): float(value) for key, value in {**(row or {}), token: probability}.items()},
        )
        for token, probability, row in found
    ]


def _key(entry: Mapping[str, Any]) -> int | str:
    identity = entry.get("id")
    return identity if isinstance(identity, int) else _id_or_text(entry["token"])


def _id_or_text(token: Any) -> int | str:
    """Return the id of `token_id:5`, vLLM's form for ids; else the text."""
    if isinstance(token, int):
        return token
    prefix, _, number = str(token).partition("token_id:")
    return int(number) if not prefix and number.isdigit() else str(token)
