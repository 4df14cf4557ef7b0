"""Learned heads: training runs the code of the checkpoint, and the result improves."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from ctxext import Recipe, SearchOptions, convert, load_recipe
from ctxext.methods import MsPoE
from ctxext.search import gradient
from ctxext.search.gradient import Learner, learn

OPTIONS = SearchOptions(target_length=640, trials=6, gradient=True, keep_short=0.01)


def learned(**changes):
    rows = {"ratios": ((1.0, 4.0), (2.0, 3.0)), "ramps": ((1.0, 0.5), (2.0, 1.0)), "temperatures": ((1.0, 1.2),) * 2}
    step = {"schedule": "by-parts", "head_order": "fixed", "first_layer": 0, "reaches": 640, **rows}
    return MsPoE(**{**step, **changes})


def logits_of(model):
    with torch.no_grad():
        return model(torch.arange(5, 405)[None] % 60 + 5).logits


def test_every_number_has_a_gradient_and_the_weights_have_none(bench):
    learner = Learner(bench, OPTIONS)
    before = {name: weight.clone() for name, weight in bench.stock.model.state_dict().items()}
    with torch.no_grad():  # Not at the end of a ramp, where its slope is one-sided.
        for log in learner.logs.values():
            log.add_(torch.rand(log.shape, generator=torch.Generator().manual_seed(0)) * 0.2 - 0.1)
    learner.refresh()
    ids = torch.arange(5, 405)[None] % 60 + 5
    learner.model(ids).logits.log_softmax(-1)[..., 7].sum().backward()
    assert all((log.grad != 0).all() for log in learner.logs.values())
    assert all(parameter.grad is None for parameter in learner.model.parameters())
    assert all(torch.equal(before[name], weight) for name, weight in bench.stock.model.state_dict().items())


def test_what_was_learned_on_is_what_is_converted(bench, source, tmp_path):
    lines = []
    recipe = learn(bench, OPTIONS, math.inf, lambda *figures: lines.append(figures))
    assert len(lines) == 6
    assert all(map(math.isfinite, sum(lines, ())))
    (step,) = recipe.steps
    assert len({number for row in step.ratios for number in row}) > 1, "heads differ"
    convert(str(source), tmp_path / "out", recipe)  # Compares the loaded model with the reference.
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert loaded.config.max_position_embeddings == 640
    assert torch.allclose(logits_of(loaded), logits_of(bench.apply(recipe).model), atol=1e-5)
    assert (logits_of(loaded) - logits_of(bench.stock.model)).abs().max() > 1e-3


def test_more_steps_lower_what_is_learned_on(bench, monkeypatch):
    """On one text without a divergence: the gradient points downwards."""
    one = next(gradient._draw_sequences(bench.stock.encoder, OPTIONS, 640))
    monkeypatch.setattr(gradient, "_draw_sequences", lambda *_: iter(lambda: one, None))
    monkeypatch.setattr(gradient, "_HELD", 0.0)
    monkeypatch.setattr(gradient, "_BEYOND", 0.0)
    losses = []
    options = SearchOptions(target_length=640, trials=8, gradient=True, lengths=(640,))
    learn(bench, options, math.inf, lambda answers, held: losses.append(answers))
    assert losses[-1] < losses[0]


def test_the_divergence_is_that_of_the_positions_asked(bench):
    """Compare with full logits and the divergence of torch."""
    model = bench.apply(Recipe([learned()])).model
    ids, at = torch.arange(5, 65)[None].repeat(2, 1), torch.tensor([40, 3, 17])
    divergence, loss = gradient._compute_divergence(model, bench.stock.model, ids, at)
    with torch.no_grad():
        trained, said = (one(ids).logits[:, at].log_softmax(-1) for one in (model, bench.stock.model))
    expected = torch.nn.functional.kl_div(trained, said, reduction="sum", log_target=True) / 6
    assert float(divergence) == pytest.approx(float(expected), rel=1e-4)
    assert loss == pytest.approx(float(torch.nn.functional.cross_entropy(said.flatten(0, 1), ids[:, at + 1].flatten())))

    def whole(input_ids, use_cache):
        """A model that always computes all logits."""
        return bench.stock.model(input_ids)

    whole.device, whole.forward = "cpu", whole
    again, loss_again = gradient._compute_divergence(model, whole, ids, at)
    assert (float(again), loss_again) == pytest.approx((float(divergence), loss), rel=1e-4)


def test_one_head_like_the_next_is_yarns_ramp(bench):
    """With ratio 1 and temperature 1 in all heads nothing changes, bit for bit."""
    same = dict.fromkeys(("ratios", "ramps", "temperatures"), ((1.0, 1.0),) * 2)
    model = bench.apply(Recipe([learned(**same)])).model
    assert torch.equal(logits_of(model), logits_of(bench.stock.model))


def test_the_command_writes_an_ordinary_recipe(run, source, tmp_path):
    words = ["--target-length", 640, "--gradient", "--trials", 2, "--samples", 1, "--checked", 2, "--lengths", 640]
    result = run("search", source, tmp_path / "best.yaml", *words, "--keep-short", 5, "--json")
    content = json.loads(result.stdout)
    assert content["trials"] == 2
    assert {one["recipe"].split()[0] for one in content["checked"]["recipes"]} == {"yarn", "mspoe"}
    assert not (tmp_path / "best.db").exists()
    if content["recipe"]:
        assert load_recipe(str(tmp_path / "best.yaml")).steps[0].name in ("mspoe", "yarn")
