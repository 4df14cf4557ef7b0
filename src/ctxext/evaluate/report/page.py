"""The files of a report: report.html, a single file with the tables, heat maps and curves, and those beside it."""

import base64
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from ctxext.evaluate.report import tables
from ctxext.evaluate.report.colours import hexadecimal, ink, series_style, shade
from ctxext.evaluate.report.findings import findings, percent, pooled
from ctxext.evaluate.report.report import HeatMap, Report, heat_map, tasks_of
from ctxext.evaluate.tasks.perplexity import LongPerplexity, Short
from ctxext.evaluate.tasks.registry import RETRIEVAL_TASKS, TASKS
from ctxext.files.length import format_length
from ctxext.files.output_directory import write_whole
from ctxext.files.packages import install_command, is_installed

_LONG_NAME = 24
_COMMON = 0.8
"""The share of names above which a part of a name is left out."""
_SEPARATORS = re.compile(r"[-_]+")
_MAX_NAMED, _MAX_TITLE = 3, 60


def write_report(report: Report, folder: Path) -> list[Path]:
    """Write report.json, report.html and the pictures, in this order; each file appears whole or not at all.

    Without matplotlib there are no picture files; the heat maps of report.html do not need it.
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


def render_page(report: Report) -> str:
    """Render the page."""
    report = _with_short_names(report)
    models, settings, versions = report["models"], report["settings"], report["versions"]
    items = "\n".join(f"<li>{escape(sentence)}</li>" for sentence in findings(report))
    sections = [summary(report), f'<div class="findings"><ul>\n{items}\n</ul></div>' if items else ""]
    sections += [maps(report, task) for task in tasks_of(report)]
    sections += [_perplexity(report), _section(_longppl(report)), _section(_short(report)), _section(_harness(report))]
    sections += [_section(_models(report), words=(1, 4)), _settings(report)]
    listed = ", ".join(model["name"] for model in models)
    of = f"{len(models)} models" if len(models) > _MAX_NAMED or len(listed) > _MAX_TITLE else listed
    engines = {"vllm": "vLLM", "xllamacpp": "llama.cpp by xllamacpp"}
    ran = "".join(f", {name} {versions[package]}" for package, name in engines.items() if versions.get(package))
    template = resources.files("ctxext.evaluate.report").joinpath("page.html").read_text(encoding="utf-8")
    return Template(template).substitute(
        title=escape(f"Long context: {of}"),
        subtitle=escape(
            f"{settings['samples']} samples per cell, seed {settings['seed']}, transformers"
            f" {versions['transformers']}, torch {versions['torch']}{ran}"
        ),
        sections="\n".join(section for section in sections if section),
        version=escape(versions["ctxext"]),
    )


def _with_short_names(report: Report) -> Report:
    """Return a report with short model names, and the full name of each under "whole"."""
    names = short_names([model["name"] for model in report["models"]])
    models = [{**model, "name": names[model["name"]], "whole": model["name"]} for model in report["models"]]
    return {**report, "models": models, "names": names}


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Shorten names to the parts that differ, without the owner; a single name and names that are all short are kept.

    A name that consists of common parts alone only loses its owner. If two names become the same, all keep their
    common parts, or stay whole if that is not enough.
    """
    if len(names) < 2 or max(map(len, names)) <= _LONG_NAME:
        return {name: name for name in names}
    bare = {name: name.rpartition("/")[2] for name in names}
    counts = Counter(part for name in bare.values() for part in set(_SEPARATORS.split(name)))
    short = {}
    for name, without_owner in bare.items():
        parts = [part for part in _SEPARATORS.split(without_owner) if counts[part] < _COMMON * len(names)]
        short[name] = "-".join(parts) or without_owner
    for candidate in (short, bare):
        if len(set(candidate.values())) == len(names):
            return candidate
    return {name: name for name in names}


class _Markup(str):
    """Text that is HTML already."""


def _section(table: tables.Table, words: Sequence[int] = (), picture: str = "") -> str:
    """A table with its title, its note and a picture above it; nothing where it has no rows."""
    note = f"<p>{escape(table.note)}</p>\n" if table.note else ""
    return f"<h2>{table.title}</h2>\n{note}{picture}{_table(table.head, table.rows, words)}" if table.rows else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]], words: Sequence[int] = ()) -> str:
    """An HTML table in a box that scrolls by itself.

    Args:
        head: Headings of the columns; empty for a table without headings.
        rows: Cells.
        words: Indices of the columns that hold words.
    """

    def line(cells: Sequence[Any], tag: str) -> str:
        marks = [' class="text"' if number in words else "" for number in range(len(cells))]
        texts = [cell if isinstance(cell, _Markup) else escape(str(cell)) for cell in cells]
        return "".join(f"<{tag}{mark}>{text}</{tag}>" for mark, text in zip(marks, texts, strict=True))

    heading = f"<thead><tr>{line(head, 'th')}</tr></thead>" if head else ""
    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f'<div class="wide"><table>{heading}<tbody>{body}</tbody></table></div>'


def _model_name(model: Mapping[str, Any]) -> _Markup:
    """A short name, with the whole name below it if they differ."""
    whole = model.get("whole", model["name"])
    below = f'<br><span class="soft whole">{escape(whole)}</span>' if whole != model["name"] else ""
    return _Markup(f"{escape(model['name'])}{below}")


def summary(report: Report) -> str:
    """The table of every model by prompt length, with a filter; empty without retrieval tasks."""
    models = [model for model in report["models"] if model["cells"]]
    if not models:
        return ""
    tasks = tasks_of(report)
    lengths = sorted({cell["length"] for model in models for cell in model["cells"]})
    costs = {model["name"]: (model["short"] or {}).get("against") for model in models}
    head = ["model", *(f"{format_length(length)} tokens" for length in lengths)]
    head += ["effective length"] * (len(lengths) > 1) + ["cost inside, nats"] * any(costs.values())
    rows = {
        model["name"]: [
            f'<th scope="row" data-value="{escape(model.get("whole", model["name"]))}">{_model_name(model)}</th>'
        ]
        for model in models
    }
    for length in lengths:
        scores = {
            model["name"]: pooled(cells)
            for model in models
            if (cells := [cell for cell in model["cells"] if cell["length"] == length])
        }
        first, *others = sorted(scores.values(), reverse=True)
        is_apart = others and first[1] > max(high for _, _, high in others)
        for name, row in rows.items():
            share, low, high = score = scores.get(name, (-1, 0, 0))
            figure = f"<b>{percent(share)}</b>" if is_apart and score == first else percent(share)
            text = f'{figure} <span class="soft">({percent(low)}–{percent(high)})</span>'
            row.append(_sorted_cell(f"{share:.6f}", text) if name in scores else _sorted_cell(-1, "–"))
    for model in models:
        row, effective, cost = rows[model["name"]], model.get("effective"), costs[model["name"]]
        if len(lengths) > 1:
            text = tables.effective_text(effective, lengths[-1])
            row.append(_sorted_cell((effective or {}).get("length") or 0, text))
        if any(costs.values()):
            row.append(_sorted_cell(f"{cost['loss']:.6f}", f"{cost['loss']:+z.3f}") if cost else _sorted_cell(0, "–"))
    over = escape(f"the mean of {', '.join(tasks)}" if len(tasks) > 1 else tasks[0])
    return f"""<h2>Summary</h2>
<p class="soft">Percent right: {over}, with the 95 % interval (over texts); bold where it is above the intervals of all
other models. Effective length: the longest length up to which a model keeps 85 % of its score at
{format_length(lengths[0])} tokens, and none if that score is below 85.6 %, the threshold of RULER. Cost inside: loss
inside the original context length against the source model. Click a heading to sort.</p>
<p><input type="search" id="filter" placeholder="Filter models" aria-label="Filter models"></p>
<div class="wide"><table class="summary" id="summary">
<thead><tr>{"".join(f'<th scope="col"><button type="button">{cell}</button></th>' for cell in head)}</tr></thead>
<tbody>{"".join(f"<tr>{''.join(row)}</tr>" for row in rows.values())}</tbody></table></div>"""


def _sorted_cell(value: Any, shown: str) -> str:
    """A cell with the value that its column is sorted by."""
    return f'<td data-value="{value}">{shown}</td>'


def maps(report: Report, task: str) -> str:
    """The section of one task."""
    scores = heat_map(report["models"], task)
    kind = RETRIEVAL_TASKS.get(task)
    is_written = report["settings"]["generate"] or (kind is not None and kind.is_written)
    answered = "Each answer was generated" if is_written else kind.scored if kind else "Exact match"
    return f"""<h2>{escape(task)}</h2>
<p>{escape(kind.description if kind else "")}{_asked(report["settings"], task)}</p>
<p class="soft">Percent right by depth and prompt length. {answered}. Lengths that are longer than a model was trained
for are marked with * at its name.</p>
<div class="maps">{"".join(_map(scores, length) for length in scores.lengths)}</div>
{_effective_lengths(scores)}
<details><summary>Counts and intervals</summary>{_counts(scores)}</details>"""


def _asked(settings: Mapping[str, Any], task: str) -> str:
    same = " The text is made of nothing but such sentences." if settings.get("filler") == "same" else ""
    first = " The question was asked before the text too." if settings.get("repeat_question") else ""
    return same * (task == "needle") + first


def _map(scores: HeatMap, length: int) -> str:
    """The scores of all models at a length, with a column for each depth."""
    rows = []
    for model in scores.models:
        cells = scores.row(model, length)
        if measured := [cell for cell in cells if cell]:
            share, interval = tables.in_percent(measured)
            beyond = "*" if model["trained_length"] and length > model["trained_length"] else ""
            rows.append(
                f'<tr><th scope="row">{escape(model["name"])}{beyond}</th>{"".join(map(_map_cell, cells))}'
                f'<td class="all"><b>{share}</b> ({interval})</td></tr>'
            )
    head = "".join(f"<th>{'anywhere' if depth is None else round(100 * depth)}</th>" for depth in scores.depths)
    return (
        f'<table class="map" style="--cells:{len(scores.depths)}"><caption>{length} tokens</caption>'
        f'<thead><tr><th>depth %</th>{head}<th class="all">all</th></tr></thead><tbody>{"".join(rows)}</tbody></table>'
    )


def _map_cell(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return '<td class="cell">–</td>'
    colour = shade(cell["share"])
    style = f"background:{hexadecimal(colour)};color:{ink(colour)}"
    return f'<td class="cell" style="{style}">{percent(cell["share"])}</td>'


def _effective_lengths(scores: HeatMap) -> str:
    texts = []
    for model in scores.models:
        effective = (model.get("effective") or {}).get("tasks", {}).get(scores.task)
        if effective:
            texts.append(f"{escape(model['name'])} {tables.effective_text(effective, scores.lengths[-1])}")
    return f"<p>Effective length: {'; '.join(texts)}.</p>" if texts else ""


def _counts(scores: HeatMap) -> str:
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
    return _table(["model", "tokens", "depth", "right", "share", "95 % interval"], rows)


def _models(report: Report) -> tables.Table:
    rows = [
        [
            _model_name(model),
            model["summary"],
            model["trained_length"],
            model["context_length"],
            f"{model.get('dtype')}, {model.get('attention')}, {model.get('device')}",
            _Markup(f"<code>{model['digest'][:12]}</code>"),
        ]
        for model in report["models"]
    ]
    head = ["model", "recipe", "original context length", "context length", "computed in", "digest"]
    return tables.Table("Models", head, rows)


def _perplexity(report: Report) -> str:
    name, lengths, curves = tables.perplexities(report)
    if not curves:
        return ""
    task = TASKS[name]
    kinds = {"lengths": "", **({"sliding": ", sliding"} if "sliding" in curves[0][2] else {})}
    head = ["", "model", "documents", *(f"{length}{note}" for note in kinds.values() for length in lengths)]
    lines = map(_line, range(len(report["models"])))
    rows = [
        ["" if text else next(lines), f"{model['name']}{text and f', {text}'}", curve["documents"]]
        + [figure for kind in kinds for figure in tables.figures(curve[kind], lengths)]
        for model, text, curve in curves
    ]
    stride = report["settings"]["stride"]
    sliding = f" Sliding: a window of that length moves on by {stride} tokens." if "sliding" in kinds else ""
    picture = f"""{_losses(report)}
<p class="soft">Faint points are measured, lines are smoothed over three of them. Perplexity over the first so many
tokens.{sliding}</p>
"""
    note = f"{task.description}\nText: {_data_name(report)}."
    return _section(tables.Table(task.name.capitalize(), head, rows, note), words=(1,), picture=picture)


def _longppl(report: Report) -> tables.Table:
    head = ["model", "tokens", "loss, nats per token", "key tokens", "of", "documents"]
    evaluator = report["settings"].get("evaluator")
    note = f"{LongPerplexity.description}\nEvaluator: {evaluator}. Text: {_data_name(report)}."
    return tables.Table("LongPPL", head, tables.key_token_rows(report), note)


def _line(number: int) -> _Markup:
    """A line in the colour and dashes of a model's curve."""
    colour, dashes = series_style(number)
    pattern = ",".join(f"{2 * part:g}" for part in dashes)
    dash = f' stroke-dasharray="{pattern}"' if pattern else ""
    return _Markup(
        '<svg width="44" height="8" aria-hidden="true">'
        f'<line x1="0" y1="4" x2="44" y2="4" stroke="{colour}" stroke-width="3"{dash}/></svg>'
    )


def _data_name(report: Report) -> str:
    data = report["settings"]["data"]
    return data["name"] if isinstance(data, dict) else data or "made-up prose of the package, from a small grammar"


def _short(report: Report) -> tables.Table:
    rows = []
    for model in report["models"]:
        if short := model["short"]:
            change, interval = tables.change_in_loss(short)
            against = short["against"]["model"] if change else "–"
            change = f"{change} ({interval})" if interval else change or "–"
            figures = [short["length"], f"{short['perplexity']:.3f}", change]
            rows.append([model["name"], *figures, report["names"].get(against, against)])
    head = ["model", "tokens", "perplexity", "loss against source, nats per token", "source"]
    note = f"{Short.description} Text: {_data_name(report)}."
    return tables.Table("At the original context length", head, rows, note)


def _harness(report: Report) -> tables.Table:
    rows = tables.harness_rows(report["models"])
    return tables.Table("lm-evaluation-harness", ["model", "task", "metric", "value"], rows)


def _settings(report: Report) -> str:
    rows = [[key, value] for key, value in report["settings"].items() if value is not None]
    rows += report["versions"].items()
    rows += [[f"digest of {model['name']}", _Markup(f"<code>{model['digest']}</code>")] for model in report["models"]]
    shown = _table([], rows, words=(1,))
    return f"<h2>Settings</h2>\n<details><summary>Everything that was set</summary>{shown}</details>"


def _losses(report: Report) -> str:
    """Losses by position as a picture inside the page, in both themes; the browser's setting decides which is shown."""
    if not is_installed("matplotlib"):
        return f'<p class="soft">This picture needs matplotlib: {escape(install_command("matplotlib"))}</p>'
    from ctxext.evaluate.report.pictures import as_png, draw_losses

    sources = {}
    for theme in ("light", "dark"):
        figure = draw_losses(report, theme=theme, has_legend=False)
        if figure is None:
            return ""
        width = round(figure.get_size_inches()[0] * 96)
        sources[theme] = "data:image/png;base64," + base64.b64encode(as_png(figure)).decode()
    return (
        f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{sources["dark"]}">'
        f'<img src="{sources["light"]}" width="{width}" alt="{escape(_described(report))}"></picture></figure>'
    )


def _described(report: Report) -> str:
    """The losses by position in words: of each model at the start, at the original context length, and at the end."""
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
