"""--perturb-positions: the same text with one skip of positions, and the divergence from the plain view behind it."""

import copy
import dataclasses

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ctxext.errors import CtxextError
from ctxext.finetune import TrainingOptions
from ctxext.finetune.batches import Sequences
from ctxext.finetune.data import write_sequences
from ctxext.finetune.documents import Document
from ctxext.finetune.loss import use_chunked_loss
from tiny_base import PARALLEL, SIZES, documents, tune

LENGTH, TOKENS_PER_STEP, NUM_ITEMS = 20, 80, 10


@pytest.mark.parametrize("frozen_head", [True, False])
@pytest.mark.parametrize("piece", [3, 1000])
def test_loss_and_gradients_equal_the_plain_formula(piece, frozen_head):
    """KL(perturbed ‖ standard), averaged behind the skip and over the sequences of a step."""
    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(**SIZES)).train()
    plain.get_output_embeddings().requires_grad_(not frozen_head)
    pieces = copy.deepcopy(plain)
    use_chunked_loss(pieces, piece, tokens_per_step=TOKENS_PER_STEP)
    ids, positions = torch.randint(3, 50, (2, LENGTH)), torch.arange(LENGTH).expand(2, -1)
    skipped = positions + torch.tensor([[7], [19]]) * (positions >= torch.tensor([[4], [15]]))
    labels = ids.clone()
    labels[:, :10] = labels[0, 17:] = -100
    given = {"input_ids": ids, "position_ids": positions, "attention_mask": torch.ones_like(ids)}
    loss = pieces(**given, labels=labels, num_items_in_batch=NUM_ITEMS, perturbed_position_ids=skipped).loss

    standard = plain(**given).logits.log_softmax(-1)
    perturbed = plain(**{**given, "position_ids": skipped}).logits.log_softmax(-1)
    expected = torch.nn.functional.nll_loss(standard[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    expected = expected / NUM_ITEMS
    # The last learned token of the first row is the 17th, which the 16th position predicts.
    for row, behind in enumerate((slice(4, 16), slice(15, 19))):
        mine, teacher = perturbed[row, behind], standard[row, behind].detach()
        expected = expected + (mine.exp() * (mine - teacher)).sum(-1).mean() * LENGTH / TOKENS_PER_STEP
    assert abs(loss.item() - expected.item()) <= 1e-6
    loss.backward()
    expected.backward()
    for (name, one), two in zip(pieces.named_parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None), name
        assert one.grad is None or torch.allclose(one.grad, two.grad, atol=1e-6), name
    pieces.eval()
    assert torch.equal(
        pieces(**given, labels=labels, perturbed_position_ids=skipped).loss, pieces(**given, labels=labels).loss
    )


def test_each_sequence_skips_once_in_its_second_view_alone(tmp_path):
    options = TrainingOptions(length=32, steps=40, batch_size=2, perturb_positions=True, short_share=0.5)
    options = options.settled(window=32, trained_length=8)
    write_sequences(
        map(Document, documents(6, 40)), tmp_path, wanted=options.sequences_wanted(), pack="run-on", end=None
    )
    cuts, skips = set(), set()
    for entry in Sequences(tmp_path, options):
        length = entry["input_ids"].shape[1]
        assert torch.equal(entry["position_ids"], torch.arange(length).expand(len(entry["input_ids"]), -1))
        for moved in (entry["perturbed_position_ids"] - entry["position_ids"]).tolist():
            skip, cut = moved[-1], moved.count(0)
            assert moved == [0] * cut + [skip] * (length - cut)
            assert 0 <= skip <= length
            cuts.add(cut)
            skips.add(skip)
    assert len(cuts) > 20
    assert len(skips) > 20
    again = Sequences(tmp_path, options)[5]
    assert all(torch.equal(tensor, again[name]) for name, tensor in Sequences(tmp_path, options)[5].items())


def test_micro_batches_learn_what_single_sequences_learn(base, tmp_path):
    """And the second view changes what is learned."""
    options = dataclasses.replace(PARALLEL, perturb_positions=True, steps=3)
    one = tune(base, tmp_path / "one", options, merge=False)
    two = tune(base, tmp_path / "two", dataclasses.replace(options, micro_batch=4), merge=False)
    without = tune(base, tmp_path / "not", dataclasses.replace(options, perturb_positions=False), merge=False)
    for (_, first), (_, second), (_, plain) in zip(one.losses, two.losses, without.losses, strict=True):
        assert abs(first - second) <= 1e-5
        assert first > plain + 1e-3


def test_what_has_no_second_view_is_refused():
    for changes in ({"pack": "restart"}, {"positions": "pose"}, {"context_parallel": 2}):
        with pytest.raises(CtxextError, match="--perturb-positions goes with"):
            TrainingOptions(perturb_positions=True, **changes)
