"""vLLM's transformers backend with support for the relation maps of a checkpoint."""

from collections.abc import Callable
from typing import Any

from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.models import transformers as backend

from ctxext.engines.row_wise import Rows, Step, make_row_wise


class _RowWise:
    """Attaches relation maps to the attention of their layers after vLLM has created it."""

    def _create_attention_instances(self, prefix: str = "") -> None:
        super()._create_attention_instances(prefix)  # type: ignore[misc]
        attach_maps(
            self,
            list(self.model.modules()),  # type: ignore[attr-defined]
            lambda layer: getattr(getattr(layer, layer.ctxext_part.name), backend.VLLM_ATTN_ATTR, None),
        )


class TransformersForCausalLM(_RowWise, backend.TransformersForCausalLM):  # type: ignore[misc]
    """Dense models."""


class TransformersMoEForCausalLM(_RowWise, backend.TransformersMoEForCausalLM):  # type: ignore[misc]
    """Mixtures of experts."""


def attach_maps(model: Any, modules: list[Any], attention_of: Callable[[Any], Any]) -> None:
    """Attach relation maps to every attention of vLLM that they change.

    Args:
        model: A model of vLLM.
        modules: All modules of the checkpoint's own model.
        attention_of: Returns vLLM's attention for a decoder layer of `modules`, or None.

    Raises:
        ValueError: the model has several schedules, latent attention, or a quantized cache.
    """
    layers = [module for module in modules if hasattr(module, "ctxext_part")]
    if not any(hasattr(method, "map") for layer in layers for method in layer.ctxext_part.methods):
        return
    rotaries = [module for module in modules if getattr(module, "ctxext_layouts", None)]
    if len(rotaries) != 1 or set(rotaries[0].ctxext_layouts) != {None}:
        raise ValueError("ctxext's vLLM plugin needs one rotary embedding with one schedule.")
    if model.vllm_config.cache_config.cache_dtype not in ("auto", "float16", "bfloat16", "float32"):
        raise ValueError("ctxext's vLLM plugin needs an unquantized cache: run with --kv-cache-dtype auto.")
    ranks, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
    text_config = model.model_config.hf_text_config
    first_head = rank * text_config.num_key_value_heads // ranks
    step = Step()
    for layer in layers:
        part = layer.ctxext_part
        attention = attention_of(layer)
        if attention is None or not hasattr(attention.impl, "do_kv_cache_update"):
            raise ValueError(f"ctxext's vLLM plugin does not support the attention of layer {part.layer}.")
        part.is_left_to_engine = True
        acting = [method for method in part.methods if hasattr(method, "map") and method.acts_on(part.layer)]
        if acting:
            keeps = is_own_writer(attention) and model.vllm_config.kv_transfer_config is None
            module = getattr(layer, part.name)
            attention.impl.ctxext_rows = Rows(part, module, rotaries[0], acting, first_head, step, keeps_keys=keeps)
            attention.impl.__class__ = make_row_wise(attention.impl.__class__)


def is_own_writer(attention: Any) -> bool:
    """Return whether only its `do_kv_cache_update` writes to the cache of an attention."""
    shares = getattr(attention, "kv_sharing_target_layer_name", None) is not None
    backend = getattr(attention, "attn_backend", None)
    return not (shares or getattr(backend, "forward_includes_kv_cache_update", True))
