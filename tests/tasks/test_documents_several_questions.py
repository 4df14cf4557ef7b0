"""Several questions about one text: what is asked of it, and answers that are written on one reading."""

import itertools
import random

import pytest
import torch

from ctxext.data.encoding import Encoder
from ctxext.models import answers as scoring
from ctxext.models.model import end_answer, wrap_model
from ctxext.tasks.documents import Documents, Passage, Question, best_subspan_match
from ctxext.tasks.kv import KeyValue
from ctxext.tasks.retrieval import make_questions
from ctxext.tasks.settings import Settings, even_depths
from hand_made import make_tokenizer, tiny_llama

LENGTH, DEPTHS = 1800, even_depths(5)
PEOPLE = ("Ann Lee", "Bob Orr", "Cy Poe", "Di Roe", "Eve Sun", "Fay Tor")
THINGS = ("arch", "bell", "cart", "door", "easel", "flute")
QUESTIONS = tuple(
    Question(
        f"Who made the {what}?",
        (who, who.upper()),
        # The last of the documents answers the next question.
        (Passage(what, f"It was {who}.", True), Passage(what, "Rain."), Passage(what, f"{after} too.")),
    )
    for what, who, after in zip(THINGS, PEOPLE, PEOPLE[1:] + PEOPLE[:1], strict=True)
)


def ready(**changes):
    return wrap_model("tiny", tiny_llama(max_position_embeddings=2048, **changes), make_tokenizer())


def written(loaded, questions, wanted=range(5)):
    return {depth: [answer.ids for answer in rows] for depth, rows in loaded.write(questions, wanted)}


def on_one_reading(loaded, questions, wanted=range(5)):
    return {depth: [answer.ids for answer in rows] for depth, rows in scoring._write(loaded, questions, wanted)}


@pytest.fixture
def forwards(monkeypatch):
    """The number of tokens of every call of a model."""
    seen = []
    real = torch.nn.Module.__call__

    def spy(module, *args, **options):
        if type(module).__name__ == "LlamaForCausalLM":
            seen.append(options["input_ids"].numel())
        return real(module, *args, **options)

    monkeypatch.setattr(torch.nn.Module, "__call__", spy)
    return seen


@pytest.mark.parametrize("ends", [None, "often"])
@pytest.mark.parametrize("num_needles", [1, 2, 5])
@pytest.mark.thorough
def test_answers_on_one_reading_are_those_of_generate(num_needles, ends, forwards):
    loaded = ready()
    questions = make_questions(Documents(num_needles=num_needles), loaded.encoder, LENGTH, range(2), Settings())
    loaded.model.generation_config.eos_token_id = None
    alone = written(loaded, questions)
    if ends:  # A token that the model writes in the middle of an answer.
        loaded.model.generation_config.eos_token_id = loaded.model.generation_config.pad_token_id = alone[2][0][7]
        alone = {depth: [end_answer(row, [alone[2][0][7]], 0).ids for row in rows] for depth, rows in alone.items()}
        assert {len(row) for rows in alone.values() for row in rows} > {32}
    forwards.clear()
    assert on_one_reading(loaded, questions) == alone
    read = sum(count for count in forwards if count > 2 * 32)
    assert read < {1: 4.0, 2: 2.9, 5: 1.5}[num_needles] * 2 * LENGTH, "what prompts have in common is read once"
    assert on_one_reading(loaded, questions, [1, 3]) == {depth: alone[depth] for depth in (1, 3)}


@pytest.mark.thorough
def test_a_prompt_that_sets_the_schedule_is_generated_separately(forwards):
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    loaded = wrap_model("tiny", tiny_llama(max_position_embeddings=512, rope_parameters=dynamic), make_tokenizer())
    questions = make_questions(Documents(num_needles=5), loaded.encoder, LENGTH, range(1), Settings())
    alone = written(loaded, questions)
    forwards.clear()
    assert on_one_reading(loaded, questions) == alone
    assert sum(count > LENGTH / 2 for count in forwards) == 5


@pytest.mark.parametrize(
    "task",
    [
        Documents(ask="fact", num_needles=5),
        Documents(ask="which", num_needles=5),
        Documents(questions=QUESTIONS, num_needles=5),
        KeyValue(ids="number", num_needles=5),
    ],
    ids=["facts", "numbers", "questions of a file", "kv"],
)
def test_each_question_is_answered_by_one_place_at_its_depth(task):
    encoder = Encoder(make_tokenizer())
    for question in make_questions(task, encoder, 2000, range(3), Settings(depths=DEPTHS)):
        tails = [encoder.tokenizer.decode(prompt.ids[-120 : -prompt.num_answer]) for prompt in question]
        assert len(set(tails)) == len(DEPTHS)
        texts = [encoder.tokenizer.decode(prompt.ids[:-150]) for prompt in question]
        assert len({text[:2000] for text in texts}) == 1, "all are about one text"
    pieces = task.pieces(random.Random(3))
    others = [*itertools.islice(pieces.haystack, 60)]
    for needle, ask in zip(pieces.needles, pieces.questions, strict=True):
        answers = ask.answers or (ask.answer,)
        assert best_subspan_match(needle, answers)
        if task.name == "documents" and not task.questions:
            key = ask.question.split("the ")[-1].split("?")[0].removesuffix(" kept").removesuffix(" is")
            assert sum(f" {key.split()[-1]} is" in unit for unit in (*pieces.needles, *others)) == 1
        else:
            assert not any(best_subspan_match(unit, answers) for unit in pieces.needles if unit != needle)
        if task.name == "documents" and task.questions:
            assert not any(best_subspan_match(unit, answers) for unit in others)


def test_every_question_has_separate_answers():
    encoder = Encoder(make_tokenizer())
    (question,) = make_questions(Documents(questions=QUESTIONS, num_needles=5), encoder, LENGTH, [0], Settings())
    assert {prompt.answers for prompt in question} < {one.answers for one in QUESTIONS}
    assert len({prompt.answers for prompt in question}) == 5


def test_a_short_text_has_one_question():
    encoder = Encoder(make_tokenizer())
    for task in (KeyValue(num_needles=20), Documents(num_needles=20)):
        assert task.fit_to_length(encoder, 400).num_needles == 1
        assert task.fit_to_length(encoder, 20_000).num_needles == 20


def test_questions_that_answer_each_other_are_in_different_texts():
    same = tuple(Question(one.question, ("Ann Lee",), QUESTIONS[0].documents) for one in QUESTIONS)
    assert len(Documents(questions=same, num_needles=5).pieces(random.Random(0)).questions) == 1
