"""The chunked loss of evaluation and training equals the plain loss, for every tiny family."""

import contextlib
import copy
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import multimodal_models
import tiny_encodings
import tiny_models
import tiny_tables
from ctxext.checkpoint import head
from ctxext.checkpoint.head import Head
from ctxext.finetune.loss import use_chunked_loss
from ctxext.models.model import LoadedModel
from ctxext.models.token_losses import EVERY, masked_losses, token_losses
from hand_made import nested, one_that_sees_length, tiny_llama
from tiny_base import Largest

LENGTH, PIECE, FIRST, MASK = 18, 5, 9, 4
ROOM = dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"), 40)
NOT_RUN = {"llama4": "its forward needs an image"}
MULTIMODAL = [f"{name} with images" for name in multimodal_models.NAMES if name not in NOT_RUN]
CAUSAL = [*tiny_models.FAMILIES, *MULTIMODAL, *tiny_tables.CAUSAL, *tiny_encodings.ALIBI, "xglm"]
MASKED = [*tiny_models.ENCODERS, *tiny_tables.ENCODERS]


def build(name, folder, **more):
    if name in MULTIMODAL:
        return multimodal_models.build(name.split()[0])
    if name in (*tiny_models.FAMILIES, *tiny_models.ENCODERS):
        return tiny_models.build(name)
    return tiny_encodings.load(tiny_encodings.save(name, folder, more=ROOM | more))


def loaded_with(model, kind="causal"):
    tokenizer = SimpleNamespace(mask_token_id=MASK, all_special_ids=[*range(FIRST)])
    return LoadedModel("m", model, SimpleNamespace(tokenizer=tokenizer), can_share=False, kind=kind)


def random_ids(model, rows, length=LENGTH):
    size = min(128, model.config.get_text_config(decoder=True).vocab_size)
    return torch.randint(FIRST, size, (rows, length), generator=torch.Generator().manual_seed(0))


def plain_losses(model, ids, targets):
    """Compute the loss from all logits at once, in float32."""
    with torch.no_grad():
        logits = model(input_ids=ids, **({} if MASK in ids else {"use_cache": False})).logits.float()
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none").double()


@pytest.fixture
def counted(monkeypatch):
    """Use small chunks; record the number of positions in each call of a model's output embedding.

    Each must be one matrix: torch multiplies a slice of a row as a batch, for which it copies the embedding.
    """

    def count(model):
        size, sizes = model.config.get_text_config(decoder=True).vocab_size, []
        monkeypatch.setattr(head, "_PIECE_BYTES", {"cpu": PIECE * 4 * size})

        def record(module, given, logits):
            sizes.append(logits.numel() // size)
            assert len(given[0]) == 1
            assert given[0].stride(0) == given[0].shape[1] * given[0].stride(1)

        model.get_output_embeddings().register_forward_hook(record)
        return sizes

    return count


def close(loss):
    return pytest.approx(float(loss), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", CAUSAL)
def test_the_loss_of_every_causal_family(name, tmp_path, counted):
    plain = build(name, tmp_path)
    # RecurrentGemma keeps the state of a batch, which other batches must not use.
    read, trained, ids = copy.deepcopy(plain), copy.deepcopy(plain), random_ids(plain, 2)
    losses = plain_losses(plain, ids, torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100))[:, :-1]
    loaded = loaded_with(read)
    use_chunked_loss(trained)
    assert loaded.head.is_separate
    assert loaded.rows_that_fit(LENGTH) > 0
    for model, loss in (
        (read, lambda: token_losses(loaded, ids).mean()),
        (trained, lambda: trained(input_ids=ids, labels=ids).loss),
    ):
        sizes = counted(model)
        assert loss().item() == close(losses.mean())
        assert sizes == [*6 * [PIECE], 4]
    torch.testing.assert_close(token_losses(loaded, ids), losses, atol=4e-6, rtol=1e-6)


@pytest.mark.parametrize("name", MASKED)
def test_the_loss_of_every_masked_family(name, tmp_path, counted):
    plain = build(name, tmp_path)
    read, trained, (text,) = copy.deepcopy(plain), copy.deepcopy(plain), random_ids(plain, 1)
    is_masked = (torch.arange(LENGTH) % EVERY) == torch.arange(EVERY)[:, None]
    ids, labels = torch.where(is_masked, MASK, text), torch.where(is_masked, text, -100)
    losses = plain_losses(plain, ids, labels)
    loaded = loaded_with(read, "masked")
    use_chunked_loss(trained, is_masked=True)
    assert loaded.head.is_separate
    for model, loss in (
        (read, lambda: masked_losses(loaded, text.tolist())[0].mean()),
        (trained, lambda: trained(input_ids=ids, labels=labels).loss),
    ):
        sizes = counted(model)
        assert loss().item() == close(losses.sum() / LENGTH)
        assert sizes == [*3 * [PIECE], 3]


@pytest.mark.parametrize("name", ["llama", "opt", "bert"])
@pytest.mark.thorough
def test_losses_of_a_narrow_model_are_computed_in_float32(name, tmp_path):
    """A softmax in 16 bits has an error of 0.01."""
    model = build(name, tmp_path).to(torch.bfloat16)
    (text,) = ids = random_ids(model, 1)
    if name == "bert":
        is_masked = (torch.arange(LENGTH) % EVERY) == torch.arange(EVERY)[:, None]
        ids, labels = torch.where(is_masked, MASK, text), torch.where(is_masked, text, -100)
        losses = plain_losses(model, ids, labels)[is_masked]
        found = masked_losses(loaded_with(model, "masked"), text.tolist())[0]
    else:
        labels = ids
        losses = plain_losses(model, ids, torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100))[:, :-1]
        found = token_losses(loaded_with(model), ids)
    assert found.mean().item() == close(losses.mean())
    for is_frozen in (True, False):
        trained = copy.deepcopy(model).requires_grad_(not is_frozen)
        use_chunked_loss(trained, is_masked=name == "bert")
        for is_trained in (True, False):
            with torch.set_grad_enabled(is_trained):
                loss = trained(input_ids=ids, labels=labels).loss
            assert loss.dtype == torch.float32
            assert loss.item() == close(losses.mean())


@pytest.mark.parametrize("name", ["gpt2", "opt", "bert"])
@pytest.mark.thorough
def test_no_tensor_has_the_size_of_length_times_vocabulary(name, tmp_path):
    """Neither in evaluation nor in training, in forward or backward passes."""
    vocabulary, length, is_masked = 5000, 400, name == "bert"
    more = {"vocab_size": vocabulary, "max_position_embeddings": length, "n_positions": length}
    model = build(name, tmp_path, **more)
    ids, loaded = random_ids(model, 1, length), loaded_with(model, "masked" if is_masked else "causal")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "_PIECE_BYTES", {"cpu": 4 * 16 * vocabulary})
        assert loaded.head.is_separate
        use_chunked_loss(trained := copy.deepcopy(model), is_masked=is_masked)
        trained.get_input_embeddings().weight.requires_grad_(False)
        patch.setattr(LoadedModel, "rows_that_fit", lambda *given: 1)
        with Largest() as largest:
            masked_losses(loaded, ids[0].tolist()) if is_masked else token_losses(loaded, ids)
            trained(input_ids=ids, labels=ids).loss.backward()
    # Attention of 400 tokens with two heads; a chunk has 16 × 5000 logits, the whole text 400 × 5000.
    assert largest.size <= 2 * 400 * 400


LOSSES_OF_A_LONG_TEXT = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from ctxext.checkpoint.head import Head
from ctxext.files.processes import forget_peak, peak_memory

sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
head = Head(LlamaForCausalLM(LlamaConfig(vocab_size=1 << 17, **sizes)).eval())
ids, device = torch.arange(1024)[None], torch.device("cpu")
with torch.inference_mode():
    hidden = head.read(ids)
    head.measure_losses(hidden[:, :1], ids[:, :1], ids[0, :1])
    forget_peak(device)
    before = peak_memory(device)
    head.measure_losses(hidden, ids, ids[0])
    print(peak_memory(device) - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory of Linux")
def test_the_process_does_not_grow_to_length_times_vocabulary():
    """Freed logits are used again: in a new process, because glibc adapts itself to what was freed before."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", LOSSES_OF_A_LONG_TEXT]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    whole = 4 * 1024 * (1 << 17)
    assert int(result.stdout) < whole / 3


class Odd(LlamaForCausalLM):
    """Changes its logits in a hidden way, for all tokens of the trial or for fewer."""

    way, share, factor = "", 0.0, 1.0

    def forward(self, input_ids=None, **options):
        output, is_piece = super().forward(input_ids=input_ids, **options), input_ids.shape[1] < 16
        output.logits = output.logits * self.factor
        if self.way == "adds" and is_piece:
            output.logits = output.logits + self.share * self.spread
        if self.way == "stops" and is_piece:
            raise ValueError
        if self.way == "gives the last":
            output.logits = output.logits[:, -1:]
        if self.way == "masks words" or (self.way == "masks all"):
            output.logits[..., 40 if self.way == "masks words" else 0 :] = -torch.inf
        return output


@pytest.mark.parametrize(
    ("way", "share", "factor", "works"),
    [
        ("", 0.0, 1.0, True),
        ("adds", 0.015, 1.0, True),
        ("adds", 0.025, 1.0, False),
        ("adds", 0.015, 1000.0, True),
        ("stops", 0.0, 1.0, False),
        ("gives the last", 0.0, 1.0, False),
        ("masks words", 0.0, 1.0, True),
        ("masks all", 0.0, 1.0, False),
    ],
)
def test_pieces_may_be_off_by_a_fiftieth_of_the_spread_of_the_logits(way, share, factor, works):
    model = Odd(tiny_llama().config).eval()
    with torch.no_grad():
        model.lm_head.weight.normal_(0.0, 0.2)
        model.factor = factor
        model.spread = model(torch.arange(16)[None] * 11 % 640).logits.std()
    model.way, model.share = way, share
    assert Head(model).is_separate is works


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("make", [tiny_llama, one_that_sees_length])
def test_a_model_that_was_tried_is_as_before(make, training):
    """Dropout is disabled during the trial, or chunks would not reveal the head."""
    model = make(attention_dropout=0.5) if make is tiny_llama else make()
    model.train(training)
    base_forward = model.model.forward = model.model.forward
    assert Head(model).is_separate is (make is tiny_llama)
    assert model.training is training
    assert "forward" not in model.__dict__
    assert model.model.__dict__["forward"] is base_forward
    del model.model.forward
    Head(model)
    assert "forward" not in model.model.__dict__


@pytest.mark.parametrize("model", [tiny_llama().model, torch.nn.Linear(2, 2)])
def test_a_model_without_a_head_or_a_base_has_no_separate_head(model):
    assert not Head(model).is_separate


def test_a_nested_configuration_may_contain_the_vocabulary():
    """As in multimodal models."""
    model = tiny_llama()
    model.config = nested(model.config)
    assert Head(model).is_separate
    assert head.positions_at_once(model) == (24 << 20) // (4 * 640)


def test_weights_in_shards_are_whole_while_the_head_is_tried(monkeypatch):
    """DeepSpeed's ZeRO 3 loads a model as shards; its modules gather them only after its engine has started."""
    model, whole = LlamaForCausalLM(LlamaConfig(**tiny_llama().config.to_dict())), {}
    for number, weight in enumerate(model.parameters()):
        weight.ds_id, whole[weight], weight.data = number, weight.data, torch.empty(0)

    @contextlib.contextmanager
    def gathered(weights):
        for weight in weights:
            weight.data = whole[weight]
        yield
        for weight in weights:
            weight.data = torch.empty(0)

    zero = SimpleNamespace(GatheredParameters=gathered)
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(zero=zero))
    assert Head(model).is_separate
    assert all(weight.numel() == 0 for weight in model.parameters())
