"""What a fine-tuned checkpoint says of its training: notes, the command, the picture of its loss."""

import dataclasses
import shlex
from pathlib import Path
from typing import Any

from ctxext.checkpoint import read_json_object
from ctxext.converters.card import EXTENDED
from ctxext.finetune.options import TrainingOptions

REPORT, CURVE = "finetune.json", "loss.png"
_OF_THE_MACHINE = (
    *("device", "dtype", "context_parallel", "micro_batch", "checkpointing", "piece"),
    *("save_every", "eval_every", "report_to"),
)
"""Options that decide where and how fast it runs, not what comes out."""


def curve_of(folder: Path) -> str:
    """The name of the picture of the loss; empty where there is none."""
    return CURVE if (folder / CURVE).is_file() else ""


def training_command(folder: Path) -> str:
    """The `ctxext finetune` line; empty where the folder does not say how it was trained.

    Raises:
        CtxextError: finetune.json cannot be read.
    """
    if not (folder / REPORT).is_file():
        return ""
    report = read_json_object(folder / REPORT)
    options, data = report.get("options") or {}, report.get("data") or {}
    words = ["ctxext", "finetune", EXTENDED, "OUT", "--data", str(data.get("name") or "DATA")]
    for field in dataclasses.fields(TrainingOptions):
        value, option = options.get(field.name), "--" + field.name.replace("_", "-")
        if field.name in _OF_THE_MACHINE or value in (None, False, field.default, []):
            continue
        words += [option] if value is True else [option, _plain(value)]
    return shlex.join(words)


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
