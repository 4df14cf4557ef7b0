"""Published training recipes: their options reach the run, and explicit options take precedence."""

import dataclasses
from importlib import import_module

import pytest
import yaml
from typer.testing import CliRunner

from ctxext.cli.app import app
from ctxext.errors import CtxextError
from ctxext.finetune.options import TrainingOptions, presets


@pytest.fixture
def options_of(monkeypatch):
    """Options that the command passes to a run."""
    given = []
    monkeypatch.setattr(import_module("ctxext.finetune.run"), "finetune", lambda *args, **more: given.append(args[3]))

    def run(*words):
        result = CliRunner().invoke(app, ["finetune", "SOURCE", "OUT", "--data", "demo", *map(str, words)])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return given[-1], result

    return run


PUBLISHED = {
    "read-inside": {"pack": "run-on", "train_norms": True, "num_steps": 64, "strength": 0.5, "length": None},
    "read-twice": {"start_length": None, "method": "yarn", "factor": 2.0, "num_steps": 160},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_values_arrive_in_the_run(options_of, name):
    options, _ = options_of("--preset", name, "--without", "eval")
    assert {key: getattr(options, key) for key in PUBLISHED[name]} == PUBLISHED[name]
    fields = [field.name for field in dataclasses.fields(options)]
    changed = {name for name in fields if getattr(options, name) != getattr(TrainingOptions(), name)}
    assert changed <= {word.replace("-", "_") for word in presets()[name].options}


def test_every_preset_is_listed_with_its_source():
    assert set(presets()) == set(PUBLISHED)
    result = CliRunner().invoke(app, ["finetune", "--preset", "list"])
    assert result.exit_code == 0
    for name, preset in presets().items():
        assert name in result.stdout
        assert preset.source.split()[0] in result.stdout


def test_files_and_the_command_line_override_a_preset(options_of, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"rank": 8, "alpha": 9}))
    for words in (("--preset", "read-inside", "--config", file), ("--config", file, "--preset", "read-inside")):
        options, _ = options_of(*words, "--alpha", "5", "--without", "eval")
        assert (options.rank, options.alpha, options.stages[0]["start_length"]) == (8, 5, 1024)


def test_an_option_of_a_preset_or_a_file_can_be_left_out(options_of, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"rank": 8, "train-norms": True}))
    given = ("--preset", "read-inside", "--config", file)
    back = ("--without", "pack,train_norms,eval", "--without", "rank")
    for words in ((*given, *back), (*back, *given), ("--config", file, *back, "--preset", "read-inside")):
        options, _ = options_of(*words)
        assert (options.pack, options.train_norms, options.rank) == ("off", False, 16)
        assert options.positions == "pose"
    with pytest.raises(CtxextError, match='Unknown option "train-nroms" in "--without"') as refused:
        options_of(*given, "--without", "train-nroms")
    assert refused.value.hint == 'Did you mean "train-norms"?'
