"""What config.json of a checkpoint with code hides, so that no stock class can be built from it: by family, as data.

A key that every supported transformers reads, keeps on saving and cannot build (or run) the family's model from. Mostly
the activation, whose stand-in is the sentinel; the schedule's rope type is hidden beside it (`code_layout`), but half
of that is lost where transformers 5 saves, and ALiBi has none. `ctxext_code.hidden` keeps the true values.
"""

import copy
from collections.abc import Mapping
from typing import Any

from ctxext.errors import CtxextError

CODE_KEY = "ctxext_code"
"""The block of config.json that the shipped code reads: `rope` is the schedule that the sentinel hides, `held` what of
it stays at another length, `hidden` the other values that are hidden, `steps` one entry for each method."""

SENTINEL = "ctxext_needs_trust_remote_code"
"""The rope type and the activation that only a checkpoint's own code knows: plain transformers refuses to load them."""

_GELU_TANH = {"hidden_activation": (SENTINEL, "gelu_pytorch_tanh")}
_GELU_NEW = {"activation_function": (SENTINEL, "gelu_new")}
_TANH = {"hidden_act": (SENTINEL, "gelu_pytorch_tanh")}
_NOTHING: Mapping[str, tuple[Any, Any]] = {}
_RELU2 = {"hidden_act": (SENTINEL, "relu2")}
_GELU = {"hidden_act": (SENTINEL, "gelu")}

GUARDS: Mapping[str, Mapping[str, tuple[Any, Any]]] = {
    "apertus": {"hidden_act": (SENTINEL, "xielu")},
    "bloom": {"attention_dropout": (-1, 0)},
    "dbrx": {"ffn_config.ffn_act_fn.name": (SENTINEL, "silu")},
    "falcon": {"activation": (SENTINEL, "gelu")},
    "gpt_oss": {"num_experts_per_tok": (-1, 4)},  # Its activation is read by nothing; this stops its first forward.
    "jetmoe": {"activation_function": (SENTINEL, "silu")},
    "lfm2": {"block_auto_adjust_ff_dim": (True, True), "block_ffn_dim_multiplier": (-1.0, 1.0)},  # It has none.
    "modernbert-decoder": {"hidden_activation": (SENTINEL, "gelu")},
    "mpt": {"attn_config.attn_pdrop": (-1, 0)},
    "phi": {"hidden_act": (SENTINEL, "gelu_new")},
    **dict.fromkeys(("arcee", "bitnet", "jais2", "nanochat", "nemotron", "persimmon"), _RELU2),
    **dict.fromkeys(("codegen", "gptj"), _GELU_NEW),
    **dict.fromkeys(("gemma", "starcoder2"), _TANH),
    **dict.fromkeys(
        ("gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "gemma4", "gemma4_text"), _GELU_TANH
    ),
    **dict.fromkeys(("gemma4_unified", "gemma4_unified_text", "recurrent_gemma", "vaultgemma"), _GELU_TANH),
    **dict.fromkeys(("gpt_neox", "gpt_neox_japanese", "roformer", "zamba2"), _GELU),
    # transformers 5 alone has these, and it keeps the rope type wherever it saves.
    **dict.fromkeys(("lfm2_moe", "lfm3", "minimax_m3_vl_text"), _NOTHING),
}
"""For each place in config.json what stands in for its value, and what the family's class assumes by default."""

_USUAL = {"hidden_act": (SENTINEL, "silu")}

_OLDER = {"bloom": "attention_dropout", "falcon": "attention_dropout", "mpt": "attn_config.attn_pdrop"}
_OLDER_ACTIVATIONS = {"dbrx": "ffn_config.ffn_act_fn.name", "modernbert-decoder": "hidden_activation"}
# Where 0.1.0 and 0.2.0 hid a dropout, and where an activation that is not `hidden_act`.

SHOWN = frozenset({"dbrx", "modernbert-decoder", "nemotron", "olmo", "olmo2", "phi3", "phi4_multimodal", "phimoe"})
"""Families that in some version pass over a foreign rope type, or whose class refuses one: their own stays in sight."""


def hide(text: dict[str, Any], model_type: str) -> dict[str, Any]:
    """Put the stand-ins into the language model's part of a configuration, and return the true values by place."""
    guards = GUARDS.get(model_type, _USUAL)
    true = {place: _swap(text, place, stand_in) for place, (stand_in, _) in guards.items()}
    return {place: usual if true[place] is None else true[place] for place, (_, usual) in guards.items()}


def show(text: dict[str, Any], block: Mapping[str, Any]) -> None:
    """Put the true values back.

    Args:
        text: The language model's part of a configuration; changed.
        block: What `ctxext_code` says there.

    Raises:
        CtxextError: a value is hidden, and the block lacks it.
    """
    for place, value in true_values(block, str(text.get("model_type"))).items():
        _swap(text, place, value)
    left = next((key for key, value in text.items() if isinstance(value, str) and value == SENTINEL), None)
    if left:
        raise CtxextError(f'"config.json": "{CODE_KEY}" lacks "{left}", which is hidden beside it.')


def true_values(block: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """What a block says that is hidden, by place, whichever version wrote it."""
    if "hidden" in block:
        return dict(block["hidden"] or {})
    found = {}
    if "dropout" in block:
        found[_OLDER.get(model_type, "attention_dropout")] = block["dropout"]
    if block.get("hidden_act"):
        found[_OLDER_ACTIVATIONS.get(model_type, "hidden_act")] = block["hidden_act"]
    return found


def is_older(config: Mapping[str, Any]) -> bool:
    """Whether a configuration has a block as 0.2.0 wrote it, before there was a guard for every family."""
    block = _block_of(config)
    return isinstance(block, Mapping) and "steps" in block and "hidden" not in block


def upgraded(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with the guards of this version; the very same object where it has them."""
    if not is_older(config):
        return config
    config = copy.deepcopy(config)
    text = config if CODE_KEY in config else config["text_config"]
    block, model_type = text[CODE_KEY], str(text.get("model_type") or config.get("model_type"))
    for place, value in true_values(block, model_type).items():
        _swap(text, place, value)
    shown = {"shown": True} if "rope" in block and model_type in SHOWN else {}
    rest = {key: value for key, value in block.items() if key not in ("hidden_act", "dropout", "steps")}
    text[CODE_KEY] = {**rest, **shown, "hidden": hide(text, model_type), "steps": block["steps"]}
    return config


def _block_of(config: Mapping[str, Any]) -> Any:
    nested = config.get("text_config")
    return config.get(CODE_KEY) or (nested.get(CODE_KEY) if isinstance(nested, Mapping) else None)


def _swap(text: dict[str, Any], place: str, value: Any) -> Any:
    """Put a value at a dotted place of a configuration, and return what was there."""
    *path, name = place.split(".")
    for part in path:
        inner = text.get(part) or {}
        if not isinstance(inner, dict):
            raise CtxextError(f'"config.json": "{part}" is {inner!r}, expected a mapping.')
        text[part] = dict(inner)
        text = text[part]
    was, text[name] = text.get(name), value
    return was
