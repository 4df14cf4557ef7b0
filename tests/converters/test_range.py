"""Longer tables of sinusoids: read back from the loaded model and held against the reference."""

import json

import pytest
import torch

from ctxext.checkpoint.opening import open_checkpoint
from ctxext.converters import convert
from ctxext.recipes import Recipe
from ctxext.recipes.encodings.learned import COMPUTED
from ctxext.recipes.methods.range import Range
from ctxext.verify import verify
from ctxext.verify.loading_checks import check_tables
from ctxext.verify.reference import reference_of
from ctxext.verify.subject import Subject
from tiny_encodings import COMPUTED as MODELS
from tiny_encodings import LENGTH, load, logits, save

FACTOR = 3


def test_every_layout_has_a_model():
    assert set(MODELS) == set(COMPUTED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("model_type", MODELS)
def test_a_family(model_type, dtype, tmp_path):
    source = save(model_type, tmp_path / "source", dtype=dtype)
    convert(str(source), tmp_path / "out", Recipe([Range(factor=FACTOR)]))
    before, after = load(source).float(), load(tmp_path / "out").float()
    assert torch.equal(logits(before, LENGTH), logits(after, LENGTH))
    assert logits(after, FACTOR * LENGTH).isfinite().all()
    for ending in COMPUTED[model_type].tensors:
        table = next(weight for name, weight in after.named_parameters() if name.endswith(ending)).detach()
        wanted = reference_of(Range).rows({}, table.double(), FACTOR * LENGTH)
        assert torch.allclose(table.double(), wanted, atol=1e-6 if dtype == torch.float32 else 1e-3)
    read = json.loads((tmp_path / "out/config.json").read_text())
    assert read["max_position_embeddings"] == FACTOR * LENGTH
    findings = verify(str(tmp_path / "out"), against=str(source), load=False)
    assert {one.status for one in findings} == {"passed", "not checked"}, findings
    assert check_inspect(tmp_path / "out")


def check_inspect(folder):
    from ctxext.converters.inspection import inspect_checkpoint

    inspection = inspect_checkpoint(open_checkpoint(str(folder)))
    assert inspection.model.encoding.context_length == FACTOR * LENGTH
    return not inspection.methods["range"] and inspection.methods["table"]


@pytest.mark.parametrize("model_type", ["marian", "pegasus"])
def test_a_loaded_table_is_compared(model_type, tmp_path):
    source = save(model_type, tmp_path / "source")
    convert(str(source), tmp_path / "out", Recipe([Range(factor=FACTOR)]))
    finding = check_tables(Subject(open_checkpoint(str(tmp_path / "out"))))
    assert finding.status == "passed", finding
