"""Synthetic long documents to fine-tune on, full of facts and questions about them, for any tokenizer."""

import random
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import cycle
from typing import Any

from ctxext.data import prose
from ctxext.data.encoding import Encoder, no_tokens
from ctxext.data.prose import random_number
from ctxext.demo.corpus import Encode, Example, make_example
from ctxext.evaluate.tasks.needle import OPENING, PHRASINGS
from ctxext.finetune.documents import Document

_FAR_SHARE = 0.4
_PROMPT_SHARE = 0.1
_TEXT_SHARE = 0.05
_MOST_FACTS = 200


def long_documents(tokenizer: Any, wanted: Mapping[int, int], seed: int, learn: str = "answers") -> Iterator[Document]:
    """An endless stream of documents like those the demo checkpoint was trained on, of any length.

    The loss is taken on answers and on some of the other tokens: most of those are random and teach nothing, but a
    model that is never trained on them forgets how to write. One round of the stream has so many documents of each
    length in tokens as are wanted.
    """
    encoder = Encoder(tokenizer, chat_template=False)
    start = encoder.start()

    @lru_cache(maxsize=20_000)
    def known(text: str) -> tuple[int, ...]:
        ids = encoder.piece(text)
        if text.strip() and not ids:  # Without tokens a document would never become long enough.
            raise no_tokens(text)
        return tuple(ids)

    def encode(text: str) -> list[int]:
        return list(known(text))

    lengths = cycle([length for length, count in sorted(wanted.items()) for _ in range(count)])
    for number, length in enumerate(lengths):
        rng = random.Random(f"{seed} long document {number}")
        if rng.random() < _FAR_SHARE:
            example = _facts_then_questions(encode, start, rng, length)
        else:
            example = make_example(encode, start, rng, length, _PROMPT_SHARE)
        marks = [is_answer or rng.random() < _TEXT_SHARE for is_answer in example.is_answer]
        yield Document(example.ids, marks if learn == "answers" else None)


def _facts_then_questions(encode: Encode, start: list[int], rng: random.Random, length: int) -> Example:
    """Facts in prose, followed by questions alone: most answers are far back, some at the beginning."""
    phrasing = PHRASINGS[rng.choice(list(PHRASINGS))]
    ids = [*start, *encode(OPENING)]
    facts: list[tuple[str, str]] = []
    fact_share, end = rng.uniform(0.05, 0.5), length * rng.uniform(0.5, 0.9)
    # Enough names for any document: a fact takes more than 16 tokens.
    for key in prose.object_names(rng, min(max(4, length // 16), _MOST_FACTS)):
        value = random_number(rng, 5)
        ids += encode(" " + phrasing.fact.format(key=key, value=value))
        facts.append((key, value))
        while rng.random() > fact_share and len(ids) < end:
            ids += encode(" " + prose.sentence(rng))
        if len(ids) >= end:
            break
    is_answer = [False] * len(ids)
    for key, value in cycle(rng.sample(facts, k=len(facts))):
        question, answer = encode("\n" + phrasing.question.format(key=key)), encode(f" {value}")
        ids += [*question, *answer]
        is_answer += [*[False] * len(question), *[True] * len(answer)]
        if len(ids) >= length:
            return Example(ids[:length], is_answer[:length])
    raise AssertionError("a cycle has no end")
