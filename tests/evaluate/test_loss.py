import sys
from pathlib import Path

import pytest
import torch

from ctxext.errors import CtxextError
from ctxext.evaluate.model import LoadedModel, make_ready
from ctxext.evaluate.scoring import token_losses as loss
from ctxext.evaluate.tasks.perplexity import PerplexityWork, bucket_width
from hand_made import one_that_sees_length, tiny_llama

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
    from tiny_models import NOT_BUILT, ROTARY, build

    for family in ROTARY:
        if family in NOT_BUILT:
            continue
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


def one_record(tokenizer, **options):
    model = tiny_llama()
    ids = torch.randint(3, 640, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    work = PerplexityWork([0, *ids], 0, num_start=1, **options)
    (record,) = work.run(make_ready("tiny", model, tokenizer), set(work.keys))
    return model, [0, *ids], record


def test_buckets_and_lengths_add_up(tokenizer):
    model, ids, record = one_record(tokenizer, lengths=(100, 256))
    plain = plain_losses(model, torch.tensor([ids[:256]]))[0]
    assert record["width"] == 16
    assert sum(count for _, count in record["buckets"]) == 255
    assert sum(total for total, _ in record["buckets"]) == pytest.approx(float(plain.sum()), abs=1e-3)
    assert record["buckets"][0] == pytest.approx([float(plain[:15].sum()), 15], abs=1e-4)
    assert record["buckets"][1] == pytest.approx([float(plain[15:31].sum()), 16], abs=1e-4)
    assert record["lengths"]["100"] == pytest.approx([float(plain[:99].sum()), 99], abs=1e-4)


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
