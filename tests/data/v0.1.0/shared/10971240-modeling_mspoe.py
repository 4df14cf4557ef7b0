"""Ms-PoE for any rotary transformers model: every key head gets its own position scale.

Paper: "Found in the Middle", https://arxiv.org/abs/2403.04797. This file travels inside checkpoints and stands alone.
A stub beside it names a model family; `family` makes a private copy of that family's modeling module, in which (1) the
rotary embedding also returns cos and sin for every ratio, (2) decoder layers pass on what their heads need, and (3)
`apply_rotary_pos_emb` rotates each key head, and all queries that read it, with that head's ratio. Attention itself
stays the family's. In the configuration, `ctxext_mspoe` holds `ratios` (one per key head, ascending), `layers` (those
that take part), `ranks` (for each of these the number of each head's ratio; absent: each prompt chooses), `schedule`,
`rescale`, `variant` and `rope`. Shapes: b batch, g key heads, n queries per key head, l length, d rotary, r ratios.
"""

import copy
import functools
import importlib.util
import inspect
import math
import sys
from collections import ChainMap, namedtuple
from types import SimpleNamespace

import torch
import transformers
from transformers import AutoModel, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

KEY = "ctxext_mspoe"
LATCH = "ctxext_needs_trust_remote_code"  # The rope type in config.json: without this file no model knows it.
MODERN = int(transformers.__version__.split(".")[0]) >= 5
conversion_mapping = importlib.import_module("transformers.conversion_mapping") if MODERN else None

# What the rotary embedding returns in the place of cos: the family's own cos, for layers that take no part; cos and sin
# of every ratio (r, b, l, 2 d); and the number of each head's ratio (layers, 1, g), or None where each prompt chooses.
Tables = namedtuple("Tables", ["cos", "heads", "ranks"])
# What a decoder layer passes to its attention in the place of cos: the tables, the number of each key head's ratio (1
# or b, g), or None where this prompt has to choose, and what choosing takes. The mask is in any backend's form.
HeadScales = namedtuple("HeadScales", ["tables", "ranks", "layer", "settings", "scaling", "mask", "cache"])


def visible_keys(mask, length):
    """Which keys the last query sees, (1 or b, l), or None for all of them. Padding on either side is not seen."""
    mask = mask["causal"] if isinstance(mask, dict) else mask
    if hasattr(mask, "mask_mod"):  # Flex attention.
        keys = torch.arange(length, device=mask.kv_num_blocks.device)
        rows = torch.arange(mask.shape[0], device=keys.device)[:, None]
        return mask.mask_mod(rows, keys[:1], keys[-1:], keys).expand(len(rows), length)
    if mask is None or mask.ndim == 2:  # Flash attention has the tokenizer's.
        return None if mask is None else mask[:, :length] != 0
    row = mask[:, 0, length - 1, :length]
    return row if row.dtype == torch.bool else row > -1


@torch.no_grad()
def awareness(query, key, mask=None, scaling=None):
    """Share of keys with over three times the mean attention of the last query, from un-rotated states: (b, g).

    `query` is (b, g, n, l, d), `key` (b, g, l, d). One attention row is computed, in float32: O(l) time and memory.
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
    scores = scores if seen is None else scores.masked_fill(~seen[:, None, None], -math.inf)
    # A row's mean is one over its keys. Queries that share a key head share one count: whole numbers tie exactly.
    return ((scores.softmax(-1) * count > 3).sum((2, 3), keepdim=True) / (count * query.shape[2])).flatten(1)


def choose_ranks(scales, query, key):
    """Order a layer's heads by awareness, ties by number; the most aware gets the smallest ratio: (b, g)."""
    order = awareness(query, key, scales.mask, scales.scaling).argsort(dim=-1, descending=True, stable=True)
    # The released code takes the order for the ratios' numbers; the paper's number is the head's place in the order.
    ranks, cache = order if scales.settings["variant"] == "released" else order.argsort(-1), scales.cache
    if cache is not None:
        if not type(cache).__name__.startswith("Ranked") and not torch.compiler.is_compiling():
            cache.__class__ = ranked(type(cache))
        cache.mspoe_ranks = {**getattr(cache, "mspoe_ranks", {}), scales.layer: ranks}
    return ranks


# What happens to a cache's rows happens to its ranks. A cache that is empty afterwards has forgotten its prompt.
MOVES = {
    "reorder_cache": lambda ranks, rows: ranks.index_select(0, rows.to(ranks.device)),
    "batch_select_indices": lambda ranks, rows: ranks[rows],
    "batch_repeat_interleave": lambda ranks, repeats: ranks.repeat_interleave(repeats, dim=0),
    "crop": lambda ranks, length: ranks,
    "reset": lambda ranks: ranks,
}


@functools.cache
def ranked(cache_class):
    """Make the subclass of a cache class whose ranks follow the sequences whose keys they rotated."""

    def move(name, cache, *args, **kwargs):
        getattr(cache_class, name)(cache, *args, **kwargs)
        kept = cache.mspoe_ranks if cache.get_seq_length() else {}
        cache.mspoe_ranks = {layer: MOVES[name](ranks, *args, *kwargs.values()) for layer, ranks in kept.items()}

    moves = {
        name: functools.partialmethod(functools.partial(move, name)) for name in MOVES if hasattr(cache_class, name)
    }
    return type(f"Ranked{cache_class.__name__}", (cache_class,), moves)


def head_frequencies(settings, inverse):
    """Evaluate the schedule at every ratio, on top of the model's own inverse frequencies (d / 2): (r, d / 2)."""
    ratios, size = torch.tensor(settings["ratios"], device=inverse.device)[:, None], len(inverse)
    if settings["rescale"] != "uniform":
        return inverse.expand(len(ratios), -1)
    if settings["schedule"] == "ntk":  # The base times ratio ** (d / (d - 2)), written per frequency.
        return inverse / ratios ** torch.linspace(0, 1, size, device=inverse.device)
    if settings["schedule"] == "by-parts":  # YaRN's ramp, from frequencies that stay to those that slow down.
        turns = (settings["trained_length"] / (2 * math.pi * settings[beta]) for beta in ("beta_fast", "beta_slow"))
        first, last = (size * math.log(turn) / math.log(settings["theta"]) for turn in turns)
        first, last = max(math.floor(first), 0), min(math.ceil(last), 2 * size - 1)
        steps = torch.arange(size, device=inverse.device) - first
        return inverse * (1 - (steps / max(last - first, 0.001)).clamp(0, 1) * (1 - 1 / ratios))
    return inverse / ratios


def rotary_forward(original, rotary, x, position_ids, *args, **kwargs):
    """Return the family's (cos, sin), with tables for every ratio in the place of cos."""
    cos, sin = original(rotary, x, position_ids, *args, **kwargs)
    layer_type = next((value for value in (*args, *kwargs.values()) if isinstance(value, str)), None)
    if layer_type not in getattr(rotary, "mspoe_layouts", ()):
        return cos, sin
    prefix, settings = f"{layer_type}_" if layer_type else "", rotary.mspoe
    columns, axes = rotary.mspoe_layouts[layer_type]
    frequencies = head_frequencies(settings, getattr(rotary, f"{prefix}inv_freq").to(x.device).float())
    frequencies = frequencies[:, torch.tensor(columns, device=x.device)]
    positions = position_ids.float()
    # With several position axes (multimodal models) every column has its own.
    positions = positions[axes].movedim(0, -1)[None] if position_ids.ndim == 3 else positions[None, ..., None]
    if settings["rescale"] != "uniform":  # Only the stretch between two positions is compressed.
        start, end = settings["rescale"]
        ratios = torch.tensor(settings["ratios"], device=x.device).view(-1, 1, 1, 1)
        positions = positions - (positions.clamp(start, end) - start) * (1 - 1 / ratios)
    angles = positions * frequencies[:, None, None]
    scaling = getattr(rotary, f"{prefix}attention_scaling", 1.0)
    heads = torch.cat([(f(angles) * scaling).to(cos.dtype) for f in (torch.cos, torch.sin)], -1)
    ranks = torch.tensor(settings["ranks"], device=x.device)[:, None] if "ranks" in settings else None
    return Tables(cos, heads, ranks), sin


def layer_forward(original, layer, *args, **kwargs):
    """Call the family's decoder layer with what its heads need in the place of the tables."""
    if hasattr(layer, "mspoe_layer"):
        args = [own_embeddings(layer, value, kwargs) if isinstance(value, tuple) else value for value in args]
        kwargs |= {k: own_embeddings(layer, value, kwargs) for k, value in kwargs.items() if isinstance(value, tuple)}
    return original(layer, *args, **kwargs)


def own_embeddings(layer, value, inputs):
    """Turn (tables, sin) into what a layer needs: (scales of its heads, sin), or the family's own (cos, sin)."""
    if not value or not isinstance(value[0], Tables):
        return value
    (tables, sin), (settings, index, scaling) = value, layer.mspoe_layer
    # Some families run one layer at several depths, and say so in these arguments.
    index = inputs.get("layer_idx", index) + inputs.get("cycle_offset", 0)
    if index not in settings["layers"]:
        return tables.cos, sin
    cache = next((inputs[name] for name in ("past_key_values", "past_key_value", "layer_past") if name in inputs), None)
    ranks = getattr(cache, "mspoe_ranks", {}).get(index)
    if tables.ranks is not None:
        ranks = tables.ranks[settings["layers"].index(index)]
    return HeadScales(tables, ranks, index, settings, scaling, inputs.get("attention_mask"), cache), sin


def pick(tables, ranks):
    """Turn tables (r, b, l, 2 d) and the numbers of the heads' ratios (1 or b, g) into cos and sin (b, g, l, d)."""
    batch = tables.heads.shape[1]
    rows = ranks if batch == 1 else ranks * batch + torch.arange(batch, device=ranks.device)[:, None]
    own = tables.heads.flatten(0, 1).index_select(0, rows.flatten())
    return own.view(*rows.shape, *own.shape[1:]).chunk(2, -1)


def apply(original, names, *args, **kwargs):
    """Rotate queries and keys as the family does, but each key head and its queries with their own ratio."""
    given = dict(zip(names, args, strict=False)) | kwargs
    scales, axis = given["cos"], given.get("unsqueeze_dim", 1)
    if not isinstance(scales, HeadScales):
        return original(*args, **kwargs)
    tensors = [given[name] for name in names[: names.index("cos")]]  # Query and key, or one of them.
    heads, found = len(scales.settings["ratios"]), tensors[-1].shape[axis]
    if len(tensors) == 2 and found != heads:
        raise ValueError(f"This checkpoint has ratios for {heads} key heads; layer {scales.layer} has {found}.")
    tensors = [tensor.view(*tensor.shape[:axis], heads, -1, *tensor.shape[axis + 1 :]) for tensor in tensors]
    ranks = scales.ranks
    if ranks is None:
        query, key = (tensor if axis == 1 else tensor.movedim(1, 3) for tensor in tensors)
        ranks = choose_ranks(scales, query, key[:, :, 0])
    cos, sin = pick(scales.tables, ranks)
    if axis == 2:
        cos, sin = cos.transpose(1, 2), sin.transpose(1, 2)
    rotated = original(*tensors, cos, sin, unsqueeze_dim=axis + 1)
    if len(tensors) == 1:
        return rotated.flatten(axis, axis + 1)
    return tuple(tensor.flatten(axis, axis + 1) for tensor in rotated)


def own_schedule(config):
    """Return the config with the model's own rope schedule, and the layer types it was latched for ([None]: all)."""
    settings, live = getattr(config, KEY, None), None if MODERN else getattr(config, "rope_scaling", None)
    live = (getattr(config, "rope_parameters", None) if live is None else live) or {}
    entries = {None: live} if LATCH in (live.get("rope_type"), getattr(config, "hidden_act", None)) else live
    latched = [k for k, entry in entries.items() if k is None or (isinstance(entry, dict) and LATCH in entry.values())]
    if settings is None or not latched:
        return config, []
    config, entries = copy.copy(config), {**entries, **{k: {**entries[k], **settings["rope"]} for k in latched}}
    config.hidden_act = settings.get("hidden_act", getattr(config, "hidden_act", None))
    if MODERN:
        config.rope_parameters = entries.get(None, entries)
    elif None in latched:
        config.rope_scaling = entries[None]
        for name in {"rope_theta", "partial_rotary_factor"} & entries[None].keys():
            setattr(config, name, entries[None][name])
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
            sines = sin.flatten() / getattr(probe, f"{prefix}attention_scaling", 1.0)
            found = (sines[:, None] - (positions.view(-1, 1) * inverse).sin().flatten()).abs().argmin(-1)
            rotary.mspoe_layouts[name] = (found % len(inverse)).tolist(), (found // len(inverse)).tolist()


def model_init(original, model, config, *args, **kwargs):
    """Build the family's model, then tell each decoder layer what it needs to know."""
    if not isinstance(config, model.config_class):  # A text model in a checkpoint with the whole model's configuration.
        config = config.get_text_config(decoder=True)
    settings = getattr(config.get_text_config(), KEY, None)
    if getattr(config, "hidden_act", None) == LATCH:  # Where the rope type may not be latched, the activation is.
        module = sys.modules[original.__module__]
        module.ACT2FN = ChainMap({LATCH: ACT2FN[settings["hidden_act"]]}, ACT2FN)
    original(model, config, *args, **kwargs)
    for layer in model.modules() if settings else ():
        # An attention is what applies rotary embeddings in its own forward; its parent is a decoder layer.
        codes = ((child, getattr(inspect.unwrap(child.forward), "__code__", None)) for child in layer.children())
        attention = next((c for c, code in codes if code and "apply_rotary_pos_emb" in code.co_names), None)
        if attention is not None:
            layer.mspoe_layer = settings, getattr(attention, "layer_idx", None), getattr(attention, "scaling", None)
            replace(type(layer), "forward", layer_forward)
    for part in ("mspoe_layouts", "mspoe_layer") if settings else ():
        if not any(hasattr(module, part) for module in model.modules()):
            raise ValueError(f"{type(model).__name__} does not have the parts that Ms-PoE replaces.")
    name = type(model).__name__  # Transformers 5 finds some renamed weights by the name of the class, which is ours.
    if MODERN and (renamed := conversion_mapping.get_checkpoint_conversion_mapping(name.removeprefix("MsPoE"))):
        conversion_mapping.register_checkpoint_conversion_mapping(name, renamed, overwrite=True)


def replace(cls, name, new):
    """Put `new(original, ...)` in the place of a method of a private class, once."""
    original = getattr(cls, name)
    if not hasattr(original, "mspoe"):
        method = functools.wraps(original)(lambda *args, **kwargs: new(original, *args, **kwargs))
        method.mspoe = True
        setattr(cls, name, method)


def family(stub, modeling):
    """Return a private copy of the family's modeling module for the checkpoint module named `stub`."""
    name = f"{modeling}_for_{stub.replace('.', '_')}"
    spec = importlib.util.spec_from_file_location(name, importlib.util.find_spec(modeling).origin)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names = list(inspect.signature(module.apply_rotary_pos_emb).parameters)
    module.apply_rotary_pos_emb = functools.partial(apply, module.apply_rotary_pos_emb, names)

    def from_config(config, **kwargs):  # Models within a model are private too.
        cls = getattr(module, str(MODEL_MAPPING_NAMES.get(config.model_type)), None)
        return AutoModel.from_config(config, **kwargs) if cls is None else cls._from_config(config, **kwargs)

    module.AutoModel = SimpleNamespace(from_config=from_config)
    for cls in list(vars(module).values()):
        if inspect.isclass(cls) and cls.__module__ == name:
            if cls.__name__.endswith("RotaryEmbedding"):
                replace(cls, "__init__", rotary_init)
                replace(cls, "forward", rotary_forward)
            elif issubclass(cls, PreTrainedModel):
                cls.is_custom_code = classmethod(lambda cls: False)  # Its weights are stored as the family's are.
                if "__init__" in vars(cls) and not cls.__name__.endswith("PreTrainedModel"):
                    replace(cls, "__init__", model_init)
    return module
