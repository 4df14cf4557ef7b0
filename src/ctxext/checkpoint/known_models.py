"""What a model was trained on: the places that may say it, and published models whose config.json does not."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ctxext.checkpoint.families import Family, read, text_config
from ctxext.checkpoint.geometry import LENGTH_ABOVE, LENGTH_REACHED, claimed_length, reached_length

MAXIMUM = "max_position_embeddings"
"""Where the original length was read when nothing says more."""

_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True)
class KnownModel:
    """One published model, or several with the same facts.

    Attributes:
        names: Their ids on the Hub.
        model_types: Any of these.
        facts: Keys of config.json, or of its schedule, with the values that they must have: one, or any of a list.
        original_length: The context that they were trained on before any schedule, in tokens.
        source: Where that is written.
    """

    names: tuple[str, ...]
    model_types: tuple[str, ...]
    facts: Mapping[str, Any]
    original_length: int
    source: str

    def is_like(self, config: Mapping[str, Any], family: Family, schedule: Mapping[str, Any]) -> bool:
        """Whether a configuration has all of the facts; left-out keys count as their class default."""
        numbers = {"rope_type": "default", **schedule}
        return family.model_type in self.model_types and all(
            (numbers.get(key) if key in _OF_SCHEDULE else read(config, family, key)) in _listed(wanted)
            for key, wanted in self.facts.items()
        )


_OF_SCHEDULE = frozenset({"rope_type", "factor"})


def _listed(wanted: Any) -> list[Any]:
    return wanted if isinstance(wanted, list) else [wanted]


@cache
def known_models() -> tuple[KnownModel, ...]:
    """The table `known_models.json`."""
    rows = json.loads(Path(__file__).with_name("known_models.json").read_text(encoding="utf-8"))
    return tuple(
        KnownModel(**{**row, "names": tuple(row["names"]), "model_types": tuple(row["model_types"])}) for row in rows
    )


def known_model(config: Mapping[str, Any], family: Family, schedule: Mapping[str, Any]) -> KnownModel | None:
    """The published model that a configuration looks like; None where it looks like none of the table.

    Names are not asked: a copy in a folder has another one, and a fine-tune has the facts of its base.

    Args:
        config: The content of config.json.
        family: Its family.
        schedule: The full-attention layers' schedule, with `rope_type`.
    """
    return next((known for known in known_models() if known.is_like(config, family, schedule)), None)


def original_length_of(
    config: Mapping[str, Any],
    family: Family,
    schedule: Mapping[str, Any],
    *,
    given: int | None = None,
    noted: int | None = None,
) -> tuple[int, str]:
    """The original context length in tokens, and where it was read: the surest place that says one.

    Args:
        config: The content of config.json.
        family: Its family.
        schedule: The full-attention layers' schedule, with `rope_type`.
        given: What the user said.
        noted: What ctxext noted when it converted the model.
    """
    if given:
        return given, "--original-length"
    if noted:
        return int(noted), "noted by ctxext"
    if original := schedule.get(_ORIGINAL) or text_config(config, family).get(_ORIGINAL):
        return int(original), _ORIGINAL
    if known := known_model(config, family, schedule):
        return known.original_length, f"known of {known.names[0]}: {known.source}"
    claimed = int(claimed_length(config, family))
    if (reached := reached_length(config, family, schedule)) > claimed:
        return claimed, f"{MAXIMUM}, from which {LENGTH_REACHED} {reached} follows"
    return claimed, MAXIMUM if claimed == read(config, family, MAXIMUM) else LENGTH_ABOVE
