"""Which record comes next: several sources by their weights, each shuffled, long records more often where asked for."""

import dataclasses
import json
import random
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from ctxext.data.records import read_records
from ctxext.errors import CtxextError
from ctxext.finetune.formats import Record, RecordReader

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


@dataclass
class Pool:
    """Records of which one is taken at a time.

    Attributes:
        weight: Its share of the tokens.
        records: Its records, pass after pass, each in another order; None ends a pass.
        taken: Tokens that were taken, over the weight.
        is_used_up: Whether each was taken once.
        is_empty: Whether nothing comes any more.
    """

    weight: float
    records: Iterator[Numbered | None]
    taken: float = 0.0
    is_used_up: bool = False
    is_empty: bool = False


@dataclass
class Mixture:
    """Records of all sources in the order in which they are trained on, until each was taken once.

    The pool that got the fewest tokens for its weight is next. Each record must be answered with its tokens, by `took`.

    Args:
        sources: The data.
        splits: Names of the split to read.
        reader: Checks the records.
        folder: Where what was read is kept, to be taken in any order.
        seed: Decides the order.
        long_share: Share of the tokens that come from long records; None to take them as they are.
        is_long: Whether a record, as JSON text, is long.
        piece_size: Characters of a training sequence. Records that have more come earlier, in proportion to their
            size, so that every part of the data is as likely to be read; 0 if all are equally likely.
        num_wanted: Records of each source that are enough; None for all of them.

    Attributes:
        num_records: Records in all; None where some are streamed.
        num_characters: Characters of them.
    """

    sources: Sequence[Source]
    splits: Sequence[str]
    reader: RecordReader
    folder: Path
    seed: int
    long_share: float | None = None
    is_long: Callable[[str], bool] = bool
    piece_size: int = 0
    num_wanted: int | None = None
    num_records: int | None = 0
    num_characters: int = 0
    _last: Pool | None = None

    def __iter__(self) -> Iterator[Numbered]:
        is_weighted = self.sources[0].weight is not None
        groups = [[source] for source in self.sources] if is_weighted else [list(self.sources)]
        pools = [pool for number, group in enumerate(groups) for pool in self._pools_of(group, number)]
        while not all(pool.is_used_up for pool in pools):
            pool = min((pool for pool in pools if not pool.is_empty), key=lambda pool: pool.taken)
            try:
                record = next(pool.records)
            except StopIteration:
                pool.is_used_up = pool.is_empty = True
                continue
            if record is None:
                pool.is_used_up = True
                continue
            self._last = pool
            yield record

    def took(self, num_tokens: int) -> None:
        """Say how many tokens the last record had."""
        assert self._last is not None
        self._last.taken += max(1, num_tokens) / self._last.weight

    def _pools_of(self, group: Sequence[Source], number: int) -> list[Pool]:
        weight = group[0].weight or 1.0
        if not group[0].is_local:
            self.num_records = None
            return [Pool(weight, self._read(group[0]))]
        sizes, kinds = self._measure(group)
        if self.num_records is not None:
            self.num_records += len(sizes)
        self.num_characters += int(sizes.sum())
        if self.long_share is None:
            return [Pool(weight, self._shuffled(group, sizes, range(len(sizes)), f"{number}"))]
        shares = {True: self.long_share, False: 1 - self.long_share}
        return [
            Pool(weight * share, self._shuffled(group, sizes, kinds[is_long], f"{number} {is_long}"))
            for is_long, share in shares.items()
            if kinds[is_long] and share > 0
        ]

    def _read(self, source: Source) -> Iterator[Numbered]:
        for place, record in source.read(self.splits, self.seed):
            if (read := self.reader.read(record, place)) is not None:
                yield place, read, len(json.dumps(read, ensure_ascii=False, default=str))

    def _measure(self, group: Sequence[Source]) -> tuple[Any, dict[bool, list[int]]]:
        """The characters of each record of some sources, and which records are long and which are not."""
        import numpy as np

        sizes = array("q")
        kinds: dict[bool, list[int]] = {True: [], False: []}
        for number, (_, record, size) in enumerate(entry for source in group for entry in self._read(source)):
            sizes.append(size)
            if self.long_share is not None:
                kinds[self.is_long(json.dumps(record, ensure_ascii=False, default=str))].append(number)
        return np.array(sizes, dtype=np.int64), kinds

    def _store(self, group: Sequence[Source], numbers: Sequence[int], name: str) -> Any:
        """Some records of some sources as a file that is mapped, in the order in which the sources have them."""
        from datasets import Dataset, Features, Value
        from datasets.arrow_writer import ArrowWriter

        path = self.folder / f"records-{name.replace(' ', '-')}.arrow"
        features = Features({name: Value(kind) for name, kind in _COLUMNS.items()})
        wanted = set(numbers)
        # Bad records were counted when the sources were measured.
        again = dataclasses.replace(self, reader=dataclasses.replace(self.reader, unused=Counter()))
        entries = enumerate(entry for source in group for entry in again._read(source))
        with ArrowWriter(features=features, path=str(path), writer_batch_size=100) as writer:
            for number, (place, record, size) in entries:
                if number in wanted:
                    text = json.dumps(record, ensure_ascii=False, default=str)
                    writer.write({"place": place, "record": text, "size": size})
            writer.finalize()
        return Dataset.from_file(str(path))

    def _shuffled(
        self, group: Sequence[Source], sizes: Any, chosen: Sequence[int], name: str
    ) -> Iterator[Numbered | None]:
        """Records in random order, pass after pass; those that are not needed are not copied."""
        num_first = len(chosen) if self.num_wanted is None else min(len(chosen), self.num_wanted)
        stored: list[tuple[dict[int, int], Any]] = []
        for epoch in count():
            order = self._order(sizes, chosen, f"{self.seed} {name} {epoch}")
            for done, number in enumerate(order):
                entry = next((rows[places[number]] for places, rows in stored if number in places), None)
                if entry is None:
                    # First as many as the run needs, and once those are used up all that are left.
                    left = order[:num_first] if not done and not stored else order[done:]
                    numbers = sorted(other for other in left if not any(other in places for places, _ in stored))
                    rows = self._store(group, numbers, f"{name} {len(stored)}")
                    stored.append(({other: row for row, other in enumerate(numbers)}, rows))
                    entry = rows[stored[-1][0][number]]
                yield entry["place"], json.loads(entry["record"]), entry["size"]
            if not chosen:
                return
            yield None

    def _order(self, sizes: Any, chosen: Sequence[int], seed: str) -> list[int]:
        """The records of one pass."""
        import numpy as np

        rng = random.Random(seed)
        if not self.piece_size:
            return rng.sample(chosen, len(chosen))
        places = np.array(chosen, dtype=np.int64)
        # Weighted sampling without replacement: the waiting times of events with these rates (Efraimidis and Spirakis).
        rates = np.maximum(1.0, sizes[places] / self.piece_size)
        times = np.random.default_rng(rng.getrandbits(64)).exponential(size=len(places)) / rates
        return [int(place) for place in places[np.argsort(times, kind="stable")]]


_COLUMNS = {"place": "string", "record": "large_string", "size": "int64"}
