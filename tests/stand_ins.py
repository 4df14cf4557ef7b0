"""Small models and texts with the names that pages use for theirs."""

import json
import random
import re
import shutil
from pathlib import Path

import ctxext
import tiny_models
from ctxext.api import convert
from ctxext.data.prose import sentence
from ctxext.methods import Yarn
from gguf_files import TENSORS, gguf_bytes, keys_of
from pages import ROOT, blocks
from small_llama import change_json
from tiny_base import write_jsonl
from tiny_encodings import save, save_tokenizer


def demo(place: Path, **changes) -> None:
    shutil.copytree(Path(ctxext.__file__).parent / "demo" / "checkpoint", place)
    change_json(place / "config.json", **changes)


def chat_model(place: Path) -> None:
    demo(place, max_position_embeddings=8192)
    turn = "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    (place / "chat_template.jinja").write_text(f"{{% for message in messages %}}{turn}{{% endfor %}}")


def text(place: Path) -> None:
    rng = random.Random(0)
    texts = ["\n\n".join(" ".join(sentence(rng) for _ in range(200)) for _ in range(60)) for _ in range(6)]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    place.write_text("".join(lines) if place.suffix == ".jsonl" else "\n\n".join(texts))


def chats(place: Path) -> None:
    turns = [{"role": "user", "content": "Which road?"}, {"role": "assistant", "content": "The old one."}]
    place.write_text(json.dumps({"messages": turns}) + "\n")


def gguf(place: Path) -> None:
    place.write_bytes(gguf_bytes(keys_of(), TENSORS))


def converted(place: Path) -> None:
    convert("demo", place, Yarn(factor=4), check=False)


def recipe(place: Path) -> None:
    """Write the first YAML block of docs/recipes.md."""
    place.write_text(next(block.text for block in blocks(ROOT / "docs" / "recipes.md") if block.kind == "yaml"))


STAND_INS = {
    "model.gguf": gguf,
    "recipe.yaml": recipe,
    "texts.jsonl": write_jsonl,
    "chats.jsonl": chats,
    **dict.fromkeys(("prose.jsonl", "node-manual.jsonl", "vim-manual.txt"), text),
    **dict.fromkeys(("OUT", "yarn", "yarn-tuned"), converted),
    **dict.fromkeys(("SOURCE", "Qwen/Qwen3-8B", "runs/final"), demo),
    "smollm2": chat_model,
    "google-bert/bert-base-uncased": lambda place: save_tokenizer(save("bert", place)),
    "answerdotai/ModernBERT-base": lambda place: save_tokenizer(tiny_models.save("modernbert", place)),
}
"""What pages take for granted, by its name there."""


def write_stand_ins(commands: list[list[str]], folder: Path) -> None:
    """Write what commands name into the folder where they run."""
    for name, make in STAND_INS.items():
        if any(name in words or re.search(rf'"{name}"', " ".join(words)) for words in commands):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            make(folder / name)
