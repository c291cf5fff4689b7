"""Queries: a job that the caller may not see is unknown; pieces are read by size."""

from __future__ import annotations

import pytest
from job_store_tests import KEEP_S, Clock, new_job
from pilotflame.errors import JobExpired, UnknownJob
from pilotflame.runtime.jobs.sql import queries
from pilotflame.runtime.jobs.sqlite.store import SqliteJobStore
from pilotflame.runtime.jobs.stored.job import Job, JobCounts, JobState

BOTH = ("tone", "echo")


async def test_a_job_is_found_by_callers_of_its_function(store: SqliteJobStore) -> None:
    job, _ = await store.submit(new_job(wanted_id="mine"))
    assert await store.find("mine", BOTH.__contains__, BOTH) == job
    # The job is also found if its function was deleted.
    assert await store.find("mine", BOTH.__contains__, ()) == job
    for job_id, allowed in (("mine", ("echo",)), ("other", BOTH), ("\udcff", BOTH), ("x" * 10_000, BOTH)):
        with pytest.raises(UnknownJob):
            await store.find(job_id, allowed.__contains__, allowed)


async def test_an_expired_job_is_reported_to_callers_who_might_have_seen_it(
    store: SqliteJobStore, clock: Clock
) -> None:
    await store.submit(new_job(wanted_id="mine", ttl_s=1.0))
    clock.now_s += 2.0
    await store.expire()
    clock.now_s += 1.8 * KEEP_S
    await store.expire()
    with pytest.raises(JobExpired):
        await store.find("mine", BOTH.__contains__, BOTH)
    with pytest.raises(UnknownJob):
        await store.find("mine", ("echo",).__contains__, ("echo",))


async def test_pieces_are_read_by_their_size_too(
    store: SqliteJobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "PIECES_BYTES", 25)
    job, _ = await store.submit(new_job())
    await store.take(job.id)
    pieces = [b"x" * 10, b"", b"x" * 10, b"x" * 10, b"x" * 100, b"y"]
    await store.add_pieces(job.id, 1, 1, pieces)
    read: list[list[int]] = []
    while found := await store.pieces(job.id, read[-1][-1] if read else 0, 100):
        assert [piece for _, piece in found] == [pieces[number - 1] for number, _ in found]
        read.append([number for number, _ in found])
    assert read == [[1, 2, 3, 4], [5], [6]]
    assert len(await store.pieces(job.id, 0, 2)) == 2


async def test_extra_is_stored(store: SqliteJobStore, clock: Clock) -> None:
    extra = {"event": {"id": "1", "source": "straße", "n": 2, "yes": True}}
    job, _ = await store.submit(new_job(extra=extra))
    assert job.extra == extra
    assert (await store.get("tone", job.id)).extra == extra
    (queued,) = await store.claim("tone", 10, clock.now_s)
    assert queued.extra == extra
    plain, _ = await store.submit(new_job(extra={}))
    assert (await store.get("tone", plain.id)).extra is None is plain.extra


async def test_jobs_are_listed_from_the_newest_on_in_pages(store: SqliteJobStore) -> None:
    for number in range(6):
        function, owner = BOTH[number % 2], "ab"[number // 3]
        await store.submit(new_job(function, wanted_id=f"{number}", owner=owner))
    await store.take("2")

    def ids(found: list[Job]) -> str:
        return "".join(job.id for job in found)

    assert ids(await store.newest("tone")) == "420"
    assert ids(await store.newest("tone", (JobState.IN_PROGRESS,))) == "2"
    assert ids(await store.newest("tone", owner="a")) == "20"
    assert ids(await store.newest("tone", (), 1, "4")) == "2"
    assert ids(await store.latest(BOTH, 4)) == "5432"
    assert ids(await store.latest(BOTH, 4, "3")) == "210"
    assert ids(await store.latest(("echo",), 4, owner="b")) == "53"
    assert await store.newer_ids(BOTH, 3, "1") == ["2", "3", "4"]
    assert await store.newer_ids(("tone",), 3, "0", owner="b") == ["4"]
    assert await store.newer_ids(BOTH, 3, "none") == []
    # `before` is a job of another function, a job of another owner, and an unknown job.
    for functions, owner, before in ((("echo",), "a", "0"), (BOTH, "b", "0"), (BOTH, "a", "none")):
        with pytest.raises(UnknownJob):
            await store.latest(functions, 4, before, owner)


async def test_counts_and_waiting_functions(store: SqliteJobStore, clock: Clock) -> None:
    assert await store.functions_waiting() == []
    await store.submit(new_job("tone", owner="a", wanted_id="now"))
    await store.take("now")
    await store.submit(new_job("echo", owner="b"))
    assert await store.functions_waiting() == ["echo"]
    assert (await store.counts("tone", "a")).in_progress == 1
    assert await store.counts("tone", "b") == JobCounts()
    assert {name: one.in_queue for name, one in (await store.all_counts()).items()} == {"tone": 0, "echo": 1}
