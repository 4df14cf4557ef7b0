"""What transformers is given to load: listed files alone, without anything that names more."""

import json
import re

import pytest

from ctxext.checkpoint import open_checkpoint
from ctxext.errors import CtxextError
from ctxext.loading import without_hub
from ctxext.staging import staged

LLAMA = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
LLAMA |= {"max_position_embeddings": 128}
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
TOKENIZER = {
    "vocab_file": "/etc/hostname",
    "tokenizer_file": "../x",
    "name_or_path": "them/words",
    "model_max_length": 9,
}


@pytest.fixture
def source(tmp_path):
    """A folder with something of everything."""
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER))
    for name in (*WEIGHTS, "tokenizer.json", "theirs.py", "adapter_config.json", "training_args.bin"):
        (folder / name).write_text("{}")
    return folder


def test_a_folder_to_load_from_holds_listed_files_alone(source):
    with staged(open_checkpoint(str(source))) as stage:
        names = {path.name for path in stage.folder.iterdir()}
    assert names == {"config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors"}


def test_pickles_are_loaded_where_there_is_nothing_else(source):
    (source / "model.safetensors").unlink()
    with staged(open_checkpoint(str(source))) as stage:
        assert (stage.folder / "pytorch_model.bin").exists()


def test_a_tokenizer_names_no_files_elsewhere(source):
    with staged(open_checkpoint(str(source))) as stage:
        assert json.loads((stage.folder / "tokenizer_config.json").read_text()) == {"model_max_length": 9}


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_link_out_of_the_folder_is_not_loaded(name, source, tmp_path):
    (tmp_path / "secret").write_text("{}")
    (source / name).unlink()
    (source / name).symlink_to(tmp_path / "secret")
    with pytest.raises(CtxextError, match=re.escape(name)) as refusal, staged(open_checkpoint(str(source))):
        pass
    assert "link out of the folder" in refusal.value.message


def test_what_a_configuration_names_elsewhere_is_left_out_at_any_depth():
    named = {"_attn_implementation": "them/kernel", "use_kernel": True, "x": 1}
    config = {**named, "text_config": dict(named), "parts": [dict(named), [dict(named)]], "list": [1, "a"]}
    kept = {"x": 1}
    assert without_hub(config) == {**kept, "text_config": kept, "parts": [kept, [kept]], "list": [1, "a"]}
