"""A part of a training: weights between those of the base and the trained ones."""

import json
import shutil
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from ctxext.checkpoint.opening import open_checkpoint
from ctxext.errors import CtxextError
from ctxext.finetune import merge
from ctxext.finetune.merge import tied_embeddings
from tiny_base import FACTOR, QUICK, load, logits, make_base, tune


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
    parameters = {**config["rope_parameters"], "rope_theta": 12345.0}
    changed = {**config, "rope_theta": 12345.0, "rope_parameters": parameters}
    (other / "config.json").write_text(json.dumps(changed))
    with pytest.raises(CtxextError, match="another positions"):
        merge(base, other, tmp_path / "part", share=0.5)


@pytest.mark.parametrize("case", ["as it is", "another factor"])
def test_a_training_by_another_program_is_one(tmp_path, trained, case):
    """transformers writes the keys of its own version, and all defaults."""
    base, tuned = trained
    other = tmp_path / "other"
    model = load(tuned)
    model.config.use_cache = False
    model.save_pretrained(other)
    config = json.loads((other / "config.json").read_text())
    assert config.keys() != json.loads((tuned / "config.json").read_text()).keys()
    if case == "another factor":
        wider = json.dumps(config).replace(f'"factor": {float(FACTOR)}', '"factor": 3.0')
        assert wider != json.dumps(config)
        (other / "config.json").write_text(wider)
    if case == "as it is":
        ours = merge(base, tuned, tmp_path / "ours", share=0.5)
        theirs = merge(base, other, tmp_path / "theirs", share=0.5)
        for name, tensor in weights(ours.folder).items():
            torch.testing.assert_close(weights(theirs.folder)[name], tensor, rtol=0, atol=0)
    else:
        with pytest.raises(CtxextError, match=r"config\.json has another positions"):
            merge(base, other, tmp_path / "theirs", share=0.5)


@pytest.mark.parametrize(("stated", "tied"), [(True, {"lm_head.weight": "model.embed_tokens.weight"}), (False, {})])
def test_a_family_that_this_transformers_does_not_know_may_tie_its_embeddings(tmp_path, monkeypatch, stated, tied):
    base = make_base(tmp_path, tie_word_embeddings=True)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": stated}))
    monkeypatch.setattr("transformers.AutoConfig.for_model", mock.Mock(side_effect=ValueError("Unrecognized")))
    assert tied_embeddings(open_checkpoint(str(base))) == tied


@pytest.mark.parametrize("both", ["base", "tuned"])
def test_tied_embeddings_that_one_of_the_two_files_holds_twice(tmp_path, both):
    base = make_base(tmp_path, tie_word_embeddings=True)
    shutil.copytree(base, tmp_path / "tuned")
    old = weights(base)
    new = {name: tensor + 0.5 for name, tensor in old.items()}
    twice = {"lm_head.weight": (old if both == "base" else new)["model.embed_tokens.weight"].clone()}
    for folder, tensors, name in ((base, old, "base"), (tmp_path / "tuned", new, "tuned")):
        held = {**tensors, **(twice if name == both else {})}
        save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    part = weights(merge(base, tmp_path / "tuned", tmp_path / "part", share=0.5).folder)
    assert part.keys() == weights(base).keys()
    for name, tensor in part.items():
        first = "model.embed_tokens.weight" if name == "lm_head.weight" else name
        torch.testing.assert_close(tensor, old[first] + 0.25, rtol=0, atol=1e-6)
