"""DeBERTa: its table of distances is trained, saved and merged like other weights."""

import pytest
import torch
from peft import PeftModel

from ctxext.api import merge
from ctxext.errors import CtxextError
from ctxext.methods import Table, WiderBuckets
from loaded_models import logits
from tiny_encodings import LENGTH, VOCABULARY, load
from tiny_tables import change, make_base, tune, weights

IDS = torch.randint(5, VOCABULARY, (2, 2 * LENGTH), generator=torch.Generator().manual_seed(0))
STEPS = {"deberta": Table(factor=2), "deberta-v2": Table(factor=2), "deberta-v3": WiderBuckets(factor=2)}


def table_of(folder):
    return weights(folder)["deberta.encoder.rel_embeddings.weight"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "deberta-v3" else pytest.mark.thorough) for name in STEPS]
)
def test_the_table_of_distances_is_trained_and_merged(name, tmp_path):
    base = make_base(tmp_path, name, STEPS[name])
    done = tune(base, tmp_path / "out")
    assert all(0 < loss < 20 for _, loss in done.losses)
    before, after = table_of(base), table_of(tmp_path / "out")
    assert (before != after).any(dim=1).float().mean() > 0.8, "nearly every distance was read"
    wanted = logits(PeftModel.from_pretrained(load(base), tmp_path / "out" / "adapter").eval(), IDS)
    assert (logits(load(tmp_path / "out"), IDS) - wanted).abs().max() < 1e-4
    assert (logits(load(base), IDS) - wanted).abs().max() > 1e-2
    merge(str(base), tmp_path / "out" / "adapter", tmp_path / "again")
    assert torch.equal(table_of(tmp_path / "again"), after)


@pytest.mark.parametrize("name", STEPS)
def test_positions_that_the_model_ignores_cannot_be_skipped(name, tmp_path):
    base = make_base(tmp_path, name, STEPS[name])
    with pytest.raises(CtxextError, match="computes positions internally, so none can be skipped"):
        tune(base, tmp_path / "out", change(length=LENGTH, positions="pose", short_share=0.0))
    assert not (tmp_path / "out").exists()
