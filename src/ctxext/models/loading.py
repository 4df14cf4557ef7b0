"""Options for loading models in an evaluation: device, dtype, attention, remote code, and engine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ctxext.checkpoint.loading import check_dtype
from ctxext.engines.arguments import check_arguments
from ctxext.engines.vllm import ENGINE_NAMES
from ctxext.errors import CtxextError
from ctxext.files.strict import parse_json
from ctxext.options import HubOptions, option, with_documented_options
from ctxext.server.client import ServerOptions

SERVER = "server"
"""The engine of a running server."""

_RUN = "Execution"
_OF_SERVER = {
    "engine": "--engine",
    "engine_arguments": "--engine-args",
    "device": "--device",
    "dtype": "--dtype",
    "attention": "--attn",
}
"""Options that a server decides, by their fields."""


@with_documented_options
@dataclass(frozen=True)
class Loading(HubOptions):
    """Options for loading models.

    A device may also be "cuda:1" and engine arguments a mapping. A revision applies to every model. With `server`, the
    engine is "server", and the checkpoint is only read for its tokenizer and lengths.
    """

    device: str = option("auto", help="auto, cpu, cuda, xpu or mps.")
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

    server: ServerOptions | None = None

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        arguments: Any = self.engine_arguments or {}
        if isinstance(arguments, str):
            arguments = parse_json(arguments, "--engine-args")
        if not isinstance(arguments, Mapping):
            raise CtxextError("--engine-args is not a JSON object.", hint="""Example: '{"tensor_parallel_size": 2}'.""")
        object.__setattr__(self, "engine_arguments", arguments)
        if self.server is not None:
            self._check_server()
            object.__setattr__(self, "engine", SERVER)
        elif self.engine not in ENGINE_NAMES:
            raise CtxextError(f'Unknown engine "{self.engine}".', hint=f"Engines: {', '.join(ENGINE_NAMES)}.")
        if arguments and self.engine == "transformers":
            raise CtxextError("--engine-args requires an engine.", hint="Add --engine vllm or --engine llama.cpp.")
        check_arguments(self.engine, arguments, trust_remote_code=self.trust_remote_code)

    def _check_server(self) -> None:
        """Raise if an option is set that the server decides."""
        for name, flag in _OF_SERVER.items():
            if (value := getattr(self, name)) and value not in (getattr(Loading, name, None), SERVER):
                raise CtxextError(f"{flag} cannot be combined with --server.", hint=f"Omit {flag}.")
