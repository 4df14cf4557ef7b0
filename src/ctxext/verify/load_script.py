"""Run by `clean_load.py`, never imported by ctxext: loads a checkpoint and says what it uses.

The task has `folder`, `trust` and `auto`, the Auto class that loads it. The answer has the model's class, the number of
parameters, weights that were missing, and every rotary module's inverse frequencies with the factor on cosine and sine.
"""

from typing import Any

from .script import answer


def rotary_modules(model: Any) -> list[dict[str, Any]]:
    """Name, layer type, inverse frequencies and scaling of each rotary embedding."""
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


def load(task: dict[str, Any]) -> dict[str, Any]:
    """Load a model and describe it."""
    import transformers

    model, info = getattr(transformers, task["auto"]).from_pretrained(
        task["folder"], trust_remote_code=task["trust"], dtype="auto", output_loading_info=True
    )
    return {
        "name": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "missing": sorted(map(str, info["missing_keys"])),
        "rotary": rotary_modules(model),
    }


if __name__.endswith("__main__"):
    answer(load)
