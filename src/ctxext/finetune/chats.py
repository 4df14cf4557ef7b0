"""A conversation as its chat template renders it, and which parts of that text are answers to learn."""

import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ctxext.data.chat_template import rendered, rendered_answers
from ctxext.errors import CtxextError
from ctxext.finetune.formats import CALLS, MESSAGES, TOOLS, BadRecord

Messages = list[dict[str, Any]]
Variables = Mapping[str, Any]
Span = tuple[int, int]
"""Where an answer begins and ends in a text, in characters."""

_CONTENT = "content"
_OTHER = "⁂"
"""A content that no template writes by itself."""

_OLD_CALL = "function_call"
"""The field of a call before `tool_calls`, which few templates know; its result has the role "function"."""
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)


def _without(messages: Messages, *keys: str) -> Messages:
    return [{key: value for key, value in message.items() if key not in keys} for message in messages]


_PARTIAL: Mapping[str, Callable[[Messages, Variables], tuple[Messages, Variables]]] = {
    "tools": lambda messages, more: (messages, {key: value for key, value in more.items() if key != TOOLS}),
    "calls of tools": lambda messages, more: (_without(messages, CALLS, _OLD_CALL), more),
    "results of tools": lambda messages, more: (
        [message for message in messages if message["role"] not in ("tool", "function")],
        more,
    ),
    "thinking": lambda messages, more: (
        [
            {**message, _CONTENT: _THOUGHT.sub("", message[_CONTENT], count=1)}
            for message in _without(messages, *_THOUGHTS)
        ],
        more,
    ),
}
"""What a template may leave out, and the conversation without it."""


class ChatReader:
    """Renders conversations by the chat template of a tokenizer.

    Args:
        tokenizer: A transformers tokenizer.

    Attributes:
        num_turns_left_out: Answers that are read and not learned, because the template renders them otherwise once
            others follow: some drop the thinking of all answers but the last.
        left_out: For each kind of content that the template does not render, how many conversations have it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._has_template = bool(getattr(tokenizer, "chat_template", None))
        self.num_turns_left_out = 0
        self.left_out: Counter[str] = Counter()
        added = tokenizer.added_tokens_decoder.values()
        self._special = {*tokenizer.all_special_tokens, *(str(token) for token in added if token.special)}
        self._undivided = {*self._special, *map(str, added)}
        self._longest = max(map(len, self._undivided), default=0)
        text, parts = ([{"role": "user", _CONTENT: content}] for content in (_OTHER, _in_parts(_OTHER)))
        # Templates of models that see images loop over parts; some of them render a text as nothing at all.
        self._wants_parts = not self._shows(text) and self._shows(parts)

    def _shows(self, messages: Messages) -> bool:
        try:
            return self._has_template and _OTHER in rendered(self.tokenizer, messages)
        except CtxextError:
            return False

    def parts(self, record: Mapping[str, Any]) -> list[tuple[str, bool]]:
        """The text of a conversation up to its last answer, in parts, with whether each is an answer to learn.

        Raises:
            BadRecord: The template refuses the conversation, or nothing in it can be learned.
        """
        if not self._has_template:
            raise BadRecord("is a conversation, and this model's tokenizer has no chat template")
        answers = [number for number, message in enumerate(record[MESSAGES]) if message["role"] == "assistant"]
        learned = [number for number in answers if record[MESSAGES][number].get("weight", 1)]
        if not learned:
            raise BadRecord("has no message of the assistant to learn")
        messages = _without(record[MESSAGES][: answers[-1] + 1], "weight")
        more = {TOOLS: record[TOOLS]} if TOOLS in record else {}
        try:
            try:
                return self._parts(messages, more, learned)
            except CtxextError:
                if not any(CALLS in message for message in messages):
                    raise
                return self._parts([_with_arguments_as_text(message) for message in messages], more, learned)
        except (CtxextError, ValueError, TypeError, AttributeError) as error:
            if isinstance(error, BadRecord):
                raise
            reason = str(error).removeprefix("The tokenizer's chat template cannot be rendered: ").splitlines()
            raise BadRecord(
                f"cannot be rendered by the tokenizer's chat template: {reason[0] if reason else ''}"
            ) from error

    def _parts(self, messages: Messages, more: Variables, learned: Sequence[int]) -> list[tuple[str, bool]]:
        text, marked = rendered_answers(self.tokenizer, self._as_wanted(messages), **more)
        missing = [name for name, partial in _PARTIAL.items() if self._leaves_out(text, (messages, more), partial)]
        if "calls of tools" in missing:
            # Nothing is left of an answer that only calls.
            learned = [number for number in learned if messages[number][_CONTENT]]
        if marked:
            spans = self._spans_of(learned, marked, messages, more)
        else:
            spans = self._told_apart(learned, text, messages, more)
        if not spans:
            raise BadRecord("has no answer that the tokenizer's chat template renders as it would be asked for")
        self.left_out.update(missing)
        self.num_turns_left_out += len(learned) - len(spans)
        parts, done = [], 0
        for start, end in _joined(span for some in spans.values() for span in some):
            end = self._with_stop(text, start, end) if marked else end
            stop = self._last_stop(text[start:], messages, more) if end == len(text) else ""
            parts += [(text[done:start], False), (text[start:end] + stop, True)]
            done = end
        return [part for part in [*parts, (text[done:], False)] if part[0]]

    def _as_wanted(self, messages: Messages) -> Messages:
        if not self._wants_parts:
            return messages
        return [{**message, _CONTENT: _in_parts(message[_CONTENT])} for message in messages]

    def _render(self, messages: Messages, more: Variables, **others: Any) -> str:
        return rendered(self.tokenizer, self._as_wanted(messages), **more, **others)

    def _leaves_out(
        self,
        text: str,
        given: tuple[Messages, Variables],
        partial: Callable[[Messages, Variables], tuple[Messages, Variables]],
    ) -> bool:
        """Whether a conversation has something that its text does not show."""
        changed = partial(*given)
        try:
            return changed != given and self._render(*changed) == text
        except CtxextError:
            return False

    def _spans_of(
        self, learned: Sequence[int], marked: Sequence[Span], messages: Messages, more: Variables
    ) -> dict[int, Sequence[Span]]:
        """Which of the answers that the template marks belong to each message."""
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if list(learned) == answers:
            return dict.fromkeys(learned, marked)
        spans, done = {}, 0
        for number in answers:
            # With the beginning of the next answer, so that the end of the text, which some mark too, is not there.
            part = rendered_answers(
                self.tokenizer, self._as_wanted(messages[: number + 1]), **more, add_generation_prompt=True
            )
            end = len(part[1]) if number < answers[-1] else len(marked)
            spans[number], done = marked[done:end], end
        return {number: spans[number] for number in learned}

    def _told_apart(
        self, learned: Sequence[int], text: str, messages: Messages, more: Variables
    ) -> dict[int, Sequence[Span]]:
        """The answers, from what the template renders up to each of them.

        An answer is learned if the whole text begins with it and all before it, rendered as if it were the last. Only
        an end token that the template adds behind the last answer alone may be missing.
        """
        spans: dict[int, Sequence[Span]] = {}
        for number in learned:
            is_last = number == len(messages) - 1
            try:
                after = text if is_last else self._render(messages[: number + 1], more)
                start = self._start_of(number, after, messages, more)
            except CtxextError:
                if is_last:
                    raise
                continue
            end = self._shared(text, after)
            if start is not None and start < end and not self._plain(after[end:]):
                # An answer that ended by another token if it was the last has no end token to learn here.
                spans[number] = [(start, self._with_stop(text, start, end) if end == len(after) else end)]
        return spans

    def _start_of(self, number: int, after: str, messages: Messages, more: Variables) -> int | None:
        """Where an answer begins in a text that ends with it; None if it cannot be told from what is before it."""
        before = self._render(messages[:number], more, add_generation_prompt=True)
        if after.startswith(before):
            return len(before)
        # The template asks for an answer otherwise than it renders one: with an empty thought, for example. The answer
        # begins where both differ, and not later by chance because it has the same letters.
        other = self._render([*messages[:number], {**messages[number], _CONTENT: _OTHER}], more)
        start = min(self._shared(before, after), self._shared(before, other))
        asked = self._shared(before, self._render(messages[:number], more))
        return start if start >= asked else None

    def _shared(self, one: str, two: str) -> int:
        """How many characters two texts begin with alike; tokens that are never divided are not."""
        most = min(len(one), len(two))
        end = bisect_left(range(most), True, key=lambda size: one[: size + 1] != two[: size + 1])
        if end == most:
            return end
        begins = (
            begin
            for begin in range(max(0, end - self._longest), end)
            for stop in range(end + 1, begin + self._longest + 1)
            if one[begin:stop] in self._undivided or two[begin:stop] in self._undivided
        )
        return min(begins, default=end)

    def _plain(self, text: str) -> str:
        """A text without special tokens and the space around it."""
        for token in self._special:
            text = text.replace(token, "")
        return text.strip()

    def _with_stop(self, text: str, start: int, end: int) -> int:
        """Where an answer ends with the token that ends it: for GLM, the one by which the next message begins."""
        has_stop = text[start:end].rstrip().endswith(tuple(self._special))
        return end if has_stop else end + len(self._first_special(text[end:]))

    def _first_special(self, text: str) -> str:
        return max((token for token in self._special if text.startswith(token)), key=len, default="")

    def _last_stop(self, answer: str, messages: Messages, more: Variables) -> str:
        """The token that ends the last answer, if the template writes none there."""
        if answer.rstrip().endswith(tuple(self._special)):
            return ""
        # Its thinking would be dropped once the user asks again, so that nothing begins alike.
        (last,), _ = _PARTIAL["thinking"](messages[-1:], more)
        begin = [{"role": "user", _CONTENT: _OTHER}, last]
        following = {"role": "tool" if CALLS in last else "user", _CONTENT: _OTHER}
        try:
            short, long = self._render(begin, more), self._render([*begin, following], more)
        except CtxextError:
            short = long = ""
        stop = self._first_special(long.removeprefix(short)) if long.startswith(short) else ""
        return stop if stop != self.tokenizer.bos_token and stop else self.tokenizer.eos_token or ""


def _joined(spans: Iterable[Span]) -> list[Span]:
    """Spans in order, each once; those that touch are one."""
    joined: list[Span] = []
    for start, end in sorted(set(spans)):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        elif start < end:
            joined.append((start, end))
    return joined


def _in_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _with_arguments_as_text(message: dict[str, Any]) -> dict[str, Any]:
    """A message that calls tools by JSON text, as the templates of DeepSeek want it."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"].get("arguments"))}}
        for call in message.get(CALLS, ())
        if "function" in call
    ]
    return {**message, CALLS: calls} if calls else message
