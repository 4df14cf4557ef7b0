"""Ms-PoE for any rotary transformers model: every key head gets its own position scale.

Paper: "Found in the Middle", https://arxiv.org/abs/2403.04797. This file travels inside checkpoints and stands alone.
The stub beside it names a model family; `family` below gives it a private copy of that family's modeling module, in
which three things differ from the installed one, and nothing else:

1. The rotary embedding also returns cos and sin for every ratio of the grid (`rotary_forward`).
2. A decoder layer picks what its own heads need from that (`layer_forward`).
3. `apply_rotary_pos_emb` rotates each key head, and all queries that read it, with that head's ratio (`apply`).

Attention itself is the family's, so every attention backend, cache and mask works as before. The key `ctxext_mspoe` of
the configuration holds the numbers: `ratios` (one per key head, ascending), `layers` (those that take part), `ranks`
(for each of these layers which ratio each head takes; absent: chosen from each prompt), `schedule`, `rescale`,
`variant`, and `rope`, the model's own frequency schedule. Shapes: b batch, g key heads, n query heads per key head,
l length, d rotary dimensions, r ratios.
"""

import copy
import functools
import importlib.util
import inspect
import math
import sys
from typing import Any, NamedTuple

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

KEY = "ctxext_mspoe"
# The rope type that config.json carries. Only this file understands it, so a load without this file fails and says why.
LATCH = "ctxext_needs_trust_remote_code"


class Tables(NamedTuple):
    """What the rotary embedding returns in the place of cos."""

    cos: torch.Tensor  # The family's own (b, l, d), for layers that take no part.
    sin: torch.Tensor
    head_cos: torch.Tensor  # One table per ratio: (r, b, l, d).
    head_sin: torch.Tensor
    ranks: torch.Tensor | None  # (layers, g), or None when each prompt chooses.


class HeadScales(NamedTuple):
    """What a decoder layer passes to its attention in the place of cos."""

    tables: Tables
    ranks: torch.Tensor | None  # (1 or b, g): the ratio number of each key head, where already known.
    layer: int
    scaling: float | None  # Of the attention scores; None: one over the root of the head's dimension.
    released: bool
    mask: Any  # As the layer received it, in any attention backend's form.
    cache: Any


# ---------------------------------------------------------------- the statistic


def visible_keys(mask, length):
    """Which keys the last query may see, as (b or 1, l), or None for all of them; so padding on either side is left out."""
    if mask is None:
        return None
    if hasattr(mask, "mask_mod"):  # Flex attention.
        device = mask.kv_num_blocks.device
        batch = torch.arange(mask.shape[0], device=device)[:, None]
        zero, keys = torch.zeros((), dtype=torch.long, device=device), torch.arange(length, device=device)
        return mask.mask_mod(batch, zero, zero + length - 1, keys[None]).expand(mask.shape[0], length)
    if mask.dim() == 2:  # Flash attention, or the tokenizer's mask.
        return mask[:, :length] != 0
    row = mask[:, 0, length - 1, :length]
    return row if row.dtype == torch.bool else row > -1


@torch.no_grad()
def awareness(query, key, mask, scaling=None):
    """Share of keys with more than three times the mean attention, in the attention row of the last query.

    Takes un-rotated `query` (b, g, n, l, d) and `key` (b, g, l, d). Only that one row is computed, in float32: O(l) time
    and memory. Queries that share a key head are averaged. Returns (b, g).
    """
    batch, _, _, length, dim = query.shape
    seen = visible_keys(mask, length)
    if seen is None:
        last = query[..., -1, :]
        count = length
    else:
        seen = seen.to(query.device).expand(batch, length)
        index = (seen * torch.arange(length, device=query.device)).amax(-1)
        last = query.gather(3, index.view(-1, 1, 1, 1, 1).expand(*query.shape[:3], 1, dim)).squeeze(3)
        count = seen.sum(-1).view(-1, 1, 1, 1)
    scores = last.float() @ key.float().transpose(-1, -2) * (dim**-0.5 if scaling is None else scaling)
    if seen is not None:
        scores = scores.masked_fill(~seen[:, None, None], -math.inf)
    # The mean of a softmax row over its keys is one over their number.
    outliers = (scores.softmax(-1) * count > 3).float().sum((-1, -2))
    return outliers / (query.shape[2] * (count if seen is None else count.view(-1, 1)))


def choose_ranks(scales, query, key):
    """Order a layer's heads by awareness, most aware first; the most aware head gets the smallest ratio. (b, g)."""
    order = awareness(query, key, scales.mask, scales.scaling).argsort(dim=-1, descending=True, stable=True)
    # The released code takes the order itself for ratio numbers; the paper's ratio number is the place in the order.
    ranks = order if scales.released else order.argsort(-1)
    if scales.cache is not None:
        keep_ranks(scales.cache, scales.layer, ranks)
    return ranks


# ---------------------------------------------------------------- the order belongs to the sequence: it stays on its cache


class RankedCache:
    """Mixed into the class of a cache that carries ranks, so that they follow their rows."""

    def _each(self, change):
        self.mspoe_ranks = {layer: change(ranks) for layer, ranks in self.mspoe_ranks.items()}

    def reorder_cache(self, beam_idx):
        """Move the ranks as the beams move."""
        super().reorder_cache(beam_idx)
        self._each(lambda ranks: ranks.index_select(0, beam_idx.to(ranks.device)))

    def batch_repeat_interleave(self, repeats):
        """Repeat the ranks with their rows."""
        super().batch_repeat_interleave(repeats)
        self._each(lambda ranks: ranks.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices):
        """Keep the ranks of the rows that stay."""
        super().batch_select_indices(indices)
        self._each(lambda ranks: ranks[indices.to(ranks.device) if hasattr(indices, "to") else indices])

    def reset(self):
        """Forget the ranks: the next prompt chooses anew."""
        super().reset()
        self.mspoe_ranks = {}

    def crop(self, *args):
        """Forget the ranks if nothing is left."""
        super().crop(*args)
        if not self.get_seq_length():
            self.mspoe_ranks = {}


@functools.cache
def ranked(cache_class):
    """Return the subclass of a cache class whose instances carry ranks."""
    return type(cache_class.__name__, (RankedCache, cache_class), {"__module__": cache_class.__module__})


def keep_ranks(cache, layer, ranks):
    """Store a layer's ranks on the cache that now holds keys rotated by them."""
    if not hasattr(cache, "mspoe_ranks"):
        cache.mspoe_ranks = {}
        if not torch.compiler.is_compiling():
            cache.__class__ = ranked(type(cache))
    cache.mspoe_ranks[layer] = ranks


# ---------------------------------------------------------------- the three replaced parts


def by_parts_ramp(settings, num_frequencies, theta):
    """YaRN's ramp over the frequencies: (first, last) index between which interpolation fades in."""

    def index(turns):
        return num_frequencies * math.log(settings["trained_length"] / (turns * 2 * math.pi)) / math.log(theta)

    first = max(math.floor(index(settings["beta_fast"])), 0)
    last = min(math.ceil(index(settings["beta_slow"])), 2 * num_frequencies - 1)
    return first, last if last != first else last + 0.001


def head_frequencies(rotary, inverse, layer_type):
    """Evaluate the schedule at every ratio, on top of the model's own inverse frequencies (d / 2): (r, d / 2)."""
    settings = rotary.mspoe
    ratios = torch.tensor(settings["ratios"], device=inverse.device)[:, None]
    if settings["rescale"] != "uniform":
        return inverse.expand(len(ratios), -1)
    if settings["schedule"] == "ntk":  # The base times ratio ** (d / (d - 2)), written per frequency.
        return inverse / ratios ** torch.linspace(0, 1, len(inverse), device=inverse.device)
    if settings["schedule"] == "by-parts":
        first, last = by_parts_ramp(settings, len(inverse), rotary.mspoe_theta[layer_type])
        ramp = ((torch.arange(len(inverse), device=inverse.device) - first) / (last - first)).clamp(0, 1)
        return inverse * (1 - ramp * (1 - 1 / ratios))
    return inverse / ratios


def head_positions(settings, positions):
    """Positions per ratio, (r or 1, b, l). `rescale` [a, b]: only the stretch from a to b is compressed."""
    if settings["rescale"] == "uniform":
        return positions[None]
    start, end = settings["rescale"]
    ratios = torch.tensor(settings["ratios"], device=positions.device)[:, None, None]
    return positions - (positions.clamp(start, end) - start) * (1 - 1 / ratios)


def rotary_forward(original, rotary, x, position_ids, *args, **kwargs):
    """Return the family's (cos, sin), with tables for every ratio in the place of cos."""
    cos, sin = original(rotary, x, position_ids, *args, **kwargs)
    layer_type = next((value for value in (*args, *kwargs.values()) if isinstance(value, str)), None)
    if layer_type not in getattr(rotary, "mspoe_layouts", ()):
        return cos, sin
    prefix = f"{layer_type}_" if layer_type else ""
    settings, layout = rotary.mspoe, rotary.mspoe_layouts[layer_type]
    with torch.no_grad(), torch.autocast(device_type=x.device.type, enabled=False):
        inverse = getattr(rotary, f"{prefix}inv_freq").to(x.device).float()
        frequencies = head_frequencies(rotary, inverse, layer_type)[:, torch.tensor(layout, device=x.device)]
        angles = head_positions(settings, position_ids.float())[..., None] * frequencies[:, None, None]
        scaling = getattr(rotary, f"{prefix}attention_scaling", 1.0)
        head_cos, head_sin = ((f(angles) * scaling).to(cos.dtype) for f in (torch.cos, torch.sin))
    ranks = settings.get("ranks")
    ranks = None if ranks is None else torch.tensor(ranks, device=x.device)
    return Tables(cos, sin, head_cos, head_sin, ranks), sin


def layer_forward(original, layer, *args, **kwargs):
    """Call the family's decoder layer with the position embeddings that its heads need."""

    def own(value):
        if not (isinstance(value, tuple) and value and isinstance(value[0], Tables)):
            return value
        tables, _ = value
        if layer.mspoe is None:
            return tables.cos, tables.sin
        index, number, scaling, released = layer.mspoe
        cache = next(
            (kwargs[name] for name in ("past_key_values", "past_key_value", "layer_past") if name in kwargs), None
        )
        if tables.ranks is not None:
            ranks = tables.ranks[number : number + 1]
        else:
            ranks = getattr(cache, "mspoe_ranks", {}).get(index)
        return HeadScales(tables, ranks, index, scaling, released, kwargs.get("attention_mask"), cache), tables.sin

    return original(layer, *(own(value) for value in args), **{name: own(value) for name, value in kwargs.items()})


def apply(original, names, *args, **kwargs):
    """Rotate queries and keys as the family does, but each key head and its queries with their own ratio."""
    given = dict(zip(names, args)) | kwargs
    scales = given["cos"]
    if not isinstance(scales, HeadScales):
        return original(*args, **kwargs)
    heads_dim = given.get("unsqueeze_dim", 1)
    query, key = given["q"], given["k"]
    num_heads, num_ratios = key.shape[heads_dim], len(scales.tables.head_cos)
    if num_heads != num_ratios:
        raise ValueError(
            f"This checkpoint has ratios for {num_ratios} key heads, and layer {scales.layer} has {num_heads}."
        )
    query = query.unflatten(heads_dim, (num_heads, -1))
    key = key.unsqueeze(heads_dim + 1)
    ranks = scales.ranks
    if ranks is None:
        ranks = choose_ranks(scales, query, key.squeeze(heads_dim + 1))
    cos, sin = (pick(table, ranks) for table in scales.tables[2:4])
    if heads_dim == 2:
        cos, sin = cos.transpose(1, 2), sin.transpose(1, 2)
    query, key = original(query, key, cos, sin, unsqueeze_dim=heads_dim + 1)
    return query.flatten(heads_dim, heads_dim + 1), key.flatten(heads_dim, heads_dim + 1)


def pick(table, ranks):
    """Tables (r, b, l, d) and ratio numbers (1 or b, g) to one table per head (b, g, l, d)."""
    batch = table.shape[1]
    rows = ranks * batch + torch.arange(batch, device=ranks.device)[:, None]
    return table.flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, rows.shape)


# ---------------------------------------------------------------- the private copy of the family


def own_schedule(config):
    """Return (config with the model's own rope schedule, the layer types whose schedule was latched: [None] if one for all)."""
    settings = getattr(config, KEY, None)
    modern = transformers.__version__ >= "5"
    live = None if modern else getattr(config, "rope_scaling", None)
    live = getattr(config, "rope_parameters", None) if live is None else live
    if settings is None or not live:
        return config, []

    def unlatch(entry):
        return {**entry, **settings["rope"]}

    config = copy.copy(config)
    if live.get("rope_type") == LATCH:
        layer_types, live = [None], unlatch(live)
    else:
        layer_types = [
            name for name, entry in live.items() if isinstance(entry, dict) and entry.get("rope_type") == LATCH
        ]
        live = {name: unlatch(entry) if name in layer_types else entry for name, entry in live.items()}
    if modern:
        config.rope_parameters = live
    elif None in layer_types:
        config.rope_scaling = live
        for name in {"rope_theta", "partial_rotary_factor"} & live.keys():
            setattr(config, name, live[name])
    return config, layer_types


def rotary_init(original, rotary, *args, **kwargs):
    """Build the family's rotary embedding from the model's own schedule, and find which frequency each column rotates by."""
    position = next(i for i, value in enumerate((*args, *kwargs.values())) if isinstance(value, PretrainedConfig))
    config, layer_types = own_schedule((*args, *kwargs.values())[position])
    if position < len(args):
        args = (*args[:position], config, *args[position + 1 :])
    else:
        kwargs[list(kwargs)[position - len(args)]] = config
    original(rotary, *args, **kwargs)
    if not layer_types:
        return
    rotary.mspoe = getattr(config, KEY)
    rotary.mspoe_layouts, rotary.mspoe_theta = {}, {}
    with torch.device("cpu"):  # Models are built on the meta device, and this needs values.
        probe = type(rotary)(config)
        for layer_type in layer_types:
            prefix = f"{layer_type}_" if layer_type else ""
            _, sin = probe(torch.zeros(1), torch.ones(1, 1), *filter(None, [layer_type]))
            columns = sin.flatten() / getattr(probe, f"{prefix}attention_scaling", 1.0)
            distance = (columns[:, None] - getattr(probe, f"{prefix}inv_freq").float().sin()).abs()
            rotary.mspoe_layouts[layer_type] = distance.argmin(-1).tolist()
            schedule = getattr(config, "rope_parameters", None) or {}
            schedule = schedule.get(layer_type, schedule)
            rotary.mspoe_theta[layer_type] = schedule.get("rope_theta") or config.rope_theta


def model_init(original, model, config, *args, **kwargs):
    """Build the family's model, then tell each decoder layer which heads are its own."""
    original(model, config, *args, **kwargs)
    settings = getattr(config.get_text_config(), KEY, None)
    if settings is None:
        return
    for layer in model.modules():
        attention = next((child for child in layer.children() if rotates(type(child))), None)
        if attention is None:
            continue
        index = attention.layer_idx
        scaling = getattr(attention, "scaling", None)
        layer.mspoe = None
        if index in settings["layers"]:
            layer.mspoe = index, settings["layers"].index(index), scaling, settings["variant"] == "released"
        replace(type(layer), "forward", layer_forward)


def rotates(cls):
    """Whether a module's own forward applies rotary embeddings: it is an attention."""
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    return code is not None and "apply_rotary_pos_emb" in code.co_names


def replace(cls, name, new):
    """Put `new(original, ...)` in the place of a method of a private class, once."""
    original = getattr(cls, name)
    if getattr(original, "mspoe", None) is None:
        method = functools.wraps(original)(lambda *args, **kwargs: new(original, *args, **kwargs))
        method.mspoe = new
        setattr(cls, name, method)


def family(stub, modeling):
    """Return a private copy of the family's modeling module for the checkpoint module named `stub`."""
    name = f"{modeling}_for_{stub.replace('.', '_')}"
    spec = importlib.util.spec_from_file_location(name, importlib.util.find_spec(modeling).origin)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names = list(inspect.signature(module.apply_rotary_pos_emb).parameters)
    module.apply_rotary_pos_emb = functools.partial(apply, module.apply_rotary_pos_emb, names)
    for cls in list(vars(module).values()):
        if inspect.isclass(cls) and cls.__module__ == name:
            if cls.__name__.endswith("RotaryEmbedding"):
                replace(cls, "__init__", rotary_init)
                replace(cls, "forward", rotary_forward)
            elif issubclass(cls, PreTrainedModel) and "__init__" in vars(cls):
                replace(cls, "__init__", model_init)
    return module
