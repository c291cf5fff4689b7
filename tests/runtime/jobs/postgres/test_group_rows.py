"""Changes that are run together return and store the same as changes that are run one by one."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import psycopg
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from job_store_tests import HOOK, KEEP_S, Clock, new_job
from pilotflame.runtime.jobs.postgres import group_rows
from pilotflame.runtime.jobs.postgres.database import PostgresDatabase
from pilotflame.runtime.jobs.postgres.group_rows import run_together
from pilotflame.runtime.jobs.postgres.store import PostgresJobStore
from pilotflame.runtime.jobs.stored import large_bodies
from pilotflame.runtime.jobs.stored.job import JobOutcome, JobState
from pilotflame.runtime.jobs.stored.job_changes import JobChanges
from postgres import PostgresServer, new_schema

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
"""The owners' shares are used, and then the room is full."""
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


class Twin:
    """A store, and the changes that it reports after commits."""

    def __init__(self, url: str, clock: Clock, together: Any) -> None:
        self.url, self.clock = url, clock
        self.store = PostgresJobStore(PostgresDatabase(url), keep_s=KEEP_S, clock=clock, together=together)
        self.store.incarnation = "me"
        self.told: list[JobChanges] = []
        self.store.on_commit = self.told.append

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
        """Return all rows. Replace the numbers of jobs by their order, because the numbers of two stores may differ."""
        with psycopg.connect(self.url, row_factory=psycopg.rows.dict_row) as connection:
            found = {
                table: connection.execute(f"SELECT {columns} FROM {table}".encode()).fetchall()
                for table, columns in TABLES.items()
            }
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

    def clear(self) -> None:
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(f"TRUNCATE {', '.join(TABLES)} CASCADE".encode())
            connection.execute("INSERT INTO stored VALUES ('*', 0)")
        self.told.clear()


@asynccontextmanager
async def twins(postgres: PostgresServer, clock: Clock, together: Any) -> AsyncIterator[list[Twin]]:
    made = [
        Twin(new_schema(postgres.url, f"t{secrets.token_hex(8)}"), clock, how) for how in (together, None)
    ]
    for twin in made:
        await twin.store.open()
    yield made
    for twin in made:
        await twin.store.close()


@pytest.mark.parametrize("most_bytes", [group_rows.MOST_BYTES, 2])
def test_together_is_the_same_as_one_by_one(
    postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_bytes: int
) -> None:
    monkeypatch.setattr(group_rows, "MOST_BYTES", most_bytes)
    clock, sizes, failed = Clock(), list[int](), list[Exception]()

    def recorded(connection: Any, changes: Sequence[Any]) -> Sequence[Any]:
        sizes.append(len(changes))
        try:
            return run_together(connection, changes)
        except Exception as error:
            failed.append(error)
            raise

    with asyncio.Runner() as runner:
        context = twins(postgres, clock, recorded)
        pair = runner.run(context.__aenter__())

        @settings(deadline=None, suppress_health_check=list(HealthCheck))
        @example([FULL], 25)
        @example([FULL], 10**9)
        @example([LIFE, LIFE], 10**9)
        @given(st.lists(st.lists(calls, max_size=15), max_size=4), st.sampled_from([10**9, 25]))
        def compare(groups: list[list[Call]], most_stored: int) -> None:
            for twin in pair:
                twin.clear()
                twin.store.most_stored_bytes = most_stored
            for group in groups:
                one, other = (runner.run(twin.group(group)) for twin in pair)
                assert one == other
                assert pair[0].told == pair[1].told
                clock.now_s += 1.0
            assert pair[0].rows() == pair[1].rows()

        compare()
        runner.run(context.__aexit__(None, None, None))
    assert max(sizes) > 4
    assert not failed


async def test_a_change_that_the_database_refuses_does_not_harm_the_others(
    postgres: PostgresServer, clock: Clock
) -> None:
    failed: list[Exception] = []

    def recorded(connection: Any, changes: Sequence[Any]) -> Sequence[Any]:
        try:
            return run_together(connection, changes)
        except Exception as error:
            failed.append(error)
            raise

    async with twins(postgres, clock, recorded) as pair:
        group: list[Call] = [
            ("submit", (new_job(), "j1")),
            ("submit", (new_job(content_type="\x00"), "j2")),
            ("submit", (new_job(content_type="\udcff"), "j3")),
            ("take", ("j1", "w1")),
            ("take", ("j\udcff", "w1")),
        ]
        answers = [await twin.group(group) for twin in pair]
        assert answers[0] == answers[1]
        assert answers[0][3:] == [1, None]
        assert pair[0].rows() == pair[1].rows()
    assert failed


async def test_large_bodies_are_not_in_the_rows(
    postgres: PostgresServer, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_bodies, "MOST_INLINE_BYTES", 1)
    async with twins(postgres, clock, run_together) as pair:
        for twin in pair:
            await twin.store.submit(new_job(body=b"large"), "j1")
            assert await twin.store.take("j1") == 1
            assert await twin.store.finish("j1", 1, JobOutcome(JobState.COMPLETED, b"also large"))
            assert (await twin.store.get("tone", "j1")).input == b"large"
        found = [twin.rows() for twin in pair]
        for rows in found:
            for table in ("inputs", "results"):
                assert rows[table][0].pop("large")
                assert not rows[table][0]["body"]
        assert found[0] == found[1]
