"""Runs reads and writes of a database in threads outside the event loop.

One thread writes. It commits all queued changes together, as a group; see transaction.py. Other threads read.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any, ClassVar, TypeVar

from ....errors import JobStoreFailed
from .connection import SqlConnection

LOG = logging.getLogger(__name__)
T = TypeVar("T")
Change = Callable[[Any], T]

RunTogether = Callable[[Any, Sequence[Any]], Sequence[Any]]
"""Runs changes of several callers with a few statements, as if each was run after the other. Its arguments are the connection and the
changes. It returns, for each change, the result or the exception that the change raised.
"""

MAX_GROUP = 512
"""The most queued calls that one transaction commits together."""


@dataclass(slots=True, eq=False)
class QueuedCall:
    """A change or query that is queued for its thread, and later its result."""

    run: Change[Any]
    committed: Callable[[Any], object] | None
    at_commit: Callable[[], object] | None
    future: asyncio.Future[Any]
    together: RunTogether | None = None
    result: Any = None
    error: Exception | None = None
    ended: bool = False
    """True if the change is committed or the query was run. Then a later failure of the connection is not a failure of this call."""


_TOGETHER = attrgetter("together")
_Calls = queue.SimpleQueue[QueuedCall | None]


class _NotTogetherError(Exception):
    """Changes could not be run together."""


class GroupCommit(ABC):
    """A database and its threads. Subclasses know how to connect."""

    errors: ClassVar[tuple[type[Exception], ...]]
    """The errors that a connection raises."""
    in_doubt: ClassVar[bool] = False
    """True if the connection may fail after a commit, but before the answer to the commit. Then a group is run twice if its connection fails, so changes must
    be repeatable.
    """
    remedy: ClassVar[str]

    def __init__(self, on_written: Callable[[bool], None] = lambda _failed: None) -> None:
        """After each group, the writing thread calls `on_written`: with True if a change could not be stored, else with
        False.
        """
        self._on_written = on_written
        self._writes: _Calls = queue.SimpleQueue()
        self._reads: _Calls = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        """The reading threads, then the writing one. Empty while the database is closed."""
        self._lock = threading.Lock()

    @abstractmethod
    def open(self) -> None:
        """Open or create the database, upgrade it, and call `_begin`. Blocks. Raise JobStoreFailed if it cannot be used."""

    @abstractmethod
    def connect(self, *, reading: bool) -> SqlConnection:
        """Return a new connection. Blocks. Raise one of `errors`."""

    @abstractmethod
    def begin(self, connection: Any, *, reading: bool) -> None:
        """Begin a transaction. If it is `reading`, it sees one state of the database. Otherwise, no other transaction
        writes until it ends.
        """

    @abstractmethod
    def in_transaction(self, connection: Any) -> bool:
        """Return True if a transaction is open."""

    @abstractmethod
    def broken(self, connection: Any) -> bool:
        """Return True if the connection cannot be used any more."""

    def _begin(self, writer: SqlConnection, readers: Sequence[SqlConnection]) -> None:
        """Start the threads. Each of them closes its own connection."""
        self._threads = [
            threading.Thread(
                target=self._serve, args=(connection, self._reads if reading else self._writes, reading),
                name="jobs-reader" if reading else "jobs-writer", daemon=True,
            )
            for connection, reading in (*((reader, True) for reader in readers), (writer, False))
        ]  # fmt: skip
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Finish all queued calls and close the connections. Blocks. Later calls raise JobStoreFailed."""
        with self._lock:
            threads, self._threads = self._threads, []
        # Close the writer's connection last. With SQLite, this copies the write-ahead log into the file.
        for calls, ended in ((self._reads, threads[:-1]), (self._writes, threads[-1:])):
            for _ in ended:
                calls.put(None)
            for thread in ended:
                thread.join()

    async def write(
        self, change: Change[T], committed: Callable[[T], object] | None = None,
        at_commit: Callable[[], object] | None = None, together: RunTogether | None = None,
    ) -> T:  # fmt: skip
        """Run `change` in a transaction and return its result once the transaction is durably on disk.

        `change` runs in the writer thread. It runs a second time if the commit of its group failed. If it raises, only
        its own changes are undone: the changes of other callers in the group stay. After the commit, the event loop
        calls `committed` with the result, even if the caller was cancelled. Raise JobStoreFailed if the database
        cannot be written.

        The writer thread calls `at_commit` right after the commit. Between `change` and `at_commit`, only changes run
        that have `at_commit`, too.

        If changes that follow each other in a group have the same `together`, one call of `together` runs them. If the
        call raises an error, the group is undone, and each of its changes is run by itself.
        """
        return await self._call(self._writes, change, committed, at_commit, together)

    async def read(self, query: Change[T]) -> T:
        """Run `query`, which must not write, in a reader thread and return its result."""
        return await self._call(self._reads, query)

    async def _call(
        self, calls: _Calls, run: Change[T], committed: Callable[[T], object] | None = None,
        at_commit: Callable[[], object] | None = None, together: RunTogether | None = None,
    ) -> T:  # fmt: skip
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        # Refuse calls after `close`. It queues None to end a thread, and a call behind None would never be run.
        with self._lock:
            if not self._threads:
                raise JobStoreFailed("The store of jobs is closed.")
            calls.put(QueuedCall(run, committed, at_commit, future, together))
        return await future

    def _serve(self, connection: SqlConnection, calls: _Calls, reading: bool) -> None:
        """Run queued calls in groups until None is taken from the queue, then close the connection."""
        while group := _next_group(calls):
            # End the thread after a group that ends with None.
            ended = group[-1] is None
            run = [call for call in group if call is not None]
            if run:
                connection = self._run_group(connection, run, reading)
                _deliver(run)
            # Forget the calls before the thread waits for the next group, because a change may refer to the input of a
            # job.
            group, run = [], []
            if ended:
                break
        connection.close()

    def _run_group(self, connection: SqlConnection, group: list[QueuedCall], reading: bool) -> SqlConnection:
        """Run the calls of a group. If the connection fails, for example during a rollback, replace it. Return the
        connection to use next.
        """
        left, tries = group, 1 + self.in_doubt
        for number in range(1, tries + 1):
            try:
                self._read(connection, left) if reading else self._write_group(connection, left)
            except Exception as error:  # noqa: BLE001  raised again in the callers: the thread goes on
                connection = self._replaced(connection, reading=reading)
                left = [call for call in left if not call.ended]
                for call in left:
                    call.error = self._refused(error) if number == tries else None
            else:
                break
        return connection

    def _replaced(self, connection: SqlConnection, *, reading: bool) -> SqlConnection:
        """Close a connection, which undoes its open transaction, and return a new one.

        If that fails, return the closed connection. The next group then fails too, and the connection is replaced after it.
        """
        with suppress(*self.errors):
            connection.close()
            return self.connect(reading=reading)
        return connection

    def _read(self, connection: SqlConnection, group: list[QueuedCall]) -> None:
        """Run a group's queries in one transaction, so that all their statements read the same state of the database."""
        self.begin(connection, reading=True)
        for call in group:
            self._run(connection, call)
            call.ended = True
            if isinstance(call.error, JobStoreFailed):
                # The error may have ended the transaction.
                connection.execute("ROLLBACK")
                self.begin(connection, reading=True)
        connection.execute("COMMIT")

    def _write_group(self, connection: SqlConnection, group: list[QueuedCall]) -> None:
        failed = True
        group.sort(key=lambda call: call.at_commit is not None)
        try:
            self._commit(connection, group)
            failed = any(isinstance(call.error, JobStoreFailed) for call in group)
        finally:
            self._on_written(failed)

    def _commit(self, connection: SqlConnection, group: list[QueuedCall]) -> None:
        """Commit a group in one transaction.

        If the commit fails, repeat each call in a separate transaction. Then only the call at fault fails.
        Raise one of `errors` if the connection cannot be used any more.
        """
        try:
            self._run_all(connection, group)
            connection.execute("COMMIT")
            for call in group:
                call.ended = True
                if call.at_commit is not None and call.error is None:
                    call.at_commit()
        except self.errors as error:
            if self.broken(connection):
                raise
            if self.in_transaction(connection):
                connection.execute("ROLLBACK")
            if len(group) > 1:
                for call in group:
                    call.error = None
                    self._commit(connection, [call])
            else:
                group[0].error, group[0].ended = group[0].error or self._refused(error), True

    def _run_all(self, connection: SqlConnection, group: list[QueuedCall]) -> None:
        """Begin a transaction and run the calls. If some cannot be run together, undo all, and run each call by itself."""
        self.begin(connection, reading=False)
        try:
            for together, calls in groupby(group, _TOGETHER):
                if together is not None:
                    self._run_together(connection, together, list(calls))
                else:
                    for call in calls:
                        self._run_alone(connection, call)
        except _NotTogetherError as error:
            LOG.debug("These changes are run one by one, since together they fail.", exc_info=error)
            # SQLite undoes the whole transaction itself if the disk is full.
            if self.in_transaction(connection):
                connection.execute("ROLLBACK")
            self.begin(connection, reading=False)
            for call in group:
                call.error = None
                self._run_alone(connection, call)

    def _run_alone(self, connection: SqlConnection, call: QueuedCall) -> None:
        """Run a call. If it fails, undo its own changes."""
        connection.execute("SAVEPOINT call")
        self._run(connection, call)
        if call.error is not None:
            # If the database has already rolled back the whole transaction, this raises: the group fails.
            connection.execute("ROLLBACK TO SAVEPOINT call")
        connection.execute("RELEASE SAVEPOINT call")

    def _run_together(
        self, connection: SqlConnection, together: RunTogether, calls: Sequence[QueuedCall]
    ) -> None:
        try:
            results = together(connection, [call.run for call in calls])
        except Exception as error:
            if self.broken(connection):
                raise
            raise _NotTogetherError from error
        for call, result in zip(calls, results, strict=True):
            if isinstance(result, Exception):
                call.error = result
            else:
                call.result = result

    def _run(self, connection: SqlConnection, call: QueuedCall) -> None:
        try:
            call.result = call.run(connection)
        except self.errors as error:
            if self.broken(connection):
                raise
            call.error = self._refused(error)
        except Exception as error:  # noqa: BLE001  raised again in the caller
            call.error = error

    def _refused(self, error: Exception) -> JobStoreFailed:
        message = f"The store of jobs could not be written or read: {error}."
        return JobStoreFailed(message, remedy=self.remedy)


def _next_group(calls: _Calls) -> list[QueuedCall | None]:
    """Wait for a queued call, and return it with the calls that are queued behind it. If the last element is None, the
    thread must end.
    """
    group = [calls.get()]
    with suppress(queue.Empty):
        while len(group) < MAX_GROUP and group[-1] is not None:
            group.append(calls.get_nowait())
    return group


def _deliver(group: list[QueuedCall]) -> None:
    """Resolve the futures of all calls in a group, waking their event loop only once."""
    for loop, calls in groupby(group, lambda call: call.future.get_loop()):
        # RuntimeError means that the loop is closed: no caller waits any more.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(_settle, list(calls))


def _settle(calls: list[QueuedCall]) -> None:
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
