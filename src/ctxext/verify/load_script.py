"""Run as a script by `isolated.py`, never imported: loads a checkpoint and says what it uses.

    python load_script.py FOLDER TRUST AUTO_CLASS

Prints one JSON object: parameters, weights that were missing, and every rotary module's inverse frequencies with the
factor on cosine and sine.
"""

import json
import sys
from pathlib import Path
from typing import Any


def rotary_modules(model: Any) -> list[dict[str, Any]]:
    """Name, layer type, inverse frequencies and scaling of each rotary embedding."""
    found = []
    for name, buffer in model.named_buffers():
        module_name, _, own_name = name.rpartition(".")
        if not own_name.endswith("inv_freq") or "original" in own_name or buffer.dim() != 1:
            continue
        layer_type = own_name.removesuffix("inv_freq").rstrip("_")
        module = model.get_submodule(module_name)
        scaling = getattr(module, f"{layer_type}_attention_scaling" if layer_type else "attention_scaling", 1.0)
        entry = {"module": module_name, "layer_type": layer_type, "frequencies": buffer.float().tolist()}
        found.append({**entry, "scaling": float(scaling if scaling is not None else 1.0)})
    return found


def main() -> None:
    """Load, and print what was found."""
    folder, trust = Path(sys.argv[1]), sys.argv[2] == "trust"
    import transformers

    model, report = getattr(transformers, sys.argv[3]).from_pretrained(
        folder, trust_remote_code=trust, dtype="auto", output_loading_info=True
    )
    found = {
        "name": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "missing": sorted(map(str, report["missing_keys"])),
        "rotary": rotary_modules(model),
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
