"""The rows of every table, which the page, the card and the terminal only select and render."""

import pytest

from ctxext.errors import CtxextError
from ctxext.files.schemas import RECORD, check_schema
from ctxext.report import tables
from ctxext.report.intervals import share_interval
from ctxext.report.report import heat_map
from ctxext.tasks.settings import Settings
from records_by_hand import answers, facts, losses, report_of

RIGHT = {"stock": {256: ([1, 1], [1, 1]), 512: ([0, 0], [0, 0])}, "mine": {256: ([1, 1], [1, 0])}}


@pytest.fixture
def report():
    records = []
    for number, (name, by_length) in enumerate(RIGHT.items()):
        for length, by_depth in by_length.items():
            records += [answers(name, length, depth, right) for depth, right in zip((0.0, 0.5), by_depth, strict=True)]
        sums = {"width": 256, "buckets": [[510.0, 255]], "lengths": {"256": [0.0, 255]}, "sliding": {"256": [0.0, 1]}}
        for sample, text in enumerate(("books", "code")):
            records.append(losses(name, f"perplexity: {text}", 256, sample, text=text, **sums))
        for sample in (0, 1):
            records.append(losses(name, "short", 512, sample, tokens=[10], loss=[10.0 + 5 * number]))
    settings = Settings(tasks=("needle", "perplexity", "short"), stride=64)
    return report_of(["stock", facts("mine", source="stock")], records, settings)


def test_columns_are_selected_by_name():
    table = tables.Table("title", ["a", "b", "c"], [["1", "2", "3"]], "note")
    selected = tables.Table("other", ["c", "a"], [["3", "1"]])
    assert table.select(["c", "a"], "other") == selected
    assert table.select(["a"], note="new") == tables.Table("title", ["a"], [["1"]], "new")
    assert selected.as_markdown() == "| c | a |\n|---|---|\n| 3 | 1 |"
    assert selected.as_markdown("| --- | ---: |").splitlines()[1] == "| --- | ---: |"


def test_a_length_without_answers_has_an_empty_score(report):
    scores = heat_map(report["models"], "needle")
    stock, mine = scores.models
    cells, share, interval = tables.score_at(scores, mine, 256)
    assert ([cell["share"] for cell in cells], share, interval) == ([1.0, 0.5], *tables.in_percent(cells))
    assert tables.score_at(scores, stock, 512)[1] == "0"
    assert tables.score_at(scores, mine, 512) == ([None, None], "", "")
    assert [row[:3] for row in tables.tabulate_retrieval(scores).rows] == [
        ["stock", "256", "100"],
        ["stock", "512", "0"],
        ["mine", "256", "75"],
    ]
    assert tables.tabulate_retrieval(scores).rows[-1][-1] == "50 at depth 50 %"


def test_groups_of_questions_have_separate_scores(tmp_path):
    """Models of a group are adjacent, groups are in the order of the task, and two questions share a text."""
    file = tmp_path / "data.json"
    file.write_text("[]")
    groups = [["hard", "long", "cut"], ["easy", "short"], ["hard", "short"]]
    records = [
        {**answers(name, 64, None, right, task="longbench-v2"), "groups": groups, "texts": [7, 5, 7]}
        for name, right in (("stock", [1, 0, 1]), ("mine", [0, 1, 1]))
    ]
    settings = Settings(tasks=("longbench-v2",), longbench_v2=file)
    made = report_of(["stock", "mine"], records, settings)
    rows = tables.tabulate_groups(heat_map(made["models"], "longbench-v2")).rows
    assert [row[:4] for row in rows] == [
        *(["stock", "64", "easy", "0 of 1"], ["mine", "64", "easy", "1 of 1"]),
        *(["stock", "64", "hard", "2 of 2"], ["mine", "64", "hard", "1 of 2"]),
        *(["stock", "64", "short", "1 of 2"], ["mine", "64", "short", "2 of 2"]),
        *(["stock", "64", "medium", "0 of 0"], ["mine", "64", "medium", "0 of 0"]),
        *(["stock", "64", "long", "1 of 1"], ["mine", "64", "long", "0 of 1"]),
        *(["stock", "64", "cut", "1 of 1"], ["mine", "64", "cut", "0 of 1"]),
    ]
    assert rows[3][4:] == ["50.0 %", "{:.1f}–{:.1f} %".format(*(100 * end for end in share_interval([(1, 2)])))]
    assert rows[6][4:] == ["–", "–"]
    check_schema(records[0], RECORD, "cells.jsonl")
    with pytest.raises(CtxextError, match="one entry for each sample"):
        check_schema({**records[0], "groups": groups[1:]}, RECORD, "cells.jsonl")
    with pytest.raises(CtxextError, match=r'"groups\.0\.0"'):
        check_schema({**records[0], "groups": [[1], [], []]}, RECORD, "cells.jsonl")


def test_effective_lengths_with_and_without_the_leaderboard(report):
    table = tables.tabulate_effective_lengths(report, has_leaderboard=False)
    assert (table.head, [row[0] for row in table.rows]) == (["model", "needle"], ["stock"]), "one length tells nothing"
    report["models"][1]["ruler"] = {"tasks": 1, "length": 256, "scores": {"256": 0.9}}
    table = tables.tabulate_effective_lengths(report, has_leaderboard=True)
    assert table.head == ["model", "RULER ≥ 85.6 % (1 of 13 tasks)", "needle"]
    assert table.rows[1] == ["mine", "≥ 256", "–"]
    report["models"][0]["effective"]["tasks"]["kv"] = None
    for cell in report["models"][0]["cells"][:1]:
        report["models"][0]["cells"].append({**cell, "task": "kv"})
    assert tables.tabulate_effective_lengths(report, has_leaderboard=False).head == ["model", "all", "needle", "kv"]


def test_perplexity_has_a_row_for_each_text_and_columns_for_windows(report):
    table = tables.tabulate_perplexity(report)
    assert table.head == ["model", "text", "documents", "256 tokens", "256 tokens, sliding"]
    rows = (["stock", "", "2"], ["stock", "books", "1"], ["stock", "code", "1"])
    assert table.rows[:3] == [[*row, "1.00", "1.00"] for row in rows]
    for model in report["models"]:
        model["perplexity"] = None
    assert tables.tabulate_perplexity(report).rows == []


def test_the_change_of_the_loss_in_every_form(report):
    stock, mine = tables.tabulate_original_length(report).rows
    assert stock == ["stock", "512", "2", "2.718", "", "", "–", "–", "–"]
    assert mine[:6] == ["mine", "512", "2", "4.482", "+0.5000", "+0.5000 to +0.5000"]
    assert mine[6:] == ["+0.5000 (+0.5000 to +0.5000)", "+0.5000 (× 1.649, stock)", "stock"]


def test_the_summary_marks_the_best_and_has_sort_values(report):
    report["models"][0]["whole"] = "owner/stock"
    table = tables.tabulate_summary(report)
    assert table.head == ["model", "256 tokens", "512 tokens", "effective length", "cost, nats"]
    assert table.rows[0][0] == tables.Cell("stock", "owner/stock", "owner/stock", "name")
    assert table.rows[1][0] == tables.Cell("mine", "mine", "", "name")
    assert table.rows[0][2] == tables.Cell("0", "0.000000", "0–98")
    assert table.rows[1][2] == tables.Cell("–")
    assert [row[-1] for row in table.rows] == [tables.Cell("–"), tables.Cell("+0.500", "0.500000")]
    assert tables.tabulate_summary({**report, "models": []}).rows == []
