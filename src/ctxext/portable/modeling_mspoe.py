"""Ms-PoE for any rotary transformers model: every key head gets its own position scale.

Paper: "Found in the Middle", https://arxiv.org/abs/2403.04797. This file travels inside checkpoints and stands alone.
The stub beside it names a model family; `family` below gives it a private copy of that family's modeling module, in
which three things differ from the installed one, and nothing else:

1. The rotary embedding also returns cos and sin for every ratio of the grid (`rotary_forward`).
2. A decoder layer picks what its own heads need from that (`layer_forward`).
3. `apply_rotary_pos_emb` rotates each key head, and all queries that read it, with that head's ratio (`apply`).

Attention itself is the family's, so every attention backend, cache and mask works as before. The key `ctxext_mspoe` of
the configuration holds the numbers: `ratios` (one per key head, ascending), `layers` (those that take part), `ranks`
(for each of these layers the number of each head's ratio; absent: chosen from each prompt), `schedule`, `rescale`,
`variant`, and `rope`, the model's own frequency schedule. Shapes: b batch, g key heads, n queries per key head,
l length, d rotary dimensions, r ratios.
"""

import copy
import functools
import importlib.util
import inspect
import math
import sys
from collections import ChainMap
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoModel, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

MODERN = int(transformers.__version__.split(".")[0]) >= 5
if MODERN:
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )

KEY = "ctxext_mspoe"
LATCH = "ctxext_needs_trust_remote_code"  # The rope type in config.json: without this file no model knows it.


class Tables(NamedTuple):
    """What the rotary embedding returns in the place of cos."""

    cos: torch.Tensor  # The family's own (b, l, d), for layers that take no part.
    sin: torch.Tensor
    head_cos: torch.Tensor  # One table per ratio: (r, b, l, d).
    head_sin: torch.Tensor
    ranks: torch.Tensor | None  # (layers, g), or None where each prompt chooses.


class HeadScales(NamedTuple):
    """What a decoder layer passes to its attention in the place of cos."""

    tables: Tables
    ranks: torch.Tensor | None  # (1 or b, g): the number of each key head's ratio, where already known.
    layer: int
    scaling: float | None = None  # Of the attention scores; None: one over the root of the head's dimension.
    released: bool = False
    mask: Any = None  # As the layer received it, in any attention backend's form.
    cache: Any = None


def visible_keys(mask, length):
    """Which keys the last query may see, (1 or b, l), or None for all: what is padding, on either side, it may not."""
    mask = mask["causal"] if isinstance(mask, dict) else mask
    if mask is None:
        return None
    if hasattr(mask, "mask_mod"):  # Flex attention.
        keys = torch.arange(length, device=mask.kv_num_blocks.device)
        rows = torch.arange(mask.shape[0], device=keys.device)[:, None]
        return mask.mask_mod(rows, keys[:1], keys[-1:], keys).expand(len(rows), length)
    if mask.dim() == 2:  # Flash attention.
        return mask[:, :length] != 0
    row = mask[:, 0, length - 1, :length]
    return row if row.dtype == torch.bool else row > -1


@torch.no_grad()
def awareness(query, key, mask=None, scaling=None):
    """Share of keys with more than three times the mean attention, in the attention row of the last query: (b, g).

    Takes un-rotated `query` (b, g, n, l, d) and `key` (b, g, l, d). Only that one row is computed, in float32: O(l) time
    and memory. Queries that share a key head are averaged.
    """
    seen = visible_keys(mask, key.shape[2])
    if seen is None:
        last, count = query[:, :, :, -1], key.shape[2]
    else:
        seen = seen.to(key.device).expand(len(key), -1)
        end = (seen * torch.arange(key.shape[2], device=key.device)).amax(-1)
        last = query.gather(3, end.view(-1, 1, 1, 1, 1).expand_as(query[:, :, :, :1])).squeeze(3)
        count = seen.sum(-1).view(-1, 1, 1, 1)
    scores = last.float() @ key.float().transpose(2, 3) * (scaling or key.shape[3] ** -0.5)
    if seen is not None:
        scores = scores.masked_fill(~seen[:, None, None], -math.inf)
    # The mean of a softmax row over its keys is one over their number. Whole counts are compared, so ties are exact.
    return ((scores.softmax(-1) * count > 3).sum(-1, keepdim=True) / count).mean((2, 3))


def choose_ranks(scales, query, key):
    """Order the heads by awareness, ties by number; the most aware gets the smallest ratio. Returns (b, g)."""
    order = awareness(query, key, scales.mask, scales.scaling).argsort(dim=-1, descending=True, stable=True)
    # The released code uses the order itself as ratio numbers; the paper's ratio number is a head's place in the order.
    ranks = order if scales.released else order.argsort(-1)
    if scales.cache is not None:
        if not hasattr(scales.cache, "mspoe_ranks"):
            scales.cache.mspoe_ranks = {}
        if not isinstance(scales.cache, RankedCache) and not torch.compiler.is_compiling():
            scales.cache.__class__ = ranked(type(scales.cache))
        scales.cache.mspoe_ranks[scales.layer] = ranks
    return ranks


class RankedCache:
    """Mixed into the class of a cache that holds ranks, so that they follow the sequences whose keys they rotated."""

    def _each(self, change):
        self.mspoe_ranks = {layer: change(ranks) for layer, ranks in self.mspoe_ranks.items()}

    def reorder_cache(self, beam_idx):
        """Move the ranks as beams move."""
        super().reorder_cache(beam_idx)
        self._each(lambda ranks: ranks.index_select(0, beam_idx.to(ranks.device)))

    def batch_repeat_interleave(self, repeats):
        """Repeat the ranks with their rows."""
        super().batch_repeat_interleave(repeats)
        self._each(lambda ranks: ranks.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices):
        """Keep the ranks of the rows that stay."""
        super().batch_select_indices(indices)
        self._each(lambda ranks: ranks[indices])

    def reset(self):
        """Forget the ranks: the next prompt chooses anew."""
        super().reset()
        self.mspoe_ranks = {}

    def crop(self, *args, **kwargs):
        """Forget the ranks if no key is left."""
        super().crop(*args, **kwargs)
        if not self.get_seq_length():
            self.mspoe_ranks = {}


@functools.cache
def ranked(cache_class):
    """Make the subclass of a cache class whose instances hold ranks."""
    return type(f"Ranked{cache_class.__name__}", (RankedCache, cache_class), {})


def head_frequencies(rotary, inverse, theta):
    """Evaluate the schedule at every ratio, on top of the model's own inverse frequencies (d / 2): (r, d / 2)."""
    settings, size = rotary.mspoe, len(inverse)
    ratios = torch.tensor(settings["ratios"], device=inverse.device)[:, None]
    if settings["rescale"] != "uniform":
        return inverse[None]
    if settings["schedule"] == "ntk":  # The base times ratio ** (d / (d - 2)), written per frequency.
        return inverse / ratios ** torch.linspace(0, 1, size, device=inverse.device)
    if settings["schedule"] == "by-parts":  # YaRN's ramp, from untouched to slowed.
        turns = (settings["trained_length"] / (2 * math.pi * settings[beta]) for beta in ("beta_fast", "beta_slow"))
        first, last = (size * math.log(turn) / math.log(theta) for turn in turns)
        first, last = max(math.floor(first), 0), min(math.ceil(last), 2 * size - 1)
        steps = torch.arange(size, device=inverse.device) - first
        return inverse * (1 - (steps / max(last - first, 0.001)).clamp(0, 1) * (1 - 1 / ratios))
    return inverse / ratios


def head_positions(settings, positions):
    """Positions for every ratio, (r or 1, ...). A `rescale` of [a, b] compresses only the stretch from a to b."""
    if settings["rescale"] == "uniform":
        return positions[None]
    start, end = settings["rescale"]
    ratios = torch.tensor(settings["ratios"], device=positions.device).view(-1, *[1] * positions.dim())
    return positions - (positions.clamp(start, end) - start) * (1 - 1 / ratios)


def rotary_forward(original, rotary, x, position_ids, *args, **kwargs):
    """Return the family's (cos, sin), with tables for every ratio in the place of cos."""
    cos, sin = original(rotary, x, position_ids, *args, **kwargs)
    layer_type = next((value for value in (*args, *kwargs.values()) if isinstance(value, str)), None)
    if layer_type not in getattr(rotary, "mspoe_layouts", ()):
        return cos, sin
    prefix, settings = f"{layer_type}_" if layer_type else "", rotary.mspoe
    columns, axes, theta = rotary.mspoe_layouts[layer_type]
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        inverse = getattr(rotary, f"{prefix}inv_freq").to(x.device).float()
        frequencies = head_frequencies(rotary, inverse, theta)[:, torch.tensor(columns, device=x.device)]
        positions = head_positions(settings, position_ids.float())
        # With several position axes (multimodal models) every column has its own.
        positions = positions[:, axes].movedim(1, -1) if position_ids.dim() == 3 else positions[..., None]
        angles = positions * frequencies[:, None, None]
        scaling = getattr(rotary, f"{prefix}attention_scaling", 1.0)
        head_cos, head_sin = (angles.cos() * scaling).to(cos.dtype), (angles.sin() * scaling).to(sin.dtype)
    ranks = torch.tensor(settings["ranks"], device=x.device) if "ranks" in settings else None
    tables = Tables(cos, sin, head_cos, head_sin, ranks)
    layer = getattr(rotary, "mspoe_layer", None)  # Known where each attention has a rotary embedding of its own.
    if layer is None:
        return tables, sin
    if ranks is None:
        raise ValueError("This family rotates inside its attention, so it needs a calibrated or fixed order of heads.")
    return own_embeddings((tables, sin), settings, layer, {})


def layer_forward(original, layer, *args, **kwargs):
    """Call the family's decoder layer with the position embeddings that its heads need."""
    if not hasattr(layer, "mspoe"):
        return original(layer, *args, **kwargs)
    settings, index, scaling = layer.mspoe
    # Some families run one layer at several depths, and say so in these arguments.
    index = kwargs.get("layer_idx", index) + kwargs.get("cycle_offset", 0)
    args = [own_embeddings(value, settings, index, kwargs, scaling) for value in args]
    changed = {name: own_embeddings(value, settings, index, kwargs, scaling) for name, value in kwargs.items()}
    return original(layer, *args, **changed)


def own_embeddings(value, settings, index, kwargs, scaling=None):
    """Turn (tables, sin) into what layer `index` needs: its heads' numbers, or the family's own (cos, sin)."""
    if not (isinstance(value, tuple) and value and isinstance(value[0], Tables)):
        return value
    tables, sin = value
    if index not in settings["layers"]:
        return tables.cos, sin
    cache = next((kwargs[name] for name in ("past_key_values", "past_key_value", "layer_past") if name in kwargs), None)
    if tables.ranks is None:
        ranks = getattr(cache, "mspoe_ranks", {}).get(index)
    else:
        ranks = tables.ranks[settings["layers"].index(index)][None]
    released = settings["variant"] == "released"
    return HeadScales(tables, ranks, index, scaling, released, kwargs.get("attention_mask"), cache), sin


def apply(original, names, *args, **kwargs):
    """Rotate queries and keys as the family does, but each key head and its queries with their own ratio."""
    given = dict(zip(names, args)) | kwargs
    scales, heads_dim = given["cos"], given.get("unsqueeze_dim", 1)
    if not isinstance(scales, HeadScales):
        return original(*args, **kwargs)
    tensors = [given[name] for name in names[: names.index("cos")]]  # Query and key, or one of them.
    num_heads = len(scales.tables.head_cos)
    if len(tensors) == 2 and tensors[1].shape[heads_dim] != num_heads:
        found = tensors[1].shape[heads_dim]
        raise ValueError(f"This checkpoint has ratios for {num_heads} key heads; layer {scales.layer} has {found}.")
    tensors = [tensor.unflatten(heads_dim, (num_heads, -1)) for tensor in tensors]
    ranks = scales.ranks
    if ranks is None:
        query, key = (tensor if heads_dim == 1 else tensor.movedim(1, 3) for tensor in tensors)
        ranks = choose_ranks(scales, query, key[:, :, 0])
    cos, sin = (pick(table, ranks) for table in (scales.tables.head_cos, scales.tables.head_sin))
    if heads_dim == 2:
        cos, sin = cos.transpose(1, 2), sin.transpose(1, 2)
    rotated = original(*tensors, cos, sin, unsqueeze_dim=heads_dim + 1)
    if len(tensors) == 1:
        return rotated.flatten(heads_dim, heads_dim + 1)
    return tuple(tensor.flatten(heads_dim, heads_dim + 1) for tensor in rotated)


def pick(table, ranks):
    """Turn tables (r, b, l, d) and ratio numbers (1 or b, g) into one table per head (b, g, l, d)."""
    rows = ranks * table.shape[1] + torch.arange(table.shape[1], device=ranks.device)[:, None]
    return table.flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, rows.shape)


def own_schedule(config):
    """Return the config with the model's own rope schedule, and the layer types it was latched for ([None]: for all)."""
    settings, live = getattr(config, KEY, None), None if MODERN else getattr(config, "rope_scaling", None)
    live = (getattr(config, "rope_parameters", None) if live is None else live) or {}
    entries = {None: live} if LATCH in (live.get("rope_type"), getattr(config, "hidden_act", None)) else live
    latched = [
        name for name, entry in entries.items() if name is None or (isinstance(entry, dict) and LATCH in entry.values())
    ]
    if settings is None or not latched:
        return config, []
    config = copy.copy(config)
    config.hidden_act = settings.get("hidden_act", getattr(config, "hidden_act", None))
    entries = {name: {**entry, **settings["rope"]} if name in latched else entry for name, entry in entries.items()}
    live = entries.get(None, entries)
    if MODERN:
        config.rope_parameters = live
    elif None in latched:
        config.rope_scaling = live
        for name in {"rope_theta", "partial_rotary_factor"} & live.keys():
            setattr(config, name, live[name])
    return config, latched


def rotary_init(original, rotary, config=None, *args, **kwargs):
    """Build the rotary embedding from the model's own schedule, and find which frequency each column rotates by."""
    config, layer_types = own_schedule(config)
    original(rotary, config, *args, **kwargs)
    if not layer_types:
        return
    rotary.mspoe, rotary.mspoe_layouts = getattr(config, KEY), {}
    with torch.device("cpu"):  # The model itself may be on the meta device, and this needs values.
        probe = type(rotary)(config)
        positions = torch.tensor([1.0, 0.7, 0.4])[: 3 if hasattr(probe, "mrope_section") else 1, None, None]
        for name in layer_types:
            prefix = f"{name}_" if name else ""
            _, sin = probe(torch.zeros(1), positions if len(positions) == 3 else positions[0], *filter(None, [name]))
            inverse = getattr(probe, f"{prefix}inv_freq").float()
            candidates = (positions.view(-1, 1) * inverse).sin().flatten()
            sines = sin.flatten() / getattr(probe, f"{prefix}attention_scaling", 1.0)
            found = (sines[:, None] - candidates).abs().argmin(-1)
            rope = getattr(config, "rope_parameters", None) or {}
            theta = rope.get(name, rope).get("rope_theta") or config.rope_theta
            rotary.mspoe_layouts[name] = (found % len(inverse)).tolist(), (found // len(inverse)).tolist(), theta


def model_init(original, model, config, *args, **kwargs):
    """Build the family's model, then tell each decoder layer what it needs to know."""
    if not isinstance(config, model.config_class):  # A text model in a checkpoint with the whole model's configuration.
        config = config.get_text_config(decoder=True)
    settings = getattr(config.get_text_config(), KEY, None)
    if getattr(config, "hidden_act", None) == LATCH:
        module = sys.modules[original.__module__]
        module.ACT2FN = ChainMap({LATCH: ACT2FN[settings["hidden_act"]]}, ACT2FN)
    original(model, config, *args, **kwargs)
    if settings is None:
        return
    if MODERN:  # Renamed weights go by class name.
        for conversions in filter(
            None, map(get_checkpoint_conversion_mapping, (c.__name__ for c in type(model).__mro__))
        ):
            register_checkpoint_conversion_mapping(type(model).__name__, conversions, overwrite=True)
    for layer in model.modules():
        attention = next((child for child in layer.children() if rotates(type(child))), None)
        if attention is None:
            continue
        layer.mspoe = settings, getattr(attention, "layer_idx", None), getattr(attention, "scaling", None)
        replace(type(layer), "forward", layer_forward)
        for rotary in attention.children():
            if hasattr(rotary, "mspoe_layouts"):
                rotary.mspoe_layer = layer.mspoe[1]
    if not any(hasattr(module, "mspoe_layouts") for module in model.modules()):
        raise ValueError(f"{type(model).__name__} has no rotary embedding that Ms-PoE can scale.")


def rotates(cls):
    """Whether a module's own forward applies rotary embeddings: it is an attention."""
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    return code is not None and "apply_rotary_pos_emb" in code.co_names


def replace(cls, name, new):
    """Put `new(original, ...)` in the place of a method of a private class, once."""
    original = getattr(cls, name)
    if not hasattr(original, "mspoe"):
        method = functools.wraps(original)(lambda *args, **kwargs: new(original, *args, **kwargs))
        method.mspoe = True
        setattr(cls, name, method)


class PrivateAutoModel:
    """What the private module knows as AutoModel: inner models of the family are private too."""

    def __init__(self, module):
        self.module = module

    def from_config(self, config, **kwargs):
        """Build a model from its configuration."""
        cls = getattr(self.module, str(MODEL_MAPPING_NAMES.get(config.model_type)), None)
        return AutoModel.from_config(config, **kwargs) if cls is None else cls._from_config(config, **kwargs)


def family(stub, modeling):
    """Return a private copy of the family's modeling module for the checkpoint module named `stub`."""
    name = f"{modeling}_for_{stub.replace('.', '_')}"
    spec = importlib.util.spec_from_file_location(name, importlib.util.find_spec(modeling).origin)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names = list(inspect.signature(module.apply_rotary_pos_emb).parameters)
    module.apply_rotary_pos_emb = functools.partial(apply, module.apply_rotary_pos_emb, names)
    module.AutoModel = PrivateAutoModel(module)
    for cls in list(vars(module).values()):
        if inspect.isclass(cls) and cls.__module__ == name:
            if cls.__name__.endswith("RotaryEmbedding"):
                replace(cls, "__init__", rotary_init)
                replace(cls, "forward", rotary_forward)
            elif issubclass(cls, PreTrainedModel):
                cls.is_custom_code = classmethod(lambda cls: False)  # Its weights are stored as the family's are.
                if "__init__" in vars(cls):
                    replace(cls, "__init__", model_init)
    return module
