"""The files of a report: report.html, with tables, heat maps and curves, report.json, and pictures."""

import base64
import dataclasses
import itertools
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ctxext.files.length import format_length
from ctxext.files.output_directory import write_whole
from ctxext.files.packages import install_command, is_installed
from ctxext.files.templates import load_template
from ctxext.report import tables
from ctxext.report.colours import hexadecimal, ink, series_style, shade
from ctxext.report.findings import describe_samples, findings, format_percent
from ctxext.report.forms import describe_form
from ctxext.report.report import HeatMap, Report, heat_map, tasks_of
from ctxext.tasks.longppl import LongPerplexity
from ctxext.tasks.perplexity import Short
from ctxext.tasks.registry import RETRIEVAL_TASKS, TASKS

_LONG_NAME = 24
_COMMON = 0.8
"""Minimum share of the names with the same part, which is then omitted."""
_PARTS = re.compile(r"([-_]*)([^-_]+)")
"""The separators before each word of a name, and the word."""
_MAX_NAMED, _MAX_TITLE = 3, 60
_MAX_DESCRIBED = _MAX_OPEN = 8
_WIDTHS = {"(max-width: 46rem)": 3.5, "": 7.2}
"""Width of the picture of losses in inches, by media condition; the text has the same size in all."""
_THEMES = {"(prefers-color-scheme: dark)": "dark", "": "light"}


def write_report(report: Report, folder: Path, added: Sequence[tables.Table] = ()) -> list[Path]:
    """Write report.json, report.html with some added tables, and the pictures, in this order, each file atomically.

    Without matplotlib there are no picture files, but report.html has heat maps.
    """
    files = {"report.json": (json.dumps(report, indent=2, ensure_ascii=False) + "\n").encode()}
    files["report.html"] = render_page(report, added).encode()
    if is_installed("matplotlib"):
        from ctxext.report.pictures import as_png, draw_heat_maps, draw_losses

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


def render_page(report: Report, added: Sequence[tables.Table] = ()) -> str:
    """Render the page from `page.html`, with some added tables after those of the tasks."""
    report = _with_short_names(report)
    models, settings, versions = report["models"], report["settings"], report["versions"]
    listed = ", ".join(model["name"] for model in models)
    of = f"{len(models)} models" if len(models) > _MAX_NAMED or len(listed) > _MAX_TITLE else listed
    engines = {"vllm": "vLLM", "xllamacpp": "llama.cpp by xllamacpp", "server": "served by"}
    ran = "".join(f", {name} {versions[package]}" for package, name in engines.items() if versions.get(package))
    filters = {"safe": _Markup, "percent": format_percent, "shade": shade, "hexadecimal": hexadecimal, "ink": ink}
    picture = _draw_losses(report)
    return load_template("ctxext.report", "page.html", _to_html, model_name=_get_name, **filters).render(
        title=f"Long context: {of}",
        subtitle=f"{describe_samples(report)}, seed {settings['seed']}, transformers"
        f" {versions['transformers']}, torch {versions['torch']}{ran}",
        summary=_make_summary(report),
        findings=findings(report),
        tasks=[_make_task(report, task) for task in tasks_of(report)],
        perplexity=_make_perplexity(report, has_lines=bool(picture["sources"])),
        picture=picture,
        is_folded=len(models) > _MAX_OPEN,
        tables=[
            *added,
            _make_longppl(report),
            _make_original_length(report),
            dataclasses.replace(tables.tabulate_harness(models), title="lm-evaluation-harness"),
        ],
        models=tables.tabulate_models(report),
        whole_names={model["name"]: model["whole"] for model in models},
        settings=tables.tabulate_settings(report),
        version=versions["ctxext"],
    )


class _Markup(str):
    """Text that is already HTML."""


def _to_html(value: Any) -> str:
    """Return a value as HTML."""
    if isinstance(value, _Markup):
        return value
    if not isinstance(value, tables.Cell):
        return escape(str(value))
    text, note = escape(value.text), escape(value.note)
    if value.style == "name":
        return f'{text}<br><span class="soft whole">{note}</span>' if note else text
    tag = {"best": "b", "code": "code"}.get(value.style)
    return (f"<{tag}>{text}</{tag}>" if tag else text) + (f' <span class="soft">({note})</span>' if note else "")


def _get_name(value: Any) -> str:
    """Return the model of a cell in the column of models."""
    return str(value.value if isinstance(value, tables.Cell) else value)


def _with_short_names(report: Report) -> Report:
    """Return a report with short model names, and the full name of each under "whole"."""
    names = shorten_names([model["name"] for model in report["models"]])
    models = []
    for model in report["models"]:
        short = model["short"]
        if against := (short or {}).get("against"):
            short = {**short, "against": {**against, "model": names.get(against["model"], against["model"])}}
        models.append({**model, "name": names[model["name"]], "whole": model["name"], "short": short})
    return {**report, "models": models}


def shorten_names(names: Sequence[str]) -> dict[str, str]:
    """Shorten names to the parts that differ, without the owner, unless all names are short.

    A name that has only common parts loses only its owner. If two names become equal, all keep their common parts,
    and also the owner if necessary.
    """
    if len(names) < 2 or max(map(len, names)) <= _LONG_NAME:
        return {name: name for name in names}
    bare = {name: name.rpartition("/")[2] for name in names}
    parts = {name: _PARTS.findall(without_owner) for name, without_owner in bare.items()}
    counts = Counter(part for of_name in parts.values() for part in {part for _, part in of_name})
    shortened = {}
    for name, without_owner in bare.items():
        rare = [separators + part for separators, part in parts[name] if counts[part] < _COMMON * len(names)]
        has_common = len(rare) < len(parts[name])
        shortened[name] = "".join(rare).lstrip("-_") if rare and has_common else without_owner
    for candidate in (shortened, bare):
        if len(set(candidate.values())) == len(names):
            return candidate
    return {name: name for name in names}


def _make_summary(report: Report) -> dict[str, Any]:
    """Return the table of models by prompt length, with a legend of its columns; empty without retrieval tasks."""
    if not (tasks := tasks_of(report)):
        return {}
    table = tables.tabulate_summary(report)
    by_task = tables.tabulate_effective_lengths(report, has_leaderboard=False)
    shortest = format_length(min(cell["length"] for model in report["models"] for cell in model["cells"]))
    legends = {
        "effective length": "Effective length: the longest length up to which a model keeps 85 % of its score at "
        f"{shortest} tokens; none if that score is below 85.6 %, RULER's threshold.",
        tables.leaderboard_heading(report["models"]): "RULER ≥ 85.6 %: the longest length up to which RULER's score is "
        "at least 85.6 % at every length, as on its leaderboard.",
        "cost, nats": "Cost: loss at the original context length against the source model.",
    }
    legend = [sentence for heading, sentence in legends.items() if heading in table.head]
    if any(cell.style == "best" for row in table.rows for cell in row):
        legend.insert(0, "Bold: the interval is above those of all other models.")
    return {
        "table": table,
        "over": f"the mean of {', '.join(tasks)}" if len(tasks) > 1 else tasks[0],
        "legend": " ".join(legend),
        "by_task": by_task.select([heading for heading in by_task.head if heading != "all"]),
    }


def _make_task(report: Report, task: str) -> dict[str, Any]:
    """Return the section of one task."""
    scores, settings = heat_map(report["models"], task), report["settings"]
    kind = RETRIEVAL_TASKS.get(task)
    is_chat = any(task in (model.get("forms") or {}) for model in report["models"])
    is_written = settings["generate"] or is_chat or (kind is not None and kind.is_written)
    description = kind.description if kind else ""
    options = kind.options if kind else ()
    if settings.get("filler") == "same" and "filler" in options:
        description += " The text consists only of such sentences."
    if settings.get("chain_of_thought") and "chain_of_thought" in options:
        description += " The model first writes its reasoning, and answers a second prompt without the text."
    if settings.get("repeat_question") and "repeat_question" in options:
        description += " The question is also before the text."
    legend = "Percentage of correct answers "
    legend += "by prompt length. " if scores.depths == [None] else "by depth and prompt length. "
    legend += "Each answer was generated." if is_written else f"{kind.scored if kind else 'Exact match'}."
    legend += "".join(f" {sentence}" for sentence in (describe_form(report["models"], task),) if sentence)
    if any(_is_beyond(model, length) for model, length in itertools.product(scores.models, scores.lengths)):
        legend += " *: beyond the model's original context length."
    return {
        "name": task,
        "description": description,
        "legend": legend,
        "depths": ["anywhere" if depth is None else round(100 * depth) for depth in scores.depths],
        "maps": [(length, _make_map(scores, length)) for length in scores.lengths],
        "groups": tables.tabulate_groups(scores),
        "counts": tables.tabulate_counts(scores),
    }


def _make_map(scores: HeatMap, length: int) -> list[tuple[Any, ...]]:
    """Return for each model its name, its mark, its cells at a length by depth, and its share with the interval."""
    rows = []
    for model in scores.models:
        cells, share, interval = tables.score_at(scores, model, length)
        if share:
            rows.append((model["name"], "*" if _is_beyond(model, length) else "", cells, share, interval))
    return rows


def _is_beyond(model: Mapping[str, Any], length: int) -> bool:
    return bool(model["trained_length"]) and length > model["trained_length"]


def _make_perplexity(report: Report, *, has_lines: bool) -> tables.Table:
    """Return the table of perplexity, with the line of each model in the picture."""
    table = tables.tabulate_perplexity(report)
    if not table.rows:
        return table
    task, lines = TASKS[table.title], map(_draw_line, range(len(report["models"])))
    head = ["line", "model", *(heading.replace(" tokens", "") for heading in table.head[2:])]
    rows = [
        ["" if text else next(lines), tables.Cell(f"{name}{text and f', {text}'}", name), *cells]
        for name, text, *cells in table.rows
    ]
    note = f"{task.description}\nText: {_get_data_name(report)}."
    return tables.Table(task.name.capitalize(), head, rows).select(head if has_lines else head[1:], note=note)


def _make_longppl(report: Report) -> tables.Table:
    note = f"{LongPerplexity.description}\n{tables.describe_evaluator(report)}Text: {_get_data_name(report)}."
    head = ["model", "tokens", "loss, nats per token", "key tokens", "of", "documents"]
    return dataclasses.replace(tables.tabulate_key_tokens(report), title="LongPPL", head=head, note=note)


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
    columns = ("model", "tokens", "perplexity", "loss against source, nats per token", "source")
    note = f"{Short.description} Text: {_get_data_name(report)}."
    return tables.tabulate_original_length(report).select(columns, "At the original context length", note)


def _draw_losses(report: Report) -> dict[str, Any]:
    """Draw losses by position for wide and narrow screens in both themes; the browser selects one."""
    curves = [model["perplexity"] for model in report["models"] if model["perplexity"]]
    picture: dict[str, Any] = {"sources": [], "description": "", "install": ""}
    picture["stride"] = report["settings"]["stride"] if curves and "sliding" in curves[0] else ""
    if not is_installed("matplotlib"):
        return {**picture, "install": install_command("matplotlib")}
    from ctxext.report.pictures import as_png, draw_losses

    for (narrow, inches), (dark, theme) in itertools.product(_WIDTHS.items(), _THEMES.items()):
        figure = draw_losses(report, theme=theme, has_legend=False, width=inches)
        if figure is None:
            return picture
        width, height = (round(96 * size) for size in figure.get_size_inches())
        data = "data:image/png;base64," + base64.b64encode(as_png(figure)).decode()
        media = " and ".join(filter(None, (narrow, dark)))
        picture["sources"].append({"media": media, "data": data, "width": width, "height": height})
    return {**picture, "description": _describe_losses(report)}


def _describe_losses(report: Report) -> str:
    """Describe each model's loss at the start, at the original context length, and at the end.

    Of many models, only the lowest and the highest loss at the end are described.
    """
    models = [model for model in report["models"] if model["perplexity"]]
    longest = max(model["perplexity"]["length"] for model in models)
    texts = []
    for model in models:
        curve, trained = model["perplexity"]["curve"], model["trained_length"]
        places = {"at the start": curve[0], "at the end": curve[-1]}
        inside = [point for point in curve if trained and point["end"] <= trained < curve[-1]["end"]]
        if inside[1:]:
            places = {"at the start": curve[0], f"at {format_length(trained)}": inside[-1], "at the end": curve[-1]}
        shown = ", ".join(f"{point['loss']:.2f} {place}" for place, point in places.items())
        texts.append(f"{model['name']}: {shown}")
    if len(models) > _MAX_DESCRIBED:
        ends = sorted((model["perplexity"]["curve"][-1]["loss"], model["name"]) for model in models)
        (least, lowest), (most, highest) = ends[0], ends[-1]
        texts = [f"{len(models)} models, at the end from {lowest}, {least:.2f}, to {highest}, {most:.2f}"]
    return f"Loss in nats per token by position, up to {format_length(longest)} tokens. {'; '.join(texts)}."
