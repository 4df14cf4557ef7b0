"""Tokenization of converted records: documents, and the tokens of their answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ctxext.data.encoding import Encoder
from ctxext.finetune.chats import COMPLETION, MESSAGES, PROMPT, TEXT, ChatReader

PARTS = "parts"
"""Field of a record with the parts of its text, each with whether it is an answer."""


@dataclass(frozen=True)
class Document:
    """Token ids of one document.

    Attributes:
        ids: The tokens, including the tokenizer's start token.
        is_learned: Whether each token counts in the loss; None if all do and the document may be cut.
    """

    ids: Sequence[int]
    is_learned: Sequence[bool] | None = None


class RecordEncoder:
    """Encoder of converted records.

    Args:
        tokenizer: A transformers tokenizer.
        only_answers: Whether only answers count in the loss.

    Attributes:
        chats: Renderer of conversations, with counts of omitted content.
        has_template: Whether conversations can be rendered.
    """

    def __init__(self, tokenizer: Any, *, only_answers: bool) -> None:
        self.tokenizer, self._only_answers = tokenizer, only_answers
        self.chats, self._encoder = ChatReader(tokenizer), Encoder(tokenizer, chat_template=False)
        self.has_template = bool(getattr(tokenizer, "chat_template", None))

    def encode(self, record: Mapping[str, Any]) -> Document:
        """Tokenize a converted record; completions and assistant turns are answers.

        Raises:
            BadRecord: The record has nothing to learn.
        """
        if TEXT in record:
            return Document(self._encoder.encode_document(record[TEXT]))
        is_chat = MESSAGES in record and (PROMPT not in record or self.has_template)
        parts: Sequence[tuple[str, bool]] = self.chats.split(record) if is_chat else _read_parts(record)
        ids = [] if is_chat else self._encoder.get_start_tokens()
        marks = [False] * len(ids)
        for text, is_answer in parts:
            tokens = self._encoder.encode_piece(text)
            ids = ids + tokens
            marks += [is_answer] * len(tokens)
        if not is_chat and self.tokenizer.eos_token_id is not None:
            # The end token is learned with the answer: without it, a model does not learn to stop.
            ids, marks = [*ids, self.tokenizer.eos_token_id], [*marks, True]
        return Document(ids, marks if self._only_answers else None)

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Count the tokens of many pieces of a text in one call, which is faster."""
        return self._encoder.count_tokens(texts)


def _read_parts(record: Mapping[str, Any]) -> Sequence[tuple[str, bool]]:
    return record[PARTS] if PARTS in record else [(record[PROMPT], False), (record[COMPLETION], True)]
