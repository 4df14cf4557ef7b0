"""What a server accepts: the form of requests, chosen by the first completion.

Servers differ in the type of a prompt, in the name of the parameter for log-probabilities, and in the arguments that
they refuse.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ctxext.server.answers import Completion, ServerError, find_limit, is_of_length

_TOP = 5
"""Alternatives per token: OpenAI's limit for completions, which all servers support."""
_ADAPTABLE = (400, 404, 405, 415, 422, 500, 501)
"""Statuses of requests that may succeed in another form."""
NO_PATH = (404, 405, 501)
"""Statuses of a path that a server does not have."""


_LOGPROBS: tuple[Mapping[str, Any], ...] = (
    {"logprobs": _TOP, "return_tokens_as_token_ids": True},
    {"logprobs": _TOP},
    {"logprobs": True, "top_logprobs": _TOP},
    {},
)
"""The parameters for log-probabilities: vLLM's and OpenAI's for completions, and that of mlx_lm.server."""
_CHAT_LOGPROBS: tuple[Mapping[str, Any], ...] = (
    {"logprobs": True, "top_logprobs": _TOP, "return_tokens_as_token_ids": True},
    {"logprobs": True, "top_logprobs": _TOP},
    {"logprobs": True},
    {},
)
_VARIABLES = "chat_template_kwargs"
"""The argument of vLLM, SGLang, llama.cpp and mlx_lm.server for variables of the chat template."""
_EFFORT = "reasoning_effort"
"""The argument of Ollama and LM Studio that switches thoughts; they ignore variables."""
_SPECIAL = "skip_special_tokens"
"""The argument of vLLM and SGLang to keep special tokens in a text."""
_LENGTH_NAMES = ("max_tokens", "max_completion_tokens", "")


@dataclass(frozen=True)
class Request:
    """A prompt to continue greedily, in all the forms in which it can be sent.

    Attributes:
        ids: Token ids, sent to servers that accept them.
        text: The same prompt as text, without the special tokens that the server adds.
        max_tokens: Number of tokens to generate.
        logprobs: Whether log-probabilities are requested.
        messages: The messages for chat completions; empty for one message with the text.
        variables: Variables of the chat template.
        effort: Effort of reasoning; empty for the default.
        keeps_special: Whether the answer's text must contain special tokens, for completions.
    """

    ids: Sequence[int]
    text: str
    max_tokens: int
    logprobs: bool = False
    messages: Sequence[Mapping[str, str]] = ()
    variables: Mapping[str, bool] = field(default_factory=dict)
    effort: str = ""
    keeps_special: bool = False


@dataclass(frozen=True)
class Form:
    """The form of a request, from the best one that this client knows down to one that every server accepts.

    Attributes:
        is_chat: Whether it is a chat completion.
        takes_ids: Whether the prompt is sent as token ids.
        logprobs: Place in the forms of the parameters for log-probabilities.
        length: Place in the names of the parameter for the number of tokens.
        omitted: Optional arguments that the server refused.
    """

    is_chat: bool = False
    takes_ids: bool = True
    logprobs: int = 0
    length: int = 0
    omitted: frozenset[str] = frozenset()

    @property
    def logprobs_forms(self) -> tuple[Mapping[str, Any], ...]:
        """The parameters for log-probabilities in its kind of request, the most precise first."""
        return _CHAT_LOGPROBS if self.is_chat else _LOGPROBS

    def build(self, request: Request) -> dict[str, Any]:
        """Return the content of a request, without the model."""
        content: dict[str, Any] = {
            _LENGTH_NAMES[self.length]: request.max_tokens,
            **{"temperature": 0, "seed": 0, "stream": False},
            **self._list_more(request),
        }
        content = {name: value for name, value in content.items() if name and name not in self.omitted}
        if self.is_chat:
            content["messages"] = [*request.messages] or [{"role": "user", "content": request.text}]
        else:
            content["prompt"] = list(request.ids) if self.takes_ids else request.text
        return {**content, **(self.logprobs_forms[self.logprobs] if request.logprobs else {})}

    def _list_more(self, request: Request) -> dict[str, Any]:
        """Return the arguments that only some requests have, and only some servers accept."""
        more: dict[str, Any] = {_VARIABLES: dict(request.variables), _EFFORT: request.effort}
        if not self.is_chat:
            more = {_SPECIAL: False} if request.keeps_special else {}
        return {name: value for name, value in more.items() if value not in ({}, "")}

    def drop(self, name: str) -> "Form":
        """Return the next form without an argument."""
        if name == "prompt":
            return replace(self, takes_ids=False)
        if name == "length":
            return replace(self, length=self.length + 1)
        if name == "logprobs":
            return replace(self, logprobs=self.logprobs + 1)
        return replace(self, omitted=self.omitted | {name})

    def find_refused(self, words: str, request: Request) -> str | None:
        """Return the argument of this form that the words of a refusal name; None if they name none."""
        words = words.lower()
        if request.logprobs and self.logprobs_forms[self.logprobs] and ("logprob" in words or "token_ids" in words):
            return "logprobs"
        for name in ("temperature", "seed", "stream", *self._list_more(request)):
            if name not in self.omitted and re.search(rf"\b{name}\b", words):
                return name
        if (name := _LENGTH_NAMES[self.length]) and re.search(rf"\b{name}\b", words) and not is_of_length(words):
            return "length"
        if self.takes_ids and not self.is_chat and re.search(r"\bprompt\b", words) and not is_of_length(words):
            return "prompt"
        return None

    def find_weaker(self, status: int, request: Request) -> "Form | None":
        """Return the next form to try after a refusal that names no argument; None after the last one."""
        if status in NO_PATH:
            return None if self.is_chat else CHAT
        last = len(self.logprobs_forms) - 1
        if request.logprobs and self.logprobs == 0:
            return self.drop("logprobs")
        for name in ("seed", "stream", *self._list_more(request)):
            if name not in self.omitted:
                return self.drop(name)
        if self.takes_ids and not self.is_chat:
            return self.drop("prompt")
        if request.logprobs and self.logprobs < last:
            return replace(self, logprobs=last)
        if "temperature" not in self.omitted:
            return self.drop("temperature")
        if self.length == 0:
            return self.drop("length")
        return None if self.is_chat or status >= 500 else CHAT


CHAT = Form(is_chat=True, takes_ids=False)
"""The best form of chat completions."""


class Negotiation:
    """The search for the best form of requests that a server accepts, and its result.

    Attributes:
        form: The form of the requests; after the first completion it no longer changes.
    """

    def __init__(self) -> None:
        self.begin(Form())

    def begin(self, form: Form) -> None:
        """Begin the search with a form."""
        self.form, self._is_settled = form, False

    def complete(self, ask: Callable[[Form], Completion], request: Request) -> Completion:
        """Return the answer to a request, the first one in the best form that the server accepts.

        An argument that the server refuses by name is omitted. After each refusal that names none, one more argument
        is omitted.

        Args:
            ask: Sends the request in a form.
            request: The request.

        Raises:
            ServerError: The server refuses every form of the request, or its answer is unreadable.
        """
        if self._is_settled:  # An error has another reason than the form of the request.
            return ask(self.form)
        form, unnamed = self.form, list[tuple[Form, ServerError]]()
        while True:
            try:
                completion = ask(form)
                break
            except ServerError as error:
                if error.status not in _ADAPTABLE:
                    raise (unnamed[0][1] if unnamed else error) from None
                # A failure of the server (500) or a missing path refuses no argument, even if its message names one.
                is_refusal = error.status < 500 and error.status not in NO_PATH
                if is_refusal and (name := form.find_refused(error.words, request)):
                    form = form.drop(name)
                    continue
                if find_limit(error, len(request.ids)) is not None:
                    raise
                unnamed.append((form, error))
                if (weaker := form.find_weaker(error.status, request)) is None:
                    raise unnamed[0][1] from None
                form = weaker
        if unnamed and unnamed[0][1].status >= 500:
            # A failure of the server may be temporary, so the first failed form is tried again.
            try:
                completion = ask(unnamed[0][0])
            except ServerError:
                pass
            else:
                form = unnamed[0][0]
        self.form, self._is_settled = form, True
        return completion
