"""A stand-in for an unknown tokenizer: parts of words, of the size with which texts have as many as a server counts."""

import itertools
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

USUAL_SIZE = 4.0
"""Characters of a token before any count is known: about as many as in English text."""

_WORD = re.compile(r"\s*\S+|\s+")
_FILLER = " ·"
"""A word of one token, for the text that a server's template adds."""

_LARGEST_SIZE = 64.0
_STEPS = 40
"""Halvings of the range of sizes, which determine the size to all digits."""

_numbers, _ids, _texts = itertools.count(), dict[str, int](), dict[int, str]()
"""The tokens of this process, numbered as they appear; several threads may add some."""


@dataclass(frozen=True)
class EstimatedTokenizer:
    """Parts of words that stand for the tokens of a server, called like a tokenizer of transformers.

    A word of n characters, with the space before it, has n / `size` tokens, and at least one. It is rounded up or down
    by a hash of the word, so that the number of tokens of a text follows the size without steps. Texts have the same
    tokens in one piece and cut before a space.

    Attributes:
        size: Mean number of characters of a token in long words.
        overhead: Number of tokens that the server's template adds to a conversation.
    """

    size: float = USUAL_SIZE
    overhead: int = 0

    chat_template: ClassVar[str] = "the server's"

    def __call__(self, text: str | list[str], *, add_special_tokens: bool = True, verbose: bool = True) -> Any:
        """Return the `input_ids` of a text or of several texts; there are no special tokens."""
        del add_special_tokens, verbose
        if not isinstance(text, str):
            return {"input_ids": [self(part)["input_ids"] for part in text]}
        parts = (part for word in _WORD.findall(text) for part in self._split(word))
        return {"input_ids": [_number(part) for part in parts]}

    def _split(self, word: str) -> list[str]:
        """Return the tokens of a word."""
        share = zlib.crc32(word.encode("utf-8", "surrogatepass")) / 2**32
        count = min(len(word), max(1, int(len(word) / self.size + share)))
        ends = [len(word) * number // count for number in range(count + 1)]
        return [word[begin:end] for begin, end in itertools.pairwise(ends)]

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token."""
        return [self.decode([token]) for token in ids]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of tokens."""
        del skip_special_tokens
        return "".join(_texts[token] for token in ids)

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], *, tokenize: bool, **more: Any) -> str:
        """Return a conversation as one text of about as many tokens as the server's template makes of it."""
        assert not tokenize
        del more
        turns = "".join(f"\n\n{message['role']}: {message['content']}" for message in messages)
        return f"{turns}\n\nassistant:{_FILLER * self.overhead}"


def _number(part: str) -> int:
    """Return the id of a token."""
    if part not in _ids:
        number = next(_numbers)
        _texts[number] = part
        _ids.setdefault(part, number)
    return _ids[part]


def fit_size(text: str, count: int) -> float:
    """Return the size of tokens with which a text has as many of them as a server counted, or nearly as many.

    A server may count fewer tokens than there are words; then each word is one token.
    """
    low, high = 0.25, _LARGEST_SIZE
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if len(EstimatedTokenizer(middle)(text)["input_ids"]) > count:
            low = middle
        else:
            high = middle
    return high
