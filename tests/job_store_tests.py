"""Tests of a store of jobs: what is stored, who gets a job, which reports count, limits, and the end of a job."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from pilotflame.errors import IdempotencyConflict, JobConflict, JobExpired, QueueFull, UnknownJob
from pilotflame.runtime.jobs.stored.job import Job, JobCounts, JobOutcome, JobState, NewJob, Webhook
from pilotflame.runtime.jobs.stored.job_store import JobStore

KEEP_S = 100.0
"""How long a tested store keeps jobs that have ended."""
HOOK = Webhook("http://127.0.0.1/hook", ("start", "output", "completed"))
DONE = JobOutcome(JobState.COMPLETED, output=b'"done"')
FAILED = JobOutcome(JobState.FAILED)


class Clock:
    """The clock of a store, which tests set."""

    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


def new_job(function: str = "tone", body: bytes = b"{}", **more: Any) -> NewJob:
    """Return a job to submit."""
    return NewJob(function, body, execution_timeout_s=60.0, **{"ttl_s": 1000.0, **more})


async def run_once(store: JobStore, job: Job) -> Job:
    """Run a job to its end, and return it."""
    fence = await store.take(job.id)
    assert fence is not None
    assert await store.finish(job.id, fence, DONE)
    return await store.get(job.function, job.id)


class JobStoreTests:
    """Tests of a store with the methods of `JobStore`, which is also the store of results.

    Needs the fixtures `clock`, a Clock, and `store`: an empty store on this clock that keeps jobs for KEEP_S.
    """

    async def test_concurrent_duplicates_give_one_job(self, store: JobStore) -> None:
        results = await asyncio.gather(*(store.submit(new_job(idempotency="k")) for _ in range(200)))
        assert len({job.id for job, _ in results}) == 1
        assert sorted(replayed for _, replayed in results) == [False] + [True] * 199
        assert (await store.counts("tone")).in_queue == 1

    async def test_an_idempotency_key_belongs_to_owner_and_function(self, store: JobStore) -> None:
        asked = [
            new_job(idempotency="k"),
            new_job(idempotency="k", owner="o"),
            new_job("echo", idempotency="k"),
        ]
        assert len({(await store.submit(each))[0].id for each in asked}) == 3
        with pytest.raises(IdempotencyConflict):
            await store.submit(new_job(idempotency="k", content_type="text/plain"))

    async def test_a_full_queue_refuses_new_jobs_and_returns_repeated_ones(self, store: JobStore) -> None:
        jobs = [(await store.submit(new_job(idempotency=key, max_queued=2)))[0] for key in ("a", "b")]
        with pytest.raises(QueueFull, match="max_jobs "):
            await store.submit(new_job(max_queued=2))
        assert await store.submit(new_job(idempotency="a", max_queued=2)) == (jobs[0], True)
        await store.submit(new_job("echo", max_queued=2))
        await store.take(jobs[0].id)
        await store.submit(new_job(max_queued=2))
        assert (await store.counts("tone")) == JobCounts(in_queue=2, in_progress=1, queued_bytes=4)

    async def test_a_queue_is_limited_in_bytes_too(self, store: JobStore) -> None:
        first, _ = await store.submit(new_job(body=b"x" * 200, max_queued_bytes=100))
        with pytest.raises(QueueFull, match="no room for 1 bytes"):
            await store.submit(new_job(body=b"x", max_queued_bytes=200))
        await store.take(first.id)
        second, _ = await store.submit(new_job(body=b"x" * 100, max_queued_bytes=200))
        await store.requeue(first.id, 1, FAILED, 0.0, counted=True)
        with pytest.raises(QueueFull):
            await store.submit(new_job(body=b"x", max_queued_bytes=300))
        await store.cancel("tone", second.id)
        await store.submit(new_job(body=b"x" * 100, max_queued_bytes=300))
        with pytest.raises(QueueFull):
            await store.submit(new_job(body=b"x", max_queued_bytes=300))

    async def test_all_fields_of_a_job_and_its_outcome_are_stored(
        self, store: JobStore, clock: Clock
    ) -> None:
        clock.now_s = 5.0
        asked = new_job(
            body=b"\x00\xff", content_type="application/octet-stream", owner="key-1", priority=1, max_attempts=2,
            webhook=HOOK, traceparent="00-1", idempotency="\udcff",
        )  # fmt: skip
        job, _ = await store.submit(asked)
        assert {field.name: getattr(asked, field.name) for field in dataclasses.fields(asked)} == {
            **{field.name: getattr(job, field.name, None) for field in dataclasses.fields(asked)},
            "idempotency": "\udcff",
            "wanted_id": "",
        }
        clock.now_s = 6.0
        assert await store.take(job.id, "w1") == 1
        taken = dataclasses.replace(job, state=JobState.IN_PROGRESS, attempts=1, worker="w1", started_s=6.0)
        assert await store.get("tone", job.id) == taken
        outcome = JobOutcome(JobState.FAILED, b"\x01", "image/png", {"type": "handler_failed"}, "a line\n")
        clock.now_s = 7.0
        assert await store.finish(job.id, 1, outcome)
        done = dataclasses.replace(
            taken,
            state=JobState.FAILED,
            error={"type": "handler_failed"},
            ended_s=7.0,
            expires_s=7.0 + KEEP_S,
        )
        assert await store.get("tone", job.id) == dataclasses.replace(
            done, output=b"\x01", output_type="image/png", logs="a line\n"
        )
        assert await store.newest("tone") == [dataclasses.replace(done, input=b"")]
        assert await store.glance("tone", job.id) == dataclasses.replace(done, input=b"")

    async def test_lists_have_pages_and_states(self, store: JobStore) -> None:
        jobs = [(await store.submit(new_job()))[0] for _ in range(6)]
        for job in jobs[:3]:
            await run_once(store, job)
        ids = [job.id for job in reversed(jobs)]
        assert [job.id for job in await store.newest("tone", limit=4)] == ids[:4]
        assert [job.id for job in await store.newest("tone", before_id=ids[3])] == ids[4:]
        assert [job.id for job in await store.newest("tone", [JobState.COMPLETED], 2)] == ids[3:5]
        with pytest.raises(UnknownJob):
            await store.newest("echo", before_id=ids[0])

    async def test_only_a_final_state_ends_a_job(self, store: JobStore) -> None:
        job, _ = await store.submit(new_job())
        await store.take(job.id)
        with pytest.raises(JobConflict):
            await store.finish(job.id, 1, JobOutcome(JobState.IN_QUEUE))

    async def test_an_id_with_surrogates_is_unknown(self, store: JobStore) -> None:
        with pytest.raises(UnknownJob):
            await store.get("tone", "job-\udcff")
        with pytest.raises(UnknownJob):
            await store.cancel("tone", "job-\udcff")

    async def test_only_one_of_many_takers_gets_a_job(self, store: JobStore) -> None:
        job, _ = await store.submit(new_job())
        fences = await asyncio.gather(*(store.take(job.id, str(number)) for number in range(20)))
        assert sorted(fences, key=bool) == [None] * 19 + [1]

    async def test_a_report_with_an_old_fence_changes_nothing(self, store: JobStore) -> None:
        job, _ = await store.submit(new_job())
        await store.take(job.id)
        await store.requeue(job.id, 1, FAILED, 0.0, counted=True)
        await store.take(job.id)
        assert not await store.finish(job.id, 1, DONE)
        assert not await store.set_progress(job.id, 1, b"1")
        assert not await store.add_pieces(job.id, 1, 1, [b"1"])
        assert not await store.requeue(job.id, 1, FAILED, 0.0, counted=True)
        assert (await store.get("tone", job.id)).state is JobState.IN_PROGRESS
        assert await store.finish(job.id, 2, DONE)
        assert not await store.finish(job.id, 2, JobOutcome(JobState.FAILED))
        assert (await store.get("tone", job.id)).output == b'"done"'

    async def test_a_waiting_job_is_due_after_its_delay(self, store: JobStore, clock: Clock) -> None:
        job, _ = await store.submit(new_job())
        await store.take(job.id)
        assert await store.due("tone", 10, clock.now_s) == []
        assert await store.requeue(job.id, 1, FAILED, 50.0, counted=True)
        assert await store.due("tone", 10, clock.now_s) == []
        assert await store.next_due("tone") == clock.now_s + 50.0
        assert [one.id for one in await store.due("tone", 10, clock.now_s + 50.0)] == [job.id]

    async def test_pieces_and_progress_are_kept_in_order(self, store: JobStore) -> None:
        job, _ = await store.submit(new_job())
        await store.take(job.id)
        assert await store.add_pieces(job.id, 1, 1, [b"a", b"b"])
        assert await store.add_pieces(job.id, 1, 2, [b"b", b"c"])
        with pytest.raises(JobConflict):
            await store.add_pieces(job.id, 1, 5, [b"gap"])
        assert await store.set_progress(job.id, 1, b"50")
        assert await store.pieces(job.id, 0, 100) == [(1, b"a"), (2, b"b"), (3, b"c")]
        assert (await store.get("tone", job.id)).progress == b"50"

    async def test_the_jobs_of_another_owner_do_not_exist(self, store: JobStore) -> None:
        job, _ = await store.submit(new_job(owner="one"))
        for ask in (store.get, store.glance, store.cancel, store.retry):
            with pytest.raises(UnknownJob):
                await ask("tone", job.id, "other")
        assert (await store.newest("tone", owner="other"), await store.purge("tone", "other")) == ([], 0)
        assert (await store.get("tone", job.id, "one")).state is JobState.IN_QUEUE

    async def test_only_a_failed_job_can_be_retried(self, store: JobStore) -> None:
        jobs = [(await store.submit(new_job()))[0] for _ in range(2)]
        for job in jobs:
            await store.take(job.id)
        assert await store.finish(jobs[0].id, 1, FAILED)
        assert (await store.retry("tone", jobs[0].id)).state is JobState.IN_QUEUE
        assert (await run_once(store, jobs[0])).output == b'"done"'
        assert (await store.cancel("tone", jobs[1].id)).state is JobState.CANCELLED
        assert not await store.finish(jobs[1].id, 1, DONE)
        with pytest.raises(JobConflict):
            await store.retry("tone", jobs[1].id)

    async def test_running_jobs_wait_again_after_a_restart(self, store: JobStore) -> None:
        jobs = [(await store.submit(new_job()))[0] for _ in range(3)]
        await store.take(jobs[0].id)
        await run_once(store, jobs[1])
        await store.recover()
        states = [(await store.get("tone", job.id)).state for job in jobs]
        assert states == [JobState.IN_QUEUE, JobState.COMPLETED, JobState.IN_QUEUE]

    async def test_a_job_is_kept_until_it_expires(self, store: JobStore, clock: Clock) -> None:
        job = await run_once(store, (await store.submit(new_job()))[0])
        clock.now_s += KEEP_S - 1
        await store.expire()
        assert await store.get("tone", job.id) == job
        clock.now_s += 2
        await store.expire()
        with pytest.raises(JobExpired):
            await store.get("tone", job.id)
