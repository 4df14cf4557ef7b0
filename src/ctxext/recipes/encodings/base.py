"""What every encoding of positions is to a recipe: read from config.json, written back, and taken back again.

A family of models says which it has (`Family.positions`), a method which it is for (`Method.encoding`). What belongs to
one encoding alone stands in its own file: `rotary.py`, `learned.py`.
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
    "buckets": "buckets of relative biases",
    "relative": "relative position biases",
    "none": "no position embeddings",
}
"""The encodings, by the name that a family has for its own."""


@dataclass(frozen=True)
class Encoding:
    """How a model knows where a token stands.

    Attributes:
        trained_length: The original context length: what the model was trained on, in tokens.
        context_length: The context it claims now, in tokens.
    """

    trained_length: int
    context_length: int

    @property
    def is_scaled(self) -> bool:
        """Whether something already stretches the original context length."""
        return self.context_length > self.trained_length

    @property
    def claimed_length(self) -> int:
        """What config.json says, in tokens."""
        return self.declared_length or self.context_length

    @property
    def declared_length(self) -> int | None:
        """What config.json claims where nothing makes the model read so much, in tokens; None elsewhere."""
        return None

    @property
    def lacks_original(self) -> bool:
        """Whether it is stretched from a length that nothing says."""
        return False

    @property
    def schedule_summary(self) -> str:
        """How it is stretched, in a few words."""
        return f"{self.carrier} from {self.trained_length} tokens"

    @property
    def usable_length(self) -> int:
        """The context it is meant for, in tokens."""
        return self.context_length

    @property
    def carrier(self) -> str:
        """What engines must understand of it."""
        raise NotImplementedError

    @property
    def numbers(self) -> Mapping[str, Any]:
        """The numbers beside the carrier."""
        return {}

    @property
    def learned_tensors(self) -> tuple[str, ...]:
        """The last parts of the names of the weights that are this encoding, which a training trains too."""
        return ()

    @property
    def first_index(self) -> int:
        """What `position_ids` call the first position."""
        return 0

    def describe(self) -> str:
        """The encoding in one line, for people."""
        raise NotImplementedError

    def noted(self) -> dict[str, Any]:
        """What a converted checkpoint must remember of this, its source's encoding, to take a recipe back."""
        return {"trained_length": self.trained_length, "source_length": self.context_length}

    def plain(self, noted: Mapping[str, Any]) -> Self:
        """The encoding as it was before the recipe that a configuration notes."""
        return dataclasses.replace(self, context_length=self.trained_length)

    def at_length(self, length: int) -> Self:
        """The same encoding with another context length in tokens."""
        return dataclasses.replace(self, context_length=length)

    def written(self, config: Config, family: Family) -> Config:
        """A copy of a configuration that carries this encoding.

        Raises:
            CtxextError: the family cannot carry it.
        """
        return self.with_length_written(config, family)

    def with_length_written(self, config: Config, family: Family) -> Config:
        """A copy of a configuration that says this context length; all else is left alone."""
        edited = copy.deepcopy(config)
        nested = edited.get(family.text_config) if family.text_config else None
        self.state_length(nested if isinstance(nested, dict) else edited, family)
        return edited

    def state_length(self, text: Config, family: Family) -> None:
        """Write this context length into the language model's part of a configuration."""
        text[family.length_key] = self.context_length

    def cautions(self, config: Config, family: Family, *, is_changed: bool) -> tuple[str, ...]:
        """What a user must know of such an encoding.

        Args:
            config: The content of config.json.
            family: Its family.
            is_changed: Whether a recipe changes all of it, and not what reads it.
        """
        return ()


def provenance(config: Mapping[str, Any]) -> dict[str, Any]:
    """What ctxext noted in a configuration that it made; empty for others."""
    noted = config.get("ctxext")
    return noted if isinstance(noted, dict) else {}
