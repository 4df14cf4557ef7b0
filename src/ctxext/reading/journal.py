"""What this package uses of the files by which a stopped run goes on: an evaluation's lines, a Trainer's state."""

from typing import Annotated, Any, TypeGuard

from pydantic import Field, model_validator

from ctxext.errors import CtxextError
from ctxext.reading.report import Figure, Fraction, Name
from ctxext.reading.schemas import Length, Number, Offset, Schema, checked

Pair = Annotated[list[Number], Field(min_length=2, max_length=2)]
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


class CellLine(Schema):
    """What one model was measured at."""

    model: Name
    task: Name
    length: Length
    depth: Fraction | None
    samples: Annotated[list[Offset], Field(min_length=1)]
    seconds: Figure
    correct: list[Fraction] | None = None
    loss: Annotated[list[Number], Field(min_length=1)] | None = None
    tokens: Annotated[list[Length], Field(min_length=1)] | None = None
    width: Length | None = None
    buckets: list[Pair] | None = None
    lengths: dict[Annotated[str, Field(pattern=r"^\d{1,10}$")], Pair] | None = None
    sliding: dict[Annotated[str, Field(pattern=r"^\d{1,10}$")], Pair] | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> "CellLine":
        if self.task == "short":
            whole = self.loss is not None and self.tokens is not None
        elif self.task in ("perplexity", "pseudo-perplexity"):
            whole = None not in (self.width, self.buckets, self.lengths)
        else:
            whole = self.correct is not None and len(self.correct) == len(self.samples)
        if not whole:
            raise ValueError("a task with its figures")
        return self


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

    @model_validator(mode="after")
    def _is_whole(self) -> "SavedState":
        learned = [entry.step for entry in self.log_history if entry.loss is not None]
        if not learned or not 1 <= min(learned) <= max(learned) <= self.global_step <= self.max_steps:
            raise ValueError("losses of the steps until then")
        return self


def is_line(record: Any) -> TypeGuard[dict[str, Any]]:
    """Whether a line of an evaluation's journal is one that this package writes."""
    if not isinstance(record, dict):
        return False
    schema = HeaderLine if "header" in record else CellLine if "task" in record else FactsLine
    return is_as(record, schema)


def is_as(record: dict[str, Any], schema: type[Schema]) -> bool:
    """Whether a record is as a schema says."""
    try:
        checked(record, schema, "")
    except CtxextError:
        return False
    return True
