"""Every key that says how a model rotates and attends, null, absent and at its default, against the loaded class.

For each family of the installed transformers a tiny configuration is changed in one key, in the dialects of
transformers 5 and 4. What this package reads from it must be what a model of that class does in a real forward: the
angles of its full-attention layers, which layers see a window, and the numbers of the configuration. Or it is refused
with a reason.
"""

import copy
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import tiny_models
from ctxext.checkpoint.families import (
    family_of,
    full_attention_layers,
    read,
    serves_sliding,
    sliding_layers,
    text_config,
)
from ctxext.checkpoint.geometry import check_sizes
from ctxext.errors import CtxextError
from ctxext.recipes.encodings.frequencies import inverse_frequencies
from ctxext.recipes.encodings.rotary import attention_scaling
from ctxext.recipes.model_config import model_config

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
from measure_rope_types import LENGTH, angles, close, load

QUICK = ("llama", "olmo_hybrid", "gpt_oss", "gemma4_text", "ministral3", "falcon", "seed_oss", "olmo3", "apertus")
KEYS = (
    *("alibi", "attention_chunk_size", "attn_layer_indices", "full_attention_interval", "full_attn_idxs", "head_dim"),
    *("global_attn_every_n_layers", "global_head_dim", "global_rope_theta", "hybrid_layer_ids", "layer_group_size"),
    *("layer_rope_theta", "layer_types", "layers_block_type", "local_attention", "local_rope_theta", "rotary_dim"),
    *("max_position_embeddings", "max_window_layers", "no_rope_layer_interval", "no_rope_layers", "rotary_pct"),
    *("num_key_value_heads", "original_max_position_embeddings", "partial_rotary_factor", "position_embedding_type"),
    *("qk_rope_head_dim", "rope_local_base_freq", "rope_parameters", "rope_scaling", "rope_theta", "rotary_emb_base"),
    *("sliding_window", "sliding_window_pattern", "swa_rope_theta", "use_mem_rope", "use_sliding_window"),
    "use_long_context",
)
SCHEDULES, OF_SCHEDULE = ("rope_parameters", "rope_scaling"), ("rope_type", "rope_theta", "partial_rotary_factor")
ABSENT = object()
NO_LAYOUT = {"moshi"}  # Its windows are in flash attention alone, not in a mask.


def text_of(config):
    return config["text_config"] if isinstance(config.get("text_config"), dict) else config


def changed(config, place, value):
    config = copy.deepcopy(config)
    inside = text_of(config)
    for name in place[:-1]:
        inside = inside[name]
    if value is ABSENT:
        inside.pop(place[-1], None)
    else:
        inside[place[-1]] = value
    return config


def older(config):
    """The same in the dialect of transformers 4, which has the base at the top; None if the two are the same."""
    config = copy.deepcopy(config)
    text = text_of(config)
    schedule = text.get("rope_parameters")
    if not isinstance(schedule, dict) or any(isinstance(value, dict) for value in schedule.values()):
        return None
    family = family_of(config)
    if schedule.get("rope_type") != "default" or family.explicit_default:
        return None
    del text["rope_parameters"]
    text[family.theta_key] = schedule["rope_theta"]
    if "partial_rotary_factor" in schedule:
        text[family.partial_key or "partial_rotary_factor"] = schedule["partial_rotary_factor"]
    return config


def variants(config, defaults):
    """Yield a label and a configuration for every key and value."""
    text = text_of(config)
    for key in KEYS:
        values = {"null": None, **({"absent": ABSENT} if key in text else {})}
        if key in defaults and key not in ("layer_types", "max_position_embeddings", "num_key_value_heads"):
            values["default"] = defaults[key]
        for label, value in values.items() if key in text or key in defaults or key.startswith("rope_") else ():
            yield f"{key} {label}", changed(config, (key,), value)
    plain = {key: value for key, value in text.items() if key not in SCHEDULES}
    alone = {**plain, "rope_theta": 5000.0}
    yield "rope_theta alone", {**config, "text_config": alone} if text is not config else alone
    for name in SCHEDULES:
        schedule = text.get(name)
        nested = [(name, kind) for kind, value in (schedule or {}).items() if isinstance(value, dict)]
        for place in nested or ([(name,)] if isinstance(schedule, dict) else []):
            for key in OF_SCHEDULE:
                for label, value in (("null", None), ("absent", ABSENT)):
                    yield f"{'.'.join(place)}.{key} {label}", changed(config, (*place, key), value)
            if len(place) == 2:
                yield f"{'.'.join(place)} null", changed(config, place, None)
                yield f"{'.'.join(place)} absent", changed(config, place, ABSENT)


def attention_seen(model):
    """Record for each layer whether its last query sees the first key; returns the record and the hooks."""
    seen = {}

    def watch(layer):
        def hook(_module, given, named, _result):
            masks = [named.get("attention_mask"), *given]
            shape = (LENGTH, LENGTH)
            for mask in masks:
                if torch.is_tensor(mask) and mask.ndim == 4 and mask.shape[-2:] == shape:
                    value = mask[0, 0, -1, 0]
                    seen[layer] = bool(value) if mask.dtype == torch.bool else bool(value > -1)
                    return

        return hook

    return seen, [
        module.register_forward_hook(watch(int(found[1])), with_kwargs=True)
        for name, module in model.named_modules()
        if (found := re.search(r"layers\.(\d+)\.[a-z_]*att[a-z]*$", name))
    ]


def of_class(config):
    """Return what the class does: angles by module, layers that see everything, and the configuration it computes."""
    model = load(config)
    model.set_attn_implementation("eager")
    seen, hooks = attention_seen(model)
    rotated = angles(model)
    for hook in hooks:
        hook.remove()
    return rotated, seen, model.config.get_text_config(decoder=True)


def fault(config):
    """Return how what is read differs from what the class does; empty if it agrees, is refused, or the class fails."""
    try:
        check_sizes(config, "config.json")
        family = family_of(config)
        if family.fixed:
            return ""
        rotary = model_config(config).rotary if family.positions == "rotary" and not family.reason else None
    except CtxextError:
        return ""
    try:
        rotated, seen, computed = of_class(config)
    except Exception as error:  # However transformers refuses a configuration, no model of it is converted.
        is_read = rotary is not None
        return (
            f"{type(error).__name__}, but read as {rotary.describe()}" if is_read and has_null(config, family) else ""
        )
    used = {name: found for name, found in rotated.items() if not serves_sliding(config, family, name)}
    if family.layer_theta_key:
        used = {name: found for name, found in used.items() if "embs." not in name}
    if rotary is None:
        return f"positions {family.positions}, but it rotates" if used and family.positions != "rotary" else ""
    full, sliding = full_attention_layers(config, family), sliding_layers(config, family)
    wanted, scaling = inverse_frequencies(rotary), attention_scaling(rotary)
    wanted = torch.tensor([*wanted, *([0.0] if rotary.span > rotary.dim else [])], dtype=torch.float64)
    if full and not used and not family.layer_theta_key:
        return "nothing rotates"
    for name, (angle, factor) in used.items():
        if not close(angle, wanted.unique()):
            return f"{name} rotates by {len(angle)} other angles"
        if abs(factor / scaling - 1) > 2e-5:
            return f"{name} has the factor {factor}, not {scaling}"
    if family.model_type not in NO_LAYOUT:
        window = read(config, family, "attention_chunk_size") or read(config, family, "sliding_window") or 0
        for layer, sees_all in seen.items():
            if (layer in full and not sees_all) or (layer in sliding and sees_all and window < LENGTH):
                return f"layer {layer} {'sees everything' if sees_all else 'has a window'}"
    heads = getattr(computed, "num_key_value_heads", None)
    if isinstance(heads, int) and not family.shared_rotary_key and heads != read(config, family, "num_key_value_heads"):
        return f"{heads} KV heads"
    length = getattr(computed, "max_position_embeddings", None)
    if isinstance(length, int) and length != read(config, family, "max_position_embeddings"):
        return f"max_position_embeddings {length}"
    return ""


def has_null(config, family):
    """Whether a schedule that is read has a null."""
    text = text_config(config, family)
    schedules = [text.get(name) for name in SCHEDULES if isinstance(text.get(name), dict)]
    schedules += [
        schedule[name] for schedule in schedules for name in family.full_types if isinstance(schedule.get(name), dict)
    ]
    return any(schedule.get(key, 0) is None for schedule in schedules for key in OF_SCHEDULE)


def faults_of(config, defaults):
    bases = {"": config, "in the older dialect: ": older(config)}
    return {
        prefix + label: words
        for prefix, base in bases.items()
        if base is not None
        for label, other in (("as it is", base), *variants(base, defaults))
        if (words := fault(other))
    }


def tiny(model_type, folder):
    tiny_models.tiny_config(model_type).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    inner = text_of(config).get("model_type", model_type)
    try:
        defaults = CONFIG_MAPPING[inner]().to_dict()
    except (KeyError, TypeError, ValueError, AttributeError):
        defaults = {}
    return config, defaults


@pytest.mark.parametrize(
    "model_type",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.thorough)
        for name in (*tiny_models.FAMILIES, *tiny_models.ENCODERS)
    ],
)
def test_null_absent_and_default_are_read_as_the_class_reads_them(model_type, tmp_path):
    assert faults_of(*tiny(model_type, tmp_path)) == {}
