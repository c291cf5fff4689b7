"""Looking for a job by its id alone: what the caller is not to know of is as if it were not there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from pilotflame.errors import JobExpired, UnknownJob
from pilotflame.runtime.jobs import queries
from pilotflame.runtime.jobs.database import Database
from pilotflame.runtime.jobs.job import NewJob
from pilotflame.runtime.jobs.schema import SCRIPTS
from pilotflame.runtime.jobs.store import JobStore

BOTH = ("tone", "echo")


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> AsyncIterator[JobStore]:
    database = Database(tmp_path / "jobs.db", SCRIPTS)
    database.open()
    yield JobStore(database, keep_s=10.0)
    database.close()


def new(**more: Any) -> NewJob:
    return NewJob("tone", b"{}", execution_timeout_s=1.0, **{"ttl_s": 1000.0, **more})


async def test_a_job_is_found_by_who_may_know_its_function(store: JobStore) -> None:
    job, _ = await store.submit(new(wanted_id="mine"))
    assert await store.find("mine", BOTH.__contains__, BOTH) == job
    assert await store.find("mine", BOTH.__contains__, ()) == job  # of a function that is gone
    for job_id, allowed in (("mine", ("echo",)), ("other", BOTH), ("\udcff", BOTH), ("x" * 10_000, BOTH)):
        with pytest.raises(UnknownJob):
            await store.find(job_id, allowed.__contains__, allowed)


async def test_a_forgotten_job_is_told_of_to_who_might_have_known_it(store: JobStore) -> None:
    await store.submit(new(wanted_id="mine", ttl_s=1.0), now_s=1000.0)
    await store.expire(now_s=1002.0)
    await store.expire(now_s=1020.0)
    with pytest.raises(JobExpired):
        await store.find("mine", BOTH.__contains__, BOTH)
    with pytest.raises(UnknownJob):
        await store.find("mine", ("echo",).__contains__, ("echo",))


async def test_pieces_are_read_by_their_size_too(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "PIECES_BYTES", 25)
    job, _ = await store.submit(new())
    await store.take(job.id)
    pieces = [b"x" * 10, b"", b"x" * 10, b"x" * 10, b"x" * 100, b"y"]
    await store.add_pieces(job.id, 1, 1, pieces)
    read: list[list[int]] = []
    while found := await store.pieces(job.id, read[-1][-1] if read else 0, 100):
        assert [piece for _, piece in found] == [pieces[number - 1] for number, _ in found]
        read.append([number for number, _ in found])
    assert read == [[1, 2, 3, 4], [5], [6]]
    assert len(await store.pieces(job.id, 0, 2)) == 2


async def test_what_the_handler_is_to_find_is_kept(store: JobStore) -> None:
    extra = {"event": {"id": "1", "source": "straße", "n": 2, "yes": True}}
    job, _ = await store.submit(new(extra=extra))
    assert job.extra == extra
    assert (await store.get("tone", job.id)).extra == extra
    (queued,) = await store.next("tone", 10)
    assert queued.extra == extra
    plain, _ = await store.submit(new(extra={}))
    assert (await store.get("tone", plain.id)).extra is None is plain.extra
