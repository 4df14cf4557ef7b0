"""The verdict of a comparison: each method compared with the unmodified model, and the recommended one."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ctxext.compare.candidates import STOCK, Candidate
from ctxext.compare.schedule import Judgement
from ctxext.converters.engine_support import EXACT, PARTLY
from ctxext.evaluate.plan import ModelPlan
from ctxext.evaluate.run import Missed
from ctxext.files.length import format_length
from ctxext.report.findings import format_count, pool_cells
from ctxext.report.intervals import adjust_confidence, mean_interval, paired_interval
from ctxext.report.report import Report
from ctxext.report.tables import in_percent
from ctxext.tasks.base import Key, Record, list_text_numbers
from ctxext.tasks.perplexity import Short

_SAME_COST = 3
"""Decimals of equal costs, which are losses in nats per token."""

_SURE = 0.999
"""Confidence to end a comparison early, so high that looking often does not make chance findings more likely
(Haybittle 1971, Peto et al. 1976)."""

_Text = tuple[str, int, int]
"""Task, length and number of a text, which has questions at several depths or for several samples."""


@dataclass(frozen=True)
class Difference:
    """Mean difference over texts that both models read, with its confidence interval."""

    mean: float
    low: float
    high: float
    texts: int

    def to_dict(self) -> dict[str, Any]:
        """Return the difference as JSON, without an interval if that is infinite."""
        low, high = (self.low, self.high) if math.isfinite(self.high) else (None, None)
        return {"difference": self.mean, "low": low, "high": high, "texts": self.texts}


@dataclass(frozen=True)
class ModelResults:
    """Results of one model, collected from its records.

    Attributes:
        answers: Score of each answer by text, then by depth and sample.
        losses: Mean loss per token beyond the original context length, by kind of text and document.
        seconds: Time of each record.
        peak: Peak memory in bytes; None if unknown.
        beyond: Planned prompt lengths beyond the original context length.
    """

    answers: Mapping[_Text, Mapping[tuple[float | None, int], float]]
    losses: Mapping[tuple[str, int], float]
    seconds: Mapping[tuple[Any, ...], float]
    peak: int | None
    beyond: frozenset[int] = frozenset()

    def finds_more(self, baseline: "ModelResults", confidence: float = 0.95) -> Difference | None:
        """Return the difference in the share found, paired by question and clustered by text.

        If both models have planned lengths beyond the original one, only those count. Lengths with a full score of
        both models are excluded, because they do not distinguish the models.
        """
        beyond, shared = self.beyond & baseline.beyond, self.answers.keys() & baseline.answers.keys()
        shared = {text for text in shared if not beyond or text[1] in beyond}
        wrong = {text[1] for text in shared for model in (self, baseline) if min(model.answers[text].values()) < 1}
        texts = []
        for text in sorted(text for text in shared if not wrong or text[1] in wrong):
            mine, theirs = self.answers[text], baseline.answers[text]
            if differences := [mine[question] - theirs[question] for question in mine.keys() & theirs.keys()]:
                texts.append(differences)
        if not texts:
            return None
        middle, half = paired_interval(texts, confidence)
        mean = fmean(difference for text in texts for difference in text)
        return Difference(mean, max(-1.0, middle - half), min(1.0, middle + half), len(texts))

    def loses_more(
        self, baseline: "ModelResults", confidence: float = 0.95, text: str | None = None
    ) -> Difference | None:
        """Return the difference in loss beyond the original context length, paired by document.

        `text` selects one kind of text; None selects all.
        """
        shared = self.losses.keys() & baseline.losses.keys()
        documents = sorted(document for document in shared if text in (None, document[0]))
        if not documents:
            return None
        differences = [self.losses[document] - baseline.losses[document] for document in documents]
        middle, half = mean_interval(differences, confidence)
        return Difference(middle, middle - half, middle + half, len(documents))

    def loses_more_by_text(self, baseline: "ModelResults", confidence: float = 0.95) -> dict[str, Difference]:
        """Return the result of `loses_more` for each kind of text, by name; empty if there is only one."""
        texts = sorted({text for text, _ in self.losses if text})
        by_text = {text: self.loses_more(baseline, confidence, text) for text in texts}
        return {text: difference for text, difference in by_text.items() if difference}

    def time_ratio(self, baseline: "ModelResults") -> float | None:
        """Return the ratio of the times of the records that both models have, or None."""
        shared = self.seconds.keys() & baseline.seconds.keys()
        theirs = math.fsum(baseline.seconds[record] for record in shared)
        return math.fsum(self.seconds[record] for record in shared) / theirs if theirs else None


def collect_results(records: Sequence[Record], trained_length: int | None, lengths: Sequence[int] = ()) -> ModelResults:
    """Collect the results of one model from its records; `lengths` are its planned prompt lengths."""
    answers: dict[_Text, dict[tuple[float | None, int], float]] = {}
    losses, seconds, peaks = dict[tuple[str, int], float](), dict[tuple[Any, ...], float](), []
    for record in records:
        peaks += [record["facts"]["peak_memory"]] if "peak_memory" in (record.get("facts") or {}) else []
        if "task" not in record:
            continue
        samples = record["samples"]
        seconds[record["task"], record["length"], record["depth"], tuple(samples)] = record["seconds"]
        for sample, text, right in zip(samples, list_text_numbers(record), record.get("correct") or (), strict=False):
            scores = answers.setdefault((record["task"], record["length"], text), {})
            scores[record["depth"], sample] = float(right)
        buckets = enumerate(record.get("buckets") or () if trained_length else ())
        beyond = [sums for number, sums in buckets if number * record["width"] >= (trained_length or 0)]
        if count := sum(pair[1] for pair in beyond):
            losses[record.get("text", ""), samples[0]] = math.fsum(pair[0] for pair in beyond) / count
    far = frozenset(length for length in lengths if trained_length and length > trained_length)
    return ModelResults(answers, losses, seconds, max(peaks, default=None), far)


def judge_results(records: Sequence[Record], plans: Sequence[ModelPlan]) -> Judgement:
    """Judge the results so far: which methods are clearly worse than the best, and whether the verdict is clear."""
    names, figures = [entry.info.name for entry in plans], _collect_all(records, plans)
    stock, results = figures[STOCK], {name: figures[name] for name in names[1:] if figures[name].answers}
    has_answers = any(right for mine in figures.values() for text in mine.answers.values() for right in text.values())
    measured = frozenset(name for name, mine in figures.items() if mine.answers)
    if not has_answers:
        return Judgement(frozenset(), is_decided=False, has_answers=False, measured=measured)
    confidence = adjust_confidence(len(results))
    best = _best_of(results) if results else ""
    gains = {name: results[best].finds_more(mine, confidence) for name, mine in results.items() if name != best}
    worse = frozenset(name for name, gain in gains.items() if gain and gain.low > 0)
    ahead = results[best].finds_more(stock, _SURE) if results else None
    costs = all(any(task == Short.name for task, *_ in figures[name].seconds) for name in (STOCK, best) if name)
    is_decided = worse == {*names[1:]} - {best} and ahead is not None and ahead.low > 0 and costs
    return Judgement(worse, is_decided, has_answers=True, best=best, measured=measured)


def _collect_all(records: Sequence[Record], plans: Sequence[ModelPlan]) -> dict[str, ModelResults]:
    """Collect the results of each model."""
    trained, by_model = plans[0].info.trained_length, dict[str, list[Record]]()
    for record in records:
        by_model.setdefault(record.get("model", ""), []).append(record)
    return {
        entry.info.name: collect_results(by_model.get(entry.info.name, []), trained, entry.lengths) for entry in plans
    }


def compare_results(
    report: Report,
    records: Sequence[Record],
    candidates: Sequence[Candidate],
    plans: Sequence[ModelPlan],
    missed: Sequence[Missed] = (),
    minutes: float | None = None,
    target_length: int = 0,
) -> dict[str, Any]:
    """Compare the models of a report: return a row for each model, the verdict and the recommended method.

    Args:
        report: The report on all models.
        records: The records of all models.
        candidates: The methods, with those that do not apply.
        plans: The work of each model.
        missed: The work that did not fit into the time.
        minutes: The time limit.
        target_length: The length that the methods are to reach, in tokens.
    """
    by_name = {model["name"]: model for model in report["models"]}
    trained = by_name[STOCK]["trained_length"]
    figures = _collect_all(records, plans)
    stock = figures[STOCK]
    measured = [name for name, mine in figures.items() if mine.seconds and name != STOCK]
    confidence = adjust_confidence(len(measured))
    results = {candidate.name: figures[candidate.name] for candidate in candidates if candidate.name in figures}
    gains = {name: gain for name, mine in results.items() if (gain := mine.finds_more(stock, confidence))}
    losses = {name: drop for name, mine in results.items() if (drop := mine.loses_more(stock, confidence))}
    loss = fmean(stock.losses.values()) if stock.losses else None
    beyond = trained if stock.beyond else None
    rows = [_row(by_name[STOCK], beyond) | {"loss_beyond": loss, "peak": stock.peak}]
    for candidate in candidates:
        row: dict[str, Any] = {"name": candidate.name}
        row |= {"convert": list(candidate.words) or None, "refused": candidate.refusal or None}
        if candidate.plan is not None and candidate.name in by_name:
            mine, gain, drop = results[candidate.name], gains.get(candidate.name), losses.get(candidate.name)
            by_text = mine.loses_more_by_text(stock, confidence)
            peaks = mine.peak, stock.peak
            row |= _row(by_name[candidate.name], beyond) | {
                "against": gain.to_dict() if gain else None,
                "beyond": drop.to_dict() if drop else None,
                "beyond_by_text": {text: difference.to_dict() for text, difference in by_text.items()},
                "inside": (by_name[candidate.name]["short"] or {}).get("against"),
                "time": mine.time_ratio(stock),
                "memory": peaks[0] / peaks[1] if peaks[0] and peaks[1] else None,
            }
            row["serving"] = [served.to_dict() for served in candidate.plan.serving]
        rows.append(row)
    shares = {name: _share(model["cells"], beyond) for name, model in by_name.items()}
    by_row = {row["name"]: row for row in rows}
    taken, nearest, sentence = _choose_method(by_row, shares, gains, losses, results, stock, trained, confidence)
    missing = [*_beyond_stock(plans), *_not_reached(plans, figures, missed)]
    longest = max((length for entry in plans for length in entry.lengths), default=0)
    if 0 < longest < target_length:
        missing.append(f"Not measured at {target_length} tokens: --lengths {format_length(target_length)}.")
    if not any(row.get("inside") for row in rows) and any(each.work.task.name == Short.name for each in missed):
        missing.append(
            f"Cost at {trained} tokens not measured: ctxext eval --task {Short.name} with a converted model."
        )
    missing += _more_time(figures, missed, minutes)
    return {
        "models": rows,
        "confidence": confidence,
        "taken": taken,
        "nearest": nearest,
        "is_measured": any(mine.seconds for mine in results.values()),
        "not_reached": missing,
        "verdict": " ".join([sentence, *missing]),
    }


def _row(model: Mapping[str, Any], beyond: int | None) -> dict[str, Any]:
    """Return the row of a model: its name, summary and recipe, and the share found, beyond a length if there is one."""
    cells = [cell for cell in model["cells"] if not beyond or cell["length"] > beyond]
    share, low, high = pool_cells(cells)
    answers = {"share": share, "low": low, "high": high, "samples": sum(cell["samples"] for cell in cells)}
    return {
        **{key: model[key] for key in ("name", "summary", "recipe")},
        "found": answers if cells else None,
        "refused": None,
    }


def _choose_method(
    rows: Mapping[str, Mapping[str, Any]],
    shares: Mapping[str, str],
    gains: Mapping[str, Difference],
    losses: Mapping[str, Difference],
    results: Mapping[str, ModelResults],
    stock: ModelResults,
    trained_length: int | None,
    confidence: float,
) -> tuple[str | None, str | None, str]:
    """Return the recommended method if any is significantly better, the closest one, and a sentence on both."""

    def price(name: str) -> tuple[float, float, int]:
        """Return a sort key for equally good methods: loss at short lengths, loss at long ones, number of engines."""
        inside, beyond = inside_of(rows[name]).get("difference", 0.0), losses[name].mean if name in losses else 0.0
        return round(inside, _SAME_COST), round(beyond, _SAME_COST), -len(engines_of(rows[name]))

    sure = [name for name, gain in gains.items() if gain.low > 0]
    # If documents differ by the same amount, an interval may be below 0 by less than the shown decimals.
    lower = [
        name
        for name, drop in losses.items()
        if round(drop.high, _SAME_COST) < 0 and not (name in gains and gains[name].high < 0)
    ]
    if sure:
        best = _best_of({name: results[name] for name in sure})
        behind = {name: results[best].finds_more(results[name], confidence) for name in sure}
        alike = [name for name, gain in behind.items() if name == best or gain is None or gain.low <= 0]
        taken = min(alike, key=price)
        where = f" beyond {trained_length} tokens" if stock.beyond else ""
        more = f"answers {shares[taken]} of the questions{where}, the unmodified model {shares[STOCK]}"
    elif lower:
        best = min(lower, key=lambda name: losses[name].mean)
        higher = {name: results[name].loses_more(results[best], confidence) for name in lower}
        fewer = {name: results[best].finds_more(results[name], confidence) for name in lower}
        alike = [
            name
            for name in lower
            if name == best or not any(worse and worse.low > 0 for worse in (higher[name], fewer[name]))
        ]
        taken = min(alike, key=price)
        drop = format_difference(losses[taken].to_dict())
        more = f"changes the loss beyond {trained_length} tokens by {drop} nats per token"
        if gains:
            more += f" (answers: {shares[taken]}, the unmodified model {shares[STOCK]}, not significantly different)"
    if sure or lower:
        return taken, taken, _sentence(taken, more, alike, rows, trained_length)
    if gains:
        nearest = max(gains, key=lambda name: gains[name].mean)
        gain, texts = format_difference(gains[nearest].to_dict(), 0, 100), gains[nearest].texts
        sentence = f"{nearest}, {gain} percentage points on {format_count(texts, 'text')}"
    elif losses:
        nearest = min(losses, key=lambda name: losses[name].mean)
        loss = format_difference(losses[nearest].to_dict())
        sentence = f"{nearest}, {loss} nats per token beyond {trained_length} tokens"
    else:
        measured_inside = any(mine.answers for mine in results.values())
        return None, None, f"No method was measured{measured_inside * f' beyond {trained_length} tokens'}."
    return None, nearest, f"No method is significantly better than the unmodified model. Closest: {sentence}."


def _sentence(
    taken: str, more: str, alike: Sequence[str], rows: Mapping[str, Mapping[str, Any]], trained_length: int | None
) -> str:
    """Recommend a method, with the reasons."""
    cost = inside_of(rows[taken]).get("difference")
    sentences = [f"Use {taken}: it {more}."]
    if cost is not None:
        sentences.append(f"Cost at {trained_length} tokens: {f'{cost:+z.3f} nats per token' if cost else 'none'}.")
    if engines := engines_of(rows[taken]):
        sentences.append(f"Engines: {', '.join(engines)}.")
    others = {name: inside_of(rows[name]).get("difference") for name in alike if name != taken}
    if others:
        names = [name if price is None else f"{name} ({price:+z.3f})" for name, price in others.items()]
        sentences.append(f"Not significantly worse: {', '.join(names)}.")
    return " ".join(sentences)


def inside_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the difference in loss from the unmodified model at the original context length; empty if not measured."""
    inside = row.get("inside")
    return {**inside, "difference": inside["loss"]} if inside else {}


def engines_of(row: Mapping[str, Any]) -> list[str]:
    """Return the engines that support a method, even if only partly."""
    return [served["engine"] for served in row.get("serving") or () if served["status"] in (EXACT, PARTLY)]


def _best_of(results: Mapping[str, ModelResults]) -> str:
    """Return the model with the most right answers to the common questions beyond the original context length."""
    texts = set.intersection(*({*mine.answers} for mine in results.values()))
    beyond = frozenset.intersection(*(mine.beyond for mine in results.values()))
    texts = {text for text in texts if not beyond or text[1] in beyond}
    return max(results, key=lambda name: math.fsum(sum(results[name].answers[text].values()) for text in texts))


def _share(cells: Sequence[dict[str, Any]], trained_length: int | None) -> str:
    """Format the share found, of the questions beyond a length if there is one."""
    share, interval = in_percent([cell for cell in cells if not trained_length or cell["length"] > trained_length])
    return f"{share} % ({interval})"


def format_difference(difference: Mapping[str, Any] | None, decimals: int = 3, times: int = 1) -> str:
    """Format a difference with its interval, multiplied by `times`."""
    if not difference:
        return "–"
    text = f"{times * difference['difference']:+z.{decimals}f}"
    if difference["low"] is None:
        return text
    return f"{text} ({times * difference['low']:+z.{decimals}f} to {times * difference['high']:+z.{decimals}f})"


def _join_words(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _beyond_stock(plans: Sequence[ModelPlan]) -> list[str]:
    """Return a sentence on the lengths that the unmodified model cannot read, if there are any."""
    limit = max(plans[0].lengths, default=0)
    lengths = sorted({length for entry in plans for length in entry.lengths if length > limit})
    if not lengths:
        return []
    longer = _join_words([str(length) for length in lengths])
    return [
        f"The unmodified model cannot read more than {limit} tokens; at {longer} tokens, methods are compared only "
        "with each other."
    ]


def _not_reached(
    plans: Sequence[ModelPlan], figures: Mapping[str, ModelResults], missed: Sequence[Missed]
) -> list[str]:
    """Return sentences on the planned work that did not fit into the time."""
    has_questions = any(mine.answers for mine in figures.values())
    unmeasured = [name for name, mine in figures.items() if not (mine.answers if has_questions else mine.seconds)]
    samples, sentences = plans[0].settings.samples, []
    for name, length in sorted({(each.work.task.name, each.work.length) for each in missed}):
        counts = []
        for entry in plans:
            mine = figures[entry.info.name]
            late = [each for each in missed if each.model == entry.info.name and each.work.task.name == name]
            if entry.info.name not in unmeasured and any(each.work.length == length for each in late):
                texts = {key[3] for key in mine.seconds if key[:2] == (name, length)}
                counts.append(len({sample for group in texts for sample in group}))
        if counts:
            reached = f"{min(counts)} of {samples} texts" if min(counts) else "no text"
            sentences.append(f"{name}: the time was enough for {reached} at {length} tokens.")
    if unmeasured and len(unmeasured) < len(figures):
        sentences.append(f"Not measured: {_join_words(unmeasured)}.")
    return sentences


def _more_time(figures: Mapping[str, ModelResults], missed: Sequence[Missed], minutes: float | None) -> list[str]:
    """Return a sentence on what as much time again would add."""
    if not minutes or not missed:
        return []
    names, left, seen, texts = list[str](), 60 * minutes, set[tuple[str, Key]](), set[Key]()
    for each in missed:
        keys = {(each.model, key) for key in each.work.keys} - seen
        seen |= keys
        left -= each.seconds if keys else 0.0
        if left < 0:
            break
        if figures[each.model].seconds:
            texts |= {key._replace(depth=None) for _, key in keys}
        elif each.model not in names:
            names.append(each.model)
    added = [*names, format_count(len(texts), "more text")] if texts else names
    return [f"The same time again (--resume) would add {_join_words(added)}."] if added else []
