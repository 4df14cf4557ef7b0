"""The gated delta rule of vLLM's CPU backend in float32: its own kernels accept only bfloat16.

Schedules and relation maps do not act on these layers, but the rounding to bfloat16 would hide small differences.
"""

from itertools import pairwise

import torch
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule


def install() -> None:
    """Replace the kernel in this process; call it before the first engine."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    attend.__annotations__["layer_name"] = gdn_attention.LayerNameType  # vLLM reads the operator's schema from it.
    gdn_attention.cpu_gdn_attention_core = attend


def attend(
    mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor, layer_name: str
) -> None:
    """Compute the output (t, h, d) of all requests from their convolved inputs (t, c), and update their states."""
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
    from vllm.utils.torch_utils import _resolve_layer_name

    context = get_forward_context()
    if context.attn_metadata is None:  # The engine's warm-up.
        return
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    metadata = context.attn_metadata[layer.prefix]
    convolved, states = layer.kv_cache
    convolved = convolved if is_conv_state_dim_first() else convolved.transpose(1, 2)
    starts, slots = metadata.non_spec_query_start_loc.tolist(), metadata.non_spec_state_indices_tensor.tolist()
    is_old = [True] * metadata.num_decodes
    if metadata.num_prefills:
        is_old = metadata.has_initial_state.tolist()
    for (start, stop), slot, old in zip(pairwise(starts), slots, is_old, strict=False):
        if start == stop:
            continue
        state = states[slot].view(states.shape[1], states.shape[3], states.shape[2])
        if not old:
            convolved[slot], state[:] = 0, 0
        columns = torch.cat([convolved[slot], mixed_qkv[start:stop].T], 1)
        weight = layer.conv1d.weight.view(layer.conv1d.weight.shape[0], 1, -1)
        convolved[slot] = columns[:, 1 - weight.shape[-1] :]
        mixed = torch.nn.functional.conv1d(columns[None], weight, layer.conv1d.bias, groups=len(weight))
        query, key, value = layer.rearrange_mixed_qkv(torch.nn.functional.silu(mixed[0].T))
        groups = value.shape[2] // query.shape[2]
        query, key = (x.repeat_interleave(groups, 2) for x in (query, key))
        decay = -layer.A_log.exp() * torch.nn.functional.softplus(a[start:stop] + layer.dt_bias)
        output, after = torch_chunk_gated_delta_rule(
            query,
            key,
            value,
            g=decay[None],
            beta=b[start:stop].sigmoid()[None],
            initial_state=state[None].float(),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        core_attn_out[start:stop], state[:] = output[0], after[0].to(state.dtype)
