"""Base classes of the context-extension methods: frozen dataclasses that turn one configuration into another."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, dataclass_transform, get_args

from typing_extensions import override

from ctxext.checkpoint.families import Family
from ctxext.checkpoint.opening import Checkpoint
from ctxext.errors import CtxextError
from ctxext.files.tensor_files import NewTensor
from ctxext.recipes.encodings.base import POSITIONS, Config, Encoding
from ctxext.recipes.encodings.dialects import unsupported_reason
from ctxext.recipes.encodings.frequencies import is_neutral
from ctxext.recipes.encodings.rotary import Rotary
from ctxext.recipes.model_config import ModelConfig
from ctxext.recipes.param import SearchRange, check_value, param, search_ranges

Kind = Literal["table", "base", "schedule", "heads", "attention", "slopes", "buckets", "memory", "length"]
"""Part of a model that a method changes: the rows of a position table, the RoPE base, the schedule of frequencies, the
scale of each KV head, the attention, the slopes of ALiBi, the buckets of distances, the number of states of earlier
segments, or only the declared length."""

KINDS: tuple[Kind, ...] = get_args(Kind)
CARRIED_BY_CODE: frozenset[Kind] = frozenset({"heads", "attention", "slopes"})
"""Kinds without a configuration key, so that the checkpoint contains modeling code."""


@dataclass_transform(kw_only_default=True, frozen_default=True)
@dataclass(frozen=True, kw_only=True)
class Method:
    """One step of a recipe. A subclass is a method and a dataclass, an instance is that method with its parameters."""

    name: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    encoding: ClassVar[str] = "rotary"
    """The position encoding that the method changes, as in `Family.positions`."""
    kind: ClassVar[Kind]
    """The part of the model that it changes; a search combines methods in the order of `KINDS`."""
    is_published: ClassVar[bool] = True
    """True if its paper gives parameters for any model; otherwise a search starts from a guess."""
    is_experimental: ClassVar[bool] = False
    """True if help, lists and searches omit it unless it is named, as it had no measured benefit."""
    neutral: ClassVar[Mapping[str, Any]] = {}
    """Parameters that leave a model exactly unchanged."""
    example: ClassVar[Mapping[str, Any]] = {}
    """Parameters for any small model, for tests and figures."""
    difference: ClassVar[str] = ""
    """Differences of the defaults from the paper, with measurements of both; help begins with it."""
    caution: ClassVar[str] = ""
    """A warning for users of the result, in one sentence; shown after converting and on the card."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = check_value(type(self), self.name, field, getattr(self, field.name))
            object.__setattr__(self, field.name, value)

    @classmethod
    def neutral_step(cls, encoding: Encoding) -> Self:
        """Return the step that leaves a model with this encoding unchanged."""
        return cls(**cls.neutral)

    @classmethod
    def example_step(cls, encoding: Encoding) -> Self:
        """Return a step that changes a small model with this encoding."""
        return cls(**cls.example)

    def adapt(self, model: ModelConfig) -> Self:
        """Return the step with unset parameters read from the model's configuration."""
        return self

    def resolve(self, encoding: Encoding) -> Self:
        """Return the step with every model-dependent parameter filled in."""
        return self

    def length_after(self, encoding: Encoding) -> int:
        """Return the context length after this step, in tokens.

        By default it is unchanged.
        """
        return encoding.context_length

    def new_tensors(self, source: Checkpoint, model: ModelConfig) -> tuple[NewTensor, ...]:
        """Return the tensors that differ between the result and its source.

        `model` is the source's configuration before this step. By default there are none.
        """
        return ()

    def caution_for(self, model: ModelConfig) -> str:
        """Return the warning for users of the result.

        By default it is `caution`.
        """
        return self.caution

    def summary(self) -> str:
        """Return the step in a few words, for one line of output.

        For example "yarn ×4".
        """
        return self.name

    def edit(self, model: ModelConfig) -> ModelConfig:
        """Return the configuration after this step.

        Pure: loads nothing, prints nothing, changes nothing in place.
        """
        raise NotImplementedError

    @classmethod
    def refusal(cls, config: Config, family: Family) -> str:
        """Return the reason why the method cannot apply; empty if it can.

        The reason holds for all parameter values.
        """
        if family.positions != cls.encoding:
            return f"it has {POSITIONS[family.positions]}, not {POSITIONS[cls.encoding]}"
        return family.reason or family.fixed

    @classmethod
    def search_space(cls, rotary: Rotary, factor: float) -> dict[str, SearchRange]:
        """Return the search range of each parameter.

        Args:
            rotary: The model's encoding.
            factor: The factor by which the target context is longer.
        """
        return search_ranges(cls)

    @classmethod
    def from_search(cls, numbers: Mapping[str, Any], rotary: Rotary, factor: float) -> Self:
        """Create the step from parameter values of its search space."""
        return cls(**numbers)

    @classmethod
    def needs_code(cls) -> bool:
        """Return whether the checkpoint must contain modeling code."""
        return cls.kind in CARRIED_BY_CODE

    @property
    def needs_calibration(self) -> bool:
        """Whether some parameters must first be measured on the model."""
        return False

    def to_dict(self) -> dict[str, Any]:
        """Return the step in the format of a recipe file, without unset parameters."""
        parameters = {field.name: _to_lists(getattr(self, field.name)) for field in dataclasses.fields(self)}
        return {"method": self.name, **{key: value for key, value in parameters.items() if value is not None}}


def _to_lists(value: Any) -> Any:
    return [_to_lists(entry) for entry in value] if isinstance(value, tuple) else value


_REACH = ("factor", "target_length")


class Reaching(Method):
    """A method that extends the context by a factor or to a length."""

    neutral: ClassVar[Mapping[str, Any]] = {"factor": 1}
    example: ClassVar[Mapping[str, Any]] = {"factor": 4}

    factor: float | None = param(None, help="Scaling factor of the context length.", min=1.0)
    target_length: int | None = param(
        None, help="The new context length in tokens, for example 32k.", kind="length", min=1
    )

    def reference_length(self, encoding: Encoding) -> int:
        """Return the length in tokens that the factor multiplies: by default the original context length."""
        return encoding.trained_length

    def check_target(self, target: int, length: int) -> None:
        """Raise if the target length cannot be reached from the reference length, both in tokens."""
        if target <= length:
            raise CtxextError(
                f'The target length "{target}" is not above the original context length {length}.',
                hint=f"Choose a longer one, such as --target-length {4 * length}.",
            )

    @override
    def resolve(self, encoding: Encoding) -> Self:
        # A target length is kept only if the factor implies another one. Some published models have both: Llama 3.1
        # has a factor of 8 over 8192 tokens and a context length of 131072.
        length = self.reference_length(encoding)
        if self.target_length is None:
            if self.factor is None:
                raise CtxextError(
                    f"{self.name} needs a factor or a target length.",
                    hint=f"Add --factor 4 or --target-length {4 * length}.",
                )
            return self
        self.check_target(self.target_length, length)
        factor = self.target_length / length
        if self.factor not in (None, factor):
            return self
        return dataclasses.replace(self, factor=factor, target_length=None)

    @override
    def summary(self) -> str:
        factor = "" if self.factor is None else f" ×{self.factor:g}"
        return self.name + factor + ("" if self.target_length is None else f" to {self.target_length}")

    @property
    def scaling_factor(self) -> float:
        """The factor of a resolved step."""
        assert self.factor is not None, "resolve the step first"
        return self.factor

    @override
    def length_after(self, encoding: Encoding) -> int:
        return self.target_length or round(self.scaling_factor * self.reference_length(encoding))


class Scaling(Reaching):
    """A schedule of RoPE frequencies that is expressed in configuration keys."""

    kind: ClassVar[Kind] = "schedule"
    rope_type: ClassVar[str] = "default"
    """The schedule's name in transformers."""

    @classmethod
    @override
    def refusal(cls, config: Config, family: Family) -> str:
        return super().refusal(config, family) or unsupported_reason(family, cls.rope_type)

    def inherit_from(self, replaced: Mapping[str, Any], method: str | None) -> dict[str, Any]:
        """Return the unset parameters of this step that a replaced schedule of the same type has.

        `replaced` has the format of transformers. `method` is None if ctxext did not write the schedule.
        """
        if replaced.get("rope_type") != self.rope_type or method not in (None, self.name):
            return {}
        unset = [field.name for field in dataclasses.fields(self) if getattr(self, field.name) is None]
        return {name: replaced[name] for name in unset if name not in _REACH and replaced.get(name) is not None}

    @override
    def caution_for(self, model: ModelConfig) -> str:
        # If both are set, they may imply different lengths, and the warning then contains both.
        if self.target_length is None or self.factor is None:
            return super().caution_for(model)
        by_factor = f"the factor of {self.factor:g} gives {round(self.factor * model.rotary.trained_length)}"
        lengths = f"the context length is {self.target_length} tokens as requested; {by_factor}."
        return " ".join(part for part in (lengths, super().caution_for(model)) if part)

    @override
    def edit(self, model: ModelConfig) -> ModelConfig:
        rotary = model.rotary
        step = self.resolve(rotary)
        if rotary.rope_type != "default":
            raise CtxextError(f'{self.name} cannot be applied on top of the schedule "{rotary.rope_type}".')
        after = dataclasses.replace(
            rotary,
            theta=step.theta_after(rotary),
            theta_origin="",
            context_length=step.length_after(rotary),
            declared_length=None,
            parameters={"rope_type": self.rope_type, **step.schedule(rotary)},
        )
        if step.factor == 1 and is_neutral(after):  # The formula would round differently.
            after = after.with_parameters({"rope_type": "default"})
        return model.with_encoding(after)

    @classmethod
    @override
    def search_space(cls, rotary: Rotary, factor: float) -> dict[str, SearchRange]:
        # A schedule may extend the context beyond the target length, but never to a shorter one.
        factors = {"factor": SearchRange((factor, 2 * factor), factor)} if cls.kind == "schedule" else {}
        return {**factors, **super().search_space(rotary, factor)}

    @classmethod
    @override
    def from_search(cls, numbers: Mapping[str, Any], rotary: Rotary, factor: float) -> Self:
        # A smaller factor would not reach the target length.
        return cls(**{**numbers, "factor": max(factor, numbers.get("factor", factor))})

    def theta_after(self, rotary: Rotary) -> float:
        """Return the RoPE base after scaling."""
        return rotary.theta

    def schedule(self, rotary: Rotary) -> Mapping[str, Any]:
        """Return the schedule's parameters as transformers names them."""
        return {}
