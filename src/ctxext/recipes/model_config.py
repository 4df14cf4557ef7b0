"""A model's configuration: config.json with its family and position encoding, read once for all steps of a recipe."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ctxext.checkpoint.families import Family, distance_beyond, family_of, read, text_config
from ctxext.recipes.code.guards import CODE_KEY
from ctxext.recipes.encodings.base import Config, Encoding
from ctxext.recipes.encodings.biases import read_alibi, read_buckets
from ctxext.recipes.encodings.learned import COMPUTED, LAYOUTS, read_computed, read_learned
from ctxext.recipes.encodings.memory import read_memory
from ctxext.recipes.encodings.no_positions import has_length, read_no_positions
from ctxext.recipes.encodings.rotary import Rotary, not_rotary_error, read_rotary

READERS: Mapping[str, Callable[[Config, Family, int | None], Encoding]] = {
    "rotary": read_rotary,
    "learned": read_learned,
    "sinusoidal": read_computed,
    "alibi": read_alibi,
    "buckets": read_buckets,
    "memory": read_memory,
    "none": read_no_positions,
}
"""Functions that read the encodings that have methods."""


def is_readable(config: Config, family: Family) -> bool:
    """Return whether `model_config` supports the family's encoding; a configuration may still be incomplete."""
    if family.encoding == "none":
        return has_length(config, family)
    if family.positions in ("learned", "sinusoidal"):
        return family.model_type in {**LAYOUTS, **COMPUTED}
    return family.positions in READERS


@dataclass(frozen=True)
class ModelConfig:
    """A model's configuration, read once: the input and output of each step of a recipe.

    Attributes:
        config: The content of config.json.
        family: Its family.
        encoding: Its position encoding.
    """

    config: Config
    family: Family
    encoding: Encoding

    @property
    def rotary(self) -> Rotary:
        """The rotary encoding."""
        if not isinstance(self.encoding, Rotary):
            raise not_rotary_error(self.family)
        return self.encoding

    def read(self, key: str) -> Any:
        """Return a value as transformers computes it (`families.read`)."""
        return read(self.config, self.family, key)

    @property
    def code(self) -> Mapping[str, Any]:
        """The block that the checkpoint's code reads; empty without code."""
        block = text_config(self.config, self.family).get(CODE_KEY)
        return block if isinstance(block, Mapping) else {}

    @property
    def is_extended(self) -> bool:
        """Whether a schedule or code of ctxext changes the model."""
        return self.encoding.is_scaled or bool(self.code)

    def with_encoding(self, encoding: Encoding) -> "ModelConfig":
        """Return the model with another encoding, written to its configuration."""
        return ModelConfig(encoding.write_to(self.config, self.family), self.family, encoding)

    def with_context_length(self, length: int) -> "ModelConfig":
        """Return the model with another context length in tokens; its schedule stays."""
        encoding = self.encoding.at_length(length)
        return ModelConfig(encoding.write_length_to(self.config, self.family), self.family, encoding)


def beyond_training(model: ModelConfig, length: int = 0) -> str:
    """Return the warning for sliding layers that keep their rotation but see farther than in training, or "".

    `length` is the context length in tokens, by default the model's.
    """
    trained = model.encoding.trained_length
    length = length or max(model.encoding.usable_length, model.encoding.claimed_length)
    window = distance_beyond(model.config, model.family, trained, length)
    if window is None:
        return ""
    return (
        f"its sliding-window layers keep their rotary embedding, and beyond {trained} tokens their window of {window} "
        f"tokens covers distances that they were not trained on: set the window to {trained} in the source's "
        "config.json, or measure the result with ctxext eval."
    )


def model_config(config: Config, original_length: int | None = None) -> ModelConfig:
    """Read the content of config.json.

    Args:
        config: The content of config.json.
        original_length: The length of the training, in tokens, if the user gives it.
    """
    family = family_of(config)
    reader = READERS.get(family.encoding, read_rotary)
    return ModelConfig(config, family, reader(config, family, original_length))
