"""The expected outputs and logits: a family's unmodified model with the rotation and the attention of the references.

`isolated_process.py` runs it in a process without ctxext. Scores are computed pair by pair, without the code of the
checkpoint. `Samples` replaces the states of a model, so that the output of each attention depends on nothing before it.
"""

import contextlib
import functools
import inspect
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from .model_process import replace_functions
from .references import REFERENCES

APPLY = ("apply_rotary_pos_emb", "apply_rotary_emb")
SPREAD = 2.5  # Standard deviation of scores of sampled states.
ROOM = 4096  # Number of pairs that are rotated at once.
SCALAR = 1e-3  # Largest error of a rescaled state, relative to its length.


def rotate_complex(states: Any, _: Any, cos: Any, sin: Any) -> Any:
    """Rotate neighbouring dimensions (b, h, l, d) as one complex number each."""
    pairs = torch.view_as_complex(states.double().unflatten(-1, (-1, 2))) * torch.complex(cos.double(), sin.double())
    return (torch.view_as_real(pairs).flatten(-2).to(states.dtype),)


class CannotBeMovedError(ValueError):
    """A family changes queries and keys after the rotation, by more than a factor."""


class Rotation:
    """The rotary embedding of the unmodified model's full-attention layers, applied to given angles."""

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
        """Rotate the rows (l, d) of a head, or of several (h, l, d), by angles (l, pairs), cos and sin times a factor.

        Angles are float32, as in the family: at position 10^6 they differ by up to 0.03 from the exact product.
        """
        angles = angles.float()[:, self.columns][None].to(self.torch.float64)
        cos, sin = (f(angles).to(states.dtype) * self.scaling * factor for f in (self.torch.cos, self.torch.sin))
        heads = states[None] if states.ndim == 3 else states[None, None]
        return self.apply(heads, heads, cos, sin)[0].reshape(states.shape)


class Samples:
    """States of known spread that replace those of a model; they depend on the token and the number of the call.

    Random numbers replace the input of an attention, and its queries and keys before the rotation, scaled so that
    scores have a known standard deviation. Its output then depends on no other layer and reveals every wrong distance.
    The weights of its norms are drawn too, because initial ones (1) would hide changes after the rotation. A token has
    the same states in every form of a call: in one prompt, in a padded batch, and decoded.
    """

    def __init__(self, model: Any, num_tokens: int, spread: float = SPREAD) -> None:
        self.model, self.num_tokens, self.spread = model, num_tokens, spread
        self.attentions = attentions_of(model)
        self.current: Any = None
        self.tables = dict[int, Any]()
        self.begin(torch.arange(num_tokens)[None])

    def begin(self, tokens: Any) -> None:
        """Begin a forward of these tokens (b, l)."""
        self.tokens, self.count = tokens, 0

    def draw_like(self, tensor: Any, axis: int, spread: float = 1.0) -> Any:
        """Draw random numbers of the shape of a tensor with its tokens on an axis, different ones for each call."""
        self.count += 1
        if self.count not in self.tables:
            shape = tensor.movedim(axis, 1).shape[2:]
            self.tables[self.count] = draw(self.count, self.num_tokens, *shape)
        return (spread * self.tables[self.count][self.tokens]).movedim(1, axis).to(tensor.dtype)

    def states(self, tensors: Any, axis: int) -> list[Any]:
        """Draw samples that replace un-rotated queries and keys, with heads on an axis, 1 or 2."""
        width = tensors[0].shape[-1]
        scaling = getattr(self.current, "scaling", None) or width**-0.5
        spread = math.sqrt(self.spread / (scaling * math.sqrt(width)))
        return [self.draw_like(tensor, 3 - axis, spread) for tensor in tensors]

    def enter(self, attention: Any, args: Any, named: dict[str, Any]) -> Any:
        """Replace the input of an attention."""
        self.current = attention
        dtype = next((weight.dtype for weight in attention.parameters()), torch.float32)
        if "hidden_states" in named:
            return args, {**named, "hidden_states": self.draw_like(named["hidden_states"], 1).to(dtype)}
        return ((self.draw_like(args[0], 1).to(dtype), *args[1:]), named) if args else (args, named)

    @contextlib.contextmanager
    def replace_inputs(self) -> Iterator[None]:
        """Replace the inputs and the norms of all attentions; `states` replaces queries and keys."""
        originals = []
        with hook_attentions(self.model, enter=self.enter), skip_linear(siblings_of(self.model)), torch.no_grad():
            try:
                weights = [w for attention in self.attentions for w in attention.parameters() if w.ndim == 1]
                for number, weight in enumerate(weights, 1):
                    originals.append((weight, weight.clone()))
                    weight.copy_(1 + 0.3 * draw(-number, *weight.shape))
                yield
            finally:
                for weight, original in reversed(originals):  # Attentions may share a weight.
                    weight.copy_(original)


def draw(seed: int, *shape: int) -> Any:
    """Draw normal random numbers, float32."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed % 2**32), dtype=torch.float32)


ATTENTIONS = WeakKeyDictionary[Any, list[Any]]()
"""The attentions of each model that still exists: every call of a form needs them."""


class EnoughError(Exception):
    """Ends a forward after the last attention that is compared."""


def run_until_enough(run: Any) -> Any:
    """Return the result of a run, or None if it ended early."""
    try:
        return run()
    except EnoughError:
        return None


def run_and_record(
    model: Any, run: Any, instead: list[Any] | None = None, limit: int | None = None
) -> tuple[Any, list[Any]]:
    """Return the result of a run and the output of each attention layer, of the first `limit` if it is set.

    If `instead` is set, its tensors replace these outputs in the forward pass.
    """
    outputs, replacements = list[Any](), iter(instead or [])

    def leave(_: Any, __: Any, output: Any) -> Any:
        outputs.append(output[0] if isinstance(output, tuple) else output)
        if len(outputs) == limit:
            raise EnoughError
        if instead is None:
            return None
        return (next(replacements), *output[1:]) if isinstance(output, tuple) else next(replacements)

    with hook_attentions(model, leave=leave), torch.no_grad():
        return run_until_enough(run), outputs


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


class Attentions:
    """Attention functions of transformers, each wrapped for the duration of a forward."""

    def __init__(self, original: Any, wrap: Any) -> None:
        self.original, self.wrap = original, wrap

    def __getitem__(self, name: str) -> Any:
        return self.wrap(self.original[name])

    def get_interface(self, name: str, default: Any) -> Any:
        """Return the function of this name; the default is wrapped already."""
        function = self.original.get_interface(name, default)
        return function if function is default else self.wrap(function)


class Expected:
    """The logits that the methods' references imply.

    Attributes:
        rows: The numbers of the queries to compute, ascending; None for all.
        prompt: The number of tokens by which a prompt orders the heads; None for all.
    """

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
        self.rows: list[int] | None = None
        self.prompt: int | None = None
        self.states, self.angles = dict[int, States](), dict[Any, Any]()
        self.current: list[Any] = [None]
        self.layer: int | None = None
        self.samples: Samples | None = None
        self.takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self.use(task["steps"])
        names = dict(model.named_modules())
        self.numbers = {id(names[name]): numbers for name, numbers in task.get("numbers", {}).items()}

    def use(self, settings: list[dict[str, Any]]) -> None:
        """Set the settings of each method."""
        steps = [(entry, REFERENCES[entry["method"]]) for entry in settings]
        self.heads = [step for step in steps if hasattr(step[1], "rotation")]
        self.attention = [step for step in steps if hasattr(step[1], "relation")]
        self.angles.clear()

    def logits(self, input_ids: Any, positions: Any) -> Any:
        """Run the unmodified model with this rotation, and with this attention if a method needs it."""
        self.positions, space = positions[0].tolist(), vars(self.modeling)
        functions: dict[str, Any] = {self.applied: self.apply}
        if self.attention:
            wrap = functools.partial(functools.partial, self.attend)
            functions["eager_attention_forward"] = wrap(space.get("eager_attention_forward"))
            if "ALL_ATTENTION_FUNCTIONS" in space:
                functions["ALL_ATTENTION_FUNCTIONS"] = Attentions(space["ALL_ATTENTION_FUNCTIONS"], wrap)
        with hook_attentions(self.model, enter=self.enter), replace_functions(space, functions), torch.no_grad():
            given = {"position_ids": positions} if self.takes_positions else {}
            mask = torch.ones_like(input_ids)
            return self.model(input_ids, attention_mask=mask, use_cache=False, **given).logits

    def outputs(self, samples: Samples, positions: Any, limit: int | None = None) -> list[Any]:
        """Return the output of every attention, or of the first `limit`, for the sampled states of a text."""
        self.samples = samples
        try:
            with samples.replace_inputs():
                ids = torch.zeros(positions.shape, dtype=torch.long)
                return run_and_record(self.model, lambda: self.logits(ids, positions), limit=limit)[1]
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
        axis, seen = 2 if self.is_complex else kwargs.get("unsqueeze_dim", 1), (None, None, None)
        states = args[:count] if self.samples is None else self.samples.states(args[:count], axis)
        plain = [state if axis == 1 else state.transpose(1, 2) for state in states]
        if self.takes_key:
            self.states[id(attention)] = States()
            prompt = [state[:, :, : self.prompt] for state in plain]
            seen = (*prompt, getattr(attention, "scaling", None) or states[0].shape[-1] ** -0.5)
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
            angles = at[:, None] * torch.tensor(frequencies)
            heads.append(self.rotation.rotate_rows(states[0, head], angles))
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
        mask = masks[0] if masks else kwargs.pop("attention_mask")  # Some families pass it by name.
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
        rows, alike = list(range(size)) if self.rows is None else self.rows, dict[Any, list[int]]()
        for head in range(key.shape[1]):
            frequencies = tuple(torch.tensor(self.head_rotation(record.chosen, head)[1]).tolist())  # float32
            alike.setdefault(frequencies, []).append(head)
        scores = torch.full((1, query.shape[1], len(rows), size), -math.inf)
        for frequencies, heads in alike.items():
            members = torch.tensor(heads)
            grouped = (members[:, None] * group + torch.arange(group)).flatten()
            for i, j, for_query, for_key in self.pairs(settings, reference, frequencies):
                at = torch.tensor(rows)[i]
                products = self.products(queries[0, grouped][:, at], keys[0, members][:, j], for_query, for_key, group)
                if hasattr(reference, "rotated_factor"):  # YaRN's factor applies only to rotated dimensions.
                    factors = [reference.rotated_factor(settings, self.layer, self.positions[row]) for row in rows]
                    products[..., : 2 * len(self.rotation.frequencies)] *= torch.tensor(factors)[i, None] ** 2
                products = products.sum(-1)
                if query.shape[-1] > width:  # Dimensions that do not rotate.
                    rest = key[0, members][:, j, width:].repeat_interleave(group, 0)
                    products = products + (query[0, grouped][:, at, width:] * rest).sum(-1)
                scores[0, grouped[:, None], i, j] = products
        scores = scores * kwargs["scaling"]
        by_row = [reference.temperature(settings, self.layer, self.positions[row]) for row in rows]
        scores = scores * torch.tensor(by_row).view(1, 1, -1, 1)
        if (numbers := self.numbers.get(id(module))) is not None:
            learned = torch.ones_like(scores[0])
            for head in range(query.shape[1]):
                for i, row in enumerate(rows):
                    m, before = self.positions[row], self.positions[: row + 1]
                    factors = [reference.factor(settings, self.layer, numbers, head, m, n) for n in before]
                    learned[head, i, : row + 1] = torch.tensor(factors)
            scores = torch.where(scores > 0, scores * learned, scores)
        if kwargs.get("softcap"):
            scores = kwargs["softcap"] * torch.tanh(scores / kwargs["softcap"])
            later = torch.arange(size) > torch.tensor(rows)[:, None]
            scores = scores.masked_fill(later, -math.inf)
        if mask is not None:  # Doge adds a learned score per key.
            scores = scores + mask[:, :, rows, :size]
        sinks = getattr(module, "sinks", None)
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
        weights = scores.softmax(-1)[..., :size]
        output = value.new_zeros(1, size, query.shape[1], value.shape[-1])
        output[:, rows] = (weights @ value.repeat_interleave(group, 1)).transpose(1, 2)
        return output, weights

    def products(self, queries: Any, keys: Any, for_query: Any, for_key: Any, group: int) -> Any:
        """Return the products of pairs of queries (h, pairs, d) and keys (g, pairs, d), each rotated by its angles."""
        keys = self.rotation.rotate_rows(keys, for_key).repeat_interleave(group, 0)
        first, last = ((for_query == for_query[at]).all(-1) for at in (0, -1))
        if len(for_query) < ROOM or not bool((first | last).all()):
            return self.rotation.rotate_rows(queries, for_query) * keys
        # A query with many keys has only two rotations, one for far and one for near keys.
        ends = self.rotation.rotate_rows(queries[:, [0, -1]], for_query[[0, -1]])
        return torch.where(first[:, None], ends[:, :1], ends[:, 1:]) * keys

    def pairs(self, settings: dict[str, Any], reference: Any, frequencies: tuple[float, ...]) -> list[Any]:
        """Return the pairs that this layer reads: numbers of rows and of keys, and the angles of both (pairs, p).

        They are divided so that few rows, or one, are rotated at once.
        """
        relation = functools.partial(reference.relation, settings, self.layer)
        known, pieces = self.angles.setdefault((self.layer, frequencies), {}), list[list[Any]]()
        for number, row in enumerate(range(len(self.positions)) if self.rows is None else self.rows):
            if row not in known:
                known[row] = self.pairs_of(relation, row, frequencies)
            if not pieces or sum(len(piece[1]) for piece in pieces[-1]) + row >= ROOM:
                pieces.append([])
            pieces[-1].append((number, *known[row]))
        joined = []
        for piece in pieces:
            numbers, keys, queries_at, keys_at, factors = zip(*piece, strict=True)
            i = torch.tensor(numbers).repeat_interleave(torch.tensor([len(j) for j in keys]))
            sides = (zip(side, factors, strict=True) for side in (queries_at, keys_at))
            joined.append((i, torch.cat(keys), *(torch.cat([x * factor for x, factor in side]) for side in sides)))
        return joined

    def pairs_of(self, relation: Any, row: int, frequencies: tuple[float, ...]) -> tuple[Any, Any, Any, Any]:
        """Return the numbers of the keys that a row reads, and angles (n, p or 1) to multiply by factors (p).

        Most references give an angle as a position times a frequency. Then they are called with a frequency of 1, which
        is tried on some keys of the row.
        """
        m, keys = self.positions[row], self.positions[: row + 1]
        once = len(keys) > 16 and is_linear(relation, m, keys[:: len(keys) // 5], frequencies)
        entries = [(j, relation(m, n, (1.0,) if once else frequencies)) for j, n in enumerate(keys)]
        read = [(j, angles) for j, angles in entries if angles is not None]
        queries_at, keys_at = (
            torch.tensor([angles[side] for _, angles in read], dtype=torch.float64) for side in (0, 1)
        )
        factors = torch.tensor(frequencies if once else [1.0], dtype=torch.float64)
        return torch.tensor([j for j, _ in read]), queries_at, keys_at, factors


def is_linear(relation: Any, m: int, keys: list[int], frequencies: tuple[float, ...]) -> bool:
    """Return whether the angles of a query and some keys are positions times frequencies."""
    try:
        for n in keys:
            once, angles = relation(m, n, (1.0,)), relation(m, n, frequencies)
            if (once is None) != (angles is None):
                return False
            for (position,), side in zip(once or (), angles or (), strict=True):
                if [position * frequency for frequency in frequencies] != list(side):
                    return False
    except ValueError:  # The reference returned another number of angles.
        return False
    return True


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
    """Return the modules that apply the rotary embedding in their forward, which are searched once per model."""
    if model not in ATTENTIONS:
        named = [(module, getattr(code_of(module), "__code__", None)) for module in model.modules()]
        names = {*APPLY}
        ATTENTIONS[model] = [module for module, code in named if code and not names.isdisjoint(code.co_names)]
    return ATTENTIONS[model]


def siblings_of(model: Any) -> list[Any]:
    """Return the modules beside attentions in their decoder layers, such as MLPs."""
    attentions = {*attentions_of(model)}
    layers = (module for module in model.modules() if not attentions.isdisjoint(module.children()))
    return [child for layer in layers for child in layer.children() if attentions.isdisjoint(child.modules())]


@contextlib.contextmanager
def skip_linear(modules: list[Any]) -> Iterator[None]:
    """Let linear maps within modules return zeros: with sampled inputs, attentions do not depend on their results."""
    skipped = {part for module in modules for part in module.modules() if type(part) is torch.nn.Linear}
    skipped -= {*modules}  # A linear map directly in a layer may belong to its attention.
    for linear in skipped:
        vars(linear)["forward"] = functools.partial(_zeros_of, linear.out_features)
    try:
        yield
    finally:
        for linear in skipped:
            del vars(linear)["forward"]


def _zeros_of(width: int, states: Any) -> Any:
    """Return zeros with the shape of a linear map's result."""
    return states.new_zeros(*states.shape[:-1], width)


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
