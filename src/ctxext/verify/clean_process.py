"""Script of `clean_load.py` for a process without ctxext: run one of `CHECKS`, such as the comparison of logits.

Its argument is the path of a JSON file with the task. Its last line of output is a JSON object with the result.
The task of `compare` has `folder`, the checkpoint; `stock`, the config.json of the same model without code; `steps`,
the settings of each method; and `positions`. The expected logits are computed on the stock model of the family, one
head and one row at a time, without the code of the checkpoint.

If a method changes distances, logits reveal little: random weights attend almost evenly, trained ones to a few tokens,
and a rounding error in the first layer may grow a hundredfold through thirty layers. So the output of each attention is
compared separately, twice: on the states of the model, where the reference continues with the output of the
checkpoint, and on states of known spread (`Samples`), the same in both models.
"""

import contextlib
import functools
import inspect
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .checks_process import (
    LOADED,
    compare_buckets,
    compare_decoding,
    compare_slopes,
    compare_tables,
    differences,
    explain_decoding,
    load,
    load_stock,
    replace_functions,
)
from .references import REFERENCES

LEARNED = ".distance.weight"
APPLY = ("apply_rotary_pos_emb", "apply_rotary_emb")
SPREAD = 2.5  # Standard deviation of scores of sampled states.
SCALAR = 1e-3  # Largest error of a rescaled state, relative to its length.


def rotate_complex(states: Any, _: Any, cos: Any, sin: Any) -> Any:
    """Rotate neighbouring dimensions (b, h, l, d) as one complex number each."""
    pairs = torch.view_as_complex(states.double().unflatten(-1, (-1, 2))) * torch.complex(cos.double(), sin.double())
    return (torch.view_as_real(pairs).flatten(-2).to(states.dtype),)


class CannotBeMovedError(ValueError):
    """A family changes queries and keys after the rotation, by more than a factor."""


class Rotation:
    """The rotary embedding of the stock model's full-attention layers, applied to given angles."""

    def __init__(self, model: Any, apply: Any, full_types: list[str]) -> None:
        modules = [item for item in model.named_modules() if "otary" in type(item[1]).__name__]
        self.module = next(m for name, m in modules if not any(word in name for word in ("vision", "visual", "audio")))
        buffers = dict(self.module.named_buffers())
        self.layer_types = [layer_type for layer_type in full_types if f"{layer_type}_inv_freq" in buffers][:1]
        self.buffer = "_".join([*self.layer_types, "inv_freq"])
        self.frequencies, self.apply, self.torch = getattr(self.module, self.buffer).clone(), apply, torch
        # The pair of dimensions of each column of the family's cos and sin.
        known = torch.linspace(0.1, 1.4, len(self.frequencies))
        (cos, sin), used = self.table(known)
        if not torch.equal(used, known.to(used.dtype)):
            known = used  # The frequencies depend on the length of the input (LongRoPE).
        elif torch.equal(sin, self.table(self.frequencies)[0][1]):
            known = self.frequencies  # The frequencies are computed again on each call (Phi-MoE).
        self.scaling = float(torch.hypot(cos, sin).flatten()[0])
        self.columns = (sin.flatten()[:, None] / self.scaling - known.sin()).abs().argmin(-1)

    def table(self, angles: Any) -> Any:
        """Compute the family's cos and sin at position 1; return also the inverse frequencies that it used."""
        setattr(self.module, self.buffer, angles.to(self.frequencies.dtype).clone())  # Families change it in place.
        try:
            position = self.torch.ones(1, 1)
            shape = (3, 1, 1) if hasattr(self.module, "mrope_section") else (1, 1)
            table = self.module(position, position.expand(shape), *self.layer_types)
            # Most families return cos and sin, Llama 4 one complex tensor.
            parts = table if isinstance(table, tuple) else (table.real, table.imag)
            return parts, getattr(self.module, self.buffer)
        finally:
            setattr(self.module, self.buffer, self.frequencies.clone())

    def rotate_rows(self, states: Any, angles: Any, factor: float = 1.0) -> Any:
        """Rotate the rows (l, d) of one head by their angles (l, pairs), cos and sin times a factor.

        Angles are float32, as in the family: at position 10^6 they differ by up to 0.03 from the exact product.
        """
        angles = angles.float()[:, self.columns][None].to(self.torch.float64)
        cos, sin = (f(angles).to(states.dtype) * self.scaling * factor for f in (self.torch.cos, self.torch.sin))
        return self.apply(states[None, None], states[None, None], cos, sin)[0][0, 0]


class Samples:
    """States of known spread that replace those of a model; they depend only on the order of calls.

    Random numbers replace the input of an attention, and its queries and keys before the rotation, scaled so that
    scores have the standard deviation SPREAD. Its output then depends on no other layer and reveals every wrong
    distance. The weights of its norms are drawn too, because initial ones (1) would hide changes after the rotation.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.count, self.current = model, 0, None
        self.attentions = attentions_of(model)

    def draw_like(self, tensor: Any, spread: float = 1.0) -> Any:
        """Draw random numbers of the shape of a tensor, different ones for each call."""
        self.count += 1
        generator = torch.Generator().manual_seed(self.count)
        return spread * torch.randn(tensor.shape, generator=generator, dtype=torch.float32).to(tensor.dtype)

    def states(self, tensors: Any) -> list[Any]:
        """Draw samples that replace un-rotated queries and keys."""
        width = tensors[0].shape[-1]
        scaling = getattr(self.current, "scaling", None) or width**-0.5
        return [self.draw_like(tensor, math.sqrt(SPREAD / (scaling * math.sqrt(width)))) for tensor in tensors]

    def enter(self, attention: Any, args: Any, named: dict[str, Any]) -> Any:
        """Replace the input of an attention."""
        self.current = attention
        if "hidden_states" in named:
            return args, {**named, "hidden_states": self.draw_like(named["hidden_states"])}
        return ((self.draw_like(args[0]), *args[1:]), named) if args else (args, named)

    def outputs(self, run: Any) -> list[Any]:
        """Return the outputs of all attentions for sampled states while a model runs."""
        originals = []
        with hook_attentions(self.model, enter=self.enter), torch.no_grad():
            try:
                for weight in (w for attention in self.attentions for w in attention.parameters() if w.ndim == 1):
                    originals.append((weight, weight.clone()))
                    weight.copy_(1 + self.draw_like(weight, 0.3))
                return run_and_record(self.model, run)[1]
            finally:
                for weight, original in reversed(originals):  # Attentions may share one.
                    weight.copy_(original)


def run_and_record(model: Any, run: Any, instead: list[Any] | None = None) -> tuple[Any, list[Any]]:
    """Return the result of a run and the outputs of all attentions, which `instead` replaces for later layers."""
    outputs, replacements = list[Any](), iter(instead or [])

    def leave(_: Any, __: Any, output: Any) -> Any:
        outputs.append(output[0] if isinstance(output, tuple) else output)
        if instead is None:
            return None
        return (next(replacements), *output[1:]) if isinstance(output, tuple) else next(replacements)

    with hook_attentions(model, leave=leave), torch.no_grad():
        return run(), outputs


def largest_difference(actual: list[Any], expected: list[Any]) -> float:
    """Return the largest difference of an attention's output from the expected one, relative to its largest value.

    Raises:
        ValueError: there is nothing to compare.
    """
    differences = [(a - b).abs().max() / b.abs().max().clamp(min=1e-30) for a, b in zip(actual, expected, strict=True)]
    if not differences:
        raise ValueError(f"no attention was observed: no module calls {' or '.join(APPLY)} in its forward")
    return torch.stack(differences).max().item()  # Python's max would lose NaN.


@dataclass
class States:
    """The methods' choices for the heads of one attention, and its plain and rotated queries and keys (1, h, l, d).

    `key` is the tensor that its scores use, which some layers share (Gemma 4).
    """

    chosen: list[Any] = field(default_factory=list)
    plain: list[Any] = field(default_factory=list)
    rotated: list[Any] = field(default_factory=list)
    key: Any = None


class Expected:
    """The logits that the methods' references imply."""

    def __init__(self, model: Any, task: dict[str, Any]) -> None:
        modeling: Any = sys.modules[type(model).__module__]
        self.model, self.modeling = model, modeling
        self.applied = next(name for name in APPLY if hasattr(modeling, name))
        self.plain_apply = getattr(modeling, self.applied)
        self.is_complex = self.applied == "apply_rotary_emb"
        self.takes_key = list(inspect.signature(self.plain_apply).parameters)[1] != "cos"
        rotate_single = lambda q, k, cos, sin: (self.plain_apply(q, cos, sin),)  # noqa: E731
        rotate = rotate_complex if self.is_complex else self.plain_apply if self.takes_key else rotate_single
        self.rotation = Rotation(model, rotate, task["full_types"])
        self.theta, self.positions = float(task["theta"]), list[int]()
        self.states, self.angles = dict[int, States](), dict[Any, Any]()
        self.current: list[Any] = [None]
        self.layer: int | None = None
        self.samples: Samples | None = None
        steps = [(settings, REFERENCES[settings["method"]]) for settings in task["steps"]]
        self.heads = [step for step in steps if hasattr(step[1], "rotation")]
        self.attention = [step for step in steps if hasattr(step[1], "relation")]
        names = dict(model.named_modules())
        self.numbers = {id(names[name]): numbers for name, numbers in task.get("numbers", {}).items()}

    def logits(self, input_ids: Any, positions: Any) -> Any:
        """Run the stock model with this rotation, and with this attention if a method needs it."""
        self.positions, space = positions[0].tolist(), vars(self.modeling)
        functions: dict[str, Any] = {self.applied: self.apply}
        if self.attention:
            functions["eager_attention_forward"] = functools.partial(self.attend, space.get("eager_attention_forward"))
        with hook_attentions(self.model, enter=self.enter), replace_functions(space, functions), torch.no_grad():
            mask = torch.ones_like(input_ids)
            return self.model(input_ids, attention_mask=mask, position_ids=positions, use_cache=False).logits

    def outputs(self, input_ids: Any, positions: Any) -> list[Any]:
        """Return the output of every attention for sampled states."""
        self.samples = Samples(self.model)
        try:
            return self.samples.outputs(lambda: self.logits(input_ids, positions))
        finally:
            self.samples = None

    def enter(self, attention: Any, _: Any, named: dict[str, Any]) -> None:
        """Record the attention that runs and its layer: some families run one in several layers (Zamba 2)."""
        self.current[0] = attention
        self.layer = named.get("layer_idx", getattr(attention, "layer_idx", getattr(attention, "block_idx", None)))
        self.states[id(attention)] = States()

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        """Replace the family's function: record the un-rotated states, and return rotated states.

        Some families rotate queries before the keys exist (Gemma 4); then methods choose without queries and keys.
        """
        attention, count = self.current[0], 2 if self.takes_key else 1
        states = args[:count] if self.samples is None else self.samples.states(args[:count])
        axis, seen = 2 if self.is_complex else kwargs.get("unsqueeze_dim", 1), (None, None, None)
        plain = [state if axis == 1 else state.transpose(1, 2) for state in states]
        if self.takes_key:
            self.states[id(attention)] = States()
            seen = (*plain, getattr(attention, "scaling", None) or states[0].shape[-1] ** -0.5)
        record = self.states[id(attention)]
        record.chosen = [reference.choose(settings, self.layer, *seen) for settings, reference in self.heads]
        if all(choice is None for choice in record.chosen):
            output = self.plain_apply(*states, *args[count:], **kwargs)
            outputs = output if self.takes_key else [output]
            rotated = [state if axis == 1 else state.transpose(1, 2) for state in outputs]
        else:
            num_keys = plain[1].shape[1] if self.takes_key else len(self.heads[0][0]["ratios"])
            rotated = [self.rotate_heads(state, record.chosen, state.shape[1] // num_keys or 1) for state in plain]
        record.plain += plain
        record.rotated += rotated
        result = tuple(state if axis == 1 else state.transpose(1, 2) for state in rotated)
        return result if self.takes_key else result[0]

    def rotate_heads(self, states: Any, chosen: list[Any], group: int) -> Any:
        """Rotate states (1, h, l, d); each `group` of heads shares its rotation."""
        heads = []
        for head in range(states.shape[1]):
            at, frequencies = self.head_rotation(chosen, head // group)
            factors: list[float] = [
                reference.head_factor(settings, choice, head // group)
                for (settings, reference), choice in zip(self.heads, chosen, strict=True)
                if hasattr(reference, "head_factor")
            ]
            angles = at[:, None] * torch.tensor(frequencies)
            heads.append(self.rotation.rotate_rows(states[0, head], angles, math.prod(factors)))
        return torch.stack(heads)[None]

    def head_rotation(self, chosen: list[Any], head: int) -> tuple[Any, list[float]]:
        """Return the positions (l) and inverse frequencies of a KV head."""
        at, frequencies = torch.tensor(self.positions, dtype=torch.float32), self.rotation.frequencies.tolist()
        for (settings, reference), choice in zip(self.heads, chosen, strict=True):
            at, frequencies = reference.rotation(settings, choice, head, at, frequencies, self.theta)
        return at, frequencies

    def attend(self, eager: Any, module: Any, query: Any, key: Any, value: Any, *masks: Any, **kwargs: Any) -> Any:
        """Replace the family's attention: compute scores pair by pair, and one softmax."""
        (settings, reference) = self.attention[0]
        mask = masks[0] if masks else kwargs.pop("attention_mask")  # Some families name it.
        if self.layer not in settings["layers"]:
            return eager(module, query, key, value, mask, **kwargs)
        record = self.states[id(module)]
        if len(record.plain) == 1:
            source = next(states for states in self.states.values() if states.key is key)
            record.plain, record.rotated = [*record.plain, source.plain[1]], [*record.rotated, source.rotated[1]]
        record.key = key
        size, group, width = query.shape[2], query.shape[1] // key.shape[1], record.plain[0].shape[-1]
        queries, keys = (
            plain * factor_between(rotated, final[..., :width])
            for plain, rotated, final in zip(record.plain, record.rotated, (query, key), strict=True)
        )
        scores = torch.full((1, query.shape[1], size, size), -math.inf)
        for head in range(query.shape[1]):
            frequencies = tuple(torch.tensor(self.head_rotation(record.chosen, head // group)[1]).tolist())  # float32
            (i, j), for_query, for_key = self.pairs(settings, reference, frequencies)
            q = self.rotation.rotate_rows(queries[0, head][i], for_query)
            k = self.rotation.rotate_rows(keys[0, head // group][j], for_key)
            products, rotates = q * k, 2 * len(self.rotation.frequencies)
            if hasattr(reference, "rotated_factor"):  # YaRN's factor applies only to rotated dimensions.
                factors = [reference.rotated_factor(settings, self.layer, m) for m in self.positions]
                by_pair = torch.tensor(factors)[i, None] ** 2
                products = torch.cat([products[:, :rotates] * by_pair, products[:, rotates:]], -1)
            products = products.sum(-1)
            if query.shape[-1] > width:  # Dimensions that do not rotate.
                products = products + (query[0, head, i, width:] * key[0, head // group, j, width:]).sum(-1)
            scores[0, head, i, j] = products
        scores = scores * kwargs["scaling"]
        by_row = [reference.temperature(settings, self.layer, m) for m in self.positions]
        scores = scores * torch.tensor(by_row).view(1, 1, -1, 1)
        if (numbers := self.numbers.get(id(module))) is not None:
            learned = torch.ones_like(scores[0])
            for head in range(query.shape[1]):
                for i, m in enumerate(self.positions):
                    for j, n in enumerate(self.positions[: i + 1]):
                        learned[head, i, j] = reference.factor(settings, self.layer, numbers, head, m, n)
            scores = torch.where(scores > 0, scores * learned, scores)
        if kwargs.get("softcap"):
            scores = kwargs["softcap"] * torch.tanh(scores / kwargs["softcap"])
            scores = scores.masked_fill(torch.ones(size, size).triu(1).bool(), -math.inf)
        if mask is not None:  # Doge adds a learned score per key.
            scores = scores + mask[..., :size]
        sinks = getattr(module, "sinks", None)
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
        weights = scores.softmax(-1)[..., :size]
        return (weights @ value.repeat_interleave(group, 1)).transpose(1, 2).contiguous(), weights

    def pairs(self, settings: dict[str, Any], reference: Any, frequencies: tuple[float, ...]) -> Any:
        """Return the pairs of query and key positions that this layer reads, with the angles of both."""
        if (self.layer, frequencies) not in self.angles:
            entries = [
                (i, j, reference.relation(settings, self.layer, m, n, frequencies))
                for i, m in enumerate(self.positions)
                for j, n in enumerate(self.positions[: i + 1])
            ]
            read = [(i, j, angles) for i, j, angles in entries if angles is not None]
            indices = torch.tensor([[i for i, _, _ in read], [j for _, j, _ in read]])
            sides = (torch.tensor([angles[side] for _, _, angles in read], dtype=torch.float64) for side in (0, 1))
            self.angles[self.layer, frequencies] = indices, *sides
        return self.angles[self.layer, frequencies]


def factor_between(before: Any, after: Any) -> Any:
    """Return the factor (1, h, l, 1) by which a family multiplies each state (1, h, l, d) after rotating it.

    Examples: norms without weights (Llama 4, nanochat) and temperatures per query position (Ministral 3).

    Raises:
        CannotBeMovedError: the change is not a factor, so it is unknown for a state with another rotation.
    """
    factor = (before * after).sum(-1, keepdim=True) / (before * before).sum(-1, keepdim=True).clamp(min=1e-30)
    if ((after - before * factor).norm(dim=-1) > SCALAR * after.norm(dim=-1)).any():
        raise CannotBeMovedError("it changes queries and keys after the rotation, by more than a factor")
    return factor


def code_of(module: Any) -> Any:
    """Return the function behind a module's forward."""
    return inspect.unwrap(type(module).forward)


def attentions_of(model: Any) -> list[Any]:
    """Return the modules that apply the rotary embedding in their forward."""
    named = [(module, getattr(code_of(module), "__code__", None)) for module in model.modules()]
    return [module for module, code in named if code is not None and not {*APPLY}.isdisjoint(code.co_names)]


@contextlib.contextmanager
def hook_attentions(model: Any, *, enter: Any = None, leave: Any = None) -> Iterator[None]:
    """Call `enter` before each attention of a model, or `leave` after it."""
    hooks = []
    for attention in attentions_of(model):
        if enter is not None:
            hooks.append(attention.register_forward_pre_hook(enter, with_kwargs=True))
        if leave is not None:
            hooks.append(attention.register_forward_hook(leave))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def learned_numbers(model: Any, info: dict[str, Any]) -> dict[str, Any]:
    """Return the weights of methods by the name of the attention, with zeros replaced by random numbers.

    Raises:
        ValueError: the weights in the files have other names than the model's.
    """
    lost = [name for key in ("missing_keys", "unexpected_keys") for name in info[key] if name.endswith(LEARNED)]
    if lost:
        raise ValueError(f"{lost[0]} has another name in the model.")
    numbers = {}
    for name, weight in model.named_parameters():
        if name.endswith(LEARNED):
            with torch.no_grad():
                weight.copy_(weight if weight.any() else torch.randn_like(weight))
            numbers[name.removesuffix(LEARNED)] = weight.detach().tolist()
    return numbers


def compare(task: dict[str, Any]) -> dict[str, Any]:
    """Load a checkpoint and compare its logits with the references; `refused` is the reason if that is impossible."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    out, positions = Path(task["folder"]), torch.tensor([task["positions"]])
    text = AutoConfig.from_pretrained(out, trust_remote_code=True).get_text_config()
    # The sdpa of transformers 4 omits the cap on scores (Gemma 2), and Doge's without padding reads later tokens.
    is_inexact = getattr(text, "attn_logit_softcapping", None) or text.model_type == "doge"
    exact = {"attn_implementation": "eager"} if is_inexact else {}
    options = {"trust_remote_code": True, "dtype": torch.float32, "output_loading_info": True, **exact}
    loaded, info = AutoModelForCausalLM.from_pretrained(out, **options)
    loaded.eval()
    task["numbers"] = learned_numbers(loaded, info)
    input_ids = torch.randint(0, loaded.config.get_text_config().vocab_size, positions.shape)
    mask = torch.ones_like(input_ids)

    def run(model: Any) -> Any:
        return model(input_ids, attention_mask=mask, position_ids=positions, use_cache=False).logits

    logits, outputs = run_and_record(loaded, functools.partial(run, loaded))
    moves = any(hasattr(REFERENCES[step["method"]], "relation") for step in task["steps"])
    sampled = sampled_outputs(loaded, functools.partial(run, loaded)) if moves else []
    if task["decoding"] != task["steps"]:
        del loaded
        config = AutoConfig.from_pretrained(out, trust_remote_code=True)
        config.get_text_config().ctxext_code["steps"] = task["decoding"]
        loaded, info = AutoModelForCausalLM.from_pretrained(out, config=config, **options)
        learned_numbers(loaded.eval(), info)
    decoding = compare_decoding(loaded, task["decoding"])
    del loaded
    print(LOADED, flush=True)  # noqa: T201
    stock = load_stock(out, task["stock"], attn_implementation="eager")
    unchanged, _ = run_and_record(stock, functools.partial(run, stock))
    expected = Expected(stock, task)
    attention = 0.0
    try:
        expected_logits, expected_outputs = run_and_record(
            stock, lambda: expected.logits(input_ids, positions), outputs if moves else None
        )
        if moves:
            expected_outputs = [*expected_outputs, *expected.outputs(input_ids, positions)]
            attention = largest_difference([*outputs, *sampled], expected_outputs)
    except CannotBeMovedError as error:
        return {"refused": str(error)}
    return {
        **differences(logits, unchanged, expected_logits),
        "attention": attention,
        "decoding": explain_decoding(decoding, stock),
    }


def sampled_outputs(loaded: Any, run: Any) -> list[Any]:
    """Return the output of every attention of a loaded checkpoint for sampled states."""
    samples = Samples(loaded)
    spaces = {id(space): space for space in (code_of(module).__globals__ for module in samples.attentions)}

    def use_samples(rotate: Any) -> Any:
        def apply(*args: Any, **kwargs: Any) -> Any:
            count = 2 if torch.is_tensor(args[1]) and args[1].ndim == 4 else 1  # Keys, or already cos.
            return rotate(*samples.states(args[:count]), *args[count:], **kwargs)

        return apply

    with contextlib.ExitStack() as stack:
        for space in spaces.values():
            functions = {name: use_samples(space[name]) for name in APPLY if name in space}
            stack.enter_context(replace_functions(space, functions))
        return samples.outputs(run)


CHECKS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "load": load,
    "tables": compare_tables,
    "buckets": compare_buckets,
    "slopes": compare_slopes,
    "logits": compare,
}


if __name__.endswith("__main__"):
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    sys.stdout.write(json.dumps(CHECKS[task["check"]](task)) + "\n")
