"""Options of a search, and the place of its study: a SQLite file, or a database or journal shared by machines."""

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxext.data.records import check_place
from ctxext.errors import CtxextError
from ctxext.evaluate.settings import even_depths
from ctxext.files.length import format_length, read_words
from ctxext.files.offline import forbid_network
from ctxext.options import check_numbers, option, original_length_option, target_length_option, with_documented_options
from ctxext.redaction import redact, remember, remember_arguments

if TYPE_CHECKING:
    from optuna.storages import BaseStorage
    from sqlalchemy.engine import URL

DEFAULT_MINUTES = 20.0
_MEASURED = "Measurement"


@with_documented_options
@dataclass(frozen=True)
class SearchOptions:
    """Options of a search."""

    target_length: int = target_length_option()
    trials: int | None = option(None, help="Maximum number of recipes, including earlier runs.", min=1)
    minutes: float | None = option(None, help="Total time limit in minutes. Default: 20, or none with --trials.")
    methods: tuple[str, ...] = option(
        (),
        help="Methods to try, for example yarn,mspoe. Default: all that apply, except experimental ones.",
        kind="names",
        repeats=True,
    )
    original_length: int | None = original_length_option()
    gradient: bool = option(
        False,
        help="Learn ratio, ramp and temperature of every KV head by gradient, weights frozen; --trials counts steps.",
    )
    keep_short: float = option(0.01, help="Maximum rise of the loss at the original context length (0.01 = 1 %).")
    samples: int = option(12, help="Questions per depth and length.", panel=_MEASURED, min=1)
    lengths: tuple[int, ...] = option(
        (),
        help="Prompt lengths. Default: the original context length and its doublings up to the target.",
        panel=_MEASURED,
        kind="lengths",
    )
    data: str | None = option(
        None,
        help="Text for the documents at the original context length and for hiding needles, as for eval.",
        panel=_MEASURED,
    )
    checked: int = option(20, help="Questions per depth and length in the final evaluation.", panel=_MEASURED, min=2)
    seed: int = option(0, help="Random seed.", panel=_MEASURED)
    num_depths: int = 5

    def __post_init__(self) -> None:
        read_words(self)
        check_numbers(self)
        if self.data is not None:
            check_place(self.data)
        for name in ("target_length", "num_depths"):
            if (value := getattr(self, name)) < 1:
                raise CtxextError(f"{name} must be at least 1, not {value}.")
        if self.minutes is not None and not self.minutes > 0:
            raise CtxextError(f"minutes must be above 0, not {self.minutes:g}.")
        if not 0 <= self.keep_short < 10:
            raise CtxextError(
                f"keep_short must be at least 0 and below 10, not {self.keep_short:g}.",
                hint="--keep-short 0.01 allows the loss at the original context length to rise by 1 %.",
            )
        if self.lengths and max(self.lengths) > self.target_length:
            raise CtxextError(
                f"A length of {max(self.lengths)} is above the target length of {self.target_length} tokens.",
                hint="Use shorter --lengths, or a longer --target-length.",
            )

    @property
    def depths(self) -> tuple[float, ...]:
        """Depths of the needles, from 0 (the beginning) to 1."""
        return even_depths(self.num_depths)

    @property
    def seconds(self) -> float:
        """Time limit of this run in seconds."""
        if self.minutes is None:
            return float("inf") if self.trials is not None else 60 * DEFAULT_MINUTES
        return 60 * self.minutes

    def list_lengths(self, trained_length: int) -> tuple[int, ...]:
        """Return the prompt lengths, shortest first; the target is always among them."""
        if self.target_length <= trained_length:
            raise CtxextError(
                f"The target length {self.target_length} is not above the original context length {trained_length}.",
                hint=f"Use a longer one, for example --target-length {format_length(4 * trained_length)}.",
            )
        doubles: list[int] = []
        while trained_length << len(doubles) < self.target_length:
            doubles.append(trained_length << len(doubles))
        return tuple(sorted({*(self.lengths or doubles), self.target_length}))

    def get_study_options(self, trained_length: int) -> dict[str, Any]:
        """Return the options that must be equal in all runs of a study."""
        names: Sequence[str] = ("target_length", "keep_short", "samples", "num_depths", "seed")
        values = {name: getattr(self, name) for name in names}
        if self.original_length is not None:
            values["original_length"] = self.original_length
        methods = list(self.methods) or ["all but experimental"]  # The default of earlier versions was wider.
        return {**values, "lengths": list(self.list_lengths(trained_length)), "methods": methods}


_SCHEME = re.compile(r"((?:[A-Za-z][\w+.-]+:/|(?:postgresql|mysql|mariadb|mssql|oracle|sqlite)[\w+]*:))")

_URL = re.compile(r"[A-Za-z][\w+.\-]*://")
_NO_PATH = re.compile(r"\s*[{\[\"']|.*…", re.DOTALL)
"""JSON, or text with a redacted secret, such as the settings `host=... password=...`."""

_DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError, AssertionError, ArithmeticError, RuntimeError)
"""Errors of a file that is damaged or not a study."""


@dataclass(frozen=True)
class StudyPlace:
    """Storage of a study.

    Attributes:
        name: Name of the study in the storage.
        path: SQLite file; None for a shared storage.
        storage: URL of a database (postgresql, mysql), or path of a journal file on a shared disk.
    """

    name: str = "ctxext"
    path: Path | None = None
    storage: str | None = None

    def __post_init__(self) -> None:
        remember_arguments([self.storage or ""])
        if self.storage and not _URL.match(self.storage) and _NO_PATH.match(redact(self.storage)):
            raise CtxextError(  # Not shown, as any part may be a password.
                "--storage is neither a database URL nor the path of a journal file.",
                hint="Use the form postgresql+psycopg2://USER:PASSWORD@HOST:PORT/NAME, or a path.",
            )
        scheme = _SCHEME.match(self.storage or "")
        if self.storage and scheme and _url(self.storage) is None:
            raise CtxextError(  # Parts that may be a password are not shown.
                f'--storage "{scheme[1]}..." is not a database URL.',
                hint="Use the form postgresql+psycopg2://USER:PASSWORD@HOST:PORT/NAME.",
            )

    def __str__(self) -> str:
        return str(self.path) if self.path else f"{self.name} in {redact_storage(self.storage or '')}"

    def open(self) -> "BaseStorage":
        """Open the storage; create it if it does not exist."""
        with forbid_network():
            import optuna
            from optuna.storages import JournalStorage, RDBStorage
            from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        if self.path is not None:
            return RDBStorage(f"sqlite:///{self.path}", engine_kwargs={"connect_args": {"timeout": 60}})
        assert self.storage is not None, "a place has a path or a storage"
        if "://" in self.storage:
            return RDBStorage(self.storage, engine_kwargs={"pool_pre_ping": True})
        return JournalStorage(JournalFileBackend(self.storage))

    @contextlib.contextmanager
    def explain_errors(self) -> Iterator[None]:
        """Report errors of the storage in one line."""
        with forbid_network():
            from optuna.exceptions import StorageInternalError
        from sqlalchemy.exc import SQLAlchemyError

        try:
            yield
        except ImportError as error:
            raise CtxextError(
                "The storage of the study needs a database driver that is not installed.",
                hint="pip install psycopg2-binary for postgresql+psycopg2://..., or pymysql for mysql+pymysql://...",
            ) from error
        except (*_DAMAGED, SQLAlchemyError, StorageInternalError) as error:
            hint = "Choose another file with --study." if self.path else "Check --storage and the connection."
            first = (str(error).splitlines() or [""])[0]
            reason = first if isinstance(error, SQLAlchemyError | OSError) else f"{type(error).__name__}: {first}"
            raise CtxextError(f'The study "{self}" cannot be used: {reason}', hint=hint) from error

    @property
    def file(self) -> Path | None:
        """File or journal of the study; None for a database."""
        return self.path or (Path(self.storage) if self.storage and "://" not in self.storage else None)

    @property
    def exists(self) -> bool:
        """Whether the study exists."""
        with forbid_network():
            import optuna

        if self.file is not None and (self.path or not self.file.exists()):
            return self.file.exists()
        with self.explain_errors():
            return self.name in optuna.get_all_study_names(self.open())

    def clear(self) -> None:
        """Delete the study, if it exists."""
        with forbid_network():
            import optuna

        if self.path is not None:
            self.path.unlink(missing_ok=True)
        elif self.exists:
            optuna.delete_study(study_name=self.name, storage=self.open())

    def check(self, *, resume: bool, overwrite: bool) -> None:
        """Raise if a new study exists already, or one to resume does not exist."""
        if self.file is not None and not (folder := self.file.resolve().parent).is_dir():
            raise CtxextError(
                f'The folder "{folder}" for the study does not exist.', hint="Create it, or choose another place."
            )
        if self.file is not None and self.file.exists() and not self.file.is_file():
            raise CtxextError(f'"{self.file}" is not a regular file.', hint="Choose another place for the study.")
        exists = self.exists
        if exists and not (resume or overwrite):
            raise CtxextError(
                f'The study "{self}" exists already.', hint="Continue with --resume, or start over with --overwrite."
            )
        if resume and not exists:
            raise CtxextError(f'The study "{self}" does not exist.', hint="Remove --resume.")


def default_study(out: Path) -> StudyPlace:
    """Return the default place of the study of a recipe file."""
    return StudyPlace(path=out.with_suffix(".db"))


def redact_storage(storage: str) -> str:
    """Return a storage URL without its password, and redact the password in all later output."""
    if "://" not in storage:
        return storage
    url = _url(storage)
    if url is None:
        return storage.split("://", 1)[0] + "://..."
    remember(url.password)
    return redact(url.render_as_string(hide_password=True))


def _url(storage: str) -> "URL | None":
    """Read the URL of a database; None for a path, or if the port is not a number and may be a password."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    with contextlib.suppress(ArgumentError, ValueError):
        return make_url(storage) if "://" in storage else None
    return None
