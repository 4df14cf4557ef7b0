"""A small report, worked out by hand or by other formulas, and everything that is drawn and written from it."""

import base64
import dataclasses
import io
import itertools
import math
import random
import re
from html import unescape

import numpy as np
import pytest
from rich.console import Console

from ctxext.cli.eval_tables import report_tables
from ctxext.report import pictures
from ctxext.report.findings import findings
from ctxext.report.intervals import wilson_interval
from ctxext.report.page import render_page, shorten_names, write_report
from ctxext.report.report import effective_lengths, heat_map
from ctxext.tasks.settings import Settings
from records_by_hand import answers, facts, losses, report_of

TASKS = ("ruler-vt", "needle", "perplexity", "short")
LENGTHS = (256, 512, 1024)
DEPTHS = (0.0, 0.5)
NAMES = ("stock", "ext<i>", "other")
RIGHT = {
    "stock": {256: (4, 4), 512: (4, 0)},
    "ext<i>": {256: (4, 3), 512: (4, 2), 1024: (1, 4)},
    "other": {256: (1, 0), 512: (0, 0), 1024: (0, 0)},
}
SHORT = {"stock": [(512, 200, 400.0), (512, 100, 300.0), (512, 50, 50.0)]}
SHORT["ext<i>"] = [(512, 200, 420.0), (512, 100, 330.0), (512, 50, 80.0)]
SHORT["other"] = [(256, 200, 420.0), (256, 100, 330.0), (256, 50, 80.0)]


def lines_of(name):
    """What a run notes of one model, in the order in which it is asked."""
    number = NAMES.index(name)
    made = [{"model": name, "facts": {"dtype": f"type-{name}", "device": "cpu", "attention": "<sdpa>"}}]
    for length, counts in RIGHT[name].items():
        for depth, count in zip(DEPTHS, counts, strict=True):
            right = [int(place < count) for place in range(4)]
            made += [answers(name, length, depth, right[at : at + 2], first=at) for at in (0, 2)]
    made.append(answers(name, 256, None, [1, 0.75], "ruler-vt"))
    for sample in (0, 1):
        lengths = {"256": [255.0 * (2 + sample), 255], "1024": [1023.0 * (1 + number), 1023]}
        curve = [[255.0 * 2, 255], [256.0 * (2 + sample), 256], [256.0 * (3 - number), 256], [256.0, 256]]
        sums = {"buckets": curve, "lengths": lengths, "sliding": {"256": [9.0 + sample, 3], "1024": [1.0, 1]}}
        made.append(losses(name, "perplexity", 1024, sample, width=256, **sums))
    for sample, (length, tokens, loss) in enumerate(SHORT[name]):
        made.append(losses(name, "short", length, sample, tokens=[tokens], loss=[loss]))
    return [{**line, "seconds": 0.5} if "task" in line else line for line in made]


def report(names=NAMES, shuffle=None, **changes):
    records = [line for name in names for line in lines_of(name)]
    # A run that was killed asks some of it again.
    records += [{**line} for line in records if line.get("task") == "needle" and line["samples"] == [2, 3]]
    if shuffle is not None:
        random.Random(shuffle).shuffle(records)
    settings = Settings(tasks=TASKS, lengths=LENGTHS, depths=DEPTHS, samples=4, seed=3, stride=64)
    models = [facts(name, source="stock" if name != "stock" else None) for name in names]
    return report_of(models, records, {**settings.to_dict(), **changes})


def shown(markup):
    """Cells of each row of a table, as text."""
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", markup, re.DOTALL)
    return [
        [
            unescape(re.sub(r"<[^>]+>", "", cell))
            for cell in re.findall(r"<(?:td|th)[^>]*>(.*?)</(?:td|th)>", row, re.DOTALL)
        ]
        for row in rows
    ]


def section(page, heading):
    return page.split(f"<h2>{heading}</h2>")[1].split("<h2>")[0]


def test_the_order_of_the_lines_does_not_matter():
    assert report(shuffle=1) == report(shuffle=2) == report()


def test_cells_are_equal_after_duplicate_questions():
    content = report(shuffle=3)
    for model in content["models"]:
        name = model["name"]
        assert (model["dtype"], model["device"]) == (f"type-{name}", "cpu")
        cells = [(c["task"], c["length"], c["depth"], c["correct"], c["samples"]) for c in model["cells"]]
        needles = [
            ("needle", length, depth, count, 4)
            for length, counts in RIGHT[name].items()
            for depth, count in zip(DEPTHS, counts, strict=True)
        ]
        assert cells == [("ruler-vt", 256, None, 1.75, 2), *needles]
        for cell in model["cells"]:
            assert cell["share"] == cell["correct"] / cell["samples"]
            assert (cell["low"], cell["high"]) == wilson_interval(cell["correct"], cell["samples"])
            assert cell["seconds"] == (0.5 if cell["task"] == "ruler-vt" else 1.5)
        assert model["seconds"] == 0.5 * len([line for line in lines_of(name) if "task" in line]) + 0.5 * len(needles)


def test_loss_on_long_text_is_the_mean_over_tokens_of_all_documents():
    for number, model in enumerate(report(shuffle=4)["models"]):
        text = model["perplexity"]
        assert (text["task"], text["documents"], text["length"]) == ("perplexity", 2, 1024)
        losses = [2.0, 2.5, 3.0 - number, 1.0]
        assert [(p["start"], p["end"], p["loss"], p["count"]) for p in text["curve"]] == [
            (256 * place, 256 * place + 256, loss, 512 - 2 * (place == 0)) for place, loss in enumerate(losses)
        ]
        assert {n: (p["loss"], p["count"]) for n, p in text["lengths"].items()} == {
            "256": (2.5, 510),
            "1024": (1 + number, 2046),
        }
        assert {n: (p["loss"], p["count"]) for n, p in text["sliding"].items()} == {
            "256": (19 / 6, 6),
            "1024": (1.0, 2),
        }
        assert text["lengths"]["256"]["perplexity"] == math.exp(2.5)


def test_a_loss_that_no_perplexity_can_be_written_of_ends_no_report():
    record = losses("stock", "short", 9, tokens=[1], loss=[1e6])
    assert math.isfinite(report_of(["stock"], [record])["models"][0]["short"]["perplexity"])


def test_the_cost_is_relative_to_the_source_at_the_same_length():
    stock, extended, other = report(shuffle=5)["models"]
    assert stock["short"]["losses"] == [2.0, 3.0, 1.0]
    assert stock["short"]["loss"] == 750 / 350, "a long document counts for more"
    differences = np.array([0.1, 0.3, 0.6])
    half = 4.302652729911275 * differences.std(ddof=1) / math.sqrt(3)
    against = extended["short"]["against"]
    assert against.pop("model") == "stock"
    mean = differences.mean()
    expected = {"loss": mean, "low": mean - half, "high": mean + half, "ratio": math.exp(mean)}
    assert against == pytest.approx(expected, rel=1e-6)
    assert "against" not in other["short"], "its documents have another length"
    assert "against" not in stock["short"]


def counted(task, shares, samples=100):
    return [
        {
            "task": task,
            "length": length,
            "depth": None,
            "correct": share,
            "samples": samples,
            "texts": [[text, share / samples, 1] for text in range(samples)],
        }
        for length, share in shares.items()
    ]


@pytest.mark.parametrize(("right", "samples"), [*((right, 40) for right in (20, 29, 32, 35, 40)), (5, 10)])
def test_few_answers_give_no_certain_effective_length(right, samples):
    """The chances of no length and of the shorter one, drawn by another generator from Jeffreys' betas."""
    rng, count = np.random.default_rng(0), 200_000
    first, later = (rng.beta(hits + 0.5, samples - hits + 0.5, count) for hits in (samples, right))
    none, shorter = float((first < 0.856).mean()), float(((first < 0.856) | (later < 0.85 * first)).mean())
    expected = tuple(None if none > p else 256 if shorter > p else 512 for p in (0.025, 0.975))
    effective = effective_lengths(counted("a", {256: samples, 512: right}, samples))
    assert (effective["low"], effective["high"]) == expected


def test_sentences_of_the_whole():
    sentences = findings(report())
    variables, needle, text, cost = sentences
    assert variables == "ruler-vt at 256 tokens: stock finds 88 % (26–99), ext<i> 88 % (26–99), other 88 % (26–99)."
    assert needle == ("needle at 1024 tokens: ext<i> finds 62 % (19–92), other 0 % (0–56).")
    assert text == (
        "Loss in the last half of long texts, in nats per token against the last half of the original context length: "
        "stock -0.50, ext<i> -1.00, other -1.50."
    )
    assert cost == (
        "Cost at the original context length, in nats per token against the source: "
        "ext<i> +0.333 (perplexity × 1.396, -0.292 to +0.958)."
    )


@pytest.mark.parametrize(
    ("losses", "figures"),
    [
        ([9.0, 1.0, 1.0, 1.02], "+0.01 (unchanged)."),
        ([9.0, 2.0, 1.0, 1.5], "-0.75."),
        ([9.0, 1.0, 2.0, 1.5], "+0.75."),
    ],
)
def test_what_the_second_half_of_a_text_does(losses, figures):
    """Of a text twice as long as the context; of a shorter one nothing is said."""
    buckets = [[loss * 256, 256] for loss in losses]
    (sentence,) = findings_of(buckets)
    assert sentence.endswith(f": stock {figures}")
    assert findings_of(buckets, length=1023) == []


def findings_of(buckets, length=1024):
    record = losses("stock", "perplexity", length, width=256, lengths={}, buckets=buckets)
    return findings(report_of(["stock"], [record], Settings(tasks=("perplexity",))))


def test_points_with_more_tokens_count_for_more():
    (sentence,) = findings_of([[0.0, 255], [256.0, 256], [256.0, 256], [3 * 64.0, 64]])
    assert "+0.40." in sentence


def test_many_models_are_summarized_by_their_extremes():
    names = [f"m{number}" for number in range(10)]
    models = [facts(name, source="m3" if name != "m3" else None) for name in names]
    records = []
    for number, name in enumerate(names):
        records.append(losses(name, "short", 512, tokens=[100], loss=[100 + (7 * number) % 10 * 10.0]))
        records.append(answers(name, 512, 0.5, [int(place < 10 - (3 * number) % 10) for place in range(10)]))
    needle, cost = findings(report_of(models, records))
    assert needle.endswith(
        ": m0 finds 100 % (72–100), m7 90 % (60–98), m4 80 % (49–94), m1 70 % (40–89), m8 60 % (31–83), "
        "5 others 10 to 50 %."
    )
    assert cost.endswith(": from m0 -0.100 to m7 +0.800, 9 models.")
    assert ", 1 other " in findings(report_of(models[:6], records))[0]


def test_the_summary_row_by_row():
    page = render_page(report())
    summary = page[page.index('id="summary"') : page.index("</table>")]
    head, stock, extended, other = shown(summary)
    lengths = ["256 tokens", "512 tokens", "1k tokens", "effective length"]
    assert head == ["model", *lengths, "RULER ≥ 85.6\xa0% (1 of 13 tasks)", "cost, nats"]
    assert stock == ["stock", "98 (57–99)", "50 (13–87)", "–", stock[4], "≥ 256", "–"]
    assert extended == ["ext<i>", "88 (47–98)", "75 (26–96)", "62 (19–92)", extended[4], "≥ 256", "+0.333"]
    assert other[:4] == ["other", "28 (6–68)", "0 (0–56)", "0 (0–56)"]
    assert re.findall(r"<b>(\d+)</b>", summary) == [], "no interval parts from the others'"
    models = {model["name"]: model["effective"] for model in report()["models"]}
    assert stock[4].startswith("256") == (models["stock"]["length"] == 256)
    assert 'data-value="ext&lt;i&gt;"' in summary


def test_an_effective_length_at_the_longest_may_be_longer():
    content = report()
    for model in content["models"]:
        model["effective"] = {"length": 1024, "low": 256, "high": 1024, "tasks": {}}
    page = render_page(content)
    assert page.count("≥ 1k (256–1k)") == 3
    for model in content["models"]:
        model["effective"] = {
            "length": 512,
            "low": 512,
            "high": 512,
            "tasks": {"needle": {"length": 1024, "low": 1024, "high": 1024}},
        }
    page = render_page(content)
    assert page.count('<td data-value="512">512</td>') == 3
    head, *rows = shown(section(page, "Effective length by task"))
    assert head == ["model", "ruler-vt", "needle"]
    assert rows == [[name, "–", "≥ 1k"] for name in NAMES]


def test_the_maps_of_a_task():
    needle = section(render_page(report()), "needle")
    tables = needle.split('<table class="map"')[1:]
    assert [re.search(r"<caption>(.*?)<", one)[1] for one in tables] == ["256 tokens", "512 tokens", "1024 tokens"]
    assert shown(tables[0]) == [
        ["depth %", "0", "50", "all"],
        ["stock", "100", "100", "100 (44–100)"],
        ["ext<i>", "100", "75", "88 (32–99)"],
        ["other", "25", "0", "12 (1–68)"],
    ]
    assert [row[0] for row in shown(tables[1])] == ["depth %", "stock", "ext<i>", "other"], "512 is not beyond 512"
    assert [row[0] for row in shown(tables[2].split("</table>")[0])] == ["depth %", "ext<i>*", "other*"]
    counts = shown(needle.split("Counts and intervals")[1])
    assert counts[1] == ["stock", "256", "0 %", "4 of 4", "100.0 %", "51.0–100.0 %"]
    assert "Exact match" in needle
    assert "<i>" not in needle
    variables = section(render_page(report()), "ruler-vt")
    assert "Each answer was generated" in variables, "its answers always are"
    assert shown(variables.split("Counts and intervals")[1])[1][2:4] == ["–", "1.75 of 2"]
    assert "Each answer was generated" in section(render_page(report(generate=True)), "needle")


def test_the_other_tables_of_the_page():
    page = render_page(report())
    head, *rows = shown(section(page, "Perplexity").split("</figure>")[1])
    assert head == ["line", "model", "documents", "256", "1024", "256, sliding", "1024, sliding"]
    e = math.e
    expected = [f"{e**2.5:.2f}", None, f"{e ** (19 / 6):.2f}", f"{e:.2f}"]
    for number, row in enumerate(rows):
        assert row[1:] == [NAMES[number], "2", expected[0], f"{e ** (1 + number):.2f}", *expected[2:]]
    assert "with a stride of 64 tokens" in section(page, "Perplexity")
    head, *rows = shown(section(page, "At the original context length"))
    assert rows == [
        ["stock", "512", f"{e ** (750 / 350):.3f}", "–", "–"],
        ["ext<i>", "512", f"{e ** (830 / 350):.3f}", "+0.3333 (-0.2918 to +0.9585)", "stock"],
        ["other", "256", f"{e ** (830 / 350):.3f}", "–", "–"],
    ]
    _, *rows = shown(section(page, "Models"))
    assert rows[1] == ["ext<i>", "stock", "512", "1024", "type-ext<i>, <sdpa>, cpu", "eeeeeeeeeeee"]
    settings = {row[0]: row[1] for row in shown(section(page, "Settings"))}
    assert (settings["generate"], settings["seed"], settings["torch"]) == ("False", "3", "2.9")
    assert settings["digest of ext<i>"] == "e" * 64
    assert "haystack" not in settings
    assert "<i>" not in page
    assert "4 samples per cell, seed 3, transformers 5.23, torch 2.9<" in page


def test_curves_in_the_table_look_as_in_the_picture():
    content = report()
    content["models"] = [{**content["models"][0], "name": f"m{number}"} for number in range(10)]
    marks = re.findall(r'stroke="(#\w+)" stroke-width="3"( stroke-dasharray="[\d.,]+")?', render_page(content))
    assert len(set(marks)) == 10
    assert marks[0][1] == ""
    assert marks[8] == (marks[0][0], ' stroke-dasharray="12,4"')


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (None, "generated prose of the package"),
        ("some/set", "Text: some/set."),
        ({"name": "my<.txt", "sha256": "0"}, "my&lt;.txt"),
    ],
)
def test_the_page_names_the_text(data, named):
    page = render_page(report(data=data))
    assert named in section(page, "Perplexity")
    assert named in section(page, "At the original context length")


@pytest.mark.parametrize(("count", "title"), [(1, "stock"), (3, "stock, ext&lt;i&gt;, other"), (4, "4 models")])
def test_the_title_names_three_models_at_most(count, title):
    content = report()
    content["models"] = [*content["models"], {**content["models"][0], "name": "fourth"}][:count]
    assert f"<h1>Long context: {title}</h1>" in render_page(content)


def test_every_reader_sees_the_picture_for_the_width_and_the_theme(monkeypatch):
    monkeypatch.setattr(pictures, "draw_losses", lambda report, *, theme, has_legend, width: Figure(theme, width))
    monkeypatch.setattr(pictures, "as_png", lambda figure: f"{figure.theme} {figure.width}".encode())
    page = render_page(report())
    sources = re.findall(r'<source media="(.*?)" srcset="data:image/png;base64,(.*?)" width="(.*?)"', page)
    sources += [("", *re.findall(r'<img src="data:image/png;base64,(.*?)" width="(.*?)"', page)[0])]
    assert [(media, base64.b64decode(data).decode(), width) for media, data, width in sources] == [
        ("(max-width: 46rem) and (prefers-color-scheme: dark)", "dark 3.5", "336"),
        ("(max-width: 46rem)", "light 3.5", "336"),
        ("(prefers-color-scheme: dark)", "dark 7.2", "691"),
        ("", "light 7.2", "691"),
    ]


class Figure:
    def __init__(self, theme, width):
        self.theme, self.width = theme, width

    def get_size_inches(self):
        return self.width, 5.0


def test_names_that_differ_little():
    long = "owner/some-model-of-a-long-name"
    assert shorten_names(["b", long]) == {"b": "b", long: long.split("/")[1]}, "one is long"
    assert shorten_names(["x" * 24, "y" * 24])["x" * 24] == "x" * 24, "as long as names may be"
    five = [f"{long}-{letter}-common" if letter != "z" else f"{long}-{letter}" for letter in "vwxyz"]
    assert shorten_names(five)[five[0]] == "v", "what four of five have is left out"
    same = ["one/some-model-of-a-long-name", "two/some-model-of-a-long-name"]
    assert shorten_names(same) == {name: name for name in same}


def test_the_heat_map_shows_each_cell_in_its_place():
    models = report()["models"]
    figure = pictures.draw_heat_maps(heat_map(models, "needle"))
    drawn = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title() for axes in drawn] == list(NAMES)
    for axes in drawn:
        counts = RIGHT[axes.get_title()]
        expected = [[counts[n][d] / 4 if n in counts else math.nan for n in LENGTHS] for d in (0, 1)]
        assert np.array_equal(axes.images[0].get_array().filled(math.nan), expected, equal_nan=True)
        assert axes.images[0].get_clim() == (0, 1)
        written = {text.get_position(): text.get_text() for text in axes.texts}
        assert written == {(x, y): str(25 * counts[n][y]) for x, n in enumerate(LENGTHS) if n in counts for y in (0, 1)}
        assert [line.get_xdata()[0] for line in axes.lines] == [1.5], "behind 512"
    assert [label.get_text() for label in drawn[0].get_yticklabels()] == ["0 %", "50 %"]
    assert "right of the line" in figure.get_supxlabel()
    assert heat_map(models, "kv").models == []
    alone = pictures.draw_heat_maps(heat_map(models[-1:], "needle"))
    assert [axes.get_title() for axes in alone.axes] == ["other"]


def test_a_cell_that_was_not_measured_keeps_the_others_in_their_columns():
    content = report()
    cells = content["models"][1]["cells"]
    cells[:] = [cell for cell in cells if (cell["task"], cell["length"], cell["depth"]) != ("needle", 256, 0.0)]
    first = section(render_page(content), "needle").split('<table class="map"')[1]
    assert shown(first)[2] == ["ext<i>", "–", "75", "75 (30–95)"]


@pytest.mark.parametrize(
    ("trained", "is_marked"), [(None, False), (128, False), (256, True), (1023, True), (1024, False)]
)
def test_a_line_marks_the_trained_length_between_two_lengths(trained, is_marked):
    content = report(("ext<i>",))
    content["models"][0]["trained_length"] = trained
    figure = pictures.draw_heat_maps(heat_map(content["models"], "needle"))
    assert bool(figure.axes[0].lines) == is_marked
    assert ("right of the line" in figure.get_supxlabel()) == is_marked


def test_curves_are_drawn_at_the_middle_of_their_tokens():
    figure = pictures.draw_losses(report())
    (axes,) = figure.axes
    for number, name in enumerate(NAMES):
        points, line = axes.lines[2 * number], axes.lines[2 * number + 1]
        losses = [2.0, 2.5, 3.0 - number, 1.0]
        assert list(points.get_xdata()) == list(line.get_xdata()) == [128, 384, 640, 896]
        assert list(points.get_ydata()) == losses
        smooth = [losses[0], sum(losses[:3]) / 4 + losses[1] / 4, sum(losses[1:]) / 4 + losses[2] / 4, losses[3]]
        assert list(line.get_ydata()) == pytest.approx(smooth)
        assert line.get_label() == name
    assert [line.get_xdata()[0] for line in axes.lines[6:]] == [512], "where training ended"
    assert axes.get_xlim() == (0, 1024)
    assert axes.get_legend() is not None
    assert pictures.draw_losses(report(), has_legend=False).axes[0].get_legend() is None


def test_names_in_pictures_are_text_and_fit():
    content = report()
    names = [f"_{number}-{'long-name-' * 3}$\\frac$" for number in range(30)]
    content["models"] = [{**content["models"][1], "name": name, "cells": []} for name in names]
    figure = pictures.draw_losses(content)
    figure.draw_without_rendering()
    legend = figure.axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == names
    assert all(figure.bbox.contains(*corner) for corner in legend.get_window_extent().corners())
    assert figure.axes[0].bbox.width > 200
    scores = heat_map(report()["models"], "needle")
    models = [{**scores.models[1], "name": name} for name in names[:6]]
    cells = {(model["name"], *key[1:]): cell for model in models for key, cell in scores.cells.items()}
    figure = pictures.draw_heat_maps(dataclasses.replace(scores, models=models, cells=cells))
    figure.draw_without_rendering()
    titles = [axes.title.get_window_extent() for axes in figure.axes if axes.get_visible()]
    assert len(titles) == 6
    assert not any(one.overlaps(other) for one, other in itertools.combinations(titles, 2))
    assert all(figure.bbox.contains(*corner) for title in titles for corner in title.corners())


def test_a_line_marks_an_original_length_inside_the_picture():
    content = report()
    for model, trained in zip(content["models"], (128, 256, 4096), strict=True):
        model["trained_length"] = trained
    figure = pictures.draw_losses(content)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.texts] == ["original length 128", "original length 256"]
    assert not axes.texts[0].get_window_extent().overlaps(axes.texts[1].get_window_extent())


def test_files_of_a_report(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "as_png", lambda figure: figure.axes[0].get_title().encode())
    content = report(("stock", "ext<i>"))
    content["models"][0]["cells"] = [c for c in content["models"][0]["cells"] if c["task"] == "ruler-vt"]
    content["models"][1]["name"] = "<>"
    files = write_report(content, tmp_path)
    assert [path.name for path in files] == [
        *("report.json", "report.html", "ruler-vt.png", "ruler-vt-stock.png", "ruler-vt-model.png"),
        *("needle.png", "needle-model.png", "perplexity.png"),
    ]
    assert (tmp_path / "needle-model.png").read_bytes() == b"<>"
    assert (tmp_path / "ruler-vt-stock.png").read_bytes() == b"stock"
    alone = tmp_path / "alone"
    alone.mkdir()
    assert [path.name for path in write_report(report(("other",)), alone)][2:] == [
        *("ruler-vt-other.png", "needle-other.png", "perplexity.png")
    ]


def test_masked_tokens_are_read_without_windows_whatever_the_stride():
    record = losses("stock", "pseudo-perplexity", 256, width=256, buckets=[[510.0, 255]], lengths={"256": [510.0, 255]})
    settings = Settings(tasks=("perplexity", "pseudo-perplexity"), lengths=(256,), stride=64)
    made = report_of(["stock"], [record], settings)
    assert "Sliding" not in render_page(made)
    console = Console(width=100, file=io.StringIO())
    console.print(*report_tables(made, 100))
    assert "7.39" in console.file.getvalue()
    assert "sliding" not in console.file.getvalue()
