"""Connects to PostgreSQL, lets code that was written for `sqlite3` use the connection, and upgrades the tables.

Statements have SQLite's placeholders: each `?` stands for the next value, and `?2` for the second one. They have no other `?`. Rows are read by name and by
position.

Numbered files, such as `0001_pre_jobs.sql`, create and change the tables. A *pre* migration only adds, so gateways of the previous version
can go on: any gateway that starts applies it. A *post* migration removes what only the previous version needs, so an operator applies
it when no gateway of that version is left.
"""

from __future__ import annotations

import queue
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import lru_cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, ClassVar, NamedTuple, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from ....errors import GatewayError, JobStoreFailed, PilotflameError

CONNECT_TIMEOUT_S = 10
STATEMENT_TIMEOUT_S = 30
IDLE_TIMEOUT_S = 5
"""The server ends the session of a gateway that stands still for this long in a transaction, so that no other gateway waits for its locks
for longer.
"""
BEGIN = f"""BEGIN; SET LOCAL statement_timeout = '{STATEMENT_TIMEOUT_S}s';
SET LOCAL idle_in_transaction_session_timeout = '{IDLE_TIMEOUT_S}s'"""
"""Begins a transaction with limits. They apply to the transaction and not to the session, because a PgBouncer may share the session with other gateways."""
_KEEPALIVE = {
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}
T = TypeVar("T")
CHECK_SERVER = "Check whether PostgreSQL runs, and whether its disk is full."
NO_ADDRESS = "it must be an address like postgresql://user:password@host/name, with special characters of the password as %40"
_MARK = re.compile(r"\?(\d*)")

_MIGRATION = re.compile(r"\d{4}_(pre|post)_\w+\.sql")
_BEGIN_MIGRATION = f"BEGIN; SET LOCAL lock_timeout = '60s'; SET LOCAL idle_in_transaction_session_timeout = '{IDLE_TIMEOUT_S}s'"
_MIGRATION_LOCK = "SELECT pg_advisory_xact_lock(hashtext('pilotflame migrations ' || current_schema()))"
_MIGRATIONS = "CREATE TABLE IF NOT EXISTS migrations (name TEXT PRIMARY KEY, applied TIMESTAMPTZ NOT NULL DEFAULT now())"
_EXAMINE = """SELECT current_setting('server_version'), extract(epoch FROM clock_timestamp())::float8,
has_schema_privilege(current_schema(), 'CREATE')"""
MIGRATIONS: Traversable = files(__package__) / "migrations"


class PostgresRow(tuple[Any, ...]):
    """A row whose columns have names."""

    __slots__ = ()
    positions: ClassVar[Mapping[str, int]]

    def __getitem__(self, key: Any) -> Any:
        return tuple.__getitem__(self, self.positions[key] if isinstance(key, str) else key)

    def keys(self) -> Iterable[str]:
        return self.positions.keys()


class PostgresCursor:
    """The rows that a statement returns."""

    def __init__(self, cursor: psycopg.RawCursor[PostgresRow]) -> None:
        self._cursor = cursor
        self.rowcount = cursor.rowcount

    def fetchone(self) -> PostgresRow | None:
        return self._cursor.fetchone()

    def fetchall(self) -> list[PostgresRow]:
        return self._cursor.fetchall()

    def __iter__(self) -> Iterator[PostgresRow]:
        return iter(self._cursor)

    def close(self) -> None:
        self._cursor.close()


class PostgresConnection:
    """A connection with the methods of `sqlite3.Connection` that stores call. It begins no transaction by itself."""

    def __init__(self, url: str) -> None:
        """Connect. Blocks, for at most CONNECT_TIMEOUT_S. Raise psycopg.Error."""
        limits: dict[str, Any] = {"connect_timeout": CONNECT_TIMEOUT_S, **_KEEPALIVE}
        try:
            given = conninfo_to_dict(url)
        except psycopg.ProgrammingError:
            # Do not show the error, because its text quotes the password.
            raise psycopg.ProgrammingError(NO_ADDRESS) from None
        info = make_conninfo(**limits | given)
        self.session: psycopg.Connection[PostgresRow] = psycopg.connect(
            info, autocommit=True, row_factory=_rows
        )

    @property
    def broken(self) -> bool:
        return self.session.closed

    @property
    def in_transaction(self) -> bool:
        return self.session.info.transaction_status is not psycopg.pq.TransactionStatus.IDLE

    def execute(self, sql: str, values: Sequence[Any] = (), /) -> PostgresCursor:
        cursor: psycopg.RawCursor[PostgresRow] = psycopg.RawCursor(self.session, row_factory=_rows)
        cursor.execute(_numbered(sql), values, binary=True)
        return PostgresCursor(cursor)

    def executemany(self, sql: str, values: Iterable[Sequence[Any]], /) -> None:
        psycopg.RawCursor(self.session).executemany(_numbered(sql), values)

    def run(self, script: str) -> list[PostgresRow]:
        """Run statements without values in one round trip. Return the rows of the last one."""
        cursor = self.session.cursor()
        cursor.execute(script)
        while cursor.nextset():
            pass
        return cursor.fetchall() if cursor.description else []

    def close(self) -> None:
        self.session.close()


class PostgresPool:
    """Connections that threads share. Each call takes a free connection, or a new one."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._free = queue.SimpleQueue[PostgresConnection]()
        self._closed = False

    def run(self, work: Callable[[PostgresConnection], T], begin: str = BEGIN) -> T:
        """Run `work` in a transaction, and return its result. Blocks. Raise psycopg.Error if PostgreSQL fails.

        If the connection breaks, for example because the server has restarted, run `work` once more with a new connection. The first
        transaction may have been committed nevertheless.
        """
        try:
            connection = self._free.get_nowait()
        except queue.Empty:
            connection = PostgresConnection(self._url)
        for tries_left in (1, 0):
            try:
                connection.run(begin)
                found = work(connection)
                connection.run("COMMIT")
                break
            except BaseException:
                broken = connection.broken
                connection.close()
                if not (broken and tries_left):
                    raise
            connection = PostgresConnection(self._url)
        self._free.put(connection)
        if self._closed:
            self.close()
        return found

    def rows(self, statement: str, *values: Any) -> list[PostgresRow]:
        """Return the rows that one statement returns. Blocks. Raise JobStoreFailed if PostgreSQL fails."""
        with reported("PostgreSQL could not be read or written", kind=JobStoreFailed):
            return self.run(lambda connection: connection.execute(statement, values).fetchall())

    def close(self) -> None:
        """Close the connections. A call that still runs closes its own connection at its end."""
        self._closed = True
        with suppress(queue.Empty):
            while True:
                self._free.get_nowait().close()


@lru_cache(1024)
def _numbered(sql: str) -> str:
    """Return the statement with PostgreSQL's placeholders."""
    used = 0

    def number(found: re.Match[str]) -> str:
        nonlocal used
        used += 1
        return f"${found[1] or used}"

    return _MARK.sub(number, sql)


@lru_cache(256)
def _row_class(*names: str) -> type[PostgresRow]:
    return type(
        "NamedRow",
        (PostgresRow,),
        {"__slots__": (), "positions": {name: at for at, name in enumerate(names)}},
    )


def _rows(cursor: Any) -> type[PostgresRow]:
    """Return the class for the rows of a cursor. This is a row factory of psycopg."""
    return _row_class(*(column.name for column in cursor.description or ()))


class DatabaseFacts(NamedTuple):
    """Facts about a database, for operators."""

    version: str
    round_trip_ms: float
    ahead_s: float
    """The time of the database's clock minus the time of this machine's clock, in seconds."""
    may_create: bool
    """True if the user may create tables."""
    missing: list[str]
    """The migrations that the database lacks."""


@contextmanager
def reported(
    problem: str, remedy: str = CHECK_SERVER, kind: type[PilotflameError] = GatewayError
) -> Iterator[None]:
    """Raise an error of `kind` if PostgreSQL fails in the block. Its message is `problem` and what PostgreSQL says."""
    try:
        yield
    except psycopg.Error as error:
        raise kind(f"{problem}: {str(error).strip().rstrip('.?')}.", remedy=remedy) from error


def usable(kind: type[PilotflameError] = GatewayError) -> AbstractContextManager[None]:
    """Return a context that raises an error of `kind` if PostgreSQL fails at the start of a gateway."""
    remedy = "Check the setting `database`, and whether PostgreSQL runs."
    return reported("The database cannot be used", remedy, kind)


def prepare_database(url: str) -> None:
    """Upgrade the tables. Blocks. Raise GatewayError if the database cannot be used."""
    with usable():
        connection = PostgresConnection(url)
        try:
            migrate(connection)
        finally:
            connection.close()


def examine_database(url: str) -> DatabaseFacts:
    """Look at a database, and change nothing. Blocks. Raise GatewayError if it cannot be used."""
    with usable():
        connection = PostgresConnection(url)
        try:
            begun_s = time.monotonic()
            ((version, database_s, may_create),) = connection.run(_EXAMINE)
            took_s = time.monotonic() - begun_s
            done = (
                {name for (name,) in connection.run("SELECT name FROM migrations")}
                if _has_tables(connection)
                else set[str]()
            )
        finally:
            connection.close()
    ahead_s = database_s + took_s / 2 - time.time()
    return DatabaseFacts(
        version, took_s * 1000, ahead_s, may_create, [name for name in _known(MIGRATIONS) if name not in done]
    )


def _has_tables(connection: PostgresConnection) -> bool:
    return connection.run("SELECT to_regclass('migrations') IS NOT NULL")[0][0] is True


def _known(folder: Traversable) -> list[str]:
    """Return the names of the migrations in a folder, in their order."""
    return sorted(file.name for file in folder.iterdir() if _MIGRATION.fullmatch(file.name))


def migrate(
    connection: PostgresConnection, folder: Traversable = MIGRATIONS, *, kinds: Collection[str] = ("pre",)
) -> list[str]:
    """Apply the files of these kinds that the database lacks, in the order of their numbers, in one transaction. Return their names.

    If another gateway applies them, wait for it. Raise JobStoreFailed if a file fails, or if a newer pilotflame has removed what this
    one needs. Raise psycopg.Error if the connection fails.
    """
    known = _known(folder)
    connection.run(f"{_BEGIN_MIGRATION}; {_MIGRATION_LOCK}; {_MIGRATIONS}")
    done = {name for (name,) in connection.run("SELECT name FROM migrations")}
    if removed := sorted(name for name in done - {*known} if "_post_" in name):
        connection.run("ROLLBACK")
        raise JobStoreFailed(
            f"The database has the migration {removed[-1]} of a newer pilotflame.",
            remedy="Use that pilotflame, or a newer one.",
        )
    new = [name for name in known if name not in done and name.split("_")[1] in kinds]
    for name in new:
        try:
            connection.run((folder / name).read_text(encoding="utf-8"))
        except psycopg.Error as error:
            connection.run("ROLLBACK")
            message = f"The migration {name} of the database failed: {str(error).strip()}."
            raise JobStoreFailed(message, remedy="Nothing is changed. See the log of PostgreSQL.") from error
        connection.execute("INSERT INTO migrations (name) VALUES (?)", (name,))
    connection.run("COMMIT")
    return new
