import io
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from transformers import LlamaForCausalLM

from ctxext.cli.eval_tables import report_tables
from ctxext.errors import CtxextError
from ctxext.evaluate import Settings, evaluate
from ctxext.evaluate.model import LoadedModel, make_ready
from ctxext.evaluate.report.page import render_page
from ctxext.evaluate.scoring import exact_match, key_tokens
from ctxext.evaluate.scoring import masked_losses as masked
from ctxext.evaluate.scoring import token_losses as loss
from ctxext.evaluate.tasks.perplexity import LongPerplexity, Perplexity, bucket_width
from hand_made import nested, one_that_sees_length, tiny_llama

sys.path.insert(0, str(Path(__file__).parents[1]))

# Families that do something of their own between hidden states and logits, and some that do not.
FAMILIES = ["llama", "gemma2", "cohere", "granite", "gpt_neox", "phi", "mixtral", "qwen3", "gemma3_text", "stablelm"]


def plain_losses(model, ids):
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits.double()
    return torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")


def check(model, monkeypatch, length=48):
    monkeypatch.setattr(loss, "_piece_size", lambda model, ids: 7)
    calls = []
    monkeypatch.setattr(loss._Head, "__call__", counted(loss._Head.__call__, calls))
    loaded = LoadedModel("model", model, None, can_share=False)
    size = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(3, min(size, 100), (2, length), generator=torch.Generator().manual_seed(0))
    plain = plain_losses(model, ids)
    torch.testing.assert_close(loss.token_losses(loaded, ids), plain, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(loss.token_losses(loaded, ids, last=5), plain[:, -5:], atol=2e-4, rtol=1e-4)
    return calls


def narrow_logits(*shape):
    """Logits as a model in bfloat16 gives them; a softmax of 16 bits is off by a hundredth."""
    return (4 * torch.randn(*shape, generator=torch.Generator().manual_seed(0))).to(torch.bfloat16)


def test_losses_of_narrow_logits_are_computed_in_float32(monkeypatch):
    logits, targets = narrow_logits(1, 40, 500), torch.arange(40)[None]
    wanted = torch.nn.functional.cross_entropy(logits[0].double(), targets[0], reduction="none")
    torch.testing.assert_close(loss._losses(logits, targets)[0], wanted, atol=1e-5, rtol=1e-5)
    # Answers.
    ids = [*range(40)]
    question = [[SimpleNamespace(ids=ids, num_answer=30)]]
    monkeypatch.setattr(exact_match, "_run_all", lambda *given: iter([(0, logits[:, :31])]))
    loaded = SimpleNamespace(name="m", device="cpu")
    ((_, (answer,), _),) = exact_match.answer_losses(loaded, question)
    wanted = torch.nn.functional.cross_entropy(logits[0, :30].double(), torch.tensor(ids[-30:]))
    assert answer == pytest.approx(float(wanted), abs=1e-6)
    # Masked tokens.
    tokenizer = SimpleNamespace(mask_token_id=1, all_special_ids=[0, 1])
    model = SimpleNamespace(encoder=SimpleNamespace(tokenizer=tokenizer), name="m", device="cpu", model=None)
    monkeypatch.setattr(masked, "rows_that_fit", lambda *given: 8)
    monkeypatch.setattr(masked, "logits_at", lambda loaded, seen, chosen: logits[0, chosen.nonzero()[:, 1]])
    losses, is_guessed = masked.masked_losses(model, ids)
    wanted = torch.nn.functional.cross_entropy(logits[0].double(), targets[0], reduction="none")
    torch.testing.assert_close(losses[is_guessed], wanted[is_guessed], atol=1e-5, rtol=1e-5)


def counted(call, calls):
    def count(self, output, ids, start, end):
        calls.append(end - start)
        return call(self, output, ids, start, end)

    return count


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_in_pieces_is_the_plain_loss(monkeypatch, family):
    from tiny_models import build

    sizes = check(build(family), monkeypatch)
    assert sizes.count(7) == 6, "the pieces were not used"


@pytest.mark.slow
def test_the_loss_in_pieces_of_every_family(monkeypatch):
    from tiny_models import FAMILIES, build

    for family in FAMILIES:
        model = build(family)
        if "input_ids" in model.forward.__code__.co_varnames:
            check(model, monkeypatch)


def test_the_model_is_as_before_afterwards(monkeypatch):
    model = tiny_llama()
    check(model, monkeypatch)
    assert "forward" not in model.model.__dict__


def test_a_loss_that_is_not_finite_is_refused(tokenizer):
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = float("inf")
    with pytest.raises(CtxextError, match="not numbers"):
        loss.token_losses(make_ready("broken", model, tokenizer), torch.tensor([[4, 5, 6, 7]]))


def test_a_head_that_pieces_do_not_show_runs_whole(monkeypatch):
    assert check(tiny_llama(), monkeypatch)
    calls = check(one_that_sees_length(), monkeypatch)
    assert 7 not in calls, "only the trial may have used pieces"


def ready(model):
    return LoadedModel("model", model, None, can_share=False)


IDS = torch.randint(3, 640, (2, 40), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("length", "last", "sizes"),
    [
        (36, None, 5 * [7]),
        (37, None, [*5 * [7], 1]),
        (36, 15, [7, 7, 1]),
        (36, 14, [7, 7]),
        (36, 1, [1]),
        (2, None, [1]),
    ],
)
def test_a_text_is_cut_into_as_few_pieces_as_there_are(monkeypatch, length, last, sizes):
    model, ids, calls = tiny_llama(), IDS[:, :length], []
    assert loss._can_replay(ready(model))
    monkeypatch.setattr(loss, "_piece_size", lambda model, ids: 7)
    monkeypatch.setattr(loss._Head, "__call__", counted(loss._Head.__call__, calls))
    losses = loss.token_losses(ready(model), ids, last=last)
    assert calls == sizes
    torch.testing.assert_close(losses, plain_losses(model, ids)[:, -(last or length) :], atol=2e-4, rtol=1e-4)
    # The same without pieces.
    monkeypatch.setattr(loss, "_can_replay", lambda loaded: False)
    torch.testing.assert_close(loss.token_losses(ready(model), ids, last=last), losses, atol=2e-4, rtol=1e-4)
    assert calls == sizes


def test_no_cache_is_kept_of_a_long_text():
    model, caches = tiny_llama(), []
    for part in (model, model.model):
        part.register_forward_hook(lambda _, given, output: caches.append(list(output)))
    loss.token_losses(ready(model), IDS)
    assert caches
    assert not {"cache", "past_key_values"} & set().union(*caches)


def test_losses_hang_on_no_text_before():
    """The stock dynamic schedule keeps the frequencies of the longest text it has seen."""
    dynamic = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    loaded = ready(tiny_llama(max_position_embeddings=16, rope_scaling=dynamic))
    first = loss.token_losses(loaded, IDS[:, :20])
    loss.token_losses(loaded, IDS)
    assert torch.equal(loss.token_losses(loaded, IDS[:, :20]), first)


def test_a_forward_that_somebody_replaced_stays_replaced():
    model = tiny_llama()
    forward_before = model.model.forward = model.model.forward
    loss.token_losses(ready(model), IDS)
    assert model.model.__dict__["forward"] is forward_before


class Whole(LlamaForCausalLM):
    """Needs all tokens at once, or adds a little to a logit where it has not."""

    added = None

    def forward(self, input_ids=None, **options):
        output = super().forward(input_ids=input_ids, **options)
        if input_ids.shape[1] < 6:
            if self.added is None:
                raise ValueError
            output.logits = output.logits + self.added * torch.arange(640) / 640
        return output


@pytest.mark.parametrize(("added", "works"), [(None, False), (0.0, True), (0.1, True), (1.0, False)])
def test_pieces_are_used_where_they_give_nearly_the_same(added, works):
    model = Whole(tiny_llama().config).eval()
    model.added = added
    assert loss._can_replay(ready(model)) is works
    torch.testing.assert_close(
        loss.token_losses(ready(model), IDS, last=30), plain_losses(model, IDS)[:, -30:], atol=1e-3, rtol=1e-3
    )


def test_a_model_without_a_base_runs_whole():
    model = tiny_llama()
    bare = SimpleNamespace(config=model.config, device=model.device, forward=model.forward)
    bare.base_model = bare
    assert not loss._replay_works(bare, {})


def test_the_vocabulary_may_stand_in_a_configuration_within_another():
    model = tiny_llama()
    model.config = nested(model.config)
    assert loss._can_replay(ready(model))
    torch.testing.assert_close(loss.token_losses(ready(model), IDS), plain_losses(model, IDS), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(("make", "num_made"), [(tiny_llama, 5), (one_that_sees_length, 80)])
@torch.inference_mode()
def test_logits_of_some_tokens_are_those_of_the_whole_text_and_alone_where_that_works(make, num_made):
    model, made = make(), []
    loss._can_replay(ready(model))
    chosen = torch.zeros_like(IDS, dtype=torch.bool)
    chosen[0, 3] = chosen[1, 5:9] = True
    wanted = model(IDS).logits[chosen]
    model.lm_head.register_forward_hook(lambda _, given, output: made.append(output[..., 0].numel()))
    torch.testing.assert_close(loss.logits_at(ready(model), IDS, chosen), wanted)
    assert made == [num_made]


def reading(ids, **options):
    encoder = SimpleNamespace(start=lambda: [0], end=lambda: [1])
    return SimpleNamespace(**{"encoder": encoder, "documents": lambda *_: [ids], "stride": None, **options})


def one_record(tokenizer, **options):
    model = tiny_llama()
    ids = torch.randint(3, 640, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    (work,) = Perplexity().documents_to_read(reading([0, *ids], longest=300, text="", **options))
    (record,) = work.run(make_ready("tiny", model, tokenizer), set(work.keys))
    return model, [0, *ids], record


def test_the_sliding_window_is_that_of_yarn(tokenizer):
    """Against the loop of YaRN's own evaluation, written out plainly."""
    model, ids, record = one_record(tokenizer, lengths=(64,), stride=24)
    body, means, previous = ids[1:], [], 0
    for begin in range(0, len(body), 24):
        end = min(begin + 63, len(body))
        window = torch.tensor([[0, *body[begin:end]]])
        means.append(plain_losses(model, window)[0][-(end - previous) :].mean())
        previous = end
        if end == len(body):
            break
    assert record["sliding"]["64"] == pytest.approx((float(sum(means)), len(means)), abs=1e-3)


def test_bucket_width():
    assert [bucket_width(length) for length in (64, 512, 2048, 131072)] == [16, 16, 64, 4096]


def test_key_tokens_are_predicted_from_afar_alone(monkeypatch):
    """By hand: with a part of 8 tokens that moves by 2, each token of the second half has seen 6 or 7 before it."""
    ids = [0, *range(1, 16)]
    whole = torch.tensor([1.0] * 15, dtype=torch.float64)
    whole[12 - 1], whole[13 - 1] = 2.5, 1.9
    short = {8: 3.1, 9: 2.9, 10: 1.0, 11: 9.0, 12: 9.0, 13: 4.0, 14: 3.0, 15: 0.0}
    parts = []

    def losses(loaded, text, *, last=None):
        if last is None:
            return whole[None]
        assert text[0, 0] == 0
        parts.append(text[0].tolist())
        return torch.tensor([[short[token] for token in text[0].tolist()[-last:]]], dtype=torch.float64)

    monkeypatch.setattr(key_tokens, "token_losses", losses)
    found = key_tokens.key_tokens(SimpleNamespace(device="cpu"), ids, 8, num_start=1)
    assert found.tolist() == [8, 11, 13], "12 is badly predicted from afar too"
    assert parts == [[0, *range(end - 7, end)] for end in (10, 12, 14, 16)]
    assert not len(key_tokens.key_tokens(SimpleNamespace(device="cpu"), ids[:8], 8))


def test_longppl_is_the_mean_loss_of_key_tokens(checkpoint, monkeypatch, tmp_path):
    monkeypatch.setattr(key_tokens, "GAIN", -math.inf)
    monkeypatch.setattr(key_tokens, "LOSS", math.inf)
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
    monkeypatch.setattr(key_tokens, "LOSS", -math.inf)
    report = evaluate([str(checkpoint)], Settings(**options, evaluator=str(checkpoint)), out=tmp_path / "none")
    one = report["models"][0]["longppl"]["300"]
    assert (one["loss"], one["perplexity"], one["count"]) == (None, None, 0), "a mean over no token is no loss"
    assert "0.000" not in shown(report)
    with pytest.raises(CtxextError, match="finds the tokens to ask"):
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
    assert too_far == f'The evaluator "tiny" reads {reach} tokens, but a length of {reach + 1} was asked for.'
    assert refusal("demo") == 'The evaluator "demo" has other tokens than "tiny".'
    assert refusal(str(tmp_path / "nothing")).startswith("There is no folder")


def shown(report):
    console = Console(width=120, file=io.StringIO())
    console.print(*report_tables(report, 120))
    return render_page(report) + console.file.getvalue()


def test_longppl_adds_the_losses_of_the_chosen_tokens(monkeypatch):
    monkeypatch.setattr(key_tokens, "load_evaluator", lambda source, device: None)
    monkeypatch.setattr(key_tokens, "key_tokens", lambda *_: torch.tensor([5, 9]))
    monkeypatch.setattr(loss, "token_losses", lambda loaded, ids: torch.arange(1.0, 10.0)[None])  # Of tokens 1 to 9.
    asked = reading(list(range(10)), lengths=(10,), longest=16, evaluator="evaluator")
    (work,) = LongPerplexity().documents_to_read(asked)
    (record,) = work.run(SimpleNamespace(device="cpu"), set(work.keys))
    assert (record["loss"], record["key_tokens"], record["of"]) == ([14.0], [2], [6])
    assert not [*work.run(SimpleNamespace(device="cpu"), set())]
