"""The loss in pieces and its gradients equal the family's own, also for families with caps and scales."""

import copy
import dataclasses

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
)

import tiny_base
from ctxext.errors import CtxextError
from ctxext.finetune.base import open_base
from ctxext.finetune.loss import use_chunked_loss
from ctxext.finetune.models import SourceModel, choose_precision, load_base
from ctxext.finetune.prepare import add_adapter
from hand_made import one_that_sees_length
from tiny_base import PARALLEL, TRAINED, make_base

SIZES = {
    **{**tiny_base.SIZES, "vocab_size": 50, "head_dim": 8, "max_position_embeddings": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
FAMILIES = {
    "llama": {"tie_word_embeddings": True},
    "qwen3": {},
    "gemma2": {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8},
    "granite": {"logits_scaling": 4.0},
    "cohere": {"logit_scale": 0.25},
    "gpt_neox": {},
    "phi": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
}


def make(name):
    from transformers import AutoConfig

    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**SIZES, **FAMILIES[name]})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0.0, 0.2)
    return model.eval()


@pytest.mark.parametrize("frozen_head", [True, False])
@pytest.mark.parametrize("piece", [1, 7, 1000])
@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_equal_the_plain_forward(name, piece, frozen_head):
    plain = make(name)
    if frozen_head:
        plain.get_output_embeddings().requires_grad_(False)
    pieces = copy.deepcopy(plain)
    use_chunked_loss(pieces, piece)
    ids = torch.randint(3, 50, (2, 23))
    labels = ids.clone()
    labels[:, 0] = labels[1, 9:12] = -100
    given = {"input_ids": ids, "labels": labels, "position_ids": torch.arange(23).expand(2, -1)}
    given["attention_mask"] = torch.ones_like(ids)
    expected, loss_in_pieces = plain(**given).loss, pieces(**given).loss
    assert torch.allclose(expected, loss_in_pieces, atol=1e-5)
    expected.backward()
    loss_in_pieces.backward()
    for (name, one), two in zip(plain.named_parameters(), pieces.parameters(), strict=True):
        if one.grad is not None:
            assert torch.allclose(one.grad, two.grad, atol=1e-5), name


@pytest.mark.parametrize(
    ("name", "trained"), [("phi", "lm_head.bias"), ("bert", "cls.predictions.transform.dense.weight")]
)
def test_what_alone_is_trained_behind_the_base_learns(name, trained):
    torch.manual_seed(0)
    is_masked = name == "bert"
    model = BertForMaskedLM(BertConfig(**SIZES)).eval() if is_masked else make(name)
    weight, ids = model.requires_grad_(False).get_parameter(trained).requires_grad_(True), torch.randint(3, 50, (2, 23))
    model(input_ids=ids, labels=ids).loss.backward()
    wanted, weight.grad = weight.grad, None
    use_chunked_loss(model, 7, is_masked=is_masked)
    model(input_ids=ids, labels=ids).loss.backward()
    assert torch.allclose(weight.grad, wanted, atol=1e-6)


def test_a_head_that_pieces_do_not_show_is_refused_and_left_as_it_was():
    model = one_that_sees_length()
    with pytest.raises(CtxextError, match="cannot be computed in pieces"):
        use_chunked_loss(model)
    assert "forward" not in model.__dict__


def given_to_the_base(model, **given):
    """Return the arguments of the base model besides the tokens, and the loss."""
    seen = []
    model.base_model.register_forward_pre_hook(lambda _, args, options: seen.append(options), with_kwargs=True)
    loss = model(**given).loss
    return {name: value for name, value in seen[0].items() if name != "input_ids"}, loss


def test_the_base_model_receives_all_arguments_and_no_cache():
    model, ids = make("llama"), torch.randint(3, 50, (1, 23))
    use_chunked_loss(model, 7)
    places = torch.arange(23)[None]
    seen, _ = given_to_the_base(
        model, input_ids=ids, labels=ids, position_ids=places, inputs_embeds=None, return_dict=False
    )
    assert seen == {"use_cache": False, "position_ids": places}


@pytest.mark.parametrize(("training", "known"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("items", [None, 10])
def test_distillation_counts_only_known_positions(training, known, items):
    model, source = make("llama").train(training), make("qwen3")
    ids, places = torch.randint(3, 50, (2, 23)), torch.arange(23).expand(2, -1)
    with torch.no_grad():
        mine, said = (one(ids).logits.log_softmax(-1) for one in (model, source))
        answers = -mine[:, :-1].gather(-1, ids[:, 1:, None]).sum()
        divergence = (said.exp() * (said - mine)).sum()
    said_by = SourceModel(source, [], trained_length=23 if known else 22)
    use_chunked_loss(model, 7, said_by, tokens_per_step=80 if items else None)
    mean_loss = model(input_ids=ids, labels=ids, position_ids=places, num_items_in_batch=items).loss
    wanted = answers / (items or 44) + (training and known) * SourceModel.weight * divergence / (80 if items else 46)
    assert mean_loss.item() == pytest.approx(wanted.item(), rel=1e-4)


class Told:
    """Losses recorded by part."""

    def __init__(self, parts):
        self.sums, self.counts = torch.zeros(2, parts), []

    def add(self, part, total, count):
        self.sums[0, part] += total.item()
        self.counts.append(count)


@pytest.mark.parametrize("parts", [1, 3, 4])
def test_the_loss_by_position_is_reported_only_in_evaluation(parts):
    model = make("llama")
    losses = Told(parts)
    use_chunked_loss(model, 5, by_position=losses)
    ids = torch.randint(3, 50, (2, 24))
    labels = ids.clone()
    labels[0, 9:12] = -100
    whole = model(input_ids=ids, labels=labels).loss
    # Position i predicts token i + 1, so the last one of each row does not count.
    targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    with torch.no_grad():
        logits = make("llama")(input_ids=ids).logits.float()
    each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none", ignore_index=-100)
    size = 24 // parts
    wanted = [each[:, part * size : (part + 1) * size].sum().item() for part in range(parts)]
    assert losses.sums[0].tolist() == pytest.approx(wanted, rel=1e-4)
    assert losses.counts == [int((targets[:, part * size : (part + 1) * size] != -100).sum()) for part in range(parts)]
    assert whole.item() == pytest.approx(sum(wanted) / sum(losses.counts), rel=1e-4)
    losses.counts.clear()
    model.train()
    model(input_ids=ids, labels=labels)
    assert losses.counts == []


def test_a_batch_that_learns_nothing_has_a_gradient_of_zero():
    model = make("llama")
    use_chunked_loss(model)
    ids = torch.randint(3, 50, (1, 9))
    loss = model(input_ids=ids, labels=torch.full_like(ids, -100)).loss
    loss.backward()
    assert loss == 0
    assert all(weight.grad is None or not weight.grad.any() for weight in model.parameters())


def test_the_sum_is_divided_by_what_the_trainer_counted():
    model = make("llama")
    use_chunked_loss(model, 5)
    ids = torch.randint(3, 50, (1, 21))
    alone = model(input_ids=ids, labels=ids).loss
    shared = model(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(80)).loss
    assert torch.allclose(alone * 20, shared * 80)


def test_gradients_equal_those_of_the_same_weights_unpacked(tmp_path):
    """bitsandbytes has a kernel without a gradient, which it uses once a model was in eval mode."""
    functional = pytest.importorskip("bitsandbytes.functional")
    base = open_base(str(make_base(tmp_path, hidden_size=64, intermediate_size=64)), 64)  # It packs blocks of 64.
    options = dataclasses.replace(PARALLEL, quantize="4bit").resolve(window=128, trained_length=TRAINED)
    packed, plain = (
        load_base(base, choose_precision("cpu", "fp32", full=False, in_4bit=in_4bit))[0] for in_4bit in (True, False)
    )
    unpacked = dict(plain.named_parameters())
    num_packed = 0
    with torch.no_grad():
        for name, weight in packed.named_parameters():
            if hasattr(weight, "quant_state"):
                num_packed += 1
                unpacked[name].copy_(functional.dequantize_4bit(weight.data, weight.quant_state))
    assert num_packed == 14
    ids = torch.randint(2, 64, (2, 40), generator=torch.Generator().manual_seed(0))
    gradients = []
    for model in (packed, plain):
        use_chunked_loss(model)
        torch.manual_seed(0)
        trained = add_adapter(model, options)
        # Not zero, where one of the two matrices has no gradient.
        for name, weight in trained.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1)
        trained.train()(input_ids=ids, labels=ids).loss.backward()
        gradients.append({name: weight.grad for name, weight in trained.named_parameters() if weight.requires_grad})
    for name, gradient in gradients[0].items():
        assert torch.allclose(gradient, gradients[1][name], atol=1e-4, rtol=1e-3), name
