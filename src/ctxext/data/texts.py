"""Long documents to measure the loss on, from a file, a data set or the prose of the package."""

import random
import re
from collections.abc import Callable, Iterator
from functools import partial
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
    """Return the places in `data` by the name of their kind of text.

    Places are separated by commas, and named by their files up to the first dot. A single place has no name.
    """
    if data is None:
        return {"": None}
    places = [place if Path(place).exists() else place.strip() for place in data.split(",")]
    if not all(map(str.strip, places)) and not (data.strip() and Path(data).exists()):
        message = f'--data "{data}" contains an empty name.' if data.strip(" ,") else "--data is empty."
        raise CtxextError(message, hint="Use a text, JSON lines or parquet file, or leave out --data.")
    if len(places) < 2 or Path(data).exists():
        return {"": data}
    kinds: dict[str, str | None] = {}
    for place in places:
        name = _UNSAFE.sub("-", Path(place).name.split(".")[0] or Path(place).name)
        if name in kinds:
            raise CtxextError(f'Two texts of --data are named "{name}".', hint="Use different file names.")
        kinds[name] = place
    return kinds


def read_corpus(
    data: str | None, encoder: Encoder, *, count: int, length: int, most: int, seed: int
) -> list[list[int]]:
    """Read the token ids of the first documents that are long enough, including start tokens.

    A plain text file is cut into pieces. Only the beginning of each record is used.

    Args:
        data: A text, JSON lines or parquet file, or a `datasets` id; None for the prose of the package.
        encoder: The tokenizer.
        count: Maximum number of documents.
        length: Minimum number of tokens of a document.
        most: Maximum number of tokens of a document; longer ones are cut.
        seed: The random seed of the prose.
    """
    if data is None:
        return [_draw_prose(encoder, most, f"{seed} prose {number}") for number in range(count)]
    if is_plain_text(data):
        texts = _cut_pieces(next(read_texts(data)), encoder, count, most)
    else:
        texts = (encoder.encode_document(text[: _CHARACTERS_PER_TOKEN * most]) for text in read_texts(data))
    documents, longest = [], 0
    for ids in islice(texts, _MAX_READ):
        longest = max(longest, len(ids))
        if len(ids) >= length:
            documents.append(ids[:most])
        if len(documents) == count:
            break
    if not documents:
        raise CtxextError(
            f'"{data}" contains no document of {length} tokens; the longest has {longest}.',
            hint="Use longer texts with --data, or shorter --lengths.",
        )
    return documents


def cut_texts(data: str | None, cut: Callable[[Callable[[int], str]], str], *, count: int, seed: int) -> list[str]:
    """Cut the first `count` suitable documents as texts, the same for every tokenizer.

    A plain text file is cut into consecutive pieces. Only the beginning of each record is used.

    Args:
        data: A text, JSON lines or parquet file, or a `datasets` id; None for the prose of the package.
        cut: Returns the text to use of a document, from its beginning; empty if the document is unsuitable. Its
            argument returns at least the given number of first characters, or all of a shorter document.
        count: Maximum number of documents.
        seed: The random seed of the prose.
    """
    if data is None:
        drawn = (cut(partial(_join_prose, f"{seed} prose {number}")) for number in range(count))
        return list(filter(None, drawn))
    texts = list[str]()
    if is_plain_text(data):
        rest = next(read_texts(data))
        while len(texts) < count and (text := cut(partial(_take_first, rest))):
            texts.append(text)
            rest = rest[len(text) :]
        return texts
    each = (cut(partial(_take_first, text)) for text in islice(read_texts(data), _MAX_READ))
    return list(islice(filter(None, each), count))


def _take_first(text: str, size: int) -> str:
    return text[:size]


def _join_prose(seed: str, size: int) -> str:
    sentences, parts, length = prose.sentences(random.Random(seed)), list[str](), 0
    while length < size:
        parts.append(next(sentences))
        length += len(parts[-1]) + 1
    return " ".join(parts)


def _draw_prose(encoder: Encoder, length: int, seed: str) -> list[int]:
    sentences = prose.sentences(random.Random(seed))
    ids = encoder.encode_document(next(sentences))
    while len(ids) < length:
        texts = [" " + sentence for sentence in islice(sentences, 64)]
        units = encoder.encode_pieces(texts)
        if not any(units):
            raise no_tokens(texts[0])
        for unit in units:
            ids = ids + unit
    return ids[:length]


def _cut_pieces(text: str, encoder: Encoder, count: int, length: int) -> Iterator[list[int]]:
    start = encoder.get_start_tokens()
    body = encoder.encode_document(text[: _CHARACTERS_PER_TOKEN * count * length])[len(start) :]
    size = length - len(start)
    # The last piece is shorter; the caller decides whether it is long enough.
    for begin in range(0, len(body), size):
        yield [*start, *body[begin : begin + size]]


def read_texts(data: str) -> Iterator[str]:
    """Yield the texts of a file, a folder or a data set, from a held-out split if there is one."""
    place = ""
    for place, record in read_records(data):
        if not isinstance(record.get(FIELD), str):
            fields = ", ".join(record) or "none"
            raise CtxextError(f'{place} has no text in the field "{FIELD}".', hint=f"Its fields: {fields}.")
        yield record[FIELD]
    if not place:
        raise CtxextError(f'"{data}" contains no text.', hint="Pass a file with text to --data.")
