"""How an Ms-PoE checkpoint is laid out: its config.json, and the stub that names its family.

The weights stay as they are. `config.json` keeps the stock `model_type` and gains three things: a class of its own
(`architectures`, `auto_map`), a rope type that only the shipped code understands, so that loading it as a stock model
fails instead of being silently wrong, and one block with the numbers, which `portable/modeling_mspoe.py` reads.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ctxext.errors import CtxextError

CODE_FILE = "modeling_mspoe.py"
STUB_FILE = "modeling_ctxext.py"
KEY = "ctxext_mspoe"
LATCH = "ctxext_needs_trust_remote_code"

ROPE_KEYS = ("rope_parameters", "rope_scaling")


@dataclass(frozen=True)
class Classes:
    """The family's own classes.

    Args:
        modeling: The module that defines them, for example `transformers.models.llama.modeling_llama`.
        model: The model without a head, for example `LlamaModel`.
        causal_lm: The model with a language modeling head, for example `LlamaForCausalLM`.
    """

    modeling: str
    model: str
    causal_lm: str


def family_classes(config: Mapping[str, Any]) -> Classes:
    """Name the classes of a configuration's family, without importing its modeling code.

    Raises:
        CtxextError: If transformers has no causal language model of this type.
    """
    from transformers.models.auto.configuration_auto import model_type_to_module_name
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

    model_type = str(config.get("model_type", ""))
    causal_lm = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    model = MODEL_MAPPING_NAMES.get(model_type)
    if causal_lm is None or model is None:
        raise CtxextError(f'"{model_type}" is not a causal language model that this transformers knows.')
    model = model if isinstance(model, str) else model[0]
    module = model_type_to_module_name(model_type)
    return Classes(f"transformers.models.{module}.modeling_{module}", model, causal_lm)


def ratio_grid(ratio_min: float, ratio_max: float, num_heads: int, *, released: bool = False) -> list[float]:
    """Ratios from the smallest to the largest, one per key head. The released code's grid stops one step short."""
    steps = num_heads if released else max(num_heads - 1, 1)
    return [ratio_min + (ratio_max - ratio_min) * i / steps for i in range(num_heads)]


def ranks_from_scores(scores: Sequence[float]) -> list[int]:
    """Number each head's ratio: the most aware head takes the first and smallest, ties go to the lower head."""
    order = sorted(range(len(scores)), key=lambda head: (-scores[head], head))
    return [order.index(head) for head in range(len(scores))]


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a configuration that describes the text model: its own, or that of a larger model's text tower."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def num_key_heads(config: Mapping[str, Any]) -> int:
    """How many key heads each attention layer has."""
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    for key in ("num_key_value_heads", "num_kv_heads", "num_attention_heads", "n_head", "n_heads"):
        if config.get(key) is not None:
            return int(config[key])
    raise CtxextError("The configuration does not say how many attention heads the model has.")


def num_layers(config: Mapping[str, Any]) -> int:
    """How many decoder layers the model has."""
    for key in ("num_hidden_layers", "n_layers", "n_layer", "num_layers"):
        if config.get(key) is not None:
            return int(config[key])
    raise CtxextError("The configuration does not say how many layers the model has.")


def trained_length(config: Mapping[str, Any]) -> int:
    """The length the model was trained at, before any extension."""
    for entry in (config, *(config.get(key) or {} for key in ROPE_KEYS)):
        if entry.get("original_max_position_embeddings"):
            return int(entry["original_max_position_embeddings"])
    return int(config.get("max_position_embeddings") or config.get("max_seq_len") or 2048)


def full_attention_layers(config: Mapping[str, Any], first_layer: int) -> list[int]:
    """The layers that take part: from `first_layer` on, without those whose window is shorter than the trained length."""
    types = config.get("layer_types")
    layers = range(first_layer, num_layers(config))
    if types:
        return [i for i in layers if "sliding" not in types[i] and "chunked" not in types[i]]
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    return [] if window is not None and window < trained_length(config) else list(layers)


def base_schedule(config: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """The model's own schedule without its base, and the layer type it belongs to where there is one per layer type."""
    schedule = next((config[key] for key in ROPE_KEYS if config.get(key)), None) or {}
    layer_type = "full_attention" if isinstance(schedule.get("full_attention"), Mapping) else None
    schedule = dict(schedule[layer_type] if layer_type else schedule)
    kind = schedule.pop("type", None)
    schedule.setdefault("rope_type", kind or "default")
    if schedule["rope_type"] in {"yarn", "longrope", "llama3"}:
        schedule.setdefault("original_max_position_embeddings", trained_length(config))
    return schedule, layer_type


def edit_config(
    config: Mapping[str, Any],
    *,
    ratio_min: float = 1.2,
    ratio_max: float = 1.8,
    head_order: str = "prompt",
    first_layer: int = 2,
    schedule: str = "linear",
    rescale: str = "uniform",
    rescale_start: int | None = None,
    rescale_end: int | None = None,
    variant: str = "paper",
    beta_fast: float = 8.0,
    beta_slow: float = 1.0,
    orders: Sequence[Sequence[int]] | None = None,
    classes: Classes | None = None,
) -> dict[str, Any]:
    """Return the configuration of the Ms-PoE checkpoint.

    Args:
        config: The source's config.json, already edited by the methods before this one.
        ratio_min: Ratio of the most aware key head.
        ratio_max: Ratio of the least aware key head.
        head_order: `prompt`, `calibrated` or `fixed`.
        first_layer: The layers before it keep their rotary embedding.
        schedule: `linear`, `ntk` or `by-parts`: how a ratio slows the frequencies of a head.
        rescale: `uniform`, or `middle` to compress only the positions from `rescale_start` to `rescale_end`.
        rescale_start: First position of the compressed stretch.
        rescale_end: Last position of the compressed stretch.
        variant: `paper`, or `released` for the grid and the order of the authors' code.
        beta_fast: `by-parts` keeps frequencies that turn more often than this within the trained length.
        beta_slow: `by-parts` fully slows frequencies that turn less often than this.
        orders: For `calibrated`: for each layer that takes part, the ratio number of each key head.
        classes: The family's classes, by default those that transformers maps the model type to.

    Raises:
        CtxextError: If the options contradict each other or the model.
    """
    edited = copy.deepcopy(dict(config))
    text = edited["text_config"] if text_config(edited) is not edited else edited
    classes = classes or family_classes(edited)
    heads, layers = num_key_heads(text), full_attention_layers(text, first_layer)
    if not layers:
        raise CtxextError(
            f"No layer from {first_layer} on has full attention, so Ms-PoE would change nothing.",
            hint="a smaller --first-layer, or another model: sliding-window layers keep their rotary embedding.",
        )
    released = variant == "released"
    if released and heads != int(text.get("num_attention_heads", heads)):
        raise CtxextError(
            "--variant released needs as many key heads as query heads: on grouped queries the released code rotates "
            "keys and queries by different ratios.",
            hint="--variant paper",
        )
    own, layer_type = base_schedule(text)
    settings: dict[str, Any] = {
        "ratios": ratio_grid(ratio_min, ratio_max, heads, released=released),
        "layers": layers,
        "schedule": schedule,
        "rescale": "uniform",
        "variant": variant,
    }
    if head_order == "fixed":
        settings["ranks"] = [list(range(heads)) for _ in layers]
    elif head_order == "calibrated":
        settings["ranks"] = checked_orders(orders, len(layers), heads)
    if rescale == "middle":
        if schedule != "linear":
            raise CtxextError(f"--rescale middle compresses positions, which --schedule {schedule} does not do.")
        if rescale_start is None or rescale_end is None or not 0 <= rescale_start < rescale_end:
            raise CtxextError("--rescale middle needs where the compressed stretch starts and ends.")
        settings["rescale"] = [rescale_start, rescale_end]
    if schedule == "by-parts":
        settings |= {"trained_length": trained_length(text), "beta_fast": beta_fast, "beta_slow": beta_slow}
    settings["rope"] = {key: value for key, value in own.items() if key not in {"rope_theta", "partial_rotary_factor"}}
    text[KEY] = settings
    latch(text, own, layer_type)
    edited["architectures"] = [f"MsPoE{classes.causal_lm}"]
    stub = STUB_FILE.removesuffix(".py")
    edited["auto_map"] = {
        **edited.get("auto_map", {}),
        "AutoModel": f"{stub}.MsPoE{classes.model}",
        "AutoModelForCausalLM": f"{stub}.MsPoE{classes.causal_lm}",
    }
    return edited


def checked_orders(orders: Sequence[Sequence[int]] | None, layers: int, heads: int) -> list[list[int]]:
    """The calibrated orders, if each layer that takes part has one and each is a permutation."""
    if orders is None or len(orders) != layers or any(sorted(order) != list(range(heads)) for order in orders):
        raise CtxextError(f"A calibrated order needs {layers} layers with {heads} ratio numbers each.")
    return [list(order) for order in orders]


def latch(text: dict[str, Any], own: Mapping[str, Any], layer_type: str | None) -> None:
    """Put the rope type that only the shipped code understands in the place of the model's own, in both dialects."""
    entry = {"rope_type": LATCH}
    entry |= {key: own[key] for key in ("rope_theta", "partial_rotary_factor") if key in own}
    if "rope_theta" not in entry and text.get("rope_theta") is not None:
        entry["rope_theta"] = text["rope_theta"]
    if layer_type is None:
        text["rope_parameters"] = dict(entry)
        if "rope_theta" in entry:
            text["rope_theta"] = entry["rope_theta"]
    else:
        text["rope_parameters"] = {**text["rope_parameters"], layer_type: dict(entry)}
    text["rope_scaling"] = dict(entry)


def render_stub(classes: Classes) -> str:
    """The text of the stub file: which family this checkpoint belongs to."""
    return f'''"""{classes.causal_lm} with Ms-PoE: one position scale per attention head. The method is in {CODE_FILE}."""

from .{CODE_FILE.removesuffix(".py")} import family

modeling = family(__name__, "{classes.modeling}")


class MsPoE{classes.model}(modeling.{classes.model}):
    """{classes.model} with Ms-PoE."""


class MsPoE{classes.causal_lm}(modeling.{classes.causal_lm}):
    """{classes.causal_lm} with Ms-PoE."""


MsPoE{classes.model}.register_for_auto_class("AutoModel")
MsPoE{classes.causal_lm}.register_for_auto_class("AutoModelForCausalLM")
'''
