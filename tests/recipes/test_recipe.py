"""Recipe files: what is read, and what is refused by name."""

import pytest

from ctxext.api import Recipe, load_recipe
from ctxext.cli.methods import build_recipe
from ctxext.errors import CtxextError
from ctxext.methods import Yarn
from ctxext.recipes.model_config import model_config
from ctxext.recipes.recipe import describe_steps, presets, recipe_from_dict, step_from_dict

YARN = {"method": "yarn", "factor": 4.0}


def test_what_a_recipe_says_of_itself():
    recipe = Recipe((step for step in [Yarn(factor=4)]), "mine", "a paper")
    assert (recipe.steps, recipe.description, recipe.source) == ((Yarn(factor=4),), "mine", "a paper")


def test_what_is_written_is_read_again():
    recipe = Recipe([Yarn(factor=4, beta_fast=24)], "mine", "a paper")
    assert recipe_from_dict(recipe.to_dict(), "x") == recipe
    assert (recipe.to_dict()["description"], recipe.to_dict()["source"]) == ("mine", "a paper")
    assert Recipe([Yarn(factor=4)]).to_dict() == {"steps": [YARN]}
    assert recipe_from_dict({"steps": [YARN]}, "x") == Recipe([Yarn(factor=4)])
    assert Recipe([Yarn(factor=4), Yarn(factor=4)][:1]).summary() == "yarn ×4"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"steps": {"method": "yarn"}}, 'has no list of "steps"'),
        ({"steps": []}, "no steps"),
        ({"steps": [YARN], "step": 1}, 'unknown key "step"'),
        ({"steps": [YARN], 7: 1}, 'unknown key "7"'),
        ({"steps": [[]]}, 'x, step 1: each step needs a "method"'),
        ({"steps": [{"factor": 4}]}, 'each step needs a "method"'),
        ({"steps": [YARN, {"method": "mspo"}]}, 'There is no method "mspo"'),
        ({"steps": [{"method": "yarn", "beta_fas": 1}]}, 'x, step 1: yarn has no parameter "beta_fas"'),
        ({"steps": [{"method": "abf"}]}, "abf needs theta"),
        ({"steps": [{"method": "abf", "theta": None}]}, "abf needs theta"),
        ({"steps": [{"method": "longrope", "factor": 2}]}, "longrope needs long_factor"),
        ({"steps": [{"method": "yarn", "factor": "four"}]}, "must be a finite number"),
        ({"steps": [{"method": "mspoe", "first_layer": "2"}]}, "first_layer must be a finite number"),
    ],
)
def test_what_is_no_recipe(content, message):
    with pytest.raises(CtxextError, match=message):
        recipe_from_dict(content, "x")


@pytest.mark.parametrize(
    ("entry", "hint"),
    [
        ({"method": "mspo"}, 'Did you mean "mspoe"?'),
        ({"method": "YARNN"}, 'Did you mean "yarn"?'),
        ({"method": "yarn", "beta_fas": 1}, 'Did you mean "beta_fast"?'),
        ({"method": "abf"}, "Add --theta …."),
        ({"method": "longrope"}, "Add --long-factor …."),
    ],
)
def test_hints(entry, hint):
    with pytest.raises(CtxextError) as caught:
        step_from_dict(entry, "x")
    assert caught.value.hint == hint


def test_a_hint_lists_all_choices_if_none_is_similar():
    for entry, some in (({"method": "zzz"}, "pi, ntk"), ({"method": "ntk", "zzz": 1}, "factor, target_length")):
        with pytest.raises(CtxextError, match="no") as caught:
            step_from_dict(entry, "x")
        assert some in caught.value.hint


def test_numbers_as_people_write_them():
    assert step_from_dict({"method": "yarn", "target_length": "32k"}, "x").target_length == 32768
    assert step_from_dict({"method": "abf", "theta": "1e6"}, "x").theta == 1e6
    assert step_from_dict({"method": "linear", "factor": 2}, "x").name == "pi"
    assert step_from_dict({"method": "Yarn", "factor": 2}, "x").name == "yarn"
    assert step_from_dict({"method": "yarn", "factor": 2, "beta_fast": None}, "x").beta_fast is None
    assert step_from_dict({"method": "yarn", "target_length": 300}, "x").target_length == 300


def test_the_part_of_a_recipe_that_needs_no_code():
    llama = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    model = model_config({**llama, "max_position_embeddings": 128})
    recipe = Recipe([step_from_dict({"method": name, "factor": 2}, "x") for name in ("yarn", "rerope")])
    stock, whole = recipe.edit(model, with_code=False), recipe.edit(model)
    assert (stock.rotary.rope_type, stock.rotary.context_length, stock.code) == ("yarn", 256, {})
    assert (whole.rotary.context_length, [step["method"] for step in whole.code["steps"]]) == (512, ["rerope"])


@pytest.mark.parametrize(
    ("noted", "kept"),
    [
        (None, {"beta_fast": 24.0}),  # Whoever made it.
        (["yarn"], {"beta_fast": 24.0}),
        (["abf", "yarn"], {"beta_fast": 24.0}),
        (["yarn", "mspoe"], {"beta_fast": 24.0}),
        (["mspoe"], {"beta_fast": 24.0}),
        (["ntk-by-parts"], {}),  # Its ramp without the temperature is another method's.
        (["yarn", "ntk-by-parts"], {}),
    ],
)
def test_inherited_parameters_of_a_replaced_schedule(noted, kept):
    llama = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 128}
    llama["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 24.0}
    if noted is not None:
        llama["ctxext"] = {"recipe": {"steps": [{"method": name} for name in noted]}}
    recipe, inherited = Recipe([Yarn(factor=8)], "mine").take_over(model_config(llama))
    assert inherited == kept
    assert recipe == Recipe([Yarn(factor=8, **kept)], "mine")
    given = Recipe([Yarn(factor=8, beta_fast=16)]).take_over(model_config(llama))
    assert given == (Recipe([Yarn(factor=8, beta_fast=16)]), {})


def test_a_step_in_a_few_words():
    assert describe_steps([YARN]) == "yarn ×4"
    assert describe_steps([{"method": "of tomorrow", "x": 1}]) == "of tomorrow"


def test_files_have_priority_over_presets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "qwen-yarn-x4"
    assert name in presets()
    shipped = load_recipe(name)
    (tmp_path / name).mkdir()
    assert load_recipe(name) == shipped, "a folder of that name is no recipe"
    (tmp_path / name).rmdir()
    (tmp_path / name).write_text("steps: [{method: pi, factor: 2}]")
    assert load_recipe(name).summary() == "pi ×2"
    with pytest.raises(CtxextError, match="There is no recipe file") as caught:
        load_recipe("none.yaml")
    assert name in caught.value.hint


@pytest.mark.parametrize(
    ("written", "given", "left"),
    [
        ("target_length: 2048", {"factor": 4.0}, (4.0, None)),
        ("factor: 4", {"target_length": "2k"}, (None, 2048)),
    ],
)
def test_the_command_line_replaces_the_length_of_the_file(tmp_path, written, given, left):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"steps:\n  - method: yarn\n    {written}\n")
    (step,) = build_recipe((), str(path), given).steps
    assert (step.factor, step.target_length) == left
