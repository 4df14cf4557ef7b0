"""The text around the messages of a conversation, from a chat template or as plain text."""

from collections.abc import Callable
from dataclasses import dataclass

from ctxext.errors import CtxextError

_ROLES = ("user", "user", "assistant", "user", "assistant", "user")
_END = "\n"
"""The end of the first message."""
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

    def read_messages(self, text: str) -> tuple[dict[str, str], ...]:
        """Return the messages of a rendered conversation, in which no message contains the text between messages."""
        text = text.removeprefix(self.begin).removesuffix(self.end)
        # A template that refuses two messages of the user in a row has both in one message.
        begin = text.split(self.first_request, 1) if self.first_request.strip() else ["", text]
        rest = [part for turn in begin[1].split(self.request) for part in turn.split(self.answer, 1)]
        messages = [("user", f"{begin[0].removesuffix(_END)}{_END}")] * bool(begin[0])
        messages += [(("user", "assistant")[number % 2], part) for number, part in enumerate(rest)]
        return tuple({"role": role, "content": content} for role, content in messages)


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


def read_turn_layout(render: Callable[[list[dict[str, str]]], str]) -> TurnLayout:
    """Read the layout of a chat template from a short conversation.

    Templates that refuse two messages of the user in a row get both as one message.

    Args:
        render: Renders a conversation up to the answer to generate.

    Raises:
        CtxextError: The template fails, omits a message, or changes its text between turns.
    """
    first, *others = ({"role": role, "content": mark} for role, mark in zip(_ROLES, _MARKS, strict=True))
    try:
        text = render([{**first, "content": f"{_MARKS[0]}{_END}"}, *others])
    except CtxextError:
        text = render([{**first, "content": f"{_MARKS[0]}\n\n{_MARKS[1]}"}, *others[1:]])
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


def _layout_error(reason: str) -> CtxextError:
    return CtxextError(f"The tokenizer's chat template {reason}.", hint="Evaluate with --no-chat-template.")
