"""The JSON Schema of option files accepts what `--config` takes and what runs write, and refuses what it refuses."""

import json

import jsonschema
import pytest
import typer
import yaml
from typer.testing import CliRunner

from ctxext.cli.app import app
from ctxext.cli.option_files import options_schema, used_options
from ctxext.cli.options import build_options
from ctxext.errors import CtxextError
from ctxext.finetune.options import TrainingOptions, presets

COMMAND = typer.main.get_command(app).commands["finetune"]
CHECKER = jsonschema.Draft7Validator(options_schema(COMMAND))
VALUES = [True, 0, -1, 1, 400, 1.5, 0.25, 2e10, "32k", "32x", "cosine", "run-on", "nonsense", ["a", "b"], [1], {}]


def context_of(content, folder):
    """Return the parsed command line with a file of options; raise if the file is refused."""
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(content))
    return COMMAND.make_context("finetune", ["demo", "out", "--config", str(file)])


RULES = ("needs --", "cannot be combined", "is not a multiple of")
"""Words of errors about two options, which a schema does not express."""


def loads(content, folder) -> bool:
    """Return whether the command accepts a file of options, apart from rules between them."""
    try:
        build_options(TrainingOptions, context_of(content, folder).params)
    except CtxextError as error:
        return any(words in error.message for words in RULES)
    except typer.BadParameter:
        return False
    return True


def test_presets_are_valid():
    jsonschema.Draft7Validator.check_schema(CHECKER.schema)
    for preset in presets().values():
        CHECKER.validate(dict(preset.options))


def test_what_is_valid_loads(tmp_path):
    """The command line also takes numbers as text, so not all that loads is valid."""
    num_valid = 0
    for name in CHECKER.schema["properties"]:
        for value in [*VALUES, None]:
            if CHECKER.is_valid({name: value}):
                num_valid += 1
                assert loads({name: value}, tmp_path), (name, value)
    assert num_valid > len(CHECKER.schema["properties"])


@pytest.mark.parametrize(
    "content",
    [
        *({"stpes": 3}, {"quiet": True}, {"token": "x"}, {"schema": True}, {"steps": 0}, {"steps": "many"}),
        *({"steps": 10**8}, {"length": "32x"}, {"length": 0}, {"dropout": 1.0}, {"epochs": 0}, {"schedule": "step"}),
        *({"seed": -1}, {"full": "perhaps"}),
    ],
    ids=str,
)
def test_wrong_files_are_refused_by_both(content, tmp_path):
    assert not loads(content, tmp_path)
    assert not CHECKER.is_valid(content)


def test_what_a_run_writes_is_valid(tmp_path):
    """Also with an option that may be repeated, a list of names and a length."""
    given = {"data": ["a.jsonl:2", "b"], "targets": "q_proj,v_proj", "length": "2k", "merge": False, "epochs": 2}
    context = context_of(given, tmp_path)
    content = yaml.safe_load(used_options(context))
    CHECKER.validate(content)
    assert content["targets"] == "q_proj,v_proj"
    assert used_options(context_of(content, tmp_path)) == used_options(context)


def test_the_command_prints_it():
    result = CliRunner().invoke(app, ["finetune", "--schema"])
    assert json.loads(result.stdout) == CHECKER.schema
