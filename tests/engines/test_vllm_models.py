"""The plugin with a model of vLLM, and a stub of the used parts of vLLM."""

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from ctxext.engines.plugin import BACKEND, HYBRIDS, register
from ctxext.portable import modeling_family  # noqa: F401  # A checkpoint's stub imports it.
from relation_cases import made

ROOT = Path(__file__).parents[2]


class Stock:
    """vLLM's transformers backend, which only creates its attention."""

    def _create_attention_instances(self, prefix=""):
        self.prefixes = [*getattr(self, "prefixes", ()), prefix]


@pytest.fixture
def plugin(monkeypatch):
    """Import `ctxext.engines.vllm_models` as rank `rank` of `ranks`."""
    place = SimpleNamespace(rank=0, ranks=1)
    backend = ModuleType("vllm.model_executor.models.transformers")
    backend.VLLM_ATTN_ATTR = "vllm_attention"
    for name in BACKEND:
        setattr(backend, name, Stock)
    distributed = ModuleType("vllm.distributed")
    distributed.get_tensor_model_parallel_rank = lambda: place.rank
    distributed.get_tensor_model_parallel_world_size = lambda: place.ranks
    models = ModuleType("vllm.model_executor.models")
    models.transformers = backend
    modules = {"vllm": ModuleType("vllm"), "vllm.model_executor": ModuleType("vllm.model_executor")}
    modules |= {module.__name__: module for module in (distributed, models, backend)}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "ctxext.engines.vllm_models", raising=False)
    module = importlib.import_module("ctxext.engines.vllm_models")
    monkeypatch.delitem(sys.modules, "ctxext.engines.vllm_models")
    return SimpleNamespace(module=module, place=place)


class Attention:
    """An engine's attention implementation."""

    def do_kv_cache_update(self):
        """Never called here."""

    def forward(self):
        """Never called here."""


def layer(number, layers=(0, 1)):
    """Create the attention of a decoder layer, with relation maps in some layers, as in a converted model."""
    method = made("self-extend")
    method.settings["layers"] = [*layers]
    part = SimpleNamespace(name="self_attn", layer=number, methods=[method], is_left_to_engine=False)
    attention = SimpleNamespace(vllm_attention=SimpleNamespace(impl=Attention()))
    return SimpleNamespace(ctxext_part=part, self_attn=attention)


def attach(plugin, stock):
    """Attach the maps to a model of vLLM, as its transformers backend does."""
    attention_of = lambda layer: layer.self_attn.vllm_attention  # noqa: E731
    plugin.module.attach_maps(stock, stock.model.modules(), attention_of)


def model(*layers, **changes):
    """Create a model of vLLM with changed parts."""
    rotary = SimpleNamespace(ctxext_layouts={None: ([0], None)}, inv_freq=torch.ones(1))
    parts = {"rotaries": [rotary], "cache_dtype": "auto", "heads": 8, **changes}
    stock = Stock()
    stock.model = SimpleNamespace(modules=lambda: [SimpleNamespace(), *parts["rotaries"], *layers])
    stock.model_config = SimpleNamespace(hf_text_config=SimpleNamespace(num_key_value_heads=parts["heads"]))
    cache = SimpleNamespace(cache_dtype=parts["cache_dtype"])
    stock.vllm_config = SimpleNamespace(cache_config=cache, kv_transfer_config=parts.get("transfer"))
    return stock


@pytest.mark.parametrize(
    ("rank", "ranks", "heads", "first"),
    [(0, 1, 8, 0), (0, 4, 8, 0), (1, 4, 8, 2), (3, 4, 8, 6), (3, 8, 4, 1), (6, 8, 4, 3)],
)
def test_every_rank_begins_with_its_heads(rank, ranks, heads, first, plugin):
    """With more ranks than KV heads, several ranks have the same head."""
    plugin.place.rank, plugin.place.ranks = rank, ranks
    one = layer(0)
    attach(plugin, model(one, heads=heads))
    attention = one.self_attn.vllm_attention.impl
    assert attention.ctxext_rows.first_head == first
    assert isinstance(attention, Attention)
    assert type(attention) is not Attention


@pytest.mark.parametrize(
    ("writes_in_forward", "shares", "transfer", "keeps"),
    [
        (False, None, None, True),
        (True, None, None, False),
        (False, "layers.0", None, False),
        (False, None, "a connector", False),
        (None, None, None, False),  # The time of writing keys is unknown.
    ],
)
def test_rotated_keys_are_stored_if_all_writes_are_observed(writes_in_forward, shares, transfer, keeps, plugin):
    one = layer(0)
    attention = one.self_attn.vllm_attention
    if writes_in_forward is not None:
        attention.attn_backend = SimpleNamespace(forward_includes_kv_cache_update=writes_in_forward)
    attention.kv_sharing_target_layer_name = shares
    attach(plugin, model(one, transfer=transfer))
    assert attention.impl.ctxext_rows.keeps_keys is keeps


def test_layers_that_take_no_part_are_left_alone(plugin):
    acting, other = layer(0, layers=(0,)), layer(1, layers=(0,))
    attach(plugin, model(acting, other))
    kinds = [type(one.self_attn.vllm_attention.impl) is Attention for one in (acting, other)]
    assert kinds == [False, True]
    assert all(one.ctxext_part.is_left_to_engine for one in (acting, other))
    rows = acting.self_attn.vllm_attention.impl.ctxext_rows
    assert (rows.part, rows.methods) == (acting.ctxext_part, acting.ctxext_part.methods)


def test_models_without_relation_maps_are_left_alone(plugin):
    one = layer(0)
    one.ctxext_part.methods = [SimpleNamespace(acts_on=lambda _number: True)]
    attach(plugin, model(one, rotaries=[], cache_dtype="fp8"))
    assert not one.ctxext_part.is_left_to_engine


ROTARY = SimpleNamespace(ctxext_layouts={None: ([0], None)}, inv_freq=torch.ones(1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rotaries": []}, "one rotary embedding"),
        ({"rotaries": [ROTARY, ROTARY]}, "one rotary embedding"),
        ({"rotaries": [SimpleNamespace(ctxext_layouts={"full_attention": ([0], None)})]}, "one rotary embedding"),
        ({"cache_dtype": "fp8"}, "--kv-cache-dtype auto"),
        ({"cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype auto"),
    ],
)
def test_unsupported_models_are_refused(changes, message, plugin):
    with pytest.raises(ValueError, match=message):
        attach(plugin, model(layer(0), **changes))


@pytest.mark.parametrize("dtype", ["auto", "float16", "bfloat16", "float32"])
def test_caches_with_unquantized_keys_are_accepted(dtype, plugin):
    attach(plugin, model(layer(0), cache_dtype=dtype))


@pytest.mark.parametrize("attention", [None, SimpleNamespace(impl=SimpleNamespace())])
def test_an_attention_that_is_not_known_is_refused(attention, plugin):
    one = layer(3)
    one.self_attn.vllm_attention = attention
    with pytest.raises(ValueError, match="the attention of layer 3"):
        attach(plugin, model(one))


def test_layers_are_bound_after_vllm_creates_its_layers(plugin):
    """The registered classes attach the maps."""
    for name in BACKEND:
        one, built = layer(0), getattr(plugin.module, name)()
        vars(built).update(vars(model(one)))
        built._create_attention_instances("language_model")
        assert built.prefixes == ["language_model"]
        assert hasattr(one.self_attn.vllm_attention.impl, "ctxext_rows")


def test_the_plugin_registers_a_class_for_each_name(monkeypatch):
    """A checkpoint with code names its class by the prefix; without it, a model of vLLM stays as it is."""
    registered, configs = {}, {"Qwen3_5ForCausalLM": "settings of its cache"}
    registry = SimpleNamespace(register_model=registered.__setitem__)
    vllm, module = ModuleType("vllm"), ModuleType("vllm.model_executor.models.config")
    vllm.ModelRegistry, module.MODELS_CONFIG_MAP = registry, configs
    modules = [vllm, ModuleType("vllm.model_executor"), ModuleType("vllm.model_executor.models"), module]
    for one in modules:
        monkeypatch.setitem(sys.modules, one.__name__, one)
    register()
    register()
    assert set(registered) == {*BACKEND, *(f"Ctxext{name}" for name in HYBRIDS)}
    assert configs["CtxextQwen3_5ForCausalLM"] == "settings of its cache"
    for target in registered.values():
        place, _, name = target.partition(":")
        source = (ROOT / f"src/{place.replace('.', '/')}.py").read_text()
        assert f"\nclass {name}(" in source
