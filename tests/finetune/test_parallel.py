"""Sequence parallelism without other processes: parts of sequences, the test of a model, and what is refused."""

import dataclasses

import pytest
import torch

from ctxext.api import Recipe, TrainingOptions, convert, finetune
from ctxext.errors import CtxextError
from ctxext.finetune import parallel, prepare
from ctxext.finetune.arguments import count_groups
from ctxext.finetune.batches import Parts, Sequences
from ctxext.finetune.data import write_sequences
from ctxext.finetune.documents import Document
from ctxext.finetune.loss import IGNORED
from ctxext.finetune.trainer import _explain_lost_process
from ctxext.methods import SelfExtend
from tiny_base import QUICK, Tokens, documents, load, make_base, save_llama, tune

TWO = dataclasses.replace(QUICK, sequence_parallel=2)


@pytest.mark.parametrize("pack", ["run-on", "restart"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_parts_are_the_whole_sequence(tmp_path, pack, count):
    options = dataclasses.replace(QUICK, length=64, pack=pack, short_share=0.5, steps=4)
    options = options.resolve(window=64, trained_length=32)
    texts = [Document(ids[: 30 + 7 * number]) for number, ids in enumerate(documents(40))]
    write_sequences(texts, tmp_path, num_needed=options.count_sequences(), pack=pack, end=1)
    whole = Sequences(tmp_path, options)
    parts = Parts(whole, count)
    assert len(parts) == count * len(whole)
    seen = set()
    for number in range(len(whole)):
        entry = whole[number]
        seen.add(tuple(entry["input_ids"].shape))
        joined = {
            name: torch.cat([parts[number * count + part][name] for part in range(count)], dim=1)[0]
            for name in ("input_ids", "labels", "shift_labels", "position_ids")
        }
        size = entry["input_ids"].numel()
        assert len(joined["input_ids"]) == -(-size // count) * count
        assert torch.equal(joined["input_ids"][:size], entry["input_ids"].flatten())
        assert torch.equal(joined["position_ids"][:size], entry["position_ids"].flatten())
        assert torch.equal(joined["labels"], joined["shift_labels"])
        # A position's target is the label of the next one in its row, in whichever part that is.
        labels = entry["labels"].flatten()
        expected = torch.full_like(joined["labels"], IGNORED)
        expected[: size - 1] = labels[1:]
        assert torch.equal(joined["labels"], expected)
        assert (joined["position_ids"][size:] > 0).all()
    assert seen == {(1, 64), (2, 32)}


def test_the_parts_of_a_step_go_to_neighbours():
    assert count_groups(TWO, 1) == 1
    assert count_groups(TWO, 2) == 1
    assert count_groups(TWO, 4) == 2
    assert count_groups(QUICK, 4) == 4


def test_a_plain_model_can_be_split_and_is_left_unchanged(base):
    model = load(base)
    ids = torch.arange(2, 50)[None]
    before, attention = model(input_ids=ids).logits, model.config._attn_implementation
    assert parallel.can_split(model)
    assert model.config._attn_implementation == attention
    assert torch.equal(model(input_ids=ids).logits, before)


@pytest.mark.parametrize("part", ["mlp", "self_attn", "input_layernorm"])
def test_a_model_with_a_state_cannot_be_split(base, part):
    model = load(base)
    module = getattr(model.model.layers[1], part)
    plain = module.forward

    def forward(*arguments, **named):
        result = plain(*arguments, **named)
        states = result[0] if isinstance(result, tuple) else result
        states = states + 0.1 * states.cumsum(1)
        return (states, *result[1:]) if isinstance(result, tuple) else states

    module.forward = forward
    assert not parallel.can_split(model)


def test_documents_begin_where_positions_do_not_grow(base):
    """PoSE's jumps are not borders; a document of one token is one."""
    model, seen = load(base).model.layers[0].self_attn, []

    def record(module, query, key, value, mask, **options):
        seen.append(mask if mask is None else mask.tolist())

    states = torch.zeros(1, 4, 6, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "document_attention", record)
        for positions in ([0, 1, 2, 90, 91, 92], [0, 1, 0, 0, 1, 2]):
            parallel._attend(model, states, states, states, None, position_ids=torch.tensor([positions]))
    assert seen == [None, [[1, 2, 1, 1, 2, 3]]]


def test_the_end_of_another_process_is_one_message(monkeypatch):
    """gloo's message was reported as a bug of ctxext; the second process adds none."""
    closed = RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, expected in (("0", CtxextError), ("1", SystemExit)):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(expected), _explain_lost_process():
            raise closed
        with pytest.raises(RuntimeError, match="shape"), _explain_lost_process():
            raise RuntimeError("shape mismatch")
        with pytest.raises(expected), _explain_lost_process():
            raise torch.distributed.DistBackendError("NCCL")


def never(*_, **__):
    raise AssertionError("weights were read")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 4, "sequence_parallel": 3}, "its 4 heads with 4 keys cannot be divided by 3"),
        ({"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 32, "sequence_parallel": 4}, None),
    ],
)
def test_heads_must_be_shared_equally(tmp_path, monkeypatch, changes, message):
    monkeypatch.setattr(prepare, "load_base", never)
    monkeypatch.setattr("ctxext.finetune.run.is_installed", lambda name: True)
    monkeypatch.setenv("WORLD_SIZE", "12")
    size = changes.pop("sequence_parallel")
    base = make_base(tmp_path, **changes)
    if message is None:
        from ctxext.finetune.base import check_split, open_base

        check_split(open_base(str(base), None), size)
        return
    with pytest.raises(CtxextError, match=message):
        tune(base, tmp_path / "out", dataclasses.replace(QUICK, sequence_parallel=size))
    assert not (tmp_path / "out").exists()


def test_code_that_replaces_the_attention_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "load_base", never)
    monkeypatch.setattr("ctxext.finetune.run.is_installed", lambda name: True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    source = save_llama(tmp_path / "source")
    step = SelfExtend(factor=4.0)
    convert(str(source), tmp_path / "base", Recipe([step]), check=False)
    with pytest.raises(CtxextError, match="the code of self-extend replaces the attention"):
        tune(tmp_path / "base", tmp_path / "out", TWO)
    with pytest.raises(CtxextError, match="the code of self-extend replaces the attention"):
        tune(source, tmp_path / "out", dataclasses.replace(TWO, method="self-extend", factor=4.0))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mistral", "sliding_window": 16}, "it has layers of type sliding_attention"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "its schedule depends on the number of tokens"),
        ({"model_type": "bert"}, "encoders are not supported"),
        ({"model_type": "gpt2"}, "it does not have rotary position embeddings"),
        ({"model_type": "falcon_h1"}, "it has layers of type"),
        ({"model_type": "deepseek_v3"}, "its heads share a key"),
    ],
)
def test_families_are_refused_by_their_configuration(config, message):
    from transformers import AutoConfig

    from ctxext.finetune.base import Base, check_split
    from ctxext.recipes.model_config import model_config

    kind = config.pop("model_type", "llama")
    written = AutoConfig.for_model(kind, max_position_embeddings=64, **config).to_dict()
    written["architectures"] = ["BertForMaskedLM" if kind == "bert" else "LlamaForCausalLM"]

    class Opened:
        pass

    opened = Opened()
    opened.config = written
    with pytest.raises(CtxextError, match=message):
        check_split(Base(opened, model_config(written)), 2)


def test_options_that_cannot_be_split(base, tmp_path, monkeypatch):
    with pytest.raises(CtxextError, match="--sequence-parallel cannot be combined with --micro-batch 2"):
        TrainingOptions(sequence_parallel=2, micro_batch=2)
    with pytest.raises(CtxextError, match="--sequence-parallel cannot be combined with --keep-short"):
        TrainingOptions(sequence_parallel=2, keep_short=True)
    out = tmp_path / "out"
    with pytest.raises(CtxextError, match="cannot be combined with --eval-data"):
        finetune(base, out, Tokens(documents()), TWO, eval_data=Tokens(documents()))
    monkeypatch.setattr("ctxext.finetune.run.is_installed", lambda name: name != "deepspeed")
    with pytest.raises(CtxextError, match="needs DeepSpeed, which is not installed") as missing:
        tune(base, out, TWO)
    assert missing.value.hint == 'DS_BUILD_OPS=0 pip install "ctxext[parallel]"'
    monkeypatch.setattr("ctxext.finetune.run.is_installed", lambda name: True)
    with pytest.raises(CtxextError, match="needs a multiple of 2 processes, not 1") as alone:
        tune(base, out, TWO)
    assert "accelerate launch --num_processes 2" in alone.value.hint
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(prepare, "load_base", never)
    with pytest.raises(CtxextError, match="needs a multiple of 2 processes, not 3"):
        tune(base, out, TWO)
    assert [path.name for path in tmp_path.iterdir()] == []
