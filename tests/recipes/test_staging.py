"""What transformers is given to load: listed files alone, without anything that names more."""

import json
import re
import types

import pytest

from ctxext.api import Recipe, convert
from ctxext.checkpoint.loading import rename, without_hub
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.errors import CtxextError
from ctxext.methods import MsPoE
from ctxext.recipes.code.staging import own_classes, stage_checkpoint

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
    with stage_checkpoint(open_checkpoint(str(source))) as stage:
        names = {path.name for path in stage.folder.iterdir()}
    assert names == {"config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors"}


def test_pickles_are_loaded_only_without_alternatives(source):
    (source / "model.safetensors").unlink()
    with stage_checkpoint(open_checkpoint(str(source))) as stage:
        assert (stage.folder / "pytorch_model.bin").exists()


def test_a_tokenizer_names_no_files_elsewhere(source):
    with stage_checkpoint(open_checkpoint(str(source))) as stage:
        assert json.loads((stage.folder / "tokenizer_config.json").read_text()) == {"model_max_length": 9}


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_link_out_of_the_folder_is_not_loaded(name, source, tmp_path):
    (tmp_path / "secret").write_text("{}")
    (source / name).unlink()
    (source / name).symlink_to(tmp_path / "secret")
    with pytest.raises(CtxextError, match=re.escape(name)) as refusal, stage_checkpoint(open_checkpoint(str(source))):
        pass
    assert "link to a file outside the folder" in refusal.value.message


def test_what_a_configuration_names_elsewhere_is_left_out_at_any_depth():
    named = {"_attn_implementation": "them/kernel", "use_kernel": True, "x": 1}
    config = {**named, "text_config": dict(named), "parts": [dict(named), [dict(named)]], "list": [1, "a"]}
    kept = {"x": 1}
    assert without_hub(config) == {**kept, "text_config": kept, "parts": [kept, [kept]], "list": [1, "a"]}


def names_of(stage):
    return {path.relative_to(stage.folder).as_posix() for path in stage.folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("index", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
def test_shards_of_any_name_are_loaded_if_the_index_names_them(source, index):
    suffix = ".safetensors" if "safetensors" in index else ".bin"
    for name in WEIGHTS:
        (source / name).unlink()
    shards = [f"first{suffix}", f"model-00002-of-00003{suffix}", f"deep/third{suffix}"]
    (source / "deep").mkdir()
    (source / "other.safetensors").write_text("{}")
    for name in shards:
        (source / name).write_text("{}")
    (source / index).write_text(json.dumps({"weight_map": dict(zip("abc", shards, strict=True))}))
    with stage_checkpoint(open_checkpoint(str(source))) as stage:
        assert names_of(stage) == {"config.json", "tokenizer_config.json", "tokenizer.json", index, *shards}
    (source / shards[0]).unlink()
    with (
        pytest.raises(CtxextError, match=f'has no file "{shards[0]}", which its'),
        stage_checkpoint(open_checkpoint(str(source))),
    ):
        pass


def test_a_file_of_weights_that_the_configuration_names_is_loaded(source):
    (source / "mine.safetensors").write_text("{}")
    (source / "config.json").write_text(json.dumps({**LLAMA, "transformers_weights": "mine.safetensors"}))
    with stage_checkpoint(open_checkpoint(str(source))) as stage:
        assert "mine.safetensors" in names_of(stage)
    (source / "mine.safetensors").unlink()
    with (
        pytest.raises(CtxextError, match=r'no file "mine\.safetensors"'),
        stage_checkpoint(open_checkpoint(str(source))),
    ):
        pass


def test_only_tokens_of_the_generation_config_are_staged(source):
    tokens = {"eos_token_id": [1, 2], "bos_token_id": 0, "suppressed_token_ids": [3], "forced_decoder_token_ids": []}
    others = {"custom_generate": "them/code", "max_length": 9, "assistant": "them/model", "token_id_of": 3}
    (source / "generation_config.json").write_text(json.dumps({**others, **tokens}))
    with stage_checkpoint(open_checkpoint(str(source))) as stage:
        assert json.loads((stage.folder / "generation_config.json").read_text()) == tokens


def test_who_is_trusted(source, llama_source, tmp_path):
    """Our code is loaded with a model and never with a tokenizer; what the user allowed from its own folder."""
    out = tmp_path / "out"
    convert(str(llama_source), out, Recipe([MsPoE(first_layer=0, head_order="fixed")]), check=False)
    with stage_checkpoint(open_checkpoint(str(out))) as stage:
        assert (stage.trust, stage.trust_tokenizer) == (True, False)
        assert {path.name for path in out.glob("*.py")} == {path.name for path in stage.folder.glob("*.py")}
        assert stage.folder.name == "out"
        assert stage.folder != out
        folder = stage.folder
    assert not folder.exists()
    with stage_checkpoint(open_checkpoint(str(source))) as stage:
        assert (stage.trust, stage.trust_tokenizer) == (False, False)
    with stage_checkpoint(open_checkpoint(str(source)), foreign=True) as stage:
        assert (stage.folder, stage.trust, stage.trust_tokenizer) == (source, True, True)


def test_classes_are_named_in_the_module_that_defines_them():
    code = {"modeling_ours.py": b"", "method.py": b""}
    named = {"AutoModel": "modeling_ours.Model", "AutoConfig": "theirs.Config", "AutoProcessor": "them/x--method.P"}
    config = {"auto_map": {**named, "AutoTokenizer": ["a.B", None]}, "x": 1}
    assert own_classes(config, code) == {"auto_map": {"AutoModel": "modeling_ours.Model"}, "x": 1}
    assert own_classes(config, {}) == {"x": 1}
    assert own_classes({"auto_map": "a.B"}, code) == {}


CLASSES = {"AutoTokenizer": ["ck--evil.T", None], "AutoConfig": "evil.C", "AutoProcessor": "./ck--evil.sub.P"}
NAMING = {"auto_map": CLASSES, "inner": {"auto_map": CLASSES, "list": [{"auto_map": "a.B"}, "ck--evil.T", "a--b"]}}


def test_no_staged_file_names_code(source):
    """Issue: llama.cpp's converter trusted `auto_map` of tokenizer_config.json, which stayed."""
    for path in (*source.glob("*.json"), *(source / name for name in SETTINGS_FILES)):
        kept = {"auto_map": 5} if path.name == "added_tokens.json" else {"x": {"impl": "them/x--y.Z"}, **NAMING}
        path.write_text(json.dumps({**json.loads(path.read_text() if path.is_file() else "{}"), **kept}))
    (source / "custom_generate").mkdir()
    (source / "custom_generate" / "generate.py").write_text("")
    with stage_checkpoint(open_checkpoint(str(source))) as stage:
        contents = {path.name: json.loads(path.read_text()) for path in stage.folder.glob("*.json")}
        assert not list(stage.folder.rglob("*.py"))
    contents.pop("tokenizer.json")  # Data, of which nothing is imported.
    assert contents.pop("added_tokens.json") == {"auto_map": 5}, "a token of that name"
    assert contents.keys() == {"config.json", *SETTINGS_FILES} - {"added_tokens.json"} - PROCESSORS
    for name, content in contents.items():
        assert "auto_map" not in str(content), name
        assert "evil" not in str(content), name
    assert contents["tokenizer_config.json"] == {"model_max_length": 9, "x": {}, "inner": {"list": [{}, "a--b"]}}


PROCESSORS = {"processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json", "modules.json"}
SETTINGS_FILES = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.json"),
    *("generation_config.json", *PROCESSORS),
)


def test_loaded_models_have_the_name_of_their_source(source):
    checkpoint = open_checkpoint(str(source))
    inner = types.SimpleNamespace(name_or_path="/tmp/gone")
    model = types.SimpleNamespace(name_or_path="/tmp/gone", config=inner)
    assert rename(model, checkpoint) is model
    assert (model.name_or_path, inner.name_or_path) == (str(source), str(source))
    tokenizer = types.SimpleNamespace(name_or_path="/tmp/gone", init_kwargs={"name_or_path": "/tmp/gone", "x": 1})
    assert vars(rename(tokenizer, checkpoint)) == {
        "name_or_path": str(source),
        "init_kwargs": {"name_or_path": str(source), "x": 1},
    }
