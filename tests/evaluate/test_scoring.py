import pytest
import torch

from ctxext.evaluate.model import make_ready
from ctxext.evaluate.scoring import exact_match as scoring
from ctxext.evaluate.scoring import generation
from ctxext.evaluate.scoring.generation import generate_exact
from ctxext.evaluate.settings import Settings, even_depths
from ctxext.evaluate.tasks.kv import KeyValue
from ctxext.evaluate.tasks.needle import Needle, PassKey
from ctxext.evaluate.tasks.retrieval import make_questions
from hand_made import one_that_sees_length, tiny_llama

DEPTHS = even_depths(5)


def questions_for(task, loaded, length=400, samples=3, depths=DEPTHS):
    return make_questions(task, loaded.encoder, length, range(samples), Settings(depths=depths))


def score(loaded, questions, how=scoring.score_depths, wanted=range(5), **options):
    answers = dict(how(loaded, questions, list(wanted), **options))
    return [answers[number] for number in sorted(answers)]


def random_ready(tokenizer, **changes):
    return make_ready("tiny", tiny_llama(max_position_embeddings=1024, **changes), tokenizer)


def logits_of(monkeypatch, loaded, questions, **options):
    """Everything the scorer looked at, by depth."""
    seen = []
    real = scoring.are_exact

    def spy(name, logits, ids, num_answers):
        seen.append((ids.clone(), logits.clone()))
        return real(name, logits, ids, num_answers)

    monkeypatch.setattr(scoring, "are_exact", spy)
    result = score(loaded, questions, **options)
    monkeypatch.setattr(scoring, "are_exact", real)
    return result, {tuple(ids.flatten().tolist()): logits for ids, logits in seen}


SCHEDULES = {
    "plain": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    "yarn": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512, "rope_theta": 10000.0},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "task", [Needle(), Needle(num_needles=1), KeyValue(ids="number"), PassKey()], ids=lambda task: task.name
)
def test_sharing_the_haystack_changes_nothing(monkeypatch, tokenizer, task, schedule):
    loaded = random_ready(tokenizer, rope_scaling=SCHEDULES[schedule])
    assert loaded.can_share
    questions = questions_for(task, loaded)
    shared, logits = logits_of(monkeypatch, loaded, questions, share=True)
    whole, plain = logits_of(monkeypatch, loaded, questions, share=False)
    assert shared == whole
    assert logits.keys() == plain.keys()
    for ids in plain:
        torch.testing.assert_close(logits[ids], plain[ids], atol=1e-4, rtol=1e-4)


def test_a_resumed_depth_gets_the_same_numbers_to_the_last_bit(monkeypatch, tokenizer):
    loaded = random_ready(tokenizer)
    questions = questions_for(Needle(), loaded)
    _, every = logits_of(monkeypatch, loaded, questions)
    _, some = logits_of(monkeypatch, loaded, questions, wanted=[1, 3])
    assert len(some) == 2
    for ids in some:
        assert torch.equal(some[ids], every[ids])


@pytest.mark.parametrize("sharpness", [0.3, 3.0])
def test_teacher_forcing_agrees_with_generation(tokenizer, sharpness):
    """Prompts are made whose answer is what the model says, or nearly so, so that both verdicts occur."""
    loaded = random_ready(tokenizer)
    with torch.no_grad():
        loaded.model.lm_head.weight *= sharpness
    questions = questions_for(PassKey(), loaded, samples=4)
    for row, question in enumerate(questions):
        for prompt in question:
            ids = torch.tensor([prompt.ids[: -prompt.num_answer]])
            said = loaded.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=prompt.num_answer, do_sample=False
            )[0, ids.shape[1] :].tolist()
            said += [7] * (prompt.num_answer - len(said))
            if row % 2:
                said[-1] = (said[-1] + 1) % 640
            prompt.ids[-prompt.num_answer :] = said
    forced, generated = score(loaded, questions), score(loaded, questions, generate_exact)
    assert forced == generated == [[True, False, True, False]] * 5


def test_a_model_whose_cache_gives_other_logits_is_not_shared(tokenizer):
    assert not make_ready("odd", one_that_sees_length(), tokenizer).can_share


def test_what_is_written_hangs_on_no_prompt_before_it(monkeypatch, tokenizer):
    """The stock dynamic schedule keeps the frequencies of the longest prompt it has seen."""
    dynamic = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    loaded = make_ready("tiny", tiny_llama(max_position_embeddings=64, rope_scaling=dynamic), tokenizer)
    long, middle = (torch.arange(3, 3 + size)[None] for size in (400, 100))

    def written():
        loaded.model(input_ids=long, use_cache=False)
        return generation._greedy(loaded, middle, 12)

    with torch.inference_mode():
        first = generation._greedy(loaded, middle, 12)
        assert written() == first
        monkeypatch.setattr(generation, "forget_longer_prompts", lambda model: None)
        assert written() != first, "and it would show"
