"""Long documents to measure the loss on, from a file, a data set or the package's own prose."""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ctxext.data import prose
from ctxext.data.encoding import Encoder
from ctxext.errors import CtxextError

FIELD = "text"
_SPLITS = ("test", "validation", "train")
_CHARACTERS_PER_TOKEN = 16
_MAX_READ = 100_000


@dataclass(frozen=True)
class Corpus:
    """Tokenized documents.

    Attributes:
        documents: Token ids, the tokenizer's begin token included; each at least as long as was asked for.
        num_skipped: How many documents were too short.
    """

    documents: list[list[int]]
    num_skipped: int


def read_corpus(data: str | None, encoder: Encoder, *, count: int, length: int, most: int, seed: int) -> Corpus:
    """The first documents that are long enough.

    A plain text file is one document; it is cut into as many pieces as are wanted. Records stay whole: of each only the
    beginning is used, and those that are too short are counted and left out.

    Args:
        data: A text, JSON lines or parquet file, or a `datasets` id; None for prose from the package.
        encoder: The tokenizer.
        count: How many documents at most.
        length: Tokens that a document must have.
        most: Tokens that are used of it at most.
        seed: Decides the prose.

    Raises:
        CtxextError: the data cannot be read, or nothing in it is long enough.
    """
    if data is None:
        return Corpus([_prose(encoder, most, f"{seed} prose {number}") for number in range(count)], 0)
    if _is_plain(data):
        texts = _pieces(next(read_texts(data)), encoder, count, most)
    else:
        texts = (encoder.document(text[: _CHARACTERS_PER_TOKEN * most]) for text in read_texts(data))
    documents, num_skipped, longest = [], 0, 0
    for ids in islice(texts, _MAX_READ):
        longest = max(longest, len(ids))
        if len(ids) < length:
            num_skipped += 1
        else:
            documents.append(ids[:most])
        if len(documents) == count:
            break
    if not documents:
        raise CtxextError(
            f'"{data}" holds no document of {length} tokens; the longest has {longest}.',
            hint="Give longer texts with --data, or ask for shorter --lengths.",
        )
    return Corpus(documents, num_skipped)


def _is_plain(data: str) -> bool:
    return Path(data).is_file() and Path(data).suffix not in (".jsonl", ".json", ".ndjson", ".parquet")


def _prose(encoder: Encoder, length: int, seed: str) -> list[int]:
    sentences = prose.sentences(random.Random(seed))
    ids = encoder.document(next(sentences))
    while len(ids) < length:
        for unit in encoder.pieces([" " + sentence for sentence in islice(sentences, 64)]):
            ids = ids + unit
    return ids[:length]


def _pieces(text: str, encoder: Encoder, count: int, length: int) -> Iterator[list[int]]:
    start = encoder.start()
    body = encoder.document(text[: _CHARACTERS_PER_TOKEN * count * length])[len(start) :]
    size = length - len(start)
    # The last, incomplete piece counts too, if it is long enough for the caller.
    for begin in range(0, len(body), size):
        yield [*start, *body[begin : begin + size]]


Record = Mapping[str, Any]


def read_texts(data: str) -> Iterator[str]:
    """The texts of a file or a data set.

    Raises:
        CtxextError: it cannot be read, or a record has no text; a broken line is named by its number.
    """
    for place, record in read_records(data, (FIELD,)):
        if not isinstance(record.get(FIELD), str):
            raise CtxextError(f'{place} has no text in the field "{FIELD}".')
        yield record[FIELD]


def read_records(data: str, fields: Sequence[str]) -> Iterator[tuple[str, Record]]:
    """The records of a file or a data set, each with its place for messages; a plain text file is one record.

    Args:
        data: A text, JSON lines or parquet file, or the id of a data set.
        fields: What is wanted of a record; of a parquet file only these columns are read.

    Raises:
        CtxextError: it cannot be read; a broken line is named by its number.
    """
    path = Path(data)
    if not path.is_file():
        yield from _read_data_set(data)
        return
    try:
        if path.suffix in (".jsonl", ".json", ".ndjson"):
            yield from _read_json_lines(path)
        elif path.suffix == ".parquet":
            yield from _read_parquet(path, fields)
        else:
            yield f'"{path}"', {FIELD: path.read_text(encoding="utf-8")}
    except (OSError, UnicodeDecodeError) as error:
        raise CtxextError(f'"{data}" cannot be read: {error}.', hint="Give a UTF-8 text file.") from error


def _read_json_lines(path: Path) -> Iterator[tuple[str, Record]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f'Line {number} of "{path}"'
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise CtxextError(f"{place} is not valid JSON: {error.msg}.") from error
            # A line that is no object has none of the fields, and is refused by who looks for them.
            yield place, record if isinstance(record, dict) else {}


def _read_parquet(path: Path, fields: Sequence[str]) -> Iterator[tuple[str, Record]]:
    from pyarrow import ArrowException, parquet

    try:
        file = parquet.ParquetFile(path)
        columns = [name for name in fields if name in file.schema_arrow.names]
        if not columns:
            names = ", ".join(file.schema_arrow.names)
            raise CtxextError(f'"{path}" has no column "{fields[0]}".', hint=f"It has: {names}.")
        for batch in file.iter_batches(columns=columns, batch_size=64):
            yield from ((f'A row of "{path}"', record) for record in batch.to_pylist())
    except ArrowException as error:
        raise CtxextError(f'"{path}" is not a parquet file: {str(error).splitlines()[0]}') from error


def _read_data_set(data: str) -> Iterator[tuple[str, Record]]:
    import datasets
    from datasets.exceptions import DatasetsError

    name, _, configuration = data.partition(":")
    try:
        splits = datasets.load_dataset(name, configuration or None, streaming=True)
    except (DatasetsError, OSError, ValueError) as error:
        raise CtxextError(
            f'"{data}" is neither a file nor a data set that can be reached.',
            hint="Give a file, or the id of a data set as NAME or NAME:CONFIGURATION.",
        ) from error
    split = next((split for split in _SPLITS if split in splits), next(iter(splits)))
    yield from ((f'A record of "{data}"', record) for record in splits[split])
