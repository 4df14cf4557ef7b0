"""What is scored is what the model writes, for every method and every order of heads."""

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM

from ctxext.api import METHODS, Recipe, convert
from ctxext.methods import MsPoE, Yarn
from ctxext.models import answers
from ctxext.models.answers import generate_exact
from ctxext.models.model import wrap_model
from ctxext.tasks.needle import Needle
from ctxext.tasks.retrieval import make_questions
from ctxext.tasks.settings import Settings
from ctxext.verify.decoding_process import cache_argument, cache_of

ORDERS = ("prompt", "calibrated", "fixed")
SCHEDULES = ("linear", "ntk", "by-parts")
NUMBERS = {
    "abf": {"theta": 30000.0, "factor": 2.0},
    "longrope": {"factor": 2.0, "long_factor": [1.5, 2.0, 3.0, 4.0]},
}
RECIPES = {
    **{
        method.name: [method(**NUMBERS.get(method.name, {**method.example, "factor": 2.0}))]
        for method in METHODS
        if method.encoding == "rotary" and "factor" in {field.name for field in dataclasses.fields(method)}
    },
    **{
        f"mspoe {schedule} {order}": [MsPoE(schedule=schedule, head_order=order, first_layer=0)]
        for schedule in SCHEDULES
        for order in ORDERS
    },
    "yarn+mspoe prompt": [Yarn(factor=2.0), MsPoE(schedule="by-parts", first_layer=0, head_order="prompt")],
}
LENGTHS = (1100, 400, 514)
"""Beyond the trained 512 tokens, inside them, and with answers that cross them. Longest first: some remember."""


def converted(name, checkpoint, folder, tokenizer):
    convert(str(checkpoint), folder / "out", Recipe(RECIPES[name]), check=False)
    model = AutoModelForCausalLM.from_pretrained(folder / "out", trust_remote_code=True, dtype=torch.float32)
    return wrap_model(name, model, tokenizer)


def questions_with_known_answers(loaded, length):
    """Needle prompts whose answer is what the model writes there; of each second question the last token is another."""
    settings = Settings(depths=(0.0, 0.5, 1.0))
    questions = make_questions(Needle(num_needles=3), loaded.encoder, length, range(2), settings)
    rights = []
    for row, question in enumerate(questions):
        for prompt in question:
            ids = torch.tensor([prompt.ids[: -prompt.num_answer]])
            # Greedy decoding by hand: nothing of it comes from the code under test.
            answers.forget_longer_prompts(loaded.model)
            output, said = loaded.model(input_ids=ids, use_cache=True), []
            for _ in range(prompt.num_answer):
                said.append(int(output.logits[0, -1].argmax()))
                token = torch.tensor([said[-1:]])
                cache = {cache_argument(loaded.model): cache_of(output)}
                output = loaded.model(input_ids=token, use_cache=True, **cache)
            said[-1] = (said[-1] + (row == 1)) % 640
            prompt.ids[-prompt.num_answer :] = said
        rights.append(row != 1)
    return questions, [rights] * 3


def score(loaded, questions, how):
    answers = dict(how(loaded, questions, [0, 1, 2]))
    return [answers[number] for number in sorted(answers)]


@pytest.mark.parametrize("name", RECIPES)
@torch.inference_mode()
@pytest.mark.thorough
def test_scored_is_written(name, checkpoint, tmp_path, tokenizer):
    loaded = converted(name, checkpoint, tmp_path, tokenizer)
    loaded.model.generation_config.eos_token_id = None
    for length in LENGTHS:
        questions, expected = questions_with_known_answers(loaded, length)
        assert score(loaded, questions, answers.score_depths) == expected, length
        assert score(loaded, questions, generate_exact) == expected, length
        answered = {number: right for number, _, right in answers.answer_losses(loaded, questions)}
        assert [answered[number] for number in sorted(answered)] == expected, length


@pytest.mark.parametrize("name", ["mspoe linear prompt", "mspoe by-parts prompt", "yarn+mspoe prompt"])
@torch.inference_mode()
@pytest.mark.thorough
def test_it_would_show_if_the_answer_chose_the_heads(monkeypatch, name, checkpoint, tmp_path, tokenizer):
    """The fault of version 0.1.0, planted: prompt and answer in one forward."""
    loaded = converted(name, checkpoint, tmp_path, tokenizer)
    monkeypatch.setattr(answers, "is_static_for", lambda *_: True)
    questions, expected = questions_with_known_answers(loaded, 400)
    assert score(loaded, questions, answers.score_depths) != expected
