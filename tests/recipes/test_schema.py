"""The JSON Schema of recipe files accepts what ctxext loads and writes, and refuses what it refuses."""

import dataclasses
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import jsonschema
import pytest
import yaml

from ctxext.errors import CtxextError
from ctxext.files.json_schema import schema_line
from ctxext.files.strict import parse_yaml
from ctxext.options import is_optional
from ctxext.recipes.param import parameter_of
from ctxext.recipes.recipe import Recipe, presets, recipe_from_dict, step_from_dict
from ctxext.recipes.registry import METHODS
from ctxext.recipes.schema import recipe_schema
from ctxext.version import __version__

ROOT = Path(__file__).parents[2]
CHECKER = jsonschema.Draft7Validator(recipe_schema())
VALUES = [
    *(
        True,
        False,
        0,
        1,
        -1,
        2,
        1.5,
        0.001,
        4.0,
        1e31,
        -1e31,
        "32k",
        "1.5M",
        "32x",
        "k",
        "",
        "pro",
        "prompt",
        "nonsense",
    ),
    *([], [1.0], [1.0, 2.5], ["x"], [[1, 2], [2, 1]], [[1.5]], [[]], {}, {"a": 1}),
]
"""Values of every type, one of which some parameter accepts and another refuses."""


def loads(content) -> bool:
    """Return whether ctxext accepts a recipe file's content."""
    try:
        recipe_from_dict(content, "recipe.yaml")
    except CtxextError:
        return False
    return True


def accepts(content) -> bool:
    return CHECKER.is_valid(content)


def example_of(method) -> dict:
    """Return a step with the method's example and the lists that it requires."""
    required = [field.name for field in dataclasses.fields(method) if field.default is dataclasses.MISSING]
    return {"method": method.name, **{name: [1.0, 2.0] for name in required}, **method.example}


def test_it_is_a_schema():
    jsonschema.Draft7Validator.check_schema(recipe_schema())


@pytest.mark.parametrize("name", sorted(presets()))
def test_presets_are_valid(name):
    content = parse_yaml(presets()[name], name)
    CHECKER.validate(content)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_every_value_that_loads_is_valid_and_no_other(method):
    """Each parameter alone beside the method's example; numbers in quotes are for YAML 1.1, and only load."""
    example = example_of(method)
    for field in dataclasses.fields(method):
        is_measured = parameter_of(field).kind == "length"
        for value in [*VALUES, *([None] if is_optional(method, field.name) else [])]:
            if isinstance(value, str) and not is_measured and value.replace(".", "").isdigit():
                continue
            content = {"steps": [{**example, field.name: value}]}
            if message := rule_between_parameters(content):
                assert accepts(content), message
            else:
                assert accepts(content) == loads(content), content


def rule_between_parameters(content) -> str:
    """Return the error about two parameters, which a schema does not express; empty if there is none."""
    two = ("below", "must be above", "cannot compress", "requires", "needs", "cannot be combined")
    try:
        recipe_from_dict(content, "recipe.yaml")
    except CtxextError as error:
        return error.message if any(words in error.message for words in two) else ""
    return ""


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_written_recipes_are_valid_and_load(method):
    recipe = Recipe(step_from_dict(example_of(method), "x"), "Why", "Whence")
    content = yaml.safe_load(yaml.safe_dump(recipe.to_dict()))
    CHECKER.validate(content)
    assert recipe_from_dict(content, "x") == recipe


@pytest.mark.parametrize(
    "content",
    [
        *({}, [], "yarn", {"steps": []}, {"steps": {}}, {"steps": ["yarn"]}, {"steps": [{}]}),
        {"steps": [{"method": "yran"}]},
        {"steps": [{"factor": 4}]},
        {"steps": [{"method": "yarn", "fator": 4}]},
        {"steps": [{"method": "yarn", "factor": 0.5}]},
        {"steps": [{"method": "mspoe", "factor": 4}]},
        {"steps": [{"method": "abf", "factor": 4}]},
        {"steps": [{"method": "abf", "factor": 4, "theta": None}]},
        {"steps": [{"method": "mspoe", "ratio_min": None}]},
        {"steps": [{"method": "longrope", "factor": 4}]},
        {"step": [{"method": "yarn"}]},
        {"steps": [{"method": "yarn", "factor": 4}], "title": "x"},
    ],
    ids=str,
)
def test_wrong_files_are_refused_by_both(content):
    assert not loads(content)
    assert not accepts(content)


def test_an_alias_and_two_steps_are_valid():
    content = {"steps": [{"method": "linear", "target_length": "32k"}, {"method": "mspoe", "ratio_max": 2}]}
    assert loads(content)
    CHECKER.validate(content)


def test_a_command_prints_it():
    result = subprocess.run(
        [sys.executable, "-m", "ctxext", "methods", "--schema"], capture_output=True, text=True, check=True
    )
    assert json.loads(result.stdout) == recipe_schema()


def test_the_line_for_editors_names_the_file_of_the_repository(monkeypatch):
    class Metadata(dict):
        def get_all(self, key):
            return self.get(key)

    urls = ["Documentation, https://example.org/me/ctxext/tree/v1/docs", "Repository, https://example.org/me/ctxext"]
    monkeypatch.setattr(metadata, "metadata", lambda name: Metadata({"Project-URL": urls}))
    line = schema_line("recipe")
    assert line == (
        f"# yaml-language-server: $schema=https://example.org/me/ctxext/raw/v{__version__}/docs/schemas/recipe.json\n"
    )
    assert (ROOT / line.strip().partition(f"/v{__version__}/")[2]).is_file()
    assert recipe_from_dict(parse_yaml(f"{line}steps: [{{method: yarn, factor: 4}}]", "x"), "x").summary() == "yarn ×4"
    monkeypatch.setattr(metadata, "metadata", lambda name: Metadata())
    assert schema_line("recipe") == ""
