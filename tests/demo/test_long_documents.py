"""The package's documents to fine-tune on."""

import random
from itertools import islice

import pytest

from ctxext.data.encoding import Encoder
from ctxext.demo.long_documents import _facts_then_questions, long_documents


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    from ctxext.checkpoint.opening import open_checkpoint

    return AutoTokenizer.from_pretrained(open_checkpoint("demo").folder)


def test_they_have_the_lengths_that_are_wanted_and_some_marks(tokenizer):
    documents = list(islice(long_documents(tokenizer, {128: 4, 512: 2}, seed=0), 12))
    assert [len(document.ids) for document in documents] == [128] * 4 + [512] * 2 + [128] * 4 + [512] * 2
    assert all(0 < sum(document.is_learned) < len(document.ids) for document in documents)
    assert documents[0] != documents[6]
    assert documents == list(islice(long_documents(tokenizer, {128: 4, 512: 2}, seed=0), 12))
    assert documents != list(islice(long_documents(tokenizer, {128: 4, 512: 2}, seed=1), 12))
    assert all(document.is_learned is None for document in islice(long_documents(tokenizer, {128: 1}, 0, "all"), 3))


@pytest.mark.parametrize("length", [256, 2048])
def test_every_answer_was_told_once_and_some_lie_far_back(tokenizer, length):
    encoder = Encoder(tokenizer, chat_template=False)
    furthest = 0
    for seed in range(20):
        example = _facts_then_questions(encoder.piece, encoder.start(), random.Random(seed), length)
        assert len(example.ids) == len(example.is_answer) == length
        text = ",".join(map(str, example.ids))
        first = example.is_answer.index(True)
        size = next(n for n in range(1, 9) if first + n == length or not example.is_answer[first + n])
        answer = ",".join(map(str, example.ids[first : first + size]))
        place = text.index(answer)
        assert place < len(",".join(map(str, example.ids[:first])))
        furthest = max(furthest, first - text[:place].count(","))
    assert furthest > 0.6 * length
