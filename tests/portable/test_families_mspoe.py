"""Every rotary family: ratio 1 is the source, a uniform ratio is position interpolation, and ratio 4 changes something.

A family is either refused with a reason, or it passes all three. Then families of another structure: a language model
that is part of a larger model, and one that runs a layer at several depths.
"""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import tiny_models
from ctxext.checkpoint.families import FAMILIES, family_of, rotated_layers
from ctxext.errors import CtxextError
from ctxext.recipes import MsPoE
from portable_checkpoints import MODERN, convert, load, tokens, write

QUICK = ["llama", "qwen2", "qwen3", "mistral", "gemma3_text", "phi3", "gpt_neox", "falcon", "glm", "cohere", "granite"]
QUICK += ["stablelm", "olmo2", "mixtral", "gemma2", "gemma4_text", "qwen3_5_text"]
MINIMUM, MINIMUM_4 = 95, 65
# Loading says so under transformers 4.57: their rotary embedding is asked for a length, or for all layers alike.
NOT_IN_4 = {"modernbert-decoder", "phimoe"}


def plain_source(model_type, folder):
    """A tiny checkpoint whose rotated layers all look back over the whole context, where the family can say so."""
    folder = tiny_models.save(model_type, folder)
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    if not rotated_layers(config, family_of(config)):
        if "layer_types" in text:
            text["layer_types"] = [
                "full_attention" if "sliding" in name or "chunked" in name else name for name in text["layer_types"]
            ]
        if FAMILIES[text["model_type"]].rotated == "unless_window" or "layer_types" not in text:
            text["sliding_window"] = None
    if not MODERN:
        for key in ("rope_theta", "partial_rotary_factor"):  # 4.57 reads them one level up.
            (text.get("rope_scaling") or {}).pop(key, None)
    (folder / "config.json").write_text(json.dumps(config))
    return folder, config


def rotary_modules(model):
    for name, module in model.named_modules():
        buffers = [key for key, _ in module.named_buffers(recurse=False) if key.endswith("inv_freq")]
        if buffers and not any(word in name for word in ("vision", "visual", "audio")):
            yield name, module, buffers


def slowed(folder, config, factor):
    """The stock model whose full-attention layers turn `factor` times slower: position interpolation by hand."""
    model, plain = load(folder), load(folder)
    full = rotated_layers(config, family_of(config))
    apart = False
    for name, module, buffers in rotary_modules(model):
        nested = set(buffers) - {"inv_freq", "original_inv_freq"}
        apart |= bool(nested) or "local" in name or "sliding" in name
        for key in buffers:
            if "local" not in name and "sliding" not in name and "sliding" not in key:
                getattr(module, key).data /= factor
    if apart:
        return model
    # One rotary embedding for all layers: those with a window get what they had.
    (_, rotary, _), *_ = rotary_modules(plain)

    def keep(_, args, kwargs):
        hidden = args[0] if args else kwargs["hidden_states"]
        return args, kwargs | {"position_embeddings": rotary(hidden, kwargs["position_ids"])}

    for layer in model.modules():
        for attention in layer.children():
            index = getattr(attention, "layer_idx", None)
            if hasattr(attention, "q_proj") and isinstance(index, int) and index >= 0 and index not in full:
                layer.register_forward_pre_hook(keep, with_kwargs=True)
    return model


@torch.no_grad()
def check(model_type, folder):
    """Run the three checks, or return why the family is refused."""
    source, config = plain_source(model_type, folder / "source")
    ids = torch.randint(3, 128, (2, 24), generator=torch.Generator().manual_seed(0))
    options = {"first_layer": 0, "head_order": "fixed"}
    try:
        same = convert(source, folder / "same", ratio_min=1.0, ratio_max=1.0, **options)
    except CtxextError as error:
        return str(error)
    logits = load(source)(input_ids=ids).logits
    assert torch.equal(load(same)(input_ids=ids).logits, logits), "ratio 1 is not the source"
    changed = load(convert(source, folder / "four", ratio_min=4.0, ratio_max=4.0, **options))(input_ids=ids).logits
    assert (changed - logits).abs().max() > 1e-3, "ratio 4 changes nothing"
    if model_type != "phimoe":  # It computes its frequencies anew at each call, so slowing a buffer has no effect.
        expected = slowed(source, config, 4.0)(input_ids=ids).logits
        torch.testing.assert_close(changed, expected, rtol=1e-5, atol=1e-5, msg="not position interpolation")
    return ""


@pytest.mark.parametrize("model_type", QUICK)
def test_family(model_type, tmp_path):
    if model_type not in tiny_models.FAMILIES:
        pytest.skip(f"this transformers has no {model_type}")
    assert check(model_type, tmp_path) == ""


@pytest.mark.slow
def test_all_families(tmp_path):
    passed, refused, failed = [], {}, {}
    for model_type in tiny_models.FAMILIES:
        try:
            reason = check(model_type, tmp_path / model_type)
        except Exception as error:
            failed[model_type] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        if reason:
            refused[model_type] = reason
        else:
            passed.append(model_type)
    print(f"{len(passed)} of {len(tiny_models.FAMILIES)} families carry Ms-PoE:", *passed)  # noqa: T201
    print(*(f"{name}: {reason}" for name, reason in refused.items()), sep="\n")  # noqa: T201
    assert failed.keys() == (set() if MODERN else NOT_IN_4)
    assert len(passed) >= (MINIMUM if MODERN else MINIMUM_4)


IDS = torch.arange(3, 40)[None]


def whole(model_type, folder):
    """A tiny random model, images and text, as a checkpoint."""
    torch.manual_seed(0)
    config = tiny_models.tiny_config(model_type)
    model = AutoModelForImageTextToText._model_mapping[type(config)]._from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim >= 2:
                weight.normal_(0, 0.3)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def logits(kind, folder, **options):
    model = kind.from_pretrained(folder, dtype=torch.float32, **options).eval()
    return model(input_ids=IDS).logits, type(model).__name__


@pytest.mark.parametrize("model_type", ["gemma3", "qwen3_5", "mllama"])
def test_the_whole_model_loads_with_the_method(model_type, tmp_path):
    if model_type not in tiny_models.FAMILIES:
        pytest.skip(f"this transformers has no {model_type}")
    source = whole(model_type, tmp_path / "source")
    stock, name = logits(AutoModelForImageTextToText, source)
    for ratio in (1.0, 4.0):
        folder = tmp_path / f"ratio_{ratio:g}_{model_type}"
        shutil.copytree(source, folder)
        write(folder, MsPoE(head_order="fixed", first_layer=0, ratio_min=ratio, ratio_max=ratio))
        converted, own = logits(AutoModelForImageTextToText, folder, trust_remote_code=True)
        assert own == f"Ctxext{name}"
        assert torch.equal(converted, stock) == (ratio == 1.0)
        assert torch.equal(logits(AutoModelForCausalLM, folder, trust_remote_code=True)[0], converted)
    with pytest.raises((KeyError, ValueError), match="trust_remote_code"):
        AutoModelForImageTextToText.from_pretrained(folder)


def test_llama4_is_refused_by_name(tmp_path):
    source = whole("llama4", tmp_path / "source")
    with pytest.raises(CtxextError, match='"llama4" cannot be converted: its full-attention layers have no position'):
        write(source, MsPoE(head_order="fixed"))


@pytest.mark.skipif("hrm_text" not in CONFIG_MAPPING, reason="transformers 4.57 does not know the family")
@torch.no_grad()
def test_the_last_depth_alone_takes_part(tmp_path):
    """A method takes each depth for a layer. Keys of all depths before the last are the source's, bit for bit."""
    source = tiny_models.save("hrm_text", tmp_path / "source")
    stock = load(source)
    count = stock.config.num_hidden_layers
    assert count > stock.config.num_layers_per_stack
    options = {"ratio_min": 2.0, "ratio_max": 4.0, "head_order": "fixed"}
    changed = load(convert(source, tmp_path / "out", first_layer=count - 1, **options))
    ids = tokens(40)
    own, theirs = (model(ids, use_cache=True).past_key_values for model in (stock, changed))
    same = [torch.equal(own.layers[i].keys, theirs.layers[i].keys) for i in range(count)]
    assert same == [True] * (count - 1) + [False]
