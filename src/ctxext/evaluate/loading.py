"""Options for loading models in an evaluation: device, dtype, attention, remote code, and engine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ctxext.checkpoint.loading import choose_dtype
from ctxext.engines.vllm import ENGINE_NAMES
from ctxext.errors import CtxextError
from ctxext.files.strict import parse_json
from ctxext.options import HubOptions, option, with_documented_options

_RUN = "Execution"


@with_documented_options
@dataclass(frozen=True)
class Loading(HubOptions):
    """Options for loading models.

    A device may also be "cuda:1" and engine arguments a mapping. A revision applies to every model.
    """

    device: str = option("auto", help="auto, cpu, cuda or mps.")
    dtype: str = option("auto", help="auto (as saved, or the fastest type on a CPU), bf16, fp16 or fp32.")
    chat_template: bool = option(
        True, help="Use the chat template, if any.", flags=("--chat-template/--no-chat-template",), panel=_RUN
    )
    attention: str | None = option(None, help="sdpa, eager, flash_attention_2 etc.", flags=("--attn",), panel=_RUN)
    trust_remote_code: bool = option(False, help="Run Python code from the checkpoint.", panel=_RUN)
    engine: str = option(
        "transformers",
        help="transformers; for retrieval tasks also vllm, or llama.cpp (GGUF files).",
        panel=_RUN,
    )
    engine_arguments: Mapping[str, Any] = option(
        None,
        help="""Arguments of vllm.LLM, as '{"tensor_parallel_size": 2}', or of llama.cpp, as '{"n_gpu_layers": 0}'.""",
        flags=("--engine-args",),
        kind="json",
        panel=_RUN,
        metavar="JSON",
    )

    def __post_init__(self) -> None:
        choose_dtype(self.dtype)
        arguments: Any = self.engine_arguments or {}
        if isinstance(arguments, str):
            arguments = parse_json(arguments, "--engine-args")
        if not isinstance(arguments, Mapping):
            raise CtxextError("--engine-args is not a JSON object.", hint="""Example: '{"tensor_parallel_size": 2}'.""")
        object.__setattr__(self, "engine_arguments", arguments)
        if self.engine not in ENGINE_NAMES:
            raise CtxextError(f'Unknown engine "{self.engine}".', hint=f"Engines: {', '.join(ENGINE_NAMES)}.")
        if arguments and self.engine == "transformers":
            raise CtxextError("--engine-args requires an engine.", hint="Add --engine vllm or --engine llama.cpp.")
