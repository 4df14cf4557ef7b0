"""Which recipes are compared, and the options of `ctxext convert` that make them."""

import pytest

from ctxext.checkpoint.opening import open_checkpoint
from ctxext.cli.methods import build_recipe
from ctxext.compare.candidates import DEFAULTS, CompareOptions, candidates_of, double_lengths
from ctxext.errors import CtxextError
from ctxext.methods import MsPoE, SelfExtend, Yarn
from ctxext.recipes.recipe import recipe_of


@pytest.fixture(scope="module")
def demo():
    return open_checkpoint("demo")


def test_by_default_the_published_methods_of_its_positions(demo):
    candidates = candidates_of(demo, (), 2048)
    assert [candidate.name for candidate in candidates] == list(DEFAULTS["rotary"])
    assert all(candidate.plan for candidate in candidates)
    assert candidates[0].words == ("--method", "yarn", "--target-length", "2k")
    assert candidates[0].recipe.steps == (Yarn(target_length=2048),)
    assert "mspoe" not in DEFAULTS["rotary"], "it does not reach further"


def test_what_does_not_apply_is_there_with_its_reason(demo):
    yarn, table, inside = candidates_of(demo, ("yarn", "table", "abf"), 2048)
    assert yarn.plan is not None
    assert table.plan is None
    assert "learned" in table.refusal
    assert inside.plan is None
    assert "theta" in inside.refusal
    with pytest.raises(CtxextError, match='No method applies to "demo"'):
        candidates_of(demo, ("table",), 2048)
    with pytest.raises(CtxextError, match='no method "yarm"'):
        candidates_of(demo, ("yarm",), 2048)
    with pytest.raises(CtxextError, match="reserved for the unmodified"):
        candidates_of(demo, {"unmodified": Yarn(factor=2)}, 2048)


def test_presets_files_and_recipes_of_a_user(demo, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("steps:\n- method: yarn\n  beta_fast: 16\n")
    preset, mine = candidates_of(demo, ("mspoe-paper", str(file)), 2048)
    assert (preset.name, preset.words) == ("mspoe-paper", ("--recipe", "mspoe-paper"))
    assert (mine.name, mine.words) == ("mine", ("--recipe", str(file), "--target-length", "2k"))
    assert mine.recipe.steps == (Yarn(target_length=2048, beta_fast=16),)
    (own,) = candidates_of(demo, {"own": Yarn(factor=2, beta_fast=16)}, 2048)
    assert own.words == ("--method", "yarn", "--factor", "2", "--beta-fast", "16"), "its factor stays"


def test_recipes_of_the_same_name_are_all_compared(demo, tmp_path):
    files = [tmp_path / folder / "yarn.yaml" for folder in "ab"]
    for factor, file in enumerate(files, 2):
        file.parent.mkdir()
        file.write_text(f"steps:\n- method: yarn\n  factor: {factor}\n")
    found = candidates_of(demo, (*map(str, files), "yarn", "yarn"), 2048)
    assert [candidate.name for candidate in found] == [*map(str, files), "yarn"]
    assert [candidate.recipe.steps[0].factor for candidate in found] == [2, 3, None]


def test_a_length_that_the_user_states_is_stated_to_convert_too():
    stated = open_checkpoint("demo", original_length=256)
    (yarn,) = candidates_of(stated, ("yarn",), 2048)
    assert yarn.words == ("--method", "yarn", "--target-length", "2k", "--original-length", "256")
    assert yarn.plan.recipe.steps[0].factor == 8


@pytest.mark.parametrize(
    "recipe",
    [
        Yarn(factor=4, truncate=False),
        MsPoE(schedule="by-parts", ratio_max=4, head_order="fixed", first_layer=0),
        [Yarn(factor=4), MsPoE(head_order="prompt")],
        SelfExtend(factor=8),
    ],
    ids=lambda recipe: type(recipe).__name__,
)
def test_the_words_make_the_recipe(demo, recipe):
    """They are read as the command line reads them."""
    (candidate,) = candidates_of(demo, {"one": recipe}, 2048)
    words, methods, options = list(candidate.words), [], {}
    while words:
        flag = words.pop(0)
        if flag == "--method":
            methods.append(words.pop(0))
        elif flag.startswith("--no-"):
            options[flag[5:].replace("-", "_")] = False
        else:
            text = words.pop(0)
            options[flag[2:].replace("-", "_")] = float(text) if text.replace(".", "").isdigit() else text
    assert build_recipe(methods, None, options).steps == recipe_of(recipe).steps


@pytest.mark.parametrize(
    ("family", "names"),
    [("gpt2", ["table-tile", "table-linear"]), ("t5", ["buckets"])],
)
def test_other_encodings_have_their_own_candidates(family, names, tmp_path):
    import tiny_encodings

    source = open_checkpoint(str(tiny_encodings.save(family, tmp_path / family)))
    assert [candidate.name for candidate in candidates_of(source, (), 256)] == names


def test_the_lengths_are_the_doubles_of_the_original():
    assert double_lengths(512, 2048) == (512, 1024, 2048)
    assert double_lengths(512, 1500) == (512, 1024, 1500)
    assert double_lengths(512, 256) == (256,)
    assert double_lengths(None, 4096) == (4096,)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"target_length": 0}, "at least 1"),
        ({"target_length": 64, "minutes": 0}, "minutes must be above 0"),
        ({"target_length": 64, "lengths": (65,)}, "more than the target"),
        ({"target_length": 64, "samples": 0}, "samples must be at least 1"),
        ({"target_length": 64, "minutes": 1, "harness": ("ruler",)}, "cannot be combined with --harness"),
    ],
)
def test_invalid_options_of_a_comparison_are_refused(given, expected):
    with pytest.raises(CtxextError, match=expected):
        CompareOptions(**given)


def test_settings_are_those_of_an_evaluation():
    options = CompareOptions(target_length=2048, tasks=("kv",), samples=3, kv_ids="number")
    settings = options.settings("causal", 512)
    assert (settings.tasks, settings.lengths, settings.samples) == (("kv",), (512, 1024, 2048), 3)
    assert settings.allow_beyond
    assert settings.kv_ids == "number"
    assert CompareOptions(target_length=2048, tasks=("needle",), lengths=(64,)).settings("causal", 512).lengths == (64,)
