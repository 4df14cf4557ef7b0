"""Long documents to measure the loss on, from a file, a data set or the prose of the package."""

import random
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from ctxext.data import prose
from ctxext.data.encoding import Encoder, no_tokens
from ctxext.data.records import FIELD, is_plain_text, read_records
from ctxext.errors import CtxextError

_CHARACTERS_PER_TOKEN = 16
_MAX_READ = 100_000
_UNSAFE = re.compile(r"[^\w .+-]")


def kinds_of_text(data: str | None) -> dict[str, str | None]:
    """Return the places in `data`, each under the name of its kind of text.

    Several places are separated by commas, and have the names of their files up to the first dot. One alone has no
    name.
    """
    if data is None:
        return {"": None}
    places = [place.strip() for place in data.split(",")]
    if not all(places) and not (data.strip() and Path(data).exists()):
        what = f'"{data}" has an empty name' if any(places) else "--data names no text"
        raise CtxextError(f"{what}.", hint="Name a text, JSON lines or parquet file, or leave it out.")
    if len(places) < 2 or Path(data).exists():
        return {"": data}
    kinds: dict[str, str | None] = {}
    for place in places:
        name = _UNSAFE.sub("-", Path(place).name.split(".")[0] or Path(place).name)
        if name in kinds:
            raise CtxextError(f'Two of the texts of --data are named "{name}".', hint="Give them different file names.")
        kinds[name] = place
    return kinds


def read_corpus(
    data: str | None, encoder: Encoder, *, count: int, length: int, most: int, seed: int
) -> list[list[int]]:
    """Read the token ids of the first documents that are long enough, begin tokens included.

    A plain text file is cut into pieces. Of each record only the beginning is used.

    Args:
        data: A text, JSON lines or parquet file, or a `datasets` id; None for the prose of the package.
        encoder: The tokenizer.
        count: The most documents.
        length: The least number of tokens of a document.
        most: The number of tokens that a document is cut to.
        seed: Decides the prose.
    """
    if data is None:
        return [_prose(encoder, most, f"{seed} prose {number}") for number in range(count)]
    if is_plain_text(data):
        texts = _pieces(next(read_texts(data)), encoder, count, most)
    else:
        texts = (encoder.document(text[: _CHARACTERS_PER_TOKEN * most]) for text in read_texts(data))
    documents, longest = [], 0
    for ids in islice(texts, _MAX_READ):
        longest = max(longest, len(ids))
        if len(ids) >= length:
            documents.append(ids[:most])
        if len(documents) == count:
            break
    if not documents:
        raise CtxextError(
            f'"{data}" holds no document of {length} tokens; the longest has {longest}.',
            hint="Give longer texts with --data, or ask for shorter --lengths.",
        )
    return documents


def _prose(encoder: Encoder, length: int, seed: str) -> list[int]:
    sentences = prose.sentences(random.Random(seed))
    ids = encoder.document(next(sentences))
    while len(ids) < length:
        texts = [" " + sentence for sentence in islice(sentences, 64)]
        units = encoder.pieces(texts)
        if not any(units):
            raise no_tokens(texts[0])
        for unit in units:
            ids = ids + unit
    return ids[:length]


def _pieces(text: str, encoder: Encoder, count: int, length: int) -> Iterator[list[int]]:
    start = encoder.start()
    body = encoder.document(text[: _CHARACTERS_PER_TOKEN * count * length])[len(start) :]
    size = length - len(start)
    # The last piece is shorter; the caller decides whether it is long enough.
    for begin in range(0, len(body), size):
        yield [*start, *body[begin : begin + size]]


def read_texts(data: str) -> Iterator[str]:
    """Read the texts of a file, a folder or a data set, from a held-out split if there is one."""
    for place, record in read_records(data):
        if not isinstance(record.get(FIELD), str):
            raise CtxextError(f'{place} has no text in the field "{FIELD}".', hint=f"It has: {', '.join(record)}.")
        yield record[FIELD]
