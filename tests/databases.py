"""A PostgreSQL server of Debian's package, on a free port of this machine, in a folder of its own."""

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PASSWORD = "correct-horse-battery"
"""The password of the user "me", with whom the server is set up."""


def find_programs() -> Path | None:
    """Return the folder with initdb and postgres; None if PostgreSQL is not installed."""
    found = shutil.which("initdb")
    folders = [Path(found).parent] if found else []
    # Debian keeps the servers of several versions, none of them on the PATH.
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda folder: int(folder.parent.name))
    return next((folder for folder in reversed(folders) if (folder / "initdb").exists()), None)


class Postgres:
    """A running server.

    Args:
        port: Its port on 127.0.0.1.
    """

    def __init__(self, port: int) -> None:
        self.port = port

    def url(self, database: str = "postgres", *, scheme: str = "postgresql", password: str = PASSWORD) -> str:
        """Return the URL of a database."""
        return f"{scheme}://me:{password}@127.0.0.1:{self.port}/{database}"

    def create(self, name: str) -> str:
        """Create an empty database and return its URL."""
        import sqlalchemy

        engine = sqlalchemy.create_engine(
            self.url(scheme="postgresql+psycopg"), isolation_level="AUTOCOMMIT", poolclass=sqlalchemy.NullPool
        )
        with engine.connect() as connection:
            connection.execute(sqlalchemy.text(f'CREATE DATABASE "{name}"'))
        return self.url(name)


@contextlib.contextmanager
def run_postgres(programs: Path) -> Iterator[Postgres]:
    """Run a server until the block ends. As root it is run as another user, because initdb refuses root."""
    with tempfile.TemporaryDirectory(prefix="ctxext-postgres-") as name:
        folder, user = Path(name), {}
        if os.geteuid() == 0:
            names = [entry.pw_name for entry in pwd.getpwall()]
            entry = pwd.getpwnam("postgres" if "postgres" in names else "nobody")
            os.chown(folder, entry.pw_uid, entry.pw_gid)
            user = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
        (folder / "password").write_text(PASSWORD)
        (folder / "password").chmod(0o644)
        words = [
            programs / "initdb",
            "-D",
            folder / "data",
            "-U",
            "me",
            "--auth=scram-sha-256",
            "--no-sync",
            "-E",
            "UTF8",
        ]
        done = subprocess.run(
            [*words, f"--pwfile={folder / 'password'}"], capture_output=True, text=True, check=False, cwd=folder, **user
        )
        assert done.returncode == 0, done.stderr
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        settings = {"listen_addresses": "127.0.0.1", "port": port, "unix_socket_directories": folder, "fsync": "off"}
        options = [word for key, value in settings.items() for word in ("-c", f"{key}={value}")]
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(
                [programs / "postgres", "-D", folder / "data", *options], stdout=log, stderr=log, cwd=folder, **user
            )
        try:
            until = time.monotonic() + 60
            ready = [programs / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(port)]
            while subprocess.run(ready, check=False).returncode != 0:
                assert server.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < until, "PostgreSQL does not answer"
                time.sleep(0.05)
            yield Postgres(port)
        finally:
            server.terminate()  # Ends once its clients have gone.
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(5)
            if server.poll() is None:
                server.send_signal(2)  # Ends its clients too.
                server.wait(30)
