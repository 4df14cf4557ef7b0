"""A converted checkpoint does not load without its code, whichever transformers saved it; with it, it loads quietly."""

import json
import logging
import shutil
import subprocess
import sys

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    modeling_rope_utils,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import tiny_encodings
import tiny_models
from ctxext.api import Recipe, convert, verify
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.errors import CtxextError
from ctxext.methods import MsPoE
from ctxext.recipes.code.guards import GUARDS, SENTINEL, USUAL
from ctxext.recipes.code.layout import HEADS, without_code
from ctxext.recipes.code.own_code import runs_only_own_code
from ctxext.recipes.methods.ntk_alibi import NtkAlibi
from ctxext.recipes.methods.self_extend import SelfExtend
from loaded_models import logits
from portable_checkpoints import load

QUICK = ("llama", "gemma3_text", "gpt_oss", "lfm2", "olmo2", "falcon", "bloom", "falcon-rw")
IDS = torch.randint(4, 40, (1, 100), generator=torch.Generator().manual_seed(0))
# Families that transformers 4 lacks. transformers 5 keeps the rope type when saving; no other key guards them.
ROPE_ALONE = ("exaone", "lfm2_moe", "lfm3", "minimax_m3_vl_text")
METHODS = (SelfExtend(factor=2.0), MsPoE(head_order="fixed", first_layer=0), MsPoE(head_order="fixed", first_layer=1))
# What each line leaves out of a config.json that it saves, and more.
LOST = {
    "nothing": (),
    "transformers 5": ("rope_scaling", "rope_theta", "rope_local_base_freq"),
    "any schedule": ("rope_scaling", "rope_theta", "rope_local_base_freq", "rope_parameters"),
}


def every_family():
    names = [*tiny_models.FAMILIES, *tiny_encodings.ALIBI]
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in dict.fromkeys(names)]


def converted(name, place):
    """The family's tiny model, converted by the first method with code that it takes, and its source."""
    if name in tiny_encodings.ALIBI and name != "falcon":
        source, methods = tiny_encodings.save(name, place / "source"), (NtkAlibi(factor=2.0),)
    else:
        source, methods = tiny_models.save(name, place / "source"), METHODS
        config = json.loads((source / "config.json").read_text())
        if config.get("sliding_window") and not config.get("layer_types") and name != "moshi":  # Which takes no None.
            (source / "config.json").write_text(json.dumps({**config, "sliding_window": None}))
    return next(filter(None, (attempt(source, method, place / "out") for method in methods)), None) or pytest.skip(
        f"{name} takes none of these methods"
    )


def attempt(source, method, out):
    """Where a method was applied; None where the family refuses it."""
    try:
        convert(str(source), out, Recipe([method]), check=False)
    except CtxextError:
        return None
    return out


def ids_for(model):
    return IDS[:, : getattr(model.config, "max_seq_len", IDS.shape[1])]  # MPT reads no more than its length.


def without(folder, keys, place):
    """A copy of a checkpoint whose config.json, and the language model's part of it, lacks these keys."""
    shutil.copytree(folder, place)
    config = json.loads((place / "config.json").read_text())
    for part in (config, config.get("text_config") or {}):
        for key in keys:
            part.pop(key, None)
    (place / "config.json").write_text(json.dumps(config))
    return place


def refused(folder):
    """Whether plain transformers builds or runs no model from a folder: the exception, or None.

    What loading with trust registered in this process for a configuration without a stock class is taken back first.
    """
    AutoModelForCausalLM._model_mapping._extra_content.clear()
    try:
        logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), IDS)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        return error
    return None


# Saved, they are language models alone, under another type with other classes: commands do not know the code there
# for theirs, and do not run it.
OTHER_HEADS = ("emu3", "mllama", "qwen3_5", "qwen3_5_moe")


@pytest.mark.parametrize("name", every_family())
def test_it_is_refused_without_its_code_whichever_transformers_saved_it(name, tmp_path):
    folder = converted(name, tmp_path)
    try:
        model = load(folder)
    except ValueError as error:  # Some families under some versions, by name; docs/families.md lists them.
        pytest.skip(str(error))
    before = logits(model, ids_for(model), use_cache=False)
    model.save_pretrained(tmp_path / "saved", safe_serialization=name != "zamba2")
    for number, (kind, keys) in enumerate(LOST.items()):
        for saved in (folder, tmp_path / "saved"):
            other = without(saved, keys, tmp_path / f"{saved.name}-{number}")
            if kind != "any schedule" or name not in ROPE_ALONE:
                assert refused(other) is not None, (kind, saved.name)
            if kind != "any schedule":
                assert torch.equal(logits(load(other), ids_for(model), use_cache=False), before), (kind, saved.name)
    is_known = runs_only_own_code(open_checkpoint(str(tmp_path / "saved")))
    assert is_known == (name not in OTHER_HEADS), "saving copies the code as it is"


@pytest.mark.parametrize("name", [*tiny_models.FAMILIES, "bloom", "mpt"])
def test_an_absent_hidden_key_has_the_class_default(name):
    config = CONFIG_MAPPING[name]().get_text_config(decoder=True)
    fields = config.to_dict()
    for place, (_, usual) in GUARDS.get(config.model_type, USUAL).items():
        value = fields
        for part in place.split("."):
            value = value.get(part, usual)
        assert value == usual, place


def test_the_refusal_names_the_requirement(tmp_path):
    folder = converted("llama", tmp_path)
    for keys in LOST.values():
        error = refused(without(folder, keys, tmp_path / f"lost-{len(keys)}"))
        assert SENTINEL in str(error)


def test_hidden_values_come_back_for_all_who_read_them(tmp_path, run):
    folder = converted("apertus", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert config["hidden_act"] == SENTINEL
    assert without_code(config)["hidden_act"] == "xielu"
    model = load(folder)
    assert model.config.hidden_act == SENTINEL, "what is saved from here keeps its guard"
    again = Recipe([SelfExtend(factor=4.0)])
    convert(str(folder), tmp_path / "again", again, replace_scaling=True, check=False)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["ctxext_code"]["hidden"] == {
        "hidden_act": "xielu"
    }
    assert not [finding for finding in verify(str(folder), load=False) if finding.status == "failed"]
    assert run("inspect", folder).exit_code == 0


def test_it_is_loaded_without_a_warning(tmp_path, monkeypatch):
    """transformers reads config.json before any model's code; a validator is registered before that."""
    folder = converted("llama", tmp_path)
    folder = folder.rename(tmp_path / "loaded_without_a_warning")  # Code is kept by the folder's name.
    name = f"_validate_{SENTINEL}_rope_parameters"
    if hasattr(PretrainedConfig, name):
        monkeypatch.delattr(PretrainedConfig, name)
    functions = getattr(modeling_rope_utils, "ROPE_VALIDATION_FUNCTIONS", {})
    if SENTINEL in functions:
        monkeypatch.delitem(functions, SENTINEL)
    messages = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    try:
        load(folder)
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
    assert [message for message in messages if "rope" in message.lower()] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "bloom"])
def test_a_fresh_process_prints_nothing(name, tmp_path):
    folder = converted(name, tmp_path)
    script = "import sys; from transformers import AutoModelForCausalLM as Auto\n"
    script += "Auto.from_pretrained(sys.argv[1], trust_remote_code=True)"
    done = subprocess.run([sys.executable, "-c", script, folder], capture_output=True, text=True, check=True)
    said = [line for line in done.stderr.splitlines() if line.strip() and "Loading weights" not in line]
    assert (done.stdout, said) == ("", [])


AUTO = {
    "SequenceClassification": AutoModelForSequenceClassification,
    "TokenClassification": AutoModelForTokenClassification,
    "QuestionAnswering": AutoModelForQuestionAnswering,
}


SLOW_HEADS = [pytest.param(name, marks=pytest.mark.slow) for name in ("gemma2", "falcon-rw", "mpt")]


@torch.no_grad()
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", ["llama", "qwen3", "bloom", *SLOW_HEADS])
def test_other_heads_read_by_the_method_too(name, head, tmp_path):
    folder = converted(name, tmp_path)
    auto_map = json.loads((folder / "config.json").read_text())["auto_map"]
    if f"AutoModelFor{head}" not in auto_map:
        pytest.skip(f"{name} has no such class")
    model, body = load(folder, AUTO[head], num_labels=3), load(folder, AutoModel)
    assert type(model).__name__.startswith("Ctxext")
    model.config.pad_token_id = 0  # A batch of sequences is classified at their last tokens.
    inner = getattr(model, model.base_model_prefix)
    for own, weight in zip(inner.parameters(), body.parameters(), strict=True):
        own.copy_(weight)
    ids = ids_for(model).repeat(2, 1)
    length, mask = ids.shape[1], torch.ones_like(ids)
    mask[1, : length // 5] = 0  # Left padding, without positions.
    states = []
    hook = inner.register_forward_hook(lambda *given: states.append(given[-1].last_hidden_state))
    output = model(ids, attention_mask=mask)
    hook.remove()
    wanted = body(ids, attention_mask=mask).last_hidden_state
    assert torch.equal(states[0][mask.bool()], wanted[mask.bool()])
    assert next(iter(output.values())).isfinite().all()
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved", AUTO[head])
    again.config.pad_token_id = 0
    other = again(ids, attention_mask=mask)
    assert torch.equal(next(iter(other.values())), next(iter(output.values())))


def test_a_head_that_the_installed_version_lacks_is_passed_over(tmp_path):
    folder = converted("llama", tmp_path)
    folder = folder.rename(tmp_path / "without_a_head")
    stub = folder / "modeling_ctxext.py"
    stub.write_text(stub.read_text().replace("LlamaForTokenClassification", "LlamaForTomorrow"))
    model = load(folder)
    assert logits(model, ids_for(model), use_cache=False).isfinite().all()
