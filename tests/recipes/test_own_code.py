"""Whose code a checkpoint would run: ctxext's own is known by its bytes, and everybody else's by being named at all."""

import json
from pathlib import Path

import pytest

from ctxext.checkpoint.opening import Checkpoint
from ctxext.errors import CtxextError
from ctxext.recipes import Recipe
from ctxext.recipes.code.own_code import (
    CODE_FILES,
    carries_code,
    check_pinned,
    code_of_versions,
    needs_code,
    own_code,
    own_code_content,
    runs_only_own_code,
)
from ctxext.recipes.encodings.legacy import is_earlier, is_legacy, upgraded
from ctxext.recipes.encodings.rotary import SENTINEL, model_config
from ctxext.recipes.methods.window import Window
from older_checkpoints import lay_out

LLAMA = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
LLAMA |= {"max_position_embeddings": 128, "rope_theta": 1e4}
COMMIT = "c" * 40


def write(folder: Path, **files) -> Checkpoint:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return Checkpoint("mine", folder, json.loads((folder / "config.json").read_text()))


@pytest.fixture
def ours(tmp_path) -> Checkpoint:
    """A checkpoint with this version's code, but for the weights."""
    recipe, model = Recipe([Window(factor=2)]), model_config(dict(LLAMA))
    config = recipe.edit(model).config | {"ctxext": {"recipe": recipe.to_dict()}}
    return write(tmp_path / "ours", **{"config.json": config}, **recipe.code_files(model.config))


@pytest.fixture
def older(tmp_path) -> Checkpoint:
    """One with the code of 0.1.0."""
    return write(lay_out("v0.1.0", "mspoe-fixed", tmp_path / "older"))


@pytest.mark.parametrize("version", ["ours", "older"])
def test_own_code_is_known_by_every_byte_of_it(version, request):
    checkpoint = request.getfixturevalue(version)
    assert runs_only_own_code(checkpoint)
    assert carries_code(checkpoint)
    files = own_code(checkpoint)
    assert set(files) == {path.name for path in checkpoint.folder.glob("*.py")}
    assert set(files) <= CODE_FILES
    for name in files:
        content = (checkpoint.folder / name).read_text()
        (checkpoint.folder / name).write_text(f"{content}# more")
        assert not runs_only_own_code(checkpoint), name
        (checkpoint.folder / name).unlink()
        assert not runs_only_own_code(checkpoint), name
        (checkpoint.folder / name).write_text(content)
    assert runs_only_own_code(checkpoint)


@pytest.mark.parametrize(
    "auto_map", ["theirs.Model", {"AutoModel": "theirs.Model"}, {"AutoTokenizer": ["theirs.Fast", None]}, {"x": 1}]
)
@pytest.mark.parametrize("name", ["tokenizer_config.json", "processor_config.json", "preprocessor_config.json"])
def test_a_class_of_somebody_else_s_in_any_file(auto_map, name, ours):
    """Processors are never loaded, so that theirs changes nothing but what `--trust-remote-code` would run."""
    for content in ({"auto_map": auto_map}, {"nested": {"auto_map": auto_map}}):
        changed = write(ours.folder, **{name: content})
        assert runs_only_own_code(changed) == (name != "tokenizer_config.json")
        assert carries_code(changed)
    assert runs_only_own_code(write(ours.folder, **{name: {"nested": {"x": 1}, "auto_map": None}}))


def test_a_checkpoint_without_code(tmp_path):
    plain = write(tmp_path / "plain", **{"config.json": {**LLAMA, "text_config": {"x": 1}}})
    assert not carries_code(plain)
    assert not runs_only_own_code(plain)
    assert own_code(plain) == {}
    noted = {**LLAMA, "ctxext": {"recipe": {"steps": [{"method": "yarn", "factor": 4.0}]}}}
    assert code_of_versions(noted) == []
    # A stub that no recipe asks for is nobody's: there is nothing to hold it against.
    named = {"auto_map": {"AutoModel": "modeling_ctxext.CtxextLlamaModel"}}
    for config in (
        {**LLAMA, **named},
        {**noted, **named},
        {**named, "ctxext": {"recipe": {"steps": [{"method": "of tomorrow"}]}}},
    ):
        stub = write(tmp_path / "plain", **{"config.json": config, "modeling_ctxext.py": "import os"})
        assert carries_code(stub)
        assert not runs_only_own_code(stub)


def test_a_recipe_that_was_broken_by_hand_is_told(older):
    with pytest.raises(CtxextError, match=r'"config.json" makes no sense: AttributeError'):
        code_of_versions({**older.config, "text_config": ["x"]})


NAMED = {"auto_map": {"AutoModel": "modeling_x.X"}}


@pytest.mark.parametrize(
    ("config", "needed"),
    [
        ({**LLAMA, **NAMED}, False),  # The stock class can stand for it.
        ({**NAMED, "model_type": "of tomorrow"}, True),
        ({"model_type": "of tomorrow"}, False),
        ({**LLAMA, **NAMED, "ctxext_code": {}}, True),  # The schedule is hidden from the stock class.
        ({**LLAMA, "ctxext_code": {}}, False),
        ({**LLAMA, **NAMED, "text_config": {"ctxext_code": {}}}, True),
        ({**LLAMA, **NAMED, "text_config": None}, False),
        ({**LLAMA, **NAMED, "ctxext_mspoe": {}}, True),
    ],
)
def test_whether_a_stock_class_can_stand_for_the_code(config, needed):
    assert needs_code(config) == needed


@pytest.mark.parametrize(
    ("source", "revision", "told"),
    [
        (COMMIT, COMMIT, False),
        (COMMIT, "main", True),
        (COMMIT, None, True),
        (COMMIT, COMMIT[:7], True),
        (None, "main", False),
        (None, None, False),
    ],
)
def test_code_from_the_hub_runs_only_as_somebody_read_it(source, revision, told, tmp_path):
    checkpoint = Checkpoint("you/model", tmp_path, {}, source)
    if not told:
        return check_pinned(checkpoint, revision)
    with pytest.raises(CtxextError, match="only at a pinned revision") as caught:
        check_pinned(checkpoint, revision)
    assert caught.value.hint.endswith(f"--revision {COMMIT}")
    return None


BLOCK = {"ratios": [1.2, 1.8], "layers": [0], "rope": {"rope_type": "default"}, "hidden_act": "silu"}


def test_a_configuration_of_0_1_0_is_read_as_this_version_writes_it():
    old = {
        "model_type": "llama",
        "architectures": ["MsPoELlamaForCausalLM"],
        "auto_map": {"AutoModel": "modeling_ctxext.MsPoELlamaModel"},
        "ctxext_mspoe": BLOCK,
    }
    step = {"method": "mspoe", "ratios": [1.2, 1.8], "layers": [0]}
    shared = {"rope": {"rope_type": "default"}, "hidden": {"hidden_act": "silu"}}
    new = {
        "model_type": "llama",
        "hidden_act": SENTINEL,
        "architectures": ["CtxextLlamaForCausalLM"],
        "auto_map": {"AutoModel": "modeling_ctxext.CtxextLlamaModel"},
        "ctxext_code": {**shared, "steps": [{**step, "per_prompt": True}]},
    }
    assert upgraded(old) == new
    assert old["ctxext_mspoe"] == BLOCK
    ranked = upgraded({"ctxext_mspoe": {**BLOCK, "ranks": [[0]]}})
    assert ranked["ctxext_code"]["steps"] == [{**step, "ranks": [[0]]}]
    nested = upgraded({"text_config": {"ctxext_mspoe": BLOCK}, "ctxext_mspoe": None})
    assert nested["text_config"] == {"ctxext_code": new["ctxext_code"], "hidden_act": SENTINEL}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            {"model_type": "llama", "hidden_act": "gelu", "ctxext_code": {"rope": {}, "steps": []}},
            {
                "model_type": "llama",
                "hidden_act": SENTINEL,
                "ctxext_code": {"rope": {}, "hidden": {"hidden_act": "gelu"}},
            },
        ),
        (
            {
                "model_type": "phi3",
                "hidden_act": SENTINEL,
                "ctxext_code": {"rope": {}, "hidden_act": "relu", "steps": []},
            },
            {
                "model_type": "phi3",
                "hidden_act": SENTINEL,
                "ctxext_code": {"rope": {}, "shown": True, "hidden": {"hidden_act": "relu"}},
            },
        ),
        (
            {"model_type": "falcon", "attention_dropout": -1, "ctxext_code": {"dropout": 0.1, "steps": []}},
            {
                "model_type": "falcon",
                "attention_dropout": 0.1,
                "activation": SENTINEL,
                "ctxext_code": {"hidden": {"activation": "gelu"}},
            },
        ),
        (
            {"model_type": "mpt", "attn_config": {"attn_pdrop": -1}, "ctxext_code": {"dropout": 0.1, "steps": []}},
            {
                "model_type": "mpt",
                "attn_config": {"attn_pdrop": -1},
                "ctxext_code": {"hidden": {"attn_config.attn_pdrop": 0.1}},
            },
        ),
    ],
)
def test_a_configuration_of_0_2_0_gets_the_guards_of_this_version(old, new):
    new["ctxext_code"]["steps"] = []
    assert is_earlier(old)
    assert upgraded(old) == new
    assert not is_earlier(new)
    assert upgraded(new) is new


@pytest.mark.parametrize("config", [LLAMA, {"text_config": None}, {"text_config": {}}, {"ctxext_mspoe": "x"}])
def test_what_0_1_0_did_not_write_is_left_alone(config):
    assert not is_legacy(config)
    assert upgraded(config) is config


def test_code_that_changes_while_it_is_compared_is_not_loaded(ours, monkeypatch):
    content = own_code_content(ours)
    assert set(content) == set(own_code(ours))
    monkeypatch.setattr("ctxext.recipes.code.own_code.runs_only_own_code", lambda _checkpoint: True)
    name = min(content)
    (ours.folder / name).write_bytes(content[name] + b"# more")
    assert own_code_content(ours) == {}
