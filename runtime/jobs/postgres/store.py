"""The store of jobs that several gateways share: PostgreSQL."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from typing import Any

from ...ground.storing.postgres_blobs import PostgresBlobs
from ..sql import transitions, turns
from ..sql.store import SqlJobStore, query, transition
from ..sql.transaction import Transaction
from ..stored.job import Job
from ..stored.large_bodies import LargeBodies
from .database import PostgresDatabase
from .group_rows import run_together

_KNOWN = "SELECT incarnation FROM nodes"
_ALIVE = f"{_KNOWN} WHERE until > now()"


def _claim(
    transaction: Transaction, function: str, limit: int, now_s: float, known: Collection[str], after: str, most_bytes: float
) -> list[Job]:  # fmt: skip
    found = turns.due(
        transaction.connection,
        function,
        limit,
        now_s,
        known,
        after,
        most_bytes,
        gateway=transaction.incarnation,
    )
    marks = ", ".join("?" * len(found))
    if found:
        claimed = f"UPDATE jobs SET incarnation = ? WHERE id IN ({marks}) AND incarnation = ''"  # noqa: S608
        transaction.connection.execute(claimed, (transaction.incarnation, *(job.id for job in found)))
    return found


def _unclaim(transaction: Transaction, job_ids: Collection[str]) -> None:
    for job_id in job_ids:
        free = "UPDATE jobs SET incarnation = '' WHERE id = ? AND incarnation = ? AND state = 'IN_QUEUE' RETURNING function"
        for (function,) in transaction.connection.execute(free, (job_id, transaction.incarnation)):
            transaction.changes.queued.add(function)


def _requeue_dead(transaction: Transaction, *, expired: bool = True) -> tuple[int, int]:
    execute = transaction.connection.execute
    asked = _ALIVE if expired else _KNOWN
    alive = [incarnation for (incarnation,) in execute(asked)] or [transaction.incarnation]
    marks = ", ".join("?" * len(alive))
    free = f"""UPDATE jobs SET incarnation = '' WHERE state = 'IN_QUEUE' AND incarnation <> '' AND incarnation NOT IN ({marks})
        RETURNING function"""  # noqa: S608
    transaction.changes.queued.update(function for (function,) in execute(free, alive))
    requeued = transitions.requeue_dead(transaction, alive)
    # Delete dead gateways only after their jobs were queued again, because a gateway in this table may have jobs.
    if expired:
        execute("DELETE FROM nodes WHERE until <= now()")
    return requeued


class PostgresJobStore(SqlJobStore):
    """A `JobStore` of all gateways that use a database."""

    requeue_dead = transition(_requeue_dead)
    unclaim = transition(_unclaim)
    expire = transition(transitions.expire)
    _claim = transition(_claim)

    def __init__(self, database: PostgresDatabase, **more: Any) -> None:
        """For `more` see SqlJobStore."""
        large = LargeBodies(PostgresBlobs(database.url))
        super().__init__(database, large, **{"clock": database.now_s, "together": run_together, **more})

    async def next_expiry(self, now_s: float) -> float:
        return await self._next_expiry()

    _next_expiry = query(transitions.next_expiry)

    async def free_bytes(self) -> int:
        """Return the largest number, because PostgreSQL does not tell how much disk space is free."""
        return sys.maxsize

    async def shift(self, by_s: float, follow: Callable[[], object]) -> None:
        """Call `follow`. Do not change the stored times, because they come from the database's clock."""
        follow()
