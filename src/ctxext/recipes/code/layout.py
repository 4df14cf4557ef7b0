"""The layout of a checkpoint with code: its config.json, and the stub file that names family and methods.

The weights stay unchanged. `config.json` keeps the original `model_type` and gains three things: the stub's classes
(`architectures`, `auto_map`); a sentinel that replaces the rope type and another key (`guards.py`), so that loading it
as a plain model fails instead of being silently wrong; and the block `ctxext_code` with the hidden values and one entry
per method, read by `portable/modeling_family.py` or, for families without a rope type, `portable/modeling_alibi.py`.
Nothing here depends on the method.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ctxext.checkpoint.auto_class import CAUSAL, MASKED
from ctxext.checkpoint.families import FAMILIES, Family, idle_window, layer_types, text_config
from ctxext.errors import CtxextError
from ctxext.recipes.code import guards
from ctxext.recipes.code.guards import CODE_KEY, SENTINEL
from ctxext.recipes.encodings.base import Config
from ctxext.recipes.encodings.dialects import STOCK_KEYS, unsupported_reason
from ctxext.recipes.encodings.rotary import Rotary, attention_scaling, write_rotary
from ctxext.recipes.model_config import ModelConfig

STUB_FILE = "modeling_ctxext.py"
SHARED_FILES: Mapping[str, tuple[str, ...]] = {
    "rotary": ("configuration_ctxext.py", "method.py", "private_copy.py", "modeling_family.py"),
    "alibi": ("private_copy.py", "modeling_alibi.py"),
}
"""The common files of all such checkpoints, by encoding; the last copies the family's module."""

PREFIX = "Ctxext"
"""The prefix of the stub's classes."""

HEADS = ("SequenceClassification", "TokenClassification", "QuestionAnswering")
"""Other heads that some families have in some versions of transformers."""

CONFIGURATION = "configuration_ctxext"
"""The portable file that reads a configuration with a hidden rope type, as named in `auto_map`."""

_TOWER = "its language model is another family's; convert that family's own checkpoint"
_WHOLE = "code for models that {} loads is untested; use a method that only changes config.json"
_BOTH_SIDES = (
    "its attention is bidirectional, and methods with code are for causal attention; use a method that only changes "
    "config.json, such as yarn"
)
_INDEXER = "its indexer uses the same rotary embedding, which must stay unchanged"

UNREACHED: Mapping[str, str] = {
    "blt": "it consists of four models, each with a rotary embedding",
    "fuyu": _TOWER,
    "got_ocr2": _TOWER,
    "jetmoe": "its queries are assigned to KV heads in turn, but the code expects groups",
    "moss_transcribe_diarize": _TOWER,
    "qwen4_exp": _INDEXER,
    "qwen4_exp_text": _INDEXER,
}
"""Families with a rotary embedding that the portable code cannot change, and the reasons."""

_ORIGINAL = "original_max_position_embeddings"
# Keys that are in `rope_scaling` with a hidden schedule, and one level up otherwise.
_BESIDE_SCALING = frozenset({"rope_theta", "partial_rotary_factor"})
# The keys that are hidden. Engines multiply lengths by a `factor`, so none may stay beside the sentinel.
_SCHEDULE = STOCK_KEYS - _BESIDE_SCALING - {_ORIGINAL}


@dataclass(frozen=True)
class Classes:
    """The transformers classes of a family.

    Attributes:
        modeling: The module that defines them, for example `transformers.models.llama.modeling_llama`.
        by_auto_class: The class behind each Auto class that can load the checkpoint.
        heads: The names of its classes with another head, by Auto class, whether or not this version defines them.
        whole: The class of the configuration if it contains that of a text model; otherwise empty.
    """

    modeling: str
    by_auto_class: Mapping[str, str]
    heads: Mapping[str, str] = field(default_factory=dict)
    whole: str = ""

    @property
    def offered_heads(self) -> dict[str, str]:
        """The heads that the installed version of transformers defines."""
        code = Path(str(_origin(self.modeling))).read_text(encoding="utf-8")
        return {auto: name for auto, name in self.heads.items() if f"\nclass {name}(" in code}


def family_classes(config: Mapping[str, Any]) -> Classes:
    """Return the classes of a configuration's family, without importing its modeling code."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

    causal_lms, models = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_MAPPING_NAMES
    whole_type = model_type = str(config.get("model_type"))
    causal_lm = causal_lms.get(model_type)
    inner = str((config.get("text_config") or {}).get("model_type"))
    if causal_lm is not None and causal_lms.get(inner) == causal_lm:
        model_type = inner  # The text model of a larger one, in a checkpoint with the whole model's configuration.
    model = models.get(model_type)
    family = FAMILIES.get(whole_type)
    if family is not None and family.loader != CAUSAL:
        raise CtxextError(
            f'"{whole_type}" does not support methods with code: {refusal(family)}.', hint="Try --method yarn."
        )
    if causal_lm is None or not isinstance(model, str):
        raise CtxextError(f'The installed transformers has no causal language model of type "{model_type}".')
    classes = {"AutoModel": model, "AutoModelForCausalLM": causal_lm}
    # A model type without modeling code borrows the classes of another (internlm3 those of llama).
    for name in (model_type, *(name for name, borrowed in causal_lms.items() if borrowed == causal_lm)):
        module = model_type_to_module_name(name)
        if origin := _origin(modeling := f"transformers.models.{module}.modeling_{module}"):
            whole = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(whole_type)
            if isinstance(whole, str) and f"\nclass {whole}(" in Path(origin).read_text(encoding="utf-8"):
                classes["AutoModelForImageTextToText"] = whole
            # Heads on a language model do not accept the configuration of a whole model.
            stem = model.removesuffix("Model") if model_type == whole_type else ""
            heads = {f"AutoModelFor{head}": f"{stem}For{head}" for head in HEADS if stem}
            return Classes(
                modeling, classes, heads, CONFIG_MAPPING_NAMES[whole_type] if "text_config" in config else ""
            )
    raise CtxextError(f'The installed transformers has no modeling code for "{model_type}".')


def _origin(module: str) -> str | None:
    """Return the file of a module, without importing it; None if it is not installed."""
    import importlib.util

    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None
    return spec.origin if spec else None


def refusal(family: Family) -> str:
    """Return the reason why a family does not support methods with code; empty if it does."""
    whole = {CAUSAL: "", MASKED: _BOTH_SIDES}.get(family.loader, _WHOLE.format(family.loader))
    return family.reason or UNREACHED.get(family.model_type, whole)


def with_step(model: ModelConfig, name: str, settings: Mapping[str, Any]) -> ModelConfig:
    """Return the configuration with another method in its code, and its settings as JSON.

    The first method hides the schedule.
    """
    hidden = _with_hidden_schedule if isinstance(model.encoding, Rotary) else _with_hidden_values
    config = copy.deepcopy(model.config) if guards.code_of(model.config) else hidden(model)
    text = _text(config, model.family)
    block = text[CODE_KEY]
    text[CODE_KEY] = {**block, "steps": [*block["steps"], {"method": name, **settings}]}
    return ModelConfig(config, model.family, model.encoding)


def with_length(model: ModelConfig, length: int) -> ModelConfig:
    """Return the configuration of a checkpoint with code at another context length in tokens.

    The schedule stays. transformers computes LongRoPE's factor on cos and sin from the length in config.json (Phi-3),
    which is now the new one. Therefore the old factor is written next to the schedule.
    """
    longer, rotary = model.with_context_length(length), model.encoding
    if not isinstance(rotary, Rotary) or rotary.rope_type != "longrope":
        return longer
    if rotary.parameters.get("attention_factor") is not None:
        return longer
    held = {"attention_factor": attention_scaling(rotary)}
    text = _text(longer.config, model.family)
    text[CODE_KEY] = {**text[CODE_KEY], "held": held}
    return ModelConfig(longer.config, model.family, longer.rotary.with_parameters({**rotary.parameters, **held}))


def with_idle_window(model: ModelConfig, length: int) -> ModelConfig:
    """Return the configuration with an idle window raised to a longer context length in tokens.

    An idle window has no effect in the source, because it covers the whole context. In the longer context it would hide
    the distant tokens that the method maps.
    """
    config, family = model.config, model.family
    if not idle_window(config, family, length) or layer_types(config, family) == layer_types(config, family, length):
        return model
    edited = copy.deepcopy(config)
    _text(edited, family)[family.aliases.get("sliding_window", "sliding_window")] = length
    return ModelConfig(edited, family, model.encoding)


def depends_on_prompt(config: Mapping[str, Any]) -> bool:
    """Return whether some method depends on the prompt, so that a cache is valid for one prompt only."""
    return any(step.get("per_prompt") for step in guards.code_of(config).get("steps", ()))


def _with_hidden_schedule(model: ModelConfig) -> Config:
    """Return a copy of the configuration with the stub's classes, an empty list of steps, and the sentinel."""
    family, rotary = model.family, model.rotary
    classes = family_classes(model.config)
    # Keep a schedule of the source that no method writes for this family.
    source_schedule = dict(rotary.parameters) if unsupported_reason(family, rotary.rope_type) else {}
    plain = rotary.with_parameters({"rope_type": "default"}) if source_schedule else rotary
    edited = write_rotary(model.config, family, plain)
    text = _text(edited, family)
    schedules, is_shown = text["rope_parameters"], family.model_type in guards.SHOWN
    names = [name for name in family.full_types if isinstance(schedules.get(name), Mapping)]
    full = schedules[names[0]] if names else schedules
    schedule = {key: value for key, value in full.items() if key in _SCHEDULE or key == _ORIGINAL}
    block: dict[str, Any] = {"rope": {**schedule, **source_schedule}, **({"shown": True} if is_shown else {})}
    if not is_shown or family.nested_rope:
        # The full-attention layers have the sentinel as their rope type, in the v4 and v5 formats.
        hidden = {"rope_type": SENTINEL, **{key: value for key, value in full.items() if key not in _SCHEDULE}}
        text["rope_parameters"] = {**schedules, **{name: dict(hidden) for name in names}} if names else hidden
        if family.rope_scaling:
            text["rope_scaling"] = dict(hidden)
    text[CODE_KEY] = {**block, "hidden": guards.hide(text, family.model_type), "steps": []}
    return _naming(edited, classes, edited.get("auto_map") or {}, by_rope_type=True)


def _with_hidden_values(model: ModelConfig) -> Config:
    """Return a copy of the configuration with the stub's classes and an empty list of steps.

    It is for families without a schedule, which have only the guard.
    """
    edited = copy.deepcopy(model.config)
    text = _text(edited, model.family)
    text[CODE_KEY] = {"hidden": guards.hide(text, model.family.model_type), "steps": []}
    # Code of the source belongs to another class, which would not fit the family's.
    return _naming(edited, family_classes(model.config), {}, by_rope_type=False)


def _naming(edited: Config, classes: Classes, others: Mapping[str, Any], *, by_rope_type: bool) -> Config:
    stub, causal_lm = STUB_FILE.removesuffix(".py"), classes.by_auto_class["AutoModelForCausalLM"]
    named = [str(name) for name in edited.get("architectures") or ()]
    whole = classes.by_auto_class.get("AutoModelForImageTextToText")
    edited["architectures"] = [PREFIX + (whole if whole and whole in named else causal_lm)]
    ours = {auto: f"{stub}.{PREFIX}{name}" for auto, name in {**classes.by_auto_class, **classes.offered_heads}.items()}
    if by_rope_type:
        ours["AutoConfig"] = f"{CONFIGURATION}.{PREFIX}Config"
    edited["auto_map"] = {**others, **ours}
    return edited


def without_code(config: Config) -> Config:
    """Return a copy of a configuration with the original classes and the model's schedule restored."""
    plain = copy.deepcopy(config)
    nested = plain.get("text_config")
    text = nested if isinstance(nested, dict) and nested.get(CODE_KEY) else plain
    block = text.pop(CODE_KEY, None)
    if not block:
        return plain
    guards.show(text, block)
    for key in ("rope_parameters", "rope_scaling"):
        for entry in (text.get(key) or {}, *(text.get(key) or {}).values()):
            if isinstance(entry, dict) and entry.get("rope_type") == SENTINEL:
                entry.update(block.get("rope") or {})
    if isinstance(scaling := text.get("rope_scaling"), dict):
        text["rope_scaling"] = {key: scaling[key] for key in scaling if key not in _BESIDE_SCALING}
        if text["rope_scaling"] == {"rope_type": "default"}:
            del text["rope_scaling"]
    plain["architectures"] = [str(name).removeprefix(PREFIX) for name in plain.get("architectures") or []]
    ours = (STUB_FILE.removesuffix(".py") + ".", CONFIGURATION + ".")
    named = plain.pop("auto_map", None) or {}
    auto_map = {name: place for name, place in named.items() if not str(place).startswith(ours)}
    return {**plain, "auto_map": auto_map} if auto_map else plain


def _text(edited: Config, family: Family) -> Config:
    """Return the language model's part of a configuration, after replacing it there with a copy that may be changed."""
    if text_config(edited, family) is edited or family.text_config is None:
        return edited
    edited[family.text_config] = dict(edited[family.text_config])
    text: Config = edited[family.text_config]
    return text


def render_stub(classes: Classes, methods: Sequence[tuple[str, str, str]], files: Iterable[str], home: str) -> str:
    """Return the text of the stub file, which names the family and the methods of a checkpoint.

    Args:
        classes: The classes of the family.
        methods: For each method its title, its portable module and its portable class.
        files: All modules of the checkpoint; transformers 4 copies only those that the stub itself imports.
        home: The module that copies the family's.
    """
    titles = " and ".join(dict.fromkeys(title for title, _, _ in methods))
    named = {home: "family"}
    for _, module, name in methods:
        named[module] = f"{named[module]}, {name}" if module in named else name
    # Of other modules only `__name__` is imported, as their names might hide those of the methods.
    taken = {module: named.get(module, f"__name__ as _{module}") for module in sorted({*files, *named})}
    imports = "".join(f"from .{module} import {names}\n" for module, names in taken.items())
    listed = ", ".join(dict.fromkeys(name for _, _, name in methods))
    # transformers 5.13 to 5.18 compare the names of a class's configuration and of the checkpoint's.
    takes = f"\n    config_class = transformers.{classes.whole}\n" if classes.whole else ""
    imports = f"import transformers\n\n{imports}" if takes else imports
    defined = "".join(
        f'\n\nclass {PREFIX}{name}(modeling.{name}):\n    """{name} with {titles}."""\n{takes}'
        for name in dict.fromkeys(classes.by_auto_class.values())
    )
    # A class that two Auto classes load (Gemma 3) can be registered for one of them only: the first.
    first = {name: auto for auto, name in reversed(list(classes.by_auto_class.items()))}
    registered = "".join(f'{PREFIX}{name}.register_for_auto_class("{auto}")\n' for name, auto in first.items())
    # The heads of a family depend on the installed transformers; the text must not.
    heads = "".join(
        f'\nif hasattr(modeling, "{name}"):\n\n    class {PREFIX}{name}(modeling.{name}):\n'
        f'        """{name} with {titles}."""\n\n    {PREFIX}{name}.register_for_auto_class("{auto}")\n'
        for auto, name in classes.heads.items()
    )
    return f'''"""{classes.by_auto_class["AutoModelForCausalLM"]} with {titles}; each method has its own file."""

{imports}
modeling = family(__name__, "{classes.modeling}", [{listed}])
{defined}

{registered}{heads}'''
