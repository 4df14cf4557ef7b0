"""Which documents are learned from, in which order: records of files and data sets, mixed, shuffled, as token ids."""

import dataclasses
import json
import math
import random
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from ctxext.data.encoding import Encoder
from ctxext.data.records import TRAIN, read_records
from ctxext.errors import CtxextError
from ctxext.finetune.chats import ChatReader
from ctxext.finetune.formats import COMPLETION, MESSAGES, PROMPT, TEXT, BadRecord, Record, RecordReader

_CHARACTERS = 4
"""About how many characters a token has, to tell long documents before they are tokenized."""
_MORE = 64
"""Records that are kept beyond the number of sequences, as some are too short for one."""
_COLUMNS = {"place": "string", "record": "large_string", "size": "int64"}
Numbered = tuple[str, Record, int]
"""A record with its place before and its characters behind it."""


@dataclass(frozen=True)
class Source:
    """Data and how much of it is wanted.

    Attributes:
        data: A file, a folder, or the id of a data set; of records in memory a description.
        weight: Its share of the tokens beside the other sources'; None where all are read alike.
        records: Records in memory.
    """

    data: str
    weight: float | None = None
    records: Sequence[Record] | None = None

    @property
    def is_local(self) -> bool:
        """Whether it lies on this machine, so that all of it can be seen before any is used."""
        return self.records is not None or Path(self.data).exists()

    def read(self, splits: Sequence[str], seed: int) -> Iterator[tuple[str, Record]]:
        """The records with their places for error messages."""
        if self.records is None:
            return read_records(self.data, splits, seed=seed)
        return ((f"Record {number} of the data", record) for number, record in enumerate(self.records, start=1))


def parse_source(word: str) -> Source:
    """A source as the command line names it: `books.jsonl`, or `books.jsonl:0.7` for its weight."""
    data, _, weight = word.rpartition(":")
    try:
        share = float(weight)
    except ValueError:
        return Source(word)
    if not data or Path(word).exists():
        return Source(word)
    if not 0 < share < float("inf"):
        raise CtxextError(f'The weight of "{data}" must be above 0, not "{weight}".')
    return Source(data, share)


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
class _Pool:
    """Records of which one is taken at a time, pass after pass, each in another order; None ends a pass."""

    weight: float
    records: Iterator[Numbered | None]
    taken: float = 0.0  # Tokens over the weight.
    is_used_up: bool = False  # Each was taken once.

    def take(self, num_tokens: int) -> None:
        """Count a record that was taken."""
        self.taken += max(1, num_tokens) / self.weight


@dataclass
class Documents:
    """The documents of files and data sets, shuffled, in one pass; what is known of them grows while it lasts.

    Of several pools of records (sources with weights, long and short records) the one that gave the fewest tokens for
    its weight is next.

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
    _encoder: Encoder = field(init=False)
    _num_characters: int = 0
    _num_read: int = 0
    _num_tokens_read: int = 0

    def __post_init__(self) -> None:
        self.chats = ChatReader(self.tokenizer)
        self._encoder = Encoder(self.tokenizer, chat_template=False)

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
        num_tokens = num_characters = 0
        with tempfile.TemporaryDirectory(prefix="ctxext-records-") as folder:
            for pool, (place, record, size) in self._mixed(Path(folder)):
                try:
                    document = as_document(record, self._encoder, self.chats, self.learn)
                except BadRecord as error:
                    pool.take(0)
                    hint = error.hint or f'Give a "{PROMPT}" and a "{COMPLETION}", or "{TEXT}".'
                    self.reader.refuse(f"{place} {error}.", hint)
                    continue
                num_tokens, num_characters = num_tokens + len(document.ids), num_characters + size
                self._num_read, self._num_tokens_read = self._num_read + 1, num_tokens
                if self.num_in_all is not None:
                    self.num_tokens_in_all = round(num_tokens * self._num_characters / max(1, num_characters))
                pool.take(self._num_used(document))
                yield document

    def _mixed(self, folder: Path) -> Iterator[tuple[_Pool, Numbered]]:
        """Records of all pools, until each was taken once, with their pool, which is told how much they had."""
        is_weighted = self.sources[0].weight is not None
        groups = [[source] for source in self.sources] if is_weighted else [list(self.sources)]
        self.num_in_all, self._num_characters = 0, 0
        pools = [pool for number, group in enumerate(groups) for pool in self._pools_of(group, f"{number}", folder)]
        while not all(pool.is_used_up for pool in pools):
            pool = min(pools, key=lambda pool: pool.taken)
            try:
                record = next(pool.records)
            except StopIteration:
                pools.remove(pool)
                continue
            if record is None:
                pool.is_used_up = True
            else:
                yield pool, record

    def _pools_of(self, group: Sequence[Source], name: str, folder: Path) -> list[_Pool]:
        import numpy as np

        weight = group[0].weight or 1.0
        if not group[0].is_local:
            self.num_in_all = None
            return [_Pool(weight, self._read(group[:1], self.reader))]
        measured = array("q")
        kinds: dict[bool, list[int]] = {True: [], False: []}
        for number, (_, record, size) in enumerate(self._read(group, self.reader)):
            measured.append(size)
            if self.long_share is not None:
                kinds[self._is_long(_as_text(record))].append(number)
        sizes = np.array(measured, dtype=np.int64)
        if self.num_in_all is not None:
            self.num_in_all += len(sizes)
        self._num_characters += int(sizes.sum())
        if self.long_share is None:
            return [_Pool(weight, self._shuffled(group, sizes, range(len(sizes)), name, folder))]
        shares = {True: self.long_share, False: 1 - self.long_share}
        return [
            _Pool(weight * share, self._shuffled(group, sizes, kinds[is_long], f"{name} {is_long}", folder))
            for is_long, share in shares.items()
            if kinds[is_long] and share > 0
        ]

    def _is_long(self, text: str) -> bool:
        return len(text) >= self.long_length and len(self._encoder.document(text)) >= self.long_length

    def _read(self, group: Sequence[Source], reader: RecordReader) -> Iterator[Numbered]:
        for source in group:
            for place, record in source.read(self.splits, self.seed):
                if (read := reader.read(record, place)) is not None:
                    yield place, read, len(_as_text(read))

    def _store(self, group: Sequence[Source], numbers: Sequence[int], path: Path) -> Any:
        """Some records of some sources as a file that is mapped, in the order in which the sources have them."""
        from datasets import Dataset, Features, Value
        from datasets.arrow_writer import ArrowWriter

        features = Features({name: Value(kind) for name, kind in _COLUMNS.items()})
        wanted = set(numbers)
        # Bad records were counted when the sources were measured.
        again = dataclasses.replace(self.reader, unused=Counter())
        with ArrowWriter(features=features, path=str(path), writer_batch_size=100) as writer:
            for number, (place, record, size) in enumerate(self._read(group, again)):
                if number in wanted:
                    writer.write({"place": place, "record": _as_text(record), "size": size})
            writer.finalize()
        return Dataset.from_file(str(path))

    def _shuffled(
        self, group: Sequence[Source], sizes: Any, chosen: Sequence[int], name: str, folder: Path
    ) -> Iterator[Numbered | None]:
        """Records in random order, pass after pass; those that are not needed are not copied."""
        num_first = sum(self.wanted.values()) + _MORE if self.wanted else len(chosen)
        stored: dict[int, tuple[Any, int]] = {}
        for epoch in count():
            order = self._order(sizes, chosen, f"{self.seed} {name} {epoch}")
            for done, number in enumerate(order):
                if number not in stored:
                    # First as many as the run needs, and once those are used up all that are left.
                    numbers = sorted({*(order[done:] if stored else order[:num_first])} - stored.keys())
                    path = folder / f"records-{name.replace(' ', '-')}-{len(stored)}.arrow"
                    rows = self._store(group, numbers, path)
                    stored |= {other: (rows, row) for row, other in enumerate(numbers)}
                rows, row = stored[number]
                entry = rows[row]
                yield entry["place"], json.loads(entry["record"]), entry["size"]
            if not chosen:
                return
            yield None

    def _order(self, sizes: Any, chosen: Sequence[int], seed: str) -> list[int]:
        """The records of one pass, those with more than a training sequence earlier, in proportion to their size.

        So every part of the data is as likely to be read.
        """
        import numpy as np

        rng, piece_size = random.Random(seed), _CHARACTERS * max(self.wanted, default=0)
        if not piece_size:
            return rng.sample(chosen, len(chosen))
        places = np.array(chosen, dtype=np.int64)
        # Weighted sampling without replacement: the waiting times of events with these rates (Efraimidis and Spirakis).
        rates = np.maximum(1.0, sizes[places] / piece_size)
        times = np.random.default_rng(rng.getrandbits(64)).exponential(size=len(places)) / rates
        return [int(place) for place in places[np.argsort(times, kind="stable")]]


def _as_text(record: Record) -> str:
    return json.dumps(record, ensure_ascii=False, default=str)


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
