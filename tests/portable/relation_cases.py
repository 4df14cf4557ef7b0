"""Relation methods to test, and a stand-in for the seam: a Llama-style rotary and the calls that it would make."""

import importlib

import numpy as np
import torch

from ctxext.portable.method import Frame, Tables, Turn, angles_of
from ctxext.recipes.methods.relation import Relation
from ctxext.recipes.model_config import model_config
from ctxext.recipes.registry import METHODS as REGISTERED

RELATIONS = {method.name: method for method in REGISTERED if issubclass(method, Relation)}
LENGTH, PAIRS = 64, 8
BASE = [10000.0 ** (-i / PAIRS) for i in range(PAIRS)]
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 2 * PAIRS, "num_hidden_layers": 2}
MODEL = {"model_type": "llama", "max_position_embeddings": LENGTH, "rope_theta": 10000.0, **SIZES}
METHODS = {
    "self-extend": {"window": 10},
    "self-extend-fixed": {"window": 16, "group": 5},
    "bifocal": {"window": 8, "temperature": "logn"},
    "dca": {"chunk_size": 64, "local": 8},
    "dca-short": {"method": "dca", "chunk_size": 48, "local": 8, "temperature": "logn"},
    "rerope": {"window": 16, "temperature": "logn"},
    "sinks": {"sinks": 4, "window": 60},
    "sinks-short": {"method": "sinks", "sinks": 3, "window": 20, "temperature": "llama4"},
    "window": {"window": 64},
    "window-short": {"method": "window", "window": 17},
    "window-warm": {"method": "window", "window": 90, "temperature": "llama4"},
    "adaptive": {
        "base": BASE,
        "factors": [2, 4],
        "inverse_frequencies": [[w / (1 + (s - 1) * i / 7) for i, w in enumerate(BASE)] for s in (2, 4)],
        "attention_factors": [1.07, 1.14],
    },
}
METHODS |= {  # What no case is written for is tried as it is by default.
    name: method(**method.example).settings(model_config(MODEL))
    for name, method in RELATIONS.items()
    if name not in METHODS
}


def step(name):
    """The settings of a case."""
    method = name if name in RELATIONS else name.rsplit("-", 1)[0]
    return {"method": method, "original_length": LENGTH, "target_length": 256, **METHODS[name]}


def made(name):
    """The method of a case."""
    settings = step(name)
    method = RELATIONS[settings["method"]]
    module = importlib.import_module(f"ctxext.portable.{method.code[0].name.removesuffix('.py')}")
    return getattr(module, method.code_class)(settings)


def map_of(method):
    """The map by which a method's first layer reads."""
    return method.maps.get(0, method.map)


def rotated(x, angles, interleaved=False):
    """Rotate the first 2 p columns of x (b, h, l, d) by angles (b or 1, l, p), in float32, as families write it."""
    size = 2 * angles.shape[-1]
    part = x[..., :size].float()
    angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat([angles, angles], -1)
    if interleaved:
        half = torch.stack([-part[..., 1::2], part[..., ::2]], -1).flatten(-2)
    else:
        half = torch.cat([-part[..., size // 2 :], part[..., : size // 2]], -1)
    out = (part * angles.cos()[:, None] + half * angles.sin()[:, None]).to(x.dtype)
    return out if size == x.shape[-1] else torch.cat([out, x[..., size:]], -1)


class Call:
    """What the seam tells an attention about the call."""

    def __init__(self, positions, layer=0, cache=None, memory=None, backend="sdpa", interleaved=False, seen=None):
        self.positions = self.rotated = positions
        self.layer, self.cache, self.backend, self.seen = layer, cache, backend, seen
        self.memory, self.scaling, self.interleaved, self.turns = {} if memory is None else memory, None, interleaved, 0
        self.is_left_to_engine = False
        self.tables = Tables(None, [], positions, Frame(torch.tensor(BASE), None, 1.0, torch.float32), {})

    rotates_heads_alike = True

    def needs_sequences(self, what):
        """Engines that lay sequences end to end are refused by the seam."""

    def needs_causality(self, what, asked=None):
        """Bidirectional attention is refused by the seam."""

    def turn(self, tensor, to, since, slowed=None):
        self.turns += tensor.shape[2]
        return rotated(tensor, angles_of(Turn(to, since, slowed), self.inverse()), self.interleaved)

    def inverse(self):
        return torch.tensor(BASE)


class FlexMask:
    """As flex attention's BlockMask is read."""

    def __init__(self, mask):
        self.mask, self.shape = mask, mask.shape

    def mask_mod(self, batch, head, query, key):
        return self.mask[batch, head, query, key]


def stock(query, key, value, mask, **kwargs):
    """The attention of transformers with sdpa."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    mask = mask if mask is None else mask[..., : key.shape[2]]
    causal = query.shape[2] > 1 and mask is None
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(query, key, value, mask, is_causal=causal, scale=kwargs.get("scaling")).transpose(1, 2), None


def stock_eager(query, key, value, mask, scaling=None, softcap=None, s_aux=None, **kwargs):
    """The attention of transformers with eager, with what families add."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = query @ key.mT * (scaling or query.shape[-1] ** -0.5)
    scores = scores if softcap is None else (scores / softcap).tanh() * softcap
    scores = scores + mask[..., : key.shape[2]]
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    weights = weights if s_aux is None else weights[..., :-1]
    return (weights @ value).transpose(1, 2).contiguous(), weights


def states(length, heads=4, groups=2, size=16, batch=1, seed=0, value_size=None):
    """Un-rotated query (b, h, l, d), key and value (b, g, l, d), scaled so that softmax is not flat."""
    draw = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(batch, length, n, d, generator=draw).transpose(1, 2)
        for n, d in ((heads, size), (groups, size), (groups, value_size or size))
    )
    return query * 1.5, key * 1.5, value


def base_rotated(query, key, positions, interleaved=False):
    """Query and key (b, h, l, d) rotated by their own positions (b or 1, l)."""
    angles = positions[..., None].float() * torch.tensor(BASE)
    return rotated(query, angles, interleaved), rotated(key, angles, interleaved)


def as_numpy(*tensors):
    """In float64."""
    return [np.asarray(tensor.detach().double()) for tensor in tensors]
