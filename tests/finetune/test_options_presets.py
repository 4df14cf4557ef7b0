"""Published training recipes: their options reach the run, and explicit options take precedence."""

import json
from importlib import import_module

import pytest
import yaml
from typer.testing import CliRunner

from ctxext.cli.app import app
from ctxext.errors import CtxextError
from ctxext.finetune.options import TrainingOptions, presets
from tiny_base import arguments_of


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
    "read-inside": {"start_length": 1024, "train_norms": True, "rate_floor": 0.1, "length": None},
    "read-twice": {"start_length": None, "steps": 68, "rate_floor": 0.3},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_values_arrive_in_the_run(options_of, name):
    options, result = options_of("--preset", name)
    assert {key: getattr(options, key) for key in PUBLISHED[name]} == PUBLISHED[name]
    changed = {key for key, value in vars(options).items() if value != getattr(TrainingOptions(), key)}
    assert changed <= {word.replace("-", "_") for word in presets()[name].options}
    note = f"Preset {name} expects a model created by: ctxext convert SOURCE BASE"
    assert (note in result.stderr) == (name != "read-inside")


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
        options, _ = options_of(*words, "--alpha", "5")
        assert (options.rank, options.alpha, options.start_length) == (8, 5, 1024)


def test_an_option_of_a_preset_or_a_file_can_be_left_out(options_of, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"rank": 8, "train-norms": True}))
    given = ("--preset", "read-inside", "--config", file)
    back = ("--without", "start-length,train_norms", "--without", "rank")
    for words in ((*given, *back), (*back, *given), ("--config", file, *back, "--preset", "read-inside")):
        options, _ = options_of(*words)
        assert (options.start_length, options.train_norms, options.rank) == (None, False, 16)
        assert options.positions == "pose"
    with pytest.raises(CtxextError, match='Unknown option "start-lenght" in "--without"') as refused:
        options_of(*given, "--without", "start-lenght")
    assert refused.value.hint == 'Did you mean "start-length"?'


def test_the_rate_ends_at_its_floor(tmp_path):
    import torch
    from transformers import get_scheduler

    arguments = arguments_of(tmp_path, length=8, steps=50, rate_floor=0.1, learning_rate=1e-5, warmup=0.1)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=arguments.learning_rate)
    kwargs = arguments.lr_scheduler_kwargs
    kwargs = json.loads(kwargs) if isinstance(kwargs, str) else kwargs
    scheduler = get_scheduler(arguments.lr_scheduler_type, optimizer, 5, 50, scheduler_specific_kwargs=kwargs)
    rates = []
    for _ in range(50):
        optimizer.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    assert max(rates) == pytest.approx(1e-5)
    assert rates[-1] == pytest.approx(1e-6)
