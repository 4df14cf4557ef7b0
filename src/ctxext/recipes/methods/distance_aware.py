"""Distance-aware attention: weights for the use of the distance in each head, learned in a fine-tuning."""

import re
from typing import Any

from typing_extensions import override

from ctxext.checkpoint.families import DifferentLayersError, Family, read, rotated_layers, single_value
from ctxext.checkpoint.opening import Checkpoint
from ctxext.errors import CtxextError
from ctxext.files.tensor_files import BITS, NewTensor
from ctxext.recipes.code.method import PORTABLE, CodeMethod
from ctxext.recipes.encodings.base import Config
from ctxext.recipes.model_config import ModelConfig

_WEIGHT = "distance.weight"
_ATTENTION = re.compile(
    r"(?P<module>(?:.+\.)?(?:layers|h|blocks)\.(?P<layer>\d+)\.(?:\w+\.)?(?:self_attn|self_attention|attention|attn))\.[^.]+\.weight"
)
_UNNAMED = {
    "hrm_text": "each of its layers has several attentions",
    "moshi": "its attention has another name in its weights",
    "zamba2": "its attention has another name in its weights",
}
"""Families with attention modules that cannot be found by the names of their weights."""
_OTHER_TOWERS = re.compile(r"vision|visual|audio|speech|encoder")


class DistanceAware(CodeMethod):
    """Let each head learn how its scores grow or fade with the distance. Changes nothing until it is fine-tuned.

    A positive score between tokens d apart is multiplied by (1 + e^v) / (1 + e^(v − w·d/L)). w and v are two weights
    per head. DA-Transformer, section 3.2, but negative scores are not cut off, so that the model starts unchanged.
    """

    name = "distance-aware"
    title = "Distance-aware attention"
    paper = "https://arxiv.org/abs/2010.06925"
    kind = "attention"
    code = (PORTABLE / "distance.py", PORTABLE / "relation_parts.py")
    code_class = "DistanceAware"
    is_published = False
    is_experimental = True
    learned_tensors = (_WEIGHT,)
    caution = "its weights start at zero, without effect; ctxext finetune trains them together with LoRA."

    @classmethod
    @override
    def refusal(cls, config: Config, family: Family) -> str:
        # The weights need a known place in the model, and one number of heads for all layers.
        if reason := super().refusal(config, family) or _UNNAMED.get(family.model_type, ""):
            return reason
        try:
            num_heads(config, family)
        except DifferentLayersError as error:
            return error.message
        return ""

    @override
    def settings(self, model: ModelConfig) -> dict[str, Any]:
        return {
            "layers": rotated_layers(model.config, model.family),
            "num_heads": num_heads(model.config, model.family),
            "original_length": model.rotary.trained_length,
        }

    @override
    def new_tensors(self, source: Checkpoint, model: ModelConfig) -> tuple[NewTensor, ...]:
        # The new weights are added to the smallest of the source's files, so that little is rewritten.
        if source.remote_sizes:  # A dry run on a repository without fetched weights.
            return ()
        stored = source.stored_tensors()
        home = min({path for path, _ in stored.values()}, key=lambda path: (source.size_of(path), path))
        settings, attentions = self.settings(model), dict[int, set[str]]()
        for name in stored:
            match = _ATTENTION.fullmatch(name)
            if match and not _OTHER_TOWERS.search(name):
                attentions.setdefault(int(match["layer"]), set()).add(match["module"])
        count: int = settings["num_heads"]
        tensors: list[NewTensor] = []
        zeros = bytes(2 * count * BITS["F32"] // 8)
        for layer in settings["layers"]:
            if len(names := sorted(attentions.get(layer, ()))) != 1:
                problem = f"several attentions: {', '.join(names)}" if names else "no attention with a known name"
                raise CtxextError(f"Layer {layer} has {problem}.", hint="Choose another method.")
            tensors.append(NewTensor(f"{names[0]}.{_WEIGHT}", home, "F32", None, (2, count), lambda _: iter([zeros])))
        return tuple(tensors)


def num_heads(config: Config, family: Family) -> int:
    """Return the number of heads of each layer that the method changes; Laguna has one number per layer."""
    key = "num_attention_heads_per_layer"
    if listed := read(config, family, key):
        return int(single_value((listed[layer] for layer in rotated_layers(config, family)), key))
    return int(read(config, family, "num_attention_heads"))
