"""The verdict of a comparison: each method against the unmodified model, and the recommended one."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ctxext.compare.candidates import STOCK, Candidate
from ctxext.converters.engines import EXACT, PARTLY
from ctxext.evaluate.plan import ModelPlan
from ctxext.evaluate.report.findings import pool_cells
from ctxext.evaluate.report.intervals import adjust_confidence, mean_interval, paired_interval
from ctxext.evaluate.report.report import Report
from ctxext.evaluate.report.tables import in_percent
from ctxext.evaluate.run import Meter
from ctxext.evaluate.tasks.base import Record, list_text_numbers

_SAME_COST = 3
"""Decimals of equal costs, which are losses in nats per token."""

_Text = tuple[str, int, int]
"""A task, a length and a number: one text, with questions at several depths or for several samples."""


@dataclass(frozen=True)
class Difference:
    """A difference over texts that both models read, with its interval."""

    mean: float
    low: float
    high: float
    texts: int

    def to_dict(self) -> dict[str, Any]:
        """Return the difference as JSON, without an interval if that is infinite."""
        low, high = (self.low, self.high) if math.isfinite(self.high) else (None, None)
        return {"difference": self.mean, "low": low, "high": high, "texts": self.texts}


@dataclass(frozen=True)
class Measured:
    """Results of one model from single records.

    Attributes:
        answers: The score of each answer by text, and there by depth and sample.
        losses: The mean loss per token beyond the original context length, by kind of text and document.
        seconds: The time of each record.
        peak: The peak memory in bytes; None if unknown.
        beyond: The planned prompt lengths beyond the original context length.
    """

    answers: Mapping[_Text, Mapping[tuple[float | None, int], float]]
    losses: Mapping[tuple[str, int], float]
    seconds: Mapping[tuple[Any, ...], float]
    peak: int | None
    beyond: frozenset[int] = frozenset()

    def finds_more(self, other: "Measured", confidence: float = 0.95) -> Difference | None:
        """Return the difference in the share found, paired by question; questions about one text are not independent.

        If both models have planned lengths beyond the original one, only those count. Lengths at full score for both
        are left out: they carry no information about the better model, and dilute the others.
        """
        beyond, shared = self.beyond & other.beyond, self.answers.keys() & other.answers.keys()
        shared = {text for text in shared if not beyond or text[1] in beyond}
        wrong = {text[1] for text in shared for one in (self, other) if min(one.answers[text].values()) < 1}
        texts = []
        for text in sorted(text for text in shared if not wrong or text[1] in wrong):
            mine, theirs = self.answers[text], other.answers[text]
            if differences := [mine[question] - theirs[question] for question in mine.keys() & theirs.keys()]:
                texts.append(differences)
        if not texts:
            return None
        middle, half = paired_interval(texts, confidence)
        mean = fmean(difference for text in texts for difference in text)
        return Difference(mean, max(-1.0, middle - half), min(1.0, middle + half), len(texts))

    def loses_more(self, other: "Measured", confidence: float = 0.95, text: str | None = None) -> Difference | None:
        """Return the difference in loss beyond the original context length, paired by document; of one kind of text."""
        shared = self.losses.keys() & other.losses.keys()
        documents = sorted(document for document in shared if text in (None, document[0]))
        if not documents:
            return None
        differences = [self.losses[document] - other.losses[document] for document in documents]
        middle, half = mean_interval(differences, confidence)
        return Difference(middle, middle - half, middle + half, len(documents))

    def loses_more_by_text(self, other: "Measured", confidence: float = 0.95) -> dict[str, Difference]:
        """Return the same difference for each kind of text by its name; empty if there is only one."""
        texts = sorted({text for text, _ in self.losses if text})
        by_text = {text: self.loses_more(other, confidence, text) for text in texts}
        return {text: difference for text, difference in by_text.items() if difference}

    def times(self, other: "Measured") -> float | None:
        """Return the ratio of the times of the records that both models have; None without any."""
        shared = self.seconds.keys() & other.seconds.keys()
        theirs = math.fsum(other.seconds[record] for record in shared)
        return math.fsum(self.seconds[record] for record in shared) / theirs if theirs else None


def measured(records: Sequence[Record], trained_length: int | None, lengths: Sequence[int] = ()) -> Measured:
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
            asked = answers.setdefault((record["task"], record["length"], text), {})
            asked[record["depth"], sample] = float(right)
        buckets = enumerate(record.get("buckets") or () if trained_length else ())
        beyond = [sums for number, sums in buckets if number * record["width"] >= (trained_length or 0)]
        if count := sum(pair[1] for pair in beyond):
            losses[record.get("text", ""), samples[0]] = math.fsum(pair[0] for pair in beyond) / count
    far = frozenset(length for length in lengths if trained_length and length > trained_length)
    return Measured(answers, losses, seconds, max(peaks, default=None), far)


def comparison(
    report: Report, records: Sequence[Record], candidates: Sequence[Candidate], plans: Sequence[ModelPlan]
) -> dict[str, Any]:
    """Compare the models of a report: a row for the unmodified model and each candidate, and the method to take."""
    by_name = {model["name"]: model for model in report["models"]}
    trained = by_name[STOCK]["trained_length"]
    lengths = {entry.info.name: entry.lengths for entry in plans}
    figures = {
        name: measured([record for record in records if record.get("model") == name], trained, lengths.get(name, ()))
        for name in by_name
    }
    stock = figures[STOCK]
    confidence = adjust_confidence(len(figures) - 1)
    asked = {candidate.name: figures[candidate.name] for candidate in candidates if candidate.name in figures}
    found = {name: gain for name, mine in asked.items() if (gain := mine.finds_more(stock, confidence))}
    losses = {name: drop for name, mine in asked.items() if (drop := mine.loses_more(stock, confidence))}
    loss = fmean(stock.losses.values()) if stock.losses else None
    rows = [_row(by_name[STOCK]) | {"loss_beyond": loss, "peak": stock.peak}]
    for candidate in candidates:
        row: dict[str, Any] = {"name": candidate.name}
        row |= {"convert": list(candidate.words) or None, "refused": candidate.refusal or None}
        if candidate.plan is not None and candidate.name in by_name:
            mine, gain, drop = asked[candidate.name], found.get(candidate.name), losses.get(candidate.name)
            by_text = mine.loses_more_by_text(stock, confidence)
            peaks = mine.peak, stock.peak
            row |= _row(by_name[candidate.name]) | {
                "against": gain.to_dict() if gain else None,
                "beyond": drop.to_dict() if drop else None,
                "beyond_by_text": {text: difference.to_dict() for text, difference in by_text.items()},
                "inside": (by_name[candidate.name]["short"] or {}).get("against"),
                "time": mine.times(stock),
                "memory": peaks[0] / peaks[1] if peaks[0] and peaks[1] else None,
            }
            row["serving"] = [served.to_dict() for served in candidate.plan.serving]
        rows.append(row)
    shares = {name: _share(model["cells"], trained if stock.beyond else None) for name, model in by_name.items()}
    by_row = {row["name"]: row for row in rows}
    taken, nearest, sentence = _choice(by_row, shares, found, losses, asked, stock, trained, confidence)
    missing = [*_beyond_stock(plans), *_not_reached(plans, figures)]
    if any("none" in sentence for sentence in missing) and (minutes := _minutes_of_a_round(plans, records)):
        missing.append(
            f"Asking every method everything once takes about {minutes} minute{'' if minutes == 1 else 's'} here: give "
            "more --minutes, or fewer --methods or --lengths."
        )
    return {
        "models": rows,
        "confidence": confidence,
        "taken": taken,
        "nearest": nearest,
        "is_measured": any(mine.seconds for mine in asked.values()),
        "not_reached": missing,
        "verdict": " ".join([sentence, *missing]),
    }


def _row(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a model: its name, summary and recipe, and the share that it finds."""
    share, low, high = pool_cells(model["cells"])
    found = {"share": share, "low": low, "high": high, "samples": sum(cell["samples"] for cell in model["cells"])}
    return {
        **{key: model[key] for key in ("name", "summary", "recipe")},
        "found": found if model["cells"] else None,
        "refused": None,
    }


def _choice(
    rows: Mapping[str, Mapping[str, Any]],
    shares: Mapping[str, str],
    found: Mapping[str, Difference],
    losses: Mapping[str, Difference],
    asked: Mapping[str, Measured],
    stock: Measured,
    trained_length: int | None,
    confidence: float,
) -> tuple[str | None, str | None, str]:
    """Choose the method to take, if any is significantly better, and the nearest one; describe both in a sentence."""

    def price(name: str) -> tuple[float, float, int]:
        """Return a sort key for equally good methods: the cost inside, then the loss beyond, then the most engines."""
        inside, beyond = inside_of(rows[name]).get("difference", 0.0), losses[name].mean if name in losses else 0.0
        return round(inside, _SAME_COST), round(beyond, _SAME_COST), -len(engines_of(rows[name]))

    sure = [name for name, gain in found.items() if gain.low > 0]
    # If documents differ by the same amount, an interval may be below 0 by less than the shown decimals.
    lower = [
        name
        for name, drop in losses.items()
        if round(drop.high, _SAME_COST) < 0 and not (name in found and found[name].high < 0)
    ]
    if sure:
        best = _best_of({name: asked[name] for name in sure})
        apart = {name: asked[best].finds_more(asked[name], confidence) for name in sure}
        alike = [name for name, gain in apart.items() if name == best or gain is None or gain.low <= 0]
        taken = min(alike, key=price)
        where = f" beyond {trained_length} tokens" if stock.beyond else ""
        more = f"finds {shares[taken]} of what was asked{where}, where stock finds {shares[STOCK]}"
    elif lower:
        best = min(lower, key=lambda name: losses[name].mean)
        behind = {name: asked[name].loses_more(asked[best], confidence) for name in lower}
        fewer = {name: asked[best].finds_more(asked[name], confidence) for name in lower}
        alike = [
            name
            for name in lower
            if name == best or not any(worse and worse.low > 0 for worse in (behind[name], fewer[name]))
        ]
        taken = min(alike, key=price)
        drop = signed(losses[taken].to_dict())
        more = f"reads on beyond {trained_length} tokens with {drop} nats per token against stock"
        if found:
            more += f" ({shares[taken]} found, stock {shares[STOCK]}: not apart)"
    if sure or lower:
        return taken, taken, _sentence(taken, more, alike, rows, trained_length)
    if found:
        nearest = max(found, key=lambda name: found[name].mean)
        gain, texts = found[nearest], found[nearest].texts
        of_texts = f"{texts} text{'' if texts == 1 else 's'}"
        sentence = f"nearest comes {nearest}, which finds {signed(gain.to_dict(), 0, 100)} points more on {of_texts}"
    elif losses:
        nearest = min(losses, key=lambda name: losses[name].mean)
        loss = signed(losses[nearest].to_dict())
        sentence = f"nearest comes {nearest}, with {loss} nats per token beyond {trained_length} tokens"
    else:
        measured_inside = any(mine.answers for mine in asked.values())
        return None, None, f"Nothing was measured of any method{measured_inside * f' beyond {trained_length} tokens'}."
    return None, nearest, f"Nothing is better than stock beyond doubt: {sentence}."


def _sentence(
    taken: str, more: str, alike: Sequence[str], rows: Mapping[str, Mapping[str, Any]], trained_length: int | None
) -> str:
    """Recommend a method, with the reasons."""
    cost = inside_of(rows[taken]).get("difference")
    parts = [f"Take {taken}: it {more}"]
    if cost is not None:
        parts.append(f"it costs {f'{cost:+z.3f} nats per token' if cost else 'nothing'} at {trained_length} tokens")
    if engines := engines_of(rows[taken]):
        parts.append(f"it runs in {_listed(engines)}")
    sentence = _listed(parts)
    others = {name: inside_of(rows[name]).get("difference") for name in alike if name != taken}
    if others:
        named = [name if price is None else f"{name} ({price:+z.3f})" for name, price in others.items()]
        sentence += f"; no worse within what these questions can tell: {', '.join(named)}"
    return sentence + "."


def inside_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the difference in loss from the unmodified model at the original context length; empty if not measured."""
    inside = row.get("inside")
    return {**inside, "difference": inside["loss"]} if inside else {}


def engines_of(row: Mapping[str, Any]) -> list[str]:
    """Return the engines that run a method, even if only partly."""
    return [served["engine"] for served in row.get("serving") or () if served["status"] in (EXACT, PARTLY)]


def _best_of(asked: Mapping[str, Measured]) -> str:
    """Return the model that answers the most of the common questions at the deciding lengths."""
    texts = set.intersection(*({*mine.answers} for mine in asked.values()))
    beyond = frozenset.intersection(*(mine.beyond for mine in asked.values()))
    texts = {text for text in texts if not beyond or text[1] in beyond}
    return max(asked, key=lambda name: math.fsum(sum(asked[name].answers[text].values()) for text in texts))


def _share(cells: Sequence[dict[str, Any]], trained_length: int | None) -> str:
    """Return the share found, of the questions beyond a length if there is one, in words."""
    share, interval = in_percent([cell for cell in cells if not trained_length or cell["length"] > trained_length])
    return f"{share} % ({interval})"


def signed(difference: Mapping[str, Any] | None, decimals: int = 3, times: int = 1) -> str:
    """Format a difference with its interval, multiplied by `times`."""
    if not difference:
        return "–"
    text = f"{times * difference['difference']:+z.{decimals}f}"
    if difference["low"] is None:
        return text
    return f"{text} ({times * difference['low']:+z.{decimals}f} to {times * difference['high']:+z.{decimals}f})"


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _minutes_of_a_round(plans: Sequence[ModelPlan], records: Sequence[Record]) -> int:
    """Estimate the minutes of one sample of every cell for all models, from the measured records; 0 without any."""
    samples = plans[0].settings.samples
    meter, answered = Meter(plans, None, samples), [record for record in records if "task" in record]
    spent = sum(meter.cost(record["model"], [record["length"]] * len(record["samples"])) for record in answered)
    seconds = math.fsum(record["seconds"] for record in answered)
    return math.ceil(seconds / spent * meter.total / samples / 60) if spent else 0


def _beyond_stock(plans: Sequence[ModelPlan]) -> list[str]:
    """Name the lengths that the unmodified model cannot read and differences leave out, in a sentence or none."""
    reach = max(plans[0].lengths, default=0)
    lengths = sorted({length for entry in plans for length in entry.lengths if length > reach})
    if not lengths:
        return []
    further = _listed([str(length) for length in lengths])
    told = f"stock reads no more than {reach} tokens, so no difference tells of {further} tokens"
    return [f"{told}: there the methods stand beside each other alone."]


def _not_reached(plans: Sequence[ModelPlan], figures: Mapping[str, Measured]) -> list[str]:
    """List the planned work that was not reached for every model, in sentences; empty if all was."""
    from ctxext.evaluate.tasks.retrieval import num_questions

    counts: dict[str, dict[int, int]] = {}
    unread: dict[str, int] = {}
    for entry in plans:
        mine = figures[entry.info.name]
        for task in entry.tasks:
            times = num_questions(task, entry.settings) // entry.settings.samples
            for length in entry.lengths:
                texts = [asked for text, asked in mine.answers.items() if text[:2] == (task.name, length)]
                num_asked = sum(len({sample for _, sample in of_text}) for of_text in texts) // times
                by_length = counts.setdefault(task.name, {})
                by_length[length] = min(num_asked, by_length.get(length, num_asked))
        for name in {work.keys[0].task for work in entry.documents}:
            read = sum(key[0] == name for key in mine.seconds)
            unread[name] = min(read, unread.get(name, read))
    samples = plans[0].settings.samples
    short = {task: {n: count for n, count in lengths.items() if count < samples} for task, lengths in counts.items()}
    sentences = [
        f"{task}: of {samples} questions a depth the time reached "
        + ", ".join(f"{count or 'none'} at {length} tokens" for length, count in lengths.items())
        + "."
        for task, lengths in short.items()
        if lengths
    ]
    few = {task: read for task, read in unread.items() if read < samples}
    sentences += [f"{task}: {read or 'none'} of {samples} documents were read." for task, read in few.items()]
    return sentences
