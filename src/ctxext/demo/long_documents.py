"""Long documents to fine-tune on: made on the fly, full of facts and questions about them, for any tokenizer."""

import random
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import cycle
from typing import Any

from ctxext.demo.corpus import make_example
from ctxext.evaluate.encoding import Encoder
from ctxext.finetune.documents import Document

_PROMPT_SHARE = 0.1
_TEXT_SHARE = 0.05


def long_documents(tokenizer: Any, wanted: Mapping[int, int], seed: int, learn: str = "answers") -> Iterator[Document]:
    """Documents without end, as the demo checkpoint learned from, but as long as is asked for.

    Their answers are marked, and some of their other tokens too: most of those are random and teach nothing, but a
    model that never sees their loss forgets how to write.

    Args:
        tokenizer: A transformers tokenizer.
        wanted: How many documents are made of each length in tokens; then as many again.
        seed: Decides every document.
        learn: "answers", or "all" to mark nothing.
    """
    encoder = Encoder(tokenizer, chat_template=False)
    start = encoder.start()

    @lru_cache(maxsize=20_000)
    def encode(text: str) -> tuple[int, ...]:
        return tuple(encoder.piece(text))

    lengths = cycle([length for length, count in sorted(wanted.items()) for _ in range(count)])
    for number, length in enumerate(lengths):
        rng = random.Random(f"{seed} long document {number}")
        example = make_example(lambda text: list(encode(text)), start, rng, length, _PROMPT_SHARE)
        marks = [is_answer or rng.random() < _TEXT_SHARE for is_answer in example.is_answer]
        yield Document(example.ids, marks if learn == "answers" else None)
