"""Checkpoints of ctxext 0.1.0 and 0.2.0: their config.json is converted to the format of this version.

They still load with the code that they carry. Only this file knows the old formats; their files of code are recognised
by digest (`own_code.py`).
"""

import copy
from collections.abc import Mapping
from typing import Any

from ctxext.recipes.code import guards

_BLOCK, _PREFIX = "ctxext_mspoe", "MsPoE"
MODELING_FILE = "modeling_mspoe.py"
MODELING_DIGEST = "10971240fb82767fe3edba8513c36b1da7371de328e71a18bf8a59c99eb057b9"
"""SHA-256 of the modeling code in every checkpoint of 0.1.0 with code."""


def is_legacy(config: Mapping[str, Any]) -> bool:
    """Whether 0.1.0 wrote a configuration, for a checkpoint with code."""
    parts = (config, config.get("text_config"))
    return any(isinstance(part, Mapping) and isinstance(part.get(_BLOCK), Mapping) for part in parts)


def is_earlier(config: Mapping[str, Any]) -> bool:
    """Whether an earlier version wrote a configuration, for a checkpoint with code."""
    return is_legacy(config) or guards.is_older(config)


def upgraded(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration in the format of this version; the same object if it needs no change."""
    if not is_legacy(config):
        return guards.upgraded(config)
    config = copy.deepcopy(config)
    text = config if isinstance(config.get(_BLOCK), Mapping) else config["text_config"]
    old = text.pop(_BLOCK)
    shared = {key: old[key] for key in ("rope", "hidden_act") if key in old}
    step = {"method": "mspoe", **{key: value for key, value in old.items() if key not in shared}}
    if "ranks" not in step:
        step["per_prompt"] = True
    text["ctxext_code"] = {**shared, "steps": [step]}
    renamed = {
        "architectures": [str(name).replace(_PREFIX, "Ctxext") for name in config.get("architectures") or ()],
        "auto_map": {
            auto: place.replace(f".{_PREFIX}", ".Ctxext") for auto, place in (config.get("auto_map") or {}).items()
        },
    }
    return guards.upgraded({**config, **renamed})


def stub(modeling: str, model: str, causal_lm: str) -> str:
    """The text of the stub file in 0.1.0.

    Args:
        modeling: The family's module.
        model: Its class without a head.
        causal_lm: Its class with a head.
    """
    return f'''"""{causal_lm} with Ms-PoE: a position scale per attention head. The method is in {MODELING_FILE}."""

from .{MODELING_FILE.removesuffix(".py")} import family

modeling = family(__name__, "{modeling}")


class MsPoE{model}(modeling.{model}):
    """{model} with Ms-PoE."""


class MsPoE{causal_lm}(modeling.{causal_lm}):
    """{causal_lm} with Ms-PoE."""


MsPoE{model}.register_for_auto_class("AutoModel")
MsPoE{causal_lm}.register_for_auto_class("AutoModelForCausalLM")
'''
