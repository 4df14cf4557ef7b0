"""The rotary encoding of a checkpoint: read from config.json in the v4 or v5 format, written in both.

transformers 5 reads `rope_parameters`; transformers 4 reads `rope_theta` and `rope_scaling`. Each version silently
misreads a file that contains only the other format (docs/traps.md, trap 1), so both are always written.
"""

import copy
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from ctxext.checkpoint.families import (
    Family,
    assumed_schedule,
    has_null_theta,
    read,
    rotary_dim,
    rotated_layers,
    schedule_keys,
    sliding_layers,
    text_config,
)
from ctxext.checkpoint.geometry import MAXIMUM, claimed_length, original_length_of, reached_length
from ctxext.errors import CtxextError
from ctxext.recipes.code.guards import CODE_KEY, SENTINEL
from ctxext.recipes.encodings.base import POSITIONS, Config, Encoding, provenance
from ctxext.recipes.encodings.dialects import (
    KEPT,
    check_numbers,
    known_keys,
    native_type,
    unsupported_reason,
    write_length,
)

_ORIGINAL = "original_max_position_embeddings"
_FROM_ORIGINAL = ("llama3", "longrope", "yarn")
"""Rope types that require the original length, which some files store one level up (Phi-3)."""
_LENGTH_KEYS_4X = ("longrope",)
_COPIES = frozenset({"rope_theta", "theta"})
"""Other keys of the base, which must be equal to it: transformers 4.57 prefers `theta` in LFM2."""
SLIDING_FOLLOWS = "its sliding-window layers use the same schedule as the other layers, so they change too."
"""Warning for users of a changed schedule."""
_DTYPES = ("dtype", "torch_dtype")
_SECTIONS = "mrope"
"""Older rope type of a plain schedule with sections of positions (Qwen2-VL); classes read "default"."""


@dataclass(frozen=True, kw_only=True)
class Rotary(Encoding):
    """The rotary encoding of a model's full-attention layers.

    Attributes:
        theta: The base b of the inverse frequencies b^(-2i/d).
        dim: The number of rotated dimensions of a head.
        span: The d of the exponent: `dim`, or the size of the whole head in families with proportional frequencies.
        trained_length: The original context length, used in training before any schedule, in tokens.
        context_length: The current context length, in tokens: that of config.json if a schedule or a raised base
            extends the model, otherwise the original length.
        parameters: The schedule in the format of transformers, with `rope_type` and without theta.
        declared_length: The length in config.json if nothing extends the model to it, in tokens; None otherwise.
        length_origin: The source of the original context length, human-readable.
        theta_origin: The computation of the base, human-readable; empty if config.json has it.
    """

    theta: float
    dim: int
    span: int
    parameters: Mapping[str, Any]
    declared_length: int | None = None
    length_origin: str = ""
    theta_origin: str = ""

    @property
    def rope_type(self) -> str:
        """The schedule's name in transformers."""
        return str(self.parameters.get("rope_type", "default"))

    @property
    def depends_on_length(self) -> bool:
        """Whether the schedule depends on the number of tokens of a text: `dynamic`, and LongRoPE with two lists."""
        two_lists = self.parameters.get("short_factor") != self.parameters.get("long_factor")
        return self.rope_type == "dynamic" or two_lists

    @property
    @override
    def is_scaled(self) -> bool:
        return self.rope_type != "default" or self.context_length > self.trained_length

    @property
    def usable_length(self) -> int:
        """The context length that it supports, in tokens; with `dynamic`, config.json contains the original length."""
        factor = self.parameters.get("factor") or 1.0 if self.rope_type == "dynamic" else 1.0
        return round(self.claimed_length * float(factor))

    @property
    def schedule_length(self) -> int:
        """The original length in the schedule's formula, in tokens; the schedule may contain its own."""
        return int(self.parameters.get(_ORIGINAL) or self.trained_length)

    @property
    def schedule_summary(self) -> str:
        """The schedule in a few words: "llama3 ×8 from 8192 tokens"."""
        factor = self.parameters.get("factor")
        times = f" ×{factor:g}" if isinstance(factor, int | float) else ""
        start = "" if self.lacks_original else f" from {self.schedule_length} tokens"
        return f"{self.rope_type}{times}{start}"

    @property
    def lacks_original(self) -> bool:
        """Whether the schedule extends from an unknown original length."""
        return self.rope_type == "linear" and self.length_origin == MAXIMUM

    @property
    def feature(self) -> str:
        """The rope type."""
        return self.rope_type

    @property
    def numbers(self) -> Mapping[str, Any]:
        """The schedule's parameters."""
        return self.parameters

    def with_parameters(self, parameters: Mapping[str, Any]) -> "Rotary":
        """Return the encoding with another schedule."""
        return dataclasses.replace(self, parameters=parameters)

    @override
    def describe(self) -> str:
        origin = f" ({self.theta_origin})" if self.theta_origin else ""
        return f"rotary, {self.rope_type} schedule, theta {self.theta:g}{origin} · {self.dim} dimensions"

    @override
    def to_record(self) -> dict[str, Any]:
        lengths = super().to_record()
        return {
            "trained_length": lengths["trained_length"],
            "source_theta": self.theta,
            "source_length": lengths["source_length"],
        }

    @override
    def restore_source(self, record: Mapping[str, Any]) -> "Rotary":
        return dataclasses.replace(
            self,
            theta=record.get("source_theta") or self.theta,
            context_length=self.trained_length,
            declared_length=None,
            parameters={"rope_type": "default"},
        )

    @override
    def at_length(self, length: int) -> "Rotary":
        return dataclasses.replace(self, context_length=length, declared_length=None)

    @override
    def state_length(self, text: Config, family: Family) -> None:
        write_length(text, family, self.context_length)

    @override
    def write_to(self, config: Config, family: Family) -> Config:
        return write_rotary(config, family, self)

    @override
    def cautions(self, config: Config, family: Family, *, is_changed: bool) -> tuple[str, ...]:
        warnings = []
        follow = is_changed and sliding_layers_follow(config, family, self)
        if family.sliding_follows and sliding_layers(config, family) and follow:
            warnings.append(SLIDING_FOLLOWS)
        if not rotated_layers(config, family):
            window = read(config, family, "sliding_window")
            warnings.append(
                f"all layers have a sliding window of {window} tokens, which a longer schedule does not widen."
            )
        return tuple(warnings)


def sliding_layers_follow(config: Config, family: Family, after: Encoding) -> bool:
    """Return whether a changed base or schedule changes the sliding layers too, if a model has some."""
    has_bases = family.layer_theta_key and text_config(config, family).get(family.layer_theta_key)
    is_shared = not (family.nested_rope or family.local_theta_key or (has_bases and after.feature == "default"))
    return family.encoding == "rotary" and is_shared


def not_rotary_error(family: Family) -> CtxextError:
    """Return the error for a family without rotary position embeddings."""
    if family.encoding == "none":
        reason = family.reason or f"it has {POSITIONS[family.positions]}"
        return CtxextError(
            f'"{family.model_type}" has nothing to rescale: {reason}.',
            hint="Raise its declared length with --method declare, then measure the model.",
        )
    return CtxextError(
        f'"{family.model_type}" has {POSITIONS[family.positions]}; rotary position embeddings are required.',
        hint="ctxext methods lists the requirements of each method.",
    )


def read_rotary(config: Config, family: Family, original_length: int | None = None) -> Rotary:
    """Read the rotary encoding from config.json's content, class defaults included.

    Args:
        config: The content of config.json.
        family: Its family.
        original_length: The length of the training, in tokens, if the user gives it.
    """
    if family.encoding != "rotary":
        raise not_rotary_error(family)
    if family.reason:
        raise CtxextError(f'"{family.model_type}" cannot be converted: {family.reason}.')
    text = dict(text_config(config, family))
    parameters = _full_attention_parameters(text, family)
    _check_stated(config, family, parameters)
    parameters.pop("rope_theta", None)
    theta = read(config, family, "rope_theta")
    if theta is None:
        raise CtxextError(
            "config.json has no rope_theta, and the family has no default.",
            hint="Add the base that the model was trained with to config.json.",
        )
    parameters["rope_type"] = parameters.get("rope_type") or parameters.pop("type", None) or "default"
    parameters.pop("type", None)
    if parameters["rope_type"] == _SECTIONS:
        parameters["rope_type"] = "default"
    # Mistral 4's class cannot run with "default", so its plain schedule is a linear one with factor 1.
    if parameters["rope_type"] == family.plain_type and parameters.get("factor") in (None, 1):
        parameters["rope_type"] = "default"
    check_numbers(parameters)
    theta, theta_origin = float(theta), ""
    # Hunyuan's `dynamic` with alpha does not depend on the length: it is a raised base under another name, and methods
    # must start from that base (docs/lengths.md).
    if parameters["rope_type"] == "dynamic" and parameters.get("alpha") and "alpha" in known_keys(text, family):
        theta, theta_origin = _base_of_alpha(theta, float(parameters["alpha"]), rotary_dim(config, family))
        parameters = {key: value for key, value in parameters.items() if key not in known_keys(text, family)}
        parameters["rope_type"] = "default"
    context_length = claimed_length(config, family)
    if not isinstance(context_length, int | float) or context_length <= 0:
        raise CtxextError(
            f'config.json has no usable max_position_embeddings: "{context_length}".',
            hint="Add the model's training length to config.json.",
        )
    claimed, record = int(context_length), provenance(config)
    if parameters["rope_type"] in _FROM_ORIGINAL and text.get(_ORIGINAL):  # As transformers does.
        parameters[_ORIGINAL] = text[_ORIGINAL]
    trained, origin = original_length_of(
        config, family, parameters, requested=original_length, recorded=record.get("trained_length")
    )
    # A longer length in config.json may only be declared (docs/traps.md, trap 17). It counts if a schedule extends the
    # model to it, or if ctxext raised the base, which leaves no trace but the record.
    is_stretched = parameters["rope_type"] != "default" or (
        bool(record.get("trained_length")) and record.get("declared_length") != claimed
    )
    if is_stretched and not record.get("trained_length"):
        claimed = reached_length(config, family, parameters)
    return Rotary(
        theta=theta,
        dim=rotary_dim(config, family),
        span=read(config, family, "head_dim") if family.plain_type == "proportional" else rotary_dim(config, family),
        trained_length=trained,
        context_length=claimed if is_stretched else trained,
        parameters=parameters,
        declared_length=None if is_stretched or trained == claimed else claimed,
        length_origin=origin,
        theta_origin=theta_origin,
    )


def _check_stated(config: Config, family: Family, parameters: Mapping[str, Any]) -> None:
    """Raise if a schedule contains null, or lacks a value with different defaults in versions of transformers."""
    text = text_config(config, family)
    nulls = [key for key in ("rope_type", "type") if parameters.get(key, key) is None]
    nulls += ["rope_theta"] if has_null_theta(text, family) else []
    nulls += ["partial_rotary_factor"] if read(config, family, "partial_rotary_factor") is None else []
    if nulls:
        raise CtxextError(
            f'"{nulls[0]}" is null in config.json or missing in a schedule, and "{family.model_type}" has no default '
            "for this.",
            hint=f"Add the {nulls[0]} that the model was trained with.",
        )
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if family.plain_type != "default" and parameters and rope_type == "default":
        raise CtxextError(
            f'The schedule of config.json has the rope type "default", but "{family.model_type}" needs '
            f'"{family.plain_type}": its class would rotate other dimensions.',
            hint=f'Set "rope_type": "{family.plain_type}" if the model was trained with it.',
        )
    stated = [text[family.theta_key]] if family.theta_key in text else []
    if assumed := assumed_schedule(text, family):
        if "rope_scaling" in text or any(base != assumed.get("rope_theta") for base in stated):
            raise CtxextError(
                f'config.json has no schedule, and the default of "{family.model_type}" differs between versions of '
                f"transformers: a {assumed['rope_type']} schedule, or none.",
                hint="Add the schedule that the model was trained with to rope_scaling and rope_parameters.",
            )
    elif "rope_theta" not in parameters and not stated and "rope_theta" in family.defaults_4x:
        raise CtxextError(
            f'config.json has no rope_theta, and the default of "{family.model_type}" is '
            f"{family.defaults_4x['rope_theta']:g} in transformers 4.57 and {family.defaults['rope_theta']:g} in 5.",
            hint="Add the base that the model was trained with to config.json.",
        )


def _base_of_alpha(theta: float, alpha: float, dim: int) -> tuple[float, str]:
    """Compute the base of Hunyuan's `dynamic` with an alpha.

    It does not depend on the length or on other parameters of the schedule.

    Returns:
        The base used in training, and its formula as text.
    """
    # The expression of the modeling code, for bit-identical frequencies.
    return theta * alpha ** (dim / (dim - 2)), f"{theta:g} · {alpha:g}^({dim}/{dim - 2}), by alpha"


def attention_scaling(rotary: Rotary) -> float:
    """Compute the factor on cos and sin.

    YaRN: 0.1 · ln(s) + 1, and with DeepSeek's two parameters the quotient of 0.1 · mscale · ln(s) + 1 and the same with
    mscale_all_dim; LongRoPE: sqrt(1 + ln(s) / ln(L)); otherwise 1. Without a factor, s is the ratio of the lengths.
    """
    numbers = rotary.parameters
    if numbers.get("attention_factor") is not None:
        return float(numbers["attention_factor"])
    if rotary.rope_type not in ("yarn", "longrope"):
        return 1.0
    factor = float(numbers.get("factor") or rotary.context_length / rotary.schedule_length)
    if factor <= 1:
        return 1.0
    if rotary.rope_type == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(rotary.schedule_length))
    mscale, all_dim = numbers.get("mscale"), numbers.get("mscale_all_dim")
    if mscale and all_dim:
        return float((0.1 * mscale * math.log(factor) + 1) / (0.1 * all_dim * math.log(factor) + 1))
    return 0.1 * math.log(factor) + 1


def _full_attention_parameters(text: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the schedule of the full-attention layers as one flat dict."""
    merged: dict[str, Any] = dict(assumed_schedule(text, family))
    for key in reversed(schedule_keys(text, family)):
        schedule = text.get(key) or {}
        nested = [schedule[name] for name in family.full_types if isinstance(schedule.get(name), dict)]
        flat = {} if any(isinstance(value, dict) for value in schedule.values()) else schedule
        merged.update(nested[0] if nested else flat)
    block = text.get(CODE_KEY)
    if isinstance(block, Mapping):
        # The schedule that the sentinel hides, and the keys that stay at another length (docs/traps.md, trap 22).
        hidden = block.get("rope") if merged.get("rope_type") == SENTINEL else None
        merged.update({**(hidden or {}), **(block.get("held") or {})})
    return copy.deepcopy(merged)


def write_rotary(config: Config, family: Family, rotary: Rotary) -> Config:
    """Return a copy of a configuration with a rotary encoding in both the v4 and v5 format.

    Args:
        config: The content of config.json; not changed.
        family: Its family.
        rotary: The encoding of the full-attention layers.
    """
    if reason := unsupported_reason(family, rotary.rope_type):
        raise CtxextError(
            f'"{family.model_type}": {reason}.', hint="ctxext inspect MODEL lists the methods that apply."
        )
    check_known(config, family, rotary)
    edited = copy.deepcopy(config)
    # The nested part is a dict within the copy, so changing it changes `edited`.
    text: Config = edited[family.text_config] if text_config(edited, family) is not edited else edited  # type: ignore[index]
    old = _full_attention_parameters(text, family)
    schedule = _schedule(old, family, rotary)
    # The base is in every dict, as transformers 5 drops it with the dict that it replaces (docs/traps.md, trap 2).
    parameters = {"rope_theta": rotary.theta, **schedule}
    partial = read(config, family, "partial_rotary_factor")
    usual = partial == family.defaults.get("partial_rotary_factor", 1.0) == 1.0
    above = family.partial_key or "partial_rotary_factor"
    if not usual or above in text or "partial_rotary_factor" in old:
        parameters["partial_rotary_factor"] = partial
        if family.rope_scaling:  # vLLM would also apply it to the sliding layers of Gemma 4 (docs/traps.md, 27).
            text.setdefault(above, partial)
    write_length(text, family, rotary.claimed_length)
    if family.rope_scaling or family.local_theta_key:
        text.update(dict.fromkeys([family.theta_key, *(_COPIES & text.keys())], rotary.theta))
    # Granite's list overrides every other base. Sliding layers keep theirs (docs/traps.md, trap 9).
    if thetas := text.get(family.layer_theta_key) if family.layer_theta_key else None:
        for index in rotated_layers(config, family):
            thetas[index] = rotary.theta
    if beta := parameters.get("llama_4_scaling_beta"):  # vLLM reads it only outside the schedule (docs/traps.md, 27).
        original = parameters["original_max_position_embeddings"]
        text["llama_4_scaling"] = {"original_max_position_embeddings": original, "beta": beta}
    text["rope_parameters"] = nested_by_type(config, family, parameters) if family.nested_rope else parameters
    # An old `rope_scaling` would hide the new `rope_parameters` (docs/traps.md, trap 19).
    text.pop("rope_scaling", None)
    is_explicit = rotary.rope_type != "default" or family.explicit_default or any(key in parameters for key in KEPT)
    if family.rope_scaling and is_explicit:
        text["rope_scaling"] = _rope_scaling(family, schedule)
    text.pop(_ORIGINAL, None)
    if rotary.rope_type in _LENGTH_KEYS_4X:  # transformers 4.57 reads it only at this level.
        text[_ORIGINAL] = rotary.schedule_length
    write_explicit(config, edited, text, family)
    return edited


def _rope_scaling(family: Family, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schedule in the v4 format; some classes accept certain keys only (Phi-3)."""
    keys = family.rope_scaling_keys.get(parameters["rope_type"])
    if keys is None:
        return dict(parameters)
    named = {**parameters, "type": parameters["rope_type"]}
    return {key: named[key] for key in keys if key in named}


def nested_by_type(config: Config, family: Family, full: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schedule by layer type; that of sliding layers is unchanged (docs/traps.md, trap 9)."""
    source = text_config(config, family).get("rope_parameters") or {}
    nested = {key: copy.deepcopy(value) for key, value in source.items() if isinstance(value, dict)}
    local = {"rope_type": "default", "rope_theta": read(config, family, "local_rope_theta")}
    if partial := family.defaults.get("local_partial_rotary_factor"):
        local["partial_rotary_factor"] = partial
    for name in family.sliding_types if local["rope_theta"] else ():
        nested.setdefault(name, local)
    return {**nested, **{name: dict(full) for name in family.full_types}}


def write_explicit(config: Config, edited: Config, text: Config, family: Family) -> None:
    """Write values that some programs would otherwise guess: head size, base of sliding layers, dtype."""
    head_dim = read(config, family, "head_dim")
    if head_dim and family.explicit_head_dim and not family.shared_rotary_key and text.get("head_dim") is None:
        text["head_dim"] = int(head_dim)
    if family.local_theta_key:
        text[family.local_theta_key] = read(config, family, family.local_theta_key)
    for place in (edited, text):
        known = next((place[key] for key in _DTYPES if place.get(key)), None)
        if known:
            place.update(dict.fromkeys(_DTYPES, known))


def check_known(config: Config, family: Family, after: Rotary | None = None) -> None:
    """Raise if a schedule has an unknown key, which a change would drop.

    Args:
        config: The content of config.json.
        family: Its family.
        after: The new schedule; its keys are known.
    """
    text = text_config(config, family)
    beside = [
        key
        for name in schedule_keys(text, family)
        for key, value in (text.get(name) or {}).items()
        if not isinstance(value, dict)
    ]
    known = known_keys(text, family).union(after.parameters if after else ())
    keys = (*_full_attention_parameters(text, family), *(beside if family.nested_rope else ()))
    if unknown := next((key for key in keys if key not in known), None):
        raise CtxextError(
            f'The schedule of config.json has "{unknown}", which no known version of transformers reads for '
            f'"{family.model_type}": another schedule would drop it.',
            hint="Remove it from rope_scaling and rope_parameters if no program needs it.",
        )


def without_derived(rotary: Rotary) -> dict[str, Any]:
    """Return a schedule's parameters without those derived from its factor, which change with another factor.

    Olmo 3 has an attention_factor of 1.2079441541679836, which is 0.1 · ln 8 + 1. A value is derived if it equals
    its formula in all digits, at least two after the decimal point; a 1 does not count.
    """
    numbers = dict(rotary.parameters)
    declared = numbers.pop("attention_factor", None)
    by_rule = attention_scaling(rotary.with_parameters(numbers))
    digits = len(repr(float(declared)).partition(".")[2]) if declared is not None else 0
    is_derived = by_rule != 1 and digits >= 2 and abs(declared - by_rule) < max(10.0**-digits, 1e-12)
    return numbers if is_derived else dict(rotary.parameters)


def _schedule(old: Mapping[str, Any], family: Family, rotary: Rotary) -> dict[str, Any]:
    """Return the parameters of a schedule, with those that remain of the old one and those that the class requires."""
    remaining = {key: old[key] for key in KEPT if key in old}
    schedule = {**remaining, **rotary.parameters, "rope_type": native_type(family, rotary.rope_type)}
    if schedule["rope_type"] == "linear":  # A plain schedule in Mistral 4, which must have a factor.
        schedule.setdefault("factor", 1.0)
    for key in family.required_keys:
        if key not in schedule and key not in _DERIVABLE:
            raise CtxextError(f'The schedule of config.json lacks "{key}", which its class requires.')
        needed = rotary.schedule_length if key.startswith("original") else attention_scaling(rotary)
        schedule.setdefault(key, needed)
    return schedule


_DERIVABLE = frozenset({_ORIGINAL, "short_mscale", "long_mscale"})
