"""Ms-PoE: a separate position scale for every KV head."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from typing_extensions import override

from ctxext.checkpoint.families import Family, rotated_layers, value_of_layers
from ctxext.errors import CtxextError
from ctxext.recipes.code.method import PORTABLE, CodeMethod
from ctxext.recipes.encodings.base import Config
from ctxext.recipes.encodings.rotary import Rotary
from ctxext.recipes.model_config import ModelConfig
from ctxext.recipes.param import param


class MsPoE(CodeMethod):
    """Give each attention head a separate position scale, to use the middle of the context better. No training.

    The least position-aware heads get the largest ratio. The context length stays the same. By default heads scale
    their frequencies as ntk does, in an order calibrated once on text. The preset mspoe-paper divides all frequencies
    of a head alike and orders heads for each prompt, which broke the measured model. Zhang et al. 2024, "Found in the
    Middle", section 3.
    """

    name = "mspoe"
    title = "Ms-PoE"
    paper = "https://arxiv.org/abs/2403.04797"
    kind = "heads"
    code = (PORTABLE / "mspoe.py",)
    code_class = "MsPoE"
    difference = (
        "by default each head scales its frequencies as ntk does, in an order calibrated once. On SmolLM2-135M at 2048 "
        "tokens, the paper's form (linear ratios, ordered by each prompt; --recipe mspoe-paper) found 0 of 30 needles "
        "and raised the loss by 0.635 nats per token; this form found 26 and raised it by 0.013; the source found 27."
    )
    neutral: ClassVar[Mapping[str, Any]] = {
        "ratio_min": 1.0,
        "ratio_max": 1.0,
        "first_layer": 0,
        "head_order": "fixed",
    }
    example: ClassVar[Mapping[str, Any]] = {**neutral, "ratio_min": 1.5, "ratio_max": 4.0, "schedule": "linear"}

    ratio_min: float = param(1.2, help="Ratio of the most position-aware head.", min=1.0, search=(1.0, 2.0))
    ratio_max: float = param(1.8, help="Ratio of the least position-aware head.", min=1.0, search=(1.0, 8.0))
    head_order: str = param(
        "calibrated",
        help="Order heads for each prompt (the paper), once over calibration text, or by their index.",
        choices=("prompt", "calibrated", "fixed"),
        search=("calibrated", "prompt", "fixed"),
    )
    first_layer: int = param(
        2, help="First layer with scaled heads; earlier layers keep their rotary embedding.", min=0, search=(0, 3)
    )
    schedule: str = param(
        "ntk",
        help="Scaling of a head by its ratio: all frequencies alike (the paper), or as ntk or ntk-by-parts do.",
        choices=("linear", "ntk", "by-parts"),
        search=("linear", "ntk", "by-parts"),
    )
    ramp_fast: float = param(
        8.0,
        help="With by-parts: frequencies with more rotations within the original context stay unchanged.",
        min=0,
        search=(4, 64),
    )
    ramp_slow: float = param(
        1.0,
        help="With by-parts: frequencies with fewer rotations are divided by the whole ratio.",
        min=0,
        search=(0.5, 4),
    )
    rescale: str = param(
        "uniform",
        help="Compress all positions (the paper), or only those between --rescale-start and --rescale-end.",
        choices=("uniform", "middle"),
    )
    rescale_start: int | None = param(None, help="With middle: first compressed position, in tokens.", min=0)
    rescale_end: int | None = param(None, help="With middle: end of the compressed positions, in tokens.", min=1)
    variant: str = param(
        "paper",
        help="The method as the paper describes it, or as its released code computes it.",
        choices=("paper", "released"),
    )
    ranks: tuple[tuple[int, ...], ...] | None = param(
        None, help="Calibrated order: for each layer, the rank of each KV head.", internal=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ratio_max < self.ratio_min:
            raise CtxextError(f'mspoe: ratio_max "{self.ratio_max:g}" is below ratio_min "{self.ratio_min:g}".')
        if self.schedule != "linear" and self.rescale == "middle":
            raise CtxextError("mspoe: rescale middle moves positions, so it requires schedule linear.")
        start, end = self.rescale_start, self.rescale_end
        if self.rescale == "middle" and (start is None or end is None or start >= end):
            raise CtxextError(
                f'mspoe: rescale middle cannot compress from "{start}" to "{end}".',
                hint="Set rescale_start below rescale_end.",
            )

    @classmethod
    @override
    def from_search(cls, numbers: Mapping[str, Any], rotary: Rotary, factor: float) -> Self:
        # The search draws both ratios independently, so they may be in either order.
        smallest, largest = sorted(numbers[name] for name in ("ratio_min", "ratio_max"))
        return cls(**{**numbers, "ratio_min": smallest, "ratio_max": largest})

    @override
    def summary(self) -> str:
        return f"{self.name} {self.ratio_min:g}–{self.ratio_max:g} {self.schedule} ({self.head_order} order)"

    @property
    def needs_calibration(self) -> bool:
        """Whether the order of its heads must still be measured."""
        return self.head_order == "calibrated" and not self.ranks

    @property
    def depends_on_prompt(self) -> bool:
        """Whether heads are ordered by each prompt."""
        return self.head_order == "prompt"

    @classmethod
    @override
    def refusal(cls, config: Config, family: Family) -> str:
        if family.shared_rotary_key:
            return "latent attention: all heads share one rotated key, so they cannot have separate scales"
        return super().refusal(config, family)

    @override
    def settings(self, model: ModelConfig) -> dict[str, Any]:
        heads, released = num_kv_heads(model), self.variant == "released"
        if released and heads != model.read("num_attention_heads"):
            raise CtxextError(
                "--variant released does not support grouped queries: the released code rotates a key by another ratio "
                "than its queries, which loses their distance.",
                hint="--variant paper",
            )
        layers = self._layers(model)
        settings: dict[str, Any] = {
            "ratios": ratio_grid(self.ratio_min, self.ratio_max, heads, released=released),
            "layers": layers,
            "schedule": self.schedule,
            "rescale": self.rescale if self.rescale == "uniform" else [self.rescale_start, self.rescale_end],
            "variant": self.variant,
        }
        if model.rotary.dim != model.rotary.span:
            settings["pairs"] = model.rotary.dim // 2
        if self.schedule == "by-parts":
            settings |= {"trained_length": model.rotary.trained_length, "theta": model.rotary.theta}
            settings |= {"beta_fast": self.ramp_fast, "beta_slow": self.ramp_slow}
        if ranks := self._ranks(model, len(layers), heads):
            settings["ranks"] = ranks
        return settings

    def _layers(self, model: ModelConfig) -> list[int]:
        """Return the layers with scaled heads: from `first_layer` on, those with full attention and RoPE."""
        full = rotated_layers(model.config, model.family)
        layers = [index for index in full if index >= self.first_layer]
        if not full:
            raise CtxextError(
                "Every layer with a rotary embedding has a sliding window, and these layers are not changed: Ms-PoE "
                "would have no effect."
            )
        if not layers:
            raise CtxextError(
                f"No layer from {self.first_layer} on has full attention.", hint=f"--first-layer {full[-1]} or less."
            )
        return layers

    def _ranks(self, model: ModelConfig, num_layers: int, num_heads: int) -> list[list[int]] | None:
        """Return the rank of each head's ratio for each layer; None if heads are ordered by each prompt."""
        if self.head_order == "fixed":
            return [list(range(num_heads)) for _ in range(num_layers)]
        model_type = model.family.model_type
        if (reason := FIXED_ONLY.get(model_type)) and not self.ranks:
            raise CtxextError(f'"{model_type}" supports a fixed order only: {reason}.', hint="--head-order fixed")
        if self.head_order == "prompt":
            return None
        ranks = [list(order) for order in self.ranks or ()]
        if len(ranks) != num_layers or any(sorted(order) != list(range(num_heads)) for order in ranks):
            raise CtxextError(f"A calibrated order needs {num_layers} layers with {num_heads} ratio numbers each.")
        return ranks


_QUERIES_FIRST = "its attention rotates queries before it computes keys, and some layers use the keys of others"
_SPLIT_FIRST = "its attention exposes only the part of each head that rotates, and the score needs the whole"

FIXED_ONLY: Mapping[str, str] = {
    **dict.fromkeys(
        ("gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"), _QUERIES_FIRST
    ),
    **dict.fromkeys(("gpt_neox_japanese", "persimmon", "phi", "stablelm"), _SPLIT_FIRST),
}
"""Families with an attention that cannot be scored, which require a fixed order, and the reasons."""


def ratio_grid(ratio_min: float, ratio_max: float, num_heads: int, *, released: bool = False) -> list[float]:
    """Return the ratios from the smallest to the largest, one per KV head.

    The released code's grid stops one step short.
    """
    steps = num_heads if released else max(num_heads - 1, 1)
    return [ratio_min + (ratio_max - ratio_min) * i / steps for i in range(num_heads)]


def ranks_from_scores(scores: Sequence[float]) -> list[int]:
    """Return the rank of each head's ratio.

    The most position-aware head has the smallest ratio; ties go to the lower head.
    """
    order = sorted(range(len(scores)), key=lambda head: (-scores[head], head))
    return [order.index(head) for head in range(len(scores))]


def num_kv_heads(model: ModelConfig) -> int:
    """Return the number of KV heads that a layer with full attention passes through its rotary embedding."""
    if model.family.model_type == "falcon":  # The new architecture first repeats keys for every query.
        multi_query = model.read("multi_query") and not model.read("new_decoder_architecture")
        return 1 if multi_query else int(model.read("num_attention_heads"))
    if model.read("attention_k_eq_v") and model.read("num_global_key_value_heads"):
        return int(model.read("num_global_key_value_heads"))
    layers = rotated_layers(model.config, model.family)
    own = value_of_layers(model.config, model.family, "num_key_value_heads", layers)
    return int(own or model.read("num_key_value_heads"))
