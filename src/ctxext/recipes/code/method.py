"""Base of the methods with modeling code in the checkpoint."""

from collections.abc import Mapping
from importlib import resources
from importlib.abc import Traversable
from typing import Any, ClassVar

from typing_extensions import override

from ctxext.checkpoint.families import Family, bidirectional_key, rotated_layers
from ctxext.errors import CtxextError
from ctxext.recipes.base import Method
from ctxext.recipes.code import layout as code_layout
from ctxext.recipes.encodings.base import Config
from ctxext.recipes.model_config import ModelConfig

_ALL_SLIDING = "every layer with a rotary embedding has a sliding window, and these layers are not changed"

_LATENT = "latent attention: its attention is computed from compressed keys, where positions cannot be moved"
_AFTER_ROTATION = "it changes queries and keys after it has rotated them, by more than a factor"
_UNREACHED_ATTENTION: Mapping[str, str] = {
    **dict.fromkeys(("falcon", "gpt_neox_japanese"), "its attention does not use transformers' attention interface"),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe"), _AFTER_ROTATION),
}
"""Families with an attention that cannot be replaced, and the reasons."""

PORTABLE: Traversable = resources.files("ctxext.portable")
"""Folder of the modeling code for checkpoints."""


class CodeMethod(Method):
    """A step with parameters that a class of portable code reads."""

    code: ClassVar[tuple[Traversable, ...]]
    """The files in checkpoints: the file of the class first, then its imports other than `method.py`."""
    code_class: ClassVar[str]
    """The name of the class, a `Method` of `portable/method.py` with the same `name` as this one."""
    learned_tensors: ClassVar[tuple[str, ...]] = ()
    """Name suffixes of the method's weights, which are fully trained."""

    @property
    def depends_on_prompt(self) -> bool:
        """Whether the result depends on the prompt, so that a cache is valid for one prompt only."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Whether a checkpoint can be fine-tuned; not if the method depends on the prompt."""
        return not self.depends_on_prompt

    def settings(self, model: ModelConfig) -> dict[str, Any]:
        """Return the parameters that the portable class reads, as plain JSON.

        `layers` lists the layers that it changes.
        """
        raise NotImplementedError

    @classmethod
    @override
    def refusal(cls, config: Config, family: Family) -> str:
        if cls.kind == "attention" and family.shared_rotary_key:
            return _LATENT
        if cls.kind == "attention" and (key := bidirectional_key(config, family)):
            return f"{key} in config.json makes its attention bidirectional, and the method is for causal attention"
        reason = super().refusal(config, family) or code_layout.refusal(family)
        reason = reason or ("" if rotated_layers(config, family) else _ALL_SLIDING)
        return reason or (_UNREACHED_ATTENTION.get(family.model_type, "") if cls.kind == "attention" else "")

    @override
    def edit(self, model: ModelConfig) -> ModelConfig:
        if reason := self.refusal(model.config, model.family):
            raise CtxextError(
                f'"{model.family.model_type}" does not support {self.name}: {reason}.', hint="Choose another method."
            )
        settings = {**self.settings(model), **({"per_prompt": True} if self.depends_on_prompt else {})}
        edited = code_layout.with_step(model, self.name, settings)
        length = self.length_after(model.encoding)
        if length == model.encoding.context_length:
            return edited
        return code_layout.with_length(code_layout.with_idle_window(edited, length), length)
