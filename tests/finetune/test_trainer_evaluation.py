"""Evaluation during training, the choice of the save, and changes in a resumed run."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer

from ctxext.checkpoint.opening import open_checkpoint
from ctxext.errors import CtxextError
from ctxext.finetune.loss import NUM_PARTS, use_chunked_loss
from ctxext.finetune.needle_probe import NeedleProbe
from ctxext.models.answers import score_depths
from ctxext.models.model import wrap_model
from tiny_base import Stopped, Tokens, change, documents, load, stop_after, tune

HELD_OUT = Tokens(documents(count=3, seed=7))


def evaluated(out):
    lines = map(json.loads, (out / "steps.jsonl").read_text().splitlines())
    return {line["step"]: line for line in lines if "eval_loss" in line}


def losses_of(out) -> torch.Tensor:
    """Loss of every token of the held-out sequences with plain transformers, (sequences, 63)."""
    model = load(out)
    rows = torch.tensor([ids[start : start + 64] for ids in documents(count=3, seed=7) for start in (0, 64)])
    with torch.no_grad():
        scores = model(rows).logits[:, :-1].log_softmax(-1)
    return -scores.gather(-1, rows[:, 1:, None])[..., 0]


@pytest.mark.thorough
def test_the_loss_by_position_is_the_models(base, tmp_path):
    tune(base, tmp_path / "out", change(steps=4, save_every=1), eval_data=HELD_OUT)
    measured = evaluated(tmp_path / "out")
    assert list(measured) == [1, 2, 3, 4]
    losses = losses_of(tmp_path / "out")
    assert measured[4]["eval_loss"] == pytest.approx(float(losses.mean()), abs=1e-3)
    # The hidden state at position p predicts token p + 1; the last of 64 positions predicts nothing.
    by_position = [float(losses[:, 16 * part : 16 * part + 16].mean()) for part in range(NUM_PARTS)]
    assert measured[4]["eval_loss_by_position"] == pytest.approx(by_position, abs=1e-3)
    assert max(by_position) - min(by_position) > 0.01, "so that the parts can be told apart"


@pytest.mark.thorough
def test_needles_are_measured_as_in_an_evaluation(tmp_path):
    folder = open_checkpoint("demo").folder
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    loaded = wrap_model("demo", AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), tokenizer)
    probe = NeedleProbe(use_chunked_loss(model), tokenizer, 800, seed=0)
    questions = [[prompt] for prompt in probe.prompts]
    right = [is_right for question in questions for _, (is_right,) in score_depths(loaded, [question], [0])]
    assert probe() == sum(right) / len(right)
    assert 0 < sum(right) < len(right), "so that both answers occur"


@pytest.fixture
def report_losses(monkeypatch):
    """Evaluation that reports fixed losses by step, so that the best save does not depend on rounding."""

    def fix(*losses: float) -> dict[int, float]:
        evaluate, measured = Trainer.evaluation_loop, {}

        def report(trainer, *args, **options):
            output = evaluate(trainer, *args, **options)
            step = trainer.state.global_step
            measured[step] = output.metrics["eval_loss"]
            output.metrics["eval_loss"] = losses[step - 1]
            return output

        monkeypatch.setattr(Trainer, "evaluation_loop", report)
        return measured

    return fix


STEPS_THAT_CHANGE_MUCH = {"save_every": 1, "learning_rate": 0.3, "schedule": "constant", "warmup": 0.0}


def test_the_best_save_is_merged(base, tmp_path, report_losses):
    lines = []
    measured = report_losses(5.0, 4.0, 2.0, 3.0, 4.0)
    options = change(steps=5, keep_best=True, **STEPS_THAT_CHANGE_MUCH)
    tune(base, tmp_path / "out", options, eval_data=HELD_OUT, notify=lines.append)
    assert [line["eval_loss"] for line in evaluated(tmp_path / "out").values()] == [5.0, 4.0, 2.0, 3.0, 4.0]
    assert any(line.startswith("using step 3, the best") for line in lines)
    others = [loss for step, loss in measured.items() if step != 3]
    assert min(abs(loss - measured[3]) for loss in others) > 0.01, "so that the saves can be told apart"
    assert float(losses_of(tmp_path / "out").mean()) == pytest.approx(measured[3], abs=1e-3)
    with pytest.raises(CtxextError, match="--keep-best needs evaluation data"):
        tune(base, tmp_path / "other", options)


@pytest.mark.thorough
def test_a_resumed_run_may_have_other_batches(base, tmp_path):
    steady = {"schedule": "constant", "warmup": 0.0, "save_every": 1}
    tune(base, tmp_path / "whole", change(**steady))
    with pytest.raises(Stopped):
        tune(base, tmp_path / "out", change(**steady), progress=stop_after(2))
    done = tune(base, tmp_path / "out", change(**steady, micro_batch=2, checkpointing=True), resume=True)
    assert [step for step, _ in done.losses] == [1, 2, 3, 4, 5, 6]
    whole, resumed = (load(tmp_path / name).state_dict() for name in ("whole", "out"))
    for name, weight in whole.items():
        assert torch.allclose(resumed[name], weight, atol=1e-4), name
