"""What is learned from: texts, prompts with their answers, and conversations, as token ids."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ctxext.data.encoding import Encoder
from ctxext.data.texts import FIELD, read_records
from ctxext.errors import CtxextError

PROMPT, COMPLETION, MESSAGES = "prompt", "completion", "messages"
LEARN = ("answers", "all")


@dataclass(frozen=True)
class Document:
    """Token ids of one document.

    Attributes:
        ids: The tokens, the tokenizer's begin token included.
        is_learned: For each token whether the loss counts it; None where all are learned, and the document may be cut.
    """

    ids: Sequence[int]
    is_learned: Sequence[bool] | None = None


DocumentReader = Callable[[Any, Mapping[int, int]], Iterable[Document]]
"""Gives the documents, from the tokenizer of the model and how many sequences are wanted of each length in tokens."""


def read_documents(data: str, tokenizer: Any, learn: str = "answers") -> Iterator[Document]:
    """The documents of a file or a data set, by the fields that trl and datasets know.

    A record has a `text`, or a `prompt` and its `completion`, or `messages` with roles, which the tokenizer's chat
    template renders. Completions and what the assistant says are answers.

    Args:
        data: A text, JSON lines or parquet file, or the id of a data set.
        tokenizer: A transformers tokenizer.
        learn: "answers": where answers are marked, the loss counts nothing else; "all": it counts every token.

    Raises:
        CtxextError: the data cannot be read, or a record has no such field.
    """
    encoder = Encoder(tokenizer, chat_template=False)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for place, record in read_records(data, (FIELD, PROMPT, COMPLETION, MESSAGES)):
        if isinstance(record.get(FIELD), str):
            yield Document(encoder.document(record[FIELD]))
            continue
        # The end is learned with the answer: a model that was never told where to stop goes on.
        parts = _parts(record, place, tokenizer)
        is_chat = MESSAGES in record
        ids = [] if is_chat else encoder.start()
        marks = [False] * len(ids)
        for text, is_answer in parts:
            piece = [*encoder.piece(text), *(end if is_answer and not is_chat else [])]
            ids = ids + piece
            marks += [is_answer] * len(piece)
        yield Document(ids, marks if learn == "answers" else None)


def _parts(record: Mapping[str, Any], place: str, tokenizer: Any) -> list[tuple[str, bool]]:
    """The text of a record in pieces, each with whether it is an answer."""
    if isinstance(record.get(PROMPT), str) and isinstance(record.get(COMPLETION), str):
        return [(record[PROMPT], False), (record[COMPLETION], True)]
    if not isinstance(record.get(MESSAGES), list):
        raise CtxextError(
            f'{place} has no "{FIELD}", no "{PROMPT}" with a "{COMPLETION}", and no "{MESSAGES}".',
            hint="Give every record one of them.",
        )
    if not getattr(tokenizer, "chat_template", None):
        raise CtxextError(
            f"{place} is a conversation, and this model's tokenizer has no chat template.",
            hint=f'Give a "{PROMPT}" and a "{COMPLETION}", or "{FIELD}".',
        )
    return _turns(record[MESSAGES], place, tokenizer)


def _turns(messages: list[Any], place: str, tokenizer: Any) -> list[tuple[str, bool]]:
    """A conversation as its template renders it, cut where the assistant's turns begin and end."""
    render = tokenizer.apply_chat_template
    parts, done = [], ""
    try:
        for number, message in enumerate(messages, start=1):
            if message["role"] != "assistant":
                continue
            before = str(render(messages[: number - 1], tokenize=False, add_generation_prompt=True))
            after = str(render(messages[:number], tokenize=False))
            if not before.startswith(done) or not after.startswith(before):
                raise ValueError("it renders a turn otherwise once others follow")
            parts += [(before[len(done) :], False), (after[len(before) :], True)]
            done = after
    except Exception as error:
        # A template is a program of its maker's, and stops in any way it likes.
        raise CtxextError(
            f"{place} cannot be rendered by the tokenizer's chat template: {str(error).splitlines()[0]}.",
            hint=f'Render it yourself, as "{PROMPT}" and "{COMPLETION}".',
        ) from error
    if not parts:
        raise CtxextError(f"{place} has no message of the assistant.", hint="There is nothing to learn from it.")
    return parts
