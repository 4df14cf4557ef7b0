"""Results on disk as they come: one line per cell, so that a killed run can be resumed."""

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
        rank: The rank of the process; each writes a separate file.
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
                f'"{self.folder}" already holds results.',
                hint="Continue them with --resume, replace them with --overwrite, or choose another --out.",
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
                f'"{self.folder}" cannot be made: {error.strerror}.', hint="Choose another --out."
            ) from error
        self.append({"header": header})

    def append(self, record: Record) -> None:
        """Write one record and sync it to disk."""
        if self.folder is None:
            self._records.append(record)
            return
        with (self.folder / self._name).open("ab+") as file:
            file.seek(max(0, file.tell() - 1))
            if file.read() != b"\n":  # A kill tore the last line.
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
        """The number of lines that are incomplete or no records."""
        paths = self.folder.glob(_PATTERN) if self.folder is not None else ()
        return sum(_read_lines(path)[1] for path in paths)

    def records_of(self, model: str) -> list[Record]:
        """Return the records of one model."""
        return [record for record in self.records() if record.get("model") == model]

    def done(self, model: str) -> set[Key]:
        """Return the samples of a model that have been measured."""
        return {key for record in self.records_of(model) if "task" in record for key in keys_of(record)}


def _read_lines(path: Path) -> tuple[list[Record], int]:
    """Return the complete records, and the number of other lines; a kill can leave only the last one incomplete."""
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
    """Return whether a line is a header or a record of a model; a measurement has the fields that every task writes."""
    if not isinstance(line, dict):
        return False
    if "task" not in line:
        return isinstance(line.get("header"), dict) or isinstance(line.get("model"), str)
    is_whole = all(key in line and isinstance(line[key], kind) for key, kind in _NEEDED.items())
    return is_whole and all(isinstance(sample, int) for sample in line["samples"])


def _check_header(folder: Path, header: dict[str, Any]) -> None:
    lines = _read_lines(folder / _NAME)[0] if (folder / _NAME).is_file() else []
    old: dict[str, Any] = next((line["header"] for line in lines if "header" in line), {})
    different = [what for part in _COMPARED for what in _differences(part, old, header)]
    if different:
        raise CtxextError(
            f'"{folder}" cannot be continued, as this run differs: {"; ".join(different[:3])}.',
            hint="Repeat the command that wrote it, or choose another --out.",
        )


def _differences(part: str, old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    if part == "models":
        old_models = {model["name"]: model for model in old.get(part) or []}
        models = {model["name"]: model for model in new[part]}
        if old_models.keys() != models.keys():
            return [f"models {', '.join(old_models) or 'none'}, now {', '.join(models)}"]
        return [f'model "{name}" has changed' for name in keys_that_differ(old_models, models)]
    before, after = old.get(part) or {}, new[part]
    return [f"{key} {_short(before.get(key))}, now {_short(after.get(key))}" for key in keys_that_differ(before, after)]


def _short(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
