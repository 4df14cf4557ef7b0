"""What an adapter's configuration says of its merge, and what of it cannot be merged."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ctxext.checkpoint import read_json_object
from ctxext.errors import CtxextError
from ctxext.reading.schemas import Number, Schema, Word, checked

_CANNOT = {
    "target_parameters": "it changes parameters of fused experts",
    "layer_replication": "it repeats layers",
    "use_qalora": "QALoRA pools the inputs of its layers",
    "lora_bias": "its matrices have biases",
    "trainable_token_indices": "it trains single rows of the embeddings",
    "alora_invocation_tokens": "it is active only after certain tokens",
    "arrow_config": "it routes between adapters",
    "use_bdlora": "its matrices are made of blocks",
}
"""Keys that make an adapter more than a sum of matrices, each with why it stays apart."""
_KEPT_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
"""Ways to begin that leave the base as it is; PiSSA, OLoRA and others take their matrices out of it."""
_BY_PEFT = "Train it without that, or merge it with peft's merge_and_unload()."


class AdapterFile(Schema):
    """What a merge uses of adapter_config.json."""

    lora_alpha: Number
    fan_in_fan_out: bool | None = None
    alpha_pattern: dict[Word, Number] | None = None
    use_rslora: bool | None = None
    ensure_weight_tying: bool | None = None


class AdapterConfig:
    """How the matrices of a LoRA adapter are scaled.

    Args:
        folder: The adapter, as peft saves it.

    Raises:
        CtxextError: it is no LoRA adapter, or one that cannot be merged tensor by tensor.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / "adapter_config.json").is_file():
            raise CtxextError(f'"{folder}" is not an adapter: it has no adapter_config.json.')
        self.content = read_json_object(folder / "adapter_config.json")
        if reason := _refusal(self.content):
            raise CtxextError(f'"{folder}" cannot be merged: {reason}.', hint=_BY_PEFT)
        checked(self.content, AdapterFile, "adapter_config.json")
        for pattern in self.content.get("alpha_pattern") or {}:
            _check_pattern(pattern)
        self.is_tied = bool(self.content.get("ensure_weight_tying"))
        self.is_transposed = bool(self.content.get("fan_in_fan_out"))

    def scale(self, module: str, rank: int) -> float:
        """The factor on a module's product, alpha / rank; patterns name modules by the ends of their names."""
        from peft.utils.other import get_pattern_key

        alphas: Mapping[str, Any] = self.content.get("alpha_pattern") or {}
        alpha = float(alphas.get(get_pattern_key(alphas.keys(), module), self.content["lora_alpha"]))
        return alpha / (rank**0.5 if self.content.get("use_rslora") else rank)


def _check_pattern(pattern: str) -> None:
    """Refuse what peft could not match module names with.

    Raises:
        CtxextError: the pattern is not a regular expression.
    """
    try:
        re.compile(rf"(.*\.)?({pattern})$")  # As peft's get_pattern_key puts it.
    except (re.error, OverflowError, RecursionError) as error:
        raise CtxextError(
            f'"adapter_config.json": "alpha_pattern" has "{pattern}", which is not a regular expression: {error}.',
            hint="Write the end of a module's name, as q_proj.",
        ) from error


def _refusal(config: Mapping[str, Any]) -> str:
    """Why an adapter cannot be merged; empty where it can."""
    if config.get("peft_type") != "LORA":
        return f"it is {config.get('peft_type')}, and only LoRA is merged"
    if config.get("bias", "none") != "none":
        return f'it trains biases ("bias": "{config["bias"]}")'
    begun = config.get("init_lora_weights")
    if begun not in _KEPT_BASE:
        return f'it began as "{begun}", which changes the base; save it with path_initial_model_for_weight_conversion'
    return next((f'{reason} ("{key}")' for key, reason in _CANNOT.items() if config.get(key)), "")
