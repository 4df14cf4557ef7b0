"""Checkpoints with slopes by the row are trained and merged like any other with code."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from ctxext.recipes.methods.ntk_alibi import NtkAlibi
from ctxext.verify import verify
from tiny_tables import change, make_base, tune


@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_it_is_trained_merged_and_verified(name, tmp_path):
    base = make_base(tmp_path, name, NtkAlibi(factor=2))
    tune(base, tmp_path / "out", change(steps=3))
    found = {one.check: one.status for one in verify(str(tmp_path / "out"))}
    assert set(found.values()) == {"passed"}, found
    one, other = (
        AutoModelForCausalLM.from_pretrained(p, trust_remote_code=True).eval() for p in (base, tmp_path / "out")
    )
    with torch.no_grad():
        ids = torch.arange(5, 25)[None]
        assert not torch.equal(one(ids).logits, other(ids).logits)
