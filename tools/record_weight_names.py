"""Record the names of a family's weights in its files, so that a conversion need not build the class.

Run it with the newest supported version of transformers; names are those of published checkpoints, in every version:

    PYTHONPATH=src:tests python tools/record_weight_names.py

A family of rotary_classes.json is recorded if its names follow from config.json; in hybrid families they do not.
"""

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

import tiny_models
from ctxext.checkpoint.loading import RECORDED
from ctxext.files.tensor_files import read_safetensors_header
from ctxext.verify.rotary_classes import read_measurements

SIZES = {
    **{"num_hidden_layers": 5, "first_k_dense_replace": 2, "num_dense_layers": 2, "moe_layer_start_index": 2},
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 7),
}
"""Parameters that give weights an index, each kind with a different value."""

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def make_config(model_type: str, **changes: Any) -> PretrainedConfig:
    """Return a tiny configuration with these parameters."""
    kind = type(tiny_models.tiny_config(model_type))
    usual = kind()
    fields = {**tiny_models._overrides(model_type, usual), "tie_word_embeddings": False, **changes}
    fields |= {key: size for key, size in SIZES.items() if key in usual.to_dict()}
    if types := fields.get("layer_types"):
        fields["layer_types"] = [*types, *types[-1:] * (SIZES["num_hidden_layers"] - len(types))]
    return kind(**fields)


def weights(config: PretrainedConfig) -> frozenset[str]:
    """Return the weight names in the class; none if the configuration is invalid."""
    try:
        with torch.device("meta"):
            return frozenset(AutoModelForCausalLM.from_config(config).state_dict())
    except Exception:  # A class may raise anything for a switch.
        return frozenset()


def by_place(names: list[str], config: PretrainedConfig) -> dict[str, list[str]]:
    """Group names by their part up to the last index, with every index as a range of config.json parameters.

    Raises:
        ValueError: The names do not follow from such parameters.
    """

    def key_of(value: int) -> str:
        keys = [key for key, size in SIZES.items() if size == value and hasattr(config, key)]
        if value and not keys:
            raise ValueError(f"no number is {value}")
        return "|".join(keys) if value else ""

    indices: dict[str, list[list[int]]] = {}
    for name in names:
        indices.setdefault(NUMBER.sub("{}", name), []).append([*map(int, NUMBER.findall(name))])
    places: dict[str, list[str]] = {}
    for name, rows in sorted(indices.items()):
        spans = [sorted(set(column)) for column in zip(*rows, strict=True)]
        for span in spans:
            if span != [*range(span[0], span[-1] + 1)]:
                raise ValueError(f"{name} is not in all of {span}")
            name = name.replace("{}", f"{{{key_of(span[0])}:{key_of(span[-1] + 1)}}}", 1)
        place, brace, ending = name.rpartition("}.")
        places.setdefault(place + brace, []).append(ending)
    return places


def record(model_type: str) -> dict[str, Any]:
    """Return the record of a family.

    It contains the weight names, the switches that change them, and whether head and embedding share weights by
    default.
    """
    config = make_config(model_type)
    usual, switches = weights(config), {}
    for key, value in config.to_dict().items():
        changes_nothing = key == "tie_word_embeddings" or key in PretrainedConfig().to_dict()
        if (
            isinstance(value, bool)
            and not changes_nothing
            and weights(make_config(model_type, **{key: not value})) != usual
        ):
            switches[key] = value
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        names = [name for path in Path(folder).glob("*.safetensors") for name in read_safetensors_header(path)]
    return {"tied": type(config)().tie_word_embeddings, "switches": switches, "names": by_place(names, config)}


def main() -> None:
    """Record the families and write the file."""
    entries = {}
    for model_type in sorted({entry["family"] for entry in read_measurements().values()} & {*tiny_models.FAMILIES}):
        try:
            entries[model_type] = record(model_type)
        except Exception as error:  # A class may raise anything for these parameters.
            sys.stdout.write(f"{model_type} is left out: {error}\n")
    lines = ",\n".join(f'"{name}": {json.dumps(entry)}' for name, entry in entries.items())
    RECORDED.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
