"""Whose code evaluation runs."""

import dataclasses
import json

import pytest

from ctxext.checkpoint import open_checkpoint
from ctxext.errors import CtxextError
from ctxext.evaluate.checkpoint_info import info_of
from ctxext.evaluate.model import Loading, may_run_code

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
