"""The contract of a store of jobs: what is stored, who gets a job, which reports and repeats count, limits, and the end of a job.

`job_store_machine.py` tests the same contract with any sequence of calls.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import pytest
import pytest_asyncio
from pilotflame.errors import IdempotencyConflict, JobConflict, JobExpired, QueueFull, UnknownJob
from pilotflame.runtime.jobs.stored.job import (
    Job,
    JobCounts,
    JobOutcome,
    JobState,
    NewJob,
    Webhook,
    new_job_id,
)
from pilotflame.runtime.jobs.stored.job_store import JobStore

KEEP_S = 100.0
"""How long a tested store keeps jobs that have ended."""
HOOK = Webhook("http://127.0.0.1/hook", ("start", "output", "completed"))
DONE = JobOutcome(JobState.COMPLETED, output=b'"done"')
FAILED = JobOutcome(JobState.FAILED)
MakeStore: TypeAlias = Callable[[], Awaitable[JobStore]]


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
    """Tests of a `JobStore`.

    Needs the fixtures `clock`, a Clock, and `make_store`, which opens the store of another gateway. All gateways have the same
    jobs, at first none, and this clock, and keep jobs for KEEP_S. When the store of a gateway is opened, the earlier gateways
    count as dead.
    """

    @pytest_asyncio.fixture
    async def store(self, make_store: MakeStore) -> JobStore:
        return await make_store()

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
        assert await store.glances([job.id, "unknown"]) == [dataclasses.replace(done, input=b"")]
        assert await store.glances([]) == []

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
        assert await store.claim("tone", 10, clock.now_s) == []
        assert await store.requeue(job.id, 1, FAILED, 50.0, counted=True)
        assert await store.claim("tone", 10, clock.now_s) == []
        assert await store.next_due("tone") == clock.now_s + 50.0
        assert [one.id for one in await store.claim("tone", 10, clock.now_s + 50.0)] == [job.id]

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

    async def test_a_claimed_job_is_claimed_again_until_it_is_known(
        self, store: JobStore, clock: Clock
    ) -> None:
        jobs = [(await store.submit(new_job()))[0] for _ in range(3)]
        assert await store.claim("tone", 2, clock.now_s) == jobs[:2]
        # A gateway that did not receive the answer claims again and gets the same jobs.
        assert await store.claim("tone", 2, clock.now_s) == jobs[:2]
        assert await store.claim("tone", 9, clock.now_s, [job.id for job in jobs[:2]]) == jobs[2:]
        await store.take(jobs[0].id)
        await store.unclaim([job.id for job in jobs])
        assert await store.claim("tone", 9, clock.now_s) == jobs[1:]
        assert await store.take(jobs[0].id) == 1

    async def test_the_jobs_of_a_dead_gateway_wait_again(self, make_store: MakeStore, clock: Clock) -> None:
        dead = await make_store()
        running, last, claimed, done = [
            (await dead.submit(new_job(max_attempts=attempts)))[0] for attempts in (3, 1, 3, 3)
        ]
        for job in (running, last):
            assert await dead.take(job.id, "w1") == 1
        await run_once(dead, done)
        assert await dead.claim("tone", 9, clock.now_s) == [claimed]
        store = await make_store()
        own, _ = await store.submit(new_job())
        assert await store.take(own.id, "w1") == 1
        assert await store.take(running.id, "w1") is None
        assert await store.requeue_dead() == (1, 1)
        assert await store.requeue_dead() == (0, 0)
        states = {job.id: job.state for job in await store.newest("tone")}
        assert states == {
            running.id: JobState.IN_QUEUE, last.id: JobState.FAILED, claimed.id: JobState.IN_QUEUE,
            done.id: JobState.COMPLETED, own.id: JobState.IN_PROGRESS,
        }  # fmt: skip
        assert [job.id for job in await store.claim("tone", 9, clock.now_s)] == [running.id, claimed.id]
        assert await store.take(running.id, "w1") == 2
        assert not await dead.finish(running.id, 1, DONE)
        assert await store.finish(running.id, 2, DONE)

    async def test_an_attempt_whose_gateway_only_seemed_dead_may_end_its_job_until_another_one_begins(
        self, make_store: MakeStore, clock: Clock
    ) -> None:
        stood_still = await make_store()
        ended, streamed, failed = [(await stood_still.submit(new_job(max_attempts=3)))[0] for _ in range(3)]
        for job in (ended, streamed, failed):
            assert await stood_still.take(job.id, "w1") == 1
        assert await stood_still.add_pieces(streamed.id, 1, 1, [b"1"])
        assert await stood_still.requeue(failed.id, 1, FAILED, 0.0, counted=True)
        store = await make_store()
        assert await store.requeue_dead() == (2, 0)
        assert len(await store.claim("tone", 9, clock.now_s)) == 3
        assert not await stood_still.finish(ended.id, 0, DONE)
        assert [await stood_still.finish(ended.id, 1, DONE) for _ in range(2)] == [True, True]
        assert await store.take(ended.id, "w2") is None
        assert await store.counts("tone") == JobCounts(in_queue=2, completed=1, queued_bytes=4)
        # `streamed` cannot end, because its pieces were deleted. `failed` cannot either, because its attempt
        # had already ended with the requeue.
        assert not await stood_still.finish(streamed.id, 1, DONE)
        assert not await stood_still.finish(failed.id, 1, DONE)
        job = await store.get("tone", ended.id)
        assert (job.state, job.output, job.attempts, job.worker) == (JobState.COMPLETED, DONE.output, 1, "w1")

    # -- calls that are repeated, because their answer was lost

    @pytest.mark.parametrize("key", ["", "k"])
    async def test_a_repeated_submit_returns_its_job(self, store: JobStore, clock: Clock, key: str) -> None:
        asked, job_id = new_job(max_queued=1, idempotency=key), new_job_id(clock.now_s)
        for _ in range(2):
            job, replayed = await store.submit(asked, job_id)
            assert (job.id, replayed) == (job_id, False)
        assert (await store.counts("tone")).in_queue == 1
        assert (await store.stored_bytes("*"))["*"] == len(asked.input)
        # A new call has another id, so it is not a repetition: the queue is full, unless the key names the
        # stored job.
        other = store.submit(asked, new_job_id(clock.now_s))
        if key:
            assert await other == (job, True)
        else:
            with pytest.raises(QueueFull):
                await other
        assert (await store.admit(asked, job_id)).id == job_id

    async def test_a_repeated_start_returns_its_fence(self, store: JobStore, clock: Clock) -> None:
        job_id = new_job_id(clock.now_s)
        assert [await store.start(new_job(), job_id, worker) for worker in ("w1", "w1", "w2")] == [1, 1, None]
        assert await store.counts("tone") == JobCounts(in_progress=1)

    async def test_a_repeated_record_returns_its_job(self, store: JobStore, clock: Clock) -> None:
        asked = new_job()
        queued = asked.queued(new_job_id(clock.now_s), clock.now_s)
        jobs = [await store.record(asked, queued, DONE) for _ in range(2)]
        assert jobs[0] == jobs[1] == await store.get("tone", queued.id)
        assert await store.counts("tone") == JobCounts(completed=1)

    @pytest.mark.parametrize("other", [{"owner": "b"}, {"function": "echo"}, {"body": b"another"}])
    async def test_an_id_of_another_job_is_refused(
        self, store: JobStore, clock: Clock, other: dict[str, Any]
    ) -> None:
        asked, job_id = new_job(owner="a"), new_job_id(clock.now_s)
        await store.submit(asked, job_id)
        refused = new_job(**{"owner": "a"} | other)
        for call in (store.submit(refused, job_id), store.start(refused, job_id, "w1")):
            with pytest.raises(JobConflict):
                await call
        with pytest.raises(JobConflict):
            await store.record(refused, refused.queued(job_id, clock.now_s), DONE)
        assert (await store.counts("tone")).in_queue == 1

    async def test_a_repeated_take_returns_its_fence(self, store: JobStore) -> None:
        job, _ = await store.submit(new_job(webhook=HOOK))
        assert [await store.take(job.id, worker) for worker in ("w1", "w1", "w2")] == [1, 1, None]
        assert len(await store.deliveries("tone")) == 1
        await store.requeue(job.id, 1, FAILED, 0.0, counted=True)
        assert [await store.take(job.id, worker) for worker in ("w1", "w1", "w2")] == [2, 2, None]
        await store.finish(job.id, 2, DONE)
        assert await store.take(job.id, "w1") is None

    async def test_a_repeated_finish_with_the_same_outcome_is_accepted(self, store: JobStore) -> None:
        job, _ = await store.submit(new_job(webhook=HOOK))
        await store.take(job.id)
        error = {"type": "handler_failed", "details": {"lines": [1, 2]}}
        outcome = JobOutcome(JobState.FAILED, b"why", "text/plain", error, "a line", b"{}")
        assert [await store.finish(job.id, 1, outcome) for _ in range(2)] == [True, True]
        stored = await store.stored_bytes("*")
        others = [
            {"state": JobState.TIMED_OUT}, {"output": b"who"}, {"output": None}, {"output_type": ""}, {"error": None},
            {"error": error | {"type": "other"}}, {"logs": ""}, {"metrics": None},
        ]  # fmt: skip
        for other in others:
            assert not await store.finish(job.id, 1, dataclasses.replace(outcome, **other)), other
        for fence in (0, 2):
            assert not await store.finish(job.id, fence, outcome)
        assert (await store.get("tone", job.id)).output == b"why"
        assert await store.counts("tone") == JobCounts(failed=1)
        assert await store.stored_bytes("*") == stored
        assert len(await store.deliveries("tone")) == 2
        await store.retry("tone", job.id)
        assert not await store.finish(job.id, 1, outcome)

    async def test_a_job_is_kept_until_it_expires(self, store: JobStore, clock: Clock) -> None:
        job = await run_once(store, (await store.submit(new_job()))[0])
        clock.now_s += KEEP_S - 1
        await store.expire()
        assert await store.get("tone", job.id) == job
        clock.now_s += 2
        await store.expire()
        with pytest.raises(JobExpired):
            await store.get("tone", job.id)
