"""Which record comes next: several sources by their weights, each shuffled, long records more often where asked for."""

import json
import random
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
        data: A file, a folder, or the id of a data set.
        weight: Its share of the tokens beside the other sources'; None where all are read alike.
    """

    data: str
    weight: float | None = None

    @property
    def is_local(self) -> bool:
        """Whether it lies on this machine, so that all of it can be seen before any is used."""
        return Path(self.data).exists()


def parse_source(word: str) -> Source:
    """A source as the command line names it: `books.jsonl`, or `books.jsonl:0.7` for its weight.

    Raises:
        CtxextError: the weight is not above 0.
    """
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
        stored = self._store(group, number)
        if self.num_records is not None:
            self.num_records += len(stored)
        self.num_characters += sum(stored["size"])
        if self.long_share is None:
            return [Pool(weight, self._shuffled(stored, range(len(stored)), f"{number}"))]
        kinds: dict[bool, list[int]] = {True: [], False: []}
        for place, is_long in enumerate(stored["is_long"]):
            kinds[is_long].append(place)
        shares = {True: self.long_share, False: 1 - self.long_share}
        return [
            Pool(weight * share, self._shuffled(stored, kinds[is_long], f"{number} {is_long}"))
            for is_long, share in shares.items()
            if kinds[is_long] and share > 0
        ]

    def _read(self, source: Source) -> Iterator[Numbered]:
        for place, record in read_records(source.data, self.splits, seed=self.seed):
            if (read := self.reader.read(record, place)) is not None:
                yield place, read, len(json.dumps(read, ensure_ascii=False, default=str))

    def _store(self, group: Sequence[Source], number: int) -> Any:
        """All records of some sources as a file that is mapped, so that any can be taken."""
        from datasets import Dataset, Features, Value
        from datasets.arrow_writer import ArrowWriter

        path = self.folder / f"records-{number}.arrow"
        kinds = {"place": "string", "record": "large_string", "size": "int64", "is_long": "bool"}
        features = Features({name: Value(kind) for name, kind in kinds.items()})
        with ArrowWriter(features=features, path=str(path), writer_batch_size=100) as writer:
            for place, record, size in (entry for source in group for entry in self._read(source)):
                text = json.dumps(record, ensure_ascii=False, default=str)
                is_long = self.long_share is not None and self.is_long(text)
                writer.write({"place": place, "record": text, "size": size, "is_long": is_long})
            writer.finalize()
        return Dataset.from_file(str(path))

    def _shuffled(self, stored: Any, chosen: Sequence[int], name: str) -> Iterator[Numbered | None]:
        for epoch in count():
            for place in random.Random(f"{self.seed} {name} {epoch}").sample(chosen, len(chosen)):
                entry = stored[place]
                yield entry["place"], json.loads(entry["record"]), entry["size"]
            if not chosen:
                return
            yield None
