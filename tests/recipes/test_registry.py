"""What the methods declare: numbers where nobody said one, what a command offers, where a search starts."""

import dataclasses
import json
import typing

import pytest

from ctxext.api import METHODS, Recipe
from ctxext.checkpoint.families import FAMILIES
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.cli.methods import method_parameters
from ctxext.converters.plan import make_plan
from ctxext.errors import CtxextError
from ctxext.recipes.encodings.rotary import Rotary
from ctxext.recipes.param import default_of, parameters_of, search_ranges, search_start
from ctxext.recipes.recipe import step_from_dict
from ctxext.recipes.registry import method_named
from ctxext.verify.rotation import reference_of

OF_ENCODING = {
    "rotary": "llama",
    "learned": "gpt2",
    "sinusoidal": "marian",
    "alibi": "bloom",
    "buckets": "t5",
    "memory": "xlnet",
    "none": "cohere2",
}
"""A family with each encoding."""

ROTARY = Rotary(theta=1e4, dim=2, span=2, trained_length=64, context_length=64, parameters={})
RAMP = {"beta_fast": 32, "beta_slow": 1}
# Of methods whose papers or makers give the numbers; those of others stand in docs/methods.md.
DEFAULTS = {
    "pi": {},
    "ntk": {},
    "abf": {},
    "ntk-by-parts": {**RAMP, "truncate": True},  # Peng et al., section 3.2: α = 1 and β = 32.
    "yarn": {**RAMP, "truncate": True},
    "llama3": {"low_freq_factor": 1, "high_freq_factor": 4},  # Llama 3.1's config.json.
    "longrope": {},
    "mrrope": {**RAMP, "variant": "pro"},
    "dynamic": {},
    "mspoe": {
        **{"ratio_min": 1.2, "ratio_max": 1.8, "first_layer": 2, "variant": "paper"},  # Zhang et al., section 3.
        **{"head_order": "calibrated", "schedule": "ntk", "ramp_fast": 8, "ramp_slow": 1, "rescale": "uniform"},
    },
    "self-extend": {"temperature": "none"},
    "bifocal": {"temperature": "none"},
    "dca": {"temperature": "none"},
    "rerope": {"temperature": "none"},
    "adaptive": {"temperature": "none", "around": "yarn"},
    "sinks": {"temperature": "none", "sinks": 4},  # Xiao et al., section 3.2.
    "window": {"temperature": "none"},
    "distance-aware": {},
    "table": {"fill": "tile"},
    "range": {},
    "ntk-alibi": {"rows": "row-wise"},
    "buckets": {},
    "memory": {},
}


def family(method):
    return FAMILIES[OF_ENCODING[method.encoding]]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_every_method_has_a_family_a_default_step_and_a_reference(method):
    assert not method.refusal({"model_type": family(method).model_type, "num_hidden_layers": 2}, family(method))
    needed = {field.name for field in parameters_of(method) if field.default is dataclasses.MISSING}
    given = method.example_step(ROTARY if method.encoding == "rotary" else None).to_dict()
    step = step_from_dict({"method": method.name, **{name: given[name] for name in needed}}, "x")
    assert step.summary().startswith(method.name)
    assert reference_of(method)


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_of_each_method(name):
    method = method_named(name)
    defaults = {field.name: default_of(field) for field in parameters_of(method)}
    said = {name: value for name, value in defaults.items() if value not in (None, dataclasses.MISSING)}
    assert said == DEFAULTS[name]


def test_what_is_measured_or_learned_is_no_option():
    method = method_named("mspoe")
    assert method().summary() == "mspoe 1.2–1.8 ntk (calibrated order)"
    measured = {field.name for field in dataclasses.fields(method)} - {field.name for field in parameters_of(method)}
    assert measured == {"ranks"}


def test_methods_with_published_defaults():
    """From there a search starts; the others follow from L, a list or a guess."""
    published = {
        "pi",
        "ntk",
        "abf",
        "ntk-by-parts",
        "yarn",
        "llama3",
        "mrrope",
        "dynamic",
        "mspoe",
    }
    for name in DEFAULTS:
        assert method_named(name).is_published == (name in published), name


def test_a_search_may_omit_optional_parameters():
    ranges = search_ranges(method_named("yarn"))
    assert {name: (tried.values, tried.start, tried.optional) for name, tried in ranges.items()} == {
        "beta_fast": ((8, 64), 32, False),
        "beta_slow": ((0.5, 4), 1, False),
        "attention_factor": ((1.0, 1.6), None, True),
    }
    assert search_start(method_named("abf"), "theta") == 5e5


def test_help_of_an_option_of_several_methods_names_each_meaning():
    helps = {parameter.name: typing.get_args(parameter.annotation)[1].help for parameter in method_parameters()}
    assert "mrrope: Growth of the divisors" in helps["variant"]
    assert "mspoe: The method as the paper describes it" in helps["variant"]
    assert helps["beta_fast"].startswith("Dimensions"), "one meaning for all its methods"
    assert helps["sinks"].startswith("sinks: "), "experimental methods share a panel"


OTHERS = {
    "llama": {"max_position_embeddings": 512, "num_attention_heads": 4, "hidden_size": 32, "num_hidden_layers": 2},
    "bert": {"max_position_embeddings": 512},
    "xlnet": {"mem_len": 512},
}


@pytest.mark.parametrize("model_type", OTHERS)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_method_for_another_encoding_is_refused_by_name(method, model_type, tmp_path):
    """With its example values, before weights are read: the folder has none."""
    if method.encoding == FAMILIES[model_type].positions:
        return
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **OTHERS[model_type]}))
    values = {"factor": 2, **method.example} if hasattr(method, "factor") else method.example
    values = {**values, "long_factor": (2.0,) * 4} if method.name == "longrope" else values
    with pytest.raises(CtxextError, match=f'"{model_type}"'):
        make_plan(open_checkpoint(str(tmp_path)), Recipe([method(**values)]))
