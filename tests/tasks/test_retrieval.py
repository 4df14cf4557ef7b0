"""Models made by hand that answer all, nothing, or what the first half of the text tells, at every generated task."""

import functools
import random
import re
from dataclasses import replace

import pytest
import torch
from transformers import LlamaForCausalLM

from ctxext.data.encoding import Encoder
from ctxext.data.prompt import encode_parts
from ctxext.models.model import LoadedModel
from ctxext.tasks.base import keys_of
from ctxext.tasks.needle import PAIRS
from ctxext.tasks.registry import RETRIEVAL_TASKS
from ctxext.tasks.retrieval import RetrievalWork, make_questions, num_questions
from ctxext.tasks.settings import Settings
from hand_made import tiny_llama

NAMES = ("passkey", "association", "niah-multivalue")
SETTINGS = Settings(tasks=NAMES, samples=3, depths=(0.0, 0.2, 0.8, 1.0))
TASKS = {task.name: task for task in SETTINGS.retrieval_tasks()}
LENGTH = 1300


class Reader:
    """Says what it is told to say for each prompt, token by token, whatever has been written so far."""

    def __init__(self, tokenizer, sees):
        self.tokenizer, self.sees, self.known = tokenizer, sees, {}
        self.model = tiny_llama(max_position_embeddings=2048)
        self.real = self.model.forward
        self.model.forward = self.forward

    def learn(self, questions):
        for question in questions:
            for number, prompt in enumerate(question):
                begin = tuple(prompt.ids[: -prompt.num_answer])
                self.known[begin] = self.answer(prompt, number)

    def answer(self, prompt, number):
        if not prompt.required:
            answer = prompt.ids[-prompt.num_answer :]
            return answer if self.sees(number) else [5] * len(answer)
        said = [word for place, word in enumerate(prompt.required) if self.sees(place)]
        random.Random(0).shuffle(said)
        text = " I say " + " and also ".join(said) + "."
        return self.tokenizer(text, add_special_tokens=False)["input_ids"][: prompt.num_answer]

    @functools.wraps(LlamaForCausalLM.forward)
    def forward(self, input_ids=None, logits_to_keep=0, **options):
        caches = [value for value in options.values() if hasattr(value, "get_seq_length")]
        before = caches[0].get_seq_length() if caches else 0
        output = self.real(input_ids=input_ids, logits_to_keep=logits_to_keep, **options)
        self.seen = input_ids if before == 0 else torch.cat([self.seen[:, :before], input_ids], dim=1)
        kept = output.logits.shape[1]
        logits = torch.zeros_like(output.logits)
        for row, ids in enumerate(self.seen.tolist()):
            for at in range(kept):
                logits[row, at, self.next_token(ids[: len(ids) - kept + at + 1])] = 1.0
        output["logits"] = logits
        return output

    def next_token(self, ids):
        for length in {len(begin) for begin in self.known}:
            answer = self.known.get(tuple(ids[:length]))
            if answer is not None:
                written = len(ids) - length
                return answer[written] if written < len(answer) else 1
        return 5


def cells(name, reader, settings):
    """The share of each record of one task."""
    task = TASKS[name]
    loaded = LoadedModel("reader", reader.model, Encoder(reader.tokenizer), can_share=True)
    samples = tuple(range(num_questions(task, SETTINGS)))
    reader.learn(make_questions(task, loaded.encoder, LENGTH, samples, SETTINGS))
    work = RetrievalWork(task, LENGTH, samples, settings)
    records = list(work.run(loaded, set(work.keys)))
    assert {key for record in records for key in keys_of(record)} == set(work.keys)
    return {record["depth"]: sum(record["correct"]) / len(record["correct"]) for record in records}


@pytest.mark.parametrize("generate", [False, True])
@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_all_none_and_half(name, generate, tokenizer):
    settings = replace(SETTINGS, generate=generate)
    has_depths = TASKS[name].has_depths
    for sees, expected in ((lambda place: True, 1.0), (lambda place: False, 0.0)):
        scores = cells(name, Reader(tokenizer, sees), settings)
        assert set(scores.values()) == {expected}
        assert set(scores) == ({*SETTINGS.depths} if has_depths else {None})
    scores = cells(name, Reader(tokenizer, lambda place: place < 2), settings)
    if has_depths:
        assert scores == {0.0: 1.0, 0.2: 1.0, 0.8: 0.0, 1.0: 0.0}
    else:
        assert scores[None] == 2 / 4


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.thorough
def test_any_length_and_the_same_for_the_same_seed(name, tokenizer):
    encoder = Encoder(tokenizer)
    for length in (1300, 1403, 20_000):
        one, again = (make_questions(TASKS[name], encoder, length, range(2), SETTINGS) for _ in range(2))
        assert one == again
        assert all(len(prompt.ids) == length for question in one for prompt in question)
    texts = {tokenizer.decode(prompt.ids) for question in one for prompt in question}
    assert len(texts) == (8 if TASKS[name].has_depths else 2)


def test_associations_share_no_word_with_their_questions():
    common = set(re.findall(r"\w+", "who is a an the of in to by from and not that has can works as person"))
    for fact, question in PAIRS:
        words, asked = (set(re.findall(r"[a-z]+", text.lower())) - common for text in (fact, question))
        assert not words & asked, (fact, question)
        assert not any(one[:4] == other[:4] for one in words for other in asked if len(one) > 3 and len(other) > 3)


def test_every_task_fits_its_length(tokenizer):
    encoder = Encoder(tokenizer)
    for name in NAMES:
        if RETRIEVAL_TASKS[name].is_written:
            made = TASKS[name]
            for sample in range(20):
                pieces = made.pieces(random.Random(sample))
                assert len(encoder.encode_piece(pieces.questions[0].answer)) <= made.answer_room
                assert encode_parts(pieces, encoder, answer_room=made.answer_room).size < LENGTH
