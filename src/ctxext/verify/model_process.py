"""A loaded model: its description, and helpers to load and to change one, for a process without ctxext."""

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LOADED = "loaded"
"""Printed after the converted model's first output: later failures are not the model's."""


def load_stock(out: Path, config: dict[str, Any], **options: Any) -> Any:
    """Load the weights of a checkpoint under a stock configuration, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config))
        for path in out.iterdir():
            if path.suffix in (".safetensors", ".bin") or path.name.endswith(".index.json"):
                (folder / path.name).symlink_to(path.resolve())
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()


@contextlib.contextmanager
def replace_functions(space: dict[str, Any], functions: dict[str, Any]) -> Iterator[None]:
    """Replace functions in a module's namespace, by name, for the duration of the context."""
    before = {name: space[name] for name in functions if name in space}
    space.update(functions)
    try:
        yield
    finally:
        for name in functions.keys() - before.keys():
            space.pop(name, None)
        space.update(before)


def rotary_modules(model: Any) -> list[dict[str, Any]]:
    """Return name, layer type, inverse frequencies and scaling of each rotary embedding."""
    entries = []
    for name, buffer in model.named_buffers():
        module_name, _, buffer_name = name.rpartition(".")
        if not buffer_name.endswith("inv_freq") or "original" in buffer_name or buffer.dim() != 1:
            continue
        layer_type = buffer_name.removesuffix("inv_freq").rstrip("_")
        module = model.get_submodule(module_name)
        scaling = getattr(module, f"{layer_type}_attention_scaling" if layer_type else "attention_scaling", 1.0)
        entry = {"module": module_name, "layer_type": layer_type, "frequencies": buffer.float().tolist()}
        entries.append({**entry, "scaling": float(scaling if scaling is not None else 1.0)})
    return entries


def score_factors(model: Any) -> dict[str, float]:
    """Return the factor on the scores of each latent attention, relative to the square root of its head size."""
    return {
        name: float(module.scaling) * module.qk_head_dim**0.5
        for name, module in model.named_modules()
        if hasattr(module, "qk_head_dim") and hasattr(module, "scaling")
    }


def load(task: dict[str, Any]) -> dict[str, Any]:
    """Load a model and describe it: class, number of parameters, missing weights, `rotary_modules`, `score_factors`.

    The task has `folder`, `trust` and `auto`, the Auto class that loads it.
    """
    import transformers

    model, info = getattr(transformers, task["auto"]).from_pretrained(
        task["folder"], trust_remote_code=task["trust"], dtype="auto", output_loading_info=True
    )
    return {
        "name": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "missing": sorted(map(str, info["missing_keys"])),
        "rotary": rotary_modules(model),
        "scores": score_factors(model),
    }


def backend_of(model: Any) -> str:
    """Return the attention implementation of a model."""
    return model.config.get_text_config()._attn_implementation or "eager"


def describe(error: Exception) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
