"""Conversion of records to documents: the known formats, and the answers to learn."""

import contextlib
import functools
import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ctxext.data.chat_template import render_answers, render_chat
from ctxext.errors import CtxextError

Record = Mapping[str, Any]
TEXT, PROMPT, COMPLETION, MESSAGES, TOOLS = "text", "prompt", "completion", "messages", "tools"
CALLS = "tool_calls"
_OTHER_TASKS = {"chosen": "preferences", "rejected": "preferences", "label": "judged answers", "labels": "token labels"}
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant"}
_KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_INTRODUCTION = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes the request."
)


_OLD_CALL = "function_call"
"""Field of a call before `tool_calls`, which few templates support; its result has the role "function"."""
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_REFUSAL, _CALL_ID = "refusal", "tool_call_id"
_TYPES: Mapping[str, type] = {**dict.fromkeys(("name", _CALL_ID, _REFUSAL, *_THOUGHTS), str), _OLD_CALL: dict}
"""Types of the fields that chat templates render unchanged."""
_CONTENT = "content"
_UNREAD = "unread fields of messages"
"""Key of a converted record with the names of fields that were dropped."""


class BadRecord(ValueError):
    """A record that cannot be trained on; the message follows its place: "has no …".

    Args:
        message: The problem.
        hint: The remedy; None for the default.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class Format:
    """A kind of record.

    Attributes:
        fields: Required fields with their types.
        also: Optional fields.
        read: Converts a record to the fields that training uses.
    """

    fields: Mapping[str, type | tuple[type, ...]]
    read: Callable[[Record], Record]
    also: tuple[str, ...] = ()

    def fits(self, record: Record) -> bool:
        """Return whether a record has all required fields with the right types."""
        return all(isinstance(record.get(name), kind) for name, kind in self.fields.items())


_FLAGS: Mapping[str, bool] = {
    **dict.fromkeys(("weight", "train", "loss", "loss_scale", "loss_mask", "train_on_turn", "trainable"), True),
    "masked": False,
}
"""Fields that select the messages to learn, each with the value of a learned message.

`weight`: OpenAI, Mistral, Together. `train`: Axolotl. `loss`, `loss_scale`: ms-swift. `loss_mask`: VeRL.
`train_on_turn`: Axolotl's `message_field_training`. `masked`: torchtune.
"""


def _read_weight(fields: dict[str, Any], number: int) -> int:
    """Remove the flags from a message's fields; return 1 to learn the message, else 0."""
    weights = {}
    for name in [name for name in _FLAGS if name in fields]:
        value = fields.pop(name)
        if value not in (0, 1):
            raise BadRecord(f'has a {name} of "{value}" in message {number}; use 1 or true, or 0 or false')
        weights[name] = int(bool(value) == _FLAGS[name])
    if len({*weights.values()}) > 1:
        raise BadRecord(f"has contradictory {', '.join(weights)} in message {number}; keep one of them")
    return next(iter(weights.values()), 1)


def _read_messages(record: Record, name: str, role: str, content: str) -> Record:
    """Convert messages to the roles and weights that chat templates and the loss use."""
    messages, unread = [], set[str]()
    for number, message in enumerate(record[name], start=1):
        if not isinstance(message, Mapping) or not isinstance(message.get(role), str):
            raise BadRecord(f'has no "{role}" in message {number}')
        known = ROLES.get(message[role], message[role])
        if known not in _KNOWN_ROLES:
            raise BadRecord(f'has an unknown role "{message[role]}" in message {number}; use {", ".join(_KNOWN_ROLES)}')
        others = {key: value for key, value in message.items() if key not in (role, content) and value is not None}
        unread |= others.keys() & {"role", _CONTENT}
        if known != "assistant":  # Only answers are learned.
            unread |= {name for name in others.keys() & _FLAGS if bool(others[name]) == _FLAGS[name]}
        weight = _read_weight(others, number)
        written = message.get(content)
        if written is None:
            written = others.pop(_REFUSAL, None)
        if written is None and not others.keys() & {CALLS, _OLD_CALL, _CALL_ID, *_THOUGHTS}:
            raise BadRecord(f'has no "{content}" in message {number}')
        for key, kind in _TYPES.items():
            if not isinstance(others.get(key, kind()), kind):
                raise BadRecord(f'has a {key} of type "{type(others[key]).__name__}" in message {number}')
        if CALLS in others:
            others[CALLS] = [
                _convert_call(call, number) for call in _read_list(others[CALLS], f"{CALLS} of message {number}")
            ]
        text, unread_in_parts = _read_text(written, number)
        unread |= unread_in_parts
        messages.append({**others, "role": known, "content": text, "weight": weight})
    tools = {TOOLS: _read_list(record[TOOLS], TOOLS)} if record.get(TOOLS) else {}
    return {MESSAGES: messages, **tools, _UNREAD: sorted(unread)}


_TEXT_PARTS = ("text", "input_text", "output_text", _REFUSAL)
"""Types of content parts with text to render, in chat completions and in the Responses API."""


def _read_text(content: Any, number: int) -> tuple[str, set[str]]:
    """Return the text of a message's content, which may be a list of parts, and the names of unread fields of parts.

    Raises:
        BadRecord: A part is not text.
    """
    if content is None or isinstance(content, str):
        return content or "", set()
    texts, unread = [], set[str]()
    for part in content if isinstance(content, list) else [content]:
        fields = part if isinstance(part, Mapping) else {"type": type(part).__name__}
        text = part if isinstance(part, str) else fields.get(_REFUSAL if fields.get("type") == _REFUSAL else "text")
        if not isinstance(text, str) or (fields is part and fields.get("type", "text") not in _TEXT_PARTS):
            kind = fields.get("type")
            raise BadRecord(f'has content of type "{kind}" in message {number}; only text can be learned')
        texts.append(text)
        unread |= {key for key, value in fields.items() if value is not None} - {"type", "text", _REFUSAL}
    return "".join(texts), unread


def _read_list(value: Any, name: str) -> list[Any]:
    """Return a list of objects, parsed if it is JSON text; raise if it is something else."""
    with contextlib.suppress(ValueError):
        value = json.loads(value) if isinstance(value, str) else value
    if not isinstance(value, list) or not all(isinstance(entry, Mapping) for entry in value):
        raise BadRecord(f"has {name} that are not a list of objects")
    return value


def _convert_call(call: Record, number: int) -> Record:
    """Convert a tool call's arguments from JSON text, as in many data sets, to an object, as most templates need."""
    if not isinstance(call.get("function"), Mapping):
        return call
    arguments = call["function"].get("arguments")
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        raise BadRecord(f"has a tool call with invalid JSON arguments in message {number}") from None
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _convert_pair(record: Record) -> Record:
    """Convert a prompt and its completion: texts are kept; of messages, only the completion's are learned."""
    prompt, completion = record[PROMPT], record[COMPLETION]
    if isinstance(prompt, str) and isinstance(completion, str):
        return {PROMPT: prompt, COMPLETION: completion}
    if isinstance(prompt, str) or isinstance(completion, str):
        raise BadRecord("has a prompt and a completion of different types: use text for both, or lists of messages")
    messages = _read_messages({**record, MESSAGES: [*prompt, *completion]}, MESSAGES, "role", "content")
    for message in messages[MESSAGES][: len(prompt)]:
        message["weight"] = 0
    return messages


def _convert_alpaca(record: Record) -> Record:
    """Convert an Alpaca record with its standard prompt; a chat template replaces it if there is one."""
    more = record.get("input") or ""
    question = f"{record['instruction']}\n\n{more}" if more else record["instruction"]
    opening = _INTRODUCTION.format(", paired with an input that provides further context" if more else "")
    parts = [opening, f"### Instruction:\n{record['instruction']}", *([f"### Input:\n{more}"] if more else [])]
    prompt = "\n\n".join([*parts, "### Response:\n"])
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": record["output"]}]
    return {PROMPT: prompt, COMPLETION: record["output"], MESSAGES: turns}


@functools.cache
def make_formats(text_field: str) -> Mapping[str, Format]:
    """Return the known formats by name; `text_field` is the field with the text."""
    return {
        "text": Format({text_field: str}, lambda record: {TEXT: record[text_field]}),
        "chat": Format({MESSAGES: list}, lambda record: _read_messages(record, MESSAGES, "role", "content"), (TOOLS,)),
        "prompt-completion": Format({PROMPT: (str, list), COMPLETION: (str, list)}, _convert_pair, (TOOLS,)),
        "sharegpt": Format(
            {"conversations": list}, lambda record: _read_messages(record, "conversations", "from", "value"), (TOOLS,)
        ),
        "alpaca": Format({"instruction": str, "output": str}, _convert_alpaca, ("input",)),
    }


FORMATS = ("auto", *make_formats(TEXT))


@dataclass
class RecordReader:
    """Converter of records to the fields of training: `text`, `prompt` and `completion`, or `messages`.

    Attributes:
        name: A format, or "auto" to choose by the fields of a record.
        text_field: The field with the text.
        skip_bad: Count bad records instead of stopping at the first.
        num_bad: Number of skipped records.
        first_bad: The problem of the first of them.
        unused: Fields outside the format, with the number of records that have them.
    """

    name: str = "auto"
    text_field: str = TEXT
    skip_bad: bool = False
    num_bad: int = 0
    first_bad: str = ""
    unused: Counter[str] = field(default_factory=Counter)

    def read(self, record: Record, place: str) -> Record | None:
        """Convert a record; return None if it is skipped."""
        try:
            chosen = make_formats(self.text_field)[self._choose_format(record)]
            read = chosen.read(record)
        except BadRecord as error:
            self.refuse(f"{place} {error}.", error.hint)
            return None
        self.unused.update({*record} - {*chosen.fields, *chosen.also} | {*map(name_field, read.get(_UNREAD, ()))})
        return {key: value for key, value in read.items() if key != _UNREAD}

    def find_format(self, record: Record, place: str) -> str:
        """Return the name of a record's format; raise if it has none."""
        try:
            return self._choose_format(record)
        except BadRecord as error:
            raise CtxextError(f"{place} {error}.", hint=error.hint or "Set --format.") from None

    def refuse(self, message: str, hint: str | None = None) -> None:
        """Count a bad record, or raise if bad records are not skipped."""
        if not self.skip_bad:
            raise CtxextError(message, hint=hint or "Skip such records with --skip-bad-rows, or set --format.")
        self.num_bad += 1
        self.first_bad = self.first_bad or message

    def _choose_format(self, record: Record) -> str:
        known = make_formats(self.text_field)
        if self.name != "auto":
            if not known[self.name].fits(record):
                raise BadRecord(f"is not {self.name}: {_describe_mismatch(record, {self.name: known[self.name]})}")
            return self.name
        fitting = [name for name, form in known.items() if form.fits(record)]
        if len(fitting) > 1:
            raise BadRecord(f"fits several formats ({', '.join(fitting)}): it has {_list_fields(record)}")
        if fitting in ([], ["chat"], ["prompt-completion"], ["sharegpt"]):
            task = next((task for name, task in _OTHER_TASKS.items() if record.get(name) is not None), None)
            if task:
                raise BadRecord(f"is for another task ({task}): it has {_list_fields(record)}")
        if not fitting:
            names = {name for form in known.values() for name in (*form.fields, *form.also)}
            texts = [] if names & set(record) else [name for name, value in record.items() if isinstance(value, str)]
            longest = max(texts, key=lambda name: len(record[name]), default="")
            hint = f'If "{longest}" is the text, use --text-field {longest}.' if longest else None
            raise BadRecord(f"has an unknown format: {_describe_mismatch(record, known)}", hint)
        return fitting[0]


def _describe_mismatch(record: Record, formats: Mapping[str, Format]) -> str:
    expected = ", or ".join(" with ".join(f'"{name}"' for name in form.fields) for form in formats.values())
    fields = {name: kind for form in formats.values() for name, kind in form.fields.items()}
    wrong = next((name for name in record if name in fields and not isinstance(record[name], fields[name])), None)
    if wrong is not None:
        value = "null" if record[wrong] is None else f"a {type(record[wrong]).__name__}"
        return f'its "{wrong}" is {value}'
    return f"it has {_list_fields(record)}, but needs {expected}"


def _list_fields(record: Record) -> str:
    return ", ".join(f'"{name}"' for name in record) or "no fields"


def name_field(name: str) -> str:
    """Return the name of a message's field in the list of ignored fields."""
    return f"{name} of messages"


Messages = list[dict[str, Any]]
Span = tuple[int, int]
"""Start and end of an answer in a text, in characters."""

_OTHER = "⁂"
"""Placeholder content that no template writes."""

_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)


def _drop_keys(messages: Messages, *keys: str) -> Messages:
    return [{key: value for key, value in message.items() if key not in keys} for message in messages]


_PARTIAL: Mapping[str, Callable[[Messages, Record], tuple[Messages, Record]]] = {
    "tools": lambda messages, more: (messages, {key: value for key, value in more.items() if key != TOOLS}),
    "calls of tools": lambda messages, more: (_drop_keys(messages, CALLS, _OLD_CALL), more),
    "results of tools": lambda messages, more: (
        [message for message in messages if message["role"] not in ("tool", "function")],
        more,
    ),
    "thinking": lambda messages, more: (
        [
            {**message, _CONTENT: _THOUGHT.sub("", message[_CONTENT], count=1)}
            for message in _drop_keys(messages, *_THOUGHTS)
        ],
        more,
    ),
}
"""Optional fields that a template may omit, each with a function that removes it from a conversation."""


class ChatReader:
    """Renderer of conversations with the chat template of a tokenizer.

    Args:
        tokenizer: A transformers tokenizer.

    Attributes:
        num_turns_left_out: Number of answers that are not learned, because the template renders them differently
            before other messages: some templates drop the thinking of all answers except the last.
        left_out: Kinds of content that the template does not render, with the number of conversations that have them.
        unread: Other fields of messages that the template does not render, with the number of conversations.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._has_template = bool(getattr(tokenizer, "chat_template", None))
        self.num_turns_left_out = 0
        self.left_out: Counter[str] = Counter()
        self.unread: Counter[str] = Counter()
        added = tokenizer.added_tokens_decoder.values()
        self._special = {*tokenizer.all_special_tokens, *(str(token) for token in added if token.special)}
        self._undivided = {*self._special, *map(str, added)}
        self._longest = max(map(len, self._undivided), default=0)
        text, parts = ([{"role": "user", _CONTENT: content}] for content in (_OTHER, _make_parts(_OTHER)))
        # Templates of vision models loop over parts; some of them render a plain text as nothing.
        self._needs_parts = not self._renders(text) and self._renders(parts)

    def _renders(self, messages: Messages) -> bool:
        try:
            return self._has_template and _OTHER in render_chat(self.tokenizer, messages)
        except CtxextError:
            return False

    def split(self, record: Mapping[str, Any]) -> list[tuple[str, bool]]:
        """Split a conversation's text, up to its last answer, into parts; the flag marks answers to learn.

        Raises:
            BadRecord: The template rejects the conversation, or nothing in it can be learned.
        """
        if not self._has_template:
            raise BadRecord("is a conversation, but the tokenizer has no chat template")
        answers = [number for number, message in enumerate(record[MESSAGES]) if message["role"] == "assistant"]
        learned = [number for number in answers if record[MESSAGES][number].get("weight", 1)]
        if not learned:
            raise BadRecord("has no assistant message to learn")
        messages = _drop_keys(record[MESSAGES][: answers[-1] + 1], "weight")
        more = {TOOLS: record[TOOLS]} if TOOLS in record else {}
        try:
            try:
                return self._split(messages, more, learned)
            except CtxextError:
                if not any(CALLS in message for message in messages):
                    raise
                return self._split([_write_arguments_as_text(message) for message in messages], more, learned)
        except BadRecord:
            raise
        except (CtxextError, ValueError, TypeError, AttributeError) as error:
            reason = str(error).removeprefix("The tokenizer's chat template cannot be rendered: ").splitlines()
            raise BadRecord(f"cannot be rendered with the chat template: {reason[0] if reason else ''}") from error

    def _split(self, messages: Messages, more: Record, learned: Sequence[int]) -> list[tuple[str, bool]]:
        text, marked = render_answers(self.tokenizer, self._adapt_content(messages), **more)
        missing = [name for name, partial in _PARTIAL.items() if self._omits(text, (messages, more), partial)]
        if "calls of tools" in missing:
            # An answer that only calls tools is rendered as nothing.
            learned = [number for number in learned if messages[number][_CONTENT]]
        if marked:
            spans = self._assign_spans(learned, marked, messages, more)
        else:
            spans = self._find_spans(learned, text, messages, more)
        if not spans:
            raise BadRecord("has no answer that the chat template renders the same as during generation")
        self.left_out.update(missing)
        names = {name for message in messages for name in message} - {"role", _CONTENT, CALLS, _OLD_CALL, *_THOUGHTS}
        self.unread.update(map(name_field, self._find_unread(sorted(names), text, (messages, more))))
        self.num_turns_left_out += len(learned) - len(spans)
        parts, done = [], 0
        for start, end in _join_spans(span for some in spans.values() for span in some):
            end = self._include_stop(text, start, end) if marked else end
            stop = self._find_last_stop(text[start:], messages, more) if end == len(text) else ""
            parts += [(text[done:start], False), (text[start:end] + stop, True)]
            done = end
        return [part for part in [*parts, (text[done:], False)] if part[0]]

    def _adapt_content(self, messages: Messages) -> Messages:
        if not self._needs_parts:
            return messages
        return [{**message, _CONTENT: _make_parts(message[_CONTENT])} for message in messages]

    def _render(self, messages: Messages, more: Record, **others: Any) -> str:
        return render_chat(self.tokenizer, self._adapt_content(messages), **more, **others)

    def _omits(
        self,
        text: str,
        original: tuple[Messages, Record],
        partial: Callable[[Messages, Record], tuple[Messages, Record]],
    ) -> bool:
        """Return whether the rendered text omits the content that `partial` removes."""
        changed = partial(*original)
        try:
            return changed != original and self._render(*changed) == text
        except CtxextError:
            return False

    def _find_unread(self, names: list[str], text: str, original: tuple[Messages, Record]) -> list[str]:
        """Return the fields without which the rendered text is the same, by halving the list."""
        if not names or self._omits(text, original, lambda messages, more: (_drop_keys(messages, *names), more)):
            return names
        if len(names) == 1:
            return []
        half = len(names) // 2
        return [*self._find_unread(names[:half], text, original), *self._find_unread(names[half:], text, original)]

    def _assign_spans(
        self, learned: Sequence[int], marked: Sequence[Span], messages: Messages, more: Record
    ) -> dict[int, Sequence[Span]]:
        """Return the answer spans marked by the template, by message to learn."""
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if list(learned) == answers:
            return dict.fromkeys(learned, marked)
        spans, done = {}, 0
        for number in answers:
            # Add the start of the next answer, because some templates also mark the end of the text.
            part = render_answers(
                self.tokenizer, self._adapt_content(messages[: number + 1]), **more, add_generation_prompt=True
            )
            end = len(part[1]) if number < answers[-1] else len(marked)
            spans[number], done = marked[done:end], end
        return {number: spans[number] for number in learned}

    def _find_spans(
        self, learned: Sequence[int], text: str, messages: Messages, more: Record
    ) -> dict[int, Sequence[Span]]:
        """Find the answer spans by rendering the conversation up to each answer.

        An answer is learned if the whole text begins with the conversation up to it, rendered as if it were the last
        answer, except for an end token after it.
        """
        spans: dict[int, Sequence[Span]] = {}
        for number in learned:
            is_last = number == len(messages) - 1
            try:
                after = text if is_last else self._render(messages[: number + 1], more)
                start = self._find_start(number, after, messages, more)
            except CtxextError:
                if is_last:
                    raise
                continue
            end = self._find_prefix_end(text, after)
            if start is not None and start < end and not self._strip_special(after[end:]):
                # An answer with another end token when it is the last has no end token to learn here.
                spans[number] = [(start, self._include_stop(text, start, end) if end == len(after) else end)]
        return spans

    def _find_start(self, number: int, after: str, messages: Messages, more: Record) -> int | None:
        """Return the start of an answer in a text that ends with it; None if its start is ambiguous."""
        before = self._render(messages[:number], more, add_generation_prompt=True)
        if after.startswith(before):
            return len(before)
        # The template's generation prompt differs from a rendered answer, with an empty thought for example. The answer
        # starts at the first difference. A placeholder answer excludes characters that are equal by chance.
        placeholder = self._render([*messages[:number], {**messages[number], _CONTENT: _OTHER}], more)
        start = min(self._find_prefix_end(before, after), self._find_prefix_end(before, placeholder))
        least = self._find_prefix_end(before, self._render(messages[:number], more))
        return start if start >= least else None

    def _find_prefix_end(self, first: str, second: str) -> int:
        """Return the length of two texts' common prefix, cut at tokens that cannot be divided."""
        most = min(len(first), len(second))
        end = bisect_left(range(most), True, key=lambda size: first[: size + 1] != second[: size + 1])
        if end == most:
            return end
        begins = (
            begin
            for begin in range(max(0, end - self._longest), end)
            for stop in range(end + 1, begin + self._longest + 1)
            if first[begin:stop] in self._undivided or second[begin:stop] in self._undivided
        )
        return min(begins, default=end)

    def _strip_special(self, text: str) -> str:
        """Return a text without special tokens and surrounding space."""
        for token in self._special:
            text = text.replace(token, "")
        return text.strip()

    def _include_stop(self, text: str, start: int, end: int) -> int:
        """Return the end of an answer, including its end token: for GLM, the first token of the next message."""
        has_stop = text[start:end].rstrip().endswith(tuple(self._special))
        return end if has_stop else end + len(self._find_first_special(text[end:]))

    def _find_first_special(self, text: str) -> str:
        return max((token for token in self._special if text.startswith(token)), key=len, default="")

    def _find_last_stop(self, answer: str, messages: Messages, more: Record) -> str:
        """Return the end token of the last answer if the template does not write one; else empty."""
        if answer.rstrip().endswith(tuple(self._special)):
            return ""
        # The template may drop its thinking once another message follows, which changes the common prefix.
        (last,), _ = _PARTIAL["thinking"](messages[-1:], more)
        begin = [{"role": "user", _CONTENT: _OTHER}, last]
        following = {"role": "tool" if CALLS in last else "user", _CONTENT: _OTHER}
        try:
            start, whole = self._render(begin, more), self._render([*begin, following], more)
        except CtxextError:
            start = whole = ""
        stop = self._find_first_special(whole.removeprefix(start)) if whole.startswith(start) else ""
        return stop if stop != self.tokenizer.bos_token and stop else self.tokenizer.eos_token or ""


def _join_spans(spans: Iterable[Span]) -> list[Span]:
    """Sort spans, remove duplicates and join those that touch."""
    joined: list[Span] = []
    for start, end in sorted(set(spans)):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        elif start < end:
            joined.append((start, end))
    return joined


def _make_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _write_arguments_as_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with the arguments of its tool calls as JSON text, as DeepSeek's templates need."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"].get("arguments"))}}
        for call in message.get(CALLS, ())
        if "function" in call
    ]
    return {**message, CALLS: calls} if calls else message
