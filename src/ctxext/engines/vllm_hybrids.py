"""vLLM's own models of hybrid families with support for the relation maps of a checkpoint.

vLLM's transformers backend has no linear attention. So its own models of these families run the checkpoint, and only
their full attention computes the rows of relation maps, which need no other change of a model.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModel
from vllm.model_executor.models import qwen3_5, qwen3_next
from vllm.model_executor.models.transformers.utils import init_on_device_without_buffers
from vllm.multimodal import MULTIMODAL_REGISTRY

from ctxext.engines.vllm_models import attach_maps


class _Hybrid:
    """Builds vLLM's model with the schedule of the checkpoint, and attaches its relation maps."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        config = vllm_config.model_config
        modules = build_modules(config)
        restore_values(config.hf_text_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        self.vllm_config = vllm_config
        text: Any = getattr(self, "language_model", self)
        layers = text.model.layers
        attach_maps(self, modules, lambda layer: layers[layer.ctxext_part.layer].self_attn.attn)


def build_modules(config: Any) -> list[Any]:
    """Build the checkpoint's own model without weights, and return its modules.

    Raises:
        ValueError: a method is not a relation map.
    """
    own = copy.deepcopy(config.hf_config)
    with init_on_device_without_buffers("meta"):
        model = AutoModel.from_config(own, trust_remote_code=config.trust_remote_code, dtype=torch.get_default_dtype())
    modules = list(model.modules())
    methods = {method for module in modules if hasattr(module, "ctxext_part") for method in module.ctxext_part.methods}
    others = sorted({method.name for method in methods if not hasattr(method, "map")})
    if others:
        raise ValueError(f"vLLM's own model of this family supports relation maps only, not {' and '.join(others)}.")
    return modules


def restore_values(config: Any) -> None:
    """Write the values that are hidden from unmodified classes into a configuration."""
    code = config.ctxext_code
    config.rope_parameters = {**config.rope_parameters, **code["rope"], **code.get("held", {})}
    for name, value in code.get("hidden", {}).items():
        setattr(config, name, value)


def accept_text_only(model_class: Any) -> Any:
    """Let a multimodal model refuse images, videos and audio: their positions differ between axes."""
    factories = model_class._processor_factory

    class TextOnly(factories.info):  # type: ignore[misc,name-defined]
        def get_supported_mm_limits(self) -> Mapping[str, int]:
            return dict.fromkeys(("image", "video", "audio"), 0)

        def validate_num_items(self, modality: str, num_items: int) -> None:
            if num_items:
                raise ValueError(f"The relation maps of this checkpoint support text only: remove the {modality}.")

    registered = MULTIMODAL_REGISTRY.register_processor(
        factories.processor, info=TextOnly, dummy_inputs=factories.dummy_inputs
    )
    return registered(model_class)


class Qwen3NextForCausalLM(_Hybrid, qwen3_next.Qwen3NextForCausalLM):  # type: ignore[misc]
    """Qwen3-Next."""


class Qwen3_5ForCausalLM(_Hybrid, qwen3_5.Qwen3_5ForCausalLM):  # type: ignore[misc]
    """The text part of Qwen3.5."""


class Qwen3_5MoeForCausalLM(_Hybrid, qwen3_5.Qwen3_5MoeForCausalLM):  # type: ignore[misc]
    """The text part of Qwen3.5's mixtures of experts."""


@accept_text_only
class Qwen3_5ForConditionalGeneration(_Hybrid, qwen3_5.Qwen3_5ForConditionalGeneration):  # type: ignore[misc]
    """Qwen3.5."""


@accept_text_only
class Qwen3_5MoeForConditionalGeneration(_Hybrid, qwen3_5.Qwen3_5MoeForConditionalGeneration):  # type: ignore[misc]
    """Qwen3.5's mixtures of experts."""
