"""report.html: one page that stands alone, with the pictures and tables of every model."""

import base64
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib import resources
from string import Template
from typing import TYPE_CHECKING, Any

from ctxext.evaluate.report.colours import series_style
from ctxext.evaluate.report.findings import findings
from ctxext.evaluate.report.html import model_name, table
from ctxext.evaluate.report.pictures import as_png, loss_curves
from ctxext.evaluate.report.report import Report
from ctxext.evaluate.report.summary import summary
from ctxext.evaluate.tasks.registry import TASKS
from ctxext.evaluate.tasks.short import Short

if TYPE_CHECKING:
    from matplotlib.figure import Figure
import re
from collections import Counter

from ctxext.evaluate.report.findings import percent, pooled
from ctxext.evaluate.report.html import share_cell
from ctxext.evaluate.report.summary import effective_text, lengths_of
from ctxext.evaluate.tasks.registry import RETRIEVAL_TASKS


def maps(report: Report, task: str, short: Mapping[str, str]) -> str:
    """The section of one task.

    Args:
        report: The content of report.json.
        task: Which.
        short: The models' short names.
    """
    models = report["models"]
    kind = RETRIEVAL_TASKS.get(task)
    is_written = report["settings"]["generate"] or (kind is not None and kind.is_written)
    answered = "Each answer was generated" if is_written else kind.scored if kind else "Exact match"
    lengths = lengths_of(models, task)
    found = "".join(_map(models, task, length, short) for length in lengths)
    return f"""<h2>{escape(task)}</h2>
<p>{escape(kind.description if kind else "")}</p>
<p class="soft">Percent right by depth and prompt length. {answered}. Lengths that are longer than a model was trained
for are marked with * at its name.</p>
<div class="maps">{found}</div>
{_effective(models, task, lengths, short)}
<details><summary>Counts and intervals</summary>{_counts(models, task, short)}</details>"""


def _map(models: Sequence[dict[str, Any]], task: str, length: int, short: Mapping[str, str]) -> str:
    rows, depths = [], list[float | None]()
    for model in models:
        own = [cell for cell in model["cells"] if cell["task"] == task and cell["length"] == length]
        if own:
            depths = [cell["depth"] for cell in own]
            share, low, high = pooled(own)
            cells = "".join(share_cell(cell["share"]) for cell in own)
            beyond = "*" if model["trained_length"] and length > model["trained_length"] else ""
            rows.append(
                f'<tr><th scope="row">{escape(short[model["name"]])}{beyond}</th>{cells}'
                f'<td class="all"><b>{percent(share)}</b> ({percent(low)}–{percent(high)})</td></tr>'
            )
    head = "".join(f"<th>{'anywhere' if depth is None else round(100 * depth)}</th>" for depth in depths)
    return (
        f'<table class="map" style="--cells:{len(depths)}"><caption>{length} tokens</caption>'
        f'<thead><tr><th>depth %</th>{head}<th class="all">all</th></tr></thead><tbody>{"".join(rows)}</tbody></table>'
    )


def _effective(models: Sequence[dict[str, Any]], task: str, lengths: Sequence[int], short: Mapping[str, str]) -> str:
    found = {
        short[model["name"]]: model["effective"]["tasks"][task]
        for model in models
        if (model.get("effective") or {}).get("tasks", {}).get(task)
    }
    if not found:
        return ""
    told = "; ".join(f"{escape(name)} {effective_text(own, lengths[-1])}" for name, own in found.items())
    return f"<p>Effective length: {told}.</p>"


def _counts(models: Sequence[dict[str, Any]], task: str, short: Mapping[str, str]) -> str:
    rows = [
        [
            escape(short[model["name"]]),
            cell["length"],
            "–" if cell["depth"] is None else f"{100 * cell['depth']:g} %",
            f"{cell['correct']:g} of {cell['samples']}",
            f"{100 * cell['share']:.1f} %",
            f"{100 * cell['low']:.1f}–{100 * cell['high']:.1f} %",
        ]
        for model in models
        for cell in model["cells"]
        if cell["task"] == task
    ]
    return table(["model", "tokens", "depth", "right", "share", "95 % interval"], rows)


_LONG = 24
_COMMON = 0.8
"""A part that so many of the names have tells nothing."""
_SEPARATORS = re.compile(r"[-_]+")


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Each name without its owner and the parts that nearly all have; whole where none is long, or there is but one.

    A name that is nothing but such parts stays whole behind its owner, and so do all if two would be called alike.
    """
    if len(names) < 2 or max(map(len, names)) <= _LONG:
        return {name: name for name in names}
    bare = {name: name.rpartition("/")[2] for name in names}
    counts = Counter(part for own in bare.values() for part in set(_SEPARATORS.split(own)))
    short = {}
    for name, own in bare.items():
        kept = [part for part in _SEPARATORS.split(own) if counts[part] < _COMMON * len(names)]
        short[name] = "-".join(kept) or own
    for found in (short, bare):
        if len(set(found.values())) == len(names):
            return found
    return {name: name for name in names}


_MAX_NAMED, _MAX_TITLE = 3, 60


def render_page(report: Report) -> str:
    """The page as text.

    Args:
        report: The content of report.json.
    """
    models, settings = report["models"], report["settings"]
    names = short_names([model["name"] for model in models])
    tasks = dict.fromkeys(cell["task"] for model in models for cell in model["cells"])
    sections = [summary(report, names), _findings(report, names), *(maps(report, task, names) for task in tasks)]
    sections += [section(report, names) for section in (_perplexity, _short, _harness, _models, _settings)]
    template = resources.files("ctxext.evaluate.report").joinpath("page.html").read_text(encoding="utf-8")
    return Template(template).substitute(
        title=escape(_title([names[model["name"]] for model in models])),
        subtitle=escape(
            f"{settings['samples']} samples per cell, seed {settings['seed']}, transformers"
            f" {report['versions']['transformers']}, torch {report['versions']['torch']}{_engine(report)}"
        ),
        sections="\n".join(section for section in sections if section),
        version=escape(report["versions"]["ctxext"]),
    )


def _engine(report: Report) -> str:
    """The engine that ran the models, where it was not transformers."""
    return f", vLLM {report['versions']['vllm']}" if report["versions"].get("vllm") else ""


def _title(names: Sequence[str]) -> str:
    if len(names) > _MAX_NAMED or len(", ".join(names)) > _MAX_TITLE:
        return f"Long context: {len(names)} models"
    return f"Long context: {', '.join(names)}"


def _findings(report: Report, names: Mapping[str, str]) -> str:
    found = "\n".join(f"<li>{escape(sentence)}</li>" for sentence in findings(report, names))
    return f'<div class="findings"><ul>\n{found}\n</ul></div>' if found else ""


def _models(report: Report, names: Mapping[str, str]) -> str:
    rows = [
        [
            model_name(model["name"], names),
            escape(model["summary"]),
            model["trained_length"],
            model["context_length"],
            escape(f"{model.get('dtype')}, {model.get('attention')}, {model.get('device')}"),
            f"<code>{model['digest'][:12]}</code>",
        ]
        for model in report["models"]
    ]
    head = ["model", "recipe", "original context length", "context length", "computed in", "digest"]
    return f"<h2>Models</h2>\n{table(head, rows, text=(1, 4))}"


def _perplexity(report: Report, names: Mapping[str, str]) -> str:
    models = [model for model in report["models"] if model["perplexity"]]
    if not models:
        return ""
    lengths = sorted({int(length) for model in models for length in model["perplexity"]["lengths"]})
    kinds = [("lengths", ""), *([("sliding", ", sliding")] if "sliding" in models[0]["perplexity"] else [])]
    head = ["", "model", "documents", *(f"{length}{note}" for _, note in kinds for length in lengths)]
    rows = [
        [_line(number), escape(names[model["name"]]), model["perplexity"]["documents"]]
        + [_figure_of(model["perplexity"][kind].get(str(length))) for kind, _ in kinds for length in lengths]
        for number, model in enumerate(models)
    ]
    stride = report["settings"]["stride"]
    sliding = f" Sliding: a window of that length moves on by {stride} tokens." if stride else ""
    task = TASKS[models[0]["perplexity"].get("task", "perplexity")]
    return f"""<h2>{task.name.capitalize()}</h2>
<p>{escape(task.description)}
Text: {escape(_data_name(report))}.</p>
{_figure(lambda theme: loss_curves(report, theme=theme, has_legend=False), "Loss by position")}
<p class="soft">Faint points are measured, lines are smoothed over three of them. Perplexity over the first so many
tokens.{sliding}</p>
{table(head, rows, text=(1,))}"""


def _line(number: int) -> str:
    """A curve's colour and dash, as the picture has them."""
    colour, dashes = series_style(number)
    pattern = ",".join(f"{2 * part:g}" for part in dashes)
    dash = f' stroke-dasharray="{pattern}"' if pattern else ""
    return (
        '<svg width="44" height="8" aria-hidden="true">'
        f'<line x1="0" y1="4" x2="44" y2="4" stroke="{colour}" stroke-width="3"{dash}/></svg>'
    )


def _figure_of(figure: dict[str, Any] | None) -> str:
    return "–" if figure is None else f"{figure['perplexity']:.2f}"


def _data_name(report: Report) -> str:
    data = report["settings"]["data"]
    return data["name"] if isinstance(data, dict) else data or "made-up prose of the package, from a small grammar"


def _short(report: Report, names: Mapping[str, str]) -> str:
    rows = []
    for model in report["models"]:
        short = model["short"]
        if short:
            against = short.get("against")
            change = f"{against['loss']:+.4f}" if against else "–"
            if against and against["low"] is not None:
                change += f" ({against['low']:+.4f} to {against['high']:+.4f})"
            source = escape(names.get(against["model"], against["model"])) if against else "–"
            name = escape(names[model["name"]])
            rows.append([name, short["length"], f"{short['perplexity']:.3f}", change, source])
    if not rows:
        return ""
    head = ["model", "tokens", "perplexity", "loss against source, nats per token", "source"]
    return f"""<h2>At the original context length</h2>
<p>{escape(Short.description)} Text: {escape(_data_name(report))}.</p>
{table(head, rows)}"""


def _harness(report: Report, names: Mapping[str, str]) -> str:
    rows = [
        [escape(names[model["name"]]), escape(task), escape(metric), f"{value:.4f}"]
        for model in report["models"]
        for task, metrics in (model["harness"] or {}).items()
        for metric, value in metrics.items()
    ]
    return f"<h2>lm-evaluation-harness</h2>\n{table(['model', 'task', 'metric', 'value'], rows)}" if rows else ""


def _settings(report: Report, names: Mapping[str, str]) -> str:
    rows = [[escape(str(key)), escape(str(value))] for key, value in report["settings"].items() if value is not None]
    rows += [[escape(name), escape(str(version))] for name, version in report["versions"].items()]
    rows += [
        [f"digest of {escape(names[model['name']])}", f"<code>{model['digest']}</code>"] for model in report["models"]
    ]
    return (
        f"<h2>Settings</h2>\n<details><summary>Everything that was set</summary>{table([], rows, text=(1,))}</details>"
    )


def _figure(draw: "Callable[[str], Figure | None]", label: str) -> str:
    """A picture in both themes, inside the page; the reader's setting decides which is seen."""
    sources = {}
    for theme in ("light", "dark"):
        figure = draw(theme)
        if figure is None:
            return ""
        width = round(figure.get_size_inches()[0] * 96)
        sources[theme] = "data:image/png;base64," + base64.b64encode(as_png(figure)).decode()
    return (
        f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{sources["dark"]}">'
        f'<img src="{sources["light"]}" width="{width}" alt="{escape(label)}"></picture></figure>'
    )
