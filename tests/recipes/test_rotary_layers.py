"""Layers with values of their own: none becomes that of another, by what each layer of the loaded class rotates by."""

import dataclasses
import json
import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

import tiny_models
from ctxext.api import Recipe
from ctxext.checkpoint.families import FAMILIES, INNER, family_of, full_attention_layers, read
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.converters.convert import check_frequencies, convert
from ctxext.converters.plan import make_plan
from ctxext.errors import CtxextError
from ctxext.methods import Ntk, Yarn
from ctxext.recipes.methods.distance_aware import num_heads
from ctxext.recipes.model_config import model_config
from ctxext.recipes.registry import method_named
from ctxext.verify.references import REFERENCES
from ctxext.verify.run import failures, verify
from small_llama import change_json, read_json

pytestmark = pytest.mark.skipif(
    "granite_swa" not in tiny_models.FAMILIES, reason="this transformers lacks these families"
)

FULL, SLIDING = "full_attention", "sliding_attention"
GRANITE = {"num_hidden_layers": 4, "layer_types": [FULL, SLIDING, SLIDING, FULL], "sliding_window": 16}
STEPS = [Yarn(factor=4), Ntk(factor=4), method_named("pi")(factor=4), method_named("abf")(theta=2e6, factor=4)]


def frequencies_of_layers(config):
    """The inverse frequencies and the factor on cos and sin in each layer of the class of a configuration."""
    config = json.loads(json.dumps(config))
    kind = AutoConfig.for_model(**config)
    auto = AutoModelForMaskedLM if config["model_type"] in tiny_models.ENCODERS else AutoModelForCausalLM
    torch.manual_seed(0)
    model, seen = auto.from_config(kind, dtype=torch.float32, attn_implementation="eager").eval(), {}

    def see(number):
        def hook(_, args, kwargs):
            given = kwargs.get("position_embeddings", next((arg for arg in args if isinstance(arg, tuple)), None))
            if given is None:
                seen[number] = None
                return
            table = torch.complex(*(part.double() for part in given)) if isinstance(given, tuple) else given
            row = table.reshape(-1, table.shape[-2] if isinstance(given, tuple) else table.shape[1], table.shape[-1])
            angles = row[0, 1].angle()
            seen[number] = sorted(set(angles.tolist()), reverse=True), float(row[0, 1].abs().max())

        return hook

    layers = next(m for n, m in model.named_modules() if n.rpartition(".")[2] == "layers")
    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(see(number), with_kwargs=True)
    with torch.no_grad():
        model(torch.arange(5, 9)[None])
    return [seen[number] for number in range(len(layers))]


def expected(step, model, base, length):
    """The frequencies of a method by its reference, from a base."""
    rotary = model.rotary
    facts = {"theta": base, "dim": rotary.dim, "span": rotary.span, "length": rotary.trained_length}
    if step.kind == "schedule":
        return REFERENCES[step.name].schedule(step.to_dict(), facts, length)
    base = REFERENCES[step.name].base(step.to_dict(), facts)
    return [base ** (-2 * i / rotary.span) for i in range(rotary.dim // 2)], 1.0


def assert_close(actual, frequencies, scaling):
    found, factor = actual
    wanted = sorted({f for f in frequencies if f}, reverse=True)
    found = [f for f in found if f]
    assert len(found) == len(wanted)
    assert all(math.isclose(one, two, rel_tol=2e-5) for one, two in zip(found, wanted, strict=True))
    assert math.isclose(factor, scaling, rel_tol=1e-5)


@pytest.fixture(scope="module")
def granite(tmp_path_factory):
    folder = tmp_path_factory.mktemp("granite")
    place = tiny_models.save("granite_swa", folder / "source")
    return read_json(place / "config.json"), folder


def source_of(granite, model_type="granite_swa", **keys):
    config, folder = granite
    place = folder / f"{model_type}-{abs(hash(json.dumps(keys)))}"
    if not place.exists():
        kind = AutoConfig.for_model(**{**config, **GRANITE, "model_type": model_type, "layer_rope_theta": None, **keys})
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(kind).save_pretrained(place)
    return place


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
@pytest.mark.parametrize("model_type", ["granite_swa", "granitemoe_swa"])
@pytest.mark.parametrize(
    "bases",
    [[5e5, 1e4, 1e4, 5e5], [5e5, 1e4, 2e4, 5e5], [0, 1e4, 1e4, 2e4], [1e4, 2e4, 1e4, 1e4], [0, 0, 3e4, 5e5]],
    ids=str,
)
def test_each_layer_from_its_own_base(granite, step, model_type, bases):
    """The layers with full attention follow the method, and the others their source or, with a schedule, the method."""
    source = open_checkpoint(str(source_of(granite, model_type, layer_rope_theta=bases)))
    plan = make_plan(source, Recipe([step]))
    assert check_frequencies(plan).difference < 2e-5
    before, after = frequencies_of_layers(source.config), frequencies_of_layers(plan.model.config)
    length = plan.encoding.usable_length
    for layer, base in enumerate(bases):
        if not base:
            assert before[layer] is after[layer] is None
        elif layer in full_attention_layers(source.config, plan.model.family):
            assert_close(after[layer], *expected(plan.recipe.steps[0], plan.start, base, length))
        elif step.name in ("yarn", "pi"):  # Its class has one schedule for all layers.
            assert_close(after[layer], *expected(plan.recipe.steps[0], plan.start, base, length))
            assert any("sliding-window layers" in caution for caution in plan.cautions)
        else:
            assert after[layer] == before[layer]


@pytest.mark.parametrize("method", ["yarn", "ntk", "abf", "self-extend", "mspoe", "adaptive"])
@pytest.mark.parametrize("model_type", ["granite_swa", "granitemoe_swa"])
def test_full_layers_with_several_bases_are_refused(granite, method, model_type):
    source = open_checkpoint(str(source_of(granite, model_type, layer_rope_theta=[1e4, 1e4, 1e4, 5e5])))
    with pytest.raises(CtxextError, match=r'different values of "layer_rope_theta" \(10000\.0, 500000\.0\)'):
        make_plan(source, Recipe([method_named(method)(**method_named(method).example)]))


@pytest.mark.parametrize("method", ["self-extend", "mspoe"])
@pytest.mark.thorough
def test_code_beside_sliding_layers_of_another_base(granite, method, tmp_path):
    """The top-level base belongs to no layer."""
    source = source_of(granite, layer_rope_theta=[5e5, 1e4, 1e4, 5e5])
    numbers = {"first_layer": 0, "head_order": "fixed"} if method == "mspoe" else {"factor": 4}
    convert(str(source), tmp_path / "out", Recipe([method_named(method)(**numbers)]))


@pytest.mark.thorough
def test_verified_beside_sliding_layers_of_another_base(granite, tmp_path):
    source = source_of(granite, layer_rope_theta=[5e5, 1e4, 1e4, 5e5])
    convert(str(source), tmp_path / "out", Recipe([Yarn(factor=4)]))
    assert read_json(tmp_path / "out" / "config.json")["layer_rope_theta"] == [5e5, 1e4, 1e4, 5e5]
    findings = verify(tmp_path / "out", against=source)
    assert not failures(findings)


BUILT = [*tiny_models.FAMILIES, *tiny_models.ENCODERS]
NESTED = [name for name in BUILT if FAMILIES[name].nested_rope and not FAMILIES[name].reason]


@pytest.mark.parametrize("name", NESTED)
def test_each_layer_type_keeps_its_own_entry(name, tmp_path):
    """Bases that differ by layer type: full attention follows the method, and sliding layers are bit-identical."""
    place = tiny_models.save(name, tmp_path / "source")
    config = read_json(place / "config.json")
    family = family_of(config)
    text = config.get(family.text_config or "", config)
    for number, key in enumerate((*family.full_types, *family.sliding_types)):
        if key in text["rope_parameters"]:
            text["rope_parameters"][key]["rope_theta"] = (3e4, 7e3)[number]
    change_json(place / "config.json", **config)
    source = open_checkpoint(str(place))
    plan = make_plan(source, Recipe([Ntk(factor=4)]))
    assert check_frequencies(plan).difference < 2e-5
    after = json.loads(json.dumps(plan.model.config))
    rope = (after.get(family.text_config or "") or after)["rope_parameters"]
    assert read(source.config, family, "rope_theta") == 3e4
    for key in family.sliding_types:
        if key in text["rope_parameters"]:
            assert rope[key] == text["rope_parameters"][key]
    assert rope[family.full_types[0]]["rope_theta"] == plan.model.rotary.theta != 3e4


def test_a_size_of_single_layers_is_that_of_all_or_refused(tmp_path):
    """Gemma 4's layers may have sizes of their own; transformers accepts one per layer type."""
    place = tiny_models.save("gemma4_text", tmp_path / "source")
    config = {**read_json(place / "config.json"), "num_hidden_layers": 3, "layer_types": [FULL, SLIDING, FULL]}
    for first, last, size in ((32, 32, 32), (8, None, None), (16, 8, None), (None, None, 16)):
        own = {"0": {"head_dim": first}, "2": {"head_dim": last}}
        config["per_layer_config"] = {key: entry for key, entry in own.items() if entry["head_dim"]}
        config["head_dim"], family = 16, family_of({**config, "head_dim": 16, "global_head_dim": 16})
        if size is None:
            assert 'different values of "head_dim"' in family.reason
        else:
            assert read({**config, "global_head_dim": 16}, family, "head_dim") == size


def test_heads_of_single_layers():
    """Laguna has a number of heads per layer: that of the layers that a method changes, not that of the first."""
    config = {"model_type": "laguna", "num_hidden_layers": 3, "layer_types": [SLIDING, FULL, FULL]}
    config |= {"hidden_size": 64, "num_attention_heads": 4, "num_attention_heads_per_layer": [4, 8, 8]}
    family = family_of(config)
    assert num_heads(config, family) == 8
    with pytest.raises(CtxextError, match="different values"):
        num_heads({**config, "num_attention_heads_per_layer": [4, 8, 4]}, family)


def test_every_schedule_has_one_entry_for_full_attention():
    """What `read` takes of several entries is always the only one."""
    families = [*FAMILIES.values(), *INNER.values()]
    assert {len(family.full_types) for family in families} == {len(family.sliding_types) for family in families} == {1}
    assert dataclasses.is_dataclass(model_config({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 2}))
