"""Runs reads and writes of jobs on PostgreSQL.

One gateway writes at a time: a group of writes begins with a lock of the database. So transitions need no locks of
rows, limits are exact, `jobs.number` increases in the order of the commits, and no two gateways can wait for each
other. Each gateway commits the changes of many callers together, so the lock costs little. If a session has the lock
and runs no statement for too long, the server ends the session.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import psycopg

from ....errors import JobStoreFailed
from ...ground.storing.postgres import BEGIN, PostgresConnection, migrate, usable
from ..sql.group_commit import GroupCommit

READERS = 4
"""The number of connections that read. With round trips of 1 ms, one connection could do only 1,000 reads a second."""
LOCK = "SELECT pg_advisory_xact_lock(hashtext('pilotflame jobs ' || current_schema()))"
"""Lets no other gateway write until the end of the transaction."""
_BEGIN_WRITE = f"""{BEGIN}; {LOCK},
set_config('enable_seqscan', 'off', true), set_config('enable_hashjoin', 'off', true), set_config('enable_mergejoin', 'off', true),
extract(epoch FROM clock_timestamp())::float8"""
"""Begins a transaction that writes. All its statements use indexes, also if they were planned when the tables were small."""
_BEGIN_READ = f"{BEGIN}; SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY"


class PostgresJobsConnection(PostgresConnection):
    """A connection that returns the number of a new row of `jobs`."""

    def insert(self, sql: str, values: Sequence[Any], /) -> int | None:
        row = self.execute(f"{sql} RETURNING number", values).fetchone()
        return None if row is None else int(row[0])


class PostgresDatabase(GroupCommit):
    """A PostgreSQL database."""

    errors = (psycopg.Error,)
    readers = READERS
    in_doubt = True
    remedy = "Check whether PostgreSQL runs, and whether its disk is full."

    def __init__(self, url: str, on_written: Callable[[bool], None] = lambda _failed: None) -> None:
        """`url` is a connection string of libpq."""
        super().__init__(on_written)
        self.url = url
        self._ahead_s = 0.0

    def now_s(self) -> float:
        """Return the database's time in Unix seconds: this machine's time, plus the difference at the last write."""
        return time.time() + self._ahead_s

    def open(self) -> None:
        with ExitStack() as opened:
            with usable(JobStoreFailed):
                opened.callback((writer := self.connect(reading=False)).close)
                migrate(writer)
                readers = [self.connect(reading=True) for _ in range(READERS)]
            opened.pop_all()
        self._begin(writer, readers)

    def connect(self, *, reading: bool) -> PostgresJobsConnection:
        return PostgresJobsConnection(self.url)

    def begin(self, connection: PostgresJobsConnection, *, reading: bool) -> None:
        if reading:
            connection.run(_BEGIN_READ)
            return
        ((*_, database_s),) = connection.run(_BEGIN_WRITE)
        self._ahead_s = database_s - time.time()

    def in_transaction(self, connection: PostgresJobsConnection) -> bool:
        return connection.in_transaction

    def broken(self, connection: PostgresJobsConnection) -> bool:
        return connection.broken
