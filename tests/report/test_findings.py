"""The sentences of a report, and the intervals in them."""

import math

import pytest

from ctxext.report.colours import ink, shade
from ctxext.report.findings import findings, format_percent, pool_cells
from ctxext.report.intervals import (
    adjust_confidence,
    effective_samples,
    mean_interval,
    paired_interval,
    share_interval,
    wilson_interval,
)
from ctxext.tasks.registry import GROUPS
from records_by_hand import answers, losses, report_of


def asked(shares):
    """A report of some models: for each name and length the right answers out of ten at two depths."""
    records = [
        answers(name, length, depth, [1] * count + [0] * (10 - count))
        for name, lengths in shares.items()
        for length, counts in lengths.items()
        for depth, count in zip((0.0, 1.0), counts, strict=True)
    ]
    return report_of(shares, records)


def test_rulers_thirteen_are_one_sentence():
    model = {"name": "a", "cells": [], "perplexity": None, "short": None, "trained_length": None}
    for number, task in enumerate((*GROUPS["ruler"], "kv")):
        one = {"task": task, "length": 4096, "depth": 0.5, "correct": 10 * (number % 2), "samples": 10}
        texts = [[text, number % 2, 1] for text in range(10)]
        model["cells"].append({**one, "share": number % 2, "texts": texts})
    assert findings({"models": [model]}) == [
        "RULER (13 tasks) at 4096 tokens: a finds 46 % (38–55).",
        "kv at 4096 tokens: a finds 100 % (72–100).",
    ]
    model["cells"] = model["cells"][1:]
    assert len(findings({"models": [model]})) == 13, "twelve of them are not RULER"


def test_the_score_of_ruler_v2_is_one_sentence():
    cells = [
        {"task": task, "length": 4096, "depth": None, "correct": 10 * (number % 3 == 0), "samples": 10}
        | {"share": float(number % 3 == 0), "texts": [[text, float(number % 3 == 0), 1] for text in range(10)]}
        for number, task in enumerate(GROUPS["ruler2"])
    ]
    model = {"name": "a", "cells": cells, "perplexity": None, "short": None, "trained_length": None}
    (sentence,) = findings({"models": [model]})
    assert sentence.startswith("RULER v2 (12 tasks) at 4096 tokens: a finds 33 %")


def test_lengths_without_correct_answers_are_reported():
    (sentence,) = findings(asked({"a": {512: (10, 10), 1024: (0, 0)}}))
    assert sentence == "needle at 512 tokens: a finds 100 % (80–100); no correct answers at 1024 tokens."
    (sentence,) = findings(asked({"a": {512: (0, 0)}}))
    assert sentence == (
        "needle: no correct answers at any length. 512 tokens are within the original context length, so the model "
        "probably cannot do this task at all, and its scores do not measure the context. Use --task passkey."
    )
    (sentence,) = findings(asked({"a": {1024: (0, 0)}}))
    assert sentence == "needle: no correct answers at any length."


def test_a_model_is_uneven_if_the_intervals_of_two_depths_do_not_overlap():
    """Of ten, 2 (6–51) and 9 (60–98) differ, 4 (17–69) and 9 do not."""
    (sentence,) = findings(asked({"a": {512: (2, 9)}}))
    assert sentence.endswith("; a is uneven: 20 % at depth 0 %, 90 % at depth 100 %.")
    (sentence,) = findings(asked({"a": {512: (4, 9)}}))
    assert "uneven" not in sentence


def test_a_task_that_a_model_cannot_do_names_an_easier_one():
    """A small base model cannot copy the UUIDs of kv at any length."""
    report = asked({"a": {512: (0, 0)}})
    for cell in report["models"][0]["cells"]:
        cell["task"] = "kv"
    (sentence,) = findings(report)
    assert sentence.endswith("Use --kv-ids number or --task needle.")


@pytest.mark.parametrize(("width", "is_told"), [(256, True), (512, False), (1024, False)])
def test_a_curve_that_is_coarser_than_the_context_is_passed_over(width, is_told):
    buckets = [[(2.0 if start < 512 else 1.5) * width, width] for start in range(0, 8192, width)]
    record = losses("a", "perplexity", 8192, width=width, buckets=buckets, lengths={})
    sentences = findings(report_of(["a"], [record]))
    assert sentences == (
        [
            "Loss in the last half of long texts, in nats per token against the last half of the original context "
            "length: a -0.50."
        ]
        if is_told
        else []
    )


def test_only_all_and_nothing_are_100_and_0():
    assert [format_percent(share) for share in (0, 0.001, 0.5, 0.999, 1)] == ["0", "1", "50", "99", "100"]


def test_text_reads_on_every_shade():
    def luminance(hexadecimal):
        parts = [int(hexadecimal[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for step in range(1001):
        colour = shade(step / 1000)
        pair = sorted((luminance("#{:02x}{:02x}{:02x}".format(*colour)), luminance(ink(colour))))
        assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5, step


@pytest.mark.parametrize(
    ("correct", "samples", "low", "high"),
    [  # Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_equals_the_published_figures(correct, samples, low, high):
    assert wilson_interval(correct, samples) == pytest.approx((low, high), abs=5e-5)
    mirrored = wilson_interval(samples - correct, samples)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=5e-5)


@pytest.mark.parametrize(
    ("freedom", "confidence", "quantile"),
    [
        *((1, 0.95, 12.7062), (3, 0.95, 3.182446), (10, 0.95, 2.228139), (30, 0.95, 2.042272), (120, 0.95, 1.97993)),
        *((1, 0.9, 6.3138), (4, 0.975, 3.4954), (7, 0.99, 3.4995)),
    ],
)
def test_the_interval_of_a_mean_is_student_s(freedom, confidence, quantile):
    """Quantiles from the published tables of Student's t."""
    values = [float(number) for number in range(freedom + 1)]
    spread = math.sqrt(sum((value - freedom / 2) ** 2 for value in values) / freedom / (freedom + 1))
    mean, half = mean_interval(values, confidence)
    assert mean == freedom / 2
    assert half == pytest.approx(quantile * spread, rel=2e-5)
    assert mean_interval([1.0]) == (1.0, math.inf)


def test_questions_about_one_text_are_not_independent():
    """By hand: 5 texts of 10 questions and the two that are added, squares around 3/4 of 2 questions each by text."""
    apart, alike = [[1.0] * 10, [0.0] * 10] * 2 + [[1.0] * 5 + [0.0] * 5], [[1.0] * 5 + [0.0] * 5] * 5
    middle, half = paired_interval(apart)
    assert middle == 25 / 52
    squares = 2 * (10 - 250 / 52) ** 2 + 2 * (250 / 52) ** 2 + (5 - 250 / 52) ** 2 + (27 / 52) ** 2 + (77 / 52) ** 2
    assert half == pytest.approx(2.776445 * math.sqrt(squares * 7 / 6) / 52)
    assert paired_interval(alike)[1] < half / 4, "the same answers, with all texts equal"
    assert paired_interval([[1.0] * 10])[1] == math.inf


def test_several_comparisons_are_wider():
    assert [adjust_confidence(count) for count in (0, 1, 2, 4)] == pytest.approx([0.95, 0.95, 0.95, 0.975])


def test_a_share_over_texts_counts_texts():
    """By hand: five texts of ten questions, all alike within a text, are worth four of 50; alike texts lose nothing."""
    apart, alike = [(10.0, 10), (0.0, 10)] * 2 + [(5.0, 10)], [(5.0, 10)] * 5
    assert effective_samples(apart) == pytest.approx(50 / ((4 * 25 * 5 / 4) / (50 * 0.25)))
    assert effective_samples(alike) == 50
    t, worth = 2.776445, effective_samples(apart)
    half = t * math.sqrt(0.25 / worth + t * t / (4 * worth * worth)) / (1 + t * t / worth)
    assert share_interval(apart) == pytest.approx((0.5 - half, 0.5 + half), rel=1e-5)
    assert share_interval([(1.0, 1), (0.0, 1), (1.0, 1)]) == wilson_interval(2, 3), "each question has a text"
    assert share_interval([(3.0, 10)]) == (0.0, 1.0), "one text says nothing of others"
    assert share_interval([]) == (0.0, 1.0)


def test_questions_about_one_text_are_no_more_questions_in_a_report():
    cell = {"task": "needle", "length": 8, "correct": 2, "samples": 4}
    two = [{**cell, "texts": [[0, 1, 1], [1, 1, 1], [2, 0, 1], [3, 0, 1]]}] * 2
    assert pool_cells(two) == (0.5, *share_interval([(2, 2), (2, 2), (0, 2), (0, 2)]))
    lengths = pool_cells([two[0], {**two[1], "length": 16}])
    assert lengths == (0.5, *wilson_interval(4, 8)), "another length has other texts"
