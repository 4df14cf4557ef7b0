"""The short training of docs/results/encoders.md: sentence-transformers' own trainer on a converted folder.

The pairs are made from the docstrings of Python's library: the first sentence of one, and a document of unrelated
sentences in which the next two stand at a random place.

    python tools/train_sentence_encoder.py tile-x2 tile-x2-tuned --steps 15
"""

import argparse
import importlib
import inspect
import json
import random
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

LEFT_OUT = {"antigravity", "this", "idlelib", "test", "turtledemo", "lib2to3", "ensurepip", "tkinter", "turtle"}
WORDS = 640
"""Number of words in a document: about 980 tokens of all-MiniLM-L6-v2."""


def docstrings() -> Iterator[str]:
    """Yield each docstring of the library's public functions, classes and methods once, on one line."""
    seen = set()
    for name in sorted(sys.stdlib_module_names - LEFT_OUT):
        try:
            module = None if name.startswith("_") else importlib.import_module(name)
        except ImportError:  # The module belongs to another operating system.
            continue
        public = {key: value for key, value in sorted(vars(module).items()) if key[0] != "_"} if module else {}
        for value in filter(callable, public.values()):
            inner = vars(value) if inspect.isclass(value) else {}
            members = [member for key, member in sorted(inner.items()) if key[0] != "_"]
            for member in [value, *filter(callable, members)]:
                text = " ".join((inspect.getdoc(member) or "").split())
                if text.isascii() and text not in seen:
                    seen.add(text)
                    yield text


def pairs(seed: int) -> Iterator[dict[str, str]]:
    """Yield questions with the documents that answer them."""
    rng, entries, others = random.Random(seed), [], []
    for text in docstrings():
        sentences = [part.strip() for part in re.split(r"(?<=[.!?]) +", text)]
        sentences = [part for part in sentences if len(part.split()) >= 6 and ">>>" not in part]
        if len(sentences) >= 2 and len(sentences[0]) < 200 and len(text) > 120:
            entries.append((sentences[0], " ".join(sentences[1:3])[:500]))
        others += sentences
    rng.shuffle(entries)
    for question, passage in entries:
        parts, size = list[str](), len(passage.split())
        while size < WORDS:
            parts.append(rng.choice(others))
            size += len(parts[-1].split())
        parts.insert(rng.randrange(len(parts) + 1), passage)
        yield {"anchor": question, "positive": " ".join(parts)}


def main() -> None:
    """Make the pairs and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source")
    parser.add_argument("out")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=16)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    file = Path("pairs.jsonl")
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs(seed=0)))
    from datasets import load_dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.losses import MultipleNegativesRankingLoss

    no_dropout = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    model = SentenceTransformer(options.source, config_kwargs=no_dropout)
    arguments = SentenceTransformerTrainingArguments(
        output_dir=f"{options.out}.training",
        max_steps=options.steps,
        per_device_train_batch_size=options.batch_size,
        learning_rate=5e-5,
        warmup_steps=2,
        seed=0,
        save_strategy="no",
        report_to="none",
    )
    data = load_dataset("json", data_files=str(file), split="train")
    SentenceTransformerTrainer(
        model=model, args=arguments, train_dataset=data, loss=MultipleNegativesRankingLoss(model)
    ).train()
    model.save_pretrained(options.out)


if __name__ == "__main__":
    main()
