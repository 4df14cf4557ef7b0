"""Masked language modelling: the loss is that of transformers on masked tokens; masks depend only on the seed."""

import copy
import dataclasses

import pytest
import torch
from peft import PeftModel

import tiny_models
from ctxext.api import Recipe, convert, verify
from ctxext.errors import CtxextError
from ctxext.finetune.batches import ModelInputs, Sequences, make_masker
from ctxext.finetune.data import write_sequences
from ctxext.finetune.documents import Document
from ctxext.finetune.loss import use_chunked_loss
from ctxext.finetune.options import TrainingOptions
from ctxext.methods import Ntk
from tiny_base import Tokens
from tiny_encodings import VOCABULARY, load, save, save_tokenizer
from tiny_tables import ENCODERS, change, make_base, tune, weights

SPECIAL = (1, 2, 3, 4)
ROOM = {"max_position_embeddings": 34}
MASK = 4


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    folder = save_tokenizer(save("bert", tmp_path_factory.mktemp("masking")))
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("frozen_head", [True, False])
@pytest.mark.parametrize("piece", [1, 1000])
@pytest.mark.parametrize("model_type", [*ENCODERS, *tiny_models.ENCODERS])
def test_loss_and_gradients_equal_the_plain_forward(model_type, piece, frozen_head, tokenizer, tmp_path):
    is_rotary = model_type in tiny_models.ENCODERS
    plain = tiny_models.build(model_type) if is_rotary else load(save(model_type, tmp_path, more=ROOM))
    if frozen_head:
        inside = {id(weight) for weight in plain.base_model.parameters()}
        for weight in (*plain.parameters(), *plain.get_output_embeddings().parameters()):
            weight.requires_grad_(id(weight) in inside and weight is not plain.get_output_embeddings().weight)
    pieces = copy.deepcopy(plain)
    use_chunked_loss(pieces, piece, is_masked=True)
    ids = torch.randint(5, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))
    ids, labels = make_masker(tokenizer, 0.4)(ids, ids.clone(), "seed")
    given = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
    expected, loss_in_pieces = plain(**given).loss, pieces(**given).loss
    assert torch.allclose(expected, loss_in_pieces, atol=1e-5)
    expected.backward()
    loss_in_pieces.backward()
    for (name, one), two in zip(plain.named_parameters(), pieces.named_parameters(), strict=True):
        if one.grad is not None:
            assert torch.allclose(one.grad, two[1].grad, atol=1e-5 * max(1, float(one.grad.abs().max()))), name


def test_masks_are_the_collators_and_never_of_special_tokens(tokenizer):
    ids = torch.randint(0, VOCABULARY, (40, 500), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, :50] = -100
    seen, wanted = make_masker(tokenizer, 0.2)(ids.clone(), labels, "seed")
    special = torch.isin(ids, torch.tensor(SPECIAL))
    chosen = wanted != -100
    assert not chosen[special].any()
    assert not chosen[:, :50].any()
    assert torch.equal(wanted[chosen], ids[chosen])
    assert torch.equal(seen[~chosen], ids[~chosen])
    ordinary = ~special[:, 50:]
    assert float(chosen[:, 50:][ordinary].float().mean()) == pytest.approx(0.2, abs=0.01)
    assert float((seen[chosen] == MASK).float().mean()) == pytest.approx(0.8, abs=0.03)


def test_masks_depend_on_the_seed_alone(tokenizer, tmp_path):
    options = TrainingOptions(length=16, steps=3, batch_size=2, short_share=0.0).resolve(window=16, trained_length=16)
    texts = [Document([number % (VOCABULARY - 5) + 5 for number in range(start, start + 64)]) for start in range(4)]
    write_sequences(texts, tmp_path, num_needed={16: 16}, pack="off", end=None)
    read = lambda probability: Sequences(tmp_path, options, ModelInputs(0, make_masker(tokenizer, probability)))  # noqa: E731
    one, two, other = read(0.3), read(0.3), read(0.1)
    for index in (5, 0, 3):
        assert torch.equal(one[index]["input_ids"], two[index]["input_ids"])
        assert torch.equal(one[index]["labels"], two[index]["labels"])
    assert any(not torch.equal(one[index]["labels"], other[index]["labels"]) for index in range(6))
    assert not torch.equal(one[0]["labels"] == -100, one[1]["labels"] == -100)


def test_a_tokenizer_without_a_mask_is_refused(tokenizer):
    bare = copy.deepcopy(tokenizer)
    bare.mask_token = None
    with pytest.raises(CtxextError, match="no mask token"):
        make_masker(bare, 0.15)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.thorough
def test_the_loss_is_measured_on_other_data_and_the_best_save_stays(tmp_path):
    base, lines = make_base(tmp_path, "bert"), []
    held_out = Tokens([[number % 35 + 5 for number in range(48)]])
    tune(base, tmp_path / "out", change(keep_best=True), eval_data=held_out, notify=lines.append)
    assert sum("on the evaluation data" in line for line in lines) == 2
    assert not any("needles" in line for line in lines)
    assert any(line.startswith("using step") for line in lines)


def tried(quick, among=tiny_models.ENCODERS):
    """Rotary encoders of the installed transformers; all except one are tested only in CI."""
    names = [name for name in tiny_models.ENCODERS if name in among]
    return [pytest.param(name, marks=[] if name == quick else [pytest.mark.thorough]) for name in names]


def rotary_base(folder, model_type):
    source = save_tokenizer(tiny_models.save(model_type, folder / "source"))
    convert(str(source), folder / "base", Recipe([Ntk(factor=2)]), check=False)
    return folder / "base"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", tried("modernbert"))
@pytest.mark.thorough
def test_a_rotary_encoder_is_trained_beyond_its_original_length_and_merged(model_type, tmp_path):
    base = rotary_base(tmp_path, model_type)
    done = tune(base, tmp_path / "out", change(length=128, pack="run-on"))
    assert all(0 < loss < 50 for _, loss in done.losses)
    ids = torch.randint(5, VOCABULARY, (1, 128), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before, after = (load(folder)(ids).logits for folder in (base, tmp_path / "out"))
        wanted = PeftModel.from_pretrained(load(base), tmp_path / "out" / "adapter").eval()(ids).logits
    assert (after - wanted).abs().max() < 1e-3
    assert (before - wanted).abs().max() > 1e-1
    assert not [check for check in verify(str(tmp_path / "out")) if check.status == "failed"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", tried("nomic_bert", among=("gte", "nomic_bert")))
@pytest.mark.thorough
def test_what_files_join_is_trained_whole_and_in_part(model_type, tmp_path):
    """In a stored tensor of queries, keys and values, the adapter changes only its own third."""
    base, options = rotary_base(tmp_path, model_type), change(length=128, pack="run-on")
    tune(base, tmp_path / "out", dataclasses.replace(options, targets=("k_proj",)))
    tune(base, tmp_path / "whole", change(length=128, pack="run-on", full=True))
    before, part, whole = (weights(folder) for folder in (base, tmp_path / "out", tmp_path / "whole"))
    joined = [name for name in before if name.endswith(("Wqkv.weight", "qkv_proj.weight"))]
    assert {name for name in before if not torch.equal(before[name], part[name])} == set(joined)
    for name in joined:
        same = [torch.equal(*rows) for rows in zip(before[name].chunk(3), part[name].chunk(3), strict=True)]
        assert same == [True, False, True]
        assert not torch.equal(before[name], whole[name])
    assert not [check for check in verify(str(tmp_path / "whole")) if check.status == "failed"]
