"""What every context-extension method is: a frozen dataclass that turns one configuration into another."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, get_args

from ctxext.checkpoint.families import Family
from ctxext.checkpoint.new_tensor import NewTensor
from ctxext.checkpoint.opening import Checkpoint
from ctxext.errors import CtxextError
from ctxext.recipes.encodings.base import POSITIONS, Encoding
from ctxext.recipes.encodings.rotary import Config, ModelConfig, Rotary, unsupported
from ctxext.recipes.param import SearchRange, checked, param, search_ranges

Kind = Literal["table", "base", "schedule", "heads", "attention", "slopes", "buckets"]
"""The rows of a learned table; the base of the frequencies; all frequencies by a factor; what each KV head makes of
them; the attention itself; the slopes of biases; the buckets of distances."""

KINDS: tuple[Kind, ...] = get_args(Kind)
CARRIED_BY_CODE: frozenset[Kind] = frozenset({"heads", "attention", "slopes"})
"""Kinds that no configuration key can carry, so that the checkpoint brings code of its own."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """One step of a recipe. A subclass is a method, an instance is that method with its numbers."""

    name: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    encoding: ClassVar[str] = "rotary"
    """The encoding that it is for, as families name theirs."""
    kind: ClassVar[Kind]
    """What it changes; the steps of a recipe stand in the order of their kinds."""
    is_published: ClassVar[bool] = True
    """Whether there are numbers that its paper gives for any model; otherwise a search starts from a guess."""
    is_experimental: ClassVar[bool] = False
    """Whether help, lists and searches leave it out unless it is named: it gained nothing where it was measured."""
    neutral: ClassVar[Mapping[str, Any]] = {}
    """Numbers at which a model stays as it was, bit for bit."""
    example: ClassVar[Mapping[str, Any]] = {}
    """Numbers that suit any small model: with these the method is tried and drawn."""
    difference: ClassVar[str] = ""
    """How it differs from its paper by default and what was measured of either; help begins with it."""
    caution: ClassVar[str] = ""
    """What a user of the result must know, in one sentence; shown after converting and on the card."""

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
        """The same step with what this very configuration says of its numbers, where they were not given."""
        return self

    def resolved(self, encoding: Encoding) -> Self:
        """The same step with everything filled in that depends on the model."""
        return self

    def reach(self, encoding: Encoding) -> int:
        """The context length after this step, in tokens; as before unless a method reaches further."""
        return encoding.context_length

    def new_tensors(self, source: Checkpoint, model: ModelConfig) -> tuple[NewTensor, ...]:
        """The tensors that the result has otherwise than its source; none, but for methods that say so.

        Args:
            source: The checkpoint to convert.
            model: Its configuration before this step.

        Raises:
            CtxextError: the weights are not there in a form that can be rewritten.
        """
        return ()

    def caution_for(self, model: ModelConfig) -> str:
        """What a user of this very result must know; the method's own caution unless its numbers decide."""
        return self.caution

    def summary(self) -> str:
        """The step in a few words, for one line of output: "yarn ×4"."""
        return self.name

    def edit(self, model: ModelConfig) -> ModelConfig:
        """The configuration after this step. Pure: loads nothing, prints nothing, changes nothing in place.

        Raises:
            CtxextError: the method does not apply to this model.
        """
        raise NotImplementedError

    @classmethod
    def refusal(cls, config: Config, family: Family) -> str:
        """Why this method cannot apply to such a model whatever its numbers; empty where it can."""
        if family.positions != cls.encoding:
            return f"it has {POSITIONS[family.positions]}, not {POSITIONS[cls.encoding]}"
        return family.reason

    @classmethod
    def search_space(cls, rotary: Rotary, factor: float) -> dict[str, SearchRange]:
        """What a search tries on a model, by number.

        Args:
            rotary: The model's encoding.
            factor: How many times longer the wanted context is.
        """
        return search_ranges(cls)

    @classmethod
    def from_search(cls, numbers: Mapping[str, Any], rotary: Rotary, factor: float) -> Self:
        """The step with numbers from its search space.

        Raises:
            CtxextError: the numbers do not go together.
        """
        return cls(**numbers)

    @classmethod
    def needs_code(cls) -> bool:
        """Whether the checkpoint must carry modeling code."""
        return cls.kind in CARRIED_BY_CODE

    def to_dict(self) -> dict[str, Any]:
        """The step as it is written in a recipe file, without what was not given."""
        numbers = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plain = {key: _listed(value) for key, value in numbers.items()}
        return {"method": self.name, **{key: value for key, value in plain.items() if value is not None}}


def _listed(value: Any) -> Any:
    return [_listed(entry) for entry in value] if isinstance(value, tuple) else value


_REACH = ("factor", "target_length")


@dataclass(frozen=True, kw_only=True)
class Reaching(Method):
    """A method that reaches a longer context; it is given as a factor or as a length."""

    neutral: ClassVar[Mapping[str, Any]] = {"factor": 1}
    example: ClassVar[Mapping[str, Any]] = {"factor": 4}

    factor: float | None = param(None, help="How many times longer the new context is.", min=1.0)
    target_length: int | None = param(None, help="The new context length in tokens, for example 32k.", min=1)

    def resolved(self, encoding: Encoding) -> Self:
        """The same step with its factor known, and with a target length only where that is not what the factor says.

        Published models have both: Llama 3.1 was stretched 8 times from 8192 tokens and reads 131072.

        Raises:
            CtxextError: no length was given, or the target is not longer.
        """
        if self.target_length is None:
            if self.factor is None:
                raise CtxextError(
                    f"{self.name} needs to know how far to reach.",
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


@dataclass(frozen=True, kw_only=True)
class Scaling(Reaching):
    """A schedule of a rotary embedding's frequencies that configuration keys carry."""

    kind: ClassVar[Kind] = "schedule"
    rope_type: ClassVar[str] = "default"
    """The schedule's name in transformers."""

    @classmethod
    def refusal(cls, config: Config, family: Family) -> str:
        """Why the family cannot carry the schedule; empty where it can."""
        return super().refusal(config, family) or unsupported(family, cls.rope_type)

    def taken_over(self, replaced: Mapping[str, Any], made_by: str | None) -> dict[str, Any]:
        """The numbers of a schedule of the same type which this step puts its own in the place of and does not name.

        Args:
            replaced: That schedule, as transformers writes it.
            made_by: The method that made it; None where ctxext did not.
        """
        if replaced.get("rope_type") != self.rope_type or made_by not in (None, self.name):
            return {}
        own = [field.name for field in dataclasses.fields(self) if getattr(self, field.name) is None]
        return {name: replaced[name] for name in own if name not in _REACH and replaced.get(name) is not None}

    def caution_for(self, model: ModelConfig) -> str:
        """That factor and context length were given apart, beside the method's own caution."""
        if self.target_length is None or self.factor is None:
            return super().caution_for(model)
        reach = f"the factor of {self.factor:g} makes {round(self.factor * model.rotary.trained_length)}"
        apart = f"the context length is {self.target_length} tokens because you said so; {reach}."
        return " ".join(part for part in (apart, super().caution_for(model)) if part)

    def edit(self, model: ModelConfig) -> ModelConfig:
        """Write this method's schedule, theta and context length into the configuration.

        Raises:
            CtxextError: the schedule is already scaled, or the family cannot carry this one.
        """
        rotary = model.rotary
        step = self.resolved(rotary)
        if rotary.rope_type != "default":
            raise CtxextError(f'{self.name} cannot be applied on top of the schedule "{rotary.rope_type}".')
        return model.with_encoding(
            dataclasses.replace(
                rotary,
                theta=step.theta_after(rotary),
                theta_origin="",
                context_length=step.reach(rotary),
                declared_length=None,
                parameters={"rope_type": self.rope_type, **step.schedule(rotary)},
            )
        )

    @classmethod
    def search_space(cls, rotary: Rotary, factor: float) -> dict[str, SearchRange]:
        """What a search tries; a schedule may be made for more than the wanted context, never for less."""
        own = {"factor": SearchRange((factor, 2 * factor), factor)} if cls.kind == "schedule" else {}
        return {**own, **super().search_space(rotary, factor)}

    @classmethod
    def from_search(cls, numbers: Mapping[str, Any], rotary: Rotary, factor: float) -> Self:
        """The step with numbers from its search space, and the wanted factor where that is not among them."""
        return cls(**{**numbers, "factor": max(factor, numbers.get("factor", factor))})

    def theta_after(self, rotary: Rotary) -> float:
        """The base of the inverse frequencies after this step."""
        return rotary.theta

    def schedule(self, rotary: Rotary) -> Mapping[str, Any]:
        """The schedule's numbers as transformers names them."""
        return {}
