"""Calls of a store of jobs that are committed as one group, and stores that make them."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from job_store_tests import HOOK, Clock, new_job
from pilotflame.runtime.jobs.sql.store import SqlJobStore
from pilotflame.runtime.jobs.stored.job import JobOutcome, JobState
from pilotflame.runtime.jobs.stored.job_changes import JobChanges

Call: TypeAlias = tuple[str, tuple[Any, ...]]
FUNCTIONS, OWNERS, IDS, WORKERS = (
    ("tone", "echo"),
    ("", "a", "b"),
    ("j1", "j2", "j3", "j4", "j5"),
    ("w1", "w2"),
)
TABLES = {
    "jobs": "*", "inputs": "*", "results": "*", "pieces": "*", "counters": "*", "stored": "*",
    "deliveries": "subject, function, event, url, body, state, attempts, next_s, created_s, owner",
}  # fmt: skip
OUTCOMES = (
    JobOutcome(JobState.COMPLETED, b'"\x00done"', logs="a\x00line", metrics=b"{}"),
    JobOutcome(JobState.COMPLETED),
    JobOutcome(JobState.FAILED, error={"type": "handler_failed"}, logs="l"),
    JobOutcome(JobState.CANCELLED),
    JobOutcome(JobState.IN_QUEUE),
)
new_jobs = st.builds(
    new_job,
    st.sampled_from(FUNCTIONS),
    st.sampled_from([b"", b"a", b"\x00\xff" * 9]),
    owner=st.sampled_from(OWNERS),
    idempotency=st.sampled_from(["", "", "k1", "k2"]),
    wanted_id=st.sampled_from(["", "", "", "mine"]),
    webhook=st.sampled_from([None, None, HOOK]),
    max_queued=st.sampled_from([None, 2, 5]),
    max_queued_bytes=st.sampled_from([None, 10]),
    extra=st.sampled_from([None, {}, {"b": [1, "ä"]}]),
    priority=st.integers(0, 2),
)
ids, fences, outcomes = st.sampled_from(IDS), st.sampled_from([1, 1, 1, 2]), st.sampled_from(OUTCOMES)
workers = st.sampled_from(WORKERS)
submits = st.tuples(st.just("submit"), st.tuples(new_jobs, ids))
calls = st.one_of(
    submits,
    submits,
    st.tuples(st.just("admit"), st.tuples(new_jobs, ids)),
    st.tuples(st.just("start"), st.tuples(new_jobs, ids, workers)),
    st.tuples(st.just("record"), st.tuples(new_jobs, ids, outcomes)),
    st.tuples(st.just("take"), st.tuples(ids, workers)),
    st.tuples(st.just("take"), st.tuples(ids, workers)),
    st.tuples(st.just("finish"), st.tuples(ids, fences, outcomes)),
    st.tuples(st.just("finish"), st.tuples(ids, fences, outcomes)),
    st.tuples(st.just("set_progress"), st.tuples(ids, fences, st.sampled_from([b"1", b"22"]))),
    st.tuples(
        st.just("add_pieces"),
        st.tuples(ids, fences, st.integers(1, 3), st.lists(st.sampled_from([b"p", b"qq"]), max_size=3)),
    ),
    st.tuples(st.just("tell_logs"), st.tuples(ids, fences, st.just("line"))),
    # The store runs each of these changes alone, not in a group.
    st.tuples(st.just("requeue"), st.tuples(ids, fences)),
    st.tuples(st.just("cancel"), st.tuples(st.sampled_from(FUNCTIONS), ids)),
    st.tuples(st.just("claim"), st.tuples(st.sampled_from(FUNCTIONS))),
)
BODY, DONE = b"\x00\xff" * 9, OUTCOMES[0]
FULL: list[Call] = [
    ("submit", (new_job(body=BODY, owner=owner, max_queued=3), job_id))
    for job_id, owner in zip(IDS, "aba b", strict=True)
]
"""Submits that use up the shares of the owners, and then the room of the store."""
LIFE: list[Call] = [
    ("submit", (new_job(idempotency="k"), "j1")),
    ("submit", (new_job(idempotency="k"), "j2")),
    ("submit", (new_job(idempotency="k"), "j1")),
    ("submit", (new_job(body=BODY), "j1")),
    ("take", ("j1", "w1")),
    ("take", ("j1", "w1")),
    ("take", ("j1", "w2")),
    ("add_pieces", ("j1", 1, 1, [b"p", b"qq"])),
    ("finish", ("j1", 2, DONE)),
    ("finish", ("j1", 1, DONE)),
    ("finish", ("j1", 1, DONE)),
    ("finish", ("j1", 1, OUTCOMES[1])),
]


class Twin(ABC):
    """A store, and the changes that it reports."""

    def __init__(self, store: SqlJobStore, clock: Clock) -> None:
        self.store, self.clock = store, clock
        store.incarnation = "me"
        self.told: list[JobChanges] = []
        store.on_commit = self.told.append

    @abstractmethod
    def read(self, table: str, columns: str) -> list[dict[str, Any]]:
        """Return all rows of a table."""

    @abstractmethod
    def clear(self) -> None:
        """Delete all rows."""

    async def group(self, asked: Sequence[Call]) -> list[Any]:
        """Make calls that the store commits as one group. Return their results and errors."""
        free = threading.Event()
        # Keep the writer busy while the calls are queued.
        first = asyncio.create_task(self.store._database.write(lambda _connection: free.wait(5)))
        await asyncio.sleep(0)
        made = [asyncio.create_task(self.call(*call)) for call in asked]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        free.set()
        await first
        answers = await asyncio.gather(*made, return_exceptions=True)
        return [(type(one), str(one)) if isinstance(one, Exception) else one for one in answers]

    def call(self, name: str, arguments: tuple[Any, ...]) -> Awaitable[Any]:
        if name == "record":
            new, job_id, outcome = arguments
            return self.store.record(new, new.queued(job_id, self.clock.now_s), outcome)
        if name == "requeue":
            return self.store.requeue(*arguments, JobOutcome(JobState.FAILED), 0.0, counted=True)
        if name == "claim":
            return self.store._claim(*arguments, 3, self.clock.now_s, (), "", 100)
        method: Callable[..., Awaitable[Any]] = getattr(self.store, name)
        return method(*arguments)

    def rows(self) -> dict[str, list[Any]]:
        """Return all rows. The numbers of jobs are replaced by their order."""
        found = {table: self.read(table, columns) for table, columns in TABLES.items()}
        order = {number: at for at, number in enumerate(sorted(job["number"] for job in found["jobs"]))}
        for table, column in (
            ("jobs", "number"),
            ("inputs", "number"),
            ("results", "number"),
            ("pieces", "job"),
        ):
            for row in found[table]:
                row[column] = order[row[column]]
        return {table: sorted(rows, key=repr) for table, rows in found.items()}


class Together:
    """Passes each group of changes to `run`, and records the sizes of the groups and the errors."""

    def __init__(self, run: Callable[[Any, Any], Sequence[Any]]) -> None:
        self._run = run
        self.sizes, self.failed = list[int](), list[Exception]()

    def __call__(self, connection: Any, changes: Sequence[Any]) -> Sequence[Any]:
        self.sizes.append(len(changes))
        try:
            return self._run(connection, changes)
        except Exception as error:
            self.failed.append(error)
            raise


def compare_twins(runner: asyncio.Runner, pair: Sequence[Twin], clock: Clock) -> None:
    """Assert that both stores return, report and store the same for all calls."""

    @settings(deadline=None, suppress_health_check=list(HealthCheck))
    @example([FULL], 25)
    @example([FULL], 10**9)
    @example([LIFE, LIFE], 10**9)
    @given(st.lists(st.lists(calls, max_size=15), max_size=4), st.sampled_from([10**9, 25]))
    def compare(groups: list[list[Call]], most_stored: int) -> None:
        for twin in pair:
            twin.clear()
            twin.told.clear()
            twin.store.most_stored_bytes = most_stored
        for group in groups:
            one, other = (runner.run(twin.group(group)) for twin in pair)
            assert one == other
            assert pair[0].told == pair[1].told
            clock.now_s += 1.0
        assert pair[0].rows() == pair[1].rows()

    compare()
