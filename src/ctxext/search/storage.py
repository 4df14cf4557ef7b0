"""Storages of studies: drivers of databases, journals, and the lock that lets one process at a time create a study."""

import contextlib
import difflib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ctxext.errors import CtxextError
from ctxext.files.offline import forbid_network

if TYPE_CHECKING:
    from optuna.storages import BaseStorage
    from sqlalchemy.engine import URL, Connection

LOCK_SECONDS = 300
"""Seconds to wait for other processes that create a study, or write to SQLite; killed ones hold no lock."""

_DRIVERS = {"postgresql": ("psycopg", "psycopg2"), "mysql": ("pymysql", "mysqldb"), "mariadb": ("pymysql", "mysqldb")}
"""Drivers of the databases that optuna supports, for URLs that name none."""

_PACKAGES = {"psycopg": "psycopg[binary]", "psycopg2": "psycopg2-binary", "mysqldb": "mysqlclient"}
"""Package of a driver, if it has another name."""

_KEY = int.from_bytes(b"ctxext")
_LOCKS = {
    "postgresql": (f"SET LOCAL lock_timeout = '{LOCK_SECONDS}s'", f"SELECT pg_advisory_xact_lock({_KEY})"),
    "mysql": (f"SELECT GET_LOCK('ctxext', {LOCK_SECONDS})",),
    "mariadb": (f"SELECT GET_LOCK('ctxext', {LOCK_SECONDS})",),
}
"""Statements that acquire a lock of a database; it is released when the connection ends, also that of a killed process.

The one of PostgreSQL belongs to a transaction, so that it holds through poolers of connections too.
"""

_LINE = b'{"op_code":'
"""Beginning of each line of a journal."""

_LONGEST_LINE = 1 << 26
"""Bytes at the end of a journal in which its last line begins."""


def choose_driver(url: "URL") -> "URL":
    """Return the URL with a driver that is installed.

    It is the driver that the URL names, or else SQLAlchemy's default, or else another one of the same database:
    SQLAlchemy 2.0 uses psycopg2 for postgresql://, and 2.1 psycopg.

    Raises:
        CtxextError: No such driver is installed, or the database is unknown.
    """
    from sqlalchemy.exc import NoSuchModuleError

    backend, _, named = url.drivername.partition("+")
    known = [f"{backend}+{driver}" for driver in _DRIVERS.get(backend, ())]
    reasons = []
    for name in (url.drivername, *(known if not named else ())):
        candidate = url.set(drivername=name)
        try:
            dialect = candidate.get_dialect()
            dialect.import_dbapi()
        except NoSuchModuleError as error:
            raise CtxextError(
                f'--storage: "{url.drivername}://" is not a known kind of database.', hint=_suggest(backend, known)
            ) from error
        except ImportError as error:
            reasons.append((dialect.driver, (str(error).splitlines() or [""])[0]))
            continue
        if not dialect.is_async:
            return candidate
        reasons.append((dialect.driver, "it is asynchronous"))
    driver, reason = reasons[0]
    packages = dict.fromkeys(_PACKAGES.get(driver, driver) for driver, why in reasons if why != "it is asynchronous")
    ways = [f'pip install "{package}"' for package in packages]
    ways += [f"use {name}:// in --storage" for name in known if named and name != url.drivername]
    raise CtxextError(
        f'--storage: "{url.drivername}://" needs the database driver {driver}, which cannot be used: {reason}',
        hint=", or ".join(ways) or "Use another driver in --storage.",
    )


def _suggest(backend: str, known: list[str]) -> str:
    """Return the hint for an unknown database or an unknown driver of a known one."""
    if known:
        return f"Use {' or '.join(f'{name}://' for name in known)}."
    close = difflib.get_close_matches(backend, [*_DRIVERS, "sqlite"], n=1)
    names = close or [*_DRIVERS, "sqlite"]
    return f"Use {', '.join(f'{name}://' for name in names)}, or the path of a journal file."


def open_database(url: "URL") -> "BaseStorage":
    """Open a database as a storage; create its tables if they do not exist, for which the lock must be held."""
    import sqlalchemy

    with forbid_network():
        from optuna.storages import RDBStorage

    is_sqlite = url.get_backend_name() == "sqlite"
    options = {"connect_args": {"timeout": LOCK_SECONDS}} if is_sqlite else {"pool_pre_ping": True}
    # optuna formats the URL as a template.
    template = url.render_as_string(hide_password=False).replace("{", "{{").replace("}", "}}")
    storage = RDBStorage(template, engine_kwargs=options)
    if is_sqlite:
        # SQLite knows no row locks: if a transaction only reads at first, two processes may take the same trial.
        sqlalchemy.event.listen(storage.engine, "begin", _begin_immediately)
    return storage


def _begin_immediately(connection: "Connection") -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def has_studies(url: "URL") -> bool:
    """Return whether a database has tables of studies, without creating them."""
    import sqlalchemy

    engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool)
    return sqlalchemy.inspect(engine).has_table("studies")


@contextlib.contextmanager
def lock_database(url: "URL") -> Iterator[None]:
    """Let one process at a time run the block; without effect on databases that have no such lock."""
    import sqlalchemy

    statements = _LOCKS.get(url.get_backend_name(), ())
    if not statements:
        yield
        return
    connection = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool).connect()
    try:
        results = [connection.exec_driver_sql(statement) for statement in statements]
        if url.get_backend_name() != "postgresql" and results[-1].scalar() != 1:  # PostgreSQL raises an error itself.
            raise CtxextError(
                "Another process is creating a study in the database.", hint="Wait until it has finished."
            )
        yield
    finally:
        # The server may have closed the connection, and the lock with it: what the block did is done.
        with contextlib.suppress(sqlalchemy.exc.SQLAlchemyError):
            connection.close()


def open_journal(path: Path) -> "BaseStorage":
    """Open a journal file as a storage; create it if it does not exist.

    Raises:
        ValueError: The file is not a journal.
    """
    with forbid_network():
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

    class Lock(JournalFileSymlinkLock):
        """Lock that may be broken while it is held: processes that waited for a killed one may break several."""

        def release(self) -> None:
            with contextlib.suppress(RuntimeError):
                super().release()

    # The lock is a link to this path: if that were relative, the lock of a killed process would never expire.
    place = path.resolve()
    lock = Lock(str(place))
    if place.exists():
        lock.acquire()
        try:
            _remove_incomplete_line(place)
        finally:
            lock.release()
    return JournalStorage(JournalFileBackend(str(place), lock))


def _remove_incomplete_line(journal: Path) -> None:
    """Remove an incomplete last line, left by a crash or a full disk: the next line would be appended to it."""
    with journal.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        if file.read() in (b"", b"\n"):
            return
        file.seek(max(0, end - _LONGEST_LINE))
        line = file.read().rpartition(b"\n")[2]
        if not _LINE.startswith(line[: len(_LINE)]):
            raise ValueError("its last line is not one of a study")
        file.truncate(end - len(line))
