"""Runs reads and writes of the jobs database, an SQLite file, in two threads outside the event loop.

One thread writes, the other reads. Writes use group commit; see transaction.py.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from ....errors import JobStoreFailed
from ...ground.settings.state_dir import create_private, store_fault

T = TypeVar("T")
Change = Callable[[sqlite3.Connection], T]

MAX_GROUP = 512
"""The most queued calls that one transaction commits together."""
BUSY_TIMEOUT_S = 10.0
WAL_PAGES = 4000
"""When the write-ahead log (WAL) has this many pages (16 MB), SQLite copies it into the file."""
_SETTINGS = (
    # This setting has an effect only before the first table exists and before the WAL is enabled.
    "auto_vacuum=INCREMENTAL",
    "journal_mode=WAL",
    # A commit returns only once it is durably on disk.
    "synchronous=FULL",
    "temp_store=MEMORY",
    "cache_size=-32768",
    f"wal_autocheckpoint={WAL_PAGES}",
    f"journal_size_limit={2 * WAL_PAGES * 4096}",
)


@dataclass(slots=True, eq=False)
class _QueuedCall:
    """A change or query that is queued for its thread, and later its result."""

    run: Change[Any]
    committed: Callable[[Any], object] | None
    at_commit: Callable[[], object] | None
    future: asyncio.Future[Any]
    result: Any = None
    error: Exception | None = None
    ended: bool = False
    """True if the change is committed or the query was run. Then a later failure of the connection is not a failure of
    this call.
    """


_Calls = queue.SimpleQueue[_QueuedCall | None]
_RunGroup = Callable[[sqlite3.Connection, list[_QueuedCall]], None]
_Connect = Callable[[], sqlite3.Connection]


class Database:
    """The database file and its two threads. `scripts[n]` upgrades the file from version n to n + 1."""

    def __init__(
        self, path: Path, scripts: Sequence[str], on_written: Callable[[bool], None] = lambda _failed: None
    ) -> None:
        """After each group, the writing thread calls `on_written`: with True if a change could not be stored, else with
        False.
        """
        self.path = path
        self._on_written = on_written
        self._scripts = scripts
        self._writes: _Calls = queue.SimpleQueue()
        self._reads: _Calls = queue.SimpleQueue()
        self._threads: list[tuple[_Calls, threading.Thread]] = []
        """Empty while the file is closed."""
        self._lock = threading.Lock()

    def open(self) -> None:
        """Open or create the file and upgrade it. Blocks. Raise JobStoreFailed if the file cannot be used."""
        create_private(self.path)
        with ExitStack() as opened:
            try:
                opened.callback((writer := self._connect()).close)
                self._upgrade(writer)
                opened.callback((reader := self._connect_reader()).close)
            except sqlite3.Error as error:
                fault, remedy = store_fault(self.path, error)
                raise JobStoreFailed(
                    f"The store of jobs, {self.path}, cannot be used: {fault}.", remedy=remedy
                ) from error
            # From here on, each thread closes its own connection, so the ExitStack must not.
            opened.pop_all()
        # `close` ends the threads in this order. The connection that is closed last copies the WAL into the
        # file, which only the writer's connection may do.
        for name, connection, calls, run_group, connect in (
            ("jobs-reader", reader, self._reads, _read, self._connect_reader),
            ("jobs-writer", writer, self._writes, self._write_group, self._connect),
        ):
            served = (connection, calls, run_group, connect)
            thread = threading.Thread(target=_serve, args=served, name=name, daemon=True)
            thread.start()
            self._threads.append((calls, thread))

    def close(self) -> None:
        """Finish all queued calls and close the file. Blocks. Later calls raise JobStoreFailed."""
        with self._lock:
            threads, self._threads = self._threads, []
        for calls, thread in threads:
            calls.put(None)
            thread.join()

    async def write(
        self, change: Change[T], committed: Callable[[T], object] | None = None,
        at_commit: Callable[[], object] | None = None,
    ) -> T:  # fmt: skip
        """Run `change` in a transaction and return its result once the transaction is durably on disk.

        `change` runs in the writer thread. It runs a second time if the commit of its group failed. If it raises, only
        its own changes are undone: the changes of other callers in the group stay. After the commit, the event loop
        calls `committed` with the result, even if the caller was cancelled. Raises JobStoreFailed if the database
        cannot be written.

        The writer thread calls `at_commit` right after the commit. No other change runs between `change` and `at_commit`.
        """
        return await self._call(self._writes, change, committed, at_commit)

    async def read(self, query: Change[T]) -> T:
        """Run `query`, which must not write, in the reader thread and return its result."""
        return await self._call(self._reads, query)

    async def _call(
        self, calls: _Calls, run: Change[T], committed: Callable[[T], object] | None = None,
        at_commit: Callable[[], object] | None = None,
    ) -> T:  # fmt: skip
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        # `close` queues None to end a thread. A call that is queued after it would never be run.
        with self._lock:
            if not self._threads:
                raise JobStoreFailed("The store of jobs is closed.")
            calls.put(_QueuedCall(run, committed, at_commit, future))
        return await future

    def _write_group(self, connection: sqlite3.Connection, group: list[_QueuedCall]) -> None:
        failed = True
        group.sort(key=lambda call: call.at_commit is not None)
        try:
            _commit(connection, group)
            failed = any(isinstance(call.error, JobStoreFailed) for call in group)
        finally:
            self._on_written(failed)

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        connection.row_factory = sqlite3.Row
        try:
            for setting in _SETTINGS:
                connection.execute(f"PRAGMA {setting}")
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    def _connect_reader(self) -> sqlite3.Connection:
        connection = self._connect()
        connection.execute("PRAGMA query_only=ON")
        return connection

    def _upgrade(self, connection: sqlite3.Connection) -> None:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        # The versions that no release has written have no script.
        first = 1 + sum(not script for script in self._scripts)
        if 0 < version < first:
            fault = f"{self.path} has version {version}; this pilotflame reads versions from {first} on."
            raise JobStoreFailed(
                fault, remedy="Move it away, and start again: a new file begins without jobs."
            )
        for number, script in enumerate(self._scripts[version:], version + 1):
            connection.executescript(f"BEGIN IMMEDIATE; {script}; PRAGMA user_version={number}; COMMIT;")
        if version > len(self._scripts):
            raise JobStoreFailed(
                f"{self.path} has version {version}; this pilotflame knows versions up to {len(self._scripts)}.",
                remedy="Use the pilotflame that wrote it, or a newer one.",
            )


def _serve(connection: sqlite3.Connection, calls: _Calls, run_group: _RunGroup, connect: _Connect) -> None:
    """Run queued calls in groups until None is taken from the queue, then close the connection.

    A connection that fails, for example to roll back, is replaced before the next group.
    """
    call = calls.get()
    while call is not None:
        group = [call]
        while len(group) < MAX_GROUP and not calls.empty() and (call := calls.get()) is not None:
            group.append(call)
        try:
            run_group(connection, group)
        except Exception as error:  # noqa: BLE001  raised again in the callers: the thread goes on
            for failed in group:
                failed.error = failed.error if failed.ended else _refused(error)
            connection = _replaced(connection, connect)
        _deliver(group)
        # While the thread waits, it keeps no call, whose change may hold the input of a job.
        ended, group, call = call is None, [], None
        call = None if ended else calls.get()
    connection.close()


def _replaced(connection: sqlite3.Connection, connect: _Connect) -> sqlite3.Connection:
    """Close a connection, which undoes its open transaction, and return a new one.

    If that fails, return the closed connection. The next group then fails too, and the connection is replaced after it.
    """
    with suppress(sqlite3.Error):
        connection.close()
        return connect()
    return connection


def _read(connection: sqlite3.Connection, group: list[_QueuedCall]) -> None:
    """Run a group's queries in one transaction, so that all their statements read the same state of the file."""
    connection.execute("BEGIN")
    for call in group:
        _run(connection, call)
        call.ended = True
    connection.execute("COMMIT")


def _commit(connection: sqlite3.Connection, group: list[_QueuedCall]) -> None:
    """Commit a group in one transaction.

    If the commit fails, repeat each call in a separate transaction. Then only the call at fault fails.
    Raises sqlite3.Error if the connection cannot be used any more.
    """
    try:
        connection.execute("BEGIN IMMEDIATE")
        for call in group:
            connection.execute("SAVEPOINT call")
            _run(connection, call)
            if call.error is not None:
                # If SQLite has already rolled back the whole transaction, this raises: the group fails.
                connection.execute("ROLLBACK TO call")
            connection.execute("RELEASE call")
        connection.execute("COMMIT")
        for call in group:
            call.ended = True
            if call.at_commit is not None and call.error is None:
                call.at_commit()
    except sqlite3.Error as error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        if len(group) > 1:
            for call in group:
                call.error = None
                _commit(connection, [call])
        else:
            group[0].error, group[0].ended = group[0].error or _refused(error), True


def _run(connection: sqlite3.Connection, call: _QueuedCall) -> None:
    try:
        call.result = call.run(connection)
    except sqlite3.Error as error:
        # IntegrityError is not translated: the caller knows the violated constraint and its meaning.
        call.error = error if isinstance(error, sqlite3.IntegrityError) else _refused(error)
    except Exception as error:  # noqa: BLE001  raised again in the caller
        call.error = error


def _refused(error: Exception) -> JobStoreFailed:
    return JobStoreFailed(
        f"The store of jobs could not be written or read: {error}.",
        remedy="Check whether the disk of the state folder is full or the file is damaged.",
    )


def _deliver(group: list[_QueuedCall]) -> None:
    """Resolve the futures of all calls in a group, waking their event loop only once."""
    for loop, calls in groupby(group, lambda call: call.future.get_loop()):
        # RuntimeError means that the loop is closed: no caller waits any more.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(_settle, list(calls))


def _settle(calls: list[_QueuedCall]) -> None:
    for call in calls:
        if call.error is None and call.committed is not None:
            # Don't call it directly: if `committed` raised, the remaining calls would get no result.
            call.future.get_loop().call_soon(call.committed, call.result)
        if call.future.done():
            # The caller was cancelled and does not read the result. The change stays committed.
            continue
        if call.error is not None:
            call.future.set_exception(call.error)
        else:
            call.future.set_result(call.result)
