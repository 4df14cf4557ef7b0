"""Guards by family: config.json of a checkpoint with code hides some values, so that no unmodified class can load it.

A guard is a key that every supported version of transformers reads and keeps when saving. With its replacement value,
no unmodified class can build or run the model. Usually it is the activation, replaced by the sentinel. The rope type is
hidden too (`layout.py`), but transformers 5 loses half of that on saving, and ALiBi has none. `ctxext_code.hidden`
keeps the true values.
"""

from collections.abc import Mapping
from typing import Any

from ctxext.errors import CtxextError

CODE_KEY = "ctxext_code"
"""The block of config.json for the portable code: `rope` is the schedule that the sentinel hides, `held` its keys that
stay at another length, `hidden` the other hidden values, `steps` one entry for each method."""

SENTINEL = "ctxext: load this checkpoint with trust_remote_code=True"
"""A rope type and activation that only the checkpoint's code supports: unmodified transformers fails to load them, with
an error that contains this text."""

_GELU_TANH = {"hidden_activation": (SENTINEL, "gelu_pytorch_tanh")}
_GELU_NEW = {"activation_function": (SENTINEL, "gelu_new")}
_TANH = {"hidden_act": (SENTINEL, "gelu_pytorch_tanh")}
_NOTHING: Mapping[str, tuple[Any, Any]] = {}
_RELU2 = {"hidden_act": (SENTINEL, "relu2")}
_XIELU = {"hidden_act": (SENTINEL, "xielu")}
_GELU = {"hidden_act": (SENTINEL, "gelu")}

GUARDS: Mapping[str, Mapping[str, tuple[Any, Any]]] = {
    **dict.fromkeys(("apertus", "apertus1p5_text"), _XIELU),
    "bloom": {"attention_dropout": (-1, 0)},
    "dbrx": {"ffn_config.ffn_act_fn.name": (SENTINEL, "silu")},
    "falcon": {"activation": (SENTINEL, "gelu")},
    "gpt_oss": {"num_experts_per_tok": (-1, 4)},  # Nothing reads its activation; this makes its first forward fail.
    "jetmoe": {"activation_function": (SENTINEL, "silu")},
    "lfm2": {"block_auto_adjust_ff_dim": (True, True), "block_ffn_dim_multiplier": (-1.0, 1.0)},  # No activation.
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
    # Only transformers 5 has these, and it always saves the rope type.
    **dict.fromkeys(("exaone", "lfm2_moe", "lfm3", "minimax_m3_vl_text"), _NOTHING),
}
"""Replacement value and class default of each guarded key of config.json, by family."""

USUAL = {"hidden_act": (SENTINEL, "silu")}

SHOWN = frozenset({"dbrx", "modernbert-decoder", "nemotron", "olmo", "olmo2", "phi3", "phi4_multimodal", "phimoe"})
"""Families that ignore or refuse an unknown rope type in some version: their rope type is not hidden."""


def code_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the block that the portable code reads; empty if a configuration has none."""
    nested = config.get("text_config")
    for part in (config, nested if isinstance(nested, Mapping) else {}):
        if isinstance(part.get(CODE_KEY), Mapping):
            return part[CODE_KEY]  # type: ignore[no-any-return]
    return {}


def hide(text: dict[str, Any], model_type: str) -> dict[str, Any]:
    """Hide values in the language model's part of a configuration, and return the true values by key."""
    guards = GUARDS.get(model_type, USUAL)
    true = {place: _swap(text, place, replacement) for place, (replacement, _) in guards.items()}
    return {place: usual if true[place] is None else true[place] for place, (_, usual) in guards.items()}


def show(text: dict[str, Any], block: Mapping[str, Any]) -> None:
    """Restore the true values in the language model's part of a configuration, in place, from its `ctxext_code`."""
    for place, value in (block.get("hidden") or {}).items():
        _swap(text, place, value)
    left = next((key for key, value in text.items() if isinstance(value, str) and value == SENTINEL), None)
    if left:
        raise CtxextError(f'"config.json": "{CODE_KEY}" lacks the hidden value of "{left}".')


def _swap(text: dict[str, Any], place: str, value: Any) -> Any:
    """Set a dotted key of a configuration, and return its previous value."""
    *path, name = place.split(".")
    for part in path:
        inner = text.get(part) or {}
        if not isinstance(inner, dict):
            raise CtxextError(f'"config.json": "{part}" is {inner!r}, expected a mapping.')
        text[part] = dict(inner)
        text = text[part]
    previous, text[name] = text.get(name), value
    return previous
