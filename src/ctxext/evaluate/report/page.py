"""report.html: one page that stands alone, with the pictures and tables of every model."""

import base64
from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib import resources
from string import Template
from typing import TYPE_CHECKING, Any

from ctxext.evaluate.report.colours import hexadecimal, ink, shade
from ctxext.evaluate.report.findings import findings, percent, pooled
from ctxext.evaluate.report.pictures import as_png, heat_maps, loss_curves
from ctxext.evaluate.report.report import Report
from ctxext.evaluate.tasks.perplexity import Perplexity
from ctxext.evaluate.tasks.registry import RETRIEVAL_TASKS
from ctxext.evaluate.tasks.short import Short

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def render_page(report: Report) -> str:
    """The page as text.

    Args:
        report: The content of report.json.
    """
    models, settings = report["models"], report["settings"]
    tasks = dict.fromkeys(cell["task"] for model in models for cell in model["cells"])
    sections = [_models(models), *(_retrieval(report, task) for task in tasks)]
    sections += [section(report) for section in (_perplexity, _short, _harness, _settings)]
    template = resources.files("ctxext.evaluate.report").joinpath("page.html").read_text(encoding="utf-8")
    return Template(template).substitute(
        title=escape("Long context: " + ", ".join(model["name"] for model in models)),
        subtitle=escape(
            f"{settings['samples']} samples per cell, seed {settings['seed']}, transformers"
            f" {report['versions']['transformers']}, torch {report['versions']['torch']}"
        ),
        findings="\n".join(f"<li>{escape(sentence)}</li>" for sentence in findings(report)),
        sections="\n".join(section for section in sections if section),
        version=escape(report["versions"]["ctxext"]),
    )


def _models(models: Sequence[dict[str, Any]]) -> str:
    rows = [
        [
            escape(model["name"]),
            escape(model["summary"]),
            model["trained_length"],
            model["context_length"],
            escape(f"{model.get('dtype')}, {model.get('attention')}, {model.get('device')}"),
            f"<code>{model['digest'][:12]}</code>",
        ]
        for model in models
    ]
    head = ["model", "recipe", "original context length", "context length", "computed in", "digest"]
    return f"<h2>Models</h2>\n{_table(head, rows, text=(1, 4))}"


def _retrieval(report: Report, task: str) -> str:
    kind = RETRIEVAL_TASKS[task]
    answered = "Each answer was generated" if report["settings"]["generate"] or kind.is_written else "Exact match"
    return f"""<h2>{escape(task)}</h2>
<p>{escape(kind.description)}</p>
{_figure(lambda theme: heat_maps(report, task, theme=theme), f"Heat maps of {task}")}
<p class="soft">Percent right by depth (columns, %) and prompt length. {answered}. A vertical line in a picture stands
where prompts become longer than the model was trained for. Point at a figure for its 95 % interval (Wilson).</p>
<div class="maps">{_maps(report["models"], task)}</div>"""


def _maps(models: Sequence[dict[str, Any]], task: str) -> str:
    """The figures behind the heat maps: one table for each length."""
    lengths = sorted({cell["length"] for model in models for cell in model["cells"] if cell["task"] == task})
    return "".join(_map(models, task, length) for length in lengths)


def _map(models: Sequence[dict[str, Any]], task: str, length: int) -> str:
    rows, depths = [], list[float]()
    for model in models:
        own = [cell for cell in model["cells"] if cell["task"] == task and cell["length"] == length]
        if own:
            depths = [cell["depth"] for cell in own]
            share, low, high = pooled(own)
            pool = f"<b>{percent(share)}</b> ({percent(low)}–{percent(high)})"
            rows.append(f"<tr><td>{escape(model['name'])}</td>{''.join(map(_cell, own))}<td>{pool}</td></tr>")
    head = "".join(f"<th>{round(100 * depth)}</th>" for depth in depths)
    return (
        f'<table class="map"><caption>{length} tokens</caption>'
        f"<thead><tr><th>depth %</th>{head}<th>all</th></tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def _cell(cell: dict[str, Any]) -> str:
    colour = shade(cell["share"])
    note = f"{cell['correct']} of {cell['samples']}, {percent(cell['low'])}–{percent(cell['high'])} %"
    style = f"background:{hexadecimal(colour)};color:{ink(colour)}"
    return f'<td class="cell" style="{style}" title="{note}">{percent(cell["share"])}</td>'


def _perplexity(report: Report) -> str:
    models = [model for model in report["models"] if model["perplexity"]]
    if not models:
        return ""
    lengths = sorted({int(length) for model in models for length in model["perplexity"]["lengths"]})
    kinds = [("lengths", ""), *([("sliding", ", sliding")] if "sliding" in models[0]["perplexity"] else [])]
    head = ["model", "documents", *(f"{length}{note}" for _, note in kinds for length in lengths)]
    rows = [
        [escape(model["name"]), model["perplexity"]["documents"]]
        + [_figure_of(model["perplexity"][kind].get(str(length))) for kind, _ in kinds for length in lengths]
        for model in models
    ]
    stride = report["settings"]["stride"]
    sliding = f" Sliding: a window of that length moves on by {stride} tokens." if stride else ""
    return f"""<h2>Perplexity</h2>
<p>{escape(Perplexity.description)}
Text: {escape(_data_name(report))}.</p>
{_figure(lambda theme: loss_curves(report, theme=theme), "Loss by position")}
<p class="soft">Perplexity over the first so many tokens.{sliding}</p>
<div class="wide">{_table(head, rows)}</div>"""


def _figure_of(figure: dict[str, Any] | None) -> str:
    return "–" if figure is None else f"{figure['perplexity']:.2f}"


def _data_name(report: Report) -> str:
    data = report["settings"]["data"]
    return data["name"] if isinstance(data, dict) else data or "made-up prose of the package, from a small grammar"


def _short(report: Report) -> str:
    rows = []
    for model in report["models"]:
        short = model["short"]
        if short:
            against = short.get("against")
            change = f"{against['loss']:+.4f}" if against else "–"
            if against and against["low"] is not None:
                change += f" ({against['low']:+.4f} to {against['high']:+.4f})"
            name = escape(against["model"]) if against else "–"
            rows.append([escape(model["name"]), short["length"], f"{short['perplexity']:.3f}", change, name])
    if not rows:
        return ""
    head = ["model", "tokens", "perplexity", "loss against source, nats per token", "source"]
    return f"""<h2>At the original context length</h2>
<p>{escape(Short.description)} Text: {escape(_data_name(report))}.</p>
<div class="wide">{_table(head, rows)}</div>"""


def _harness(report: Report) -> str:
    rows = [
        [escape(model["name"]), escape(task), escape(metric), f"{value:.4f}"]
        for model in report["models"]
        for task, metrics in (model["harness"] or {}).items()
        for metric, value in metrics.items()
    ]
    return f"<h2>lm-evaluation-harness</h2>\n{_table(['model', 'task', 'metric', 'value'], rows)}" if rows else ""


def _settings(report: Report) -> str:
    rows = [[escape(str(key)), escape(str(value))] for key, value in report["settings"].items() if value is not None]
    rows += [[escape(name), escape(str(version))] for name, version in report["versions"].items()]
    rows += [[f"digest of {escape(model['name'])}", f"<code>{model['digest']}</code>"] for model in report["models"]]
    return (
        f"<h2>Settings</h2>\n<details><summary>Everything that was set</summary>{_table([], rows, text=(1,))}</details>"
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]], text: Sequence[int] = ()) -> str:
    """A table; cells are markup already."""

    def line(cells: Sequence[Any], tag: str) -> str:
        marks = [' class="text"' if number in text else "" for number in range(len(cells))]
        return "".join(f"<{tag}{mark}>{cell}</{tag}>" for mark, cell in zip(marks, cells, strict=True))

    heading = f"<thead><tr>{line(head, 'th')}</tr></thead>" if head else ""
    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f"<table>{heading}<tbody>{body}</tbody></table>"


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
