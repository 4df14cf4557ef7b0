"""A trained checkpoint that is written with another factor of its schedule than it was trained with."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ctxext.checkpoint.opening import Checkpoint
from ctxext.converters.convert import check_frequencies
from ctxext.converters.lengths import length_files
from ctxext.converters.plan import make_plan
from ctxext.errors import CtxextError
from ctxext.finetune.base import Base
from ctxext.recipes.base import Scaling
from ctxext.recipes.encodings.rotary import provenance
from ctxext.recipes.recipe import Recipe, recipe_from_dict
from ctxext.verify.run import failures, verify


@dataclass(frozen=True)
class Served:
    """What is written instead of the base's own configuration.

    Attributes:
        checkpoint: The base with the new configuration, under the record of where the base came from.
        texts: The small files that state the new context length, by name.
        summary: Both recipes, for people.
    """

    checkpoint: Checkpoint
    texts: Mapping[str, str]
    summary: str


def served_with(base: Base, factor: float | None) -> Served:
    """The base with its schedule at another factor, compared with what the installed transformers rotates by."""
    checkpoint = base.checkpoint
    if factor is None:
        return Served(checkpoint, {}, "")
    noted = provenance(checkpoint.config)
    steps = recipe_from_dict(noted["recipe"], "config.json").steps if noted.get("recipe") else ()
    step = steps[0] if len(steps) == 1 else None
    # Lists of numbers belong to the factor that they were searched or computed for.
    if (
        not isinstance(step, Scaling)
        or step.kind != "schedule"
        or any(isinstance(value, list | tuple) for value in vars(step).values())
    ):
        raise CtxextError(
            f'--serve-factor changes the factor of a schedule that ctxext wrote; "{checkpoint.name}" has none.',
            hint="Convert its source first, for example with --method yarn --factor 2.",
        )
    if step.factor is None or factor < step.factor:
        raise CtxextError(f"--serve-factor {factor:g} is below that of the training, {step.summary()}.")
    other = dataclasses.replace(step, factor=float(factor), target_length=None)
    plan = make_plan(checkpoint, Recipe([other]), replace_scaling=True)
    check_frequencies(plan)
    config = {**plan.model.config, "ctxext": {**noted, "recipe": plan.recipe.to_dict()}}
    texts = length_files(checkpoint.folder, base.model.encoding, plan.encoding)
    summary = f"{step.summary()}, and written with {plan.recipe.summary()}"
    return Served(dataclasses.replace(checkpoint, config=config), texts, summary)


def check_served(folder: Path) -> None:
    """Load what was written in a clean process and compare it with its recipe."""
    if failed := failures(verify(folder)):
        raise CtxextError(
            f"The checkpoint that --serve-factor wrote fails: {failed[0].check}: {failed[0].detail}.",
            hint="Nothing was put in its place; --resume without --serve-factor writes it as it was trained.",
        )
