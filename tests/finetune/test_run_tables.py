"""Models with a position table: it is fully trained, saved, resumed and merged like other weights."""

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ctxext.api import merge, verify
from ctxext.errors import CtxextError
from ctxext.finetune.dry_run import plan_training
from ctxext.recipes.methods.ntk_alibi import NtkAlibi
from ctxext.recipes.methods.range import Range
from loaded_models import logits
from tiny_base import Stopped, stop_after
from tiny_encodings import LENGTH, VOCABULARY, load
from tiny_tables import CAUSAL, ENCODERS, OPTIONS, change, make_base, texts, tune, weights

IDS = torch.randint(5, VOCABULARY, (2, 2 * LENGTH), generator=torch.Generator().manual_seed(0))


def table_of(folder):
    tables = {name: value for name, value in weights(folder).items() if name.endswith(TABLES)}
    assert len(tables) == 1, tables.keys()
    return next(iter(tables.values()))


TABLES = ("position_embeddings.weight", "embed_positions.weight", "wpe.weight")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", [*CAUSAL, *ENCODERS])
def test_the_table_is_trained_and_merged(model_type, tmp_path):
    base = make_base(tmp_path, model_type)
    done = tune(base, tmp_path / "out")
    assert all(0 < loss < 20 for _, loss in done.losses)
    before, after = table_of(base), table_of(tmp_path / "out")
    changed = (before != after).any(dim=1)
    predicting = slice(-2 * LENGTH, None if model_type in ENCODERS else -1)
    assert changed[predicting].all(), "every position was read, so every row learned"
    special = len(before) - 2 * LENGTH
    assert not changed[:special].any(), "rows for others are none of a sequence's"
    wanted = logits(PeftModel.from_pretrained(load(base), tmp_path / "out" / "adapter").eval(), IDS)
    assert (logits(load(tmp_path / "out"), IDS) - wanted).abs().max() < 1e-4
    assert (logits(load(base), IDS) - wanted).abs().max() > 1e-2
    merge(str(base), tmp_path / "out" / "adapter", tmp_path / "again")
    assert torch.equal(table_of(tmp_path / "again"), after)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", ["gpt2", "bert", "roberta"])
def test_all_weights_of_a_model_with_a_table(model_type, tmp_path):
    base = make_base(tmp_path, model_type)
    tune(base, tmp_path / "out", change(full=True, learning_rate=1e-2))
    changed = (table_of(base) != table_of(tmp_path / "out")).any(dim=1)
    assert changed[-2 * LENGTH : -1].all()
    assert weights(base).keys() == weights(tmp_path / "out").keys()
    assert (logits(load(tmp_path / "out"), IDS) - logits(load(base), IDS)).abs().max() > 1e-2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", ["gpt2", "roberta"])
@pytest.mark.thorough
def test_a_resumed_run_equals_an_uninterrupted_one(model_type, tmp_path):
    base = make_base(tmp_path, model_type)
    tune(base, tmp_path / "straight")
    with pytest.raises(Stopped):
        tune(base, tmp_path / "out", progress=stop_after(3))
    tune(base, tmp_path / "out", resume=True)
    one, two = (weights(tmp_path / name) for name in ("straight", "out"))
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-6


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", ["gpt2", "opt", "bert", "roberta"])
@pytest.mark.thorough
def test_skipped_positions_train_rows_that_short_windows_do_not(model_type, tmp_path):
    base = make_base(tmp_path, model_type)
    tune(base, tmp_path / "plain", change(length=LENGTH, short_share=0.0))
    tune(base, tmp_path / "pose", change(positions="pose", short_share=0.0, batch_size=8))
    far = slice(-LENGTH, None)
    assert not (table_of(base) != table_of(tmp_path / "plain"))[far].any()
    assert (table_of(base) != table_of(tmp_path / "pose"))[far].any(dim=1).sum() > LENGTH / 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.thorough
def test_sinusoids_stay_what_they_are(tmp_path):
    base = make_base(tmp_path, "xglm", Range(factor=2))
    tune(base, tmp_path / "out")
    trained = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    assert trained
    assert not any("embed_positions" in name for name in trained)
    assert (logits(load(tmp_path / "out"), IDS) - logits(load(base), IDS)).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("model_type", "options", "message"),
    [
        ("gpt2", {"keep_short": True}, "--keep-short needs a model with rotary"),
        ("gpt2", {"pack": "restart"}, "--pack restart would train only the first rows"),
        ("bart", {}, "is a BartForConditionalGeneration; only causal and masked"),
        ("gpt2", {"length": 48}, "--length 48 is above the context length"),
    ],
)
def test_options_that_do_not_fit_such_a_model_are_refused(model_type, options, message, tmp_path):
    base = make_base(tmp_path, model_type)
    with pytest.raises(CtxextError, match=message):
        tune(base, tmp_path / "out", change(**options))
    assert not (tmp_path / "out").exists()
    with pytest.raises(CtxextError, match=message):
        plan_training(str(base), [lambda *_: ()], change(**options))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", ["gpt2", "roberta"])
@pytest.mark.thorough
def test_a_dry_run_reports_time_and_memory(model_type, tmp_path):
    base = make_base(tmp_path, model_type)
    plan = plan_training(str(base), [lambda *_: iter(texts())], OPTIONS)
    assert plan.num_trained > table_of(base).numel()
    assert plan.peak_memory > 0


@pytest.mark.parametrize("name", ["bloom", "mpt"])
@pytest.mark.thorough
def test_it_is_trained_merged_and_verified(name, tmp_path):
    base = make_base(tmp_path, name, NtkAlibi(factor=2))
    tune(base, tmp_path / "out", change(steps=3))
    statuses = {one.check: one.status for one in verify(str(tmp_path / "out"))}
    assert set(statuses.values()) == {"passed"}, statuses
    one, other = (
        AutoModelForCausalLM.from_pretrained(p, trust_remote_code=True).eval() for p in (base, tmp_path / "out")
    )
    with torch.no_grad():
        ids = torch.arange(5, 25)[None]
        assert not torch.equal(one(ids).logits, other(ids).logits)
