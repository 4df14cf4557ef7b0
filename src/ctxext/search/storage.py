"""The storage of a study: a SQLite file, or a database or journal that machines share, through optuna's storages."""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ctxext.errors import CtxextError
from ctxext.redaction import redacted, remember

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

_FILE_NAME = "ctxext"
_SCHEME = re.compile(r"((?:[A-Za-z][\w+.-]+:/|(?:postgresql|mysql|mariadb|mssql|oracle|sqlite)[\w+]*:))")


_DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError, AssertionError, ArithmeticError, RuntimeError)
"""The errors raised by a file that no search wrote, or that is damaged."""


@dataclass(frozen=True)
class StudyPlace:
    """A study's place.

    Attributes:
        name: The name of the study there.
        path: The SQLite file; None in a shared storage.
        storage: The URL of a database (postgresql, mysql), or the path of a journal file on a disk that is shared.
    """

    name: str = _FILE_NAME
    path: Path | None = None
    storage: str | None = None

    def __post_init__(self) -> None:
        if self.storage is None or (scheme := _SCHEME.match(self.storage)) is None:
            return
        from sqlalchemy.engine import make_url
        from sqlalchemy.exc import ArgumentError

        with contextlib.suppress(ArgumentError, ValueError):
            if "://" in self.storage and make_url(self.storage):
                return
        raise CtxextError(  # Which shows no part of it that may be a password.
            f'--storage "{scheme[1]}..." is not the URL of a database.',
            hint="Write it as postgresql+psycopg2://USER:PASSWORD@HOST:PORT/NAME.",
        )

    def __str__(self) -> str:
        return str(self.path) if self.path else f"{self.name} in {shown_storage(self.storage or '')}"

    def open(self) -> "BaseStorage":
        """The storage itself, created if it does not exist."""
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
    def errors_named(self) -> Iterator[None]:
        """Report errors of the storage in one line."""
        from optuna.exceptions import StorageInternalError
        from sqlalchemy.exc import SQLAlchemyError

        try:
            yield
        except ImportError as error:
            raise CtxextError(
                "The storage of the study needs a database driver that is not here.",
                hint="pip install psycopg2-binary, and postgresql+psycopg2://...; or pymysql, and mysql+pymysql://...",
            ) from error
        except (*_DAMAGED, SQLAlchemyError, StorageInternalError) as error:
            hint = "Name another with --study." if self.path else "Check --storage and whether it answers."
            first = (str(error).splitlines() or [""])[0]
            reason = first if isinstance(error, SQLAlchemyError | OSError) else f"{type(error).__name__}: {first}"
            raise CtxextError(f'The study "{self}" cannot be used: {reason}', hint=hint) from error

    @property
    def file(self) -> Path | None:
        """The study's file or journal; None for a database."""
        return self.path or (Path(self.storage) if self.storage and "://" not in self.storage else None)

    @property
    def is_there(self) -> bool:
        """Whether the study exists."""
        import optuna

        if self.file is not None and (self.path or not self.file.exists()):
            return self.file.exists()
        with self.errors_named():
            return self.name in optuna.get_all_study_names(self.open())

    def clear(self) -> None:
        """Delete the study, if it exists."""
        import optuna

        if self.path is not None:
            self.path.unlink(missing_ok=True)
        elif self.is_there:
            optuna.delete_study(study_name=self.name, storage=self.open())

    def check(self, *, resume: bool, overwrite: bool) -> None:
        """Refuse to start over an existing study, or to resume one that does not exist."""
        if self.file is not None and not (folder := self.file.resolve().parent).is_dir():
            raise CtxextError(f'There is no folder "{folder}" for the study.', hint="Make it, or choose another place.")
        if self.file is not None and self.file.exists() and not self.file.is_file():
            raise CtxextError(f'"{self.file}" is not a regular file.', hint="Choose another place for the study.")
        is_there = self.is_there
        if is_there and not (resume or overwrite):
            raise CtxextError(
                f'There is a study "{self}" already.', hint="Go on with it: --resume. Start again: --overwrite."
            )
        if resume and not is_there:
            raise CtxextError(f'There is no study "{self}" to go on with.', hint="Leave --resume away.")


def study_beside(out: Path) -> StudyPlace:
    """The default place of the study of a recipe file."""
    return StudyPlace(path=out.with_suffix(".db"))


def shown_storage(storage: str) -> str:
    """A storage's URL without its passwords, which are redacted from here on."""
    if "://" not in storage:
        return storage
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        url = make_url(storage)
    except (ArgumentError, ValueError):  # A port that is no number, which may be a password.
        return storage.split("://", 1)[0] + "://..."
    remember(url.password)
    return redacted(url.render_as_string(hide_password=True))
