"""--weigh-far: LongCE's weights, from the whole context and from the last part of it (arXiv 2410.23771)."""

import copy
import dataclasses

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ctxext.errors import CtxextError
from ctxext.finetune import TrainingOptions
from ctxext.finetune.loss import use_chunked_loss
from ctxext.finetune.probe import Cost
from tiny_base import PARALLEL, SIZES, load, tune

LENGTH, CONTEXT, NUM_ITEMS = 23, 8, 10


def token_losses(model, ids, positions):
    """The loss of each token but the first, (length - 1,), from the whole logits."""
    scores = model(input_ids=ids[None], position_ids=positions[None]).logits[0].log_softmax(-1)
    return -scores[:-1].gather(1, ids[1:, None])[:, 0]


def expected_loss(model, ids, labels, positions):
    """The formula, token by token: each window's last quarter is judged, and tokens before any have weight 1."""
    total, step = 0.0, CONTEXT // 4
    for row, wanted, places in zip(ids, labels, positions, strict=True):
        whole = token_losses(model, row, places)
        for token in range(1, LENGTH):
            if wanted[token] == -100:
                continue
            weight = torch.tensor(1.0)
            if token >= CONTEXT:
                begin = (token - CONTEXT) // step * step
                part = row[begin : token + 1]
                with torch.no_grad():
                    plain = places[0] + torch.arange(len(part)) if begin else places[: len(part)]
                    short = token_losses(model, part, plain)[-1]
                weight = (short - whole[token - 1].detach()).exp().clamp(max=5.0)
            total = total + weight * whole[token - 1]
    return total / NUM_ITEMS


@pytest.mark.parametrize("frozen_head", [True, False])
@pytest.mark.parametrize("piece", [3, 1000])
@pytest.mark.parametrize("skip", [0, 9])
def test_loss_and_gradients_equal_the_plain_formula(piece, frozen_head, skip):
    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(**SIZES)).train()
    plain.get_output_embeddings().requires_grad_(not frozen_head)
    pieces = copy.deepcopy(plain)
    use_chunked_loss(pieces, piece, weigh_far=CONTEXT)
    # The second half of each row repeats the first, so that some tokens are much likelier with their whole context.
    ids = torch.randint(3, 50, (2, LENGTH))
    labels, positions = ids.clone(), torch.arange(LENGTH).expand(2, -1) + skip * (torch.arange(LENGTH) >= 5)
    labels[:, :2] = labels[0, 10:13] = labels[1, 17:] = -100
    given = {"input_ids": ids, "position_ids": positions, "attention_mask": torch.ones_like(ids)}
    loss = pieces(**given, labels=labels, num_items_in_batch=NUM_ITEMS).loss
    expected = expected_loss(plain, ids, labels, positions)
    assert abs(loss.item() - expected.item()) <= 1e-6 * expected.item()
    loss.backward()
    expected.backward()
    for (name, one), two in zip(pieces.named_parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None), name
        if one.grad is not None:
            assert (one.grad - two.grad).abs().max() <= 1e-6 * two.grad.abs().max().clamp(min=1), name
    pieces.eval()
    with torch.no_grad():
        stock = plain(**given, labels=labels).loss
        assert abs(pieces(**given, labels=labels).loss.item() - stock.item()) <= 1e-5  # Measured without weights.


def test_weights_end_at_five_and_begin_at_nothing():
    """A token that only the far context tells counts five times, one that it hides not at all."""
    from ctxext.finetune.comparison import FarToken

    logits = torch.zeros(4, 4)
    logits[:, 0] = 20.0
    targets, short = torch.tensor([0, 0, 1, 1]), torch.tensor([9.0, torch.nan, 0.0, 20.0])
    loss, slope = FarToken(targets, short).loss_and_slope(logits)
    own = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    weights = torch.tensor([5.0, 1.0, float((-own[2]).exp()), 1.0])
    assert torch.allclose(loss, (weights * own).sum(), atol=1e-5)
    assert torch.allclose(slope[0], 5 * (logits[0].softmax(-1) - torch.eye(4)[0]), atol=1e-6)


def test_micro_batches_and_accumulation_learn_what_single_sequences_learn(base, tmp_path):
    """And the weights change what is learned; the first step's loss is the same model's."""
    options = dataclasses.replace(PARALLEL, weigh_far=16, short_share=0.0, steps=3)
    one = tune(base, tmp_path / "one", options, merge=False)
    two = tune(base, tmp_path / "two", dataclasses.replace(options, micro_batch=4), merge=False)
    without = tune(base, tmp_path / "not", dataclasses.replace(options, weigh_far=None), merge=False)
    for (_, first), (_, second), (_, plain) in zip(one.losses, two.losses, without.losses, strict=True):
        assert abs(first - second) <= 1e-5
        assert abs(first - plain) > 1e-3


def test_the_windows_are_counted_in_a_steps_work(base):
    settled = {"window": 128, "trained_length": 32}
    plain, far = (
        Cost(load(base), TrainingOptions(length=128, weigh_far=context).settled(**settled), learned_share=1.0)
        for context in (None, 32)
    )
    assert far.work(40) == plain.work(40)
    # 11 windows of 40 tokens and the last one, each read forward alone.
    assert far.work(128) == pytest.approx(plain.work(128) + 11 * plain.work(40) / 3)


def test_what_cannot_be_weighed_is_refused():
    for changes in ({"pack": "restart"}, {"attention": "shifted"}, {"context_parallel": 2}):
        with pytest.raises(CtxextError, match="--weigh-far goes without"):
            TrainingOptions(weigh_far=8, **changes)
    with pytest.raises(CtxextError, match="--weigh-far 32 leaves no farther context in sequences of 40") as refused:
        TrainingOptions(weigh_far=32, length=40).settled(window=64, trained_length=32)
    assert refused.value.hint == "Give fewer, as --weigh-far 10."
