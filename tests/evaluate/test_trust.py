"""Whose code evaluation runs."""

import dataclasses
import json

import pytest

from ctxext.checkpoint.opening import open_checkpoint
from ctxext.converters import convert
from ctxext.errors import CtxextError
from ctxext.evaluate.checkpoint_info import info_of
from ctxext.evaluate.model import Loading, may_run_code
from ctxext.finetune.base import open_base
from ctxext.recipes.recipe import recipe_from_dict

TRUSTED = {"trust_remote_code": True}


@pytest.fixture
def from_hub(tmp_path):
    """A checkpoint as if downloaded, with code of somebody's or without."""

    def make(**config):
        content = {"model_type": "llama", "max_position_embeddings": 64, "rope_theta": 1e4, **config}
        (tmp_path / "config.json").write_text(json.dumps(content))
        (tmp_path / "tokenizer.json").write_text("{}")
        local = open_checkpoint(str(tmp_path))
        return info_of("mine", dataclasses.replace(local, name="me/mine", revision="a" * 40))

    return make


def test_code_from_the_hub_runs_only_at_a_pinned_revision(from_hub):
    """Issue: remote code is never executed unless it is allowed, with a pinned revision."""
    foreign = from_hub(auto_map={"AutoModelForCausalLM": "evil.Model"})
    assert not may_run_code(foreign, Loading())
    for revision in (None, "main"):
        with pytest.raises(CtxextError, match="pinned revision") as caught:
            may_run_code(foreign, Loading(**TRUSTED, revision=revision))
        assert "--revision " + "a" * 40 in caught.value.hint
    assert may_run_code(foreign, Loading(**TRUSTED, revision="a" * 40))


def test_a_folder_and_a_model_without_code_need_no_revision(from_hub):
    foreign = from_hub(auto_map={"AutoModelForCausalLM": "evil.Model"})
    local = dataclasses.replace(foreign, checkpoint=dataclasses.replace(foreign.checkpoint, revision=None))
    assert may_run_code(local, Loading(**TRUSTED))
    assert not may_run_code(from_hub(), Loading(**TRUSTED))


@pytest.fixture(scope="module")
def of_another_version(tmp_path_factory):
    """A converted checkpoint whose code is a line longer than this version's."""
    folder = tmp_path_factory.mktemp("converted") / "bifocal"
    convert("demo", folder, recipe_from_dict({"steps": [{"method": "bifocal", "factor": 4}]}, "test"), check=False)
    with (folder / "modeling_family.py").open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    return folder


def test_code_of_another_version_is_told_before_anything_is_loaded(of_another_version):
    info = info_of("mine", open_checkpoint(str(of_another_version)))
    with pytest.raises(CtxextError, match="not this version's own") as caught:
        may_run_code(info, Loading())
    assert "--trust-remote-code" in caught.value.hint
    assert may_run_code(info, Loading(**TRUSTED))


def test_code_of_another_version_is_not_trained(of_another_version):
    with pytest.raises(CtxextError, match="not this version's, which ctxext does not run") as caught:
        open_base(str(of_another_version), 512)
    assert "converted again" in caught.value.hint
