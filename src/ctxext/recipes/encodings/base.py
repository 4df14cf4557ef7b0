"""Base of the position encodings, which are read from config.json, changed, written and restored.

A family specifies its encoding (`Family.encoding`), and a method the encoding that it changes (`Method.encoding`).
Each encoding has a file: `rotary.py`, `learned.py`, `biases.py`, `memory.py`, `no_positions.py`.
"""

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from ctxext.checkpoint.families import Family

Config = dict[str, Any]

POSITIONS = {
    "rotary": "rotary position embeddings",
    "learned": "learned position embeddings",
    "sinusoidal": "sinusoidal position embeddings",
    "alibi": "ALiBi biases",
    "buckets": "buckets of distances with learned biases or embeddings",
    "memory": "sinusoids of distances and a memory of earlier segments",
    "relative": "relative position biases",
    "none": "no position embeddings",
}
"""The encodings by name, as in `Family.positions`."""


@dataclass(frozen=True)
class Encoding:
    """Position encoding of a model.

    Attributes:
        trained_length: The original context length, used in training, in tokens.
        context_length: The current context length, in tokens.
    """

    trained_length: int
    context_length: int

    @property
    def is_scaled(self) -> bool:
        """Whether the context is already extended."""
        return self.context_length > self.trained_length

    @property
    def claimed_length(self) -> int:
        """The context length in config.json, in tokens."""
        return self.declared_length or self.context_length

    @property
    def declared_length(self) -> int | None:
        """The length in config.json if nothing extends the model to it; None otherwise."""
        return None

    @property
    def lacks_original(self) -> bool:
        """Whether it is extended from an unknown original length."""
        return False

    @property
    def schedule_summary(self) -> str:
        """The extension in a few words."""
        return f"{self.feature} from {self.trained_length} tokens"

    @property
    def usable_length(self) -> int:
        """The context length that it supports, in tokens."""
        return self.context_length

    @property
    def limits_inputs(self) -> bool:
        """Whether the context length is that of an input, which tokenizers then need too."""
        return True

    @property
    def feature(self) -> str:
        """The feature that engines must support to run it."""
        raise NotImplementedError

    @property
    def numbers(self) -> Mapping[str, Any]:
        """The parameters of the feature that engines must support."""
        return {}

    @property
    def learned_tensors(self) -> tuple[str, ...]:
        """Name suffixes of the weights of this encoding, which fine-tuning trains too."""
        return ()

    @property
    def first_index(self) -> int | None:
        """The first position in `position_ids`; None if the model ignores them."""
        return 0

    def describe(self) -> str:
        """Return a one-line description of the encoding."""
        raise NotImplementedError

    def to_record(self) -> dict[str, Any]:
        """Return the record of the source's encoding for a converted checkpoint.

        It is needed to undo the recipe.
        """
        return {"trained_length": self.trained_length, "source_length": self.context_length}

    def restore_source(self, record: Mapping[str, Any]) -> Self:
        """Return the encoding before the recipe that a configuration records."""
        return dataclasses.replace(self, context_length=self.trained_length)

    def at_length(self, length: int) -> Self:
        """Return the encoding at another context length in tokens."""
        return dataclasses.replace(self, context_length=length)

    def write_to(self, config: Config, family: Family) -> Config:
        """Return a copy of a configuration with this encoding."""
        return self.write_length_to(config, family)

    def write_length_to(self, config: Config, family: Family) -> Config:
        """Return a copy of a configuration with this context length and no other change."""
        edited = copy.deepcopy(config)
        nested = edited.get(family.text_config) if family.text_config else None
        self.state_length(nested if isinstance(nested, dict) else edited, family)
        return edited

    def state_length(self, text: Config, family: Family) -> None:
        """Write this context length into the language model's part of a configuration."""
        text[family.length_key] = self.context_length

    def cautions(self, config: Config, family: Family, *, is_changed: bool) -> tuple[str, ...]:
        """Return the warnings for users of a model with this encoding.

        Args:
            config: The content of config.json.
            family: Its family.
            is_changed: Whether a recipe replaces its schedule.
        """
        return ()


def provenance(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record that ctxext stored in a configuration; empty if there is none."""
    record = config.get("ctxext")
    return record if isinstance(record, dict) else {}
