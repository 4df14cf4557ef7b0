"""Run as a script, never imported: loads a converted checkpoint where ctxext cannot be imported, and checks its logits.

    python clean_process.py OUT SOURCE_CONFIG LENGTH

Prints one JSON object. The logits that the method says there must be are worked out the plain way: the stock model of
the family, one head at a time, the whole attention matrix for the statistic. No code is shared with the checkpoint's.
"""

import importlib.util
import json
import math
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any


class NoCtxext:
    """Refuses to import ctxext, as on a machine that does not have it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Raise for ctxext, leave the rest to others."""
        if name.split(".")[0] == "ctxext":
            raise ImportError("ctxext must not be needed here")


def frequencies_for(ratio: float, plain: Any, settings: dict[str, Any], theta: float) -> Any:
    """A head's inverse frequencies, one by one, from the formulas of the methods."""
    import torch

    num_pairs, found = len(plain), []
    for i, frequency in enumerate(plain.tolist()):
        if settings["schedule"] == "ntk":
            found.append(frequency / ratio ** (i / (num_pairs - 1)))
        elif settings["schedule"] == "by-parts":
            bounds = [
                num_pairs * math.log(settings["trained_length"] / (2 * math.pi * turns)) / math.log(theta)
                for turns in (settings["beta_fast"], settings["beta_slow"])
            ]
            low, high = max(math.floor(bounds[0]), 0), min(math.ceil(bounds[1]), 2 * num_pairs - 1)
            gone = min(max((i - low) / ((high - low) or 0.001), 0.0), 1.0)
            found.append(frequency / ratio * gone + frequency * (1 - gone))
        else:
            found.append(frequency / ratio)
    return torch.tensor(found, dtype=plain.dtype)


def moved(positions: Any, ratio: float, settings: dict[str, Any]) -> Any:
    """Positions with only the stretch between two of them compressed, where that is asked for."""
    if settings["rescale"] == "uniform":
        return positions
    start, end = settings["rescale"]
    inside = positions.clamp(start, end) - start
    return positions - inside + inside / ratio


def ranks_of(queries: Any, keys: Any, scaling: float, released: bool) -> list[int]:
    """The statistic on whole causal attention matrices: the head that stands out most gets the first ratio."""
    import torch

    group, length, counts = queries.shape[1] // keys.shape[1], keys.shape[2], []
    for head in range(keys.shape[1]):
        found = 0  # Counted in whole numbers, so that equal heads are equal.
        for query in range(head * group, (head + 1) * group):
            scores = queries[0, query].float() @ keys[0, head].float().T * scaling
            scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
            found += int((scores.softmax(-1)[-1] * length > 3).sum())
        counts.append(found)
    order = sorted(range(len(counts)), key=lambda head: (-counts[head], head))
    return order if released else [order.index(head) for head in range(len(order))]


def expected_logits(model: Any, settings: dict[str, Any], input_ids: Any) -> Any:
    """The stock model's logits with each head rotated by its own ratio, in the family's installed module."""
    import torch

    modeling: Any = sys.modules[type(model).__module__]
    rotary = next(module for name, module in model.named_modules() if name.endswith("rotary_emb"))
    plain, original = rotary.inv_freq.clone(), modeling.apply_rotary_pos_emb
    theta = float((getattr(model.config, "rope_parameters", None) or {}).get("rope_theta") or model.config.rope_theta)
    positions = torch.arange(input_ids.shape[1])[None].float()

    def apply(q: Any, k: Any, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
        attention = sys._getframe(1).f_locals["self"]
        if attention.layer_idx not in settings["layers"]:
            return original(q, k, cos, sin, *args, **kwargs)
        ranks = settings.get("ranks")
        scaling = getattr(attention, "scaling", q.shape[-1] ** -0.5)
        order = (
            ranks[settings["layers"].index(attention.layer_idx)]
            if ranks is not None
            else ranks_of(q, k, scaling, settings["variant"] == "released")
        )
        group, queries, keys = q.shape[1] // k.shape[1], [], []
        for head in range(k.shape[1]):
            ratio = settings["ratios"][order[head]]
            if settings["rescale"] == "uniform":
                rotary.inv_freq = frequencies_for(ratio, plain, settings, theta)
            head_cos, head_sin = rotary(cos, moved(positions, ratio, settings))
            rotary.inv_freq = plain
            own = q[:, head * group : (head + 1) * group]
            one = original(own, k[:, head : head + 1], head_cos, head_sin, *args, **kwargs)
            queries.append(one[0])
            keys.append(one[1])
        return torch.cat(queries, 1), torch.cat(keys, 1)

    modeling.apply_rotary_pos_emb = apply
    try:
        with torch.no_grad():
            return model(input_ids).logits
    finally:
        modeling.apply_rotary_pos_emb = original


def stock_folder(out: Path, config: Path, place: str) -> Path:
    """A folder with the stock configuration and links to the weights."""
    folder = Path(place)
    shutil.copyfile(config, folder / "config.json")
    for path in out.iterdir():
        if path.suffix in (".safetensors", ".bin") or path.name.endswith(".index.json"):
            (folder / path.name).symlink_to(path.resolve())
    return folder


def main() -> None:
    """Compare, and print what was found."""
    out, config, length = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    sys.meta_path.insert(0, NoCtxext())
    if importlib.util.find_spec("torch") is None:
        raise SystemExit("torch is not installed")
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    settings = json.loads((out / "config.json").read_text())
    settings = settings.get("ctxext_mspoe") or settings["text_config"]["ctxext_mspoe"]
    loaded = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True, dtype=torch.float32).eval()
    input_ids = torch.randint(0, loaded.config.get_text_config().vocab_size, (1, length))
    with torch.no_grad():
        got = loaded(input_ids).logits
    del loaded
    with tempfile.TemporaryDirectory() as place:
        stock = AutoModelForCausalLM.from_pretrained(stock_folder(out, config, place), dtype=torch.float32).eval()
    with torch.no_grad():
        unchanged = stock(input_ids).logits
    wanted = expected_logits(stock, settings, input_ids)
    found = {
        "difference": (got - wanted).abs().max().item(),
        "scale": wanted.abs().max().item(),
        "change": (unchanged - wanted).abs().max().item(),
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
