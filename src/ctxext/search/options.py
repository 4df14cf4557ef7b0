"""The options of a search, and the place of its study: a SQLite file, or a database or journal shared by machines."""

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
from ctxext.options import check_numbers, option, original_length_option, target_length_option, with_documented_options
from ctxext.redaction import redact, remember

if TYPE_CHECKING:
    from optuna.storages import BaseStorage
    from sqlalchemy.engine import URL

DEFAULT_MINUTES = 20.0
_ASKED = "What is asked"


@with_documented_options
@dataclass(frozen=True)
class SearchOptions:
    """Options of a search."""

    target_length: int = target_length_option()
    trials: int | None = option(None, help="Stop after so many recipes, those of earlier runs included.", min=1)
    minutes: float | None = option(
        None, help="How long it may take, everything included. Default: 20, without --trials."
    )
    methods: tuple[str, ...] = option(
        (),
        help="Methods to try, as yarn,mspoe. Default: all that apply but experimental ones.",
        kind="names",
        repeats=True,
    )
    original_length: int | None = original_length_option()
    gradient: bool = option(
        False,
        help="Learn ratio, ramp and temperature of every KV head by gradient, the weights frozen; --trials counts "
        "steps.",
    )
    keep_short: float = option(0.01, help="Share by which the loss at the original context length may rise.")
    samples: int = option(12, help="Questions per depth and length.", panel=_ASKED, min=1)
    lengths: tuple[int, ...] = option(
        (),
        help="Prompt lengths. Default: the original context length and its doubles up to the target.",
        panel=_ASKED,
        kind="lengths",
    )
    data: str | None = option(
        None,
        help="Your own text: documents at the original context length, and where to hide needles in. As for eval.",
        panel=_ASKED,
    )
    checked: int = option(20, help="Questions per depth and length at the end.", panel=_ASKED, min=2)
    seed: int = option(0, help="Decides questions and recipes.", panel=_ASKED)
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
                f"keep_short must be a share from 0 to 10, not {self.keep_short:g}.",
                hint="--keep-short 0.01 lets the loss at the original context length rise by one percent.",
            )
        if self.lengths and max(self.lengths) > self.target_length:
            raise CtxextError(
                f"A length of {max(self.lengths)} is beyond the target of {self.target_length} tokens.",
                hint="Ask for shorter --lengths, or for a longer --target-length.",
            )

    @property
    def depths(self) -> tuple[float, ...]:
        """Depths of the needles, from 0 (the beginning) to 1."""
        return even_depths(self.num_depths)

    @property
    def seconds(self) -> float:
        """The time limit of this run in seconds."""
        if self.minutes is None:
            return float("inf") if self.trials is not None else 60 * DEFAULT_MINUTES
        return 60 * self.minutes

    def lengths_from(self, trained_length: int) -> tuple[int, ...]:
        """Return the prompt lengths, shortest first; the target is always among them."""
        if self.target_length <= trained_length:
            raise CtxextError(
                f"The model was trained to {trained_length} tokens already; a target of {self.target_length} is no "
                "longer.",
                hint=f"Choose a longer one, for example --target-length {format_length(4 * trained_length)}.",
            )
        doubles: list[int] = []
        while trained_length << len(doubles) < self.target_length:
            doubles.append(trained_length << len(doubles))
        return tuple(sorted({*(self.lengths or doubles), self.target_length}))

    def what_is_asked(self, trained_length: int) -> dict[str, Any]:
        """Return the options that must be equal for two runs to share a study."""
        names: Sequence[str] = ("target_length", "keep_short", "samples", "num_depths", "seed")
        asked = {name: getattr(self, name) for name in names}
        if self.original_length is not None:
            asked["original_length"] = self.original_length
        methods = list(self.methods) or ["all but experimental"]  # The default of earlier versions was wider.
        return {**asked, "lengths": list(self.lengths_from(trained_length)), "methods": methods}


_SCHEME = re.compile(r"((?:[A-Za-z][\w+.-]+:/|(?:postgresql|mysql|mariadb|mssql|oracle|sqlite)[\w+]*:))")

_DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError, AssertionError, ArithmeticError, RuntimeError)
"""The errors of a file that is damaged or that no search created."""


@dataclass(frozen=True)
class StudyPlace:
    """A study's place.

    Attributes:
        name: The name of the study there.
        path: The SQLite file; None in a shared storage.
        storage: The URL of a database (postgresql, mysql), or the path of a journal file on a disk that is shared.
    """

    name: str = "ctxext"
    path: Path | None = None
    storage: str | None = None

    def __post_init__(self) -> None:
        scheme = _SCHEME.match(self.storage or "")
        if self.storage and scheme and _url(self.storage) is None:
            raise CtxextError(  # The message shows no part that may be a password.
                f'--storage "{scheme[1]}..." is not the URL of a database.',
                hint="Write it as postgresql+psycopg2://USER:PASSWORD@HOST:PORT/NAME.",
            )

    def __str__(self) -> str:
        return str(self.path) if self.path else f"{self.name} in {shown_storage(self.storage or '')}"

    def open(self) -> "BaseStorage":
        """Open the storage itself, created if it does not exist."""
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
    """Return the default place of the study of a recipe file."""
    return StudyPlace(path=out.with_suffix(".db"))


def shown_storage(storage: str) -> str:
    """Show a storage's URL without its passwords, which are redacted from here on."""
    if "://" not in storage:
        return storage
    url = _url(storage)
    if url is None:
        return storage.split("://", 1)[0] + "://..."
    remember(url.password)
    return redact(url.render_as_string(hide_password=True))


def _url(storage: str) -> "URL | None":
    """Read the URL of a database; None for a path, or if the port is no number, which may be a password."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    with contextlib.suppress(ArgumentError, ValueError):
        return make_url(storage) if "://" in storage else None
    return None
