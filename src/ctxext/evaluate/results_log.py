"""Results on disk: one line per cell, so that a killed run can be resumed."""

import json
import os
from pathlib import Path
from typing import Any, TypeGuard

from ctxext.errors import CtxextError
from ctxext.evaluate.report.report import explain_malformed
from ctxext.evaluate.tasks.base import Key, Record, keys_of
from ctxext.files.content import keys_that_differ, open_regular
from ctxext.files.strict import parse_json

_NAME = "cells.jsonl"
_PATTERN = "cells*.jsonl"
_COMPARED = ("settings", "loading", "models", "versions")


class ResultsLog:
    """The records of an evaluation, with a header of its settings and models.

    Args:
        folder: The folder of the log; None keeps it in memory.
        rank: The rank of the process; each process writes a separate file.
    """

    def __init__(self, folder: Path | None, rank: int = 0) -> None:
        self.folder = folder
        self._name = _NAME if rank == 0 else f"cells-{rank}.jsonl"
        self._records: list[Record] = []

    def begin(self, header: dict[str, Any], *, resume: bool, overwrite: bool) -> None:
        """Start a new log, or resume an existing one."""
        if self.folder is None:
            return
        existing = sorted(self.folder.glob(_PATTERN)) if self.folder.is_dir() else []
        if existing and not (resume or overwrite):
            raise CtxextError(
                f'"{self.folder}" already contains results.',
                hint="Continue with --resume, replace them with --overwrite, or use another --out.",
            )
        if existing and resume:
            with explain_malformed(str(self.folder / _NAME)):
                _check_header(self.folder, header)
            return
        for path in existing:
            path.unlink()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CtxextError(
                f'"{self.folder}" cannot be created: {error.strerror}.', hint="Use another --out."
            ) from error
        self.append({"header": header})

    def append(self, record: Record) -> None:
        """Write one record and sync it to disk."""
        if self.folder is None:
            self._records.append(record)
            return
        with (self.folder / self._name).open("ab+") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            if file.read() != b"\n":  # The last line is incomplete after a kill.
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
            file.write((json.dumps(record, ensure_ascii=False) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())

    def records(self) -> list[Record]:
        """Return the complete records of all processes, without the header."""
        if self.folder is None:
            return list(self._records)
        records = []
        for path in sorted(self.folder.glob(_PATTERN)):
            records += [record for record in _read_lines(path)[0] if "header" not in record]
        return records

    @property
    def num_skipped(self) -> int:
        """Number of lines that are incomplete or not records."""
        paths = self.folder.glob(_PATTERN) if self.folder is not None else ()
        return sum(_read_lines(path)[1] for path in paths)

    def records_of(self, model: str) -> list[Record]:
        """Return the records of one model."""
        return [record for record in self.records() if record.get("model") == model]

    def done(self, model: str) -> set[Key]:
        """Return the measured samples of a model."""
        return {key for record in self.records_of(model) if "task" in record for key in keys_of(record)}


def _read_lines(path: Path) -> tuple[list[Record], int]:
    """Return the records, and the number of invalid lines before the last; the last may be incomplete after a kill."""
    records, num_skipped = [], 0
    with open_regular(path) as file:
        lines = file.read().split(b"\n")[:-1]
    for number, line in enumerate(lines, 1):
        try:
            record = parse_json(line.decode("utf-8"), f"{path}, line {number}", constants=False) if line else None
        except (UnicodeDecodeError, CtxextError):
            record = line
        if _is_record(record):
            records.append(record)
        else:
            num_skipped += record is not None
    return records, num_skipped


_NEEDED = {"model": str, "length": int, "depth": float | int | None, "samples": list, "seconds": float | int}


def _is_record(line: Any) -> TypeGuard[Record]:
    """Return whether a line is a header or a record of a model; a measurement needs the fields of every task."""
    if not isinstance(line, dict):
        return False
    if "task" not in line:
        return isinstance(line.get("header"), dict) or isinstance(line.get("model"), str)
    is_whole = all(key in line and isinstance(line[key], kind) for key, kind in _NEEDED.items())
    return is_whole and all(isinstance(sample, int) for sample in line["samples"])


def _check_header(folder: Path, header: dict[str, Any]) -> None:
    lines = _read_lines(folder / _NAME)[0] if (folder / _NAME).is_file() else []
    old: dict[str, Any] = next((line["header"] for line in lines if "header" in line), {})
    mismatches = [mismatch for part in _COMPARED for mismatch in _list_differences(part, old, header)]
    if mismatches:
        raise CtxextError(
            f'"{folder}" cannot be resumed, because this run differs: {"; ".join(mismatches[:3])}.',
            hint="Repeat the command that wrote it, or use another --out.",
        )


def _list_differences(part: str, old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    if part == "models":
        old_models = {model["name"]: model for model in old.get(part) or []}
        models = {model["name"]: model for model in new[part]}
        if old_models.keys() != models.keys():
            return [f"models {', '.join(old_models) or 'none'}, now {', '.join(models)}"]
        return [f'model "{name}" has changed' for name in keys_that_differ(old_models, models)]
    before, after = old.get(part) or {}, new[part]
    return [
        f"{key} {_format_value(before.get(key))}, now {_format_value(after.get(key))}"
        for key in keys_that_differ(before, after)
    ]


def _format_value(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
