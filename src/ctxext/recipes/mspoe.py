"""Ms-PoE: every key head gets its own position scale."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from typing_extensions import Self

from ctxext.errors import CtxextError
from ctxext.families import Family
from ctxext.recipes import mspoe_layout
from ctxext.recipes.base import Method
from ctxext.recipes.param import param
from ctxext.recipes.rotary import LATCH, Config, Rotary


@dataclass(frozen=True, kw_only=True)
class MsPoE(Method):
    """Give every attention head its own position scale, so that the middle of the window is found. No training.

    Heads whose attention stands out least take the largest ratio. Zhang et al. 2024, "Found in the Middle", section 3.
    With the schedules ntk and by-parts a head slows its frequencies as those methods do, which keeps the heads that
    rely on exact offsets working; linear is the paper's.
    """

    name = "mspoe"
    title = "Ms-PoE"
    paper = "https://arxiv.org/abs/2403.04797"
    scales = False
    needs_code = True

    ratio_min: float = param(1.2, help="Ratio of the head that stands out most.", min=1.0, search=(1.0, 2.0))
    ratio_max: float = param(1.8, help="Ratio of the head that stands out least.", min=1.0, search=(1.0, 8.0))
    head_order: str = param(
        "prompt",
        help="Order heads anew for each prompt (the paper), once over calibration text, or by their index.",
        choices=("prompt", "calibrated", "fixed"),
        search=("calibrated", "prompt", "fixed"),
    )
    first_layer: int = param(
        2, help="The first layer that takes part; those before keep their rotary embedding.", min=0, search=(0, 3)
    )
    schedule: str = param(
        "linear",
        help="How a ratio slows a head: all frequencies alike (the paper), or as ntk or by-parts would.",
        choices=("linear", "ntk", "by-parts"),
        search=("linear", "ntk", "by-parts"),
    )
    ramp_fast: float = param(
        8.0,
        help="With by-parts: turns in the trained length above which a head keeps a frequency.",
        min=0,
        search=(4, 64),
    )
    ramp_slow: float = param(
        1.0, help="With by-parts: turns below which a head interpolates it fully.", min=0, search=(0.5, 4)
    )
    rescale: str = param(
        "uniform",
        help="Compress all positions (the paper), or only those between --rescale-start and --rescale-end.",
        choices=("uniform", "middle"),
    )
    rescale_start: int | None = param(None, help="With middle: where the compressed stretch begins, in tokens.", min=0)
    rescale_end: int | None = param(None, help="With middle: where it ends, in tokens.", min=1)
    variant: str = param(
        "paper", help="What the paper says, or what its released code computes.", choices=("paper", "released")
    )
    ranks: tuple[tuple[int, ...], ...] | None = param(
        None, help="Measured order: for each layer that takes part, each key head's place.", measured=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ratio_max < self.ratio_min:
            raise CtxextError(f'mspoe: ratio_max "{self.ratio_max:g}" is below ratio_min "{self.ratio_min:g}".')
        if self.schedule != "linear" and self.rescale == "middle":
            raise CtxextError("mspoe: rescale middle moves positions, so it goes with schedule linear only.")
        if self.rescale == "middle" and (self.rescale_start or 0) >= (self.rescale_end or 2**31):
            raise CtxextError("mspoe: rescale_start must be before rescale_end.")

    @classmethod
    def from_search(cls, numbers: Mapping[str, Any], rotary: Rotary, factor: float) -> Self:
        """The step with numbers from its search space; the smaller of its two ratios is the smallest."""
        smallest, largest = sorted(numbers[name] for name in ("ratio_min", "ratio_max"))
        return cls(**{**numbers, "ratio_min": smallest, "ratio_max": largest})

    @classmethod
    def refusal(cls, config: Config, family: Family) -> str:
        """Why the family cannot give every head its own ratio; empty where it can."""
        return super().refusal(config, family) or mspoe_layout.refusal(family)

    def edit_config(self, config: Config, family: Family) -> Config:
        """Write the layout of a checkpoint with its own code (`mspoe_layout`).

        Raises:
            CtxextError: the family cannot carry it, or the options do not fit the model.
        """
        if reason := self.refusal(config, family):
            raise CtxextError(f'"{family.model_type}" cannot carry mspoe: {reason}.', hint="Choose another method.")
        return mspoe_layout.edit_config(
            config,
            ratio_min=self.ratio_min,
            ratio_max=self.ratio_max,
            head_order=self.head_order,
            first_layer=self.first_layer,
            schedule=self.schedule,
            rescale=self.rescale,
            rescale_start=self.rescale_start,
            rescale_end=self.rescale_end,
            variant=self.variant,
            beta_fast=self.ramp_fast,
            beta_slow=self.ramp_slow,
            orders=self.ranks,
        )

    def code_files(self, config: Config) -> Mapping[str, str]:
        """The module that travels, byte for byte, and the stub that names the family's classes."""
        portable = resources.files("ctxext.portable") / mspoe_layout.CODE_FILE
        classes = mspoe_layout.family_classes(config)
        return {
            mspoe_layout.CODE_FILE: portable.read_bytes().decode(),
            mspoe_layout.STUB_FILE: mspoe_layout.render_stub(classes),
        }


def without_code(config: Config) -> Config:
    """A copy of an Ms-PoE configuration that names the stock classes and the model's own schedule again."""
    plain = copy.deepcopy(config)
    inner = plain.get("text_config")
    text = inner if isinstance(inner, dict) and mspoe_layout.KEY in inner else plain
    if mspoe_layout.KEY not in text:
        return plain
    settings = text.pop(mspoe_layout.KEY)
    own = settings["rope"]
    if text.get("hidden_act") == LATCH:
        text["hidden_act"] = settings["hidden_act"]
    for key in ("rope_parameters", "rope_scaling"):
        for entry in (text.get(key) or {}, *(text.get(key) or {}).values()):
            if isinstance(entry, dict) and entry.get("rope_type") == LATCH:
                entry.update(own)
    plain["architectures"] = [str(name).removeprefix("MsPoE") for name in plain.get("architectures") or []]
    ours = mspoe_layout.STUB_FILE.removesuffix(".py")
    auto_map = {name: place for name, place in plain.pop("auto_map", {}).items() if not place.startswith(ours)}
    return {**plain, "auto_map": auto_map} if auto_map else plain
