"""`ctxext env`: versions, devices and cache folders, for bug reports."""

import os
import platform
from typing import Any

from ctxext.checkpoint.loading import find_accelerator
from ctxext.cli.options import takes_options
from ctxext.cli.output import Output, bold, label_table
from ctxext.files.packages import NEWEST, OLDEST, TESTED_TORCH, installed_version, untested_notice
from ctxext.version import __version__

_PACKAGES = (
    "torch", "transformers", "peft", "accelerate", "safetensors", "huggingface_hub", "datasets", "typer", "rich",
    "matplotlib", "vllm", "lm_eval",
)  # fmt: skip


@takes_options(without=("quiet", "verbose"))
def env(*, output: Output) -> None:
    """Print versions, devices and cache folders for a bug report.

    Examples:
    ctxext env
    """
    with output.progress("reading versions and devices", stopped=""):
        import torch
        from huggingface_hub.constants import HF_HUB_CACHE

        kind = find_accelerator()
        module: Any = torch.get_device_module(kind) if kind else None
        accelerators = [kind] if kind else []
        if hasattr(module, "get_device_name"):
            accelerators = [module.get_device_name(index) for index in range(module.device_count())]
        facts = {
            "ctxext": __version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            **{name: installed_version(name) or "not installed" for name in _PACKAGES},
            "tested transformers": f"{OLDEST} to {NEWEST}",
            "tested torch": " and ".join(TESTED_TORCH),
            "processor": f"{os.cpu_count()} cores, {torch.get_num_threads()} torch threads",
            "accelerators": ", ".join(accelerators) or "none",
            "hub cache": HF_HUB_CACHE,
        }
    table = label_table()
    for key, value in facts.items():
        table.add_row(bold(key), str(value))
    output.result(facts, table)
    if notice := untested_notice():
        output.warning(f"{notice}.")
