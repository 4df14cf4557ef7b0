"""Which method a comparison takes, from records that are written by hand."""

from types import SimpleNamespace

import pytest

from ctxext.compare.candidates import STOCK, Candidate
from ctxext.compare.verdict import collect_results, compare_results
from ctxext.tasks.settings import Settings
from records_by_hand import answers, facts, losses, report_of

TRAINED, TARGET, TEXTS = 512, 2048, 12
EXACT = SimpleNamespace(to_dict=lambda: {"engine": "vLLM", "status": "exact", "arguments": "", "remark": ""})


def cells(model, share, length=TARGET, samples=range(TEXTS)):
    """Two depths of every text: that many texts of all are answered, first to last."""
    right = [int(sample < share * TEXTS) for sample in samples]
    seconds = 2.0 if model == "unmodified" else 3.0
    return [{**answers(model, length, depth, right), "seconds": seconds} for depth in (0.0, 1.0)]


def document(model, task, sample, beyond, inside=1.0):
    """Four stretches of 512 tokens, of which one is inside the original context length."""
    if task == "short":
        return losses(model, task, TRAINED, sample, loss=[inside * 511], tokens=[511])
    buckets = [[inside * 512, 512], *[[beyond * 512, 512]] * 3]
    return losses(model, task, TARGET, sample, buckets=buckets, width=512, lengths={"2048": [1.0, 2047]})


def documents(model, beyond, inside=1.0):
    noise = [0.01 * number for number in range(4)]
    lines = [document(model, "perplexity", n, beyond + extra, inside + extra) for n, extra in enumerate(noise)]
    return lines + [document(model, "short", n, beyond, inside + extra) for n, extra in enumerate(noise)]


def judged(records, names=("yarn", "dca"), refused=(), samples=TEXTS, reach=TARGET, lengths=(TARGET,), serving=None):
    """The comparison that records make."""
    settings = Settings(tasks=("needle", "perplexity", "short"), samples=samples, depths=(0.0, 1.0))
    models = [facts(name, recipe={"steps": []}, source="unmodified", context_length=TARGET) for name in names]
    report = report_of([facts("unmodified", context_length=TARGET), *models], records, settings)
    served = serving or {}
    candidates = [
        Candidate(name, ("--method", name), plan=SimpleNamespace(serving=served.get(name, [EXACT]))) for name in names
    ]
    candidates += [Candidate(name, ("--method", name), refusal="it has no rope.") for name in refused]
    task = SimpleNamespace(name="needle", has_depths=True)
    plans = [
        SimpleNamespace(
            info=SimpleNamespace(name=name, checkpoint=SimpleNamespace(config={})),
            tasks=(task,),
            lengths=tuple(length for length in {*lengths, reach} if length <= reach) if name == STOCK else lengths,
            settings=settings,
            documents=(),
            measured_lengths=[TARGET] * 2 * samples,
        )
        for name in ("unmodified", *names)
    ]
    return compare_results(report, records, candidates, plans)


def test_a_bucket_that_begins_at_the_length_counts_as_longer():
    record = document("yarn", "perplexity", 0, 0.0)
    record["buckets"] = [[512.0 * n, 512] for n in range(4)]
    assert collect_results([record], TRAINED).losses == {("", 0): 2.0}
    assert collect_results([record], TRAINED + 1).losses == {("", 0): 2.5}


def test_the_significantly_better_method_is_chosen():
    content = judged(cells("unmodified", 0.0) + cells("yarn", 0.5) + cells("dca", 1.0), refused=("pi",))
    assert (content["taken"], content["nearest"]) == ("dca", "dca")
    _, yarn, dca, pi = content["models"]
    assert dca["found"]["share"] == 1.0
    assert dca["against"]["difference"] == 1.0
    assert dca["against"]["texts"] == TEXTS
    assert 0 < yarn["against"]["low"] < yarn["against"]["difference"] == 0.5 < yarn["against"]["high"]
    assert yarn["time"] == 1.5
    assert (pi["refused"], pi["convert"]) == ("it has no rope.", ["--method", "pi"])
    taken = "Use dca: it answers 100 % (83–100) of the questions beyond 512 tokens, the unmodified model 0 % (0–17)."
    assert taken in content["verdict"]
    assert "Engines: vLLM" in content["verdict"]
    assert "yarn" not in content["verdict"], "it is surely behind"


def test_lengths_without_failures_do_not_hide_a_difference():
    """As on the demo: at 512 and 1024 tokens nothing fails, at 2048 ntk finds half."""
    fillers = ("m3", "m4", "m5", "m6", "m7")
    names, lengths = ("ntk", "self-extend", *fillers), (TRAINED, 2 * TRAINED, TARGET)
    shares = {"unmodified": (1.0, 0.5, 0.0), "ntk": (1.0, 1.0, 0.5), "self-extend": (1.0, 1.0, 1.0)}
    shares |= dict.fromkeys(fillers, (1.0, 0.5, 0.0))
    records = [
        line
        for name, of_model in shares.items()
        for length, share in zip(lengths, of_model, strict=True)
        for line in cells(name, share, length)
    ]
    read = documents("unmodified", 5.0) + documents("ntk", 2.0) + documents("self-extend", 2.0, inside=1.01)
    content = judged(records + read, names, lengths=lengths)
    assert content["taken"] == "self-extend"
    assert "ntk" not in content["verdict"], "it is surely behind, though cheaper inside"
    assert "answers 100 % (92–100) of the questions beyond 512 tokens, the unmodified model 25 %" in content["verdict"]


def test_results_within_the_original_length_do_not_decide_if_longer_were_planned():
    lengths = (TRAINED, TARGET)
    content = judged(
        cells("unmodified", 0.0, TRAINED) + cells("yarn", 1.0, TRAINED) + cells("unmodified", 0.5) + cells("yarn", 0.5),
        ("yarn",),
        lengths=lengths,
    )
    assert content["taken"] is None
    unreached = judged(cells("unmodified", 0.0, TRAINED) + cells("yarn", 1.0, TRAINED), ("yarn",), lengths=lengths)
    assert unreached["taken"] is None
    assert unreached["verdict"].startswith("No method was measured beyond 512 tokens.")
    only_inside = judged(
        cells("unmodified", 0.0, TRAINED) + cells("yarn", 1.0, TRAINED), ("yarn",), lengths=(TRAINED,), reach=TRAINED
    )
    assert only_inside["taken"] == "yarn", "nothing else was asked"


def test_the_best_method_at_longer_lengths_is_chosen():
    lengths = (TRAINED, TARGET)
    records = [cells(name, share, TRAINED) for name, share in (("unmodified", 1.0), ("yarn", 0.0), ("dca", 1.0))]
    records += [cells(name, share) for name, share in (("unmodified", 0.0), ("yarn", 1.0), ("dca", 0.5))]
    assert judged([line for of in records for line in of], lengths=lengths)["taken"] == "yarn"


def test_a_lower_loss_does_not_make_the_one_that_finds_less_as_good():
    """Neither finds surely more than stock; one finds surely less than the other."""
    found = cells("unmodified", 0.5) + cells("yarn", 0.7) + cells("dca", 0.3)
    read = documents("unmodified", 5.0) + documents("yarn", 2.0, inside=1.02) + documents("dca", 2.0)
    content = judged(found + read)
    assert content["taken"] == "yarn"
    assert "dca" not in content["verdict"]


def test_equal_is_decided_at_the_corrected_confidence():
    """At 95 % a difference in 5 texts of 12 is significant; with seven methods it is not."""
    names = ("yarn", "dca", "m3", "m4", "m5", "m6", "m7")
    records = cells("unmodified", 0.0) + cells("yarn", 1.0) + cells("dca", 7 / 12)
    read = documents("unmodified", 5.0) + documents("yarn", 2.0, inside=1.05) + documents("dca", 2.0)
    few = judged(records + read)
    many = judged(records + read + [line for name in names[2:] for line in cells(name, 0.0)], names)
    assert few["taken"] == "yarn"
    assert many["taken"] == "dca", "the cheaper one, which is not surely worse any more"


def test_equal_in_the_loss_is_decided_at_the_corrected_confidence():
    extra = (0.002, 0.004, 0.006, 0.008)
    names = ("yarn", "dca", "m3", "m4", "m5", "m6", "m7")
    records = documents("unmodified", 5.0) + documents("yarn", 2.0, inside=1.05)
    records += [document("dca", "perplexity", n, 2.0 + 0.01 * n + more, 1.0) for n, more in enumerate(extra)]
    records += [document("dca", "short", n, 2.0, 1.0 + 0.01 * n) for n in range(4)]
    few = judged(records)
    many = judged(records + [line for name in names[2:] for line in documents(name, 5.0)], names)
    assert (few["taken"], many["taken"]) == ("yarn", "dca")


def test_of_equal_methods_the_one_with_more_engines_is_chosen():
    other = SimpleNamespace(to_dict=lambda: {"engine": "MLX", "status": "exact", "arguments": "", "remark": ""})
    untried = SimpleNamespace(to_dict=lambda: {"engine": "SGLang", "status": "untried", "arguments": "", "remark": ""})
    records = cells("unmodified", 0.0) + cells("yarn", 1.0) + cells("dca", 1.0)
    read = documents("unmodified", 5.0) + documents("yarn", 2.0) + documents("dca", 2.0)
    for more, fewer in (("yarn", "dca"), ("dca", "yarn")):
        serving = {more: [EXACT, other], fewer: [EXACT, untried, untried]}
        assert judged(records, serving=serving)["taken"] == more
        assert judged(read, serving=serving)["taken"] == more


def test_of_two_equally_accurate_methods_the_cheaper_is_chosen():
    found = cells("unmodified", 0.0) + cells("yarn", 1.0) + cells("dca", 0.92)
    read = documents("unmodified", 5.0) + documents("yarn", 2.0, inside=1.02) + documents("dca", 2.1)
    content = judged(found + read)
    assert content["taken"] == "dca"
    assert "Cost at 512 tokens: none." in content["verdict"]
    assert "Not significantly worse: yarn (+0.020)" in content["verdict"]
    yarn = content["models"][1]
    assert yarn["inside"]["loss"] == pytest.approx(0.02)
    assert yarn["beyond"]["difference"] == pytest.approx(-3.0)
    assert yarn["beyond"]["high"] < 0


def test_no_zero_has_a_minus():
    read = documents("unmodified", 5.0) + documents("yarn", 2.0, inside=0.9999) + documents("dca", 5.0, inside=0.9999)
    content = judged(cells("unmodified", 0.0) + cells("yarn", 1.0) + cells("dca", 1.0) + read)
    assert "Cost at 512 tokens: +0.000 nats per token" in content["verdict"]
    assert "(+0.000)" in content["verdict"]
    same = judged(documents("unmodified", 5.0) + documents("yarn", 5.0 - 1e-5) + documents("dca", 5.0))
    assert "Closest: yarn, +0.000 (" in same["verdict"]
    assert "-0.000" not in content["verdict"] + same["verdict"]


def test_lengths_that_the_unmodified_model_cannot_read_are_not_compared():
    asked = cells("unmodified", 1.0, TRAINED) + cells("yarn", 1.0, TRAINED) + cells("yarn", 1.0)
    told = "cannot read more than 512 tokens; at 2048 tokens, methods are compared only with each other."
    assert told in judged(asked, names=("yarn",), reach=TRAINED)["verdict"]
    assert told not in judged(asked, names=("yarn",))["verdict"]


def test_without_correct_answers_the_loss_at_longer_lengths_decides():
    found = cells("unmodified", 0.0) + cells("yarn", 0.0) + cells("dca", 0.0)
    content = judged(found + documents("unmodified", 5.0) + documents("yarn", 2.0) + documents("dca", 4.9))
    assert content["taken"] == "yarn"
    assert "changes the loss beyond 512 tokens by -3.000" in content["verdict"]
    assert "dca" not in content["verdict"]


def test_a_loss_that_shows_as_zero_is_no_reason():
    """Documents differ by the same, so the interval is as narrow as the difference is small."""
    content = judged(documents("unmodified", 4.0) + documents("yarn", 3.9999), names=("yarn",))
    assert content["models"][1]["beyond"]["high"] < 0
    assert content["taken"] is None
    assert content["verdict"].startswith("No method is significantly better than the unmodified model. Closest: yarn")


def test_insignificant_differences_choose_no_method():
    content = judged(cells("unmodified", 0.5) + cells("yarn", 0.6) + cells("dca", 0.4))
    assert (content["taken"], content["nearest"]) == (None, "yarn")
    assert content["verdict"].startswith("No method is significantly better than the unmodified model. Closest: yarn")
    none = judged([])
    assert (none["taken"], none["nearest"]) == (None, None)
    assert none["verdict"].startswith("No method was measured")


def test_a_lower_loss_does_not_outweigh_fewer_correct_answers():
    read = documents("unmodified", 5.0) + documents("yarn", 2.0) + documents("dca", 5.0)
    content = judged(cells("unmodified", 1.0) + cells("yarn", 0.0) + cells("dca", 1.0) + read)
    assert content["taken"] is None


def test_two_texts_are_too_few_and_five_are_not():
    few = range(2)
    content = judged(cells("unmodified", 0.0, samples=few) + cells("yarn", 1.0, samples=few), ("yarn",), samples=2)
    assert content["models"][1]["against"]["difference"] == 1.0
    assert content["taken"] is None
    five = range(5)
    content = judged(cells("unmodified", 0.0, samples=five) + cells("yarn", 1.0, samples=five), ("yarn",), samples=5)
    assert content["taken"] == "yarn"


def test_the_more_methods_the_wider_their_intervals():
    """By hand: 16 of 24 more, and the quantiles of Student's t with 11 degrees of freedom for 95 and 97.5 %."""
    names = ("yarn", "dca", "ntk", "llama3")
    records = [cells(name, 0.0 if name == "unmodified" else 2 / 3) for name in ("unmodified", *names)]
    one, four = judged([*records[0], *records[1]], ("yarn",)), judged([line for of in records for line in of], names)
    assert (one["confidence"], four["confidence"]) == pytest.approx((0.95, 0.975))
    halves = [16 / 26 - content["models"][1]["against"]["low"] for content in (one, four)]
    assert halves[1] / halves[0] == pytest.approx(2.593093 / 2.200985)


def test_only_texts_that_both_models_read_are_compared():
    stock = collect_results(cells("unmodified", 0.0, samples=range(4)), TRAINED)
    yarn = collect_results(cells("yarn", 1.0), TRAINED)
    assert yarn.finds_more(stock).texts == 4
    assert yarn.time_ratio(stock) is None, "their records cover other samples"


def test_unmeasured_lengths_are_reported():
    content = judged(cells("unmodified", 0.0) + cells("yarn", 1.0, samples=range(5)), ("yarn",))
    assert content["not_reached"] == ["needle: time ran out after 5 of 12 questions per depth at 2048 tokens."]
    assert content["verdict"].endswith(content["not_reached"][0])
    assert judged(cells("unmodified", 0.0) + cells("yarn", 1.0), ("yarn",))["not_reached"] == []


def test_the_needed_time_is_reported_if_a_length_was_not_measured():
    """By hand: 2 depths of one text took stock 1500 s each, so one text takes both models 2 × 2 × 25 minutes."""
    lines = [{**line, "seconds": 1500.0} for line in cells("unmodified", 0.0, samples=range(1))]
    content = judged(lines, ("yarn",))
    assert content["not_reached"][0] == "needle: time ran out before the first question at 2048 tokens."
    assert "takes about 100 minutes for all methods" in content["not_reached"][1]
    assert content["verdict"].startswith("No method was measured.")
