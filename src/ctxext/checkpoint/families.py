"""Model families as data: their position encodings, and the keys of config.json for them.

The table is families.json, which tools/make_families.py writes from an installed transformers. This module imports
neither torch nor transformers, so reading config.json takes milliseconds.
"""

import dataclasses
import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ctxext.errors import CtxextError

_REMOTE_CODE = frozenset(
    {"baichuan", "chatglm", "deepseek", "internlm", "internlm2", "mimo", "minicpm", "orion", "qwen"}
)
"""Model types without code in transformers, for copies without their `auto_map`."""

_THINKERS: Mapping[str, str] = {
    "qwen2_5_omni": "Qwen2_5OmniThinkerForConditionalGeneration",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration",
}
"""Language model classes of models that nest a model with a text part."""


_VAGUE = "something else"
"""Entry of the table for model types of unknown kind, such as parts of other models."""


def unknown_type_error(config: Mapping[str, Any], known: Iterable[str], others: Mapping[str, str]) -> CtxextError:
    """Return the error for a model type without a family; `others` describes some of these types."""
    model_type = str(config["model_type"])
    is_vague = others.get(model_type) == _VAGUE
    if is_vague and not config.get("auto_map"):
        return CtxextError(f'"{model_type}" is not a language model: no Auto class for language models loads it.')
    if model_type in others and not is_vague:
        hint = "docs/families.md lists the multimodal models with a supported text part."
        if thinker := _THINKERS.get(model_type):
            hint = f"Convert its thinker: load it with {thinker}.from_pretrained and save it (docs/families.md)."
        return CtxextError(
            f'"{model_type}" is not a causal language model but {others[model_type]}.',
            hint=hint if "multimodal" in others[model_type] else "",
        )
    if config.get("auto_map") or model_type in _REMOTE_CODE:
        kind = "language model" if is_vague else "model type"
        return CtxextError(
            f'"{model_type}" is not a {kind} of transformers: it needs the code in its checkpoint.',
            hint="Use a version of the checkpoint for transformers; its name often ends in -hf.",
        )
    near = difflib.get_close_matches(model_type, known, n=3)
    hint = "Did you mean " + " or ".join(f'"{name}"' for name in near) + "?" if near else ""
    return CtxextError(f'Unknown model type "{model_type}".', hint=hint)


FULL_TYPES = frozenset(
    {"*", "attention", "full_attention", "global", "hybrid", "indexed_attention"}
    | {"compressed_sparse_attention", "heavily_compressed_attention"}
)
"""Names of layers with attention over the whole context, in any family and version."""

SLIDING_TYPES = frozenset({"chunked_attention", "hybrid_sliding", "local", "sliding", "sliding_attention"})
"""Names of layers that attend to a window or a chunk. Layers of neither set have no attention: Mamba, convolution."""

NOTHING_TO_EXTEND = "its full-attention layers have no position embedding, and its sliding layers keep their own"
"""The reason for families with position embeddings only in sliding layers."""

_NOT_CAUSAL: tuple[str, ...] = ("ForMaskedLM", "ForMultipleChoice", "ForNextSentencePrediction", "ForPreTraining")
_NOT_CAUSAL += ("ForQuestionAnswering", "ForSequenceClassification", "ForTokenClassification", "EncoderModel")
_CAUSAL_ONLY = ("rotary", "alibi", "none")  # Their methods are for causal language models, except in encoders.
MASKED = "AutoModelForMaskedLM"


@dataclass(frozen=True, kw_only=True)
class Family:
    """The position encoding of one model family, and the keys of config.json that specify it.

    Attributes:
        model_type: Its name in config.json.
        positions: "rotary", "learned", "sinusoidal", "alibi", "buckets", "memory", "relative" or "none".
        text_config: The key under which a multimodal model nests its language model's configuration.
        text_type: The model type of the nested configuration if it names none.
        any_text: Whether the nested configuration may have any model type; otherwise it is fixed.
        flat_text: Whether the class reads the language model's keys from the top level if nothing is nested.
        defaults: Values that transformers 5 assumes for missing keys of config.json; derived values are absent.
        defaults_4x: The defaults that differ in transformers 4.57.
        aliases: The family's name for a standard key, with dots for nested keys.
        layers: The rule that gives each layer its type if config.json has no `layer_types`.
        length_key: The key of the context length.
        theta_key: The top-level key of the base that transformers 4 reads.
        partial_key: The top-level key of the share of a head that rotates.
        rotary_dim_key: The key of the number of rotated dimensions, read if `partial_key` is absent.
        nested_rope: Whether transformers 5 nests `rope_parameters` by layer type.
        full_types: The nested keys that the full-attention layers read.
        sliding_types: The nested keys that the sliding layers read.
        local_theta_key: The top-level key of the sliding layers' base.
        layer_theta_key: The key of a list with a base per layer, which overrides all others; 0 means no rotation.
        plain_type: The rope type of an unscaled schedule; with "proportional" the exponents span the whole head.
        rope_scaling: Whether config.json may contain `rope_scaling`: False if transformers 5 would let it overwrite
            the nested dict or affect the sliding layers.
        rope_scaling_keys: The only keys that `rope_scaling` may have for some rope types, if 4.57 is that strict.
        required_keys: Keys that every schedule except the plain one must contain: the original length, and the factor
            on cosine and sine if the name contains mscale.
        explicit_default: Whether the class default is scaled, so that a plain schedule must be explicit.
        default_schedule: That scaled schedule, which the class assumes if config.json has none.
        explicit_head_dim: Whether config.json may contain `head_dim`; classes with such a property refuse it.
        shared_rotary_key: Latent attention: all heads share one rotated key.
        scales_scores: Whether all versions of transformers multiply all scores by the square of YaRN's temperature with
            the weight `mscale_all_dim` of a schedule (DeepSeek-V3).
        rotated: The layers that rotate: "all"; "sliding" (the full-attention layers have no positions); "unless_window"
            (the same, but only in a model that has a window); "no_rope_layers" (one flag per layer, 1 if it rotates);
            "layer_theta_key" (those with a base that is not 0).
        sliding_follows: Whether the sliding layers read the same schedule, so that it cannot be changed for the
            full-attention layers alone.
        switches: Keys that disable the rotary embedding: the value that enables it, and the encoding for other values.
        disputed: Keys that versions of transformers interpret differently: the value with one result in all, and the
            difference.
        positions_by_key: Encodings that replace `positions` if a key is a positive number.
        supported_values: The only values of some keys that methods support, and the reason.
        null_disables: Whether null as the base disables the rotary embedding; all other classes fail.
        lengths_by_key: Context lengths in the class if a key is true, which override config.json.
        reads_top_theta: Whether the class reads a base above the schedules, although it nests them by layer type.
        bidirectional: Whether the class reads `use_bidirectional_attention`: "read", or "assumed" if null means true.
        local_layers: The keys that list local layers, the key of their window, and its default in tokens.
        scalable: Whether transformers' rope types have an effect.
        rope_types: The rope types that transformers 5 supports; "default" means only a changed base.
        rope_types_4x: The same for transformers 4.57 if it differs; empty if 4.57 does not have the family.
        loader: The Auto class of transformers that loads it.
        reason: Why the family cannot be converted at all; empty if it can.
        fixed: Why this configuration's encoding can be read but not changed; empty if it can.
        note: A hint about this family for the user.
    """

    model_type: str
    positions: str = "rotary"
    text_config: str | None = None
    text_type: str | None = None
    any_text: bool = False
    flat_text: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    defaults_4x: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    layers: Mapping[str, Any] = field(default_factory=dict)
    length_key: str = "max_position_embeddings"
    theta_key: str = "rope_theta"
    partial_key: str | None = "partial_rotary_factor"
    rotary_dim_key: str | None = None
    nested_rope: bool = False
    full_types: tuple[str, ...] = ("full_attention",)
    sliding_types: tuple[str, ...] = ("sliding_attention",)
    local_theta_key: str | None = None
    layer_theta_key: str | None = None
    plain_type: str = "default"
    rope_scaling: bool = True
    rope_scaling_keys: Mapping[str, list[str]] = field(default_factory=dict)
    required_keys: tuple[str, ...] = ()
    explicit_default: bool = False
    default_schedule: Mapping[str, Any] = field(default_factory=dict)
    explicit_head_dim: bool = True
    shared_rotary_key: bool = False
    scales_scores: bool = False
    rotated: str = "all"
    sliding_follows: bool = False
    switches: Mapping[str, list[Any]] = field(default_factory=dict)
    disputed: Mapping[str, list[Any]] = field(default_factory=dict)
    positions_by_key: Mapping[str, str] = field(default_factory=dict)
    supported_values: Mapping[str, list[Any]] = field(default_factory=dict)
    null_disables: bool = False
    lengths_by_key: Mapping[str, int] = field(default_factory=dict)
    reads_top_theta: bool = False
    bidirectional: str = ""
    local_layers: Mapping[str, Any] = field(default_factory=dict)
    scalable: bool = True
    rope_types: tuple[str, ...] = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
    rope_types_4x: tuple[str, ...] | None = None
    loader: str = "AutoModelForCausalLM"
    reason: str = ""
    fixed: str = ""
    note: str = ""

    @property
    def encoding(self) -> str:
        """The encoding of the layers that attend to the whole context: "none" if only sliding layers rotate."""
        return "none" if self.reason == NOTHING_TO_EXTEND else self.positions


def _families(part: str) -> dict[str, Family]:
    families = {}
    for name, row in _TABLE[part].items():
        fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
        families[name] = Family(model_type=name, **fields)
    return families


_TABLE = json.loads(Path(__file__).with_name("families.json").read_text(encoding="utf-8"))

FAMILIES: Mapping[str, Family] = _families("families")
"""Every causal language model family of transformers, rotary or not, by model type, and some that are not causal."""

OTHERS: Mapping[str, str] = _TABLE["others"]
"""Kinds of unsupported model types, which AutoModelForCausalLM does not load."""

INNER: Mapping[str, Family] = _families("inner")
"""Language models that are supported only inside a multimodal model, by model type."""


def text_config(config: Mapping[str, Any], family: Family) -> Mapping[str, Any]:
    """Return the language model's part of config.json: the whole, or the nested dict of a multimodal model."""
    nested = config.get(family.text_config) if family.text_config else None
    return nested if isinstance(nested, Mapping) else config


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family of a checkpoint, adjusted to the keys of config.json that change its position encoding."""
    return _apply_switches(config, find_family(config))


def find_type(config: Mapping[str, Any]) -> Family:
    """Return the family of the model type in a config.json."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise CtxextError("config.json has no model_type.", hint="Is this the folder of a transformers checkpoint?")
    family = FAMILIES.get(model_type)
    if family is None:
        raise unknown_type_error(config, FAMILIES, OTHERS)
    return family


def find_family(config: Mapping[str, Any]) -> Family:
    """Return the family of a config.json before adjusting it to position keys; raise the errors of `family_of`."""
    family = find_type(config)
    model_type = family.model_type
    # Such a head attends to later tokens, and methods for causal models do not. Encoders have methods for both sides.
    is_causal = family.positions in _CAUSAL_ONLY and family.loader != MASKED
    architectures = (config.get("architectures") or ()) if is_causal else ()
    if architectures and all(str(name).endswith(_NOT_CAUSAL) for name in architectures):
        raise CtxextError(f'"{architectures[0]}" is not a causal language model.')
    # transformers would build the language model from class defaults, and this file would describe another one.
    unread = next(
        (key for key in _LANGUAGE_PARTS if key != family.text_config and isinstance(config.get(key), Mapping)), None
    )
    if unread:
        raise CtxextError(
            f'config.json has a "{unread}", which transformers does not read for "{model_type}".',
            hint=f"Set model_type to that of the whole model, or move the keys of {unread} to the top level.",
        )
    nested = text_config(config, family)
    return family if nested is config or family.reason else _with_text(family, nested)


_LANGUAGE_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Keys of a nested language model in models of several parts; families use different ones."""


def _with_text(family: Family, nested: Mapping[str, Any]) -> Family:
    """Return the family of a multimodal model with the rules of its language model."""
    place, named = f'"{family.text_config}" of "{family.model_type}"', nested.get("model_type", family.text_type)
    named = _READ_AS.get((family.model_type, str(named)), named)
    if not family.any_text:
        if named not in (None, family.model_type, family.text_type, f"{family.model_type}_text", *_OLDER_NAMES):
            raise CtxextError(
                f'{place} names the model type "{named}", but transformers builds "{family.text_type}" there.',
                hint=f'Set its model_type to "{family.text_type}", or change the model_type of the whole model.',
            )
        named = family.text_type  # The class builds this type even if config.json names an older one.
    inner = FAMILIES.get(str(named)) or INNER.get(str(named))
    if inner is None and family.any_text:
        if named is None:
            raise CtxextError(f"The model_type of {place} is null.", hint="Set it to the type of the language model.")
        near = difflib.get_close_matches(str(named), {**FAMILIES, **INNER}, n=3)
        hint = "Did you mean " + " or ".join(f'"{name}"' for name in near) + "?" if near else ""
        raise CtxextError(
            f'{place} has the unknown model type "{named}".',
            hint=hint or "docs/families.md lists the supported language models.",
        )
    if inner is None:
        return family
    return dataclasses.replace(
        inner,
        model_type=family.model_type,
        text_config=family.text_config,
        text_type=str(named),
        any_text=family.any_text,
        flat_text=family.flat_text,
        loader=family.loader,
        bidirectional=family.bidirectional,
        rope_types_4x=inner.rope_types_4x if family.rope_types_4x is None else family.rope_types_4x,
    )


_READ_AS = {("kimi_k25", "kimi_k2"): "deepseek_v3"}
"""Model types by family and inner model type, for families with a class that builds another inner model."""

_OLDER_NAMES = ("Glm4vMoe_text",)
"""Names of the language model in other versions of transformers."""


def language_types(config: Mapping[str, Any], family: Family) -> frozenset[str]:
    """Return the model types of a language model and of the whole model."""
    return frozenset({family.model_type, family.text_type or family.model_type})


def _apply_switches(config: Mapping[str, Any], family: Family) -> Family:
    """Return the family adjusted to keys that disable or fix the rotary embedding."""
    for key, (rotary, positions) in family.switches.items():
        value = read(config, family, key)
        if value != rotary and not (isinstance(rotary, bool) and bool(value) == rotary):
            return dataclasses.replace(family, positions=positions)
    text = text_config(config, family)
    for key, positions in family.positions_by_key.items():
        value = plain_value(text, family, key)
        if isinstance(value, int) and value > 0:
            family = dataclasses.replace(family, positions=positions)
    for key, (values, why) in family.supported_values.items():
        value = plain_value(text, family, key)
        if value not in values:
            return dataclasses.replace(family, reason=f'"{key}" is {json.dumps(value)}: {why}')
    # The result is for transformers 4 and 5, and no change is right in both if they interpret a key differently.
    for key, (rotary, why) in family.disputed.items():
        if text.get(key, rotary) != rotary:
            return dataclasses.replace(family, fixed=f'"{key}" is {json.dumps(text[key])}: {why}')
    place = family.aliases.get("rope_theta", "").rpartition(".")[0]
    if place and "rope_theta" in text and not isinstance(text.get("rope_parameters"), Mapping):
        why = f"transformers 5 reads it instead of that of {place}, and 4.57 does not; remove one of them"
        return dataclasses.replace(family, fixed=f'"rope_theta" is {json.dumps(text["rope_theta"])}: {why}')
    kind = text.get("position_embedding_type")
    if family.positions == "learned" and kind not in (None, "absolute", *DISTANCES):
        positions = {"rotary": "rotary", "rope": "rotary", "alibi": "alibi"}.get(str(kind), "none")
        why = f'position_embedding_type is "{kind}", which only the code of the checkpoint supports'
        return dataclasses.replace(family, positions=positions, reason=why)
    if family.reason != NOTHING_TO_EXTEND and (null := _null_schedule(text, family)):
        return dataclasses.replace(family, reason=f'"{null}" of rope_parameters is null, so these layers do not rotate')
    if family.null_disables and has_null_theta(text, family):
        return dataclasses.replace(family, positions="none")
    # A longer schedule would have no effect, which must not look like a conversion that works.
    if family.rotated != "all" and not family.reason and not rotated_layers(config, family):
        return dataclasses.replace(family, reason=NOTHING_TO_EXTEND)
    if family.positions == "rotary" and not family.reason:
        # A schedule has one base and one size for all layers that it changes. Other layers are refused here, so that
        # `inspect` lists no method that `convert` refuses.
        try:
            for key in _ONE_FOR_ALL:
                read(config, family, key)
        except DifferentLayersError as error:
            return dataclasses.replace(family, reason=error.message)
    return family


_ONE_FOR_ALL = ("rope_theta", "head_dim", "qk_rope_head_dim")
"""Values of the full-attention layers that a schedule is computed from."""


class DifferentLayersError(CtxextError):
    """Layers that a method changes together have different values of a key."""


def single_value(values: Iterable[Any], key: str) -> Any:
    """Return the value that several layers share; None if there are no layers.

    No value of a single layer is taken for all in any other place.

    Raises:
        DifferentLayersError: the values differ.
    """
    distinct = list(dict.fromkeys(values))
    if len(distinct) > 1:
        listed = ", ".join(json.dumps(value) for value in distinct[:5])
        raise DifferentLayersError(
            f'its full-attention layers have different values of "{key}" ({listed}), and methods change one value'
        )
    return distinct[0] if distinct else None


def bidirectional_key(config: Mapping[str, Any], family: Family) -> str:
    """Return the key and value of config.json that let text tokens attend to later tokens; empty if there is none.

    With "vision" only images are bidirectional, and PaliGemma's class replaces null by true.
    """
    key = "use_bidirectional_attention"
    for text in (text_config(config, family), config):
        if text.get("is_causal") is False:
            return '"is_causal": false'
        value = text.get(key)
        if value is None and family.bidirectional == "assumed":
            value = True
        if family.bidirectional and value and value != "vision":
            return f'"{key}": {json.dumps(value)}'
    return ""


def _null_schedule(text: Mapping[str, Any], family: Family) -> str:
    """Return the first layer type with null as its schedule; empty if there is none."""
    schedule = text.get("rope_parameters")
    if not family.nested_rope or not isinstance(schedule, Mapping):
        return ""
    return next((name for name in (*family.full_types, *family.sliding_types) if schedule.get(name, 0) is None), "")


DISTANCES = ("relative_key", "relative_key_query")
"""The values of `position_embedding_type` for learned embeddings of distances."""


def read(config: Mapping[str, Any], family: Family, key: str) -> Any:
    """Return a value as in transformers 5: from config.json, by default that of the class or a derived one.

    Keys are the standard names of transformers (`num_attention_heads`, `rope_theta` ...), not the family's names.
    `rope_theta`, `partial_rotary_factor` and `head_dim` are those of the full-attention layers; `local_rope_theta` is
    the base of the sliding ones.
    """
    text = text_config(config, family)
    if key in ("rope_theta", family.theta_key):
        bases = _layer_thetas(text, family, rotated_layers(config, family))
        return single_value(bases, str(family.layer_theta_key)) or _theta(text, family)
    if key in ("local_rope_theta", family.local_theta_key):
        bases = _layer_thetas(text, family, sliding_layers(config, family))
        return single_value(bases, str(family.layer_theta_key)) or _local_theta(text, family)
    if key == "partial_rotary_factor":
        return _partial(config, text, family)
    if key == "head_dim":
        return _head_dim(config, text, family)
    value = plain_value(text, family, key)
    if key == "qk_rope_head_dim" and family.shared_rotary_key:
        return value_of_layers(config, family, key, full_attention_layers(config, family)) or value
    if key == "max_position_embeddings":
        return next((length for name, length in family.lengths_by_key.items() if text.get(name)), value)
    if key == "num_hidden_layers" and value:  # A block of LongCat-Flash has two attention layers.
        return value * family.defaults.get("layers_per_block", 1)
    if key == "sliding_window" and plain_value(text, family, "use_sliding_window") is False:  # Qwen2 keeps the window.
        return None
    if key == "num_key_value_heads":
        # Falcon's first architecture shares one KV head and has no key for it.
        if plain_value(text, family, "multi_query") and not plain_value(text, family, "new_decoder_architecture"):
            return 1
        return value or read(config, family, "num_attention_heads")
    return value


def plain_value(text: Mapping[str, Any], family: Family, key: str) -> Any:
    """Return the raw value of a key under the family's name or the standard one, else its default."""
    for name in (family.aliases.get(key, key), key):
        place: Any = text
        for part in name.split("."):
            place = place.get(part, _ABSENT) if isinstance(place, Mapping) else _ABSENT
        if place is not _ABSENT:
            return place
    return family.defaults.get(key)


_ABSENT: Any = object()


def _head_dim(config: Mapping[str, Any], text: Mapping[str, Any], family: Family) -> Any:
    """Return the head size of the full-attention layers; sliding layers may have another one (Gemma 4)."""
    if size := value_of_layers(config, family, "head_dim", full_attention_layers(config, family)):
        return size
    # Heads of Zamba are twice as large: its shared attention reads hidden states beside the embeddings.
    value = plain_value(text, family, "global_head_dim") or plain_value(text, family, "head_dim")
    hidden, heads = plain_value(text, family, "hidden_size"), plain_value(text, family, "num_attention_heads")
    return value or (family.defaults.get("head_dim_multiple", 1) * hidden // heads if hidden and heads else None)


def own_config(text: Mapping[str, Any], layer: int) -> Mapping[str, Any]:
    """Return the entries of config.json for a single layer."""
    return (text.get("per_layer_config") or {}).get(str(layer)) or {}


def value_of_layers(config: Mapping[str, Any], family: Family, key: str, layers: Sequence[int]) -> Any:
    """Return the value of a key that config.json has for single layers; None if it has none for these layers."""
    text = text_config(config, family)
    if not text.get("per_layer_config"):
        return None
    own = [own_config(text, layer).get(key) for layer in layers]
    return single_value((value or plain_value(text, family, key) for value in own), key) if any(own) else None


def schedule_keys(text: Mapping[str, Any], family: Family) -> tuple[str, ...]:
    """Return the keys of effective schedules, as in transformers 5: only `rope_scaling` if set, unless nested."""
    # docs/traps.md, traps 19 and 29: not even the base of rope_parameters is read then.
    return ("rope_scaling",) if text.get("rope_scaling") and not family.nested_rope else _SCHEDULE_KEYS


_SCHEDULE_KEYS = ("rope_scaling", "rope_parameters")


def assumed_schedule(text: Mapping[str, Any], family: Family) -> Mapping[str, Any]:
    """Return the scaled schedule that the class assumes if config.json has none; empty for most classes."""
    return {} if any(text.get(key) for key in _SCHEDULE_KEYS) else family.default_schedule


def _schedules(text: Mapping[str, Any], family: Family, types: tuple[str, ...]) -> list[Mapping[str, Any]]:
    """Return the rope dicts that the given layer types read, highest precedence first."""
    if assumed := assumed_schedule(text, family):
        return [assumed]
    schedules: list[Mapping[str, Any]] = []
    for key in schedule_keys(text, family):
        value = text.get(key)
        if isinstance(value, Mapping):
            nested = [value[name] for name in types if isinstance(value.get(name), Mapping)]
            flat = not any(isinstance(item, Mapping) for item in value.values())
            schedules += nested or ([value] if flat else [])
    return schedules


def _theta(text: Mapping[str, Any], family: Family) -> Any:
    return next(_stated_thetas(text, family), family.defaults.get("rope_theta"))


def _stated_thetas(text: Mapping[str, Any], family: Family) -> Iterator[Any]:
    """Yield the bases in config.json for the full-attention layers, highest precedence first, including null.

    Null never means the default: most classes fail with it, and Olmo-Hybrid does not rotate.
    """
    inside = [
        schedule["rope_theta"] for schedule in _schedules(text, family, family.full_types) if "rope_theta" in schedule
    ]
    split = len(inside) if family.nested_rope else 1
    yield from inside[:split]
    if reads_top_theta(family):
        value = plain_value(text, dataclasses.replace(family, defaults={family.theta_key: _ABSENT}), family.theta_key)
        if value is not _ABSENT:
            yield value
    yield from inside[split:]


def reads_top_theta(family: Family) -> bool:
    """Return whether the class reads a base above the schedules, as transformers 4 wrote it."""
    # A class with a base for each layer type ignores one above them, silently (docs/traps.md, trap 33).
    has_own = family.nested_rope and not family.rope_scaling and "rope_theta" in family.defaults
    return not has_own or family.theta_key != "rope_theta" or family.reads_top_theta


def has_null_theta(text: Mapping[str, Any], family: Family) -> bool:
    """Return whether config.json contains null as the base of layers."""
    # docs/traps.md, trap 33: for some keys null means the class default, but never for a base.
    has_local = family.nested_rope or family.local_theta_key
    local = next(_stated_local_thetas(text, family), 0) if has_local else 0
    return next(_stated_thetas(text, family), 0) is None or local is None


def _layer_thetas(text: Mapping[str, Any], family: Family, layers: Sequence[int]) -> list[Any]:
    """Return the nonzero bases of some layers, if config.json lists one per layer (Granite with windows)."""
    thetas = text.get(family.layer_theta_key) if family.layer_theta_key else None
    listed = [_entry(thetas, index, str(family.layer_theta_key)) for index in layers] if thetas else []
    return [theta for theta in listed if theta]


def base_of_module(config: Mapping[str, Any], family: Family, module: str) -> float | None:
    """Return the base of a rotary embedding in a model with one for each base, in ascending order; None in others."""
    number = module.rpartition(".")[2]
    layers = range(read(config, family, "num_hidden_layers") or 0) if family.layer_theta_key else ()
    bases = sorted(set(_layer_thetas(text_config(config, family), family, layers)))
    return float(bases[int(number)]) if number.isdigit() and int(number) < len(bases) else None


def _local_theta(text: Mapping[str, Any], family: Family) -> Any:
    """Return the base of the sliding layers; that of the full-attention layers if the family has only one."""
    if not family.nested_rope and not family.local_theta_key:
        return _theta(text, family)
    return next(_stated_local_thetas(text, family), family.defaults.get("local_rope_theta"))


def _stated_local_thetas(text: Mapping[str, Any], family: Family) -> Iterator[Any]:
    """Yield the bases in config.json for the sliding layers, highest precedence first."""
    for schedule in _schedules(text, family, family.sliding_types):
        if "rope_theta" in schedule:
            yield schedule["rope_theta"]
    if (key := family.local_theta_key or family.theta_key) in text:
        yield text[key]


def _partial(config: Mapping[str, Any], text: Mapping[str, Any], family: Family) -> Any:
    """Return the rotated share of a head, between 0 and 1; None if config.json has null or is ambiguous."""
    schedules = _schedules(text, family, family.full_types)
    if inside := [schedule["partial_rotary_factor"] for schedule in schedules if "partial_rotary_factor" in schedule]:
        return None if inside[0] is None else float(inside[0])
    above = text.get(family.partial_key) if family.partial_key else None
    if above is None and family.rotary_dim_key and text.get(family.rotary_dim_key):
        above = text[family.rotary_dim_key] / _head_dim(config, text, family)
    if above is None:
        above = text.get("partial_rotary_factor")
    default = family.defaults.get("partial_rotary_factor", 1.0)
    if above is None and default != 1 and ((schedules and family.nested_rope) or family.partial_key in text):
        return None  # Some classes then rotate the whole head, others the default share.
    return float(default if above is None else above)


def rotary_dim(config: Mapping[str, Any], family: Family) -> int:
    """Return the number of dimensions of a head that rotate, in the full-attention layers."""
    if family.shared_rotary_key:
        return int(read(config, family, "qk_rope_head_dim"))
    head_dim = read(config, family, "head_dim") or 0
    partial = read(config, family, "partial_rotary_factor")
    if partial is None:  # Reading the schedule raises an error.
        return int(head_dim)
    if family.plain_type == "proportional":
        return 2 * int(partial * head_dim // 2)  # The class counts pairs.
    return int(head_dim * partial)


def layer_types(config: Mapping[str, Any], family: Family, length: int | None = None) -> list[str]:
    """Return the type of each layer, from config.json or by the rule of the family's class.

    Some types depend on the context length in tokens, by default that of config.json.
    """
    text = text_config(config, family)
    count = read(config, family, "num_hidden_layers") or 0
    rule = family.layers
    listed = plain_value(text, family, "layer_types") or text.get(rule.get("letters", ""))
    if isinstance(listed, list | tuple | str):
        return [str(name) for name in listed]
    if "every" in rule:
        every, offset = plain_value(text, family, rule["every"]), plain_value(text, family, rule["offset"])
        types = ["full_attention" if index % every == offset else rule["otherwise"] for index in range(count)]
        return [*rule.get("prefix", ()), *types][:count]
    if "indices" in rule:
        attention = plain_value(text, family, rule["indices"])
        if attention is None:
            return [rule.get("absent", rule["otherwise"])] * count
        kinds, first = (rule["otherwise"], rule.get("listed", "full_attention")), rule.get("first", 0)
        listed = frozenset(attention)
        return [kinds[index + first in listed] for index in range(count)]
    length = length or read(config, family, "max_position_embeddings") or 0
    window = read(config, family, "sliding_window") or 0
    window = window if window < length else 0  # Such a window has no effect (Phi-3 with 128k).
    if rule.get("window") == "all":
        return ["sliding_attention" if window else "full_attention"] * count
    if rule.get("window") == "above":
        first = read(config, family, "max_window_layers") if window else None
        return ["full_attention" if first is None or index < first else "sliding_attention" for index in range(count)]
    types = _repeat_pattern(rule, plain_value(text, family, rule["key"]) if "key" in rule else None, count)
    flags = text.get("no_rope_layers") if rule.get("key") == "no_rope_layer_interval" else None
    return [rule["period"][0 if flag else -1] for flag in flags] if flags else types


def _repeat_pattern(rule: Mapping[str, Any], length: Any, count: int) -> list[str]:
    """Repeat a pattern of layer types; `length`, from a key of config.json, may replace its length."""
    period = list(rule.get("period") or ["full_attention"])
    if isinstance(length, int) and length > 0:
        odd = period.index("full_attention") if period.count("full_attention") == 1 else len(period) - 1
        rest = period[odd - 1]
        period = [period[odd], *[rest] * (length - 1)] if odd == 0 else [*[rest] * (length - 1), period[odd]]
    prefix = list(rule.get("prefix") or [])
    types = [*prefix, *(period[index % len(period)] for index in range(max(0, count - len(prefix))))][:count]
    if types and rule.get("last"):  # Some classes force full attention in the last layer, whatever the pattern.
        types[-1] = rule["last"]
    return types


def full_attention_layers(config: Mapping[str, Any], family: Family) -> list[int]:
    """Return the layers with queries that may attend to the whole context, rotated or not."""
    return [index for index, name in enumerate(layer_types(config, family)) if name in FULL_TYPES]


def sliding_layers(config: Mapping[str, Any], family: Family) -> list[int]:
    """Return the layers that attend only to a window or a chunk. Their rotary embedding does not change."""
    return [index for index, name in enumerate(layer_types(config, family)) if name in SLIDING_TYPES]


def window_of(config: Mapping[str, Any], family: Family) -> int | None:
    """Return the size in tokens of the window or chunk that sliding layers attend to, or None."""
    return read(config, family, "attention_chunk_size") or read(config, family, "sliding_window") or None


def idle_window(config: Mapping[str, Any], family: Family, length: int) -> int | None:
    """Return the window in tokens that takes effect only at a longer context length, or None."""
    # The model was not trained with such a window, so a longer context must not switch it on silently.
    present = read(config, family, "max_position_embeddings")
    windows = _windows(config, family, length)
    return next((window for window in windows if present and present <= window < length), None)


def distance_beyond(config: Mapping[str, Any], family: Family, trained: int, length: int) -> int | None:
    """Return the window in tokens if rotated sliding layers see farther than in training, or None.

    Args:
        config: The content of config.json.
        family: Its family.
        trained: The original context length in tokens.
        length: The new one.
    """
    if family.positions != "rotary":
        return None
    text, layers = text_config(config, family), sliding_layers(config, family)
    if family.layer_theta_key and text.get(family.layer_theta_key) and not _layer_thetas(text, family, layers):
        return None  # Their base is 0, so they do not rotate.
    return next((window for window in _windows(config, family, length) if min(window, length) > trained), None)


def _windows(config: Mapping[str, Any], family: Family, length: int) -> list[int]:
    """Return the sizes in tokens of the windows and chunks that layers have at a context length."""
    text, types = text_config(config, family), layer_types(config, family, length)
    if rule := family.local_layers:
        listed = next((text[key] for key in rule["keys"] if key in text), "local")
        windows = [text.get(rule["window"], rule["default"])] if "local" in json.dumps(listed) else []
    else:
        windows = [read(config, family, "attention_chunk_size")] if "chunked_attention" in types else []
        windows += [read(config, family, "sliding_window")] if SLIDING_TYPES.intersection(types) else []
    return [window for window in windows if window]


def serves_sliding(config: Mapping[str, Any], family: Family, module: str, layer_type: str = "") -> bool:
    """Return whether a rotary embedding serves sliding layers only, by its name, layer type, layer or base."""
    if (base := base_of_module(config, family, module)) is not None:
        return bool(base != read(config, family, "rope_theta"))
    return any(word in f"{module}.{layer_type}" for word in ("local", *family.sliding_types))


def _entry(listed: Sequence[Any], index: int, key: str) -> Any:
    if index >= len(listed):
        raise CtxextError(f'"config.json": "{key}" has "{len(listed)}" entries and lacks layer {index}.')
    return listed[index]


def rotated_layers(config: Mapping[str, Any], family: Family) -> list[int]:
    """Return the full-attention layers that rotate queries and keys, to which a longer schedule applies.

    Empty if these layers have no positions (Cohere 2, Llama 4), so that there is nothing to extend.
    """
    full = full_attention_layers(config, family)
    if family.rotated == "sliding" or (family.rotated == "unless_window" and read(config, family, "sliding_window")):
        return []
    if family.rotated == "no_rope_layers":
        text = text_config(config, family)
        interval = plain_value(text, family, "no_rope_layer_interval")
        flags = text.get("no_rope_layers") or [
            (index + 1) % interval for index in range(read(config, family, "num_hidden_layers"))
        ]
        return [index for index in full if _entry(flags, index, "no_rope_layers")]
    if family.rotated == "layer_theta_key":
        thetas = text_config(config, family).get(family.layer_theta_key or "")
        return [index for index in full if not thetas or _entry(thetas, index, str(family.layer_theta_key))]
    return full
