"""How programs call a model: in threads, in replicas, recorded, saved, and under a transformers that renamed arguments.

Each case is right to 1e-4 of the largest logit, or refused by the name of the method.
"""

import copy
import functools
import importlib
import importlib.util
import io
import os
import re
import shutil
import sys
import threading
import uuid
from pathlib import Path

import pytest
import torch
from transformers.models.llama import modeling_llama

import loaded_models
from ctxext.files.isolated import SETTINGS
from ctxext.portable.private_copy import arguments_of
from portable_checkpoints import half_of, load, tokens
from test_modeling_family_padding import ALIBI, STEPS, models  # noqa: F401

TOLERANCE = 1e-4  # Of the largest logit.
LENGTHS = (90, 75, 60)  # The original context length is 32.
CASES = [(family, name) for family in ("llama", "qwen3", "gemma2", "gpt_neox") for name in STEPS]
CASES += [(family, "ntk-alibi") for family in ("bloom", "mpt")]
cases = pytest.mark.parametrize(("family", "name"), CASES)
CACHE = next(name for name in ("cache", "past_key_values") if name in arguments_of(modeling_llama.LlamaModel))


class Logits(torch.nn.Module):
    """A model as exporters take it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids, use_cache=False).logits


logits = functools.partial(loaded_models.logits, use_cache=False)


def text_for(model, length, seed=0):
    return tokens(length, seed=seed, vocabulary=min(64, model.config.vocab_size))


def off(found, expected):
    """Return the largest difference as a share of the largest logit."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


@cases
def test_threads(family, name, models):  # noqa: F811
    model = models(family, name)
    texts = [text_for(model, length, length) for length in LENGTHS]
    alone, found, errors = [logits(model, text) for text in texts], {}, []

    def run(number):
        try:
            found[number] = max(off(logits(model, texts[number]), alone[number]) for _ in range(3))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert max(found.values()) < TOLERANCE


@cases
def test_replicas(family, name, models, monkeypatch):  # noqa: F811
    """As `torch.nn.DataParallel` makes them, on one processor; each computes with its own weights."""
    module = importlib.import_module("torch.nn.parallel.replicate")
    monkeypatch.setattr(module, "_get_device_index", lambda device, *args, **kwargs: 0)
    monkeypatch.setattr(module, "_broadcast_coalesced_reshape", lambda tensors, *_, **__: [[*tensors] for _ in "12"])
    model = models(family, name)
    ids = text_for(model, 80)
    expected = logits(model, ids)
    first, second = module.replicate(model, [0, 1])
    assert off(logits(first, ids), expected) < TOLERANCE
    for layer in second.modules():
        layer._parameters = {key: weight if weight is None else weight * 0 for key, weight in layer._parameters.items()}
    assert logits(second, ids).abs().max() == 0, "A replica computes with the weights of the original."


def test_an_attention_without_its_layer_is_refused(models):  # noqa: F811
    """Nothing says which layer's rows it computes."""
    attention = models("llama", "self-extend").model.layers[0].self_attn
    states, tables = torch.zeros(1, 4, 32), (torch.ones(1, 4, 16), torch.zeros(1, 4, 16))
    with pytest.raises(ValueError, match="self-extend: attention was called from outside its decoder layer"):
        attention(hidden_states=states, position_embeddings=tables, attention_mask=None)


def test_a_layer_that_raises_removes_its_call(models, monkeypatch):  # noqa: F811
    """Nor does the model leave what it was given: the next attention would take both for its own."""
    layer = (model := models("llama", "self-extend")).model.layers[0]

    def out_of_memory(_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(layer.mlp, "forward", out_of_memory)
    with pytest.raises(RuntimeError, match="out of memory"):
        logits(model, text_for(model, 80))
    seam = sys.modules[type(layer.ctxext_part).__module__]
    assert seam.CURRENT.call is None
    assert seam.CURRENT.given is None


@cases
def test_recorded_by_torch_jit(family, name, models):  # noqa: F811
    """torch.jit.trace keeps the decisions of one length."""
    model = models(family, name)
    ids = text_for(model, 80)
    example = text_for(model, 40, 1)
    if family in ALIBI:
        assert off(torch.jit.trace(Logits(model), (example,), check_trace=False)(ids), logits(model, ids)) < TOLERANCE
        return
    with pytest.raises(ValueError, match=f"torch.jit.trace cannot record {name.split()[0]}"):
        torch.jit.trace(Logits(model), (example,), check_trace=False)


@pytest.mark.parametrize(
    ("family", "name"),
    [case if case[0] in ALIBI else pytest.param(*case, marks=half_of(at)) for at, case in enumerate(CASES)],
)
@pytest.mark.thorough
def test_exported_at_any_length(family, name, models):  # noqa: F811
    model = models(family, name)
    ids = text_for(model, 80)
    shapes, strict = ({1: torch.export.Dim("length", min=2, max=100)},), not name.startswith(("mspoe", "ntk"))
    example = text_for(model, 40, 1)
    if family == "mpt":  # torch cannot simplify the guards of MPT's slice of its biases, and refuses.
        with pytest.raises(torch._dynamo.exc.UserError, match="Constraints violated"):
            torch.export.export(Logits(model), (example,), dynamic_shapes=shapes, strict=strict)
        return
    exported = torch.export.export(Logits(model), (example,), dynamic_shapes=shapes, strict=strict)
    with torch.inference_mode():
        assert off(exported.module()(ids), logits(model, ids)) < TOLERANCE


@pytest.mark.thorough
def test_a_recorded_graph_has_no_levels_beyond_its_target(models):  # noqa: F811
    compiled = torch.compile(models("llama", "self-extend"), backend="eager", dynamic=True)
    positions = torch.arange(40)[None] + 900
    with torch.inference_mode(), pytest.raises(RuntimeError, match="self-extend: a position is beyond the target"):
        compiled(tokens(40), position_ids=positions, use_cache=False)
    shapes = ({1: torch.export.Dim("length", min=2, max=100)},)
    with pytest.raises(ValueError, match=r"self-extend: .* needs strict"):
        torch.export.export(Logits(models("llama", "self-extend")), (tokens(40),), dynamic_shapes=shapes, strict=False)


@cases
def test_saved_and_copied(family, name, models):  # noqa: F811
    """A model by pickle and by copy, and its cache in the middle of a text."""
    model = models(family, name)
    ids = text_for(model, 80)
    expected = logits(model, ids)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    for other in (torch.load(saved, weights_only=False), copy.deepcopy(model)):
        assert off(logits(other, ids), expected) < TOLERANCE
    with torch.inference_mode():
        output = model(ids[:, :70], use_cache=True)
        cache = output[CACHE if CACHE in output else "past_key_values"]
        saved = io.BytesIO()
        torch.save(cache, saved)
        saved.seek(0)
        caches = [torch.load(saved, weights_only=False), copy.deepcopy(cache), cache]
        found = [model(ids[:, 70:], **{CACHE: one}).logits for one in caches]
    assert off(found[0], found[2]) == off(found[1], found[2]) == 0
    if "prompt" not in name:  # The first 70 tokens may order the heads differently.
        assert off(found[0], expected[:, 70:]) < TOLERANCE


def test_a_model_saved_by_another_process(models, tmp_path, clean_processes):  # noqa: F811
    """As spawned workers get it: all that they have is the folder of the code."""
    model, ids = models("llama", "self-extend"), tokens(80)
    torch.save(model, tmp_path / "model.pt")
    torch.save((ids, logits(model, ids)), tmp_path / "expected.pt")
    place = Path(sys.modules[type(model).__module__].__file__).parents
    home = next(parent.parent for parent in place if parent.name == "transformers_modules")
    script = (
        "import sys, torch; sys.path.insert(0, sys.argv[1])\n"
        "model = torch.load(sys.argv[2] + '/model.pt', weights_only=False)\n"
        "ids, expected = torch.load(sys.argv[2] + '/expected.pt')\n"
        "with torch.inference_mode(): assert torch.equal(model(ids, use_cache=False).logits, expected)\n"
    )
    words = [sys.executable, "-c", script, str(home), str(tmp_path)]
    done = clean_processes.run(words, capture_output=True, text=True, env={**os.environ, **SETTINGS})
    assert done.returncode == 0, done.stderr


def renamed(source, what):
    """Return the text of Llama's module with an argument or an attribute of another name."""
    if what == "cache":
        source = re.sub(rf"\b{CACHE}\b", "store", source)
        source = re.sub(r"\.store\b", f".{CACHE}", source)  # Outputs keep their names, and the functions for masks.
        for block in re.findall(r"(?:create_causal_mask|ModelOutputWithPast|CausalLMOutputWithPast)\([^()]*\)", source):
            source = source.replace(block, block.replace("store=", f"{CACHE}="))
        return source
    if what == "layer_idx":
        return source.replace("self.layer_idx", "self.number")
    if what == "position_embeddings":
        return source.replace("position_embeddings", "rotary_tables").replace(
            "max_rotary_tables", "max_position_embeddings"
        )
    if what == "position_ids":  # Of the rotary embedding alone.
        head, tail = source.split("class LlamaRotaryEmbedding")
        body, rest = tail.split("\ndef rotate_half")
        rest = re.sub(
            r"(rotary_emb\([^()]*)position_ids\)",
            r"\1places=position_ids)",
            rest.replace("position_ids=position_ids)", "position_ids)"),
        )
        return f"{head}class LlamaRotaryEmbedding{body.replace('position_ids', 'places')}\ndef rotate_half{rest}"
    if what == "attention_mask":  # Of decoder layers alone.
        head, tail = source.split("class LlamaDecoderLayer")
        body, rest = tail.split("\n@auto_docstring\nclass LlamaPreTrainedModel", 1)
        body = body.replace("attention_mask", "shown").replace("shown=shown", "attention_mask=shown")
        rest = rest.replace("attention_mask=causal_mask", "shown=causal_mask")
        return f"{head}class LlamaDecoderLayer{body}\n@auto_docstring\nclass LlamaPreTrainedModel{rest}"
    assert what == "cos"
    return re.sub(
        r"def apply_rotary_pos_emb\(q, k, cos,(.*?)q_embed =", lambda m: m[0].replace("cos", "c"), source, flags=re.S
    ).replace("* cos)", "* c)")


@pytest.mark.parametrize("what", ["cache", "layer_idx", "position_embeddings", "position_ids", "attention_mask", "cos"])
@pytest.mark.parametrize("name", ["self-extend", "mspoe prompt", "distance-aware"])
def test_renamed_arguments_are_found_or_refused(what, name, models, tmp_path, monkeypatch):  # noqa: F811
    """In a transformers to come: what is decoded from a cache equals one call, or the model is not built."""
    reference, changed = models("llama", name), tmp_path / "modeling_llama.py"
    changed.write_text(renamed(Path(modeling_llama.__file__).read_text(), what))
    assert changed.read_text() != Path(modeling_llama.__file__).read_text()
    find_spec = importlib.util.find_spec

    def found(module, *args):
        if module != modeling_llama.__name__:
            return find_spec(module, *args)
        return importlib.util.spec_from_file_location(module, changed)

    monkeypatch.setattr(importlib.util, "find_spec", found)
    folder = tmp_path / f"renamed_{uuid.uuid4().hex[:8]}"
    shutil.copytree(reference.config._name_or_path, folder)
    try:
        model = load(folder)
    except ValueError as error:
        assert what in str(error) or what == "cos"  # noqa: PT017
        return
    model.load_state_dict(reference.state_dict())
    ids, cache = tokens(80), None
    taken = "store" if what == "cache" else CACHE
    with torch.inference_mode():
        expected = reference(ids, use_cache=False).logits
        assert off(model(ids, use_cache=False).logits, expected) < TOLERANCE
        output = model(ids[:, :70], use_cache=True)
        cache = output[CACHE]
        again = reference(ids[:, :70], use_cache=True)[CACHE]
        for place in range(70, 80):
            row = model(ids[:, place : place + 1], **{taken: cache}).logits
            assert off(row, reference(ids[:, place : place + 1], **{CACHE: again}).logits) < TOLERANCE


def test_a_cache_of_another_form_is_refused(models):  # noqa: F811
    """The oldest caches are tuples, which cannot report their length."""
    model, states = models("llama", "self-extend"), torch.zeros(1, 2, 5, 16)
    with pytest.raises((ValueError, TypeError, AttributeError), match="cache of transformers"):
        model(tokens(3), **{CACHE: ((states, states), (states, states))})
