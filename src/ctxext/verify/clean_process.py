"""Run as a script by `isolated.py`, never imported: loads a converted checkpoint and checks its logits.

    python clean_process.py TASK

TASK is a JSON file with `folder`, the checkpoint; `stock`, the config.json of the same model without code; `steps`, for
each method its settings and its reference (see references/README.md); and `positions`. Prints one JSON object. What the
logits must be is worked out the plain way, on the stock model of the family: one head, one row at a time. No code is
shared with the checkpoint's.
"""

import importlib.util
import inspect
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any


def module_at(path: str) -> Any:
    """A reference, as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem + "_reference", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LEARNED = ".distance.weight"
APPLY = ("apply_rotary_pos_emb", "apply_rotary_emb")


def parts_of(found: Any) -> Any:
    """Cos and sin, as most families have them, or as the parts of one complex tensor (Llama 4)."""
    return found if isinstance(found, tuple) else (found.real, found.imag)


def by_complex_numbers(states: Any, _: Any, cos: Any, sin: Any) -> Any:
    """Rotate neighbouring dimensions (b, h, l, d) as one complex number each."""
    import torch

    pairs = torch.view_as_complex(states.double().unflatten(-1, (-1, 2))) * torch.complex(cos.double(), sin.double())
    return (torch.view_as_real(pairs).flatten(-2).to(states.dtype),)


class Rotation:
    """The stock model's rotary embedding of its full-attention layers, told which angles to use."""

    def __init__(self, model: Any, apply: Any, full_types: list[str]) -> None:
        import torch

        modules = [(name, one) for name, one in model.named_modules() if "otary" in type(one).__name__]
        self.module = next(m for name, m in modules if not any(word in name for word in ("vision", "visual", "audio")))
        buffers = dict(self.module.named_buffers())
        self.layer_types = [layer_type for layer_type in full_types if f"{layer_type}_inv_freq" in buffers][:1]
        self.buffer = "_".join([*self.layer_types, "inv_freq"])
        self.frequencies, self.apply, self.torch = getattr(self.module, self.buffer).clone(), apply, torch
        # Which pair of dimensions each column of the family's cos and sin belongs to.
        known = torch.linspace(0.1, 1.4, len(self.frequencies))
        (cos, sin), used = self.table(known)
        if not torch.equal(used, known.to(used.dtype)):
            known = used  # It goes by the length of what it is asked (LongRoPE).
        elif torch.equal(sin, self.table(self.frequencies)[0][1]):
            known = self.frequencies  # It works its frequencies out anew each time (Phi-MoE).
        self.scaling = float(torch.hypot(cos, sin).flatten()[0])
        self.columns = (sin.flatten()[:, None] / self.scaling - known.sin()).abs().argmin(-1)

    def table(self, angles: Any) -> Any:
        """The family's own cos and sin at position 1 with these inverse frequencies, and those it holds afterwards."""
        setattr(self.module, self.buffer, angles.to(self.frequencies.dtype).clone())  # They are changed in place.
        try:
            one = self.torch.ones(1, 1)
            shape = (3, 1, 1) if hasattr(self.module, "mrope_section") else (1, 1)
            found = parts_of(self.module(one, one.expand(shape), *self.layer_types))
            return found, getattr(self.module, self.buffer)
        finally:
            setattr(self.module, self.buffer, self.frequencies.clone())

    def rows(self, states: Any, angles: Any, loudness: float = 1.0) -> Any:
        """Rotate one head's rows (l, d) each by its own angles (l, pairs), cos and sin times a factor."""
        angles = angles[:, self.columns][None].to(self.torch.float64)
        cos, sin = (f(angles).to(states.dtype) * self.scaling * loudness for f in (self.torch.cos, self.torch.sin))
        return self.apply(states[None, None], states[None, None], cos, sin)[0][0, 0]


class Expected:
    """The logits that the methods' references ask for."""

    def __init__(self, model: Any, task: dict[str, Any]) -> None:
        modeling: Any = sys.modules[type(model).__module__]
        self.model, self.modeling = model, modeling
        self.applied = next(name for name in APPLY if hasattr(modeling, name))
        self.plain_apply = getattr(modeling, self.applied)
        self.is_complex = self.applied == "apply_rotary_emb"
        self.takes_key = list(inspect.signature(self.plain_apply).parameters)[1] != "cos"
        one = lambda q, k, cos, sin: (self.plain_apply(q, cos, sin),)  # noqa: E731
        rotate = by_complex_numbers if self.is_complex else self.plain_apply if self.takes_key else one
        self.rotation = Rotation(model, rotate, task["full_types"])
        self.theta, self.positions = float(task["theta"]), list[int]()
        self.states, self.angles = dict[int, Any](), dict[Any, Any]()
        self.current: list[Any] = [None]
        self.layer: int | None = None
        steps = [(step["settings"], module_at(step["reference"])) for step in task["steps"]]
        self.heads = [step for step in steps if hasattr(step[1], "rotation")]
        self.attention = [step for step in steps if hasattr(step[1], "relation")]
        names = dict(model.named_modules())
        self.numbers = {id(names[name]): numbers for name, numbers in task.get("numbers", {}).items()}

    def logits(self, input_ids: Any, positions: Any) -> Any:
        """Run the stock model with its rotation, and where a method asks for it its attention, worked out here."""
        import torch

        self.positions = positions[0].tolist()
        hooks = [
            module.register_forward_pre_hook(self.enter, with_kwargs=True)
            for module in self.model.modules()
            if _applies(module)
        ]
        eager = getattr(self.modeling, "eager_attention_forward", None)
        setattr(self.modeling, self.applied, self.apply)
        if self.attention:
            self.modeling.eager_attention_forward = lambda *args, **kwargs: self.attend(eager, *args, **kwargs)
        try:
            with torch.no_grad():
                mask = torch.ones_like(input_ids)
                return self.model(input_ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        finally:
            setattr(self.modeling, self.applied, self.plain_apply)
            if self.attention:
                self.modeling.eager_attention_forward = eager
            for hook in hooks:
                hook.remove()

    def enter(self, attention: Any, _: Any, named: dict[str, Any]) -> None:
        """Note which attention runs, and at which depth: some families run one at several (Zamba 2)."""
        self.current[0] = attention
        self.layer = named.get("layer_idx", getattr(attention, "layer_idx", getattr(attention, "block_idx", None)))

    def apply(self, q: Any, k: Any, *args: Any, **kwargs: Any) -> Any:
        """In the place of the family's function: un-rotated states are kept, rotated ones returned."""
        import torch

        attention = self.current[0]
        if not self.takes_key:
            return self.apply_one(q, k, *args, **kwargs)
        axis = 2 if self.is_complex else kwargs.get("unsqueeze_dim", 1)
        queries, keys = (q, k) if axis == 1 else (q.transpose(1, 2), k.transpose(1, 2))
        layer, scaling = self.layer, getattr(attention, "scaling", None) or q.shape[-1] ** -0.5
        chosen = [reference.choose(settings, layer, queries, keys, scaling) for settings, reference in self.heads]
        self.states[id(attention)] = queries, keys, chosen
        if all(one is None for one in chosen):
            return self.plain_apply(q, k, *args, **kwargs)
        rotated = []
        for states in (queries, keys):
            group, heads = states.shape[1] // keys.shape[1], []
            for head in range(states.shape[1]):
                at, own = self.of_head(chosen, head // group)
                loudness = self.loudness_of(chosen, head // group)
                heads.append(self.rotation.rows(states[0, head], at[:, None] * torch.tensor(own), loudness))
            rotated.append(torch.stack(heads)[None])
        return tuple(one if axis == 1 else one.transpose(1, 2) for one in rotated)

    def apply_one(self, states: Any, *args: Any, **kwargs: Any) -> Any:
        """The same where queries are rotated before there are keys (Gemma 4): methods choose without seeing them."""
        import torch

        attention, axis = self.current[0], kwargs.get("unsqueeze_dim", 1)
        heads = states if axis == 1 else states.transpose(1, 2)
        found = [reference.choose(settings, self.layer, None, None, None) for settings, reference in self.heads]
        kept = self.states.get(id(attention))
        first = heads if kept is None or kept[1] is not None else kept[0]
        self.states[id(attention)] = first, None if first is heads else heads, found
        if all(one is None for one in found):
            return self.plain_apply(states, *args, **kwargs)
        group, rotated = heads.shape[1] // len(self.heads[0][0]["ratios"]) or 1, []
        for head in range(heads.shape[1]):
            at, own = self.of_head(found, head // group)
            rotated.append(self.rotation.rows(heads[0, head], at[:, None] * torch.tensor(own)))
        result = torch.stack(rotated)[None]
        return result if axis == 1 else result.transpose(1, 2)

    def of_head(self, chosen: list[Any], head: int) -> tuple[Any, list[float]]:
        """The positions (l) and inverse frequencies of a KV head."""
        import torch

        at, own = torch.tensor(self.positions, dtype=torch.float32), self.rotation.frequencies.tolist()
        for (settings, reference), choice in zip(self.heads, chosen, strict=True):
            at, own = reference.rotation(settings, choice, head, at, own, self.theta)
        return at, own

    def loudness_of(self, chosen: list[Any], head: int) -> float:
        """The factor on a KV head's cos and sin, of methods that have one."""
        factors: list[float] = [
            reference.loudness(settings, choice, head)
            for (settings, reference), choice in zip(self.heads, chosen, strict=True)
            if hasattr(reference, "loudness")
        ]
        return math.prod(factors)

    def attend(self, eager: Any, module: Any, query: Any, key: Any, value: Any, *masks: Any, **kwargs: Any) -> Any:
        """In the place of the family's attention: scores pair by pair, one softmax."""
        import torch

        (settings, reference) = self.attention[0]
        mask = masks[0] if masks else kwargs.pop("attention_mask")  # Some families name it.
        if self.layer not in settings["layers"]:
            return eager(module, query, key, value, mask, **kwargs)
        queries, keys, chosen = self.states[id(module)]
        if hasattr(module, "qk_norm"):  # Llama 4 norms what is rotated, which is the norm of what is not.
            queries, keys = module.qk_norm(queries), module.qk_norm(keys)
        size, group, width = query.shape[2], query.shape[1] // key.shape[1], queries.shape[-1]
        scores = torch.full((1, query.shape[1], size, size), -math.inf)
        for head in range(query.shape[1]):
            own = tuple(self.of_head(chosen, head // group)[1])
            where, for_query, for_key = self.pairs(settings, reference, own)
            i, j = where
            q = self.rotation.rows(queries[0, head][i], for_query)
            k = self.rotation.rows(keys[0, head // group][j], for_key)
            found = (q * k).sum(-1)
            if hasattr(reference, "rotated_factor"):  # YaRN's, of what rotates alone.
                found = found * torch.tensor([reference.rotated_factor(settings, m) for m in self.positions])[i] ** 2
            if query.shape[-1] > width:  # The part of each head that does not rotate.
                found = found + (query[0, head, i, width:] * key[0, head // group, j, width:]).sum(-1)
            scores[0, head, i, j] = found
        scores = scores * kwargs["scaling"]
        scores = scores * torch.tensor([reference.temperature(settings, m) for m in self.positions]).view(1, 1, -1, 1)
        if id(module) in self.numbers:
            own_factors = torch.ones_like(scores[0])
            for head in range(query.shape[1]):
                for i, m in enumerate(self.positions):
                    for j, n in enumerate(self.positions[: i + 1]):
                        own_factors[head, i, j] = reference.factor(settings, self.numbers[id(module)], head, m, n)
            scores = torch.where(scores > 0, scores * own_factors, scores)
        if kwargs.get("softcap"):
            scores = kwargs["softcap"] * torch.tanh(scores / kwargs["softcap"])
            scores = scores.masked_fill(torch.ones(size, size).triu(1).bool(), -math.inf)
        if mask is not None:  # Doge adds what it thinks of each key.
            scores = scores + mask[..., :size]
        sinks = getattr(module, "sinks", None)
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
        weights = scores.softmax(-1)[..., :size]
        return (weights @ value.repeat_interleave(group, 1)).transpose(1, 2).contiguous(), weights

    def pairs(self, settings: dict[str, Any], reference: Any, own: tuple[float, ...]) -> Any:
        """Which pairs of rows and keys are read, and the angles of the query and of the key for each."""
        import torch

        if own not in self.angles:
            found = [
                (i, j, reference.relation(settings, m, n, own))
                for i, m in enumerate(self.positions)
                for j, n in enumerate(self.positions[: i + 1])
            ]
            read = [(i, j, angles) for i, j, angles in found if angles is not None]
            where = torch.tensor([[i for i, _, _ in read], [j for _, j, _ in read]])
            sides = (torch.tensor([angles[side] for _, _, angles in read], dtype=torch.float64) for side in (0, 1))
            self.angles[own] = where, *sides
        return self.angles[own]


def _applies(module: Any) -> bool:
    """Whether a module's own forward applies the rotary embedding."""
    code = getattr(getattr(type(module).forward, "__wrapped__", type(module).forward), "__code__", None)
    return code is not None and not {*APPLY}.isdisjoint(code.co_names)


def stock_folder(out: Path, config: dict[str, Any], place: str) -> Path:
    """A folder with the stock configuration and links to the weights."""
    folder = Path(place)
    (folder / "config.json").write_text(json.dumps(config))
    for path in out.iterdir():
        if path.suffix in (".safetensors", ".bin") or path.name.endswith(".index.json"):
            (folder / path.name).symlink_to(path.resolve())
    return folder


def learned_numbers(model: Any, info: dict[str, Any]) -> dict[str, Any]:
    """Weights of the methods' own, by the attention that holds them; where they are zeros, others are put there.

    Raises:
        ValueError: the weights in the files have other names than the model's.
    """
    import torch

    lost = [name for key in ("missing_keys", "unexpected_keys") for name in info[key] if name.endswith(LEARNED)]
    if lost:
        raise ValueError(f"{lost[0]} is not where the model looks for it.")
    found = {}
    for name, weight in model.named_parameters():
        if name.endswith(LEARNED):
            with torch.no_grad():
                weight.copy_(weight if weight.any() else torch.randn_like(weight))
            found[name.removesuffix(LEARNED)] = weight.detach().tolist()
    return found


def compare(task: dict[str, Any]) -> dict[str, float]:
    """Load a checkpoint and hold its logits against the references."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    out, positions = Path(task["folder"]), torch.tensor([task["positions"]])
    text = AutoConfig.from_pretrained(out, trust_remote_code=True).get_text_config()
    # The sdpa of transformers 4 leaves the cap on scores out (Gemma 2), and without padding Doge's looks ahead.
    is_inexact = getattr(text, "attn_logit_softcapping", None) or text.model_type == "doge"
    exact = {"attn_implementation": "eager"} if is_inexact else {}
    options = {"trust_remote_code": True, "dtype": torch.float32, "output_loading_info": True, **exact}
    loaded, info = AutoModelForCausalLM.from_pretrained(out, **options)
    loaded.eval()
    task["numbers"] = learned_numbers(loaded, info)
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
    return {
        "difference": (got - wanted).abs().max().item(),
        "scale": wanted.abs().max().item(),
        "change": (unchanged - wanted).abs().max().item(),
    }


def main() -> None:
    """Compare, and print what was found."""
    found = compare(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
