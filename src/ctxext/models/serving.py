"""Evaluation with an inference engine: supported tasks and checkpoints, and the start of its server."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ctxext.checkpoint.families import family_of, text_config
from ctxext.checkpoint.opening import Checkpoint
from ctxext.converters.engine_support import EXACT, WRONG, Serving, serving_of, vllm_arguments
from ctxext.data.encoding import Encoder
from ctxext.engines.llama_cpp import LlamaCpp, LlamaTokenizer, llama_cpp_version
from ctxext.engines.vllm import Vllm, engine_dtype, vllm_version
from ctxext.errors import CtxextError
from ctxext.files.length import format_length
from ctxext.models.checkpoint_info import CheckpointInfo, GgufInfo
from ctxext.models.loading import SERVER
from ctxext.models.model import Loading, load_tokenizer, runs_foreign_code
from ctxext.models.server_model import ServerModel, choose_form, connect_model
from ctxext.recipes.code.staging import stage_checkpoint
from ctxext.recipes.model_config import ModelConfig, model_config

LOSS_TASKS = ("perplexity", "longppl", "short")
"""Tasks that need the loss of a text, while an engine only generates text."""

_MOST_AT_ONCE, _TOKENS_AT_ONCE = 64, 2**20
"""Largest number of concurrent requests to vLLM, and of their tokens."""

_ENDLESS = ("default", "linear")
"""Schedules with a table that vLLM extends without changing it."""


def engine_versions(loading: Loading) -> dict[str, str]:
    """Return the version of the engine by package name, or the name and version of a server; empty for transformers."""
    if loading.server is not None:
        return {SERVER: loading.server.connection.label}
    if loading.engine == "llama.cpp":
        return {"xllamacpp": llama_cpp_version()}
    return {"vllm": vllm_version()} if loading.engine == "vllm" else {}


def check_tasks(tasks: Sequence[str], harness: Sequence[str], loading: Loading, num_processes: int) -> None:
    """Raise if an engine does not support a task or option, before anything is loaded."""
    engine_versions(loading)
    name, is_vllm = _NAMES[loading.engine], loading.engine == "vllm"
    flag = "--engine" if loading.server is None else "--server"
    without = "the checkpoint" if loading.engine == "llama.cpp" else f"without {flag}"
    hint = f"Omit it, or evaluate {without}."
    if unsupported := [task for task in tasks if task in LOSS_TASKS]:
        raise CtxextError(f"{name} only generates answers: it cannot measure {' and '.join(unsupported)}.", hint=hint)
    if harness:
        hint = "Use lm_eval --model vllm." if is_vllm else "Use lm_eval with a server."
        raise CtxextError(f"--harness cannot be combined with {flag}.", hint=hint)
    if loading.attention or loading.device != "auto":
        raise CtxextError(f"{name} chooses device and attention itself.", hint="Omit --device and --attn.")
    if num_processes > 1:
        more = """, with --engine-args '{"tensor_parallel_size": 2}'""" if is_vllm else ""
        more = ", with --num-concurrent N" if loading.server is not None else more
        raise CtxextError(f"{name} starts its processes itself.", hint=f"Start one process{more}.")


_NAMES = {"vllm": "vLLM", "llama.cpp": "llama.cpp", SERVER: "A server"}


def serving_by_vllm(checkpoint: Checkpoint) -> Serving | None:
    """Return vLLM's row of the engine table for a checkpoint; None without rotary embeddings."""
    family = family_of(checkpoint.config)
    if family.encoding != "rotary" or family.reason:
        return None
    return next(row for row in serving_of(model_config(checkpoint.config)) if row.engine == "vLLM")


def check_served(info: CheckpointInfo, lengths: Sequence[int]) -> None:
    """Raise if vLLM runs a checkpoint wrongly, or an engine has too few positions for a length."""
    if isinstance(info, GgufInfo):
        if info.context_length is not None and max(lengths) > info.context_length:
            raise CtxextError(
                f'llama.cpp supports only {info.context_length} tokens of "{info.name}".',
                hint=f"ctxext convert {info.path} --method yarn --target-length {format_length(max(lengths))}",
            )
        return
    row = serving_by_vllm(info.checkpoint)
    if row is not None and row.status == WRONG:
        raise CtxextError(f'vLLM does not serve "{info.name}": {row.remark}.', hint="Evaluate it without --engine.")
    _make_overrides(info, max(lengths))


def _make_overrides(info: CheckpointInfo, length: int) -> Mapping[str, Any]:
    """Return the changes to config.json for positions up to a length in vLLM."""
    if info.context_length is None or length <= info.context_length:
        return {}
    model: ModelConfig | None = None if info.has_table else model_config(info.checkpoint.config)
    if model is None or model.encoding.feature not in _ENDLESS:
        raise CtxextError(
            f'vLLM supports only {info.context_length} tokens of "{info.name}".',
            hint="Omit longer lengths, or evaluate without --engine.",
        )
    more, key = {"max_position_embeddings": length}, model.family.text_config
    nested = key is not None and text_config(model.config, model.family) is not model.config
    return {"hf_overrides": {key: more} if nested else more}


def load_served(info: CheckpointInfo, loading: Loading, lengths: Sequence[int]) -> ServerModel:
    """Start an engine with a checkpoint, or llama.cpp with a GGUF file, or connect to a server.

    Args:
        info: The checkpoint.
        loading: Options for loading models.
        lengths: Prompt lengths in tokens, answers included.
    """
    if loading.server is not None:
        return connect_model(info, loading, lengths)
    if isinstance(info, GgufInfo):
        llama = LlamaCpp(
            info.path,
            length=max(lengths),
            dtype=loading.dtype,
            threads=torch.get_num_threads(),
            arguments=loading.engine_arguments,
        )
        encoder = Encoder(LlamaTokenizer(llama), chat_template=loading.chat_template)
        return _make_ready(ServerModel(info.name, llama.server, encoder, False, engine=llama))
    encoder = Encoder(load_tokenizer(info, loading), chat_template=loading.chat_template)
    row, foreign = serving_by_vllm(info.checkpoint), runs_foreign_code(info, loading)
    with stage_checkpoint(info.checkpoint, foreign=foreign) as stage:
        vllm = Vllm(
            stage.folder,
            length=max(lengths),
            dtype=engine_dtype(info.checkpoint.config, loading.dtype),
            trust=stage.trust,
            may_fetch=foreign,
            ends=_read_ends(info.checkpoint),
            arguments={**vllm_arguments(row), **_make_overrides(info, max(lengths)), **loading.engine_arguments},
        )
    remark = row.remark if row is not None and row.status != EXACT else ""
    at_once = min(_MOST_AT_ONCE, max(1, _TOKENS_AT_ONCE // max(lengths)))
    return _make_ready(
        ServerModel(info.name, vllm.server, encoder, False, num_concurrent=at_once, engine=vllm, remark=remark)
    )


def _make_ready(model: ServerModel) -> ServerModel:
    """Send the first request to an engine that was started; stop the engine if it fails."""
    try:
        choose_form(model.model, model.encoder, logprobs=True)
    except BaseException:
        model.close()
        raise
    return model


def _read_ends(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Return the tokens that end generation in transformers."""
    ends = (checkpoint.read_json("generation_config.json") or {}).get("eos_token_id")
    ends = checkpoint.config.get("eos_token_id") if ends is None else ends
    return tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,)
