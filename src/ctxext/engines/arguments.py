"""Arguments of engines that a user may set: those for memory and speed.

Other arguments can make an engine run code that a checkpoint contains (`skip_tokenizer_init`, `hf_overrides`), import
classes by name (`worker_cls`, `logits_processors`), or load other files and repositories (`tokenizer`,
`speculative_config`, `model.hf_repo`). So a list of harmless arguments decides, not a list of dangerous ones.
"""

from collections.abc import Collection, Mapping
from typing import Any

from ctxext.errors import CtxextError
from ctxext.redaction import shorten

_CACHE = ("block_size", "kv_cache_dtype", "kv_cache_memory_bytes", "num_gpu_blocks_override", "calculate_kv_scales")
_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel")
_BATCHES = ("max_num_batched_tokens", "max_num_seqs", "max_num_partial_prefills", "long_prefill_token_threshold")
_GRAPHS = ("enforce_eager", "cuda_graph_sizes", "cudagraph_capture_sizes", "max_cudagraph_capture_size")
_MEMORY = ("gpu_memory_utilization", "swap_space", "cpu_offload_gb", "max_model_len", "max_seq_len_to_capture")
_SWITCHES = (
    *("enable_prefix_caching", "enable_chunked_prefill", "async_scheduling", "disable_custom_all_reduce"),
    *("disable_cascade_attn", "disable_log_stats", "disable_hybrid_kv_cache_manager", "use_tqdm_on_load"),
)
_OTHERS = (
    *("seed", "dtype", "quantization", "max_logprobs", "limit_mm_per_prompt", "skip_mm_profiling"),
    *("mm_processor_cache_gb", "attention_backend", "scheduling_policy", "optimization_level"),
    *("mamba_cache_dtype", "mamba_ssm_cache_dtype", "mamba_block_size", "max_parallel_loading_workers"),
    *("decode_context_parallel_size", "prefill_context_parallel_size", "safetensors_load_strategy"),
)
_ANY: Collection[Any] = ()
"""No list of values: an argument takes any."""

_OF_VLLM: Mapping[str, Collection[Any]] = {
    **dict.fromkeys((*_CACHE, *_PARALLEL, *_BATCHES, *_GRAPHS, *_MEMORY, *_SWITCHES, *_OTHERS), _ANY),
    "distributed_executor_backend": ("mp", "ray", "uni", "external_launcher"),
    "load_format": ("auto", "safetensors", "fastsafetensors", "bitsandbytes", "dummy"),
    "model_impl": ("auto", "vllm", "transformers"),
    "skip_tokenizer_init": (True,),
    "trust_remote_code": (False,),
}
_THREADS = ("n_threads", "cpumask", "mask_valid", "priority", "strict_cpu", "poll")
_OF_LLAMA_CPP: Mapping[str, Collection[Any]] = dict.fromkeys(
    (
        *(f"{part}.{name}" for part in ("cpuparams", "cpuparams_batch") for name in _THREADS),
        *("n_gpu_layers", "n_ctx", "n_batch", "n_ubatch", "n_parallel", "flash_attn_type", "cache_type_k"),
        *("cache_type_v", "no_kv_offload", "no_op_offload", "no_extra_bufts", "no_host", "use_mmap", "use_mlock"),
        *("use_direct_io", "main_gpu", "split_mode", "tensor_split", "devices", "numa", "warmup", "verbosity"),
        *("kv_unified", "swa_full", "cont_batching", "n_cache_reuse", "cache_ram_mib", "check_tensors"),
        *("fit_params", "fit_params_target", "fit_params_min_ctx", "n_ctx_checkpoints"),
    ),
    _ANY,
)
_ALLOWED = {"vllm": _OF_VLLM, "llama.cpp": _OF_LLAMA_CPP}


def check_arguments(engine: str, arguments: Mapping[str, Any], *, trust_remote_code: bool = False) -> None:
    """Raise for an argument that may run code or load other files, unless the user trusts all code.

    Args:
        engine: "vllm" or "llama.cpp"; other engines take no arguments.
        arguments: The arguments by name.
        trust_remote_code: Whether the user trusts all code.
    """
    allowed = _ALLOWED.get(engine)
    if trust_remote_code or allowed is None:
        return
    for name, value in arguments.items():
        if name not in allowed:
            shown = f'"{shorten(str(name), 60)}" is'
        elif allowed[name] and value not in allowed[name]:
            shown = f'{shorten(str(value), 60)} for "{name}" is'
        else:
            continue
        raise CtxextError(
            f"--engine-args: {shown} not one of the arguments for memory and speed, so it may run other code or load "
            "other files.",
            hint="Omit it, or add --trust-remote-code if you trust all code and files that it names.",
        )
