"""The database of jobs: one SQLite file, one thread that writes, one that reads, both away from the event loop.

What callers ask to be written while a commit is on its way is gathered into the next (group commit), so that the price of
an fsync is shared by all who wait for it. Whoever awaits `write` goes on only when its change is on the disk.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, TypeVar

from ...errors import JobStoreFailed

T = TypeVar("T")
Change = Callable[[sqlite3.Connection], T]

MAX_GROUP = 512
BUSY_TIMEOUT_S = 10.0
PAGE_CACHE_KIB = 32 << 10
WAL_PAGES = 4000
"""So much is written before it is brought into the file itself: 16 MB, which bounds the log beside the file."""
_SETTINGS = (
    "auto_vacuum=INCREMENTAL",  # must come before the first table, and before the WAL
    "journal_mode=WAL",
    "synchronous=FULL",  # a commit that returned is on the disk
    "temp_store=MEMORY",
    f"cache_size=-{PAGE_CACHE_KIB}",
    f"wal_autocheckpoint={WAL_PAGES}",
    f"journal_size_limit={2 * WAL_PAGES * 4096}",
)


class Database:
    """One file. `scripts[n]` brings it from version n to n + 1; what has been released is never edited."""

    def __init__(self, path: Path, scripts: Sequence[str]) -> None:
        self._path = path
        self._scripts = scripts
        self._writes: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._reads: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._asking = threading.Lock()
        self._opened = False

    def open(self) -> None:
        """Open or make the file and bring it up to date; blocks. JobStoreFailed if that cannot be."""
        with ExitStack() as opened:
            writer = opened.enter_context(closing(self._connect()))
            self._update(writer)
            reader = opened.enter_context(closing(self._connect()))
            reader.execute("PRAGMA query_only=ON")
            opened.pop_all()  # from here on its thread closes each
        for name, connection, works, serve in (
            ("jobs-writer", writer, self._writes, _serve_writes),
            ("jobs-reader", reader, self._reads, _serve_reads),
        ):
            thread = threading.Thread(target=serve, args=(connection, works), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
        self._opened = True

    def close(self) -> None:
        """Finish what was asked for and close the file; blocks. What is asked for later is refused."""
        with self._asking:
            if not self._opened:
                return
            self._opened = False
        # The writer last: only a connection that may write brings the log into the file when it closes.
        for works, thread in zip((self._reads, self._writes), reversed(self._threads), strict=True):
            works.put(None)
            thread.join()
        self._threads = []

    async def write(self, change: Change[T], committed: Callable[[], None] | None = None) -> T:
        """Run `change` within a transaction, and return what it did once that is on the disk.

        If it raises, nothing of it stays, and others' changes are not touched. It runs in the writer's thread,
        a second time if the disk refused it together with others;
        `committed` on the event loop, once the change is on the disk, even if the caller was cancelled meanwhile.
        JobStoreFailed if the disk refuses.
        """
        return await self._ask(self._writes, change, committed)

    async def read(self, look: Change[T]) -> T:
        """Run `look`, which only reads, in the reader's thread."""
        return await self._ask(self._reads, look, None)

    async def _ask(
        self, works: queue.SimpleQueue[_Work | None], run: Change[T], committed: Callable[[], None] | None
    ) -> T:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        with self._asking:  # so that nothing comes behind the None that ends a thread, and waits for ever
            if not self._opened:
                raise JobStoreFailed("The store of jobs is closed.")
            works.put(_Work(run, committed, answer, loop))
        return await answer

    def _connect(self) -> sqlite3.Connection:
        try:
            connection = sqlite3.connect(
                self._path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
        except sqlite3.Error as error:
            raise self._unusable(error) from error
        try:
            connection.row_factory = sqlite3.Row
            for setting in _SETTINGS:
                connection.execute(f"PRAGMA {setting}")
        except sqlite3.Error as error:
            connection.close()
            raise self._unusable(error) from error
        return connection

    def _update(self, connection: sqlite3.Connection) -> None:
        try:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            for number in range(version, len(self._scripts)):
                connection.executescript(
                    f"BEGIN IMMEDIATE; {self._scripts[number]}; PRAGMA user_version={number + 1}; COMMIT;"
                )
        except sqlite3.Error as error:
            raise self._unusable(error) from error
        if version > len(self._scripts):
            raise JobStoreFailed(
                f"{self._path} is of version {version}, this pilotflame knows {len(self._scripts)}.",
                remedy="Use the pilotflame that made it, or a newer one.",
            )

    def _unusable(self, error: sqlite3.Error) -> JobStoreFailed:
        return JobStoreFailed(
            f"The store of jobs, {self._path}, cannot be used: {error}.",
            remedy="Look at the disk and the permissions of the state folder; a damaged file can be moved away.",
        )


class _Work:
    """One change or look, and who waits for it."""

    __slots__ = ("answer", "committed", "error", "loop", "result", "run")

    def __init__(
        self,
        run: Change[Any],
        committed: Callable[[], None] | None,
        answer: asyncio.Future[Any],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.run = run
        self.committed = committed
        self.answer = answer
        self.loop = loop
        self.result: Any = None
        self.error: Exception | None = None


def _serve_writes(connection: sqlite3.Connection, works: queue.SimpleQueue[_Work | None]) -> None:
    ended = False
    while not ended:
        group, ended = _gather(works)
        if group:
            _commit(connection, group)
            _answer(group)
    connection.close()


def _serve_reads(connection: sqlite3.Connection, works: queue.SimpleQueue[_Work | None]) -> None:
    ended = False
    while not ended:
        group, ended = _gather(works)
        for work in group:
            _run(connection, work)
        if group:
            _answer(group)
    connection.close()


def _gather(works: queue.SimpleQueue[_Work | None]) -> tuple[list[_Work], bool]:
    """What there is, at least one; and whether that was the end."""
    found = works.get()
    group: list[_Work] = []
    while found is not None:
        group.append(found)
        if len(group) == MAX_GROUP or works.empty():
            return group, False
        found = works.get()
    return group, True


def _commit(connection: sqlite3.Connection, group: list[_Work]) -> None:
    """All in one transaction. If the disk refuses it, each alone: what is too large for it harms no other."""
    failure = _commit_once(connection, group)
    if failure is None:
        return
    if len(group) > 1:
        for work in group:
            work.error = None
            _commit(connection, [work])
    elif group[0].error is None:
        group[0].error = _refused(failure)


def _commit_once(connection: sqlite3.Connection, group: list[_Work]) -> sqlite3.Error | None:
    """Nothing of the group stays if it gives an error back."""
    try:
        connection.execute("BEGIN IMMEDIATE")
        for work in group:
            connection.execute("SAVEPOINT work")
            _run(connection, work)
            if work.error is not None:  # of a transaction that SQLite has rolled back itself, this raises too
                connection.execute("ROLLBACK TO work")
            connection.execute("RELEASE work")
        connection.execute("COMMIT")
    except sqlite3.Error as error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        return error
    return None


def _run(connection: sqlite3.Connection, work: _Work) -> None:
    try:
        work.result = work.run(connection)
    except sqlite3.IntegrityError as error:
        work.error = error  # the asker's to make sense of
    except sqlite3.Error as error:
        work.error = _refused(error)
    except Exception as error:  # noqa: BLE001  raised again where it was asked for
        work.error = error


def _refused(error: sqlite3.Error) -> JobStoreFailed:
    return JobStoreFailed(
        f"The store of jobs could not be written or read: {error}.",
        remedy="Look whether the disk of the state folder is full, or the file damaged.",
    )


def _answer(group: list[_Work]) -> None:
    """Tell everybody, by one wake-up of each loop."""
    loops: dict[asyncio.AbstractEventLoop, list[_Work]] = {}
    for work in group:
        loops.setdefault(work.loop, []).append(work)
    for loop, works in loops.items():
        with suppress(RuntimeError):  # the loop has ended, and with it all who waited there
            loop.call_soon_threadsafe(_settle, works)


def _settle(works: list[_Work]) -> None:
    for work in works:
        if work.error is None and work.committed is not None:
            work.loop.call_soon(work.committed)  # each apart: one that raises keeps nobody from an answer
        if work.answer.done():  # who asked was cancelled; the change stands
            continue
        if work.error is not None:
            work.answer.set_exception(work.error)
        else:
            work.answer.set_result(work.result)
