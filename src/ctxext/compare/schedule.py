"""The work of a comparison within a time limit: all of it, or the most decisive part at one length."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ctxext.evaluate.stages import Stage, stages_in_rounds
from ctxext.tasks.perplexity import Short

_WHOLE, _FIRST = 0.85, 0.95
"""Shares of the time that everything, and the questions to the first models, may take by the estimate."""
_PARTS = 8
"""Number of lengths to choose from in each multiple of the original context length."""
_DOCUMENTS = 2
"""Documents that each model reads first: an interval needs two."""
_RUNGS = ((3, 8), (3, 4), (2, 4), (2, 3), (2, 2), (2, 1), (1, 1))
"""Numbers of models and of texts for each, the best first. No interval of two texts decides anything."""
_MANY, _FEWEST = 3, 4
"""Models and texts that are enough at a shorter length than the target."""


@dataclass(frozen=True)
class Judgement:
    """Decisions from the results so far.

    Attributes:
        worse: The models that are clearly worse than the best.
        is_decided: Whether more results would not change the verdict.
        has_answers: Whether any model answered a question correctly.
        best: The method with the most correct answers; empty if no method was measured.
        measured: The models that were measured on questions.
    """

    worse: frozenset[str]
    is_decided: bool
    has_answers: bool
    best: str = ""
    measured: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Schedule:
    """The order of work.

    Attributes:
        lengths: Prompt lengths in tokens; without time for all, the one for the first questions.
        is_whole: Whether everything fits into the time.
        models: The number of models that are measured first.
        texts: The number of texts that each of them reads first.
    """

    lengths: tuple[int, ...]
    is_whole: bool = True
    models: int = 0
    texts: int = 0

    def stages(
        self,
        names: Sequence[str],
        questions: Sequence[str],
        documents: Sequence[str],
        samples: int,
        judge: Callable[[], Judgement],
    ) -> Iterator[Stage]:
        """Yield the stages of measuring some models, in their order.

        If not everything fits, the first models answer questions, text by text. Their cost at the original context
        length follows, then each other model on the same texts, and then more of everything. A model that is clearly
        worse is not measured further. Questions that no model answers decide nothing, so documents replace them.

        Args:
            names: The names of the models.
            questions: The names of the tasks with questions.
            documents: The names of the tasks with documents.
            samples: The number of samples of each cell.
            judge: Judges the results so far.
        """
        if self.is_whole:
            yield from stages_in_rounds(names, samples)
            return

        def remaining(models: Sequence[str]) -> tuple[str, ...]:
            worse = judge().worse
            return tuple(name for name in models if name not in worse)

        first, others = names[: self.models], names[self.models :]
        few, texts = range(min(_DOCUMENTS, samples)), min(self.texts, samples)
        read, short = tuple(name for name in documents if name != Short.name), (Short.name,)
        for text in range(texts if questions else 0):
            if text < _DOCUMENTS or judge().has_answers:
                yield Stage(remaining(first), range(text, text + 1), tuple(questions), self.lengths)
        is_asked = bool(questions) and (judge().has_answers or not read)
        # Work that takes longer than estimated may still fit for the best method alone.
        pair = (names[0], judge().best or names[1])
        for text in range(texts if is_asked else 0):
            yield Stage(pair, range(text, text + 1), tuple(questions), self.lengths)
        yield Stage(remaining(first), few, short)
        yield Stage(pair, few, short)
        if not is_asked:
            yield Stage(remaining(first), few, read)
        for name in others:
            yield (
                Stage((name,), range(texts), tuple(questions), self.lengths) if is_asked else Stage((name,), few, read)
            )
        for name in remaining(others):
            if name in judge().measured or not is_asked:
                yield Stage((name,), few, short)
        for sample in range(samples):
            if judge().is_decided:
                return
            yield Stage(remaining(names), range(sample, sample + 1))


def list_choices(trained_length: int, target_length: int) -> list[int]:
    """Return the lengths beyond the original context length to choose one from, in tokens."""
    step = max(1, trained_length // _PARTS)
    return [*range(trained_length + step, target_length, step), target_length]


def choose_schedule(
    lengths: Sequence[int],
    choices: Sequence[int],
    *,
    whole: float,
    left: float,
    seconds: Callable[[int, int], float],
) -> Schedule | None:
    """Choose what to measure, or return None if not one text fits into the time.

    Args:
        lengths: All prompt lengths, in tokens.
        choices: The lengths to choose from if not everything fits.
        whole: The seconds that everything takes.
        left: The seconds that are left.
        seconds: Returns the seconds for one text of a length, for a number of models in their order.
    """
    if whole <= _WHOLE * left:
        return Schedule(tuple(lengths))
    for models, texts in _RUNGS:
        room = left if texts == 1 else _FIRST * left
        fits = [length for length in choices if texts * seconds(models, length) <= room]
        if fits and (texts <= _FEWEST or max(fits) == max(choices)):
            # At the shortest length, another method may fit too, and fewer texts if the estimate is too low.
            length = max(fits) if (models, texts) >= (_MANY, _FEWEST) else min(fits)
            return Schedule((length,), is_whole=False, models=models, texts=texts)
    return None
