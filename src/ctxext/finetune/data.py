"""Training sequences: documents cut to the lengths of the run and stored in memory-mapped files."""

import contextlib
import json
import random
import tempfile
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ctxext.errors import CtxextError
from ctxext.finetune.documents import Document, Documents, count_pieces
from ctxext.finetune.options import TrainingOptions

COUNTS, HELD_OUT = "sequences.json", "held-out"
START, IGNORE = 1 << 30, 1 << 29
"""Flags in a token id: start of a document, and exclusion from the loss."""


@dataclass
class DataReport:
    """Counts of the data.

    Attributes:
        num_documents: Documents read.
        num_tokens: Tokens in them.
        num_sequences: Sequences of the full length cut from them.
        num_shorter: Sequences of each shorter length, if the run has any.
        num_learned: Tokens in all sequences that count in the loss.
        num_short: Documents that are too short for one sequence.
        num_long: Documents with marked answers that are too long to stay whole.
        num_dropped: Tokens that do not fill a sequence of the full length and are in no shorter one.
        num_padding: Padding tokens.
        num_in_all: Documents in the data; None if unknown.
        num_tokens_in_all: Approximate number of tokens in them.
        num_bad: Skipped records.
        first_bad: The problem of the first of them.
        num_used: Documents used for sequences.
        unused_fields: Ignored fields of records and messages, with the number of records that have them.
        num_turns_left_out: Answers that are not learned (`ChatReader.num_turns_left_out`).
        left_out: Content that the chat template does not render, with the number of conversations that have it.
        questions: Counts of the conversations made from the texts (`QuestionCounts`); empty without --questions.
    """

    num_documents: int = 0
    num_tokens: int = 0
    num_sequences: int = 0
    num_shorter: Mapping[str, int] = field(default_factory=dict)
    num_learned: int = 0
    num_short: int = 0
    num_long: int = 0
    num_dropped: int = 0
    num_padding: int = 0
    num_in_all: int | None = None
    num_tokens_in_all: int | None = None
    num_bad: int = 0
    first_bad: str = ""
    num_used: int = 0
    unused_fields: Mapping[str, int] = field(default_factory=dict)
    num_turns_left_out: int = 0
    left_out: Mapping[str, int] = field(default_factory=dict)
    questions: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: "DataReport") -> "DataReport":
        """Add the counts of another stage of the same data."""
        counts = {name: _add(value, getattr(other, name)) for name, value in vars(self).items()}
        # All stages draw from the same documents.
        return DataReport(**{**counts, "num_in_all": self.num_in_all, "num_tokens_in_all": self.num_tokens_in_all})


def _add(one: Any, other: Any) -> Any:
    if isinstance(one, Mapping):
        return {key: one.get(key, 0) + other.get(key, 0) for key in {**one, **other}}
    return one or other if isinstance(one, str | None) else one + other


def stage_folders(folder: Path, options: TrainingOptions) -> list[Path]:
    """Return the folder of the sequences of each stage; of a run without stages, its folder."""
    return [folder / f"stage-{number}" for number, _ in enumerate(options.stages, 1)] or [folder]


def sequence_file(folder: Path, length: int) -> Path:
    """Return the file of the sequences of one length: 32-bit numbers, `length` of them for each sequence."""
    return folder / f"sequences-{length}.bin"


def write_sequences(
    documents: Iterable[Document], folder: Path, *, num_needed: Mapping[int, int], pack: str, end: int | None
) -> DataReport:
    """Cut documents to sequences and write them until there are enough, with only one document in memory.

    A document with all tokens learned is cut to sequences of every length. If the data has more than the run needs,
    only a share of them is used, chosen at random (`Documents.share`). A document with marked answers stays whole, in a
    sequence of the shortest length that fits, padded with tokens that the loss ignores.

    Args:
        documents: The documents.
        folder: The folder of the files.
        num_needed: Number of sequences needed per length, in tokens; reading stops when they are written.
        pack: "off": each sequence is from one document; otherwise documents are joined.
        end: The token id between joined documents; None if the tokenizer has none.
    """
    full, report = max(num_needed), DataReport()
    longest = num_kept = 0
    share = documents.share if isinstance(documents, Documents) else lambda length: 1.0
    with contextlib.ExitStack() as files:
        rows = {
            length: _Rows(folder, length, num_needed[length], end, is_joined=pack != "off", files=files)
            for length in sorted(num_needed)
        }
        for document in documents:
            size = len(document.ids)
            report.num_documents += 1
            report.num_tokens += size
            longest = max(longest, size)
            if document.is_learned is None:
                is_used = [kind.cut(document.ids, share(length)) for length, kind in rows.items()]
                report.num_used += any(is_used)
                report.num_short += pack == "off" and size < full
            else:
                home = next((kind for length, kind in rows.items() if size <= length), None)
                num_placed = home.place(document.ids, document.is_learned) if home else 0
                report.num_long += home is None
                report.num_used += num_placed > 0
                num_kept += num_placed
            if all(kind.is_enough for kind in rows.values()):
                break
        for kind in rows.values():
            kind.finish()
            kind.fill()
    if isinstance(documents, Documents):
        reader, chats = documents.reader, documents.chats
        if not report.num_documents and reader.num_bad:
            raise CtxextError(f"All {reader.num_bad:,} records were skipped. The first: {reader.first_bad}")
        report.num_in_all, report.num_tokens_in_all = documents.num_in_all, documents.num_tokens_in_all
        report.num_bad, report.first_bad = reader.num_bad, reader.first_bad
        report.unused_fields = dict(reader.unused + chats.unread)
        report.num_turns_left_out, report.left_out = chats.num_turns_left_out, dict(chats.left_out)
        report.questions = asdict(documents.questions) if documents.questions else {}
    report.num_sequences = rows[full].count
    report.num_shorter = {str(length): kind.count for length, kind in rows.items() if length != full}
    report.num_learned = sum(kind.num_learned for kind in rows.values())
    report.num_padding = sum(kind.num_padding for kind in rows.values())
    report.num_dropped = max(0, report.num_tokens - num_kept - rows[full].num_placed)
    if not report.num_sequences:
        raise _make_empty_error(report, num_kept, longest, full, pack)
    (folder / COUNTS).write_text(json.dumps(asdict(report)), encoding="utf-8")
    return report


def _make_empty_error(report: DataReport, num_kept: int, longest: int, length: int, pack: str) -> CtxextError:
    """Return the error for data without a sequence of the full length."""
    if not report.num_tokens:
        return CtxextError("The data contains no text.", hint="Pass a file with text to --data.")
    if report.num_long == report.num_documents:
        return CtxextError(
            f"All documents are longer than {length} tokens, and documents with marked answers are not cut.",
            hint="Raise --length, or train on all tokens with --learn all --pack run-on.",
        )
    if num_kept:
        return CtxextError(
            f"No document needs a sequence of {length} tokens: the longest has {longest}.",
            hint="Add longer documents, or join them with --short-share 0 --pack run-on.",
        )
    hint = "Add longer documents, or join them with --pack run-on." if pack == "off" else "Add more text."
    size = f"the longest document has {longest}" if pack == "off" else f"all documents have {report.num_tokens}"
    return CtxextError(f"The data is too short for a sequence of {length} tokens: {size}.", hint=hint)


def read_report(folder: Path, length: int) -> DataReport | None:
    """Read the counts of existing sequences, `length` the full length in tokens; None if they are incomplete."""
    path, hint = folder / COUNTS, "Start over with --overwrite."
    if not path.is_file():
        return None
    try:
        report = TypeAdapter(DataReport).validate_json(path.read_bytes())
        counts = {length: report.num_sequences, **{int(size): count for size, count in report.num_shorter.items()}}
    except ValueError as error:
        raise CtxextError(f'"{path}" is damaged.', hint=hint) from error
    for size, count in counts.items():
        file = sequence_file(folder, size)
        # Other sequences would change the order of all, without an error.
        if (file.stat().st_size if file.is_file() else 0) != 4 * size * count:
            raise CtxextError(f'"{file}" is missing or does not contain {count:,} sequences.', hint=hint)
    return report


class _Rows:
    """Writer for the sequences of one length."""

    def __init__(
        self, folder: Path, length: int, needed: int, end: int | None, *, is_joined: bool, files: contextlib.ExitStack
    ) -> None:
        self.file = files.enter_context(sequence_file(folder, length).open("wb"))
        # Unused sequences of partly used documents, in case the data ends too early.
        self.spares = files.enter_context(tempfile.TemporaryFile(dir=folder))  # noqa: SIM115
        self.length, self.num_needed, self.end, self.is_joined = length, needed, end, is_joined
        self.count = self.num_learned = self.num_padding = self.num_spares = 0
        self.num_placed = 0  # Tokens of cut documents in a sequence, or not needed.
        self.rest: list[int] = []
        self.holds_whole = False
        self.rng = random.Random(f"pieces {length}")

    @property
    def is_enough(self) -> bool:
        return self.count >= self.num_needed

    def cut(self, ids: Any, share: float) -> bool:
        """Cut a document, or a share of it, to sequences, joined or separate; return whether any tokens are used."""
        if self.is_enough or not ids:
            return False
        num_pieces, num_chosen = count_pieces(len(ids), self.length, share)
        if num_chosen < num_pieces:
            return self._sample(ids, num_pieces, num_chosen)
        closing = [] if not self.is_joined or self.end is None or ids[-1] == self.end else [self.end]
        tokens = [*self.rest, ids[0] | START, *ids[1:], *closing]
        before = self.count
        while len(tokens) >= self.length and not self.is_enough:
            self._write(tokens[: self.length])
            tokens = tokens[self.length :]
        self.num_placed += (self.count - before) * self.length
        self.rest = tokens if self.is_joined else []
        return self.is_joined or num_pieces > 0

    def _sample(self, ids: Any, num_pieces: int, num_chosen: int) -> bool:
        """Write some of a document's sequences and set others aside as spares; return whether any were written."""
        chosen = set(self.rng.sample(range(num_pieces), num_chosen))
        before = self.count
        for piece in range(num_pieces):
            begin = piece * self.length
            tokens = [ids[begin] | (0 if piece else START), *ids[begin + 1 : begin + self.length]]
            if piece in chosen and not self.is_enough:
                self._write(tokens)
            elif self.num_spares < self.num_needed - self.count:
                array("i", tokens).tofile(self.spares)
                self.num_spares += 1
        self.num_placed += len(ids)
        return self.count > before

    def fill(self) -> None:
        """Write spare sequences if the data ended too early."""
        self.spares.seek(0)
        for _ in range(min(self.num_spares, self.num_needed - self.count)):
            tokens = array("i")
            tokens.fromfile(self.spares, self.length)
            self._write(tokens.tolist())

    def place(self, ids: Any, is_learned: Any) -> int:
        """Put a whole document into a sequence; return the number of its tokens, or 0 if it is not needed."""
        if len(self.rest) + len(ids) > self.length:
            self.finish()
        if self.is_enough or not ids:
            return 0
        marked = [token if learned else token | IGNORE for token, learned in zip(ids, is_learned, strict=True)]
        self.rest += [marked[0] | START, *marked[1:]]
        self.holds_whole = True
        if not self.is_joined:
            self.finish()
        return len(ids)

    def finish(self) -> None:
        """Pad and write the current sequence if it contains whole documents; drop the rest of cut ones."""
        if self.holds_whole and not self.is_enough:
            padding = [(self.end or 0) | IGNORE] * (self.length - len(self.rest))
            self._write([*self.rest, *padding])
            self.num_padding += len(padding)
        self.rest = []

    def _write(self, tokens: list[int]) -> None:
        array("i", tokens).tofile(self.file)
        self.count += 1
        self.holds_whole = False
        self.num_learned += sum(not token & IGNORE for token in tokens)
