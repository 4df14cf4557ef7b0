"""Search space of a model: conversion between recipes and the parameters of a trial."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ctxext.checkpoint.families import family_of
from ctxext.checkpoint.opening import Checkpoint
from ctxext.errors import CtxextError
from ctxext.recipes.base import KINDS, Method
from ctxext.recipes.code.method import CodeMethod
from ctxext.recipes.encodings.rotary import Rotary
from ctxext.recipes.model_config import model_config
from ctxext.recipes.param import SearchRange
from ctxext.recipes.recipe import Recipe
from ctxext.recipes.registry import METHODS, method_named

if TYPE_CHECKING:
    from optuna.trial import BaseTrial

NONE = "-"
"""The choice for an empty slot."""

_DIGITS = 4

Parameters = dict[str, Any]


@dataclass(frozen=True)
class Space:
    """Recipes for a model and a context that is `factor` times longer: methods by slot."""

    rotary: Rotary
    factor: float
    slots: Mapping[str, tuple[type[Method], ...]]

    def draw(self, trial: "BaseTrial") -> Parameters:
        """Draw methods and their parameters with a trial."""
        drawn: Parameters = {}
        for slot, methods in self.slots.items():
            drawn[slot] = trial.suggest_categorical(slot, [NONE, *(method.name for method in methods)])
            for method in methods:
                ranges = method.search_space(self.rotary, self.factor) if method.name == drawn[slot] else {}
                for number, choices in ranges.items():
                    name = f"{method.name}.{number}"
                    if choices.optional:
                        drawn[f"{name}.given"] = trial.suggest_categorical(f"{name}.given", [False, True])
                        if not drawn[f"{name}.given"]:
                            continue
                    drawn[name] = _draw(trial, name, choices)
        return drawn

    def recipe(self, parameters: Parameters) -> Recipe:
        """Build the recipe of drawn parameters."""
        chosen = [
            method for slot, methods in self.slots.items() for method in methods if method.name == parameters.get(slot)
        ]
        return Recipe(
            method.from_search(self._read_parameters(parameters, method), self.rotary, self.factor) for method in chosen
        )

    def _read_parameters(self, parameters: Parameters, method: type[Method]) -> Parameters:
        ranges = method.search_space(self.rotary, self.factor)
        values = {number: parameters.get(f"{method.name}.{number}") for number in ranges}
        return {  # Round as in a recipe file.
            number: float(f"{value:.{_DIGITS}g}")
            if isinstance(value, float) and value != ranges[number].start
            else value
            for number, value in values.items()
            if value is not None
        }

    def starts(self) -> list[tuple[type[Method], Parameters]]:
        """Return each method on its own with its initial parameters: the published ones, if any."""
        starts = []
        for slot, methods in self.slots.items():
            for method in methods:
                ranges = method.search_space(self.rotary, self.factor)
                if any(choices.start is None and not choices.optional for choices in ranges.values()):
                    continue
                parameters: Parameters = {**dict.fromkeys(self.slots, NONE), slot: method.name}
                for number, choices in ranges.items():
                    name = f"{method.name}.{number}"
                    parameters |= {f"{name}.given": choices.start is not None} if choices.optional else {}
                    parameters |= {name: choices.start} if choices.start is not None else {}
                starts.append((method, parameters))
        return starts


def _draw(trial: "BaseTrial", name: str, choices: SearchRange) -> Any:
    if choices.is_choice:
        return trial.suggest_categorical(name, list(choices.values))
    low, high = choices.values
    if isinstance(low, int) and isinstance(high, int) and isinstance(choices.start, int):
        return trial.suggest_int(name, low, high)
    # Parameters that cannot be zero are drawn on a log scale: doubling matters as much as halving.
    return trial.suggest_float(name, low, high, log=low > 0)


def build_space(source: Checkpoint, target_length: int, names: Sequence[str] = ()) -> Space:
    """Return the space of an unmodified model: the named methods, or all that apply and are not experimental."""
    rotary = model_config(source.config, source.original_length).rotary
    chosen = [method_named(name) for name in names] or [method for method in METHODS if not method.is_experimental]
    refused = {method: _find_refusal(method, source) for method in chosen}
    for method, reason in refused.items():
        if names and reason:
            raise CtxextError(f'{method.name} does not apply to "{source.name}": {reason}.')
    able = [method for method in METHODS if method in refused and not refused[method]]
    if not able:
        raise CtxextError(f'No method applies to "{source.name}": {next(iter(refused.values()))}.')
    slots: dict[str, tuple[type[Method], ...]] = {
        kind: methods for kind in KINDS if (methods := tuple(method for method in able if method.kind == kind))
    }
    return Space(rotary, target_length / rotary.trained_length, slots)


def _find_refusal(method: type[Method], source: Checkpoint) -> str:
    if method.needs_code() and source.config.get("auto_map"):
        return "the model has its own Python code, which the method would have to replace"
    if issubclass(method, CodeMethod) and method.learned_tensors:
        return "it has no effect without training"
    return method.refusal(source.config, family_of(source.config))
