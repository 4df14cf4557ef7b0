"""llama.cpp's server with a GGUF file, as xllamacpp starts it, and the tokenizer of the file.

xllamacpp is optional and is imported only when the engine is used.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ctxext.errors import CtxextError
from ctxext.gguf.header import read_header
from ctxext.server.client import Server

_CACHES = {"auto": "F16", "fp16": "F16", "bf16": "BF16", "fp32": "F32"}
"""Type of keys and values by the value of --dtype."""
_GREEDY: Mapping[str, Any] = {"samplers": ["top_k"], "top_k": 1}
"""Greedy decoding, even if the file specifies samplers."""
_CONTEXT_OF_TOKENIZER = 256


def llama_cpp_version() -> str:
    """Return the installed version of xllamacpp."""
    try:
        import xllamacpp
    except ImportError as error:
        raise CtxextError("llama.cpp is not installed.", hint='pip install "ctxext[llama-cpp]"') from error
    return str(xllamacpp.__version__)


class LlamaCpp:
    """llama.cpp's server with one GGUF file, on a free port of this machine.

    Args:
        path: The file, or the first of a split model's.
        length: Tokens of the longest prompt with its answer.
        dtype: auto, fp16, bf16 or fp32: the type of keys and values; fp32 also disables flash attention, which
            rounds to 16 bits.
        threads: Number of threads.
        arguments: Fields of `xllamacpp.CommonParams`, such as `n_gpu_layers` or `cpuparams.n_threads`; they override
            the other arguments.
    """

    name = "llama.cpp"
    has_text = True

    def __init__(
        self, path: Path, *, length: int, dtype: str, threads: int, arguments: Mapping[str, Any] | None = None
    ) -> None:
        self.version, self.path = llama_cpp_version(), path
        import xllamacpp

        exact = dtype == "fp32"
        cache = _CACHES[dtype]
        self.attention = f"{cache} keys and values" + (", without flash attention" if exact else "")
        parameters = xllamacpp.CommonParams()
        parameters.model.path, parameters.n_ctx, parameters.n_parallel = str(path), length, 1
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
        parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type[f"GGML_TYPE_{cache}"]
        if exact:
            parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        parameters.warmup, parameters.verbosity = False, -1
        key = secrets.token_hex()
        parameters.api_keys = [key]  # Other users of this machine can reach the server.
        for field, value in (arguments or {}).items():
            _set(parameters, field, value)
        try:
            self._process = xllamacpp.Server(parameters)
        except (RuntimeError, ValueError, OSError) as error:
            raise CtxextError(
                f'llama.cpp cannot load "{path.name}": {_first_line(error)}',
                hint="Set its arguments with --engine-args; '{\"verbosity\": 3}' shows its log.",
            ) from error
        kinds = {str(device["type"]) for device in xllamacpp.get_device_info()}
        self.device = "gpu" if any("GPU" in kind for kind in kinds) else "cpu"
        self.server = Server.of_started(self._process.listening_address, key, more=_GREEDY)
        self.properties = self.server.request("GET", "props")
        self.dtype = str(self.properties["model_ftype"])
        room = self.properties["default_generation_settings"]["n_ctx"]
        if room < length:
            raise CtxextError(
                f'llama.cpp {self.version} limits "{path.name}" to {room} tokens, fewer than {length}.',
                hint="Use shorter lengths, or convert the file to longer ones.",
            )

    def close(self) -> None:
        """Stop the server and free its memory; further calls have no effect."""
        self._process = None


class LlamaTokenizer:
    """The tokenizer of a GGUF file in llama.cpp, called like a tokenizer of transformers."""

    def __init__(self, engine: LlamaCpp) -> None:
        self.engine = engine
        self.chat_template = read_header(engine.path).get("tokenizer.chat_template")

    def __call__(self, text: str | list[str], *, add_special_tokens: bool = True, verbose: bool = True) -> Any:
        """Return the `input_ids` of a text or of several texts, with special tokens parsed by name."""
        del verbose
        if not isinstance(text, str):
            return {"input_ids": [self(part, add_special_tokens=add_special_tokens)["input_ids"] for part in text]}
        content = {"content": text, "add_special": add_special_tokens, "parse_special": True}
        return {"input_ids": self.engine.server.request("POST", "tokenize", content)["tokens"]}

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token."""
        return [self.decode([token]) for token in ids]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of tokens, including special tokens by name."""
        del skip_special_tokens  # Answers of llama.cpp do not contain their end token.
        return str(self.engine.server.request("POST", "detokenize", {"tokens": list(ids)})["content"])

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], *, tokenize: bool, **more: Any) -> str:
        """Render a conversation as one text, by the template in the file."""
        from transformers.utils.chat_template_utils import render_jinja_template

        assert not tokenize
        names = {name: self.engine.properties.get(name, "") for name in ("bos_token", "eos_token")}
        texts, _ = render_jinja_template([list(messages)], chat_template=self.chat_template, **{**names, **more})
        return str(texts[0])


def tokenizer_of(path: Path) -> LlamaTokenizer:
    """Load the tokenizer of a GGUF file, in an engine with a short context."""
    return LlamaTokenizer(LlamaCpp(path, length=_CONTEXT_OF_TOKENIZER, dtype="auto", threads=1))


def _set(parameters: Any, field: str, value: Any) -> None:
    """Set a field of the engine's parameters, with dots for nested fields."""
    *parts, name = field.split(".")
    try:
        for part in parts:
            parameters = getattr(parameters, part)
        getattr(parameters, name)
        setattr(parameters, name, value)
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise CtxextError(
            f'llama.cpp does not accept {json.dumps(value)} for "{field}": {_first_line(error)}.',
            hint="""--engine-args are fields of xllamacpp.CommonParams: '{"n_gpu_layers": 99}'.""",
        ) from error


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
