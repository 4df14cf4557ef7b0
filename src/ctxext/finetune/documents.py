"""What is learned from: texts, prompts with their answers, and conversations, as token ids."""

import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ctxext.data.encoding import Encoder
from ctxext.data.records import TRAIN
from ctxext.errors import CtxextError
from ctxext.finetune.chats import ChatReader
from ctxext.finetune.formats import COMPLETION, MESSAGES, PROMPT, TEXT, BadRecord, RecordReader
from ctxext.finetune.mixture import Mixture, Source

LEARN = ("answers", "all")
_CHARACTERS = 4
"""About how many characters a token has, to tell long documents before they are tokenized."""
_MORE = 64
"""Records that are kept beyond the number of sequences, as some are too short for one."""


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


@dataclass
class Documents:
    """The documents of files and data sets, shuffled, in one pass; what is known of them grows while it lasts.

    Args:
        sources: Files, folders and data sets.
        tokenizer: A transformers tokenizer.
        learn: "answers": where answers are marked, the loss counts nothing else; "all": it counts every token.
        reader: Checks the records.
        splits: Names of the split to read.
        seed: Decides the order.
        long_length: Tokens from which a document is long.
        long_share: Share of the tokens that come from long documents; None to take them as they are.
        wanted: For each length, in tokens, how many sequences the run needs. Each document then gives its share of
            them, so that the run sees as many documents as it can. Empty to use documents whole.

    Attributes:
        num_in_all: Records that there are; None where they are streamed.
        num_tokens_in_all: About how many tokens they have.
        chats: Renders conversations, and counts what is left out of them.
    """

    sources: Sequence[Source]
    tokenizer: Any
    learn: str = "answers"
    reader: RecordReader = field(default_factory=RecordReader)
    splits: Sequence[str] = TRAIN
    seed: int = 0
    long_length: int = 0
    long_share: float | None = None
    wanted: Mapping[int, int] = field(default_factory=dict)
    num_in_all: int | None = None
    num_tokens_in_all: int | None = None
    chats: ChatReader = field(init=False)
    _num_read: int = 0
    _num_tokens_read: int = 0

    def __post_init__(self) -> None:
        self.chats = ChatReader(self.tokenizer)

    def share(self, length: int) -> float:
        """The share of a document's sequences of a length that is used: what the run needs of what the data has.

        The size of streamed data is not known. There a document of average length gives one sequence.
        """
        if not self.wanted:
            return 1.0
        if self.num_tokens_in_all is None:
            return min(1.0, length * self._num_read / max(1, self._num_tokens_read))
        return min(1.0, length * self.wanted[length] / max(1, self.num_tokens_in_all))

    def _num_used(self, document: Document) -> int:
        """About how many tokens of a document are used."""
        if not self.wanted or document.is_learned is not None:
            return len(document.ids)
        length = max(self.wanted)
        num_pieces, num_chosen = count_pieces(len(document.ids), length, self.share(length))
        return num_chosen * length if num_chosen < num_pieces else len(document.ids)

    def __iter__(self) -> Iterator[Document]:
        """The documents."""
        encoder = Encoder(self.tokenizer, chat_template=False)
        num_tokens = num_characters = 0
        with tempfile.TemporaryDirectory(prefix="ctxext-records-") as folder:
            mixture = Mixture(
                self.sources,
                self.splits,
                self.reader,
                Path(folder),
                self.seed,
                long_share=self.long_share,
                is_long=lambda text: len(text) >= self.long_length and len(encoder.document(text)) >= self.long_length,
                piece_size=_CHARACTERS * max(self.wanted, default=0),
                num_wanted=sum(self.wanted.values()) + _MORE if self.wanted else None,
            )
            for place, record, size in mixture:
                self.num_in_all = mixture.num_records
                try:
                    document = as_document(record, encoder, self.chats, self.learn)
                except BadRecord as error:
                    mixture.took(0)
                    hint = error.hint or f'Give a "{PROMPT}" and a "{COMPLETION}", or "{TEXT}".'
                    self.reader.refuse(f"{place} {error}.", hint)
                    continue
                num_tokens, num_characters = num_tokens + len(document.ids), num_characters + size
                self._num_read, self._num_tokens_read = self._num_read + 1, num_tokens
                if self.num_in_all is not None:
                    self.num_tokens_in_all = round(num_tokens * mixture.num_characters / max(1, num_characters))
                mixture.took(self._num_used(document))
                yield document


def count_pieces(num_tokens: int, length: int, share: float) -> tuple[int, int]:
    """How many whole sequences a document of so many tokens has, and how many of them are used."""
    num_pieces = num_tokens // length
    return num_pieces, math.ceil(share * num_pieces)


def as_document(record: Mapping[str, Any], encoder: Encoder, chats: ChatReader, learn: str) -> Document:
    """The tokens of a record that a format has read. Completions and assistant turns are answers.

    Raises:
        BadRecord: nothing can be learned from it.
    """
    if TEXT in record:
        return Document(encoder.document(record[TEXT]))
    tokenizer = encoder.tokenizer
    is_chat = MESSAGES in record and (PROMPT not in record or bool(getattr(tokenizer, "chat_template", None)))
    parts = chats.parts(record) if is_chat else [(record[PROMPT], False), (record[COMPLETION], True)]
    # The end token is learned with the answer: a model that never learned where to stop does not stop.
    end = [] if is_chat or tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids = [] if is_chat else encoder.start()
    marks = [False] * len(ids)
    for text, is_answer in parts:
        tokens = [*encoder.piece(text), *(end if is_answer else [])]
        ids = ids + tokens
        marks += [is_answer] * len(tokens)
    return Document(ids, marks if learn == "answers" else None)


def check_sources(sources: Sequence[Source], long_share: float | None) -> None:
    """Refuse what cannot be mixed before a model is loaded."""
    if len({source.weight is None for source in sources}) > 1:
        raise CtxextError("Some of --data have a weight and others none.", hint="Give each one, as --data a.jsonl:0.7.")
    remote = next((source.data for source in sources if not source.is_local), None)
    if remote and long_share is not None:
        raise CtxextError(f'--long-share needs files, and "{remote}" is streamed.', hint="Download it first.")
    if remote and len(sources) > 1 and sources[0].weight is None:
        raise CtxextError(f'"{remote}" is streamed, so its size is not known.', hint="Give each --data a weight.")
