"""The store of one gateway: SQLite. It adds to `sql` what only a file needs:
it shifts the stored times when the clock is set, and gives free pages back.
"""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from ....errors import JobStoreFailed
from ....snapshot.publish import sync
from ...ground.settings.state_dir import store_fault
from ...ground.storing.blobs import FileBlobs
from ..sql import transitions, turns
from ..sql.connection import SqlConnection
from ..sql.store import SqlJobStore, query, transition
from ..sql.transaction import Transaction
from ..stored.large_bodies import LargeBodies
from .database import Database, SqliteConnection
from .group_counts import run_together
from .schema import SCRIPTS

DATABASE_FILE = "jobs.sqlite3"
_BODIES = ".bodies"
_MOVED = ".moved-"

_SHIFTS = (
    """UPDATE jobs SET until_s = until_s + ?1, stale_s = stale_s + ?1, due_s = due_s + ?1 * (due_s > 0),
        expires_s = expires_s + ?1 * (expires_s > 0)""",
    """UPDATE jobs SET created_s = created_s + ?1, started_s = started_s + ?1 * (started_s > 0)
        WHERE state IN ('IN_QUEUE', 'IN_PROGRESS')""",
    "UPDATE deliveries SET next_s = next_s + ?1, created_s = created_s + ?1",
    "UPDATE tombstones SET until_s = until_s + ?1",
)
SPARE_PAGES = 1024
"""This many free pages stay in the file for reuse, or a quarter of its pages if that is more."""
VACUUM_PAGES = 256
"""The most free pages that one transaction returns to the file system."""


def _expire(transaction: Transaction, limit: int = 200) -> int:
    """Run `transitions.expire`, and give free pages back to the file system."""
    handled = transitions.expire(transaction, limit)
    if pages := min(_excess_pages(transaction.connection), VACUUM_PAGES):
        # The pragma releases one page for each row that is fetched, so all rows must be fetched.
        transaction.connection.execute(f"PRAGMA incremental_vacuum({pages})").fetchall()
    return handled


def _next_expiry(connection: SqlConnection, now_s: float) -> float:
    return now_s if _excess_pages(connection) else transitions.next_expiry(connection)


def _shift(connection: SqlConnection, by_s: float) -> None:
    for change in _SHIFTS:
        connection.execute(change, (by_s,))


class SqliteJobStore(SqlJobStore):
    """A `JobStore` in one file. All other gateways that have used it are dead, so claims and leases are not needed."""

    expire = transition(_expire)
    next_expiry = query(_next_expiry)
    _claim = query(turns.due)

    def __init__(self, database: Database, **more: Any) -> None:
        """For `more` see SqlJobStore."""
        large = LargeBodies(FileBlobs(database.path.with_suffix(_BODIES)))
        super().__init__(database, large, **{"together": run_together, **more})
        self._folder = database.path.parent

    async def requeue_dead(self, *, expired: bool = True) -> tuple[int, int]:
        return await self._requeue_dead((self.incarnation,))

    async def unclaim(self, job_ids: Collection[str]) -> None:
        """Do nothing: no other gateway uses the file."""

    async def free_bytes(self) -> int:
        """Return the space that is free on the disk."""
        return (await asyncio.to_thread(shutil.disk_usage, self._folder)).free

    async def shift(self, by_s: float, follow: Callable[[], object]) -> None:
        """Add `by_s` to the stored times, and then call `follow`. No other write runs between the two."""
        await self._database.write(lambda connection: _shift(connection, by_s), at_commit=follow)


class JobsFile:
    """The file of a gateway that does not run. The caller has locked the state folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / DATABASE_FILE
        self._bodies = self.path.with_suffix(_BODIES)

    @property
    def moved(self) -> bool:
        """True if there is no file because all jobs were moved."""
        return not self.path.exists() and any(self.path.parent.glob(f"{DATABASE_FILE}{_MOVED}*"))

    @contextmanager
    def open(self) -> Iterator[SqliteConnection]:
        """Upgrade the file, and yield a connection that reads it. Raise JobStoreFailed if it cannot be read, also in the block."""
        database = Database(self.path, SCRIPTS)
        database.open()
        database.close()
        try:
            with closing(database.connect(reading=True)) as connection:
                yield connection
        except sqlite3.Error as error:
            fault, remedy = store_fault(self.path, error)
            raise JobStoreFailed(f"{self.path} cannot be read: {fault}.", remedy=remedy) from error

    def bodies(self, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        """Yield the large bodies with these names that exist."""
        blobs = FileBlobs(self._bodies)
        for name in names:
            if (body := blobs.get(name)) is not None:
                yield name, body

    def retire(self, name: str) -> None:
        """Rename the files, so that no gateway runs the jobs. `name` becomes a part of the new names. An interrupted call may be repeated."""
        for path in (self.path, self._bodies):
            if path.exists():
                path.rename(path.with_name(f"{path.name}{_MOVED}{name}"))
        sync(self.path.parent)


def _excess_pages(connection: SqlConnection) -> int:
    """Return how many free pages the file has beyond the pages that it keeps for reuse (see SPARE_PAGES).

    Return 0 for a file without incremental vacuum (`auto_vacuum` is not 2): its pages cannot be released.
    """
    pragmas = "pragma_auto_vacuum, pragma_freelist_count, pragma_page_count"
    query = f"SELECT auto_vacuum = 2, freelist_count, page_count FROM {pragmas}"  # noqa: S608
    incremental, free, pages = connection.execute(query).fetchone()
    return int(incremental * max(0, free - max(SPARE_PAGES, pages // 4)))
