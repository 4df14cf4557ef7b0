"""Training data: records are checked, mixed by weight, shuffled and tokenized."""

import dataclasses
import functools
import hashlib
import json
import math
import os
import random
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from ctxext.data.records import HELD_OUT, check_place, read_records
from ctxext.errors import CtxextError
from ctxext.files.content import sha256_of
from ctxext.files.offline import forbid_network
from ctxext.finetune.chats import COMPLETION, FORMATS, PROMPT, TEXT, BadRecord, RecordReader
from ctxext.finetune.options import TrainingOptions
from ctxext.finetune.questions.conversations import Conversation, QuestionCounts, QuestionStream
from ctxext.finetune.record_encoder import Document as Document
from ctxext.finetune.record_encoder import RecordEncoder
from ctxext.options import Rule, check_options, option, share_option, with_documented_options

if TYPE_CHECKING:
    from datasets import Dataset

DEMO, _DATA = "demo", "Data"
_CHARACTERS = 4
"""Approximate number of characters per token, to find long documents before they are tokenized."""
_MORE = 64
"""Number of records beyond the number of sequences, as some are too short for one."""


DocumentReader = Callable[[Any, Mapping[int, int]], Iterable[Document]]
"""Function from the model's tokenizer and the number of sequences by length in tokens to the documents."""


@dataclass(frozen=True)
class Source:
    """Data with its weight.

    Attributes:
        data: A file, a folder, or the id of a data set; for records in memory a description.
        weight: Share of the tokens relative to the other sources; None if all are read equally.
        records: Records in memory.
    """

    data: str
    weight: float | None = None
    records: Sequence[Mapping[str, Any]] = ()

    @property
    def is_local(self) -> bool:
        """Whether it is on this machine, so that all of it can be measured before use."""
        return bool(self.records) or Path(self.data).exists()

    def read(self, splits: Sequence[str], seed: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Read the records with their places for error messages."""
        if self.records:
            return ((f"Record {number} of the data", record) for number, record in enumerate(self.records, start=1))
        return read_records(self.data, splits, seed=seed)


def parse_source(word: str) -> Source:
    """Parse a source from the command line: `books.jsonl`, or `books.jsonl:0.7` with a weight."""
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


@with_documented_options
@dataclass(frozen=True)
class TrainingData:
    """Data of a fine-tuning, and the format of its records.

    `words` are files, folders and ids of data sets, with or without a weight: `books.jsonl:0.7`. `records` are
    records in memory and replace `words`.
    """

    words: tuple[str, ...] = option(
        (),
        help="A file or folder of text, JSON, CSV or parquet, or the id of a data set. Repeatable with weights, as "
        "--data books.jsonl:0.7 --data chats.jsonl:0.3. demo generates documents.",
        flags=("--data",),
        repeats=True,
    )
    record_format: str = option(
        "auto",
        help="Format of the records: auto, text, chat, prompt-completion, sharegpt or alpaca.",
        flags=("--format",),
        panel=_DATA,
        choices=tuple(FORMATS),
    )
    text_field: str = option("text", help="Field with the text.", panel=_DATA, advanced=True)
    # None for the held-out split.
    split: str | None = option("train", help="Split of a folder or data set.", panel=_DATA, advanced=True)
    skip_bad_rows: bool = option(
        False,
        help="Skip and count bad records instead of stopping.",
        flags=("--skip-bad-rows",),
        panel=_DATA,
        advanced=True,
    )
    questions: float | None = share_option(
        None,
        help="Share of the tokens from questions that are made about the texts of --data, for example 0.85.",
        panel=_DATA,
    )
    records: tuple[Mapping[str, Any], ...] = ()

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda data: not data.words and not data.records,
            "--data is missing.",
            "Pass a file, or --data demo for generated documents.",
        ),
        Rule(
            lambda data: data.words and data.records,
            "Data must be named or in memory, not both.",
            "Pass words or records.",
        ),
        Rule(
            lambda data: any(source.data == DEMO and not source.is_local for source in data.sources()),
            f"--data {DEMO} cannot be mixed with other data.",
            "Train on one, then on the other.",
        ),
        Rule(
            lambda data: data.questions and data.is_demo,
            f"--questions cannot be combined with --data {DEMO}, which contains questions.",
            "Remove --questions.",
        ),
        Rule(
            lambda data: len({source.weight is None for source in data.sources()}) > 1,
            "Only some of --data have a weight.",
            "Give each one a weight, for example --data a.jsonl:0.7.",
        ),
        Rule(
            lambda data: len(data.sources()) > 1 and data.sources()[0].weight is None and data.remote_id,
            '"{found}" is streamed, so its size is unknown.',
            "Give each --data a weight.",
        ),
    )

    @property
    def is_demo(self) -> bool:
        """Whether documents are generated."""
        return self.words == (DEMO,) and not Path(DEMO).exists()

    def sources(self) -> list[Source]:
        """Return the sources of the data; empty if documents are generated."""
        if self.records:
            return [Source(f"{len(self.records)} record{'s' * (len(self.records) > 1)}", records=self.records)]
        return [] if self.is_demo else [parse_source(word) for word in self.words]

    @property
    def remote_id(self) -> str | None:
        """Id of the first data set that is streamed; None if all data is local."""
        return next((source.data for source in self.sources() if not source.is_local), None)

    def reader(self, options: TrainingOptions) -> DocumentReader:
        """Return the function that reads the documents with a tokenizer; raise if sources cannot be mixed."""
        check_options(self)
        if self.is_demo and options.epochs:
            raise CtxextError("--data demo is endless and cannot be combined with --epochs.", hint="Use --steps.")
        if self.remote_id and options.epochs:
            raise CtxextError("--epochs needs local files: streamed data is not read to its end.", hint="Use --steps.")
        only_answers = options.learn == "answers"
        if self.is_demo:
            return functools.partial(_generate_documents, options.seed, only_answers)
        for source in self.sources() if not self.records else ():
            check_place(source.data)
        return functools.partial(Documents, self, options.seed, only_answers)

    def describe(self) -> dict[str, Any]:
        """Return the description of the data for reports: a file by its name and its digest."""
        if self.is_demo:
            return {"name": DEMO}
        names, digests = [], []
        for source in self.sources():
            if source.records:
                content = json.dumps(source.records, sort_keys=True, default=str).encode()
                names, digests = [source.data], [hashlib.sha256(content).hexdigest()]
                break
            path = Path(source.data)
            name = path.resolve().name if source.is_local else source.data
            names.append(name if source.weight is None else f"{name}:{source.weight:g}")
            files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
            digests += [sha256_of(file) for file in files]
        digest = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
        others = {"format": self.record_format, "text_field": self.text_field, "split": self.split}
        usual = {"format": "auto", "text_field": "text", "split": "train"}
        changed = {key: value for key, value in others.items() if value != usual[key]}
        share = {"questions": self.questions} if self.questions else {}
        return {"name": ", ".join(names), **({"sha256": digest} if digests else {}), **changed, **share}


Data = str | Path | TrainingData | Iterable[str | Path | Mapping[str, Any]]
"""A file, a folder, the id of a data set, or `demo`; or several paths; or texts and records in memory."""


def to_training_data(data: Data, **others: Any) -> TrainingData:
    """Convert the `data` argument of a call; in a list, a string is a text and a Path a file."""
    if isinstance(data, TrainingData):
        return data
    if isinstance(data, str | Path):
        return TrainingData((str(data),), **others)
    entries = list(data)
    if entries and all(isinstance(entry, Path) for entry in entries):
        return TrainingData(tuple(map(str, entries)), **others)
    if not entries or not all(isinstance(entry, str | Mapping) for entry in entries):
        raise CtxextError("A list of data must contain texts and records (dicts), or only Paths.")
    name = next((entry for entry in entries if isinstance(entry, str) and os.path.exists(entry)), None)  # noqa: PTH110
    if name is not None:
        raise CtxextError(
            f'"{name}" in a list is read as text, but is the name of a file.',
            hint=f'For the file, pass [Path("{name}")].',
        )
    records = ({"text": entry} if isinstance(entry, str) else cast("Mapping[str, Any]", entry) for entry in entries)
    return TrainingData(records=tuple(records), **others)


def _generate_documents(
    seed: int, only_answers: bool, tokenizer: Any, num_needed: Mapping[int, int]
) -> Iterator[Document]:
    from ctxext.demo.corpus import long_examples

    for example in long_examples(tokenizer, num_needed, seed):
        yield Document(example.ids, example.is_answer if only_answers else None)


Entry = tuple[str, str] | Conversation | None
"""A record, as JSON text, with its place; or a conversation about the texts; None ends a pass."""


@dataclass
class _Pool:
    """Entries, mostly in endless passes.

    Attributes:
        weight: Share of the tokens, relative to the other pools.
        open: Starts the passes; each name has other random orders.
        taken: Number of tokens divided by the weight.
        is_used_up: Whether each entry was taken once.
    """

    weight: float
    open: Callable[[str], Iterator[Entry]]
    taken: float = 0.0
    is_used_up: bool = False

    def __post_init__(self) -> None:
        self.entries = self.open("")

    def open_again(self, name: str) -> "_Pool":
        """Return a pool of the same entries in other random orders."""
        return _Pool(self.weight, lambda _: self.open(name))


def _mix(pools: list[_Pool]) -> Iterator[tuple[_Pool, tuple[str, str] | Conversation]]:
    """Yield entries with their pool, until every pool is used up; the caller updates the pool's token count."""
    while not all(pool.is_used_up for pool in pools):
        pool = min(pools, key=lambda pool: pool.taken)
        try:
            entry = next(pool.entries)
        except StopIteration:  # A stream is read once.
            pools.remove(pool)
            continue
        if entry is None:
            pool.is_used_up = True
        else:
            yield pool, entry


class Documents:
    """The documents of files and data sets, shuffled, in one pass; their counts grow during the pass.

    If there are several pools (one per weighted source, and one of questions about the texts), the next record is from
    the pool with the fewest tokens for its weight so far.

    Args:
        data: The data, and the format of its records.
        seed: Sets the order.
        only_answers: Whether only marked answers count in the loss.
        tokenizer: A transformers tokenizer.
        num_needed: Number of sequences that the run needs per length, in tokens. Each document supplies its share of
            them, so that the run uses as many documents as possible.

    Attributes:
        reader: Converter of records, with counts of bad ones.
        chats: Renderer of conversations, with counts of omitted content.
        num_in_all: Number of records; None if they are streamed.
        num_tokens_in_all: Approximate number of tokens in them.
        has_questions: Whether conversations about the texts are made.
        questions: Counts of them; None before the first.
    """

    def __init__(
        self, data: TrainingData, seed: int, only_answers: bool, tokenizer: Any, num_needed: Mapping[int, int]
    ) -> None:
        self._data, self._seed, self._num_needed = data, seed, num_needed
        self.reader = RecordReader(data.record_format, data.text_field, data.skip_bad_rows)
        self._encoder = RecordEncoder(tokenizer, only_answers=only_answers)
        self.chats = self._encoder.chats
        self._question_share = data.questions or 0.0
        self.has_questions = self._question_share > 0
        self.questions: QuestionCounts | None = None
        self.num_in_all: int | None = None
        self.num_tokens_in_all: int | None = None
        self._num_characters = self._num_read = self._num_tokens_read = 0

    def share(self, length: int) -> float:
        """Return the share of a document's sequences of a length that is used: needed tokens over available tokens.

        For streamed data of unknown size, a document of average length supplies one sequence.
        """
        if self.num_tokens_in_all is None:
            return min(1.0, length * self._num_read / max(1, self._num_tokens_read))
        num_needed = (1 - self._question_share) * self._num_needed[length]
        return min(1.0, length * num_needed / max(1, self.num_tokens_in_all))

    def _estimate_used(self, document: Document) -> int:
        """Estimate the number of used tokens of a document, in sequences of all lengths."""
        if document.is_learned is not None:
            return len(document.ids)
        num_used = 0
        for length in self._num_needed:
            num_pieces, num_chosen = count_pieces(len(document.ids), length, self.share(length))
            num_used += num_chosen * length if num_chosen < num_pieces else len(document.ids)
        return num_used

    def __iter__(self) -> Iterator[Document]:
        """Yield the documents."""
        num_characters = 0
        with tempfile.TemporaryDirectory(prefix="ctxext-records-") as folder:
            pools = list(self._open_pools(Path(folder)))
            if self.has_questions:
                pools = self._add_questions(pools)
            for pool, entry in _mix(pools):
                if isinstance(entry, Conversation):
                    pool.taken += len(entry.document.ids) / pool.weight
                    yield entry.document
                    continue
                place, text = entry
                try:
                    document = self._encoder.encode(json.loads(text))
                except BadRecord as error:
                    pool.taken += 1 / pool.weight
                    hint = error.hint or f'Use a "{PROMPT}" and a "{COMPLETION}", or "{TEXT}".'
                    self.reader.refuse(f"{place} {error}.", hint)
                    continue
                num_characters += len(text)
                self._num_read += 1
                self._num_tokens_read += len(document.ids)
                if self.num_in_all is not None:
                    self.num_tokens_in_all = round(
                        self._num_tokens_read * self._num_characters / max(1, num_characters)
                    )
                pool.taken += max(1, self._estimate_used(document)) / pool.weight
                yield document

    def iterate_conversations(self) -> Iterator[Conversation]:
        """Yield conversations with questions about the texts, without the texts themselves; endless for local data."""
        with tempfile.TemporaryDirectory(prefix="ctxext-records-") as folder:
            pools = list(self._open_pools(Path(folder)))
            yield from (entry for entry in self._make_questions(pools) if entry is not None)

    def _add_questions(self, pools: Sequence[_Pool]) -> list[_Pool]:
        """Return the pools with one of questions, which has its share of the tokens."""
        share, total = self._question_share, sum(pool.weight for pool in pools)
        for pool in pools:
            pool.weight *= (1 - share) / total
        return [*pools, _Pool(share, lambda _: self._make_questions(pools))]

    def _make_questions(self, pools: Sequence[_Pool]) -> Iterator[Conversation | None]:
        """Yield conversations about the texts of pools, and None after each pass over all of them."""
        stream = QuestionStream(self._encoder, self._num_needed, self._seed)
        self.questions = stream.counts
        return stream.make(_read_texts([pool.open_again("questions") for pool in pools]))

    def _open_pools(self, folder: Path) -> Iterator[_Pool]:
        import numpy as np

        sources = self._data.sources()
        groups = [sources] if sources[0].weight is None else [[source] for source in sources]
        self.num_in_all = 0 if all(source.is_local for source in sources) else None
        for group_number, group in enumerate(groups):
            weight = group[0].weight or 1.0
            if not group[0].is_local:
                yield _Pool(weight, functools.partial(self._stream, group))
                continue
            measured = array("q", (len(text) for _, text in self._read(group, self.reader)))
            sizes = np.array(measured, dtype=np.int64)
            if self.num_in_all is not None:
                self.num_in_all += len(sizes)
            self._num_characters += int(sizes.sum())
            if measured:
                yield _Pool(weight, functools.partial(self._shuffle_records, group, sizes, folder / f"{group_number}"))

    def _stream(self, group: Sequence[Source], name: str) -> Iterator[tuple[str, str]]:
        """Yield the records of a stream once; bad ones are counted in its first reading."""
        return self._read(group, dataclasses.replace(self.reader, unused=Counter()) if name else self.reader)

    def _read(self, group: Sequence[Source], reader: RecordReader) -> Iterator[tuple[str, str]]:
        """Yield the places and records, as JSON text, in the order of the sources."""
        splits = (self._data.split,) if self._data.split else HELD_OUT
        for source in group:
            for place, record in source.read(splits, self._seed):
                if (read := reader.read(record, place)) is None:
                    continue
                if self.has_questions and TEXT not in read:
                    raise CtxextError(
                        f"{place} is not a text, so no questions can be made about it.",
                        hint="Use only texts, or remove --questions.",
                    )
                yield place, json.dumps(read, ensure_ascii=False, default=str)

    def _shuffle_records(
        self, group: Sequence[Source], sizes: Any, path: Path, name: str
    ) -> Iterator[tuple[str, str] | None]:
        """Yield records in random order, pass after pass, with None after each pass; only needed records are copied.

        Records longer than a training sequence come earlier, in proportion to their size, so that all of the data is
        equally likely to be read; `Dataset.shuffle` does not support sizes.
        """
        import numpy as np

        # Weighted sampling without replacement: the waiting times of events with these rates (Efraimidis and Spirakis).
        rates = np.maximum(1.0, sizes / (_CHARACTERS * max(self._num_needed)))
        num_first, copied, rows = sum(self._num_needed.values()) + _MORE, np.arange(0), None
        path = path.with_name(path.name + name)
        for epoch in count():
            seed = random.Random(f"{self._seed} {path.name} {epoch}").getrandbits(64)
            times = np.random.default_rng(seed).exponential(size=len(sizes)) / rates
            order = np.argsort(times, kind="stable")
            for part in (order[:num_first], order[num_first:]):
                if not np.isin(part, copied).all():
                    # First copy as many as the run needs; copy all once those are used up.
                    copied = np.sort(order if len(copied) else part)
                    rows = self._copy(group, copied, path.with_suffix(f".{len(copied)}"))
                assert rows is not None, "no pool is empty"
                for row in rows.select(np.searchsorted(copied, part)):
                    yield row["place"], row["record"]
            yield None

    def _copy(self, group: Sequence[Source], numbers: Any, path: Path) -> "Dataset":
        """Copy some records of some sources to a memory-mapped file, in the order of the sources."""
        with forbid_network():
            from datasets import Dataset, Features, Value
            from datasets.arrow_writer import ArrowWriter
        features = Features({"place": Value("string"), "record": Value("large_string")})
        selected = set(numbers.tolist())
        # Bad records were counted when the sources were measured.
        again = dataclasses.replace(self.reader, unused=Counter())
        with ArrowWriter(features=features, path=str(path), writer_batch_size=100) as writer:
            for number, (place, record) in enumerate(self._read(group, again)):
                if number in selected:
                    writer.write({"place": place, "record": record})
            writer.finalize()
        return Dataset.from_file(str(path))


def _read_texts(pools: list[_Pool]) -> Iterator[tuple[str, str] | None]:
    """Yield the texts of pools by their weights with their places, and None after each pass over all of them."""
    while pools:
        for pool, entry in _mix(pools):
            assert isinstance(entry, tuple), "only records are in these pools"
            place, record = entry
            text = json.loads(record)[TEXT]
            pool.taken += max(1, len(text)) / pool.weight
            yield place, text
        yield None
        for pool in pools:
            pool.is_used_up = False


def count_pieces(num_tokens: int, length: int, share: float) -> tuple[int, int]:
    """Return the number of whole sequences in a document of `num_tokens` tokens, and how many of them are used."""
    num_pieces = num_tokens // length
    return num_pieces, math.ceil(share * num_pieces)
