"""The base class of methods with five hooks, the arguments of a hook, and the state that a method keeps per sequence.

This file is copied into checkpoints, with one file for each of their methods. Methods wrap each other in the order of
the recipe, so any number of them can be combined. config.json contains their settings, one entry of `steps` each.
Shapes: b batch, h query heads, g KV heads, l length, d head, p rotated pairs, c columns of cos and sin.
"""

import functools
import math
import sys
import threading
from collections import namedtuple

import torch

from .private_copy import cache_in, tokens_in

# A rotation of tensors from the positions `since` to the positions `to`, (b or 1, l) or (b or 1, l, c). `since` is None
# for tensors that are not rotated yet. The frequencies at `to` are multiplied by `slowed` (b or 1, l or 1, c), float64;
# None means 1.
Turn = namedtuple("Turn", ["to", "since", "slowed"], defaults=[None])
# The inputs of cos and sin besides positions: the inverse frequencies (p) in use, the index of the frequency of each
# column (c), the factor on cos and sin, and their type.
Frame = namedtuple("Frame", ["inverse", "columns", "scaling", "dtype"])
# The result of a rotary embedding, instead of cos: the family's cos; the methods' tables for queries and for keys, for
# every set of positions; the positions (b or 1, l) of the rotation; and a dict for one forward, with a `Given` under
# "given". It is a tuple so that device maps move all of its tensors.
Tables = namedtuple("Tables", ["cos", "sets", "positions", "frame", "memory"])
# Arguments of the model's forward: the mask of tokens (b, n) or None; the number of tokens in its cache, as int or
# tensor; and the query positions (b, l) by that mask if none were passed and it hides tokens. A mask of pairs
# (b, h, l, n) is not stored; its positions may be UNCLEAR.
Given = namedtuple("Given", ["mask", "seen", "rows"])


UNCLEAR = "unclear"  # Stored instead of positions that a mask does not show.


def text_positions(mask, seen, length):
    """Return query positions (b, l) within their texts by a mask of pairs (b, h, l, n), or UNCLEAR.

    A query counts from the first key that it sees. All keys that it sees must count from the same key. A token is
    padding if it sees no key, or if it sees all keys and no other query sees it.
    """
    if torch.compiler.is_compiling():
        return UNCLEAR
    seen = int(seen)
    if mask.shape[2] not in (1, length) or mask.shape[3] < seen + length:
        return UNCLEAR
    shown = mask if mask.dtype == torch.bool else mask > -1e4
    if not bool((shown == shown[:, :1]).all()):
        return UNCLEAR
    shown = shown[:, 0].expand(-1, length, -1)
    columns = torch.arange(shown.shape[2], device=mask.device)
    own, first = columns[seen : seen + length], shown.long().argmax(-1)
    is_row = (shown & (columns <= own[:, None])).any(-1) & ~(shown & (columns > own[:, None])).any(-1)
    among = shown[:, :, seen : seen + length] & is_row[..., None]  # The keys of this call that queries see.
    strays = among & ((first[:, :, None] != first[:, None]) | ~is_row[:, None])
    is_odd = ~is_row & shown.any(-1) & ~(shown.all(-1) & is_row.any(-1, keepdim=True))
    sees_itself = shown[:, torch.arange(length, device=mask.device), own]
    if bool(strays.any() | is_odd.any() | (is_row & ~sees_itself).any()):
        return UNCLEAR
    return torch.where(is_row, own - first, 0)


def refuse_mask(what):
    """Refuse a mask of pairs that does not show where texts begin.

    Raises:
        ValueError: always.
    """
    raise ValueError(f"{what}: a 4D mask without position_ids does not show where each text begins; pass position_ids.")


class Method:
    """Base class of methods. Each hook calls `inner` by default."""

    name = ""  # As in the entries of `steps`.
    counts_in_texts = False  # Whether it must rotate by positions within each text, without padding.

    def __init__(self, settings):
        self.settings = settings

    def acts_on(self, layer):
        """Return whether a layer takes part."""
        return layer in self.settings["layers"]

    def equip(self, attention):
        """Add the method's weights to an attention in a layer that takes part, while the model is built."""

    def positions(self, inner, sets):
        """Return pairs of (query positions, key positions), each (b or 1, l), to which this model rotates."""
        return inner(sets)

    def tables(self, inner, frame, turn):
        """Return the tables that rotate tensors by a `Turn`: innermost, cos and sin, each (b or 1, l, c)."""
        return inner(frame, turn)

    def rotate(self, inner, tensors, tables, axis, call):
        """Rotate un-rotated queries (b, h, l, d) and keys (b, g, l, d), or one of them; `axis` counts their heads.

        Tables are shared by all layers, so this is called in layers that take no part too.
        """
        return inner(tensors, tables, axis, call)

    def merge(self, inner, queries, keys):
        """Return one query and one key for the cache, from those of every set of positions."""
        return inner(queries, keys)

    def attend(self, inner, call, query, key, value, mask, **kwargs):
        """Return the output (b, l, h, d) for rotated states and the weights or None, in layers that take part."""
        return inner(query, key, value, mask, **kwargs)


HOOKS = {name: getattr(Method, name) for name in ("positions", "tables", "rotate", "merge", "attend")}


def chain_hooks(methods, hook, innermost):
    """Wrap the innermost function in the hook of each method that overrides it, in their order."""
    for method in methods:
        if getattr(type(method), hook) is not HOOKS[hook]:
            innermost = functools.partial(getattr(method, hook), innermost)
    return innermost


# The current forwards of this thread: `call`, a layer's `Call`, and `given`, a model's `Given`. They cannot be
# attributes of modules, because threads and replicas of `torch.nn.DataParallel` share modules.
CURRENT = threading.local()


class Part:
    """Methods of a decoder layer of a private copy, its rotation, and the name of its attention.

    It contains no module, because replicas of a layer share it.
    """

    def __init__(self, methods, name, attention, original, rotary=None, layer_class=None):
        self.methods, self.name, self.original, self.layer_class = methods, name, original, layer_class
        self.module = type(attention).__module__  # The private copy.
        self.layer = getattr(attention, "layer_idx", getattr(attention, "block_idx", None))
        self.scaling = getattr(attention, "scaling", None)
        self.rotary = rotary  # The name of the rotary embedding if it belongs to the attention, or None.
        self.is_left_to_engine = False  # Whether the attention function calls the methods, per sequence.

    def __getstate__(self):
        return {**vars(self), "original": None}  # Pickle finds functions by name, and this name is now `apply`.

    def __setstate__(self, state):
        module = sys.modules[state["module"]]
        module.ctxext_prepare(state["layer_class"])  # No model was built in this process.
        vars(self).update(state, original=module.ctxext_rotation)

    def attends(self, layer):
        """Return the methods that replace the attention of this layer."""
        return [m for m in self.methods if type(m).attend is not Method.attend and m.acts_on(layer)]


def layer_of(part, inputs):
    """Return the index of a layer. Some families run one layer at several depths and pass these arguments."""
    return inputs.get("layer_idx", part.layer) + inputs.get("cycle_offset", 0)


class Row:
    """Argument passed instead of cos if a single query is decoded and only its tables depend on the layer.

    KV heads are on the axis of positions, so that cos and sin are (1, g, c). It avoids a `Call` and its hooks, which
    would take several percent of a small model's decode step.
    """

    def __init__(self, rotation, waves):
        self.rotation, self.waves = rotation, waves

    def rotate(self, tensors, call=None):
        """Rotate queries (b, h, 1, d) or (b, 1, h, d) and keys, or one of them."""
        heads = self.waves[0].shape[1]
        rows = [x if x.shape[1] == heads else x.view(x.shape[0], heads, -1, x.shape[3]) for x in tensors]
        rotated = self.rotation(rows, self.waves, 2, call)
        return [y if x is row else y.view(x.shape) for x, row, y in zip(tensors, rows, rotated, strict=True)]

    def to(self, *args, **kwargs):
        """Return self: see `Call`."""
        return self


class Call:
    """Call of one layer in one forward, passed instead of cos: the inputs of its methods, and their memory.

    - `positions`: positions of the queries (b or 1, l) within their text
    - `rotated`: positions of their rotation. They differ if a batch was padded and no positions were passed.
    - `seen`: number of tokens in the cache before this forward, or None
    - `mask`: the layer's, in any backend's form; `cache`: its cache or None
    - `memory`: dict that all layers of this forward share; `layer_memory`: dict of this layer only
    - `kv_heads`: number of KV heads here; `first_head`: index of the first, above 0 on later tensor-parallel ranks
    """

    def __init__(self, part, attention, tables, inputs):
        self.layer, self.part, self.attention = layer_of(part, inputs), part, attention
        self.rotary = getattr(attention, part.rotary) if part.rotary else None
        self.methods, self.original = part.methods, part.original
        self.layer_memory, self.has_unclear_mask = {}, False
        if tables is not None:
            self.see_tables(tables)
        self.cache = cache_in(inputs)
        self.mask, self.scaling = inputs.get("attention_mask"), part.scaling
        self.is_left_to_engine = part.is_left_to_engine
        self.is_paged = "read_index" in inputs  # Continuous batching, which any backend may run.
        self.kv_heads, self.first_head = None, 0

    def see_tables(self, tables):
        """Set the tables of the rotary embedding for this forward."""
        self.tables, self.rotated, self.memory = tables, tables.positions, tables.memory
        given = tables.memory.get("given")
        self.seen = None if given is None else given.seen
        rows = None if given is None else given.rows
        self.has_unclear_mask = rows is UNCLEAR
        self.positions = self.rotated if rows is None or self.has_unclear_mask else rows

    def to(self, *args, **kwargs):
        """Return self; families with complex rotary tensors call `.to(device)`."""
        return self

    @property
    def backend(self):
        """Name of this layer's attention implementation."""
        return getattr(getattr(self.attention, "config", None), "_attn_implementation", None) or "sdpa"

    def needs_sequences(self, what):
        """Refuse engines that concatenate sequences (vLLM, continuous batching), for which `what` would be wrong.

        Raises:
            ValueError: the attention belongs to such an engine.
        """
        if self.backend == "vllm" or "paged" in self.backend or self.is_paged:
            name = "paged" if self.is_paged else self.backend
            raise ValueError(f'{what} needs whole sequences; "{name}" attention concatenates them.')

    def needs_causality(self, what, is_causal=None):
        """Refuse bidirectional attention, and masks that do not show where texts begin: `what` would be wrong.

        Raises:
            ValueError: queries see later keys, or their positions are not known.
        """
        config = getattr(self.attention, "config", None)
        if False in (is_causal, getattr(self.attention, "is_causal", True), getattr(config, "is_causal", True)):
            raise ValueError(f"{what} requires causal attention, but is_causal is False.")
        if self.has_unclear_mask:
            refuse_mask(what)

    @property
    def rotates_heads_alike(self):
        """Whether all heads rotate by the same tables, because no method overrides `rotate`."""
        return all(type(method).rotate is Method.rotate for method in self.methods)

    @property
    def is_plain(self):
        """Whether no method takes part in this layer."""
        return not any(method.acts_on(self.layer) for method in self.methods)

    def see_heads(self, count, total):
        """Set the KV heads that this process has: all, or under tensor parallelism the share of its rank."""
        ranks, rest = divmod(total, count)
        if rest or (ranks > 1 and not torch.distributed.is_initialized()):
            raise ValueError(f"This checkpoint has values for {total} KV heads, but layer {self.layer} has {count}.")
        self.kv_heads = count
        self.first_head = count * (torch.distributed.get_rank() % ranks) if ranks > 1 else 0

    def rotate(self, tensors, tables, axis):
        """Rotate tensors with heads on `axis` by all methods. The family's rotation is innermost."""
        return chain_hooks(self.methods, "rotate", self.rotate_as_family)(tensors, tables, axis, self)

    def rotate_as_family(self, tensors, tables, axis, call):
        """Rotate two tensors, or one, as the family does."""
        apply, takes_key = self.original
        if not takes_key:
            return [apply(tensor, *tables, unsqueeze_dim=axis) for tensor in tensors]
        pair = tensors if len(tensors) == 2 else (tensors[0], tensors[0].narrow(axis, 0, 1))
        return list(apply(*pair, *tables, unsqueeze_dim=axis))[: len(tensors)]

    def turn(self, tensor, to, since, slowed=None):
        """Rotate a tensor (b, heads, l, d) that is rotated to the positions `since` to the positions `to`.

        Positions are (b or 1, l), or (b or 1, l, p) with one for every pair, and need not be whole numbers. `slowed`,
        (b or 1, l or 1, p) in float64 or None, multiplies the frequencies at `to`. The model's factor on cos and sin is
        not applied again.
        """
        frame = self.tables.frame._replace(scaling=1.0, dtype=torch.float32)
        if slowed is not None:  # Some families pad with frequencies of 0, which schedules lack (Gemma 4).
            slowed = torch.nn.functional.pad(slowed, (0, len(frame.inverse) - slowed.shape[-1]), value=1.0)
        to, since, slowed = (x if x is None or x.ndim == 2 else x[..., frame.columns] for x in (to, since, slowed))
        tables = chain_hooks(self.methods, "tables", compute_tables)(frame, Turn(to, since, slowed))
        width = 2 * len(frame.inverse)
        (rotated,) = self.rotate([tensor[..., :width].float()], tables, 1)
        rotated = rotated.to(tensor.dtype)
        return rotated if width == tensor.shape[-1] else torch.cat([rotated, tensor[..., width:]], -1)


def per_column(positions):
    """Return positions (b, l) or (b, l, c) as float32 (b, l, 1 or c)."""
    return positions.float() if positions.ndim == 3 else positions.float()[..., None]


def exact(numbers):
    """Return numbers in float64, or in float32 if the device has no float64."""
    return numbers.to(torch.float32 if numbers.device.type == "mps" else torch.float64)


def angles_of(turn, frequencies, per_column=per_column):
    """Return the angles (b, l, c), float32, of a `Turn` at frequencies (c): the family's at `since` to those at `to`.

    A family computes its angles in float32, with an error of 0.03 at a million radians. The same rounded angle is
    subtracted in float64, so that rotating by a large difference is as exact as by a small one.
    """
    at = frequencies if turn.slowed is None else (exact(frequencies) * turn.slowed).float()
    to = per_column(turn.to) * at
    if turn.since is None:
        return to
    angles = exact(to) - exact(per_column(turn.since) * frequencies)
    return (angles - 2 * math.pi * (angles / (2 * math.pi)).round()).float()


def compute_tables(frame, turn):
    """Return cos and sin (b, l, c) of a `Turn` in the family's layout: the innermost tables of `Call.turn`."""
    return compute_cos_sin(frame, angles_of(turn, frame.inverse[frame.columns]))


def compute_cos_sin(frame, angles):
    """Return cos and sin of angles, computed as in the family, because `torch.polar` differs in the last bit."""
    if frame.dtype.is_complex:
        turn = torch.polar(torch.ones_like(angles), angles) * frame.scaling
        return turn.real, turn.imag
    factor = frame.scaling
    pair = angles.cos(), angles.sin()
    return tuple((wave if factor == 1 else wave * factor).to(frame.dtype) for wave in pair)


MOVES = {
    "reorder_cache": lambda rows, index: rows.index_select(0, index.to(rows.device)),
    "batch_select_indices": lambda rows, indices: rows[indices],
    "batch_repeat_interleave": lambda rows, repeats: rows.repeat_interleave(repeats, dim=0),
    "crop": lambda rows, length: rows,
    "reset": lambda rows: rows,
}


def make_move(name):
    """Return a cache's method of this name that also moves the state of the sequences."""

    def move(cache, *args, **kwargs):
        getattr(super(type(cache), cache), name)(*args, **kwargs)
        state = cache.ctxext_state
        state.derived.clear()
        if name in ("crop", "reset"):
            state.common.clear()
        kept = state.rows if tokens_in(cache) else {}  # An empty cache has no prompt.
        state.rows = {key: MOVES[name](rows, *args, *kwargs.values()) for key, rows in kept.items()}

    return move


MOVING = {name: make_move(name) for name in MOVES}


@functools.cache
def followed_class(kind):
    """Return a subclass of a cache class with methods that also move the state of the sequences."""
    moves = {name: move for name, move in MOVING.items() if hasattr(kind, name)}
    # Pickle finds classes by name, and no module contains this one.
    reduced = {"__reduce_ex__": lambda cache, protocol: (restore_cache, (kind,), vars(cache))}
    return type(kind.__name__, (kind,), {**moves, **reduced})


def restore_cache(kind):
    """Return an empty cache of `followed_class(kind)`, which pickle and copy fill."""
    return followed_class(kind).__new__(followed_class(kind))


class SequenceState:
    """State of methods for a cache's sequences: see `state_of`."""

    def __init__(self):
        self.rows, self.common, self.derived = {}, {}, {}


def state_of(cache):
    """Return the state of methods for a cache's sequences, created at the first call.

    - `rows`: tensors (b, ...) by any key, which are reordered, selected and repeated with the sequences
    - `derived`: values cleared whenever the sequences move or are cropped
    - `common`: values valid for all sequences, cleared when they are cropped
    """
    if not hasattr(cache, "ctxext_state"):
        cache.ctxext_state = SequenceState()
        if not torch.compiler.is_compiling():
            cache.__class__ = followed_class(
                type(cache)
            )  # Methods on the instance would refer to it and keep it alive.
    return cache.ctxext_state
