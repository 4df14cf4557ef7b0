"""Distance-aware attention: a step that a fine-tune fills with what each head makes of the distance."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ctxext.checkpoint.families import Family, read, rotated_layers
from ctxext.checkpoint.new_tensor import SIZES, NewTensor, stored_tensors
from ctxext.checkpoint.opening import Checkpoint
from ctxext.errors import CtxextError
from ctxext.recipes.code.method import PORTABLE, CodeMethod
from ctxext.recipes.encodings.rotary import Config, ModelConfig
from ctxext.recipes.methods.relation import LATENT, UNREACHED_ATTENTION

_OWN = "distance.weight"
_ATTENTION = re.compile(
    r"(?P<owner>(?:.+\.)?(?:layers|h|blocks)\.(?P<layer>\d+)\.(?:\w+\.)?(?:self_attn|self_attention|attention|attn))\.[^.]+\.weight"
)
_OTHER_TOWERS = re.compile(r"vision|visual|audio|speech|encoder")


@dataclass(frozen=True, kw_only=True)
class DistanceAware(CodeMethod):
    """Let every head learn how its scores grow or fade with the distance. Changes nothing until it is trained.

    A score above zero between tokens d apart times (1 + e^v) / (1 + e^(v − w·d/L)), with w = v = 0 at the start and L
    the original context length; w and v of every head are weights, which ctxext finetune trains. DA-Transformer,
    section 3.2, which also cuts scores below zero off; here they stay, so that a trained model stays what it was.
    """

    name = "distance-aware"
    title = "Distance-aware attention"
    paper = "https://arxiv.org/abs/2010.06925"
    kind = "attention"
    code = (PORTABLE / "distance.py", PORTABLE / "relation_parts.py")
    code_class = "DistanceAware"
    is_published = False
    is_experimental = True
    learned_tensors = (_OWN,)
    caution = "as zeros its numbers change nothing; ctxext finetune trains them beside LoRA."

    @classmethod
    def refusal(cls, config: Config, family: Family) -> str:
        """Why the attention of the family cannot be reached; empty where it can."""
        if family.shared_rotary_key:
            return LATENT
        return super().refusal(config, family) or UNREACHED_ATTENTION.get(family.model_type, "")

    def settings(self, model: ModelConfig) -> dict[str, Any]:
        """The layers, the number of heads, and L."""
        return {
            "layers": rotated_layers(model.config, model.family),
            "num_heads": read(model.config, model.family, "num_attention_heads"),
            "original_length": model.rotary.trained_length,
        }

    def new_tensors(self, source: Checkpoint, model: ModelConfig) -> tuple[NewTensor, ...]:
        """Two numbers per head for each attention that takes part, in the smallest of the source's files.

        Raises:
            CtxextError: the weights are not safetensors, or do not name one attention per layer.
        """
        if source.remote_sizes:  # A dry run on a repository whose weights were not fetched.
            return ()
        there = stored_tensors(source)
        home = min({path for path, _ in there.values()}, key=lambda path: (source.size_of(path), path))
        settings, owners = self.settings(model), _attentions(there)
        count: int = settings["num_heads"]
        tensors: list[NewTensor] = []
        zeros = bytes(2 * count * SIZES["F32"])
        for layer in settings["layers"]:
            if len(found := owners.get(layer, [])) != 1:
                told = f"several attentions: {', '.join(found)}" if found else "no attention that is known by its name"
                raise CtxextError(f"Layer {layer} has {told}.", hint="Choose another method.")
            tensors.append(NewTensor(f"{found[0]}.{_OWN}", home, "F32", None, (2, count), lambda _: iter([zeros])))
        return tuple(tensors)


def _attentions(names: Iterable[str]) -> dict[int, list[str]]:
    """For each layer its attentions by the names in the weights, sorted."""
    found: dict[int, set[str]] = {}
    for name in names:
        match = _ATTENTION.fullmatch(name)
        if match and not _OTHER_TOWERS.search(name):
            found.setdefault(int(match["layer"]), set()).add(match["owner"])
    return {layer: sorted(owners) for layer, owners in found.items()}
