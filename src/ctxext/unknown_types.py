"""What to say of a model type that the table of families does not have."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from ctxext.errors import CtxextError

_REMOTE_CODE = frozenset({"baichuan", "chatglm", "internlm", "internlm2", "minicpm", "orion", "qwen"})
"""Model types whose code transformers never had, for copies that lost their `auto_map`."""


def unknown_type(config: Mapping[str, Any], known: Iterable[str], others: Mapping[str, str]) -> CtxextError:
    """The refusal of a configuration whose model type is none of the known ones.

    Args:
        config: The content of config.json.
        known: The model types that are.
        others: What the model types are that transformers has beside them.
    """
    model_type = str(config["model_type"])
    if model_type in others:
        return CtxextError(f'"{model_type}" is not a causal language model but {others[model_type]}.')
    if config.get("auto_map") or model_type in _REMOTE_CODE:
        return CtxextError(
            f'"{model_type}" is no model type of transformers: its code comes with the checkpoint.',
            hint="ctxext converts what transformers itself runs; such a version of it is often named -hf.",
        )
    near = difflib.get_close_matches(model_type, known, n=3)
    hint = "Did you mean " + " or ".join(f'"{name}"' for name in near) + "?" if near else ""
    return CtxextError(f'The model type "{model_type}" is not known.', hint=hint)
