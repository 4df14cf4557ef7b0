"""The page with many models: short names, the summary, what it needs from outside (nothing), effective lengths."""

import io
import json
import random
import re

import pytest
from rich.console import Console

from ctxext.cli.eval_tables import report_tables
from ctxext.publish.results import build_results
from ctxext.report.findings import findings
from ctxext.report.page import render_page
from ctxext.report.report import effective_lengths, leaderboard_length
from ctxext.report.tables import effective_text, leaderboard_text
from ctxext.tasks.settings import Settings
from records_by_hand import answers, facts, losses, report_of

METHODS = "yarn ntk pi llama3 longrope dynamic mspoe-by-parts mspoe-linear self-extend rerope <b>bold</b>".split()  # noqa: SIM905
STOCK = "HuggingFaceTB/SmolLM2-135M-Instruct"
IDS = [STOCK, *(f"somebody-else/SmolLM2-135M-Instruct-{method}-x4" for method in METHODS)]
LENGTHS = (2048, 8192, 32768)


def cell(task, length, correct, samples=100, depth=None):
    texts = [[f"{depth} {number}", correct / samples, 1] for number in range(min(samples, 100))]
    texts = texts if samples <= 100 else [[str(depth), correct, samples]] * 1
    return {"task": task, "length": length, "depth": depth, "correct": correct, "samples": samples, "texts": texts}


def shown(*given, **more):
    """A cell with its share, and an interval that nothing uses."""
    made = cell(*given, **more)
    return {**made, "share": made["correct"] / made["samples"], "low": 0, "high": 1}


def make(ids=IDS, tasks=("needle", "ruler-vt", "perplexity", "short")):
    """A report whose figures fall with the length, the more the later a model is named."""
    rng = random.Random(0)
    depths = tuple(number / 10 for number in range(11))
    settings = Settings(tasks=tasks, lengths=LENGTHS, depths=depths, samples=4)
    models, records = [], []
    for number, name in enumerate(ids):
        source = None if number == 0 else ids[0]
        models.append(facts(name, source=source, trained_length=8192, context_length=32768))
        for length in LENGTHS:
            chance = 1 - length / 32768 * 0.08 * number
            records += [answers(name, length, at, [int(rng.random() < chance) for _ in range(4)]) for at in depths]
            records.append(answers(name, length, None, [1, 0.75], "ruler-vt"))
        curve = {"width": 2048, "buckets": [[2048 * (2 + rng.random()), 2048] for _ in range(16)]}
        records.append(losses(name, "perplexity", 32768, lengths={"8192": [9000, 8191]}, **curve))
        records.append(losses(name, "short", 8192, tokens=[8191], loss=[16000.0 + 50 * number]))
    return report_of(models, records, settings)


def page_of(models, **settings):
    """The page of models of which nothing is known but some cells, and the report."""
    nothing = dict.fromkeys(("short", "perplexity", "harness", "trained_length", "context_length", "summary"))
    asked = {"samples": 10, "seed": 0, "tasks": ["needle"], "depths": [0.5], "generate": False, "stride": None}
    report = report_of([], [])
    report |= {"models": [{"digest": "", **nothing, **model} for model in models]}
    report["settings"] |= asked
    return render_page(report), report


def summary_of(page):
    return page[page.index('id="summary"') : page.index("</table>")]


@pytest.mark.thorough
def test_many_models_stay_readable():
    page = render_page(make())
    assert "<h1>Long context: 12 models</h1>" in page
    assert page.index('class="findings"') < page.index('id="summary"') < page.index("<h2>needle</h2>")
    summary = summary_of(page)
    assert summary.count("<tr") == 13
    assert all(name.replace("<", "&lt;").replace(">", "&gt;") in summary for name in IDS)
    assert "<b>bold</b>" not in page
    assert "&lt;b&gt;bold&lt;/b&gt;" in page
    sentences = re.findall(r"<li>(.*?)</li>", page)
    assert len(sentences) == 4
    assert all(len(sentence) < 400 for sentence in sentences)
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    assert "import(" not in page
    assert "@import" not in page
    assert "anywhere" in page, "a task without depths has one cell"
    assert "5 of" not in summary, "counts stand below"


@pytest.mark.thorough
def test_effective_lengths_of_many_tasks_are_whole_at_80_columns():
    report = make(["demo", "a" * 40])
    for model in report["models"]:
        needles = [one for one in model["cells"] if one["task"] == "needle"]
        model["cells"] = [{**one, "task": f"niah-multikey-{number}"} for number in range(12) for one in needles]
        model["effective"] = effective_lengths(model["cells"])
    console = Console(width=80, file=io.StringIO())
    console.print(*report_tables(report, 80))
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    shown = text[text.index("effective length") :]
    assert all(f"niah-multikey-{number}" in shown.split() for number in range(12)), shown


@pytest.mark.parametrize(
    ("shares", "length"),
    [
        ((100, 90, 84), 8192),
        ((86, 74, 74), 32768),
        ((100, 85, 84), 8192),
        ((86, 60, 86), 2048),
        ((85, 85, 85), None),
        ((2, 2, 2), None),
        ((0, 0, 0), None),
    ],
)
def test_the_effective_length_is_relative_to_the_model(shares, length):
    cells = [cell("needle", n, right) for n, right in zip(LENGTHS, shares, strict=True)]
    effective = effective_lengths(cells)
    assert effective["length"] == effective["tasks"]["needle"]["length"] == length
    if length:
        assert (effective["low"] or 0) <= length <= effective["high"]
        assert effective["figure"] == shares[0] / 100


def test_effective_length_over_tasks_is_by_their_mean_and_depths_are_pooled():
    cells = [cell("needle", n, 45, 50, depth) for n in LENGTHS for depth in (0.0, 1.0)]
    cells += [cell("ruler-vt", n, right) for n, right in zip(LENGTHS, (100, 80, 20), strict=True)]
    effective = effective_lengths(cells)
    assert effective["length"] == 8192
    assert effective["tasks"]["needle"]["length"] == 32768
    assert effective["tasks"]["ruler-vt"]["length"] == 2048
    assert effective_lengths(cells[:2]) is None, "one length tells nothing"


@pytest.mark.parametrize(
    ("right", "length", "text"),
    [
        ((856, 856, 856), 32768, "≥ 32k"),  # Both tasks score 85.6 %, and the mean counts.
        ((1000, 712, 855), 8192, "8k"),
        ((855, 1000, 1000), None, "< 2k"),  # Lower at the shortest length, whatever follows.
        ((1000, 500, 1000), 2048, "2k"),
    ],
)
def test_the_leaderboard_s_effective_length_is_absolute(right, length, text):
    cells = [cell("needle", n, 0) for n in LENGTHS]
    for n, of_other in zip(LENGTHS, right, strict=True):
        cells += [{**cell("ruler-vt", n, of_other, 1000, depth), "share": of_other / 1000} for depth in (0.0, 1.0)]
        of_task = 1000 if of_other == 712 else of_other
        cells += [{**cell("niah-single-1", n, of_task, 1000), "share": of_task / 1000}]
    known = leaderboard_length(cells)
    assert (known["tasks"], known["length"], known["threshold"]) == (2, length, 0.856)
    assert [*known["scores"]] == [*LENGTHS]
    assert leaderboard_text(known) == leaderboard_text(json.loads(json.dumps(known))) == text
    assert leaderboard_length(cells[:1]) is None, "no task of RULER"
    assert leaderboard_length(cells[:-1])["scores"].keys() == {*LENGTHS[:2]}, "a length without some of the tasks"
    assert leaderboard_text(None) == "–"


def test_the_leaderboard_s_length_is_on_page_terminal_and_card():
    cells = [shown("ruler-vt", n, right) for n, right in zip(LENGTHS, (95, 90, 20), strict=True)]
    page, report = page_of([{"name": "demo", "cells": cells, "ruler": leaderboard_length(cells)}])
    console = Console(width=200, file=io.StringIO())
    console.print(*report_tables(report, 200), sep="\n")
    terminal = console.file.getvalue()
    card = build_results(report, report["models"][0], ()).body
    for text in (summary_of(page), terminal, card[card.index("### RULER") :]):
        assert re.search(r"RULER ≥ 85.6\s% \(1 of 13 tasks\)", text)
        assert re.search(r"\b8k\b", text.split("85.6 % (1 of", 1)[1])
    assert "| 95.0 | 90.0 | 20.0 |" in card


def test_the_interval_contains_95_of_100_draws():
    """Chances of getting no further than each length, from 1k on: 1.5 %, 2 %, 93 %, 2 % and 1.5 %."""
    cells = [cell("needle", 1024, 10**9, 10**9)]
    right = {2048: 92.2573, 4096: 91.8896, 8192: 78.3557, 16384: 84.4714}
    cells += [cell("needle", length, correct) for length, correct in right.items()]
    effective = effective_lengths(cells)
    assert (effective["low"], effective["high"]) == (2048, 8192)


@pytest.mark.parametrize("order", [1, -1])
def test_every_depth_counts_whichever_comes_last(order):
    cells = [
        cell("needle", length, correct, 50, depth)
        for length, shares in ((2048, (50, 50)), (8192, (50, 10)), (32768, (50, 50)))
        for depth, correct in zip((0.0, 1.0), shares[::order], strict=True)
    ]
    effective = effective_lengths(cells)
    assert (effective["length"], effective["figure"]) == (2048, 1.0)


@pytest.mark.parametrize("length", [96, 100, 112, 113])
def test_a_curve_ends_with_the_text(length):
    width = 16
    count = -(-length // width)
    buckets = [[2.0 * width, width]] * count
    record = losses("demo", "perplexity", length, width=width, buckets=buckets, lengths={})
    curve = report_of(["demo"], [record])["models"][0]["perplexity"]["curve"]
    assert [point["start"] for point in curve] == [*range(0, length, width)]
    assert [point["end"] for point in curve] == [*range(width, length, width), length]


def test_a_model_that_knows_nothing_has_no_effective_length():
    knows, knows_not, unsure = (
        effective_lengths([cell("needle", n, right, samples) for n in LENGTHS])
        for right, samples in ((100, 100), (2, 100), (17, 20))
    )
    assert effective_text(knows, LENGTHS[-1]) == "≥ 32k"
    assert effective_text(knows_not, LENGTHS[-1]) == "none"
    assert effective_text(unsure, LENGTHS[-1]) == "none (none–32k)"
    assert effective_text(None, LENGTHS[-1]) == "–", "nothing was measured"


def test_bold_is_what_lies_above_all_other_intervals():
    counts = {"a": {2048: 98, 8192: 98, 32768: 98}, "b": {2048: 60, 8192: 90, 32768: 90}, "d": {8192: 98}}
    models = [
        {"name": name, "cells": [shown("needle", length, right) for length, right in by_length.items()]}
        for name, by_length in counts.items()
    ]
    assert re.findall(r"<b>(\d+)</b>", summary_of(page_of(models)[0])) == ["98"], "later intervals overlap"
    assert "<b>" not in summary_of(page_of(models[:1])[0]), "there is nobody to be better than"


def test_every_depth_counts_in_the_tables_of_page_terminal_and_card():
    cells = [shown("needle", 2048, right, 10, depth) for depth, right in ((0.0, 10), (0.5, 8), (1.0, 0))]
    page, report = page_of([{"name": "demo", "cells": cells}])
    (model,) = report["models"]
    terminal = "\n".join(map(str, report_tables(report, 80)))
    card = build_results(report, model, ()).body.split("###")[1]
    wide = {**model, "cells": [{**one, "task": "niah-multikey-1"} for one in cells[:1]]}
    assert re.search("niah-multikey-1 +2048", "".join(map(str, report_tables({**report, "models": [wide]}, 80))))
    for text in (summary_of(page), page[page.index("<h2>needle") :], terminal, card):
        assert re.search(r"60\D+42–75", text), text
    assert findings(report)[0].startswith("needle at 2048 tokens: demo finds 60 % (42–75)")


def test_the_page_shows_the_settings():
    report = make(["demo"])
    plain = render_page(report)
    report["settings"] |= {"filler": "same", "repeat_question": True}
    needle, variables = render_page(report).split("<h2>needle</h2>")[1].split("<h2>ruler-vt</h2>")
    told = " The text consists only of such sentences. The question is also before the text.</p>"
    assert told in needle
    assert told.partition(". ")[2] in variables
    assert "such sentences" not in plain + variables


def test_the_picture_of_losses_is_described():
    page = render_page(make(["demo", "demo-yarn"]))
    (text,) = re.findall(r'alt="(.*?)"', page)
    curve = make(["demo", "demo-yarn"])["models"][1]["perplexity"]["curve"]
    assert text.startswith("Loss in nats per token by position, up to 32k tokens. demo: ")
    losses = [f"{curve[at]['loss']:.2f}" for at in (0, 3, -1)]
    assert text.endswith(f"demo-yarn: {losses[0]} at the start, {losses[1]} at 8k, {losses[2]} at the end.")
