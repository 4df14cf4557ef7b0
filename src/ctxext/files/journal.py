"""What this package uses of the files by which a stopped run goes on: an evaluation's lines, a Trainer's state."""

from collections.abc import Mapping
from typing import Annotated, Any, TypeGuard

from ctxext.files.report import Figure, Fraction, Name
from ctxext.files.schema import Limits, Schema, fault_of
from ctxext.files.schemas import Length, Number, Offset

Pair = Annotated[list[Number], Limits(min_length=2, max_length=2)]
"""A sum of losses, and of how many tokens."""


class Model(Schema):
    """A model that was asked."""

    name: Name


class Header(Schema):
    """What was asked of which models."""

    settings: dict[str, Any]
    loading: dict[str, Any]
    models: list[Model]
    versions: dict[str, Any]


class HeaderLine(Schema):
    """The first line."""

    header: Header


class FactsLine(Schema):
    """How a model was loaded, or what another harness found."""

    model: Name
    facts: dict[str, Any] | None = None
    harness: dict[Name, dict[Name, Number]] | None = None


_LONG = ("perplexity", "pseudo-perplexity")


class CellLine(Schema):
    """What one model was measured at."""

    model: Name
    task: Name
    length: Length
    depth: Fraction | None
    samples: Annotated[list[Offset], Limits(min_length=1)]
    seconds: Figure
    correct: list[Fraction] | None = None
    loss: Annotated[list[Number], Limits(min_length=1)] | None = None
    tokens: Annotated[list[Length], Limits(min_length=1)] | None = None
    key_tokens: Annotated[list[Offset], Limits(min_length=1)] | None = None
    of: Annotated[list[Length], Limits(min_length=1)] | None = None
    text: Name | None = None
    width: Length | None = None
    buckets: list[Pair] | None = None
    lengths: dict[Annotated[str, Limits(pattern=r"^\d{1,10}$")], Pair] | None = None
    sliding: dict[Annotated[str, Limits(pattern=r"^\d{1,10}$")], Pair] | None = None

    @classmethod
    def missing(cls, content: Mapping[str, Any]) -> str:
        """A task has its figures."""
        figures = {"short": ("loss", "tokens"), "longppl": ("loss", "key_tokens", "of")}
        figures |= dict.fromkeys(_LONG, ("width", "buckets", "lengths"))
        needed = figures.get(content["task"].partition(": ")[0], ("correct",))
        is_whole = all(content.get(key) is not None for key in needed)
        if is_whole and needed == ("correct",):
            is_whole = len(content["correct"]) == len(content["samples"])
        return "" if is_whole else "a task with its figures"


class Logged(Schema):
    """One line of a Trainer's history."""

    step: Offset
    loss: Number | None = None
    eval_loss: Number | None = None


class SavedState(Schema):
    """trainer_state.json."""

    global_step: Offset
    max_steps: Offset
    epoch: Number
    log_history: list[Logged]
    stateful_callbacks: dict[str, dict[str, Any]]

    @classmethod
    def missing(cls, content: Mapping[str, Any]) -> str:
        """The losses are those of the steps until then."""
        learned = [entry["step"] for entry in content["log_history"] if entry.get("loss") is not None]
        reached = learned and 1 <= min(learned) <= max(learned) <= content["global_step"] <= content["max_steps"]
        return "" if reached else "losses of the steps until then"


def is_line(record: Any) -> TypeGuard[dict[str, Any]]:
    """Whether a line of an evaluation's journal is one that this package writes."""
    if not isinstance(record, dict):
        return False
    schema = HeaderLine if "header" in record else CellLine if "task" in record else FactsLine
    return is_as(record, schema)


def is_as(record: dict[str, Any], schema: type[Schema]) -> bool:
    """Whether a record is as a schema says."""
    return fault_of(record, schema) is None
