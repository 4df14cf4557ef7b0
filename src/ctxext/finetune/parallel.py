"""Sequence parallelism: several processes share each sequence, by Ulysses (arXiv 2309.14509).

A process computes all layers for its part of the positions (`batches.Parts`). For attention, DeepSpeed exchanges all
heads of the part for all positions of some heads, and back. Everything else is as with data parallelism: the loss of a
step is the sum over all parts, divided by the learned tokens of the step.

accelerate's `ParallelismConfig(sp_backend="deepspeed")` uses the same class, but gives each sequence of a step the same
weight, whatever its number of learned tokens; joins documents that restart their positions; and needs DeepSpeed's
optimizer and saves.
"""

from typing import Any

import torch

from ctxext.checkpoint.head import base_of, gather_weights
from ctxext.files.offline import forbid_network
from ctxext.files.processes import num_processes, rank
from ctxext.finetune.attention import document_attention

SPLIT, PROBE = "ctxext_split", "ctxext_split_probe"
_PROBE_PARTS, _PROBE_LENGTH = 2, 8


class _Positions:
    """The `position_ids` of a model's present call, (batch, length): some families do not pass them to attention."""

    def __init__(self, model: Any) -> None:
        self.present: torch.Tensor = torch.empty(0)
        self.hook = base_of(model).register_forward_pre_hook(self._keep, with_kwargs=True)

    def _keep(self, module: Any, arguments: Any, named: dict[str, Any]) -> None:
        # The loss calls the model without positions, for the logits; recomputation follows in the backward pass.
        if named.get("position_ids") is not None:
            self.present = named["position_ids"]


def split_attention(model: Any, size: int) -> None:
    """Replace the attention of a model by one in which groups of `size` processes exchange heads for positions.

    Positions count from the beginning of the whole sequence, so that rotations and documents are those of one process.
    """
    with forbid_network():
        import deepspeed
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    if model.device.type == "cpu":
        # DeepSpeed would compile its shared-memory collectives for minutes, which are not used here.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    groups = [range(first, first + size) for first in range(0, num_processes(), size)]
    # Each process takes part in the creation of all groups.
    group = [torch.distributed.new_group(list(ranks)) for ranks in groups][rank() // size]
    config = model.config.get_text_config(decoder=True)
    num_heads = config.num_attention_heads
    ulysses = UlyssesSPAttentionHF(
        attn=_attend,
        batch_size=1,
        attn_head_count=num_heads,
        attn_head_size=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
        kv_head_count=getattr(config, "num_key_value_heads", None) or num_heads,
        num_hidden_layers=config.num_hidden_layers,
        process_group=group,
        seq_length_is_variable=True,
    )
    positions = _Positions(model)

    def attend_in_parts(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
    ) -> Any:
        return ulysses(module, query, key, value, None, **{**options, "position_ids": positions.present})

    _register(SPLIT, attend_in_parts)
    model.set_attn_implementation(SPLIT)


@torch.no_grad()
def can_split(model: Any) -> bool:
    """Test whether hidden states stay the same if only attention reads the tokens of other parts.

    They change if layers pass on a state, or if a family has its own attention. The parts are rows of a batch here, so
    that no other process is needed.
    """
    is_stock = type(model).__module__.startswith("transformers.models.")
    before = model.config._attn_implementation
    if not (is_stock and model._supports_attention_backend and before != "eager"):
        return False
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    positions = torch.arange(_PROBE_PARTS * _PROBE_LENGTH, device=model.device)[None]
    ids, was_training = (positions * 7 + 1) % vocabulary, model.training
    shape = (_PROBE_PARTS, _PROBE_LENGTH)

    def attend_over_rows(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
    ) -> Any:
        query, key, value = (torch.cat(list(states), dim=1)[None] for states in (query, key, value))
        output, weights = _attend(module, query, key, value, None, **{**options, "position_ids": positions})
        return output.unflatten(1, shape)[0], weights

    _register(PROBE, attend_over_rows)
    model.eval()
    try:
        with gather_weights(model):
            whole = base_of(model)(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
            model.set_attn_implementation(PROBE)
            parts = base_of(model)(
                input_ids=ids.view(shape), position_ids=positions.view(shape), use_cache=False
            ).last_hidden_state
    finally:
        model.set_attn_implementation(before)
        model.train(was_training)
    difference = (parts.flatten(0, 1) - whole[0]).abs().max()
    return float(difference) <= float(torch.finfo(whole.dtype).eps ** 0.5 * whole.float().std())


def _register(name: str, attend: Any) -> None:
    with forbid_network():
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, lambda **_: None)


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: None,
    *,
    position_ids: torch.Tensor,
    **options: Any,
) -> Any:
    """Attend causally within each document of a whole sequence; documents begin where positions do not grow.

    Args:
        module: The attention of a layer.
        query: (1, heads, length, head_dim).
        key: (1, kv_heads, length, head_dim).
        value: (1, kv_heads, length, head_dim).
        mask: Ignored.
        position_ids: (1, length).
        options: Other arguments of transformers' attention functions.
    """
    is_start = position_ids[:, 1:] <= position_ids[:, :-1]
    counts = None
    if bool(is_start.any()):
        tokens = torch.arange(position_ids.shape[1], device=position_ids.device)[None]
        starts = torch.nn.functional.pad(tokens[:, 1:].masked_fill(~is_start, 0), (1, 0)).cummax(dim=1).values
        counts = tokens - starts + 1
    return document_attention(module, query, key, value, counts, **options)
