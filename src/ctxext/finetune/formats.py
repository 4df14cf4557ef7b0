"""What a record must look like: each known format, and how it becomes a text, a prompt and its answer, or messages."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ctxext.errors import CtxextError

Record = Mapping[str, Any]
TEXT, PROMPT, COMPLETION, MESSAGES, TOOLS = "text", "prompt", "completion", "messages", "tools"
_OTHER_TASKS = {"chosen": "preferences", "rejected": "preferences", "label": "judged answers", "labels": "token labels"}
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant"}
_KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_INTRODUCTION = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes the request."
)


class BadRecord(ValueError):
    """A record from which nothing can be learned; the message goes on from its place: "has no …"."""


@dataclass(frozen=True)
class Format:
    """A kind of record.

    Attributes:
        fields: What it must have, and of which type each is.
        also: What it may have beside.
        read: Converts a record to the fields that training uses.
    """

    fields: Mapping[str, type]
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
        known = _ROLES.get(message[role], message[role])
        if known not in _KNOWN_ROLES:
            raise BadRecord(f'has a role "{message[role]}" in message {number}; known are {", ".join(_KNOWN_ROLES)}')
        others = {key: value for key, value in message.items() if key not in (role, content) and value is not None}
        weight = others.pop("weight", others.pop("train", 1))
        if weight not in (0, 1):
            raise BadRecord(f'has a weight of "{weight}" in message {number}; a message is learned (1) or not (0)')
        messages.append({**others, "role": known, "content": message.get(content), "weight": int(weight)})
    return {MESSAGES: messages, **({TOOLS: record[TOOLS]} if record.get(TOOLS) else {})}


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
        "prompt-completion": Format(
            {PROMPT: str, COMPLETION: str}, lambda record: {name: record[name] for name in (PROMPT, COMPLETION)}
        ),
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
        """The converted record; None if it is skipped.

        Raises:
            CtxextError: it is bad, and bad ones are not skipped.
        """
        try:
            chosen = self._format_of(record)
            read = chosen.read(record)
        except BadRecord as error:
            self.refuse(f"{place} {error}.")
            return None
        self.unused.update(set(record) - set(chosen.fields) - set(chosen.also))
        return read

    def refuse(self, message: str, hint: str | None = None) -> None:
        """Count a bad record, or stop at it.

        Raises:
            CtxextError: bad ones are not skipped.
        """
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
            raise BadRecord(f"is of no known format: {_fields_and_wanted(record, known)}")
        return known[fitting[0]]


def _fields_and_wanted(record: Record, formats: Mapping[str, Format]) -> str:
    wanted = ", or ".join(" with ".join(f'"{name}"' for name in form.fields) for form in formats.values())
    return f"it has {_names(record)}; wanted is {wanted}"


def _names(record: Record) -> str:
    return ", ".join(f'"{name}"' for name in record) or "no fields"
