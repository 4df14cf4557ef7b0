"""Results on disk: one line per cell, so that a killed run can be resumed."""

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from ctxext.errors import CtxextError
from ctxext.files.content import open_regular
from ctxext.files.resuming import check_same_settings
from ctxext.files.schemas import MODEL_RECORD, RECORD, check_schema
from ctxext.files.strict import parse_json
from ctxext.report.report import explain_malformed
from ctxext.tasks.base import Key, Record, keys_of

_NAME = "cells.jsonl"
_PATTERN = "cells*.jsonl"


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
        existing = list_logs(self.folder, resume=resume, overwrite=overwrite)
        if self.folder is None:
            return
        if existing and resume:
            with explain_malformed(str(self.folder / _NAME)):
                check_same_settings(self.folder, *_list_settings(_read_header(self.folder), header))
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


def list_logs(folder: Path | None, *, resume: bool, overwrite: bool) -> list[Path]:
    """Return the logs in a folder; raise if they are neither resumed nor replaced."""
    if resume and overwrite:
        raise CtxextError("--resume cannot be combined with --overwrite.", hint="Remove one of them.")
    existing = sorted(folder.glob(_PATTERN)) if folder is not None and folder.is_dir() else []
    if existing and not (resume or overwrite):
        raise CtxextError(
            f'"{folder}" already contains results.',
            hint="Continue with --resume, replace them with --overwrite, or use another --out.",
        )
    return existing


def check_resumable(
    folder: Path, settings: Mapping[str, Any], models: Collection[str], *, resume: bool, overwrite: bool
) -> None:
    """Raise before any model is loaded if the results in a folder must stay, or are of other settings or models.

    Args:
        folder: The folder.
        settings: The settings of the run.
        models: The names of its models; those that cannot be loaded may be missing in the results.
        resume: Whether the run continues the one in the folder.
        overwrite: Whether it replaces it.
    """
    if list_logs(folder, resume=resume, overwrite=overwrite) and resume:
        with explain_malformed(str(folder / _NAME)):
            old = _read_header(folder)
            before = sorted(model["name"] for model in old["models"])
            now = [name for name in before if name in models]
            check_same_settings(folder, {**old["settings"], "models": before}, {**settings, "models": now})


def read_lengths(folder: Path) -> tuple[int, ...]:
    """Return the prompt lengths of the settings of an evaluation, or none if a folder contains no readable log."""
    lines = _read_lines(folder / _NAME)[0] if (folder / _NAME).is_file() else []
    settings = next((line["header"].get("settings") for line in lines if "header" in line), None)
    lengths = settings.get("lengths") if isinstance(settings, dict) else None
    is_list = isinstance(lengths, list) and all(isinstance(length, int) and length > 0 for length in lengths)
    return tuple(lengths or ()) if is_list else ()


def _read_lines(path: Path) -> tuple[list[Record], int]:
    """Return the records, and the number of invalid lines before the last; the last may be incomplete after a kill."""
    records, num_skipped = [], 0
    with open_regular(path) as file:
        lines = file.read().split(b"\n")[:-1]
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            record = parse_json(line.decode("utf-8"), f"{path}, line {number}", constants=False)
        except (UnicodeDecodeError, CtxextError):
            record = None
        if _is_record(record):
            records.append(record)
        else:
            num_skipped += 1
    return records, num_skipped


def _is_record(line: Any) -> TypeGuard[Record]:
    """Return whether a line is a header or a record of a model."""
    if not isinstance(line, dict):
        return False
    if "header" in line:
        return isinstance(line["header"], dict)
    try:
        check_schema(line, RECORD if "task" in line else MODEL_RECORD, _NAME)
    except CtxextError:
        return False
    # A schema's null means a missing key; here only a depth and an evaluator may be null.
    return ("task" not in line or "depth" in line) and not any(
        value is None for key, value in line.items() if key not in ("depth", "evaluator")
    )


def _read_header(folder: Path) -> dict[str, Any]:
    lines = _read_lines(folder / _NAME)[0] if (folder / _NAME).is_file() else []
    old: dict[str, Any] | None = next((line["header"] for line in lines if "header" in line), None)
    if old is None:
        raise CtxextError(
            f'"{folder}" cannot be resumed: the first line of {_NAME}, with its settings, is missing or damaged.',
            hint="Use another --out, or replace the results with --overwrite.",
        )
    return old


def _list_settings(*headers: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the settings that must be equal in all headers, by name. Models that some headers lack are omitted."""
    models = [{model["name"]: model for model in header.get("models") or []} for header in headers]
    common = set.intersection(*map(set, models))
    return [
        {
            **(header.get("settings") or {}),
            **(header.get("loading") or {}),
            "models": sorted(by_name),
            **{f'model "{name}"': by_name[name] for name in by_name if name in common},
            **(header.get("versions") or {}),
        }
        for header, by_name in zip(headers, models, strict=True)
    ]
