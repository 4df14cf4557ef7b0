"""Whose code a checkpoint would run: ctxext's own is known by its bytes, and everybody else's by being named at all."""

import json
from pathlib import Path

import pytest

from ctxext.api import Recipe
from ctxext.checkpoint.opening import Checkpoint, open_checkpoint
from ctxext.errors import CtxextError
from ctxext.recipes.code.own_code import (
    CODE_FILES,
    carries_code,
    check_pinned,
    needs_code,
    own_code,
    own_code_content,
    runs_only_own_code,
)
from ctxext.recipes.methods.window import Window
from ctxext.recipes.model_config import model_config

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


def test_own_code_is_known_by_every_byte_of_it(ours):
    checkpoint = ours
    assert runs_only_own_code(checkpoint)
    assert carries_code(checkpoint)
    files = own_code(checkpoint.config)
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
    assert own_code(plain.config) == {}
    noted = {**LLAMA, "ctxext": {"recipe": {"steps": [{"method": "yarn", "factor": 4.0}]}}}
    assert own_code(noted) == {}
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


def test_a_recipe_broken_by_hand_is_reported(ours):
    with pytest.raises(CtxextError, match=r'"config.json" is invalid: AttributeError'):
        own_code({**ours.config, "text_config": ["x"]})


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
    ],
)
def test_a_transformers_class_may_replace_the_code(config, needed):
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
    with pytest.raises(CtxextError, match="requires a pinned revision") as caught:
        check_pinned(checkpoint, revision)
    assert caught.value.hint.endswith(f"--revision {COMMIT}")
    return None


def test_code_that_changes_while_it_is_compared_is_not_loaded(ours, monkeypatch):
    content = own_code_content(ours)
    assert set(content) == set(own_code(ours.config))
    monkeypatch.setattr("ctxext.recipes.code.own_code.runs_only_own_code", lambda _checkpoint: True)
    name = min(content)
    (ours.folder / name).write_bytes(content[name] + b"# more")
    assert own_code_content(ours) == {}


STEPS = {"rope": {"rope_type": "default"}, "steps": [{"method": "mspoe", "ratios": [1.2, 1.8], "layers": [0]}]}
OLDER = {
    "record": {},
    "0.2.0": {"ctxext": {"version": "0.2.0"}},
    "0.2.0 code": {"ctxext_code": STEPS},
    "0.2.0 ALiBi": {"ctxext_code": {"dropout": 0.1, "steps": []}},
    "0.1.0 code": {"ctxext_mspoe": {"rope": {}, "ranks": [[0]]}},
    "0.1.0 text": {"text_config": {**LLAMA, "ctxext_mspoe": {}}},
    "0.1.0 class": {"auto_map": {"AutoModelForCausalLM": "modeling_ctxext.MsPoELlamaForCausalLM"}},
}
"""Forms of config.json that versions before 0.3 wrote."""


@pytest.mark.parametrize("form", OLDER)
def test_a_checkpoint_of_a_version_before_0_3_is_refused(form, tmp_path):
    record = {"ctxext.json": {"ctxext": "0.2.0"}} if form == "record" else {}
    older = write(tmp_path / "older", **{"config.json": {**LLAMA, **OLDER[form]}}, **record)
    with pytest.raises(CtxextError, match=r"created by a version before 0\.3; convert it again \(.+\)") as caught:
        open_checkpoint(older.folder)
    assert caught.value.hint == "ctxext convert SOURCE OUT --method NAME"


def test_a_broken_record_does_not_hide_a_checkpoint(tmp_path):
    checkpoint = write(tmp_path / "broken", **{"config.json": LLAMA, "ctxext.json": "["})
    assert open_checkpoint(checkpoint.folder).config == LLAMA


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "IN"],
        ["convert", "IN", "OUT", "--method", "yarn", "--factor", "2"],
        ["eval", "IN", "--trust-remote-code"],
        ["compare", "IN", "--target-length", "256", "--trust-remote-code"],
        ["search", "IN", "OUT", "--target-length", "256"],
        ["finetune", "IN", "OUT", "--data", "IN/config.json"],
        ["merge", "IN", "IN", "OUT"],
        ["verify", "IN", "--trust-remote-code"],
        ["push", "IN", "you/model"],
    ],
    ids=lambda words: words[0],
)
def test_no_command_runs_the_code_of_a_version_before_0_3(words, tmp_path, run):
    ran = tmp_path / "ran"
    config = {**LLAMA, "auto_map": {"AutoModelForCausalLM": "modeling_ctxext.CtxextLlamaForCausalLM"}}
    code = f"import pathlib\npathlib.Path({str(ran)!r}).touch()\n"
    write(tmp_path / "IN", **{"config.json": {**config, "ctxext_code": STEPS}, "modeling_ctxext.py": code})
    result = run(*(tmp_path / word if word.startswith(("IN", "OUT")) else word for word in words))
    assert result.exit_code == 1
    assert "created by a version before 0.3; convert it again" in str(result.exception)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["IN"]
