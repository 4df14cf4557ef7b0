"""Choose what a comparison measures, by the speed of the model on this machine."""

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ctxext.checkpoint.durations import Pace, format_duration
from ctxext.compare.candidates import STOCK, Candidate
from ctxext.compare.schedule import Schedule, choose_schedule, list_choices
from ctxext.converters.calibration import calibrated_lengths
from ctxext.errors import NothingMeasuredError
from ctxext.evaluate.plan import ModelPlan
from ctxext.files.length import format_length
from ctxext.models.checkpoint_info import CheckpointInfo
from ctxext.report.findings import format_count

if TYPE_CHECKING:
    from ctxext.models.model import LoadedModel
    from ctxext.tasks.base import Work

_OWN_ATTENTION = 1.2
"""Estimated ratio of the time of a method with modeling code to that of the unmodified model."""
_MINUTE = 60
_BUSY = 2.0
"""Load for each processor from which other programs slow this one down a lot; it includes this one."""
_PROBED = 2048
"""Longest text of the measurement of the speed, in tokens."""


class Budget:
    """The time that a comparison takes.

    Args:
        plan: The whole work of each model.
        info: The unmodified checkpoint.
        candidates: The methods that apply, in their order.
        stock: The unmodified model.
    """

    def __init__(
        self, plan: ModelPlan, info: CheckpointInfo, candidates: Sequence[Candidate], stock: "LoadedModel"
    ) -> None:
        self.plan, self.info, self.candidates, self.stock = plan, info, candidates, stock
        self.pace = Pace(info.checkpoint.config)
        self.unseen = {
            candidate.name: _OWN_ATTENTION if candidate.recipe and candidate.recipe.needs_code else 1.0
            for candidate in candidates
        }
        self._whole = 0.0

    def measure(self) -> None:
        """Measure the speed, which takes a few seconds."""
        shortest = min([*self.plan.lengths, *self.plan.measured_lengths])
        self.pace.begin(STOCK, self.stock.first_pace(min(_PROBED, shortest)))

    def choose(self, left: float, num_processes: int, *, is_given: bool, is_calibrated: bool) -> Schedule:
        """Choose what fits into the time.

        Args:
            left: The remaining seconds.
            num_processes: The number of processes that share the work.
            is_given: Whether the user chose the lengths.
            is_calibrated: Whether the head orders that methods need are measured already.

        Raises:
            NothingMeasuredError: Not one text fits.
        """
        from ctxext.tasks.retrieval import RetrievalWork

        plan, trained = self.plan, self.plan.info.trained_length or max(self.plan.lengths)
        ratios = [1.0, *self.unseen.values()]
        lengths = [length for candidate in self.candidates for length in _list_calibrations(candidate, trained)]
        before = 0.0 if is_calibrated else self.pace.estimate(STOCK, "", lengths)
        works = list(plan.make_work(self.stock))
        self._whole = before + sum(ratios) / num_processes * math.fsum(map(self._estimate, works))
        given = [length for length in plan.lengths if length > trained] or plan.lengths
        choices = given if is_given or max(plan.lengths) <= trained else list_choices(trained, max(plan.lengths))

        def estimate_texts(models: int, length: int) -> float:
            works = [RetrievalWork(task, length, (0,), plan.settings) for task in plan.tasks]
            documents = [] if works else [length]
            each = math.fsum(map(self._estimate, works)) + self.pace.estimate(STOCK, "", documents)
            return sum(ratios[:models]) * each

        left_then = left - before
        schedule = choose_schedule(
            plan.lengths, choices, whole=self._whole - before, left=left_then, seconds=estimate_texts
        )
        if schedule is None:
            least = before + estimate_texts(2, min(choices))  # A comparison needs two models.
            minutes = math.ceil((least - left) / _MINUTE)
            raise NothingMeasuredError(
                f"The time is too short: {format_duration(max(0.0, left))} are left, and one text of {min(choices)} "
                f"tokens takes about {format_duration(estimate_texts(1, min(choices)))}"
                + (", after the calibration of a head order." if before else "."),
                hint=f"Increase --minutes by {minutes} or more, or use shorter --lengths.{self._advise_threads()}",
            )
        return schedule

    def _advise_threads(self) -> str:
        """Return advice for a busy machine, where several threads wait for each other; else an empty text."""
        load, cores = os.getloadavg()[0], os.cpu_count() or 1
        if self.stock.device.type != "cpu" or load < _BUSY * cores:
            return ""
        return f" Other programs keep the processors busy (load {load:.0f}): OMP_NUM_THREADS=1 waits less for them."

    def describe(self, schedule: Schedule, num_processes: int, minutes: float) -> str:
        """Describe the work that fits into the time limit."""
        limit = f"{minutes:g} min"
        if schedule.is_whole:
            return f"The comparison takes about {format_duration(self._whole)}; the time limit is {limit}."
        names = [STOCK, *self.unseen][: schedule.models]
        length = format_length(max(schedule.lengths))
        return (
            f"The whole comparison takes about {format_duration(self._whole)}; the time limit is {limit} (--minutes). "
            f"First: {', '.join(names)} at {length} tokens on {format_count(schedule.texts, 'text')}. "
            "Then the other methods, as far as the time allows."
        )

    def _estimate(self, work: "Work") -> float:
        lengths = work.list_readings(work.keys, can_share=self.stock.can_share)
        return self.pace.estimate(STOCK, work.task.name, lengths, work.count_written(work.keys))


def _list_calibrations(candidate: Candidate, trained_length: int) -> Sequence[int]:
    return calibrated_lengths(candidate.recipe, trained_length) if candidate.recipe else ()
