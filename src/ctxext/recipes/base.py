"""What every context-extension method is: a frozen dataclass that turns one configuration into another."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, dataclass_transform, get_args

from ctxext.checkpoint.families import Family
from ctxext.checkpoint.opening import Checkpoint
from ctxext.errors import CtxextError
from ctxext.files.tensor_files import NewTensor
from ctxext.recipes.encodings.base import POSITIONS, Encoding
from ctxext.recipes.encodings.frequencies import is_neutral
from ctxext.recipes.encodings.rotary import Config, ModelConfig, Rotary, unsupported
from ctxext.recipes.param import SearchRange, checked, param, search_ranges

Kind = Literal["table", "base", "schedule", "heads", "attention", "slopes", "buckets"]
"""What a method changes: the rows of a position table, the RoPE base, the schedule of frequencies, the scale of each KV
head, the attention, the slopes of ALiBi, or the buckets of distances."""

KINDS: tuple[Kind, ...] = get_args(Kind)
CARRIED_BY_CODE: frozenset[Kind] = frozenset({"heads", "attention", "slopes"})
"""Kinds that no configuration key can carry, so that the checkpoint carries modeling code."""


@dataclass_transform(kw_only_default=True, frozen_default=True)
@dataclass(frozen=True, kw_only=True)
class Method:
    """One step of a recipe. A subclass is a method and a dataclass too, an instance is that method with its numbers."""

    name: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    encoding: ClassVar[str] = "rotary"
    """The position encoding that it changes, as in `Family.positions`."""
    kind: ClassVar[Kind]
    """What it changes; a search combines methods in the order of `KINDS`."""
    is_published: ClassVar[bool] = True
    """Whether its paper gives numbers for any model; otherwise a search starts from a guess."""
    is_experimental: ClassVar[bool] = False
    """Whether help, lists and searches leave it out unless it is named, as it gained nothing when measured."""
    neutral: ClassVar[Mapping[str, Any]] = {}
    """Numbers that leave a model unchanged, bit for bit."""
    example: ClassVar[Mapping[str, Any]] = {}
    """Numbers that suit any small model, for tests and pictures."""
    difference: ClassVar[str] = ""
    """How it differs from its paper by default and what was measured of either; help begins with it."""
    caution: ClassVar[str] = ""
    """A warning for users of the result, in one sentence; shown after converting and on the card."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = checked(type(self), self.name, field, getattr(self, field.name))
            object.__setattr__(self, field.name, value)

    @classmethod
    def neutral_step(cls, encoding: Encoding) -> Self:
        """The step that changes nothing on a model with this encoding."""
        return cls(**cls.neutral)

    @classmethod
    def example_step(cls, encoding: Encoding) -> Self:
        """A step that changes a small model with this encoding."""
        return cls(**cls.example)

    def adapted(self, model: ModelConfig) -> Self:
        """The same step with unset numbers read from the model's configuration."""
        return self

    def resolved(self, encoding: Encoding) -> Self:
        """The same step with all numbers filled in that depend on the model."""
        return self

    def reach(self, encoding: Encoding) -> int:
        """The context length after this step, in tokens; by default unchanged."""
        return encoding.context_length

    def new_tensors(self, source: Checkpoint, model: ModelConfig) -> tuple[NewTensor, ...]:
        """The tensors that differ between the result and its source, for its configuration before this step; none."""
        return ()

    def caution_for(self, model: ModelConfig) -> str:
        """The warning for users of this result; by default `caution`."""
        return self.caution

    def summary(self) -> str:
        """The step in a few words, for one line of output: "yarn ×4"."""
        return self.name

    def edit(self, model: ModelConfig) -> ModelConfig:
        """The configuration after this step. Pure: loads nothing, prints nothing, changes nothing in place."""
        raise NotImplementedError

    @classmethod
    def refusal(cls, config: Config, family: Family) -> str:
        """Why this method cannot apply to a model, whatever its numbers; empty if it can."""
        if family.positions != cls.encoding:
            return f"it has {POSITIONS[family.positions]}, not {POSITIONS[cls.encoding]}"
        return family.reason or family.fixed

    @classmethod
    def search_space(cls, rotary: Rotary, factor: float) -> dict[str, SearchRange]:
        """What a search tries on a model, by number.

        Args:
            rotary: The model's encoding.
            factor: How many times longer the target context is.
        """
        return search_ranges(cls)

    @classmethod
    def from_search(cls, numbers: Mapping[str, Any], rotary: Rotary, factor: float) -> Self:
        """The step with numbers from its search space."""
        return cls(**numbers)

    @classmethod
    def needs_code(cls) -> bool:
        """Whether the checkpoint must carry modeling code."""
        return cls.kind in CARRIED_BY_CODE

    @property
    def needs_calibration(self) -> bool:
        """Whether numbers of it must be measured on the model first."""
        return False

    def to_dict(self) -> dict[str, Any]:
        """The step as it is written in a recipe file, without unset numbers."""
        numbers = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plain = {key: _listed(value) for key, value in numbers.items()}
        return {"method": self.name, **{key: value for key, value in plain.items() if value is not None}}


def _listed(value: Any) -> Any:
    return [_listed(entry) for entry in value] if isinstance(value, tuple) else value


_REACH = ("factor", "target_length")


class Reaching(Method):
    """A method that reaches a longer context, given as a factor or as a length."""

    neutral: ClassVar[Mapping[str, Any]] = {"factor": 1}
    example: ClassVar[Mapping[str, Any]] = {"factor": 4}

    factor: float | None = param(None, help="How many times longer the new context is.", min=1.0)
    target_length: int | None = param(None, help="The new context length in tokens, for example 32k.", min=1)

    def resolved(self, encoding: Encoding) -> Self:
        """The same step with its factor, and with a target length only if that differs from the factor's.

        Published models have both: Llama 3.1 has a factor of 8 over 8192 tokens and reads 131072.
        """
        if self.target_length is None:
            if self.factor is None:
                raise CtxextError(
                    f"{self.name} needs a factor or a target length.",
                    hint=f"Add --factor 4 or --target-length {4 * encoding.trained_length}.",
                )
            return self
        if self.target_length <= encoding.trained_length:
            raise CtxextError(
                f'The target length "{self.target_length}" is not above the original context length '
                f"{encoding.trained_length}.",
                hint=f"Choose a longer one, for example --target-length {4 * encoding.trained_length}.",
            )
        factor = self.target_length / encoding.trained_length
        if self.factor not in (None, factor):
            return self
        return dataclasses.replace(self, factor=factor, target_length=None)

    def summary(self) -> str:
        """The step with how far it reaches."""
        times = "" if self.factor is None else f" ×{self.factor:g}"
        return self.name + times + ("" if self.target_length is None else f" to {self.target_length}")

    @property
    def stretch(self) -> float:
        """The factor of a resolved step."""
        assert self.factor is not None, "resolve the step first"
        return self.factor

    def reach(self, encoding: Encoding) -> int:
        """The new context length in tokens."""
        return self.target_length or round(self.stretch * encoding.trained_length)


class Scaling(Reaching):
    """A schedule of a rotary embedding's frequencies that configuration keys carry."""

    kind: ClassVar[Kind] = "schedule"
    rope_type: ClassVar[str] = "default"
    """The schedule's name in transformers."""

    @classmethod
    def refusal(cls, config: Config, family: Family) -> str:
        """Why the family cannot carry the schedule; empty if it can."""
        return super().refusal(config, family) or unsupported(family, cls.rope_type)

    def taken_over(self, replaced: Mapping[str, Any], method: str | None) -> dict[str, Any]:
        """The unset numbers of this step that a replaced schedule of the same type has.

        `replaced` is as transformers writes it, and `method` None if ctxext did not write it.
        """
        if replaced.get("rope_type") != self.rope_type or method not in (None, self.name):
            return {}
        unset = [field.name for field in dataclasses.fields(self) if getattr(self, field.name) is None]
        return {name: replaced[name] for name in unset if name not in _REACH and replaced.get(name) is not None}

    def caution_for(self, model: ModelConfig) -> str:
        """The caution of the method, and that factor and context length were given separately."""
        if self.target_length is None or self.factor is None:
            return super().caution_for(model)
        reach = f"the factor of {self.factor:g} gives {round(self.factor * model.rotary.trained_length)}"
        apart = f"the context length is {self.target_length} tokens as requested; {reach}."
        return " ".join(part for part in (apart, super().caution_for(model)) if part)

    def edit(self, model: ModelConfig) -> ModelConfig:
        """Write this method's schedule, theta and context length into the configuration."""
        rotary = model.rotary
        step = self.resolved(rotary)
        if rotary.rope_type != "default":
            raise CtxextError(f'{self.name} cannot be applied on top of the schedule "{rotary.rope_type}".')
        after = dataclasses.replace(
            rotary,
            theta=step.theta_after(rotary),
            theta_origin="",
            context_length=step.reach(rotary),
            declared_length=None,
            parameters={"rope_type": self.rope_type, **step.schedule(rotary)},
        )
        if step.factor == 1 and is_neutral(after):  # Its formula would round otherwise than the plain one.
            after = after.with_parameters({"rope_type": "default"})
        return model.with_encoding(after)

    @classmethod
    def search_space(cls, rotary: Rotary, factor: float) -> dict[str, SearchRange]:
        """What a search tries; a schedule may reach beyond the target context, never less far."""
        factors = {"factor": SearchRange((factor, 2 * factor), factor)} if cls.kind == "schedule" else {}
        return {**factors, **super().search_space(rotary, factor)}

    @classmethod
    def from_search(cls, numbers: Mapping[str, Any], rotary: Rotary, factor: float) -> Self:
        """The step with numbers from its search space, and the target factor if that is not among them."""
        return cls(**{**numbers, "factor": max(factor, numbers.get("factor", factor))})

    def theta_after(self, rotary: Rotary) -> float:
        """The base of the inverse frequencies after this step."""
        return rotary.theta

    def schedule(self, rotary: Rotary) -> Mapping[str, Any]:
        """The schedule's numbers as transformers names them."""
        return {}
