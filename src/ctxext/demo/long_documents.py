"""Long documents to fine-tune on: made on the fly, full of facts and questions about them, for any tokenizer."""

import random
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from ctxext.demo.corpus import make_example
from ctxext.evaluate.encoding import Encoder

_PROMPT_SHARE = 0.5


def long_documents(tokenizer: Any, length: int, seed: int) -> Iterator[list[int]]:
    """Documents without end, as the demo checkpoint learned from, but as long as is asked for.

    Args:
        tokenizer: A transformers tokenizer.
        length: Tokens of each document.
        seed: Decides every document.

    Yields:
        Token ids of a document.
    """
    encoder = Encoder(tokenizer, chat_template=False)
    start = encoder.start()

    @lru_cache(maxsize=20_000)
    def encode(text: str) -> tuple[int, ...]:
        return tuple(encoder.piece(text))

    number = 0
    while True:
        rng = random.Random(f"{seed} long document {number}")
        yield make_example(lambda text: list(encode(text)), start, rng, length, _PROMPT_SHARE).ids
        number += 1
