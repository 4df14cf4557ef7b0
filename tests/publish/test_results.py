"""What a model card shows of a report: every table worked out by hand, the command that asks again, what is missing."""

import json
import shlex

import pytest

from ctxext.errors import CtxextError
from ctxext.publish.results import build_results, conditions, entry_of, files_of, read_report
from ctxext.tasks.settings import Settings
from records_by_hand import VERSIONS, answers, facts, losses, report_of

SETTINGS = Settings(tasks=("needle", "perplexity", "short"), lengths=(256, 512), depths=(0.0, 0.5), samples=4, seed=3)
PICTURES = ["loss.png", "needle-out.png", "perplexity.png"]
RIGHT = {"demo": {256: (4, 4), 512: (0, 0)}, "mine": {256: (4, 2), 512: (3, 3)}}


def report(loading=None, **changes):
    """Two models: needles at two depths and lengths, perplexity, and the loss inside the original context length."""
    places = {"dtype": "float32", "device": "cpu", "attention": "sdpa", "trained_length": 256}
    models = [
        facts("demo", summary="demo's", digest="a" * 64, **places),
        facts("mine", summary="mine's", digest="b" * 64, source="demo", **places),
    ]
    records = []
    for number, name in enumerate(RIGHT):
        for length, counts in RIGHT[name].items():
            for depth, right in zip((0.0, 0.5), counts, strict=True):
                records.append(answers(name, length, depth, [1] * right + [0] * (4 - right)))
        sums = {"256": [255 * (1.0 + number), 255], "512": [511 * 2.0, 511]}
        curve = {"width": 128, "buckets": [[127.0, 127], *[[128.0, 128]] * 3]}
        records.append(losses(name, "perplexity", 512, lengths=sums, **curve))
        for sample, more in enumerate((0.5, 0.1)):
            records.append(losses(name, "short", 256, sample, tokens=[255], loss=[255 * (1.0 + more * number)]))
    return report_of(models, records, {**SETTINGS.to_dict(), **changes}, loading=loading or {}, versions=dict(VERSIONS))


@pytest.fixture
def content():
    return report()


def mine(content):
    return entry_of(content, ["b" * 64])


def table(content, title, pictures=PICTURES):
    """The part of the card under a title; empty where there is none."""
    _, _, rest = build_results(content, mine(content), pictures).body.partition(f"### {title}\n\n")
    return rest.partition("\n\n### ")[0].partition("\n\n4 samples")[0]


def rows(table):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"][2:]


def test_right_answers_by_length_over_all_depths_and_the_weakest(content):
    needle = table(content, "needle")
    assert rows(needle) == [
        ["demo (demo's)", "256", "100", "44–100", ""],
        ["demo (demo's)", "512", "0", "0–56", ""],
        ["**mine (mine's)**", "256", "75", "26–96", "50 at depth 50 %"],
        ["**mine (mine's)**", "512", "75", "13–98", ""],
    ]
    assert needle.startswith("| model | tokens |")
    assert needle.endswith("![needle](report/needle-out.png)")
    assert "![" not in table(content, "needle", ["loss.png"])


def test_a_depth_like_the_mean_hides_no_weaker_one(content):
    cells = content["models"][1]["cells"]
    strong = {**cells[0], "depth": 1.0, "correct": 4, "share": 1.0}
    even = [{**cells[0], "correct": 2, "share": 0.5}, {**cells[0], "depth": 0.5, "correct": 0, "share": 0.0}, strong]
    content["models"][1]["cells"] = even
    (row,) = [row for row in rows(table(content, "needle")) if "mine" in row[0]]
    assert (row[2], row[4]) == ("50", "0 at depth 50 %")


def test_perplexity_by_length_and_the_cost_inside(content):
    long = table(content, "perplexity")
    assert rows(long) == [["demo (demo's)", "2.72", "7.39"], ["**mine (mine's)**", "7.39", "7.39"]]
    assert "| perplexity over the first | 256 tokens | 512 tokens |" in long
    assert long.endswith("![Loss by position](report/perplexity.png)")
    ours, other = rows(table(content, "At the original context length"))[::-1]
    assert other == ["demo (demo's)", "2.718", "", ""]
    assert ours[:3] == ["**mine (mine's)**", "3.669", "+0.3000"]  # exp(1.3); the mean of 0.5 and 0.1.
    assert ours[3] == "-2.2412 to +2.8412"  # Of two documents: 12.706 × 0.2 each way.
    for entry in content["models"]:
        entry["perplexity"] = entry["short"] = None
    assert table(content, "perplexity") == table(content, "At the original context length") == ""


def test_effective_lengths_are_in_one_table(content):
    effective = table(content, "effective length")
    assert [row[0] for row in rows(effective)] == ["demo (demo's)", "**mine (mine's)**"]
    assert "score at 256 tokens" in effective
    for entry in content["models"]:
        entry["effective"] = None
    assert table(content, "effective length") == ""


def test_the_hub_s_model_index_has_every_figure_of_this_model_alone(content):
    results = build_results(content, mine(content), PICTURES).results
    figures = [(one.dataset_type, one.dataset_config, one.metric_type, one.metric_value) for one in results]
    assert figures == [
        ("ctxext-needle", "256", "exact_match", 0.75),
        ("ctxext-needle", "512", "exact_match", 0.75),
        ("ctxext-perplexity", "256", "perplexity", 7.389056),
        ("ctxext-perplexity", "512", "perplexity", 7.389056),
        ("ctxext-short", "256", "perplexity", 3.669297),
    ]
    assert results[0].dataset_args == {"samples": 4, "seed": 3, "depths": 2}
    assert results[-1].dataset_args == {"samples": 2, "seed": 3}, "it has only two documents"
    assert {one.task_type for one in results} == {"text-generation"}
    masked = build_results(content, {**mine(content), "kind": "masked"}, PICTURES).results
    assert {one.task_type for one in masked} == {"fill-mask"}
    encoder = build_results(content, {**mine(content), "kind": "encoder"}, PICTURES).results
    assert {one.task_type for one in encoder} == {"feature-extraction"}


def test_missing_measurements_are_listed(content):
    missing = build_results(content, mine(content), PICTURES).missing
    assert missing[0] == "Lengths beyond 512 tokens; the context length is 1024."
    assert "Finding a pass key in a repetitive text (`passkey`)." in missing
    assert not [line for line in missing if "(`needle`)" in line or "(`perplexity`)" in line or "(`short`)" in line]
    assert not [line for line in missing if "(`passages`)" in line], "that is for encoders"
    assert [line.split()[0] for line in missing[-3:]] == ["Free", "Needles", "Other"]
    assert [line for line in missing if "(`ruler`)" in line] == ["RULER (`ruler`)."]
    one = {**mine(content), "cells": [{**mine(content)["cells"][0], "task": "ruler-cwe"}]}
    assert not [line for line in build_results(content, one, PICTURES).missing if "(`ruler`" in line]
    within = {**mine(content), "context_length": 512}
    assert not [line for line in build_results(content, within, PICTURES).missing if line.startswith("Lengths beyond")]
    nothing = {**mine(content), "cells": [], "perplexity": None, "short": None}
    lines = build_results(content, nothing, PICTURES).missing
    assert lines[0] == "All lengths; the context length is 1024 tokens."
    assert lines[-1].startswith("Other languages")
    assert not [line for line in lines if line.startswith(("Free generation", "Needles in natural"))]
    written = report(generate=True, haystack={"name": "book.txt", "sha256": "0"})
    assert [line.split()[0] for line in build_results(written, mine(written), []).missing[-1:]] == ["Other"]
    assert not [
        line for line in build_results(written, mine(written), []).missing if line.startswith(("Free", "Needles in"))
    ]


def command(content):
    return shlex.split(build_results(content, mine(content), PICTURES).command)


def test_the_printed_command_repeats_the_questions():
    plain = ["ctxext", "eval", "demo", "OUT", "--task", "needle,perplexity,short", "--lengths", "256,512"]
    plain += ["--depths", "0,50", "--samples", "4", "--seed", "3", "--out", "report"]
    assert command(report()) == plain
    assert "--lengths" not in command(report(lengths=[]))
    assert command(report(depths=[0.5]))[8:10] == ["--depths", "50,"]  # With a comma: a list of one.


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_needles": 1}, ["--needles", "1"]),
        ({"kv_ids": "number"}, ["--kv-ids", "number"]),
        ({"filler": "same"}, ["--filler", "same"]),
        ({"repeat_question": True}, ["--repeat-question"]),
        ({"reason": True}, ["--reason"]),
        ({"stride": 64}, ["--stride", "64"]),
        ({"haystack": {"name": "a book.txt", "sha256": "0"}}, ["--haystack", "a book.txt"]),
        ({"data": "you/texts"}, ["--data", "you/texts"]),
        ({"documents": {"name": "q.jsonl", "sha256": "0"}}, ["--documents", "q.jsonl"]),
        ({"generate": True}, ["--generate"]),
        ({"allow_beyond": True}, ["--allow-beyond"]),
        ({"harness": ["arc", "piqa"]}, ["--harness", "arc,piqa"]),
        ({"evaluator": "you/judge"}, ["--evaluator", "you/judge"]),
        ({"original_length": 4096}, ["--original-length", "4096"]),
        ({"loading": {"dtype": "auto"}}, []),
        ({"loading": {"dtype": "bf16"}}, ["--dtype", "bf16"]),
        ({"loading": {"engine": "vllm"}, "generate": True}, ["--engine", "vllm"]),
        (
            {"loading": {"engine": "vllm", "engine_arguments": {"enforce_eager": True}}},
            ["--engine", "vllm", "--engine-args", json.dumps({"enforce_eager": True})],
        ),
    ],
)
def test_the_printed_command_has_all_changed_options(settings, words):
    plain, content = command(report()), command(report(**settings))
    assert content == [*plain[:-2], *words, *plain[-2:]]


def test_conditions(content):
    text = conditions(content, mine(content))
    assert text.startswith("4 samples per cell, seed 3; answers scored in one forward pass")
    assert "float32 on cpu with sdpa attention, transformers 5.23, torch 2.9." in text
    assert f"Measured checkpoint: `{'b' * 12}`." in text
    assert conditions({**content, "num_missed": 3}, mine(content)).startswith("up to 4 samples per cell")
    written = report(generate=True)
    written["versions"]["vllm"] = "0.32"
    assert "answers generated" in conditions(written, mine(written))
    assert "torch 2.9, run by vLLM 0.32." in conditions(written, mine(written))


def test_a_report_must_match_the_current_checkpoint(content):
    assert entry_of(content, ["c" * 64, "a" * 64])["name"] == "demo"
    with pytest.raises(CtxextError, match='contains "demo", "mine", but not this'):
        entry_of(content, ["c" * 64])


def test_reports_are_checked_and_published_with_their_files(tmp_path):
    with pytest.raises(CtxextError, match=r"has no report\.json"):
        read_report(tmp_path)
    for content in ({"settings": {}}, {"models": []}, {"settings": [], "models": []}):
        (tmp_path / "report.json").write_text(json.dumps(content))
        with pytest.raises(CtxextError, match="is not a report of ctxext eval"):
            read_report(tmp_path)
    (tmp_path / "report.json").write_text(json.dumps(report()))
    assert [one["name"] for one in read_report(tmp_path)["models"]] == ["demo", "mine"]
    for name in ("needle.png", "other.png", "report.html", "log.jsonl"):
        (tmp_path / name).write_text("x")
    assert [path.name for path in files_of(tmp_path)] == ["report.json", "report.html", "needle.png", "other.png"]
    assert [path.name for path in files_of(tmp_path, "![needle](report/needle.png)")][2:] == ["needle.png"]


@pytest.mark.parametrize(
    "data", ["https://me:hunter2@host/x.jsonl", "hf://datasets/x?token=hunter2", "s3://a:hunter2@b"]
)
def test_a_report_with_a_password_is_not_published(content, data, tmp_path):
    content["settings"] = {**content["settings"], "data": data}
    (tmp_path / "report.json").write_text(json.dumps(content))
    with pytest.raises(CtxextError, match="contain a password or a token") as caught:
        read_report(tmp_path)
    assert "hunter2" not in str(caught.value) + caught.value.hint
