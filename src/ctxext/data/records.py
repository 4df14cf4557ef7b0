"""Reading of records from files, folders and data sets, each with its place for error messages."""

import contextlib
import csv
import io
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TextIO

from ctxext.errors import CtxextError
from ctxext.files.content import open_regular
from ctxext.files.offline import forbid_network
from ctxext.files.packages import require
from ctxext.files.strict import parse_entry

Record = Mapping[str, Any]
FIELD = "text"
TRAIN = ("train",)
HELD_OUT = ("test", "validation", "train")
"""The splits for evaluation; the first one that exists is used."""
_COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
_BUFFER = 1000
_MOST_TEXT = 1 << 32
"""Maximum number of characters of a text, or of an array of records, in one read."""
_MOST_LINE = 1 << 26
"""Maximum number of characters of a line: each takes up to 24 bytes in a record, and up to 40 as tokens."""
_ID = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.+ -]+)?")
"""The id of a data set, with an optional configuration."""
_ARCHIVES = (
    *(".zip", ".tar", ".tgz", ".tbz2", ".txz", ".7z", ".rar"),
    *(".lz4", ".lzma", ".br", ".snappy", ".lz", ".z", ".zstd"),
)
"""Unsupported archives and compressions; some would be unpacked and read as one text."""


def read_records(
    data: str, splits: Sequence[str] = HELD_OUT, *, seed: int | None = None
) -> Iterator[tuple[str, Record]]:
    """Read the records of a file, a folder or a data set; a plain text file is one record.

    Args:
        data: A text, JSON, CSV or parquet file, compressed or not; a folder of them; or the id of a data set.
        splits: Names of splits; the first one in the folder or data set is read.
        seed: Shuffle a streamed data set, a thousand records at a time.
    """
    check_place(data)
    path = Path(data)
    if path.is_file():
        yield from _read_file(path)
    elif path.is_dir():
        for file in files_of(path, splits):
            yield from _read_file(file)
    else:
        stream = open_data_set(data, splits)
        yield from (
            (f'A record of "{data}"', record)
            for record in (stream if seed is None else stream.shuffle(seed=seed, buffer_size=_BUFFER))
        )


def files_of(folder: Path, splits: Sequence[str]) -> list[Path]:
    """Return the files of a split in a folder, by the naming rules of the datasets library.

    If one file name contains a split, such as test.md in a manual, that library ignores all files without a split in
    their names. If no name contains "train", these files are the train split.
    """
    require("datasets", "Reading a folder of data")
    with forbid_network():
        from datasets import data_files
        from fsspec.utils import glob_translate  # type: ignore[import-untyped]

    names = [name for name in _list_files(folder) if PurePosixPath(name).name not in data_files.FILES_TO_IGNORE]

    def match(pattern: str) -> list[str]:
        """Match names in the folder; the search of datasets would read the folder's own name as a pattern too."""
        expression = re.compile(glob_translate(pattern))
        return [name for name in names if expression.match(name)]

    try:
        patterns = data_files._get_data_files_patterns(match)
    except FileNotFoundError as error:
        raise CtxextError(f'The folder "{folder}" contains no data files.') from error
    by_split = {str(split): [name for each in of for name in match(each)] for split, of in patterns.items()}
    if "train" not in by_split:
        named = {name for of_split in by_split.values() for name in of_split}
        if rest := [name for name in names if name not in named]:
            by_split["train"] = rest
    return [folder / name for name in dict.fromkeys(by_split[_choose(str(folder), splits, list(by_split))])]


def _list_files(folder: Path) -> list[str]:
    """Return the paths of a folder's files within it, without hidden ones and those in folders such as __pycache__."""
    found = []
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith((".", "__"))]
        paths = (Path(root, name) for name in files if not name.startswith("."))
        found += [path.relative_to(folder).as_posix() for path in paths if path.is_file()]
    return sorted(found)


def open_data_set(data: str, splits: Sequence[str]) -> Any:
    """Stream a data set of the Hub."""
    require("datasets", f'"{data}" is not a file; reading it as a data set of the Hub')
    with forbid_network():
        import datasets
        from datasets.exceptions import DatasetsError
    name, _, configuration = data.partition(":")
    try:
        data_set = datasets.load_dataset(name, configuration or None, streaming=True)
    except (DatasetsError, OSError, ValueError) as error:
        raise CtxextError(
            f'"{data}" is neither a file nor an accessible data set.',
            hint="Use a file, or the id of a data set as NAME or NAME:CONFIGURATION.",
        ) from error
    return data_set[_choose(data, splits, list(data_set))]


def check_place(data: str) -> None:
    """Raise if `data` is neither a file, a folder nor the id of a data set, before any request to the Hub."""
    if not data.strip():  # An empty path is the current folder.
        raise CtxextError("--data is empty.", hint="Use a text, JSON lines or parquet file, or leave out --data.")
    path = Path(data)
    if path.is_file():
        _check_kind(path)
    if not path.exists() and re.match(r"[A-Za-z][\w+.-]*:/", data):
        raise CtxextError(
            f'"{data}" is a URL, but --data reads only files, folders and data sets of the Hub.',
            hint="Download the file first.",
        )
    if path.exists() and not path.is_file() and not path.is_dir():
        raise CtxextError(f'"{data}" is neither a file nor a folder.', hint="Copy its content to a file.")
    name, configuration = data.partition(":")[::2]
    if configuration and not path.exists() and Path(name).exists():
        raise CtxextError(
            f'There is no file "{data}", and "{name}" is on this machine, so it is not the id of a data set.',
            hint="Use the name of a file or folder without a configuration.",
        )
    is_name = kind_of(Path(name)) in (*_READERS, *_TEXTS) or name.startswith((".", "/", "~"))
    if not path.exists() and (is_name or not _ID.fullmatch(data)):
        raise CtxextError(f'There is no file "{data}".', hint="Check its path; data sets are named NAME or USER/NAME.")


def _check_kind(path: Path) -> None:
    """Raise if a file would be read as one text although its name belongs to an archive or to records."""
    kind = kind_of(path)
    if kind in _ARCHIVES:
        raise CtxextError(f'"{path}" is a "{kind}" file, which is unsupported.', hint=f"Unpack it, or use {_READ}.")
    records = next((suffix for suffix in map(str.lower, path.suffixes) if suffix in _READERS), None)
    if records and kind not in (*_READERS, *_TEXTS):
        raise CtxextError(
            f'"{path}" may contain records, but its name ends with "{kind}" instead of "{records}".', hint="Rename it."
        )


_READ = ", ".join(_COMPRESSED)
_TEXTS = (".txt", ".md")


def is_plain_text(data: str) -> bool:
    """Return whether `data` is a file that is read as one text."""
    return Path(data).is_file() and kind_of(Path(data)) not in _READERS


def _choose(data: str, splits: Sequence[str], known: Sequence[str]) -> str:
    """Return the first split that exists; if none of several exists, the first known split."""
    for split in splits:
        if split in known:
            return split
    if len(splits) > 1:
        return known[0]
    raise CtxextError(
        f'"{data}" has no split "{splits[0]}". Splits: {", ".join(known)}.',
        hint=f"Choose one: --split {shlex.quote(known[0])}",
    )


def kind_of(path: Path) -> str:
    """Return the suffix of the file in lower case, without that of its compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return next((suffix for suffix in reversed(suffixes) if suffix not in _COMPRESSED), "")


def _read_file(path: Path) -> Iterator[tuple[str, Record]]:
    _check_kind(path)
    reader = _READERS.get(kind_of(path), _read_text)
    try:
        yield from reader(path)
    except UnicodeDecodeError as error:
        raise CtxextError(
            f'"{path}" is not text: {error.reason}.',
            hint="Use UTF-8 text, JSON lines or parquet. Convert other documents first, for example with pdftotext.",
        ) from error
    except (OSError, EOFError) as error:
        raise CtxextError(f'"{path}" cannot be read: {error}.', hint="Use a UTF-8 text file.") from error
    except ValueError as error:
        raise CtxextError(f'"{path}" cannot be opened: {error}.', hint="For .zst: pip install zstandard") from error
    except Exception as error:
        if isinstance(error, CtxextError) or path.suffix.lower() not in _COMPRESSED:
            raise
        # Each decompression library raises another class.
        raise CtxextError(f'"{path}" cannot be decompressed: {error}.', hint="Check that it is complete.") from error


@contextlib.contextmanager
def _open(path: Path) -> Iterator[TextIO]:
    """Open a file as text, decompressed by its suffix, without a byte-order mark."""
    from fsspec.compression import compr  # type: ignore[import-untyped]
    from fsspec.utils import infer_compression

    kind = infer_compression(path.name)
    if kind is None and path.suffix.lower() in _COMPRESSED:
        raise ValueError(f'a package for "{path.suffix}" is missing')
    # `fsspec.open` would parse the name: "simplecache::a.jsonl" is another file there.
    with open_regular(path) as raw, compr[kind](raw, mode="rb") as file:
        yield io.TextIOWrapper(file, encoding="utf-8-sig", newline="")


def _read_text(path: Path) -> Iterator[tuple[str, Record]]:
    with _open(path) as file:
        text = io.IncrementalNewlineDecoder(None, translate=True).decode(_read_rest(file, path))
    if kind_of(path) not in _TEXTS and text.startswith("{"):
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(json.loads(text.partition("\n")[0]), dict):
                raise CtxextError(f'"{path}" contains JSON lines, but is not named NAME.jsonl.', hint="Rename it.")
    if text.strip():
        yield f'"{path}"', {FIELD: text}


def _read_rest(file: TextIO, path: Path) -> str:
    is_small = path.stat().st_size <= _MOST_TEXT  # A sparse file may report a terabyte.
    text = file.read(_MOST_TEXT) if is_small else ""
    if not is_small or file.read(1):
        raise CtxextError(f'"{path}" is one text of more than 4 GB.', hint="Split it into several files in a folder.")
    return text


def _iterate_lines(file: TextIO, path: Path, *, may_be_array: bool = False) -> Iterator[str]:
    """Yield the lines of a file; the first one that is not blank may begin an array, and be incomplete."""
    number = 0
    while line := file.readline(_MOST_LINE):
        number += 1
        is_cut = len(line) == _MOST_LINE and not line.endswith("\n")
        if is_cut and not (may_be_array and line.lstrip().startswith("[")):
            raise CtxextError(f'Line {number} of "{path}" is longer than {_MOST_LINE} characters.')
        may_be_array = may_be_array and not line.strip()
        yield line


def _read_json(path: Path) -> Iterator[tuple[str, Record]]:
    """Read JSON lines, or one array of records."""
    is_first = True
    with _open(path) as file:
        for number, line in enumerate(_iterate_lines(file, path, may_be_array=True), start=1):
            if not line.strip():
                continue
            if is_first and line.lstrip().startswith("["):
                records = parse_entry(line + _read_rest(file, path), f'"{path}"')
                for number, record in enumerate(records, start=1):
                    yield f'Record {number} of "{path}"', record if isinstance(record, dict) else {}
                return
            is_first, place = False, f'Line {number} of "{path}"'
            # A line that is not an object has no fields; reading a field then fails.
            record = parse_entry(line, place)
            yield place, record if isinstance(record, dict) else {}


def _read_csv(path: Path, delimiter: str = ",") -> Iterator[tuple[str, Record]]:
    csv.field_size_limit(1 << 30)
    with _open(path) as file:
        lines = csv.DictReader(_iterate_lines(file, path), delimiter=delimiter)
        try:
            for record in lines:
                # Surplus cells of a row have the key None.
                yield f'Line {lines.line_num} of "{path}"', {key: value for key, value in record.items() if key}
        except csv.Error as error:
            raise CtxextError(f'Line {lines.line_num} of "{path}" is not valid CSV: {error}.') from error


def _read_table(path: Path) -> Iterator[tuple[str, Record]]:
    """Read a parquet file, or an arrow file of the datasets library."""
    kind = kind_of(path).removeprefix(".")
    require("datasets", f"Reading {kind} files")
    from pyarrow import ArrowException, ipc, memory_map, parquet

    number = 0
    try:
        # `ParquetFile` would parse a name such as "file:a.parquet" as a URL.
        mapped = memory_map(str(path))
        batches = (
            parquet.ParquetFile(mapped).iter_batches(batch_size=64) if kind == "parquet" else ipc.open_stream(mapped)
        )
        for batch in batches:
            for record in batch.to_pylist():
                number += 1
                yield f'Row {number} of "{path}"', {key: value for key, value in record.items() if value is not None}
    except ArrowException as error:
        raise CtxextError(f'"{path}" is not a {kind} file: {str(error).splitlines()[0]}') from error


_READERS: Mapping[str, Callable[[Path], Iterator[tuple[str, Record]]]] = {
    ".jsonl": _read_json,
    ".ndjson": _read_json,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": partial(_read_csv, delimiter="\t"),
    ".parquet": _read_table,
    ".arrow": _read_table,
}
