"""The files of a report: report.html, with tables, heat maps and curves, report.json, and pictures."""

import base64
import functools
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ctxext.evaluate.report import tables
from ctxext.evaluate.report.colours import hexadecimal, ink, series_style, shade
from ctxext.evaluate.report.findings import findings, format_percent, pool_cells
from ctxext.evaluate.report.report import HeatMap, Report, heat_map, tasks_of
from ctxext.evaluate.tasks.longppl import LongPerplexity
from ctxext.evaluate.tasks.perplexity import Short
from ctxext.evaluate.tasks.registry import RETRIEVAL_TASKS, TASKS
from ctxext.files.length import format_length
from ctxext.files.output_directory import write_whole
from ctxext.files.packages import install_command, is_installed

if TYPE_CHECKING:
    from jinja2 import Template

_LONG_NAME = 24
_COMMON = 0.8
"""Minimum share of the names with the same part, which is then omitted."""
_SEPARATORS = re.compile(r"[-_]+")
_MAX_NAMED, _MAX_TITLE = 3, 60


def write_report(report: Report, folder: Path) -> list[Path]:
    """Write report.json, report.html and the pictures, in this order, each file atomically.

    Without matplotlib there are no picture files, but report.html has heat maps.
    """
    files = {"report.json": (json.dumps(report, indent=2, ensure_ascii=False) + "\n").encode()}
    files["report.html"] = render_page(report).encode()
    if is_installed("matplotlib"):
        from ctxext.evaluate.report.pictures import as_png, draw_heat_maps, draw_losses

        for task in tasks_of(report):
            if len(report["models"]) > 1:
                files[f"{task}.png"] = as_png(draw_heat_maps(heat_map(report["models"], task)))
            for model in report["models"]:
                of_model = heat_map([model], task)
                if of_model.models:
                    name = re.sub(r"[^\w.-]+", "-", model["name"]).strip("-.") or "model"
                    files[f"{task}-{name}.png"] = as_png(draw_heat_maps(of_model))
        if figure := draw_losses(report):
            files["perplexity.png"] = as_png(figure)
    for name, content in files.items():
        write_whole(folder / name, content)
    return [folder / name for name in files]


@functools.cache
def _load_template() -> "Template":
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined, finalize=_escape
    )
    environment.filters |= {"safe": _Markup, "full_name": _format_full_name, "percent": format_percent, "shade": shade}
    environment.filters |= {"hexadecimal": hexadecimal, "ink": ink}
    return environment.from_string(resources.files("ctxext.evaluate.report").joinpath("page.html").read_text("utf-8"))


def render_page(report: Report) -> str:
    """Render the page from `page.html`."""
    report = _with_short_names(report)
    models, settings, versions = report["models"], report["settings"], report["versions"]
    listed = ", ".join(model["name"] for model in models)
    of = f"{len(models)} models" if len(models) > _MAX_NAMED or len(listed) > _MAX_TITLE else listed
    engines = {"vllm": "vLLM", "xllamacpp": "llama.cpp by xllamacpp", "server": "served by"}
    ran = "".join(f", {name} {versions[package]}" for package, name in engines.items() if versions.get(package))
    return _load_template().render(
        title=f"Long context: {of}",
        subtitle=f"{settings['samples']} samples per cell, seed {settings['seed']}, transformers"
        f" {versions['transformers']}, torch {versions['torch']}{ran}",
        summary=_make_summary(report),
        findings=findings(report),
        tasks=[_make_task(report, task) for task in tasks_of(report)],
        perplexity=_make_perplexity(report),
        picture=_draw_losses(report),
        tables=[_make_longppl(report), _make_original_length(report), _make_harness(report)],
        models=_make_models(report),
        settings=_make_settings(report),
        version=versions["ctxext"],
    )


class _Markup(str):
    """Text that is already HTML."""


def _escape(value: Any) -> str:
    """Escape a value for the page, unless it is already HTML."""
    return value if isinstance(value, _Markup) else escape(str(value))


def _with_short_names(report: Report) -> Report:
    """Return a report with short model names, and the full name of each under "whole"."""
    names = shorten_names([model["name"] for model in report["models"]])
    models = [{**model, "name": names[model["name"]], "whole": model["name"]} for model in report["models"]]
    return {**report, "models": models, "names": names}


def shorten_names(names: Sequence[str]) -> dict[str, str]:
    """Shorten names to the parts that differ, without the owner, unless all names are short.

    A name that has only common parts loses only its owner. If two names become equal, all keep their common parts,
    and also the owner if necessary.
    """
    if len(names) < 2 or max(map(len, names)) <= _LONG_NAME:
        return {name: name for name in names}
    bare = {name: name.rpartition("/")[2] for name in names}
    counts = Counter(part for name in bare.values() for part in set(_SEPARATORS.split(name)))
    shortened = {}
    for name, without_owner in bare.items():
        parts = [part for part in _SEPARATORS.split(without_owner) if counts[part] < _COMMON * len(names)]
        shortened[name] = "-".join(parts) or without_owner
    for candidate in (shortened, bare):
        if len(set(candidate.values())) == len(names):
            return candidate
    return {name: name for name in names}


def _format_full_name(model: Mapping[str, Any]) -> _Markup:
    """Format a short name, with the full name below it if they differ."""
    name, whole = escape(model["name"]), escape(model["whole"])
    return _Markup(f'{name}<br><span class="soft whole">{whole}</span>' if whole != name else name)


def _format_code(text: str) -> _Markup:
    return _Markup(f"<code>{text}</code>")


class _Cell(NamedTuple):
    """A cell of the summary, with the sort value of its column."""

    value: Any
    text: str
    interval: str = ""
    is_best: bool = False


def _make_summary(report: Report) -> dict[str, Any]:
    """Return the table of models by prompt length; empty without retrieval tasks."""
    models = [model for model in report["models"] if model["cells"]]
    if not models:
        return {}
    tasks = tasks_of(report)
    lengths = sorted({cell["length"] for model in models for cell in model["cells"]})
    costs = {model["name"]: (model["short"] or {}).get("against") for model in models}
    head = ["model", *(f"{format_length(length)} tokens" for length in lengths)]
    leaderboard = tables.leaderboard_heading(models)
    head += ["effective length"] * (len(lengths) > 1) + [leaderboard] * bool(leaderboard)
    head += ["cost, nats"] * any(costs.values())
    rows: dict[str, list[_Cell]] = {model["name"]: [] for model in models}
    for length in lengths:
        scores = {
            model["name"]: pool_cells(cells)
            for model in models
            if (cells := [cell for cell in model["cells"] if cell["length"] == length])
        }
        first, *others = sorted(scores.values(), reverse=True)
        is_best = bool(others) and first[1] > max(high for _, _, high in others)
        for name, row in rows.items():
            if (score := scores.get(name)) is None:
                row.append(_Cell(-1, "–"))
            else:
                share, low, high = score
                interval = f"{format_percent(low)}–{format_percent(high)}"
                row.append(_Cell(f"{share:.6f}", format_percent(share), interval, is_best and score == first))
    for model in models:
        row, effective, cost = rows[model["name"]], model.get("effective"), costs[model["name"]]
        if len(lengths) > 1:
            text = tables.effective_text(effective, lengths[-1])
            row.append(_Cell((effective or {}).get("length") or 0, text))
        if leaderboard:
            ruler = model.get("ruler")
            row.append(_Cell((ruler or {}).get("length") or 0, tables.leaderboard_text(ruler)))
        if any(costs.values()):
            row.append(_Cell(f"{cost['loss']:.6f}", f"{cost['loss']:+z.3f}") if cost else _Cell(0, "–"))
    return {
        "over": f"the mean of {', '.join(tasks)}" if len(tasks) > 1 else tasks[0],
        "shortest": format_length(lengths[0]),
        "leaderboard": leaderboard,
        "head": head,
        "rows": [(model, rows[model["name"]]) for model in models],
    }


def _make_task(report: Report, task: str) -> dict[str, Any]:
    """Return the section of one task."""
    scores, settings = heat_map(report["models"], task), report["settings"]
    kind = RETRIEVAL_TASKS.get(task)
    is_written = report["settings"]["generate"] or (kind is not None and kind.is_written)
    description = kind.description if kind else ""
    options = kind.options if kind else ()
    if settings.get("filler") == "same" and "filler" in options:
        description += " The text consists only of such sentences."
    if settings.get("reason") and "reason" in options:
        description += " The model may reason before its answer."
    if settings.get("repeat_question") and "repeat_question" in options:
        description += " The question is also before the text."
    effective_lengths = []
    for model in scores.models:
        effective = (model.get("effective") or {}).get("tasks", {}).get(task)
        if effective:
            effective_lengths.append(f"{model['name']} {tables.effective_text(effective, scores.lengths[-1])}")
    return {
        "name": task,
        "description": description,
        "answered": "Each answer was generated" if is_written else kind.scored if kind else "Exact match",
        "depths": ["anywhere" if depth is None else round(100 * depth) for depth in scores.depths],
        "maps": [(length, _make_map(scores, length)) for length in scores.lengths],
        "effective": "; ".join(effective_lengths),
        "counts": _make_counts(scores),
    }


def _make_map(scores: HeatMap, length: int) -> list[tuple[Any, ...]]:
    """Return for each model its name, its cells at a length by depth, and its share with the interval."""
    rows = []
    for model in scores.models:
        cells = scores.row(model, length)
        if measured := [cell for cell in cells if cell]:
            beyond = "*" if model["trained_length"] and length > model["trained_length"] else ""
            rows.append((f"{model['name']}{beyond}", cells, *tables.in_percent(measured)))
    return rows


def _make_counts(scores: HeatMap) -> tables.Table:
    rows = [
        [
            name,
            cell["length"],
            "–" if cell["depth"] is None else f"{100 * cell['depth']:g} %",
            f"{cell['correct']:g} of {cell['samples']}",
            f"{100 * cell['share']:.1f} %",
            f"{100 * cell['low']:.1f}–{100 * cell['high']:.1f} %",
        ]
        for (name, _, _), cell in scores.cells.items()
    ]
    return tables.Table("", ["model", "tokens", "depth", "correct", "share", "95 % interval"], rows)


def _make_models(report: Report) -> tables.Table:
    rows = [
        [
            _format_full_name(model),
            model["summary"],
            model["trained_length"],
            model["context_length"],
            _format_computed(model),
            _format_code(model["digest"][:12]),
        ]
        for model in report["models"]
    ]
    head = ["model", "recipe", "original context length", "context length", "dtype, attention, device", "digest"]
    return tables.Table("Models", head, rows)


def _format_computed(model: Mapping[str, Any]) -> str:
    """Return dtype, attention and device of a model, or its server and its name there."""
    if "served_model" in model:
        return f"{model['engine']}, {model['served_model'] or 'default model'}"
    return f"{model.get('dtype')}, {model.get('attention')}, {model.get('device')}"


def _make_perplexity(report: Report) -> tables.Table:
    name, lengths, curves = tables.perplexities(report)
    if not curves:
        return tables.Table("", [], [])
    task = TASKS[name]
    kinds = {"lengths": "", **({"sliding": ", sliding"} if "sliding" in curves[0][2] else {})}
    head = ["", "model", "documents", *(f"{length}{note}" for note in kinds.values() for length in lengths)]
    lines = map(_draw_line, range(len(report["models"])))
    rows = [
        ["" if text else next(lines), f"{model['name']}{text and f', {text}'}", curve["documents"]]
        + [figure for kind in kinds for figure in tables.figures(curve[kind], lengths)]
        for model, text, curve in curves
    ]
    return tables.Table(task.name.capitalize(), head, rows, f"{task.description}\nText: {_get_data_name(report)}.")


def _make_longppl(report: Report) -> tables.Table:
    head = ["model", "tokens", "loss, nats per token", "key tokens", "of", "documents"]
    note = f"{LongPerplexity.description}\n{tables.describe_evaluator(report)}Text: {_get_data_name(report)}."
    return tables.Table("LongPPL", head, tables.key_token_rows(report), note)


def _draw_line(number: int) -> _Markup:
    """Draw a line in the colour and dashes of a model's curve."""
    colour, dashes = series_style(number)
    pattern = ",".join(f"{2 * part:g}" for part in dashes)
    dash = f' stroke-dasharray="{pattern}"' if pattern else ""
    return _Markup(
        '<svg width="44" height="8" aria-hidden="true">'
        f'<line x1="0" y1="4" x2="44" y2="4" stroke="{colour}" stroke-width="3"{dash}/></svg>'
    )


def _get_data_name(report: Report) -> str:
    data = report["settings"]["data"]
    return data["name"] if isinstance(data, dict) else data or "generated prose of the package"


def _make_original_length(report: Report) -> tables.Table:
    rows = []
    for model in report["models"]:
        if measured := model["short"]:
            change, interval = tables.change_in_loss(measured)
            against = measured["against"]["model"] if change else "–"
            change = f"{change} ({interval})" if interval else change or "–"
            figures = [measured["length"], f"{measured['perplexity']:.3f}", change]
            rows.append([model["name"], *figures, report["names"].get(against, against)])
    head = ["model", "tokens", "perplexity", "loss against source, nats per token", "source"]
    note = f"{Short.description} Text: {_get_data_name(report)}."
    return tables.Table("At the original context length", head, rows, note)


def _make_harness(report: Report) -> tables.Table:
    rows = tables.harness_rows(report["models"])
    return tables.Table("lm-evaluation-harness", ["model", "task", "metric", "value"], rows)


def _make_settings(report: Report) -> tables.Table:
    rows = [[key, value] for key, value in report["settings"].items() if value is not None]
    rows += report["versions"].items()
    rows += [[f"digest of {model['name']}", _format_code(model["digest"])] for model in report["models"]]
    return tables.Table("Settings", [], rows)


def _draw_losses(report: Report) -> dict[str, Any]:
    """Draw losses by position in both themes; the browser selects one."""
    curves = [model["perplexity"] for model in report["models"] if model["perplexity"]]
    picture = dict.fromkeys(("light", "dark", "width", "description", "install"), "")
    picture["stride"] = report["settings"]["stride"] if curves and "sliding" in curves[0] else ""
    if not is_installed("matplotlib"):
        return {**picture, "install": install_command("matplotlib")}
    from ctxext.evaluate.report.pictures import as_png, draw_losses

    for theme in ("light", "dark"):
        figure = draw_losses(report, theme=theme, has_legend=False)
        if figure is None:
            return picture
        picture["width"] = round(figure.get_size_inches()[0] * 96)
        picture[theme] = "data:image/png;base64," + base64.b64encode(as_png(figure)).decode()
    return {**picture, "description": _describe_losses(report)}


def _describe_losses(report: Report) -> str:
    """Describe each model's loss at the start, at the original context length, and at the end."""
    texts = []
    for model in report["models"]:
        if model["perplexity"]:
            curve, trained = model["perplexity"]["curve"], model["trained_length"]
            places = {"at the start": curve[0], "at the end": curve[-1]}
            inside = [point for point in curve if trained and point["end"] <= trained < curve[-1]["end"]]
            if inside[1:]:
                places = {"at the start": curve[0], f"at {format_length(trained)}": inside[-1], "at the end": curve[-1]}
            shown = ", ".join(f"{point['loss']:.2f} {place}" for place, point in places.items())
            texts.append(f"{model['name']}: {shown}")
    longest = max(model["perplexity"]["length"] for model in report["models"] if model["perplexity"])
    return f"Loss in nats per token by position, up to {format_length(longest)} tokens. {'; '.join(texts)}."
