"""--keep-short: distillation from the source within its original context, without a second copy of its weights."""

import copy
import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from ctxext.errors import CtxextError
from ctxext.finetune.base import open_base
from ctxext.finetune.loss import use_chunked_loss
from ctxext.finetune.models import SourceModel, choose_precision, load_base, load_source
from ctxext.finetune.options import TrainingOptions
from ctxext.methods import MsPoE, PositionInterpolation, Yarn
from tiny_base import QUICK, SIZES, TRAINED, logits, make_base, save_llama, tune

KEEP = dataclasses.replace(QUICK, keep_short=True)
FP32 = choose_precision("cpu", "fp32", full=False)


def resolve(**changes):
    usual = {"rank": TrainingOptions.rank} if changes.get("full") else {}
    return dataclasses.replace(KEEP, **usual, **changes).resolve(window=128, trained_length=TRAINED)


MSPOE = MsPoE(head_order="fixed", first_layer=0, schedule="by-parts", ratio_min=1.5, ratio_max=4)


@pytest.mark.parametrize("steps", [[Yarn(factor=4)], [PositionInterpolation(factor=4)], [Yarn(factor=4), MSPOE]])
@pytest.mark.parametrize("full", [False, True])
def test_the_source_speaks_again_without_its_files(tmp_path, steps, full):
    base = open_base(str(make_base(tmp_path, *steps, tie_word_embeddings=not full)), None)
    model, _ = load_base(base, FP32)
    source = load_source(base, model, FP32, full=full, by_document=False)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.float32).eval()
    assert torch.equal(logits(source.model, length=30), logits(plain, length=30))
    theirs = {weight.data_ptr() for weight in model.parameters()}
    shared = [weight.data_ptr() in theirs for weight in source.model.parameters()]
    assert not any(shared) if full else all(shared)


def test_it_knows_positions_that_it_was_trained_on():
    source = SourceModel(LlamaForCausalLM(LlamaConfig(**SIZES)), [], trained_length=32)
    assert source.covers(torch.arange(32)[None])
    assert source.covers(torch.arange(16).repeat(2)[None])
    assert not source.covers(torch.arange(33)[None])
    assert not source.covers(torch.tensor([[0, 1, 40]]))


@pytest.mark.parametrize("frozen_head", [True, False])
@pytest.mark.parametrize("piece", [3, 1000])
def test_divergence_and_its_gradients_equal_the_plain_formula(piece, frozen_head):
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2)
    plain, teacher = LlamaForCausalLM(config).train(), LlamaForCausalLM(config).eval().requires_grad_(False)
    plain.get_output_embeddings().requires_grad_(not frozen_head)
    pieces = copy.deepcopy(plain)
    ids = torch.randint(3, 50, (2, 20))
    use_chunked_loss(pieces, piece, SourceModel(teacher, [], trained_length=20), tokens_per_step=80)
    labels = ids.clone()
    labels[:, :15] = -100
    given = {"input_ids": ids, "position_ids": torch.arange(20).expand(2, -1), "attention_mask": torch.ones_like(ids)}
    loss_in_pieces = pieces(**given, labels=labels, num_items_in_batch=10).loss
    mine, said = plain(**given).logits.log_softmax(-1), teacher(**given).logits.log_softmax(-1)
    answers = torch.nn.functional.cross_entropy(mine[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    expected = answers / 10 + SourceModel.weight * (said.exp() * (said - mine)).sum() / 80
    assert abs(loss_in_pieces.item() - expected.item()) < 1e-4
    loss_in_pieces.backward()
    expected.backward()
    for (name, one), two in zip(pieces.named_parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None), name
        assert one.grad is None or torch.allclose(one.grad, two.grad, atol=1e-4), name


@pytest.mark.thorough
def test_training_stays_closer_to_the_source(tmp_path):
    """The same steps with and without it: short sequences change less, and long ones are trained as well."""
    base = make_base(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.float32).eval()
    said = logits(plain, length=TRAINED).log_softmax(-1)
    away = {}
    for name, keep_short in (("free", False), ("kept", True)):
        options = dataclasses.replace(
            QUICK, steps=60, learning_rate=1e-2, short_share=0.5, batch_size=4, save_every=60, keep_short=keep_short
        )
        done = tune(base, tmp_path / name, options)
        assert done.options.keep_short is keep_short
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32).eval()
        mine = logits(model, length=TRAINED).log_softmax(-1)
        away[name] = float((said.exp() * (said - mine)).sum(-1).mean())
    assert away["kept"] < 0.5 * away["free"]


def test_missing_requirements_are_reported(tmp_path):
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
    foreign = save_llama(tmp_path / "foreign", rope_parameters=rope, max_position_embeddings=128)
    with pytest.raises(CtxextError, match="--keep-short needs the source"):
        tune(foreign, tmp_path / "out", KEEP)
