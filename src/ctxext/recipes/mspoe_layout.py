"""How an Ms-PoE checkpoint is laid out: its config.json, and the stub that names its family.

The weights stay as they are. `config.json` keeps the stock `model_type` and gains three things: classes of its own
(`architectures`, `auto_map`), a rope type that only the shipped code understands, so that loading it as a stock model
fails instead of being silently wrong, and one block with the numbers, which `portable/modeling_mspoe.py` reads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ctxext.errors import CtxextError
from ctxext.families import Family, family_of, read, rotated_layers, text_config
from ctxext.recipes.rotary import LATCH, Config, read_rotary, unsupported, write_rotary

CODE_FILE = "modeling_mspoe.py"
STUB_FILE = "modeling_ctxext.py"
KEY = "ctxext_mspoe"

_TOWER = "its language model is another family's; convert that family's own checkpoint"
_INDEXER = "its indexer reads the same rotary embedding, which must stay the model's own"

# Families whose attention the shipped code cannot reach, and why.
UNREACHED: Mapping[str, str] = {
    "blt": "four models in one, each with a rotary embedding",
    "fuyu": _TOWER,
    "got_ocr2": _TOWER,
    "moshi": "its decoder layers do not see its position embeddings",
    "moss_transcribe_diarize": _TOWER,
    "qwen4_exp": _INDEXER,
    "qwen4_exp_text": _INDEXER,
}

# Families that take a fixed order of heads only, and why.
FIXED_ONLY: Mapping[str, str] = dict.fromkeys(
    ("gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"),
    "its attention rotates queries before it computes keys, and some layers use the keys of others",
)

# Families whose configuration class accepts no rope types but its own, in some version: the latch is their activation.
OWN_ROPE_TYPES = frozenset({"olmo", "olmo2", "phi3", "phi4_multimodal", "phimoe"})

# What belongs to a schedule. Engines multiply lengths by a `factor`, so none may stay beside the latch.
_SCHEDULE = frozenset(
    {
        "rope_type",
        "type",
        "factor",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    }
    | {"low_freq_factor", "high_freq_factor", "short_factor", "long_factor", "short_mscale", "long_mscale"}
)


@dataclass(frozen=True)
class Classes:
    """The family's own classes.

    Attributes:
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
        CtxextError: transformers has no causal language model of this type.
    """
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    causal_lms, models = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_MAPPING_NAMES
    model_type = str(config.get("model_type"))
    causal_lm = causal_lms.get(model_type)
    inner = str((config.get("text_config") or {}).get("model_type"))
    if causal_lm is not None and causal_lms.get(inner) == causal_lm:
        model_type = inner  # The text model of a larger one, in a checkpoint with the whole model's configuration.
    model = models.get(model_type)
    if causal_lm is None or not isinstance(model, str):
        raise CtxextError(f'The installed transformers has no causal language model of type "{model_type}".')
    # A model type without code of its own borrows another's classes (internlm3 those of llama).
    for name in (model_type, *(other for other, borrowed in causal_lms.items() if borrowed == causal_lm)):
        module = model_type_to_module_name(name)
        if find_spec(modeling := f"transformers.models.{module}.modeling_{module}"):
            return Classes(modeling, model, causal_lm)
    raise CtxextError(f'The installed transformers has no modeling code for "{model_type}".')


def find_spec(module: str) -> bool:
    """Whether a module is installed, without importing it."""
    import importlib.util

    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def refusal(family: Family) -> str:
    """Why a family cannot carry Ms-PoE, whatever the numbers; empty where it can."""
    if family.positions != "rotary":
        return f"{family.positions} positions, not rotary"
    if family.shared_rotary_key:
        return "latent attention: all heads share one rotated key, so they cannot have scales of their own"
    return family.reason or UNREACHED.get(family.model_type, "")


def ratio_grid(ratio_min: float, ratio_max: float, num_heads: int, *, released: bool = False) -> list[float]:
    """Ratios from the smallest to the largest, one per key head. The released code's grid stops one step short."""
    steps = num_heads if released else max(num_heads - 1, 1)
    return [ratio_min + (ratio_max - ratio_min) * i / steps for i in range(num_heads)]


def ranks_from_scores(scores: Sequence[float]) -> list[int]:
    """Number each head's ratio: the most aware head takes the first and smallest, ties go to the lower head."""
    order = sorted(range(len(scores)), key=lambda head: (-scores[head], head))
    return [order.index(head) for head in range(len(scores))]


def scaled_layers(config: Mapping[str, Any], family: Family, first_layer: int) -> list[int]:
    """The layers that take part: from `first_layer` on, those with full attention and a rotary embedding.

    Raises:
        CtxextError: there are none.
    """
    full = rotated_layers(config, family)
    layers = [index for index in full if index >= first_layer]
    if not full:
        raise CtxextError(
            "Every layer with a rotary embedding has a sliding window, and those keep it: Ms-PoE would change nothing."
        )
    if not layers:
        raise CtxextError(
            f"No layer from {first_layer} on has full attention.", hint=f"--first-layer {full[-1]} or less."
        )
    return layers


def edit_config(
    config: Config,
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
) -> Config:
    """The configuration of the Ms-PoE checkpoint, as a copy.

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
        classes: The family's classes; by default what transformers maps the model type to.

    Raises:
        CtxextError: the model cannot carry it, or the options contradict each other.
    """
    family = family_of(config)
    if reason := refusal(family):
        raise CtxextError(f'"{family.model_type}" cannot carry Ms-PoE: {reason}.')
    if head_order != "fixed" and family.model_type in FIXED_ONLY:
        reason = FIXED_ONLY[family.model_type]
        raise CtxextError(f'"{family.model_type}" takes a fixed order only: {reason}.', hint="--head-order fixed")
    classes = classes or family_classes(config)
    rotary = read_rotary(config, family)
    layers = scaled_layers(config, family, first_layer)
    heads, released = num_key_heads(config, family), variant == "released"
    if released and heads != read(config, family, "num_attention_heads"):
        raise CtxextError(
            "--variant released is for models without grouped queries: on those the released code rotates a key by "
            "another ratio than its queries, which loses their distance.",
            hint="--variant paper",
        )
    settings: dict[str, Any] = {
        "ratios": ratio_grid(ratio_min, ratio_max, heads, released=released),
        "layers": layers,
        "schedule": schedule,
        "rescale": _rescale(rescale, schedule, rescale_start, rescale_end),
        "variant": variant,
    }
    if schedule == "by-parts":
        settings |= {"trained_length": rotary.trained_length, "theta": rotary.theta}
        settings |= {"beta_fast": beta_fast, "beta_slow": beta_slow}
    if head_order == "fixed":
        settings["ranks"] = [list(range(heads)) for _ in layers]
    elif head_order == "calibrated":
        settings["ranks"] = _checked(orders, len(layers), heads)
    # A schedule that conversions do not offer for this family is kept as the source has it.
    kept = dict(rotary.parameters) if unsupported(family, rotary.rope_type) else {}
    edited = write_rotary(config, family, replace(rotary, parameters={"rope_type": "default"}) if kept else rotary)
    text = _text(edited, family)
    settings["rope"] = {**_own(text["rope_parameters"], family), **kept}
    if family.model_type in OWN_ROPE_TYPES:
        settings["hidden_act"] = read(config, family, "hidden_act") or "silu"
        text["hidden_act"] = LATCH
    else:
        _latch(text, family)
    text[KEY] = settings
    stub = STUB_FILE.removesuffix(".py")
    edited["architectures"] = [f"MsPoE{classes.causal_lm}"]
    edited["auto_map"] = {
        **edited.get("auto_map", {}),
        "AutoModel": f"{stub}.MsPoE{classes.model}",
        "AutoModelForCausalLM": f"{stub}.MsPoE{classes.causal_lm}",
    }
    return edited


def num_key_heads(config: Config, family: Family) -> int:
    """How many key heads a layer with full attention hands to its rotary embedding."""
    if family.model_type == "falcon":  # The new architecture repeats its keys for every query first.
        multi_query = read(config, family, "multi_query") and not read(config, family, "new_decoder_architecture")
        return 1 if multi_query else int(read(config, family, "num_attention_heads"))
    if read(config, family, "attention_k_eq_v") and read(config, family, "num_global_key_value_heads"):
        return int(read(config, family, "num_global_key_value_heads"))
    return int(read(config, family, "num_key_value_heads"))


def _full(schedules: Mapping[str, Any], family: Family) -> Mapping[str, Any]:
    """The schedule of the full-attention layers."""
    return next((schedules[name] for name in family.full_types if isinstance(schedules.get(name), Mapping)), schedules)


def _own(schedules: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """What the latch takes the place of."""
    length = "original_max_position_embeddings"
    return {key: value for key, value in _full(schedules, family).items() if key in _SCHEDULE or key == length}


def _latch(text: Config, family: Family) -> None:
    """Give the full-attention layers the rope type that only the shipped code understands, in both dialects."""
    schedules = text["rope_parameters"]
    full = _full(schedules, family)
    latched = {"rope_type": LATCH, **{key: value for key, value in full.items() if key not in _SCHEDULE}}
    names = [name for name in family.full_types if isinstance(schedules.get(name), Mapping)]
    text["rope_parameters"] = {**schedules, **{name: dict(latched) for name in names}} if names else latched
    if family.rope_scaling:
        text["rope_scaling"] = dict(latched)


def _text(edited: Config, family: Family) -> Config:
    """The language model's part of a configuration, as a part of it that may be written to."""
    if text_config(edited, family) is edited or family.text_config is None:
        return edited
    edited[family.text_config] = dict(edited[family.text_config])
    text: Config = edited[family.text_config]
    return text


def _rescale(rescale: str, schedule: str, start: int | None, end: int | None) -> str | list[int]:
    if rescale == "uniform":
        return rescale
    if schedule != "linear":
        raise CtxextError(f"--rescale middle compresses positions; --schedule {schedule} slows frequencies.")
    if start is None or end is None or not 0 <= start < end:
        raise CtxextError(f'--rescale middle cannot compress from "{start}" to "{end}".', hint="give both, in order.")
    return [start, end]


def _checked(orders: Sequence[Sequence[int]] | None, layers: int, heads: int) -> list[list[int]]:
    """The calibrated orders, if each layer that takes part has one and each is a permutation of the heads."""
    if orders is None or len(orders) != layers or any(sorted(order) != list(range(heads)) for order in orders):
        raise CtxextError(f"A calibrated order needs {layers} layers with {heads} ratio numbers each.")
    return [list(order) for order in orders]


def render_stub(classes: Classes) -> str:
    """The text of the stub file: which family this checkpoint belongs to."""
    return f'''"""{classes.causal_lm} with Ms-PoE: a position scale per attention head. The method is in {CODE_FILE}."""

from .{CODE_FILE.removesuffix(".py")} import family

modeling = family(__name__, "{classes.modeling}")


class MsPoE{classes.model}(modeling.{classes.model}):
    """{classes.model} with Ms-PoE."""


class MsPoE{classes.causal_lm}(modeling.{classes.causal_lm}):
    """{classes.causal_lm} with Ms-PoE."""


MsPoE{classes.model}.register_for_auto_class("AutoModel")
MsPoE{classes.causal_lm}.register_for_auto_class("AutoModelForCausalLM")
'''
