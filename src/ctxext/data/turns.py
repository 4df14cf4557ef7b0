"""The text around the messages of a conversation, from a chat template or as plain text."""

from dataclasses import dataclass
from typing import Any

from ctxext.data.chat_template import render_chat
from ctxext.errors import CtxextError

_ROLES = ("user", "user", "assistant", "user", "assistant", "user")
_MARKS = tuple(f"\x00{number}\x00" for number in range(len(_ROLES)))


@dataclass(frozen=True)
class TurnLayout:
    """The text around the messages of a conversation: two messages of the user, then an answer and a request in turn.

    Attributes:
        begin: The text before the first message.
        first_request: The text between the first message and the first request.
        answer: The text between a request and its answer.
        request: The text between an answer and the next request.
        end: The text between the last request and the answer to generate.
        space: The beginning of each answer that is not in `end`; empty or a space.
        next_turn: The text that ends a generated answer; empty if the model's end token does.
    """

    begin: str
    first_request: str
    answer: str
    request: str
    end: str
    space: str = ""
    next_turn: str = ""


PLAIN_TURNS = TurnLayout(
    begin="",
    first_request="\nUser: ",
    answer="\n\nAssistant: ",
    request="\n\nUser: ",
    end="\n\nAssistant:",
    space=" ",
    next_turn="\n\nUser:",
)
"""The layout for tokenizers without a chat template."""


def read_turn_layout(tokenizer: Any) -> TurnLayout:
    """Read the layout of a tokenizer's chat template from a short conversation.

    Templates that refuse two messages of the user in a row get both as one message.

    Raises:
        CtxextError: The template fails, omits a message, or changes its text between turns.
    """
    first, *others = ({"role": role, "content": mark} for role, mark in zip(_ROLES, _MARKS, strict=True))
    try:
        text = _render(tokenizer, [{**first, "content": f"{_MARKS[0]}\n"}, *others])
    except CtxextError:
        text = _render(tokenizer, [{**first, "content": f"{_MARKS[0]}\n\n{_MARKS[1]}"}, *others[1:]])
    pieces = []
    for mark in _MARKS:
        piece, found, text = text.partition(mark)
        if not found:
            raise _layout_error("omits a message")
        pieces.append(piece)
    begin, first_request, answer, request, *repeated = pieces
    if repeated != [answer, request]:
        raise _layout_error("changes its text between turns")
    return TurnLayout(begin, first_request, answer, request, end=text)


def _render(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    return render_chat(tokenizer, messages, add_generation_prompt=True, enable_thinking=False)


def _layout_error(reason: str) -> CtxextError:
    return CtxextError(f"The tokenizer's chat template {reason}.", hint="Evaluate with --no-chat-template.")
