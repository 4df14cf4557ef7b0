import io
import json
import math
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from ctxext.api import Settings, evaluate
from ctxext.cli.eval_tables import report_tables
from ctxext.errors import CtxextError
from ctxext.models import answers
from ctxext.models import token_losses as scoring
from ctxext.models.model import LoadedModel, wrap_model
from ctxext.models.token_losses import token_losses
from ctxext.report.page import render_page
from ctxext.tasks import longppl
from ctxext.tasks.perplexity import bucket_width
from hand_made import one_that_sees_length, tiny_llama


def plain_losses(model, ids):
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits.double()
    return torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")


def test_a_loss_that_is_not_finite_is_refused(tokenizer):
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = float("inf")
    with pytest.raises(CtxextError, match="NaN or infinite"):
        token_losses(wrap_model("broken", model, tokenizer), torch.tensor([[4, 5, 6, 7]]))


def ready(model):
    return LoadedModel("model", model, None, can_share=False)


IDS = torch.randint(3, 640, (2, 40), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("last", [None, 15, 1])
@pytest.mark.parametrize("make", [tiny_llama, one_that_sees_length])
def test_losses_of_the_last_tokens_whether_or_not_the_head_is_separate(monkeypatch, make, last):
    monkeypatch.setattr("ctxext.checkpoint.head._PIECE_BYTES", {"cpu": 7 * 4 * 640})
    losses = token_losses(ready(make()), IDS, last=last)
    torch.testing.assert_close(losses, plain_losses(make(), IDS)[:, -(last or 39) :], atol=2e-5, rtol=1e-5)


def test_answers_of_narrow_logits_are_scored_in_float32(monkeypatch):
    """Logits as a model in bfloat16 gives them; a softmax of 16 bits is off by a hundredth."""
    logits = (4 * torch.randn(1, 31, 500, generator=torch.Generator().manual_seed(0))).to(torch.bfloat16)
    monkeypatch.setattr(answers, "_run_all", lambda *given: iter([(0, torch.arange(40)[None], logits)]))
    question = [[SimpleNamespace(num_answer=30)]]
    ((_, (answer,), _),) = answers.answer_losses(ready(None), question)
    wanted = torch.nn.functional.cross_entropy(logits[0, :30].double(), torch.arange(10, 40))
    assert answer == pytest.approx(float(wanted), abs=1e-6)


def test_no_cache_is_stored_for_a_long_text():
    model, caches = tiny_llama(), []
    model.model.register_forward_hook(lambda _, given, output: caches.append(list(output)))
    token_losses(ready(model), IDS)
    assert caches
    assert not {"cache", "past_key_values"} & set().union(*caches)


def test_losses_do_not_depend_on_earlier_texts():
    """The stock dynamic schedule keeps the frequencies of the longest text it has seen."""
    dynamic = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    loaded = ready(tiny_llama(max_position_embeddings=16, rope_scaling=dynamic))
    first = token_losses(loaded, IDS[:, :20])
    token_losses(loaded, IDS)
    assert torch.equal(token_losses(loaded, IDS[:, :20]), first)


def reading(ids, **options):
    encoder = SimpleNamespace(get_start_tokens=lambda: [0], get_end_tokens=lambda: [1])
    return SimpleNamespace(**{"encoder": encoder, "documents": lambda *_: [ids], "stride": None, "text": "", **options})


def test_bucket_width():
    assert [bucket_width(length) for length in (64, 512, 2048, 131072)] == [16, 16, 64, 4096]


def test_key_tokens_are_predicted_from_afar_alone(monkeypatch):
    """By hand: a short context of 8 tokens that moves by 2, so each token of the second half has 8 or 9 before it."""
    ids = [0, *range(1, 16)]
    whole = torch.tensor([1.0] * 15, dtype=torch.float64)
    whole[12 - 1], whole[13 - 1] = 2.5, 1.9
    short = {8: 3.1, 9: 2.9, 10: 1.0, 11: 9.0, 12: 9.0, 13: 4.0, 14: 3.0, 15: 0.0}
    parts = []

    def losses(loaded, text, *, last=None):
        if last is None:
            return whole[None]
        parts.append(text[0].tolist())
        return torch.tensor([[short[token] for token in text[0].tolist()[-last:]]], dtype=torch.float64)

    monkeypatch.setattr(scoring, "token_losses", losses)
    found = scoring.key_tokens(SimpleNamespace(device="cpu"), ids, 8, 2)
    assert found.tolist() == [8, 11, 13], "12 is badly predicted from afar too"
    assert parts == [[*range(begin, begin + 10)] for begin in (0, 2, 4, 6)]


@pytest.mark.thorough
def test_longppl_is_the_mean_loss_of_key_tokens(checkpoint, monkeypatch, tmp_path):
    monkeypatch.setattr(scoring, "GAIN", -math.inf)
    monkeypatch.setattr(scoring, "LOSS", math.inf)
    options = {"tasks": ("longppl", "perplexity"), "lengths": (128, 300), "samples": 2}
    report = evaluate([str(checkpoint)], Settings(**options, evaluator=str(checkpoint)), out=tmp_path)
    assert "skipped_lines" not in report
    entry = report["models"][0]
    assert entry["longppl"].keys() == {"128", "300"}
    one, curve = entry["longppl"]["300"], entry["perplexity"]["curve"]
    assert (one["documents"], one["count"], one["of"]) == (2, 2 * 225, 2 * 225), "all behind the first quarter"
    beyond = [point for point in curve if point["start"] >= 80]
    near = (one["loss"] * one["count"] - sum(point["loss"] * point["count"] for point in beyond)) / (2 * 5)
    assert min(p["loss"] for p in curve) - 1 < near < max(p["loss"] for p in curve) + 1
    assert str(checkpoint.parent) not in str(report["settings"])
    assert shown(report).count(f"{one['loss']:.3f}") == 2, "on the page and in the terminal"
    monkeypatch.setattr(scoring, "LOSS", -math.inf)
    longppl._find_spans.cache_clear()
    report = evaluate([str(checkpoint)], Settings(**options, evaluator=str(checkpoint)), out=tmp_path / "none")
    one = report["models"][0]["longppl"]["300"]
    assert (one["loss"], one["perplexity"], one["count"]) == (None, None, 0), "a mean over no token is no loss"
    assert "0.000" not in shown(report)
    with pytest.raises(CtxextError, match="needs an evaluator"):
        Settings(**options)


def test_an_evaluator_is_checked_before_anything_runs(checkpoint, tmp_path):
    """It reads every length, and the tokens of the models; what is wrong is told before the first question."""
    settings = {"tasks": ("needle", "longppl"), "lengths": (300,), "samples": 1, "allow_beyond": True}

    def refusal(evaluator, **changes):
        with pytest.raises(CtxextError) as error:
            evaluate(
                [str(checkpoint)], Settings(**{**settings, "evaluator": evaluator, **changes}), out=tmp_path / "out"
            )
        assert not (tmp_path / "out" / "cells.jsonl").exists()
        return error.value.message

    reach = json.loads((checkpoint / "config.json").read_text())["max_position_embeddings"]
    too_far = refusal(str(checkpoint), lengths=(reach + 1,))
    assert too_far == f'The evaluator "tiny" supports {reach} tokens, but a prompt length is {reach + 1}.'
    assert refusal(str(tmp_path / "nothing")).startswith("There is no folder")


def shown(report):
    console = Console(width=120, file=io.StringIO())
    console.print(*report_tables(report, 120))
    return render_page(report) + console.file.getvalue()
