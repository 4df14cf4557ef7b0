"""Stages of a run: their options, learning rates, data and saves, and the conversion that comes first."""

import json
from itertools import accumulate

import pytest
import torch
from safetensors.torch import load_file
from transformers import get_scheduler

from ctxext.api import TrainingOptions, convert, verify
from ctxext.errors import CtxextError
from ctxext.finetune import prepare, step_costs, trainer
from ctxext.finetune.base import open_model
from ctxext.finetune.documents import Document, TrainingData
from ctxext.finetune.dry_run import plan_training
from ctxext.finetune.options import presets
from ctxext.finetune.run import make_readers, training_folder
from ctxext.methods import Yarn
from tiny_base import Stopped, change, documents, save_llama, stop_after, tune

STAGES = [
    {"steps": 3, "window": 24, "learning-rate": 5e-3, "warmup": 0.4},
    {"steps": 2, "window": 32, "learning-rate": 2e-3, "rate-floor": 0.5, "checkpointing": True},
    {"steps": 3, "window": 24, "learning-rate": 1e-3},
]
COMMON = {"positions": "pose", "batch_size": 1, "rank": 4, "save_every": 2}


def staged(**changes):
    return TrainingOptions(**{**COMMON, "stages": STAGES, **changes})


def adapter(out):
    return load_file(out / "adapter" / "adapter_model.safetensors")


def test_stages_are_read_from_lists_and_json():
    one, two = staged(), staged(stages=json.dumps(STAGES))
    assert one == two
    assert one.num_steps == 8
    assert [stage.window for stage in one.each_stage] == [24, 32, 24]
    assert [stage.seed for stage in one.each_stage] == [0, 1, 2]
    resolved = one.resolve(window=64, trained_length=32)
    assert resolved == resolved.resolve(window=64, trained_length=32)
    assert (resolved.sequence_length, resolved.peak_rate) == (32, 5e-3)
    assert [resolved.length_of_step(step) for step in range(8)] == [24] * 3 + [32] * 2 + [24] * 3
    assert staged(stages=[{"steps": 1, "window": "1k"}]).each_stage[0].window == 1024
    assert change().each_stage == (change(),), "a run without stages is one stage"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": "3"}, "--stages is not a list of stages"),
        ({"stages": [3]}, "--stages is not a list of stages"),
        ({"stages": "[{"}, "--stages"),
        ({"stages": [{"steps": 2, "windwo": 3}]}, 'Unknown option "windwo" in --stages'),
        ({"stages": [{"steps": 2, "rank": 3}]}, 'Unknown option "rank" in --stages'),
        ({"stages": [{"window": 3}]}, 'A stage has no "steps"'),
        ({"stages": [{"steps": True}]}, '"True" is not a value of steps'),
        ({"stages": [{"steps": 1, "checkpointing": 1}]}, '"1" is not a value of checkpointing'),
        ({"stages": [{"steps": 1, "learning-rate": -1}]}, "--learning-rate must be above 0"),
        ({"learning_rate": 1e-3}, "--learning-rate is set by the stages"),
        ({"window": 16}, "--window is set by the stages"),
        ({"epochs": 1.0}, "--epochs cannot be combined with stages"),
        ({"keep_short": True}, "--keep-short cannot be combined with stages"),
        ({"factor": 2.0}, "--factor needs --method"),
    ],
)
def test_wrong_stages_are_refused(changes, message):
    with pytest.raises(CtxextError, match=message):
        staged(**changes)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_share_of_questions_beside_those_of_the_stages_is_refused(share):
    options = staged(stages=[{"steps": 1, "questions": 0.85}, {"steps": 1}])
    with pytest.raises(CtxextError, match="--questions is set by the stages"):
        make_readers(TrainingData(records=({"text": "A text."},), questions=share), options)
    readers = make_readers(TrainingData(records=({"text": "A text."},)), options)
    assert [reader.args[0].questions for reader in readers] == [0.85, None]


def test_a_method_without_a_factor_is_refused_with_the_command_that_converts_first():
    options = staged(method="mspoe", factor=2.0)
    with pytest.raises(CtxextError, match="--method mspoe does not extend the context") as raised:
        open_model("demo", options, None, None)
    assert "ctxext convert demo BASE --method yarn --factor 2 --method mspoe" in raised.value.hint


@pytest.mark.parametrize(("steps", "shares"), [(16, [6, 4, 6]), (8, [3, 2, 3]), (4, [2, 1, 1]), (1, [1, 1, 1])])
def test_a_number_of_steps_is_shared_by_the_stages(steps, shares):
    assert [stage.steps for stage in staged(steps=steps).each_stage] == shares


def test_stages_are_adapted_to_the_size_of_the_model():
    """By hand: a quarter of the length, and 2 ** -0.775 = 0.584 of the rate for twice the width."""
    stages = [{"steps": 1, "window": "2k", "start-length": 512, "learning-rate": 1e-3}, {"steps": 1, "window": "8k"}]
    options = staged(stages=stages, stages_length="8k", stages_width=576)
    smaller = options.resolve(window=4096, trained_length=2048, width=1152).each_stage
    assert [(stage.window, stage.start_length) for stage in smaller] == [(512, 128), (2048, None)]
    assert [stage.learning_rate for stage in smaller] == [5.8e-4, 2e-4], "the default is for all sizes"
    larger = options.resolve(window=65536, trained_length=32768, width=288).each_stage
    assert [stage.window for stage in larger] == [2048, 8192], "longer windows are not needed"
    assert larger[0].learning_rate == 1.7e-3
    odd = staged(stages=[{"steps": 1, "learning-rate": 1.234e-3}]).resolve(window=64, trained_length=32, width=8)
    assert odd.peak_rate == 1.234e-3
    same = options.resolve(window=16384, trained_length=8192, width=576).each_stage
    assert [(stage.window, stage.learning_rate) for stage in same] == [(2048, 1e-3), (8192, 2e-4)]


@pytest.mark.parametrize(
    ("schedule", "theirs", "floor"),
    [
        ("cosine", "cosine", 0.0),
        ("cosine", "cosine_with_min_lr", 0.1),
        ("linear", "linear", 0.0),
        ("constant", "constant_with_warmup", 0.0),
    ],
)
def test_learning_rates_are_those_of_transformers(schedule, theirs, floor):
    more = {"scheduler_specific_kwargs": {"min_lr_rate": floor}} if floor else {}
    for warmup in (0.0, 0.1, 0.33):
        options = TrainingOptions(
            length=8, steps=30, learning_rate=2e-3, schedule=schedule, warmup=warmup, rate_floor=floor
        )
        options = options.resolve(window=8, trained_length=8)
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2e-3)
        scheduler = get_scheduler(theirs, optimizer, options.warmup_steps, 30, **more)
        for step in range(31):
            assert scheduler.get_last_lr()[0] == pytest.approx(options.rate_of_step(step), abs=1e-12)
            optimizer.step()
            scheduler.step()


def test_each_stage_has_its_own_learning_rates():
    rates = [staged().resolve(window=64, trained_length=32).rate_of_step(step) for step in range(9)]
    assert rates[:3] == pytest.approx([0.0, 2.5e-3, 5e-3])
    assert rates[3:5] == pytest.approx([0.0, 2e-3])
    assert rates[5:8] == pytest.approx([0.0, 1e-3, 5e-4])
    assert rates[8] == pytest.approx(0.0), "after the last step"


def test_a_staged_run_resumed_in_each_stage_has_the_same_weights(base, tmp_path):
    done = tune(base, tmp_path / "whole", staged())
    steps = [json.loads(line) for line in (tmp_path / "whole" / "steps.jsonl").read_text().splitlines()]
    resolved = done.options
    assert [line["learning_rate"] for line in steps] == pytest.approx([resolved.rate_of_step(n) for n in range(8)])
    assert done.data.num_sequences == sum(stage["steps"] for stage in STAGES)
    for stop in (2, 4, 7):
        out = tmp_path / f"stopped-{stop}"
        with pytest.raises(Stopped):
            tune(base, out, staged(), progress=stop_after(stop))
        assert {path.name for path in training_folder(out).glob("stage-*")} == {"stage-1", "stage-2", "stage-3"}
        tune(base, out, staged(), resume=True)
        assert all(torch.equal(one, adapter(out)[name]) for name, one in adapter(tmp_path / "whole").items())
    with pytest.raises(Stopped):
        tune(base, tmp_path / "other", staged(), progress=stop_after(4))
    with pytest.raises(CtxextError, match="stages"):
        tune(base, tmp_path / "other", staged(stages=STAGES[:2]), resume=True)


def list_saves(out):
    return {path.name for path in training_folder(out).glob("checkpoint-*")}


def test_the_end_of_each_stage_is_saved(base, tmp_path):
    for stop, saved in ((4, "checkpoint-3"), (6, "checkpoint-5")):
        with pytest.raises(Stopped):
            tune(base, tmp_path / f"{stop}", staged(save_every=100), progress=stop_after(stop))
        assert saved in list_saves(tmp_path / f"{stop}")


def test_a_run_of_long_steps_is_saved_by_time(base, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "_SECONDS_BETWEEN", 0.0)
    monkeypatch.setattr(trainer, "_RATIO", 0)
    with pytest.raises(Stopped):
        tune(base, tmp_path / "out", change(steps=6, save_every=100), progress=stop_after(3))
    assert "checkpoint-2" in list_saves(tmp_path / "out")
    monkeypatch.setattr(trainer, "_RATIO", 10**6)
    with pytest.raises(Stopped):
        tune(base, tmp_path / "rare", change(steps=6, save_every=100), progress=stop_after(5))
    assert len(list_saves(tmp_path / "rare")) == 1, "a save that takes long is not repeated soon"


def test_activations_are_recomputed_only_in_the_stages_that_ask_for_it(base, tmp_path, monkeypatch):
    from transformers import LlamaForCausalLM

    calls = []
    monkeypatch.setattr(
        LlamaForCausalLM, "gradient_checkpointing_disable", lambda self: calls.append("off"), raising=True
    )
    real = LlamaForCausalLM.gradient_checkpointing_enable
    monkeypatch.setattr(
        LlamaForCausalLM,
        "gradient_checkpointing_enable",
        lambda self, **more: (calls.append("on"), real(self, **more)),
    )
    tune(base, tmp_path / "out", staged())
    assert calls[-8:] == ["off"] * 3 + ["on"] * 2 + ["off"] * 3


def test_the_source_is_converted_first(tmp_path):
    """The result is that of a conversion and a training by hand, and names the original source."""
    source = save_llama(tmp_path / "source")
    options = {"length": 64, "steps": 3, "batch_size": 2, "rank": 4}
    tune(source, tmp_path / "one", TrainingOptions(method="yarn", factor=2.0, **options))
    convert(str(source), tmp_path / "base", Yarn(factor=2), check=False)
    tune(tmp_path / "base", tmp_path / "two", TrainingOptions(**options))
    assert all(torch.equal(one, adapter(tmp_path / "two")[name]) for name, one in adapter(tmp_path / "one").items())
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    assert config["max_position_embeddings"] == 64
    assert config["ctxext"]["source"] == "source"
    assert {finding.status for finding in verify(tmp_path / "one")} == {"passed"}
    assert not training_folder(tmp_path / "one").exists()


def test_an_extended_source_is_not_converted_again(base, tmp_path):
    notes = []
    tune(base, tmp_path / "out", change(steps=1, method="yarn"), notify=notes.append)
    assert any("is already extended: --method yarn is not applied" in note for note in notes)


def test_stages_of_presets_are_valid():
    staged_presets = {name: preset for name, preset in presets().items() if preset.stages}
    assert "read-twice" in staged_presets
    for preset in staged_presets.values():
        sizes = {"stages_length": "8k", "stages_width": 576}
        options = TrainingOptions(stages=preset.options["stages"], positions="pose", **sizes)
        resolved = options.resolve(window=16384, trained_length=8192, width=576)
        ends = [*accumulate(stage.num_steps for stage in resolved.each_stage)]
        assert ends[-1] == resolved.num_steps
        assert any(line.startswith("stage 1") for line in preset.lines())


def test_minutes_set_the_number_of_steps(base, tmp_path, monkeypatch):
    """The weights are those of a run with as many steps; a resumed run does not measure again."""
    calls = []

    def fit(options, model, minutes, **setup):
        calls.append(minutes)
        return real(options, model, minutes, **setup)

    real = prepare.fit_steps
    monkeypatch.setattr(prepare, "fit_steps", fit)
    monkeypatch.setattr(step_costs.StepMeasurements, "seconds_of", lambda self, stage, cost, world: (1.0, stage.steps))
    options = staged(minutes=0.3)
    with pytest.raises(Stopped):
        tune(base, tmp_path / "out", options, progress=stop_after(4))
    done = tune(base, tmp_path / "out", options, resume=True)
    assert calls == [0.3]
    assert [stage.steps for stage in done.options.each_stage] == [7, 4, 7], "18 steps of a second"
    tune(base, tmp_path / "same", staged(steps=18))
    assert all(torch.equal(one, adapter(tmp_path / "out")[name]) for name, one in adapter(tmp_path / "same").items())


def test_a_dry_run_plans_each_stage(base):
    plan = plan_training(str(base), [lambda *_: map(Document, documents())] * 3, staged())
    assert [(stage.steps, stage.length) for stage in plan.stages] == [(3, 24), (2, 32), (3, 24)]
    assert plan.seconds == pytest.approx(sum(stage.seconds for stage in plan.stages))
    assert plan.peak_memory == max(stage.peak_memory for stage in plan.stages)
    assert plan.num_tokens == 8 * 24 + 2 * 8
