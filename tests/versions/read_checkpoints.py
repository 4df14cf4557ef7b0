"""Script of `releases.py` for a process with one release of transformers and without ctxext.

Its arguments are a JSON file with the checkpoints' folders by name, and an existing folder for the results. For each
checkpoint it writes NAME.safetensors with the logits of one prompt and of a padded batch, which causal language models
decode from a cache. Its last line of output is a JSON object of the errors by name.
"""

import inspect
import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

LENGTHS, DECODED = (150, 101), 5
"""Tokens of the two rows of a batch, longer than the original context length, and of the decode steps after it."""


def read(folder):
    """Return the logits of a checkpoint by the kind of call."""
    config = json.loads((Path(folder) / "config.json").read_text())
    architecture = config["architectures"][0]
    is_causal = "CausalLM" in architecture or "ConditionalGeneration" in architecture or "LMHead" in architecture
    auto = transformers.AutoModelForCausalLM if is_causal else transformers.AutoModelForMaskedLM
    model = auto.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
    vocabulary = model.config.get_text_config().vocab_size
    rows = [torch.arange(length) * 7 % (vocabulary - 5) + 4 for length in LENGTHS]
    # Decoded first: `dynamic` keeps the frequencies of the longest text before, in some releases only.
    read_more = read_segments if "mem_len" in config else decode if is_causal else read_padded
    results = {read_more.__name__: read_more(model, rows)}
    results["one call"] = model(input_ids=rows[0][None]).logits
    return {name: logits.contiguous() for name, logits in results.items()}


def read_padded(model, rows):
    """Return the logits of the tokens of a right-padded batch, (tokens, vocabulary)."""
    mask = torch.stack([torch.arange(len(rows[0])) < len(row) for row in rows])
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return model(input_ids=ids, attention_mask=mask.long()).logits[mask]


def read_segments(model, rows):
    """Return the logits of the second half of a text, (1, tokens, vocabulary), after the states of the first half."""
    first, second = rows[0][None].chunk(2, dim=1)
    return model(input_ids=second, mems=model(input_ids=first).mems).logits


def decode(model, rows):
    """Return the logits of a left-padded prompt's last token and of each decode step, (rows, 1 + steps, vocabulary)."""
    width = max(map(len, rows)) - DECODED
    prompts = [row[: len(row) - DECODED] for row in rows]
    ids = torch.stack([torch.cat([row.new_full((width - len(row),), 3), row]) for row in prompts])
    mask = torch.stack([torch.arange(width) >= width - len(row) for row in prompts]).long()
    # Most classes derive positions from the mask in generate alone.
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    cache, logits = {}, []
    for step in range(DECODED + 1):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        given = {"position_ids": positions} if takes_positions else {}
        output = model(input_ids=ids, attention_mask=mask, use_cache=True, **given, **cache)
        logits.append(output.logits[:, -1:])
        name = next(key for key, value in output.items() if hasattr(value, "get_seq_length"))
        cache = {name: output[name]}
        if step < DECODED:
            ids = torch.stack([row[len(row) - DECODED + step] for row in rows])[:, None]
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
    return torch.cat(logits, 1)


def main():
    """Read all checkpoints."""
    checkpoints, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    transformers.logging.set_verbosity_error()
    errors = {}
    with torch.no_grad():
        for name, folder in checkpoints.items():
            try:
                save_file(read(folder), out / f"{name}.safetensors")
            except Exception as error:  # Any exception is the result.
                errors[name] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    sys.stdout.write(json.dumps(errors) + "\n")


if __name__.endswith("__main__"):
    main()
