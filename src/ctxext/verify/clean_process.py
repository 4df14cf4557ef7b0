"""Run as a script, never imported: loads a converted checkpoint where ctxext cannot be imported, and checks its logits.

    python clean_process.py TASK

TASK is a JSON file with `folder`, the checkpoint; `stock`, the config.json of the same model without code; `steps`, for
each method its settings and its reference (see references/README.md); and `positions`. Prints one JSON object. What the
logits must be is worked out the plain way, on the stock model of the family: one head, one row at a time. No code is
shared with the checkpoint's.
"""

import importlib.util
import json
import math
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


def module_at(path: str) -> Any:
    """A reference, as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem + "_reference", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Rotation:
    """The stock model's rotary embedding of its full-attention layers, told which angles to use."""

    def __init__(self, model: Any, apply: Any, full_types: list[str]) -> None:
        import torch

        modules = [(name, module) for name, module in model.named_modules() if name.endswith("rotary_emb")]
        self.module = next(m for name, m in modules if not any(word in name for word in ("vision", "visual", "audio")))
        buffers = dict(self.module.named_buffers())
        found = [layer_type for layer_type in full_types if f"{layer_type}_inv_freq" in buffers]
        self.layer_types, self.apply = found[:1], apply
        self.buffer = f"{found[0]}_inv_freq" if found else "inv_freq"
        self.frequencies = getattr(self.module, self.buffer).clone()
        self.torch = torch

    def table(self, angles: Any) -> Any:
        """Cos and sin, in the family's own layout, of one row's angles (pairs)."""
        setattr(self.module, self.buffer, angles.to(self.frequencies.dtype))
        try:
            one = self.torch.ones(1, 1)
            shape = (3, 1, 1) if hasattr(self.module, "mrope_section") else (1, 1)
            return self.module(one, one.expand(shape), *self.layer_types)
        finally:
            setattr(self.module, self.buffer, self.frequencies)

    def rows(self, states: Any, angles: Any) -> Any:
        """Rotate one head's rows (l, d) each by its own angles (l, pairs)."""
        found = []
        for row, own in zip(states, angles, strict=True):
            cos, sin = self.table(own)
            query = row[None, None, None]
            found.append(self.apply(query, query, cos, sin)[0][0, 0, 0])
        return self.torch.stack(found)


class Expected:
    """The logits that the methods' references ask for."""

    def __init__(self, model: Any, task: dict[str, Any]) -> None:
        modeling: Any = sys.modules[type(model).__module__]
        self.model, self.modeling = model, modeling
        self.plain_apply = self.modeling.apply_rotary_pos_emb
        self.rotation = Rotation(model, self.plain_apply, task["full_types"])
        self.theta, self.states = float(task["theta"]), dict[int, Any]()
        self.current: list[Any] = [None]
        self.steps = [(step["settings"], module_at(step["reference"])) for step in task["steps"]]
        self.heads = [step for step in self.steps if hasattr(step[1], "rotation")]
        self.attention = [step for step in self.steps if hasattr(step[1], "regions")]

    def logits(self, input_ids: Any, positions: Any) -> Any:
        """Run the stock model with its rotation, and where a method asks for it its attention, worked out here."""
        import torch

        self.positions = positions[0].float()
        hooks = [
            module.register_forward_pre_hook(lambda own, _: self.current.__setitem__(0, own))
            for module in self.model.modules()
            if _applies(module)
        ]
        eager = getattr(self.modeling, "eager_attention_forward", None)
        self.modeling.apply_rotary_pos_emb = self.apply
        if self.attention:
            self.modeling.eager_attention_forward = lambda *args, **kwargs: self.attend(eager, *args, **kwargs)
        try:
            with torch.no_grad():
                mask = torch.ones_like(input_ids)
                return self.model(input_ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        finally:
            self.modeling.apply_rotary_pos_emb = self.plain_apply
            if self.attention:
                self.modeling.eager_attention_forward = eager
            for hook in hooks:
                hook.remove()

    def apply(self, q: Any, k: Any, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
        """In the place of the family's function: un-rotated states are kept, rotated ones returned."""
        attention = self.current[0]
        axis = kwargs.get("unsqueeze_dim", 1)
        queries, keys = (q, k) if axis == 1 else (q.transpose(1, 2), k.transpose(1, 2))
        layer, scaling = attention.layer_idx, getattr(attention, "scaling", None) or q.shape[-1] ** -0.5
        chosen = [reference.choose(settings, layer, queries, keys, scaling) for settings, reference in self.heads]
        self.states[id(attention)] = queries, keys, chosen
        if all(one is None for one in chosen):
            return self.plain_apply(q, k, cos, sin, *args, **kwargs)
        turned = [self.rotated(queries, keys, chosen, self.positions), self.rotated(keys, keys, chosen, self.positions)]
        return tuple(one if axis == 1 else one.transpose(1, 2) for one in turned)

    def rotated(self, states: Any, keys: Any, chosen: list[Any], positions: Any, frequencies: Any = None) -> Any:
        """Rotate all heads of un-rotated states to positions (l) or (l, pairs), each with its KV head's schedule."""
        import torch

        group, found = states.shape[1] // keys.shape[1], []
        for head in range(states.shape[1]):
            own, at = list(self.rotation.frequencies.tolist() if frequencies is None else frequencies), positions
            for (settings, reference), choice in zip(self.heads, chosen, strict=True):
                at, own = reference.rotation(settings, choice, head // group, at, own, self.theta)
            at = at if at.ndim == 2 else at[:, None]
            found.append(self.rotation.rows(states[0, head], at * torch.tensor(own, dtype=torch.float32)))
        return torch.stack(found)[None]

    def attend(self, eager: Any, module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        """In the place of the family's attention: scores by regions, one softmax."""
        import torch

        (settings, reference) = self.attention[0]
        if module.layer_idx not in settings["layers"]:
            return eager(module, query, key, value, mask, **kwargs)
        queries, keys, chosen = self.states[id(module)]
        group, scaling, width = query.shape[1] // key.shape[1], kwargs["scaling"], queries.shape[-1]
        scores = torch.full((1, query.shape[1], query.shape[2], key.shape[2]), -math.inf)
        plain = self.rotation.frequencies.tolist()
        for where, a, b, frequencies in reference.regions(settings, self.positions, plain):
            q = self.rotated(queries, keys, chosen, a, frequencies)
            k = self.rotated(keys, keys, chosen, b, frequencies).repeat_interleave(group, 1)
            found = q @ k.transpose(2, 3)
            if query.shape[-1] > width:  # The part of each head that does not rotate.
                rest = key[..., width:].repeat_interleave(group, 1)
                found = found + query[..., width:] @ rest.transpose(2, 3)
            scores = torch.where(where & (scores == -math.inf), found, scores)
        scores = scores * scaling * reference.temperature(settings, self.positions).view(1, 1, -1, 1)
        if kwargs.get("softcap"):
            scores = kwargs["softcap"] * torch.tanh(scores / kwargs["softcap"])
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
        sinks = getattr(module, "sinks", None)
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
        weights = scores.softmax(-1)[..., : key.shape[2]]
        return (weights @ value.repeat_interleave(group, 1)).transpose(1, 2).contiguous(), weights


def _applies(module: Any) -> bool:
    """Whether a module's own forward applies the rotary embedding."""
    code = getattr(getattr(type(module).forward, "__wrapped__", type(module).forward), "__code__", None)
    return code is not None and "apply_rotary_pos_emb" in code.co_names


def stock_folder(out: Path, config: dict[str, Any], place: str) -> Path:
    """A folder with the stock configuration and links to the weights."""
    folder = Path(place)
    (folder / "config.json").write_text(json.dumps(config))
    for path in out.iterdir():
        if path.suffix in (".safetensors", ".bin") or path.name.endswith(".index.json"):
            (folder / path.name).symlink_to(path.resolve())
    return folder


def main() -> None:
    """Compare, and print what was found."""
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    sys.meta_path.insert(0, NoCtxext())
    if importlib.util.find_spec("torch") is None:
        raise SystemExit("torch is not installed")
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    out, positions = Path(task["folder"]), torch.tensor([task["positions"]])
    loaded = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True, dtype=torch.float32).eval()
    input_ids = torch.randint(0, loaded.config.get_text_config().vocab_size, positions.shape)
    mask = torch.ones_like(input_ids)
    with torch.no_grad():
        got = loaded(input_ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    del loaded
    with tempfile.TemporaryDirectory() as place:
        folder = stock_folder(out, task["stock"], place)
        stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        unchanged = stock(input_ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    wanted = Expected(stock, task).logits(input_ids, positions)
    found = {
        "difference": (got - wanted).abs().max().item(),
        "scale": wanted.abs().max().item(),
        "change": (unchanged - wanted).abs().max().item(),
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
