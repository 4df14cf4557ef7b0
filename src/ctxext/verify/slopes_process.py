"""Run by `clean_load.py`, never imported by ctxext: loads a converted checkpoint with ALiBi and checks its logits.

The task has `folder`, the checkpoint; `stock`, the config.json of the same model without code; `steps`, its
one method with settings and reference (see references/README.md); and `count`, a number of tokens. The expected
logits come from the stock model reading token after token, with the slopes set to those of the row before each. No
code is shared with the checkpoint's.

Rows beyond the original context length need few tokens where that is small: it is set to a third of the tokens here,
in the loaded model and for the reference. That config.json has the right one is for the check of the configuration.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

from .script import LOADED, answer, reference_at, stock_folder

BUILDERS = ("build_alibi_tensor", "build_mpt_alibi_tensor")


def token_by_token(stock: Any, input_ids: Any, settings: dict[str, Any], reference: Any) -> Any:
    """The logits of the stock model when each row has the slopes that the reference says."""
    import torch

    modeling: Any = sys.modules[type(stock).__module__]
    name = next(name for name in BUILDERS if hasattr(modeling, name))
    original, heads, logits, cache = getattr(modeling, name), stock.config.num_attention_heads, [], None
    # Falcon rounds slopes, positions and their products; what is left of them for a row is not rounded.
    dtype = torch.bfloat16 if stock.config.model_type == "falcon" else torch.float32
    plain = torch.tensor(reference.slopes({**settings, "factor": 1}, heads, 0))
    try:
        for row in range(input_ids.shape[1]):
            shares = torch.tensor(reference.slopes(settings, heads, row)) / plain
            bias = (plain.to(dtype)[:, None] * torch.arange(row + 1)).float() * shares[:, None]
            setattr(modeling, name, lambda *args, bias=bias, **kwargs: bias[:, None])
            mask = torch.ones(1, row + 1, dtype=torch.long)
            with torch.no_grad():
                out = stock(input_ids[:, row : row + 1], attention_mask=mask, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logits.append(out.logits)
    finally:
        setattr(modeling, name, original)
    return torch.cat(logits, 1)


def compare(task: dict[str, Any]) -> dict[str, float]:
    """Load a checkpoint and compare its logits with the reference."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    out, (step,) = Path(task["folder"]), task["steps"]
    settings = {**step["settings"], "original_length": max(task["count"] // 3, 1)}
    config = AutoConfig.from_pretrained(out, trust_remote_code=True)
    config.ctxext_code["steps"] = [settings]
    if hasattr(config, "max_seq_len"):  # MPT stops there.
        config.max_seq_len = max(config.max_seq_len, task["count"])
    loaded = AutoModelForCausalLM.from_pretrained(
        out, config=config, trust_remote_code=True, dtype=torch.float32
    ).eval()
    input_ids = torch.randint(0, config.vocab_size, (1, task["count"]))
    with torch.no_grad():
        logits = loaded(input_ids, attention_mask=torch.ones_like(input_ids), use_cache=False).logits
    del loaded
    print(LOADED, flush=True)  # noqa: T201
    with tempfile.TemporaryDirectory() as place:
        folder = stock_folder(out, task["stock"], place)
        stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        unchanged = stock(input_ids, attention_mask=torch.ones_like(input_ids), use_cache=False).logits
    expected = token_by_token(stock, input_ids, settings, reference_at(step["reference"]))
    return {
        "difference": (logits - expected).abs().max().item(),
        "scale": expected.abs().max().item(),
        "change": (unchanged - expected).abs().max().item(),
    }


if __name__.endswith("__main__"):
    answer(compare)
