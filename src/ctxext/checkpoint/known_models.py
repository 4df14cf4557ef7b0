"""What a model was trained on: the places that may say it, and published models whose config.json does not."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ctxext.checkpoint.families import Family, language_types, read, text_config
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

    @property
    def origin(self) -> str:
        """Where the original length is written, human-readable."""
        return f"known of {self.names[0]}: {self.source}"


@cache
def known_models() -> tuple[KnownModel, ...]:
    """The table `known_models.json`."""
    rows = json.loads(Path(__file__).with_name("known_models.json").read_text(encoding="utf-8"))
    return tuple(
        KnownModel(**{**row, "names": tuple(row["names"]), "model_types": tuple(row["model_types"])}) for row in rows
    )


def known_model(
    config: Mapping[str, Any],
    family: Family,
    schedule: Mapping[str, Any],
    *,
    model_types: Collection[str] | None = None,
    unstated: Collection[str] = (),
) -> KnownModel | None:
    """Return the published model with the facts of a configuration, or None; left-out keys count as the class default.

    Names do not count: a copy in a folder has another one, and a fine-tune has the facts of its base.

    Args:
        config: The content of config.json.
        family: Its family.
        schedule: The full-attention layers' schedule, with `rope_type`.
        model_types: The types of the language model; by default those of config.json. A GGUF file names an
            architecture, which stands for one or several types.
        unstated: Facts that the file has no key for.
    """
    types = frozenset(language_types(config, family) if model_types is None else model_types)
    numbers = {"rope_type": "default", "factor": None, **schedule}

    def has(key: str, wanted: Any) -> bool:
        if key in unstated:
            return True
        value = numbers[key] if key in ("rope_type", "factor") else read(config, family, key)
        return value in (wanted if isinstance(wanted, list) else [wanted])

    known = (one for one in known_models() if types.intersection(one.model_types))
    return next((one for one in known if all(has(*fact) for fact in one.facts.items())), None)


def original_length_of(
    config: Mapping[str, Any],
    family: Family,
    schedule: Mapping[str, Any],
    *,
    given: int | None = None,
    noted: int | None = None,
) -> tuple[int, str]:
    """Return the original context length in tokens, and where it was read: the surest place that says one.

    That is what the user gave, or what ctxext noted when it converted the model, before the full-attention layers'
    schedule and the rest of config.json.
    """
    if given:
        return given, "--original-length"
    if noted:
        return int(noted), "noted by ctxext"
    if original := schedule.get(_ORIGINAL) or text_config(config, family).get(_ORIGINAL):
        return int(original), _ORIGINAL
    if known := known_model(config, family, schedule):
        return known.original_length, known.origin
    claimed = int(claimed_length(config, family))
    if (reached := reached_length(config, family, schedule)) > claimed:
        return claimed, f"{MAXIMUM}, from which {LENGTH_REACHED} {reached} follows"
    return claimed, MAXIMUM if claimed == read(config, family, MAXIMUM) else LENGTH_ABOVE
