"""The rows of a comparison, in the terminal and as Markdown."""

import io

from rich.console import Console

from ctxext.cli.compare import comparison_tables
from ctxext.compare.page import format_markdown
from ctxext.compare.tables import tabulate_costs, tabulate_losses, tabulate_scores
from ctxext.compare.verdict import format_difference
from ctxext.report.report import heat_map
from records_by_hand import answers, facts, report_of


def difference(value, half=0.1):
    return {"difference": value, "low": value - half, "high": value + half, "texts": 3}


STOCK = {
    **{"name": "unmodified", "found": {"share": 0.5, "low": 0.4, "high": 0.6}, "refused": None},
    **{"loss_beyond": 3.14159, "peak": 12.34e9},
}
YARN = {
    **{"name": "yarn", "found": None, "refused": None, "against": difference(0.123), "beyond": difference(-0.5)},
    **{"beyond_by_text": {"code": difference(-0.2)}, "inside": None, "time": 1.5, "memory": None},
    "serving": [{"engine": "vLLM", "status": "exact"}, {"engine": "MLX", "status": "unknown"}],
}
TABLE = {"name": "table", "refused": "no learned | table"}


def report():
    records = [answers("unmodified", 256, depth, [1, right]) for depth, right in ((0.0, 1), (1.0, 0))]
    content = {"source": "demo", "target_length": 512, "confidence": 0.95, "models": [STOCK, YARN, TABLE]}
    content |= {"taken": "yarn", "verdict": "Use yarn."}
    made = report_of([facts("unmodified"), facts("yarn")], [*records, answers("yarn", 512, 0.0, [1])])
    return {**made, "comparison": content}


def test_scores_by_length_and_depth():
    table = tabulate_scores(heat_map(report()["models"], "needle"))
    assert table.head == ["needle, %", "256 tokens", "512 tokens"]
    assert table.rows == [["unmodified", "**75** (1–99): 100 50", "–"], ["yarn", "–", "**100** (21–100): 100"]]


def test_costs_of_the_unmodified_model_and_of_a_method():
    table = tabulate_costs([STOCK, YARN], format_difference)
    assert len(table.head) == len(table.rows[0]) == len(table.rows[1])
    assert table.rows[0] == ["unmodified", "", "3.142", "", "", "12.3 GB", ""]
    assert table.rows[1] == ["yarn", "+12 (+2 to +22)", format_difference(YARN["beyond"]), "–", "× 1.50", "–", "vLLM"]
    assert tabulate_costs([{**STOCK, "loss_beyond": None, "peak": None}], format_difference).rows[0][2:6] == [
        "–",
        "",
        "",
        "",
    ]


def test_losses_by_text_are_those_of_measured_methods():
    table = tabulate_losses([STOCK, YARN, TABLE], lambda found: "–" if found is None else f"{found['difference']}")
    assert (table.head[1:], table.rows) == (["code"], [["yarn", "-0.2"]])
    assert tabulate_losses([STOCK, TABLE], str).rows == []


def test_both_places_show_the_same_rows():
    page = format_markdown(report())
    console = Console(width=120, file=io.StringIO())
    for part in comparison_tables(report(), 120):
        console.print(part)
    terminal = console.file.getvalue()
    assert "| yarn | +12 (+2 to +22) | -0.500 (-0.600 to -0.400) | – | × 1.50 | – | vLLM |" in page
    assert "| unmodified | " not in page.split("| method |", 1)[1]
    assert page.endswith("- table does not apply: no learned &#124; table\n")
    assert "-0.500 ± 0.100" in terminal
    assert "-0.200 ± 0.100" in terminal
    assert "12.3 GB" in terminal
    assert "table does not apply: no learned | table" in terminal
