"""Checkpoints as models, and their logits."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def load(folder: Path, auto: Any = AutoModelForCausalLM, **options: Any) -> Any:
    """Load a checkpoint in float32, with its code."""
    return auto.from_pretrained(folder, **{"dtype": torch.float32, "trust_remote_code": True, **options}).eval()


def logits(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return the logits for token ids; a folder is loaded first."""
    model = load(model) if isinstance(model, str | Path) else model
    with torch.no_grad():
        return model(ids, **options).logits
