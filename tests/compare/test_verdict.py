"""Which method a comparison takes, from records that are written by hand."""

import random
from types import SimpleNamespace

import pytest

from ctxext.compare.candidates import STOCK, Candidate
from ctxext.compare.schedule import Judgement
from ctxext.compare.verdict import ModelResults, collect_results, compare_results, judge_results
from ctxext.evaluate.run import Missed
from ctxext.tasks.base import Key
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


def judged(
    records,
    names=("yarn", "dca"),
    refused=(),
    samples=TEXTS,
    reach=TARGET,
    lengths=(TARGET,),
    serving=None,
    missed=(),
    minutes=None,
    target_length=0,
):
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
            info=SimpleNamespace(name=name, trained_length=TRAINED, checkpoint=SimpleNamespace(config={})),
            tasks=(task,),
            lengths=tuple(length for length in {*lengths, reach} if length <= reach) if name == STOCK else lengths,
            settings=settings,
            documents=(),
            measured_lengths=[TARGET] * 2 * samples,
        )
        for name in ("unmodified", *names)
    ]
    return compare_results(report, records, candidates, plans, missed, minutes, target_length)


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


def late(model, samples, seconds=30.0):
    """Work on questions that did not fit into the time."""
    keys = [Key("needle", TARGET, depth, sample) for sample in samples for depth in (0.0, 1.0)]
    return Missed(model, SimpleNamespace(task=SimpleNamespace(name="needle"), length=TARGET, keys=keys), seconds)


def test_what_did_not_fit_into_the_time_is_reported():
    read = cells("unmodified", 0.0, samples=range(5)) + cells("yarn", 1.0, samples=range(5))
    missed = [*(late(name, range(5, TEXTS)) for name in ("unmodified", "yarn")), late("dca", range(5))]
    content = judged(read, missed=missed)
    assert content["not_reached"] == [
        "needle: the time was enough for 5 of 12 texts at 2048 tokens.",
        "Not measured: dca.",
    ]
    assert content["verdict"].endswith(" ".join(content["not_reached"]))
    assert judged(read, names=("yarn",))["not_reached"] == []


def test_what_is_not_measured_is_named():
    content = judged(cells("unmodified", 0.0) + cells("yarn", 1.0), ("yarn",), target_length=4096)
    assert content["not_reached"] == ["Not measured at 4096 tokens: --lengths 4k."]
    assert content["verdict"].endswith("--lengths 4k.")


def test_what_the_same_time_would_add():
    """By hand: of 60 s, seven texts of two models take 40 s, and dca the rest."""
    read = cells("unmodified", 0.0, samples=range(5)) + cells("yarn", 1.0, samples=range(5))
    more = [late(name, range(5, TEXTS), 20.0) for name in ("unmodified", "yarn")]
    content = judged(read, missed=[*more, *more, late("dca", range(5), 20.0)], minutes=1)
    assert content["not_reached"][-1] == "The same time again (--resume) would add dca and 7 more texts."
    short = judged(read, missed=[*more, late("dca", range(5), 21.0)], minutes=1)
    assert short["not_reached"][-1] == "The same time again (--resume) would add 7 more texts."
    assert judged(read, missed=[late("dca", range(5), 61.0)], minutes=1)["not_reached"][-1] == "Not measured: dca."


def plans_for(names):
    """Plans of the names, the unmodified model first."""
    infos = [SimpleNamespace(name=name, trained_length=TRAINED) for name in ("unmodified", *names)]
    return [SimpleNamespace(info=info, lengths=(TARGET,)) for info in infos]


def test_a_clearly_worse_method_is_not_measured_further_and_a_clear_verdict_ends_the_comparison():
    names, few = ("yarn", "dca"), range(4)
    read = cells("unmodified", 0.0, samples=few) + cells("yarn", 3.0, samples=few)
    judgement = judge_results(read, plans_for(names))
    assert judgement == Judgement(frozenset(), False, True, "yarn", frozenset({"unmodified", "yarn"}))
    judgement = judge_results(read + cells("dca", 0.0, samples=few), plans_for(names))
    assert judgement == Judgement(frozenset({"dca"}), False, True, "yarn", frozenset({"unmodified", *names}))
    everything = [line for name, share in (("unmodified", 0), ("yarn", 1), ("dca", 0)) for line in cells(name, share)]
    assert not judge_results(everything, plans_for(names)).is_decided, "its cost at short lengths is unknown"
    everything += documents("unmodified", 5.0) + documents("yarn", 5.0)
    assert judge_results(everything, plans_for(names)).is_decided


def test_questions_that_no_model_answers_decide_nothing():
    read = cells("unmodified", 0.0) + cells("yarn", 0.0)
    measured = frozenset({"unmodified", "yarn"})
    assert judge_results(read, plans_for(["yarn"])) == Judgement(frozenset(), False, False, measured=measured)


@pytest.mark.thorough
def test_looking_after_each_text_seldom_finds_a_difference_that_is_not_there():
    """300 comparisons of two equal models, 3 to 12 texts of ten questions, about which texts differ."""
    rng, found = random.Random(0), 0
    for _ in range(300):
        answers = {"unmodified": {}, "yarn": {}}
        for text in range(12):
            share = rng.uniform(0.1, 0.7)
            for drawn in answers.values():
                drawn["needle", TARGET, text] = {(depth / 9, text): float(rng.random() < share) for depth in range(10)}
            yarn, stock = (ModelResults(answers[name], {}, {}, None) for name in ("yarn", "unmodified"))
            confidence = 0.999 if text < 11 else 0.95
            if text >= 2 and yarn.finds_more(stock, confidence).low > 0:
                found += 1
                break
    assert found <= 0.025 * 300 + 5
