"""After converting with code: load the result where ctxext cannot be imported, and compare its logits."""

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxext.checkpoint import Checkpoint
from ctxext.errors import CtxextError
from ctxext.files import as_json

_SCRIPT = Path(__file__).with_name("clean_process.py")
_TOLERANCE = 1e-4
_NUM_TOKENS = 48
_BYTES_PER_PARAMETER = 4


@dataclass(frozen=True)
class Verification:
    """What a check in a clean process found.

    Attributes:
        skipped: Why nothing was checked; empty where it was.
        difference: Largest difference from the logits that the method asks for, relative to the largest logit.
        change: Largest change of a logit against the source.
    """

    skipped: str = ""
    difference: float = 0.0
    change: float = 0.0


def verify(folder: Path, source: Checkpoint, stock_config: Mapping[str, Any]) -> Verification:
    """Load a converted checkpoint in a process that cannot import ctxext and compare its logits.

    Args:
        folder: The converted checkpoint.
        source: Where its weights come from.
        stock_config: The configuration with all steps that stock transformers carries, for the comparison.

    Raises:
        CtxextError: it does not load, or its logits are not what the method says.
    """
    needed = 2 * _BYTES_PER_PARAMETER * _num_parameters(source)
    if needed > 0.8 * _available_memory():
        return Verification(skipped=f"two copies of the model need {needed / 2**30:.1f} GiB of memory")
    with tempfile.TemporaryDirectory() as place:
        config = Path(place) / "stock.json"
        config.write_text(as_json(stock_config), encoding="utf-8")
        command = f"import runpy; runpy.run_path({str(_SCRIPT)!r}, run_name='__main__')"
        result = subprocess.run(
            [sys.executable, "-c", command, str(folder.resolve()), str(config), str(_NUM_TOKENS)],
            capture_output=True,
            text=True,
            cwd=place,
            env={**os.environ, "HF_MODULES_CACHE": place, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
            check=False,
        )
    if result.returncode != 0:
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise CtxextError(
            f"The converted model does not load in a clean process: {last}", hint="--no-verify writes it all the same."
        )
    found = json.loads(result.stdout.strip().splitlines()[-1])
    relative = found["difference"] / max(found["scale"], 1.0)
    if not math.isfinite(relative) or relative > _TOLERANCE:
        raise CtxextError(
            f"The converted model's logits differ by {relative:.1e} from what the method says.",
            hint="Please report this with the output of ctxext env; --no-verify writes it all the same.",
        )
    return Verification(difference=relative, change=found["change"])


def _num_parameters(source: Checkpoint) -> int:
    counted = sum(math.prod(entry["shape"]) for header in source.headers() for entry in header.values())
    return counted or sum(source.size_of(path) for path in source.weight_files) // 2


def _available_memory() -> int:
    """Bytes of memory that are free to use; a large number where the system does not say."""
    memory = Path("/proc/meminfo")
    if memory.is_file():
        lines = dict(line.split(":", 1) for line in memory.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    return 2**62
