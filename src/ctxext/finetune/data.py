"""Documents to training sequences: tokenized once, cut to one length, and kept in a file that all processes map."""

import json
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ctxext.errors import CtxextError

TOKENS, COUNTS = "sequences.bin", "sequences.json"
DocumentReader = Callable[[Any], Iterable[list[int]]]
"""Gives the documents as token ids, from the tokenizer of the model; asked for as many as are needed."""


@dataclass(frozen=True)
class DataReport:
    """What was read.

    Attributes:
        num_documents: Documents read.
        num_tokens: Tokens in them.
        num_sequences: Sequences made of them.
        num_short: Documents too short for one sequence, which were left out.
        num_dropped: Tokens that are in no sequence.
    """

    num_documents: int
    num_tokens: int
    num_sequences: int
    num_short: int
    num_dropped: int


def write_sequences(
    documents: Iterable[list[int]], folder: Path, *, length: int, pack: str, wanted: int, end: int | None
) -> DataReport:
    """Cut documents to sequences and write them, until there are enough; nothing is held in memory but one document.

    The file holds 32-bit numbers, `length` for each sequence: a token's id, or -1 - id where a document begins.

    Args:
        documents: Token ids of each document.
        folder: Where the files go.
        length: Tokens in a sequence.
        pack: "off" cuts every document by itself; otherwise documents are joined.
        wanted: Sequences that are needed; reading stops there.
        end: The id that ends a document where documents are joined; None where the tokenizer has none.

    Raises:
        CtxextError: there are no documents, or none is long enough.
    """
    counts = dict.fromkeys(("documents", "tokens", "sequences", "short"), 0)
    longest = 0

    def counted() -> Iterator[list[int]]:
        nonlocal longest
        for ids in documents:
            counts["documents"] += 1
            counts["tokens"] += len(ids)
            counts["short"] += pack == "off" and len(ids) < length
            longest = max(longest, len(ids))
            yield ids

    pieces = _cut(counted(), length) if pack == "off" else _joined(counted(), length, end)
    with (folder / TOKENS).open("wb") as file:
        for piece in pieces:
            array("i", piece).tofile(file)
            counts["sequences"] += 1
            if counts["sequences"] == wanted:
                break
    if not counts["tokens"]:
        raise CtxextError("The data holds no text.", hint="Give a file with text to --data.")
    if not counts["sequences"]:
        hint = "Give longer documents, or join them with --pack run-on." if pack == "off" else "Give more text."
        what = f"the longest has {longest}" if pack == "off" else f"all of them have {counts['tokens']}"
        raise CtxextError(f"No document has the {length} tokens that a sequence needs; {what}.", hint=hint)
    dropped = max(0, counts["tokens"] - counts["sequences"] * length)
    report = DataReport(counts["documents"], counts["tokens"], counts["sequences"], counts["short"], dropped)
    (folder / COUNTS).write_text(json.dumps(asdict(report)), encoding="utf-8")
    return report


def read_report(folder: Path) -> DataReport | None:
    """The counts of sequences that are already there; None where they were not written to the end."""
    path = folder / COUNTS
    return DataReport(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def _cut(documents: Iterator[list[int]], length: int) -> Iterator[list[int]]:
    for ids in documents:
        for begin in range(0, len(ids) - length + 1, length):
            piece = ids[begin : begin + length]
            yield [-1 - piece[0], *piece[1:]] if begin == 0 else piece


def _joined(documents: Iterator[list[int]], length: int, end: int | None) -> Iterator[list[int]]:
    rest: list[int] = []
    for ids in documents:
        if ids:
            rest += [-1 - ids[0], *ids[1:], *([] if end is None or ids[-1] == end else [end])]
        while len(rest) >= length:
            yield rest[:length]
            rest = rest[length:]
