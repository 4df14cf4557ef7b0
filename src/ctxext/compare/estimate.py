"""Estimate what a comparison reaches in its time, from a few tokens that the unmodified model reads first."""

import math
import time
from collections.abc import Callable, Sequence

from ctxext.converters.calibration import calibrated_lengths
from ctxext.errors import NothingMeasuredError
from ctxext.evaluate.model import LoadedModel
from ctxext.evaluate.plan import ModelPlan
from ctxext.evaluate.run import in_words, rounds
from ctxext.evaluate.tasks.retrieval import num_questions
from ctxext.recipes.recipe import Recipe

_FIRST = 64
_ENOUGH = 1.0
"""Seconds that a measured step should take: shorter ones are mostly overhead."""


def first_pace(loaded: LoadedModel, longest: int) -> tuple[int, float]:
    """Return a number of tokens and how many seconds the model takes to read them, after a warm-up.

    Args:
        loaded: The model.
        longest: The number of tokens to read at most.
    """
    import torch

    length = min(_FIRST, longest)
    with torch.inference_mode():
        while True:
            ids = torch.ones((1, length), dtype=torch.long, device=loaded.device)
            loaded.model(input_ids=ids[:, :8])
            began = time.monotonic()
            float(loaded.model(input_ids=ids)[0].flatten()[0])  # A number on this side, so that a GPU is waited for.
            seconds = time.monotonic() - began
            if seconds >= _ENOUGH or length >= longest:
                return length, seconds
            length = min(2 * length, longest)


def estimate(
    plan: ModelPlan, applied: Sequence[Recipe], *, can_share: bool, seconds: Callable[[int], float], left: float
) -> str:
    """Return what fits into the time, in a sentence; texts are read in the order of `Run`: rounds, shortest first.

    Args:
        plan: What every model is asked.
        applied: The recipes.
        can_share: Whether the questions about a text read it once.
        seconds: Returns how long a text of a length takes one model.
        left: The seconds that are left.

    Raises:
        NothingMeasuredError: One text does not fit for each model.
    """
    models, settings = 1 + len(applied), plan.settings
    trained = plan.info.trained_length or max(plan.lengths)
    before = math.fsum(seconds(length) for recipe in applied for length in calibrated_lengths(recipe, trained))
    groups: dict[int, list[tuple[int, float]]] = {sample: [] for sample in range(settings.samples)}
    for sample, group in groups.items():
        for task in plan.tasks:
            per_sample = num_questions(task, settings) // settings.samples
            texts = per_sample * (len(settings.depths) if task.has_depths and not can_share else 1)
            group += [(length, texts * seconds(length)) for length in plan.lengths]
        group += [
            (key.length, seconds(key.length)) for work in plan.documents for key in work.keys if key.sample == sample
        ]
    reached, spent, least = dict[int, int](), before, math.inf
    for samples in rounds(settings.samples):
        asked = sorted(entry for sample in samples for entry in groups[sample])
        for length, each in asked:
            spent += models * each
            least = min(least, spent)
            reached[length] = reached.get(length, 0) + (spent <= left)
    if least > left:
        raise NothingMeasuredError(
            f"The time is too short: {in_words(max(0.0, left))} are left after loading, and one text for each of "
            f"{models} models takes about {in_words(least)}"
            + (", with the calibration of a head order." if before else "."),
            hint="Give more --minutes, or fewer --methods, or shorter --lengths.",
        )
    planned = {length: sum(entry[0] == length for group in groups.values() for entry in group) for length in reached}
    if reached == planned:
        return f"All of it takes about {in_words(spent)}."
    parts = [f"{100 * count // planned[length]} % at {length} tokens" for length, count in sorted(reached.items())]
    return f"All of it takes about {in_words(spent)}; in the time left, about {', '.join(parts)}."
