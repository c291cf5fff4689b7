"""Chooses the next jobs of a function from the store. The owners of jobs take turns, so no owner waits behind another's jobs."""

from __future__ import annotations

import heapq
import math
import sqlite3
from collections import defaultdict, deque
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import closing
from itertools import chain, islice, takewhile

from ..stored.job import Job
from ..stored.large_bodies import size_of
from .schema import SELECT_WHOLE, read_job

# The conditions of the index `jobs_ready`. A list of all owners would need a read of all jobs, so `_owners` asks for one
# owner after the other.
_READY = "FROM jobs WHERE function = ? AND state = 'IN_QUEUE' AND due_s = 0"
_PRIORITY = f"SELECT priority {_READY} AND priority > ? ORDER BY priority LIMIT 1"
_OWNER = f"SELECT owner {_READY} AND priority = ? AND owner >= ? ORDER BY owner LIMIT 1"
_NUMBERS = f"SELECT number, id {_READY} AND priority = ? AND owner = ? AND until_s > ? ORDER BY number"
_DELAYED = """SELECT priority, owner, number, id FROM jobs
WHERE function = ? AND state = 'IN_QUEUE' AND due_s > 0 AND due_s <= ? AND until_s > ? ORDER BY priority, number LIMIT ?"""
_LOWEST = -(1 << 62)


def due(
    connection: sqlite3.Connection,
    function: str,
    limit: int,
    now_s: float,
    known: Collection[str] = (),
    after: str = "",
    most_bytes: float = math.inf,
) -> list[Job]:
    known, found, size_bytes = frozenset(known), list[Job](), 0
    with closing(_Turns(connection, function, now_s, known, limit).numbers(after)) as numbers:
        for number in islice(numbers, limit):
            found.append(job := read_job(connection, number, SELECT_WHOLE))
            size_bytes += len(job.input) + size_of(job.large_input)
            if size_bytes >= most_bytes:
                break
    return found


class _Turns:
    """One choice of at most `limit` jobs of a function. At most one owner for each of them, and for each known job, is looked up."""

    def __init__(
        self, connection: sqlite3.Connection, function: str, now_s: float, known: frozenset[str], limit: int
    ) -> None:
        self._connection, self._function, self._now_s, self._known = connection, function, now_s, known
        self._limit = limit

    def numbers(self, after: str) -> Generator[int, None, None]:
        """Yield the numbers of jobs in the order in which they are to start."""
        delayed = self._delayed()
        for priority in sorted({*self._priorities(), *delayed}):
            late = delayed.get(priority, {})
            # All jobs of an owner may be known, so look up an owner more for each known job.
            most = self._limit + len(self._known)
            owners = {*islice(self._owners(priority, after), most), *late}
            queues = deque(
                heapq.merge(self._ready(priority, owner), late.get(owner, ()))
                for owner in sorted(owners, key=lambda owner: (owner <= after, owner))
            )
            while queues:
                queue = queues.popleft()
                if (number := next(queue, None)) is not None:
                    yield number
                    queues.append(queue)

    def _priorities(self) -> Iterator[int]:
        priority = _LOWEST
        while (row := self._connection.execute(_PRIORITY, (self._function, priority)).fetchone()) is not None:
            priority = row["priority"]
            yield priority

    def _owners(self, priority: int, after: str) -> Iterator[str]:
        """Yield the owners of ready jobs by id: first the owners after `after`, then the others."""
        others = takewhile(lambda owner: owner <= after, self._owners_from(priority, ""))
        return chain(self._owners_from(priority, f"{after}\0"), others)

    def _owners_from(self, priority: int, first: str) -> Iterator[str]:
        while row := self._connection.execute(_OWNER, (self._function, priority, first)).fetchone():
            yield row["owner"]
            # No text is between an owner and this one.
            first = f"{row['owner']}\0"

    def _ready(self, priority: int, owner: str) -> Iterator[int]:
        """Yield the numbers of an owner's jobs that are not delayed."""
        values = (self._function, priority, owner, self._now_s)
        with closing(self._connection.execute(_NUMBERS, values)) as rows:
            for row in rows:
                if row["id"] not in self._known:
                    yield row["number"]

    def _delayed(self) -> Mapping[int, Mapping[str, list[int]]]:
        """Return by priority and owner the numbers of the delayed jobs that are due. Only repeated attempts are delayed."""
        found: defaultdict[int, defaultdict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        most = self._limit + len(self._known)
        values = (self._function, self._now_s, self._now_s, most)
        for priority, owner, number, job_id in self._connection.execute(_DELAYED, values):
            if job_id not in self._known:
                found[priority][owner].append(number)
        return found
