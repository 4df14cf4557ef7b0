"""A part of a training: weights between those of the base and the trained ones."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from ctxext.errors import CtxextError
from ctxext.finetune import merge
from tiny_base import QUICK, load, logits, make_base, tune


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("averaged")
    base = make_base(folder)
    tune(base, folder / "out", QUICK)
    return base, folder / "out"


def weights(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("share", [0.25, 1.0])
@pytest.mark.parametrize("what", [".", "adapter"])
def test_weights_lie_between_those_of_base_and_training(tmp_path, trained, what, share):
    base, tuned = trained
    done = merge(base, tuned / what, tmp_path / "part", share=share)
    old, new, part = weights(base), weights(tuned), weights(done.folder)
    assert part.keys() == old.keys()
    for name, tensor in part.items():
        assert tensor.dtype == old[name].dtype
        torch.testing.assert_close(tensor, (1 - share) * old[name] + share * new[name], rtol=0, atol=1e-6)
    assert any((new[name] - old[name]).abs().max() > 1e-4 for name in new)
    assert (done.folder / "adapter").exists() is (what == "adapter" and share == 1)
    noted = json.loads((done.folder / "config.json").read_text())["ctxext"]["finetune"]
    assert noted.get("share", 1.0) == share
    assert torch.isfinite(logits(load(done.folder))).all()


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5, float("nan")])
def test_no_part_is_refused(tmp_path, trained, share):
    with pytest.raises(CtxextError, match="no part of the way"):
        merge(trained[0], trained[1], tmp_path / "part", share=share)
    assert not (tmp_path / "part").exists()


def test_another_model_is_refused(tmp_path, trained):
    base, tuned = trained
    other = tmp_path / "other"
    merge(base, tuned, other)
    kept = weights(other)
    save_file({**kept, "model.more.weight": torch.ones(2)}, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CtxextError, match=r'no training of .*"model\.more\.weight"'):
        merge(base, other, tmp_path / "part", share=0.5)
    save_file(kept, other / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rope_theta": 12345.0}))
    with pytest.raises(CtxextError, match="another rope_theta"):
        merge(base, other, tmp_path / "part", share=0.5)
