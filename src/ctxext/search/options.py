"""Options of a search, and the place of its study: a SQLite file, or a database or journal shared by machines."""

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ctxext.data.records import check_place
from ctxext.errors import CtxextError
from ctxext.files.length import format_length, read_words
from ctxext.files.offline import forbid_network
from ctxext.files.output_directory import lock_output
from ctxext.options import (
    Rule,
    check_options,
    count_option,
    is_set,
    option,
    original_length_option,
    seed_option,
    target_length_option,
    with_documented_options,
)
from ctxext.redaction import redact, remember, remember_arguments
from ctxext.search.storage import (
    LOCK_SECONDS,
    choose_driver,
    has_studies,
    lock_database,
    open_database,
    open_journal,
)
from ctxext.tasks.settings import even_depths, find_length_above_target

if TYPE_CHECKING:
    from optuna.storages import BaseStorage
    from sqlalchemy.engine import URL

DEFAULT_MINUTES = 20.0
_FEWER = (8, 4, 2, 1)
"""Numbers of samples to choose from if the time is too short for the default."""
_MEASURED = "Measurement"


@with_documented_options
@dataclass(frozen=True)
class SearchOptions:
    """Options of a search."""

    target_length: int = target_length_option()
    trials: int | None = option(
        None, help="Maximum number of recipes, including earlier runs.", min=1, parser_checks=True
    )
    minutes: float | None = option(
        None, help="Total time limit in minutes. Default: 20, or none with --trials.", above=0
    )
    methods: tuple[str, ...] = option(
        (),
        help="Methods to try, for example yarn,mspoe. Default: all that apply, except experimental ones.",
        kind="names",
        repeats=True,
    )
    original_length: int | None = original_length_option()
    keep_short: float = option(
        0.01,
        help="Maximum rise of the loss at the original context length (0.01 = 1 %).",
        min=0,
        below=10,
        hint="--keep-short 0.01 allows the loss at the original context length to rise by 1 %.",
    )
    samples: int = count_option(12, help="Questions per depth and length.", panel=_MEASURED)
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
    checked: int = count_option(
        20, help="Questions per depth and length in the final evaluation.", panel=_MEASURED, min=2
    )
    seed: int = seed_option(panel=_MEASURED)
    num_depths: int = option(5, help="Number of depths of the needles.", min=1, internal=True)

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            find_length_above_target,
            "A length of {found} is above the target length of {target_length} tokens.",
            "Use shorter --lengths, or a longer --target-length.",
        ),
    )

    def __post_init__(self) -> None:
        read_words(self)
        check_options(self)
        if self.data is not None:
            check_place(self.data)

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

    @property
    def num_documents(self) -> int:
        """Number of documents that each recipe reads at the original context length."""
        return max(2, 2 * self.samples)

    def list_smaller(self) -> Iterator["SearchOptions"]:
        """Yield these options, and then some that measure less, without changing lengths or samples that are set."""
        fewer = () if is_set(self, "samples") else _FEWER
        for samples in (self.samples, *fewer):
            for lengths in dict.fromkeys((self.lengths, self.lengths or (self.target_length,))):
                yield self._with(samples, lengths)

    def as_in_study(self, header: Mapping[str, Any]) -> "SearchOptions":
        """Return the options with the numbers of samples and lengths of a study's header, unless the user set them."""
        samples = self.samples if is_set(self, "samples") else int(header.get("samples", self.samples))
        return self._with(samples, self.lengths or tuple(header.get("lengths", ())))

    def _with(self, samples: int, lengths: tuple[int, ...]) -> "SearchOptions":
        """Return the options with other lengths and samples, and as many fewer samples in the final evaluation."""
        checked = max(2, self.checked * samples // self.samples)
        return dataclasses.replace(self, samples=samples, lengths=lengths, checked=checked)

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

CREATED = "created"
"""Attribute of a study: when it was created, in seconds since 1970."""


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
                hint="Use the form postgresql://USER:PASSWORD@HOST:PORT/NAME.",
            )

    def __str__(self) -> str:
        return str(self.path) if self.path else f"{self.name} in {redact_storage(self.storage or '')}"

    def open(self) -> "BaseStorage":
        """Open the storage; create it if it does not exist, for which the lock must be held."""
        with forbid_network():
            import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        url = self._database
        return open_database(url) if url is not None else open_journal(Path(self.storage or ""))

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Let one process at a time create, replace or begin a study in the storage; not reentrant."""
        with self.explain_errors():
            if self.file is not None:
                with lock_output(self.file, wait=LOCK_SECONDS):
                    yield
            else:
                assert self._database is not None, "a place without a file is a database"
                with lock_database(self._database):
                    yield

    @contextlib.contextmanager
    def explain_errors(self) -> Iterator[None]:
        """Report errors of the storage in one line."""
        with forbid_network():
            from optuna.exceptions import StorageInternalError
        from sqlalchemy.exc import SQLAlchemyError

        try:
            yield
        except (*_DAMAGED, SQLAlchemyError, StorageInternalError) as error:
            hint = "Choose another file with --study." if self.path else "Check --storage and the connection."
            cause = error.__cause__ if isinstance(error, StorageInternalError) and error.__cause__ else error
            first = (str(cause).splitlines() or [""])[0]
            reason = first if isinstance(cause, SQLAlchemyError | OSError) else f"{type(cause).__name__}: {first}"
            raise CtxextError(f'The study "{self}" cannot be used: {reason}', hint=hint) from error

    @property
    def _database(self) -> "URL | None":
        """URL of the database; None for a journal."""
        from sqlalchemy.engine import URL

        if self.path is not None:
            return URL.create("sqlite", database=str(self.path))
        url = _url(self.storage or "")
        return choose_driver(url) if url is not None else None

    @property
    def file(self) -> Path | None:
        """SQLite file or journal of the study; None for a database on a server."""
        if self.path is not None:
            return self.path
        url = _url(self.storage or "")
        if url is None:
            return Path(self.storage or "")
        in_file = url.get_backend_name() == "sqlite" and url.database not in (None, "", ":memory:")
        return Path(url.database or "") if in_file else None

    @property
    def exists(self) -> bool:
        """Whether the study exists."""
        with self.lock():
            return self.get_creation_time() is not None

    def get_creation_time(self) -> float | None:
        """Return when the study was created, in seconds since 1970; None if it does not exist.

        The result is 0 for studies of earlier versions, and for a file that is not a study. The lock must be held.
        """
        if self.file is not None and not self.file.exists():
            return None
        absent = None if self.path is None else 0.0
        try:
            with self.explain_errors():
                if self._database is not None and not has_studies(self._database):
                    return absent
                attributes = self._read_attributes()
                return absent if attributes is None else float(attributes.get(CREATED, 0.0))
        except CtxextError:
            if self.path is None:
                raise
            return 0.0

    def read_header(self) -> Mapping[str, Any] | None:
        """Return the header of the study; None if it does not exist or was not begun."""
        with self.lock():
            if not self.get_creation_time():
                return None
            with self.explain_errors():
                header = (self._read_attributes() or {}).get("header")
        return header if isinstance(header, Mapping) else None

    def _read_attributes(self) -> Mapping[str, Any] | None:
        """Read the attributes of the study; None if the storage does not contain it."""
        studies = {study.study_name: study.user_attrs for study in self.open().get_all_studies()}
        return studies.get(self.name)

    def clear(self) -> None:
        """Delete the study, if it exists; the lock must be held."""
        with forbid_network():
            import optuna

        if self.path is not None:
            for suffix in ("", "-journal"):  # SQLite would apply the journal of a killed process to the new file.
                Path(f"{self.path}{suffix}").unlink(missing_ok=True)
        elif self.get_creation_time() is not None:
            optuna.delete_study(study_name=self.name, storage=self.open())

    def check(self, *, resume: bool, overwrite: bool, began: float = math.inf) -> float | None:
        """Raise if a new study exists already, or one to resume does not exist.

        A study that was created after `began` belongs to a search that was started at the same time, which is joined.

        Args:
            resume: Whether to continue the study.
            overwrite: Whether to replace it.
            began: Beginning of the search, in seconds since 1970.

        Returns:
            When the study to replace was created; None if there is none.
        """
        if resume and overwrite:
            raise CtxextError("--resume cannot be combined with --overwrite.", hint="Remove --resume or --overwrite.")
        if self.file is not None and not (folder := self.file.resolve().parent).is_dir():
            raise CtxextError(
                f'The folder "{folder}" for the study does not exist.', hint="Create it, or choose another place."
            )
        if self.file is not None and self.file.exists() and not self.file.is_file():
            raise CtxextError(f'"{self.file}" is not a regular file.', hint="Choose another place for the study.")
        with self.lock():
            created = self.get_creation_time()
        if resume and created is None:
            raise CtxextError(f'The study "{self}" does not exist.', hint="Remove --resume.")
        if resume or created is None or created >= began:
            return None
        if not overwrite:
            raise CtxextError(
                f'The study "{self}" exists already.', hint="Continue with --resume, or start over with --overwrite."
            )
        return created


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
