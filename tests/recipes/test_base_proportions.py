"""What follows from the context length L where nobody said it, how far it reaches, and hints that do work."""

import re

import pytest

from ctxext.api import METHODS, Recipe
from ctxext.checkpoint.families import family_of
from ctxext.errors import CtxextError
from ctxext.methods import Yarn
from ctxext.recipes.base import KINDS
from ctxext.recipes.encodings.rotary import Rotary
from ctxext.recipes.methods.adaptive import factors_up_to, slow_by_wavelength
from ctxext.recipes.model_config import model_config
from ctxext.recipes.recipe import step_from_dict
from ctxext.recipes.registry import method_named

PLAIN = {"rope_type": "default"}


def resolved(name, length, **numbers):
    rotary = Rotary(theta=1e4, dim=64, span=64, trained_length=length, context_length=length, parameters=PLAIN)
    return step_from_dict({"method": name, **numbers}, "here").resolve(rotary)


SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("name", "length", "numbers"),
    [
        ("self-extend", 4096, {"window": 512}),
        ("self-extend", 7, {"window": 1}),
        ("bifocal", 4096, {"window": 256}),
        ("bifocal", 15, {"window": 1}),
        ("rerope", 4096, {"window": 1024}),
        ("rerope", 3, {"window": 1}),
        ("sinks", 9, {"sinks": 4, "window": 5}),
        ("sinks", 5, {"sinks": 4, "window": 1}),
        ("sinks", 4096, {"sinks": 4, "window": 4092}),
        ("window", 4096, {"window": 4096}),
        ("dca", 4096, {"chunk_size": 4096, "local": 512}),
    ],
)
def test_proportions(name, length, numbers):
    """An eighth, a sixteenth or a quarter of L as each method's help says."""
    step = resolved(name, length, factor=1.1 if length > 9 else 1)
    assert {key: getattr(step, key) for key in numbers} == numbers


def test_a_chunk_s_overlap_is_an_eighth_of_it():
    assert resolved("dca", 4096, factor=2, chunk_size=80).local == 10
    assert resolved("dca", 4096, factor=2, chunk_size=7).local == 1
    assert resolved("dca", 4096, factor=2, chunk_size=2).local == 1


@pytest.mark.parametrize(
    ("name", "length", "most", "numbers"),
    [
        ("self-extend", 1000, 200 + 800 * 3, {"window": 200, "group": 3}),  # w + (L - w) G
    ],
)
def test_the_longest_context_of_a_map(name, length, most, numbers):
    assert resolved(name, length, factor=most / length, **numbers)
    with pytest.raises(CtxextError, match=f"reach(es)? {most} tokens, not {most + 1}"):
        resolved(name, length, target_length=most + 1, **numbers)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("self-extend", {"window": 99}, {"window": 100}),
        ("bifocal", {"window": 99}, {"window": 100}),
        ("rerope", {"window": 99}, {"window": 100}),
        ("sinks", {"sinks": 4, "window": 96}, {"sinks": 4, "window": 97}),
        ("window", {"window": 100}, {"window": 101}),
        ("dca", {"chunk_size": 100}, {"chunk_size": 101}),
        ("dca", {"chunk_size": 50, "local": 49}, {"chunk_size": 50, "local": 50}),
    ],
)
def test_what_leaves_nothing_is_refused(name, good, bad):
    resolved(name, 100, **{"target_length": 110, **good})
    with pytest.raises(CtxextError):
        resolved(name, 100, **{"target_length": 110, **bad})


@pytest.mark.parametrize(
    ("name", "length", "numbers"),
    [
        ("self-extend", 1000, {"window": 200, "group": 3, "target_length": 2601}),
        ("self-extend", 1000, {"window": 200, "group": 3, "target_length": 4200}),
        ("sinks", 1000, {"sinks": 4, "window": 1000, "factor": 2}),
        ("window", 1000, {"window": 1001, "factor": 2}),
        ("rerope", 1000, {"window": 1001, "factor": 2}),
        ("dca", 1000, {"chunk_size": 2000, "factor": 2}),
        ("dca", 1000, {"chunk_size": 90, "local": 100, "factor": 2}),
        ("pi", 1000, {}),
        ("pi", 1000, {"target_length": 1000}),
        ("rerope", 1000, {}),
        ("rerope", 1000, {"target_length": 999}),
    ],
)
def test_a_hint_s_numbers_work(name, length, numbers):
    with pytest.raises(CtxextError) as caught:
        resolved(name, length, **numbers)
    option, value = re.findall(r"--([a-z-]+) (\d+)", caught.value.hint)[-1]
    resolved(name, length, **{**numbers, option.replace("-", "_"): int(value)})
    if option == "group":  # The smallest that does.
        with pytest.raises(CtxextError):
            resolved(name, length, **{**numbers, "group": int(value) - 1})


def test_factor_and_length():
    assert resolved("rerope", 1000, target_length=4000).factor == 4
    assert resolved("rerope", 1000, target_length=1000).factor == 1
    assert resolved("rerope", 1000, target_length=2500, factor=2.5).factor == 2.5
    assert resolved("pi", 1000, target_length=4000) == resolved("pi", 1000, factor=4, target_length=4000)
    assert resolved("pi", 1000, target_length=1001).factor == 1.001
    with pytest.raises(CtxextError, match="disagree"):
        resolved("rerope", 1000, target_length=2501, factor=2.5)
    with pytest.raises(CtxextError, match="is below the current context length"):
        resolved("rerope", 1000, target_length=999)


LLAMA = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
LLAMA |= {"max_position_embeddings": 128}


def test_the_settings_of_a_map():
    step = step_from_dict({"method": "self-extend", "target_length": 512, "temperature": "logn"}, "here")
    assert step.settings(model_config(dict(LLAMA))) == {
        "layers": [0, 1],
        "original_length": 128,
        "target_length": 512,
        "temperature": "logn",
        "window": 16,
    }
    windowed = {**LLAMA, "model_type": "mistral", "sliding_window": 8}
    with pytest.raises(CtxextError, match="has a sliding window, which self-extend would not widen"):
        step.settings(model_config(windowed))


@pytest.mark.parametrize("name", ["self-extend", "distance-aware"])
def test_a_family_with_unsupported_attention(name):
    """Others in test_steps."""
    config = {"model_type": "falcon", "num_hidden_layers": 2}
    assert method_named(name).refusal(config, family_of(config)).startswith("its attention does not use")


def recipe(*names):
    numbers = {"abf": {"theta": 1e6, "factor": 2}, "mspoe": {}, "distance-aware": {}}
    return Recipe([step_from_dict({"method": name, **numbers.get(name, {"factor": 2})}, "here") for name in names])


@pytest.mark.parametrize(
    "names", [("abf", "yarn"), ("yarn", "mspoe"), ("mspoe", "self-extend"), ("abf", "pi", "rerope")]
)
def test_steps_that_can_be_combined(names):
    assert [step.name for step in recipe(*names).steps] == list(names)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("yarn", "pi"), "twice"),
        (("self-extend", "rerope"), "twice"),
        (("abf", "abf"), "named twice"),
        (("mspoe", "yarn"), "must come after"),
        (("abf", "mspoe", "yarn"), "must come after"),
    ],
)
def test_steps_that_do_not(names, message):
    with pytest.raises(CtxextError, match=message):
        recipe(*names)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("abf", "yarn"), {"changes_frequencies", "replaces_encoding"}),
        (("abf",), {"changes_frequencies", "replaces_encoding"}),
        (("yarn", "mspoe"), {"needs_code", "changes_frequencies", "replaces_encoding"}),
        (("mspoe",), {"needs_code"}),
        (("table",), {"replaces_encoding", "rewrites_weights"}),
        (("range",), {"replaces_encoding", "rewrites_weights"}),
        (
            ("yarn", "distance-aware"),
            {"needs_code", "changes_frequencies", "replaces_encoding", "rewrites_weights"},
        ),
        (("ntk-alibi",), {"needs_code"}),
        (("buckets",), {"replaces_encoding"}),
    ],
)
def test_what_a_recipe_says_of_itself(names, said):
    every = ("needs_code", "changes_frequencies", "replaces_encoding", "rewrites_weights")
    assert {name for name in every if getattr(recipe(*names), name)} == said


def test_every_method_has_a_place():
    assert {method.kind for method in METHODS} == set(KINDS)


def test_only_mspoe_may_choose_by_the_prompt():
    for method in METHODS:
        if method.needs_code() and method.name != "mspoe":
            step = method(**method.example)
            assert (step.depends_on_prompt, step.is_trainable) == (False, True)


@pytest.mark.parametrize(
    ("factor", "wanted"),
    [(1, [1]), (1.5, [1.5]), (2, [2]), (8, [2, 4, 8]), (9, [2, 4, 8, 9]), (16, [2, 4, 8, 16]), (2.5, [2, 2.5])],
)
def test_levels_double_up_to_the_factor(factor, wanted):
    assert factors_up_to(factor) == wanted


def test_a_frequency_is_slowed_as_a_plain_one_of_its_wavelength():
    plain, slowed = [1.0, 0.1, 0.01], [1.0, 0.05, 0.0025]
    assert slow_by_wavelength(plain, plain, slowed) == pytest.approx(slowed)
    # Half of the way between two frequencies, on a logarithmic scale, half of what becomes of both.
    assert slow_by_wavelength([10**-0.5, 10**-1.5], plain, slowed) == pytest.approx([10**-0.5 * 0.75, 10**-1.5 * 0.375])
    # Beyond either end as at the end.
    assert slow_by_wavelength([2.0, 0.001], plain, slowed) == pytest.approx([2.0, 0.00025])


@pytest.mark.parametrize(("length", "factor", "reach"), [(512, 1.3, 666), (512, 1.1, 563), (4096, 2.3, 9421)])
def test_the_new_context_length_is_rounded(length, factor, reach):
    rotary = model_config({"model_type": "llama", "max_position_embeddings": length, **SIZES}).rotary
    assert Yarn(factor=factor).resolve(rotary).length_after(rotary) == reach
