"""The options of loading models for an evaluation: device, dtype, attention, remote code, and engine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ctxext.checkpoint.loading import choose_dtype
from ctxext.engines.vllm import ENGINE_NAMES
from ctxext.errors import CtxextError
from ctxext.files.strict import parse_json
from ctxext.options import HubOptions, option, with_documented_options

_RUN = "How it is run"


@with_documented_options
@dataclass(frozen=True)
class Loading(HubOptions):
    """The options of loading models.

    A device may also be "cuda:1", engine arguments a mapping, and a revision is for every model.
    """

    device: str = option("auto", help="auto, cpu, cuda or mps.")
    dtype: str = option("auto", help="auto (as saved; on a CPU what it is fast in), bf16, fp16 or fp32.")
    chat_template: bool = option(
        True, help="Use it where there is one.", flags=("--chat-template/--no-chat-template",), panel=_RUN
    )
    attention: str | None = option(
        None, help="sdpa, eager, flash_attention_2 and so on.", flags=("--attn",), panel=_RUN
    )
    trust_remote_code: bool = option(False, help="Run code that a checkpoint brings along.", panel=_RUN)
    engine: str = option(
        "transformers",
        help="transformers; for retrieval tasks vllm, of checkpoints that it serves, or llama.cpp, of GGUF files.",
        panel=_RUN,
    )
    engine_arguments: Mapping[str, Any] = option(
        None,
        help="""More of vllm.LLM, '{"tensor_parallel_size": 2}', or of llama.cpp, '{"n_gpu_layers": 0}'.""",
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
            raise CtxextError("--engine-args is no JSON object.", hint="""Write '{"tensor_parallel_size": 2}'.""")
        object.__setattr__(self, "engine_arguments", arguments)
        if self.engine not in ENGINE_NAMES:
            raise CtxextError(f'There is no engine "{self.engine}".', hint=f"Choose {', '.join(ENGINE_NAMES)}.")
        if arguments and self.engine == "transformers":
            raise CtxextError("--engine-args are those of an engine.", hint="Name it with --engine vllm or llama.cpp.")
