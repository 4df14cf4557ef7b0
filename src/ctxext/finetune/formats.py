"""What a record must look like: each known format, and how it becomes a text, a prompt and its answer, or messages."""

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

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


class BadRecord(ValueError):
    """A record from which nothing can be learned; the message goes on from its place: "has no …".

    Args:
        message: What is wrong.
        hint: What to do; None for what helps with most bad records.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class Format:
    """A kind of record.

    Attributes:
        fields: What it must have, and of which type each is.
        also: What it may have beside.
        read: Converts a record to the fields that training uses.
    """

    fields: Mapping[str, type | tuple[type, ...]]
    read: Callable[[Record], Record]
    also: tuple[str, ...] = ()

    def fits(self, record: Record) -> bool:
        """Whether a record has all of its fields."""
        return all(isinstance(record.get(name), kind) for name, kind in self.fields.items())


def _messages(record: Record, name: str, role: str, content: str) -> Record:
    """Messages with the roles and weights that chat templates and the loss know."""
    messages = []
    for number, message in enumerate(record[name], start=1):
        if not isinstance(message, Mapping) or not isinstance(message.get(role), str):
            raise BadRecord(f'has no "{role}" in message {number}')
        known = ROLES.get(message[role], message[role])
        if known not in _KNOWN_ROLES:
            raise BadRecord(f'has a role "{message[role]}" in message {number}; known are {", ".join(_KNOWN_ROLES)}')
        others = {key: value for key, value in message.items() if key not in (role, content) and value is not None}
        if message.get(content) is None and not others.keys() - {"name", "weight", "train"}:
            raise BadRecord(f'has no "{content}" in message {number}')
        weight = others.pop("weight", others.pop("train", 1))
        if weight not in (0, 1):
            raise BadRecord(f'has a weight of "{weight}" in message {number}; a message is learned (1) or not (0)')
        if CALLS in others:
            others[CALLS] = [_call(call, number) for call in _listed(others[CALLS], f"{CALLS} of message {number}")]
        text = _text_of(message.get(content), number)
        messages.append({**others, "role": known, "content": text, "weight": int(weight)})
    tools = {TOOLS: _listed(record[TOOLS], TOOLS)} if record.get(TOOLS) else {}
    return {MESSAGES: messages, **tools}


def _text_of(content: Any, number: int) -> str:
    """The text of a message's content, which may be a list of parts."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise BadRecord(f'has content of type "{kind}" in message {number}; only text is learned')
        texts.append(text)
    return "".join(texts)


def _listed(value: Any, name: str) -> list[Any]:
    """A list that may be written as JSON text."""
    with contextlib.suppress(ValueError):
        value = json.loads(value) if isinstance(value, str) else value
    if not isinstance(value, list) or not all(isinstance(entry, Mapping) for entry in value):
        raise BadRecord(f"has {name} that are no list of objects")
    return value


def _call(call: Record, number: int) -> Record:
    """A call of a tool with its arguments as an object, as most templates want them; many data sets have JSON text."""
    if not isinstance(call.get("function"), Mapping):
        return call
    arguments = call["function"].get("arguments")
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        raise BadRecord(f"has a call with arguments that are no JSON in message {number}") from None
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _prompt_completion(record: Record) -> Record:
    """A prompt and its completion, as texts, or as messages of which those of the completion are learned."""
    prompt, completion = record[PROMPT], record[COMPLETION]
    if isinstance(prompt, str) and isinstance(completion, str):
        return {PROMPT: prompt, COMPLETION: completion}
    if isinstance(prompt, str) or isinstance(completion, str):
        raise BadRecord("has a prompt and a completion of which only one is a list of messages")
    messages = _messages({**record, MESSAGES: [*prompt, *completion]}, MESSAGES, "role", "content")
    for message in messages[MESSAGES][: len(prompt)]:
        message["weight"] = 0
    return messages


def _alpaca(record: Record) -> Record:
    """Alpaca's prompt; a chat template replaces it if there is one."""
    more = record.get("input") or ""
    asked = f"{record['instruction']}\n\n{more}" if more else record["instruction"]
    opening = _INTRODUCTION.format(", paired with an input that provides further context" if more else "")
    parts = [opening, f"### Instruction:\n{record['instruction']}", *([f"### Input:\n{more}"] if more else [])]
    prompt = "\n\n".join([*parts, "### Response:\n"])
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": record["output"]}]
    return {PROMPT: prompt, COMPLETION: record["output"], MESSAGES: turns}


def formats_with(text_field: str) -> dict[str, Format]:
    """The known formats by name, the text's field being `text_field`."""
    return {
        "text": Format({text_field: str}, lambda record: {TEXT: record[text_field]}),
        "chat": Format({MESSAGES: list}, lambda record: _messages(record, MESSAGES, "role", "content"), (TOOLS,)),
        "prompt-completion": Format({PROMPT: (str, list), COMPLETION: (str, list)}, _prompt_completion, (TOOLS,)),
        "sharegpt": Format(
            {"conversations": list}, lambda record: _messages(record, "conversations", "from", "value"), (TOOLS,)
        ),
        "alpaca": Format({"instruction": str, "output": str}, _alpaca, ("input",)),
    }


FORMATS = ("auto", *formats_with(TEXT))


@dataclass
class RecordReader:
    """Checks records and converts them to the fields of training: `text`, `prompt` and `completion`, or `messages`.

    Attributes:
        name: A format, or "auto" for the one whose fields a record has.
        text_field: The field of a text.
        skip_bad: Count bad records instead of stopping at the first.
        num_bad: How many were skipped.
        first_bad: What was wrong with the first of them.
        unused: For each field that is no part of the format, in how many records it is.
    """

    name: str = "auto"
    text_field: str = TEXT
    skip_bad: bool = False
    num_bad: int = 0
    first_bad: str = ""
    unused: Counter[str] = field(default_factory=Counter)

    def read(self, record: Record, place: str) -> Record | None:
        """The converted record; None if it is skipped."""
        try:
            chosen = self._format_of(record)
            read = chosen.read(record)
        except BadRecord as error:
            self.refuse(f"{place} {error}.", error.hint)
            return None
        self.unused.update(set(record) - set(chosen.fields) - set(chosen.also))
        return read

    def refuse(self, message: str, hint: str | None = None) -> None:
        """Count a bad record, or stop at it."""
        if not self.skip_bad:
            raise CtxextError(
                message, hint=hint or "--skip-bad-rows leaves such records out; --format says what is meant."
            )
        self.num_bad += 1
        self.first_bad = self.first_bad or message

    def _format_of(self, record: Record) -> Format:
        known = formats_with(self.text_field)
        if self.name != "auto":
            if not known[self.name].fits(record):
                raise BadRecord(f"is not {self.name}: {_fields_and_wanted(record, {self.name: known[self.name]})}")
            return known[self.name]
        fitting = [name for name, form in known.items() if form.fits(record)]
        if len(fitting) > 1:
            raise BadRecord(f"could be {' or '.join(fitting)}: it has {_names(record)}")
        if fitting in ([], ["chat"], ["prompt-completion"], ["sharegpt"]):
            other = next((task for name, task in _OTHER_TASKS.items() if record.get(name) is not None), None)
            if other:
                raise BadRecord(f"is of another task ({other}): it has {_names(record)}")
        if not fitting:
            names = {name for form in known.values() for name in (*form.fields, *form.also)}
            texts = [] if names & set(record) else [name for name, value in record.items() if isinstance(value, str)]
            longest = max(texts, key=lambda name: len(record[name]), default="")
            hint = f'If "{longest}" is the text: --text-field {longest}' if longest else None
            raise BadRecord(f"is of no known format: {_fields_and_wanted(record, known)}", hint)
        return known[fitting[0]]


def _fields_and_wanted(record: Record, formats: Mapping[str, Format]) -> str:
    wanted = ", or ".join(" with ".join(f'"{name}"' for name in form.fields) for form in formats.values())
    fields = {name: kind for form in formats.values() for name, kind in form.fields.items()}
    wrong = next((name for name in record if name in fields and not isinstance(record[name], fields[name])), None)
    if wrong is not None:
        value = "null" if record[wrong] is None else f"a {type(record[wrong]).__name__}"
        return f'its "{wrong}" is {value}'
    return f"it has {_names(record)}; wanted is {wanted}"


def _names(record: Record) -> str:
    return ", ".join(f'"{name}"' for name in record) or "no fields"
