"""What this package uses of a Trainer's state, by which a stopped run goes on."""

from collections.abc import Mapping
from typing import Any

from ctxext.files.schema import Schema, fault_of
from ctxext.files.schemas import Number, Offset


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


def is_as(record: dict[str, Any], schema: type[Schema]) -> bool:
    """Whether a record is as a schema says."""
    return fault_of(record, schema) is None
