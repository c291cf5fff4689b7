"""Chooses the next jobs of a function from the store. The owners of jobs take turns, so no owner waits behind another's jobs."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import closing
from itertools import chain, islice, takewhile
from typing import TypeAlias

from ..stored.job import Job
from .connection import SqlConnection
from .rows import read_jobs

# The conditions of the index `jobs_ready`. `_owners` asks for one owner after the other, because listing all owners
# at once would read all jobs.
_READY = "FROM jobs WHERE function = ? AND state = 'IN_QUEUE' AND due_s = 0"
_PRIORITY = f"SELECT priority {_READY} AND priority > ? ORDER BY priority LIMIT 1"
_FIRST_OWNER = f"SELECT owner {_READY} AND priority = ? ORDER BY owner LIMIT 1"
_NEXT_OWNER = f"SELECT owner {_READY} AND priority = ? AND owner > ? ORDER BY owner LIMIT 1"
_FREE = "incarnation IN ('', ?)"
"""The condition on a job that no other gateway has claimed. Its value is the incarnation of this gateway."""
_NUMBERS = f"SELECT number, id, size {_READY} AND priority = ? AND owner = ? AND until_s > ? AND {_FREE} ORDER BY number LIMIT ?"
_DELAYED = f"""
SELECT priority, owner, number, id, size FROM jobs
WHERE function = ? AND state = 'IN_QUEUE' AND due_s > 0 AND due_s <= ? AND until_s > ? AND {_FREE}
ORDER BY priority, number LIMIT ?"""  # noqa: S608
_LOWEST = -(1 << 62)
_Sized: TypeAlias = tuple[int, int]
"""The row number of a job, and the bytes of its input."""


def due(
    connection: SqlConnection, function: str, limit: int, now_s: float, known: Collection[str] = (), after: str = "",
    most_bytes: float = math.inf, *, gateway: str = "",
) -> list[Job]:  # fmt: skip
    """Return the jobs that `JobStore.claim` returns to the gateway with the incarnation `gateway`."""
    turns = _Turns(connection, function, now_s, frozenset(known), limit, gateway)
    numbers, size_bytes = list[int](), 0
    with closing(turns.ready(after)) as ready:
        for number, size in islice(ready, limit):
            numbers.append(number)
            size_bytes += size
            if size_bytes >= most_bytes:
                break
    return read_jobs(connection, numbers)


class _Turns:
    """One choice of at most `limit` jobs of a function. It looks up at most one owner for each of these jobs and for
    each known job.
    """

    def __init__(
        self, connection: SqlConnection, function: str, now_s: float, known: frozenset[str], limit: int, gateway: str
    ) -> None:  # fmt: skip
        self._connection, self._function, self._now_s, self._known = connection, function, now_s, known
        self._limit, self._gateway = limit, gateway
        # Read at most this many jobs of an owner: `limit`, and the number of known jobs, because all known jobs may be
        # among them.
        self._most = limit + len(known)

    def ready(self, after: str) -> Generator[_Sized, None, None]:
        """Yield the row numbers of jobs in the order in which they are to start, with the sizes of their inputs."""
        delayed = self._delayed()
        for priority in sorted({*self._priorities(), *delayed}):
            late = delayed.get(priority, {})
            owners = {*islice(self._owners(priority, after), self._most), *late}
            queues = deque(
                heapq.merge(self._ready(priority, owner), late.get(owner, ()))
                for owner in sorted(owners, key=lambda owner: (owner <= after, owner))
            )
            while queues:
                queue = queues.popleft()
                if (job := next(queue, None)) is not None:
                    yield job
                    queues.append(queue)

    def _priorities(self) -> Iterator[int]:
        priority = _LOWEST
        while (row := self._connection.execute(_PRIORITY, (self._function, priority)).fetchone()) is not None:
            priority = row["priority"]
            yield priority

    def _owners(self, priority: int, after: str) -> Iterator[str]:
        """Yield the owners of ready jobs by id: first the owners after `after`, then the others."""
        others = takewhile(lambda owner: owner <= after, self._owners_from(_FIRST_OWNER, priority))
        return chain(self._owners_from(_NEXT_OWNER, priority, after), others)

    def _owners_from(self, query: str, priority: int, *after: str) -> Iterator[str]:
        while row := self._connection.execute(query, (self._function, priority, *after)).fetchone():
            yield row["owner"]
            query, after = _NEXT_OWNER, (row["owner"],)

    def _ready(self, priority: int, owner: str) -> Iterator[_Sized]:
        """Yield an owner's jobs that are not delayed."""
        values = (self._function, priority, owner, self._now_s, self._gateway, self._most)
        with closing(self._connection.execute(_NUMBERS, values)) as rows:
            for row in rows:
                if row["id"] not in self._known:
                    yield row["number"], row["size"]

    def _delayed(self) -> Mapping[int, Mapping[str, list[_Sized]]]:
        """Return by priority and owner the delayed jobs that are due. Only repeated attempts are delayed."""
        found: defaultdict[int, defaultdict[str, list[_Sized]]] = defaultdict(lambda: defaultdict(list))
        values = (self._function, self._now_s, self._now_s, self._gateway, self._most)
        for priority, owner, number, job_id, size in self._connection.execute(_DELAYED, values):
            if job_id not in self._known:
                found[priority][owner].append((number, size))
        return found
