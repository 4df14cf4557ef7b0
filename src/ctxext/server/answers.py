"""The answers of a server in any of the servers' forms, and its refusals."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from ctxext.errors import CtxextError

_MOST_CHARACTERS = 512
"""Longest text of a token; the longest tokens of known vocabularies are runs of 128 spaces or so."""

_MOST_ALTERNATIVES = 32
_LEAST_READ = 0.95
"""Share of a text that a server must report to have read; its tokenizer may return slightly fewer tokens."""

_FEWER = 2
"""Tokens that a server may count less than it was sent: begin tokens."""

_LENGTH_ERROR = re.compile(
    r"context|too (?:long|large|big|many)|longer than|greater than (?:the |its )?max|less than \d+ tokens|exceed"
    r"|maximum|max_\w*(?:tokens|len)|must be <=|n_ctx|token limit|input length|reduce (?:the|your) ",
    re.IGNORECASE,
)
_ARGUMENT_ERROR = re.compile(
    r"logprob|(?:un(?:supported|recognized|known|expected)|not (?:support(?:ed)?|permitted|allowed|recognized)|extra)\b"
    r".{0,60}\b(?:argument|parameter|field|input|value|key|property|max_\w*tokens)"
    r"|\bmax_\w*tokens\W{1,4}(?:is |are )?(?:un(?:supported|recognized|known|expected)|not )"
    r"|max_completion_tokens. instead",
    re.IGNORECASE,
)
"""The refusal of an argument, which may name a maximum of it."""

_NUMBER = r"(\d[\d,]*)(?!\d|[.,]\d)"
_LIMITS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"n_ctx\W{{0,4}}{_NUMBER}",
        rf"(?:max_seq_len|max_model_len|context|maximum|limit|less than|window|<=)(?:(?! by )[^\d]){{0,40}}{_NUMBER}",
        rf"{_NUMBER} (?:tokens? )?(?:maximum|max|context)\b",
        rf"\[\d+, {_NUMBER}\]",
        rf"exceed(?:s|ed|ing)?\b(?:(?! by )[^\d]){{0,40}}{_NUMBER}",
    )
)
"""The limit in a refusal of a long prompt; the other numbers are the length of the prompt and of its parts."""


class ServerError(CtxextError):
    """A request that a server refuses or answers in an unreadable form.

    Attributes:
        status: HTTP status; 0 without an answer.
        words: The server's own words, longer than in the message; empty if there are none.
        limit: The limit in tokens in a separate field of the error; 0 if it has none.
        retry_after: The Retry-After header of the answer; None if it has none.
    """

    retry_after: str | None = None

    def __init__(self, message: str, *, hint: str = "", status: int = 0, words: str = "", limit: int = 0) -> None:
        super().__init__(message, hint=hint)
        self.status, self.words, self.limit = status, words, limit


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
        cached_tokens: The number of prompt tokens that the server reports to have had in its cache. Most servers also
            count them as prompt tokens, some do not.
        is_empty: Whether the server generated nothing at all. A model may end its answer at once; the end token is one.
        has_thoughts: Whether the server returned thoughts separately, which are not in the text.
        is_cut: Whether the answer ended at the maximum number of tokens.
    """

    text: str
    tokens: tuple[Token, ...] = ()
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    is_empty: bool = False
    has_thoughts: bool = False
    is_cut: bool = False


def read_completion(content: Mapping[str, Any], max_tokens: int) -> Completion:
    """Read a valid answer in any of the servers' forms, up to the number of tokens that was requested."""
    choice, usage, timings = content["choices"][0], content.get("usage") or {}, content.get("timings") or {}
    message = choice.get("message")
    text = ((message.get("content") if message is not None else choice.get("text")) or "")[
        : max_tokens * _MOST_CHARACTERS
    ]
    tokens = tuple(islice(_read_tokens(choice.get("logprobs") or {}), max_tokens))
    read = _choose_first(usage.get("prompt_tokens"), usage.get("input_tokens"), content.get("prompt_eval_count"))
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    created = usage.get("cache_creation_input_tokens") or 0
    cached = _choose_first(cached, usage.get("cache_read_input_tokens"), timings.get("cache_n")) or 0
    written = _choose_first(
        usage.get("completion_tokens"),
        usage.get("output_tokens"),
        content.get("eval_count"),
        timings.get("predicted_n"),
    )
    is_ended = written is None and choice.get("finish_reason") in ("stop", "eos", "eos_token")
    has_thoughts = any((message or {}).get(key) for key in ("reasoning_content", "reasoning"))
    is_empty = not text and not tokens and not written and not is_ended and not has_thoughts
    read = _choose_first(read, timings.get("prompt_n"))
    reason = choice.get("finish_reason")
    is_cut = reason == "length" or (reason is None and written is not None and written >= max_tokens)
    return Completion(text, tokens, read, cached + created, is_empty, has_thoughts, is_cut)


def _choose_first(*values: int | None) -> int | None:
    """Return the first value that is there."""
    return next((value for value in values if value is not None), None)


def _read_tokens(logprobs: Mapping[str, Any]) -> Iterator[Token]:
    """Yield the generated tokens, in the form of chat completions or in that of completions."""
    for entry in logprobs.get("content") or ():
        pairs = [
            (_get_key(one), one.get("logprob"))
            for one in [entry, *islice(entry.get("top_logprobs") or (), _MOST_ALTERNATIVES)]
        ]
        yield Token(pairs[0][0], _keep_known(pairs))
    if logprobs.get("content"):
        return
    tokens = logprobs.get("tokens") or ()
    rows = logprobs.get("top_logprobs") or [None] * len(tokens)
    probabilities = logprobs.get("token_logprobs") or [None] * len(tokens)
    has_ids = all(isinstance(token, int) for token in tokens)
    for token, probability, row in zip(tokens, probabilities, rows, strict=True):
        others = [
            (int(key) if has_ids and key.isdecimal() and key.isascii() and len(key) < 10 else _parse_token(key), value)
            for key, value in islice((row or {}).items(), _MOST_ALTERNATIVES)
        ]
        yield Token(_parse_token(token), _keep_known([*others, (_parse_token(token), probability)]))


def _keep_known(pairs: list[tuple[int | str, float | None]]) -> dict[int | str, float]:
    """Return the log-probabilities without missing ones."""
    return {key: float(value) for key, value in pairs if value is not None}


def _get_key(entry: Mapping[str, Any]) -> int | str:
    """Return the id of a token if the server reports it (llama.cpp), else its text."""
    identity = entry.get("id")
    return identity if identity is not None else _parse_token(entry.get("token") or "")


def _parse_token(token: int | str) -> int | str:
    """Return the id of `token_id:5`, vLLM's form for ids; else the text."""
    if isinstance(token, int):
        return token
    prefix, _, number = token.partition("token_id:")
    is_id = not prefix and number.isdecimal() and number.isascii() and len(number) < 10
    return int(number) if is_id else token[:_MOST_CHARACTERS]


def find_gap(content: Mapping[str, Any]) -> str | None:
    """Return what a valid answer lacks to be a completion; None if it lacks nothing."""
    choice = content["choices"][0]
    if "text" not in choice and choice.get("message") is None:
        return "It has no text"
    logprobs = choice.get("logprobs") or {}
    rows = (logprobs.get("top_logprobs"), logprobs.get("token_logprobs"))
    if any(row and len(row) != len(logprobs.get("tokens") or ()) for row in rows):
        return "It has log-probabilities of another number of tokens"
    return None


def count_read(completion: Completion, sent: int, *, is_text: bool) -> int | None:
    """Return the number of prompt tokens that a server read; None if it reports none.

    Args:
        completion: Its answer.
        sent: The number of tokens of the prompt.
        is_text: Whether it was sent as text.
    """
    count, cached = completion.prompt_tokens, completion.cached_tokens
    if count is None or not is_cut(count, sent, is_text=is_text):
        return count
    # A server may count cached tokens separately. If it counts them twice, the sum is right only by chance.
    total = count + cached
    return total if not is_cut(total, sent, is_text=is_text) and total <= sent / _LEAST_READ else count


def is_cut(count: int, sent: int, *, is_text: bool) -> bool:
    """Return whether a server that counts so many tokens of a prompt did not read all of it."""
    return count < (sent * _LEAST_READ if is_text else sent) - _FEWER


def find_limit(error: ServerError, length: int) -> int | None:
    """Return the limit of a server in tokens, if the error is its refusal of a prompt of `length` tokens; else None.

    0 stands for a refusal without a limit.
    """
    words = error.words or error.message.partition(": ")[2]
    if error.status not in (400, 413, 422, 500) or (
        error.status != 413 and not error.limit and not is_of_length(words)
    ):
        return None
    numbers = [error.limit, *(int(each.replace(",", "")) for limit in _LIMITS for each in limit.findall(words))]
    return next((number for number in numbers if 1 < number < length), 0)


def is_of_length(words: str) -> bool:
    """Return whether the words of an error are about the length of a prompt."""
    return bool(_LENGTH_ERROR.search(words)) and not _ARGUMENT_ERROR.search(words)
