"""Compares a store of jobs with a simple model of it, after any sequence of calls and restarts."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import shutil
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule
from job_store_tests import HOOK, new_job
from jobs_model import QUEUED, Model, ModelJob
from pilotflame.errors import (
    JobConflict,
    PilotflameError,
    UnknownJob,
)
from pilotflame.runtime.ground.access.keys import ALL
from pilotflame.runtime.jobs.stored import large_bodies
from pilotflame.runtime.jobs.stored.job import JobOutcome, JobState, new_job_id
from pilotflame.runtime.jobs.stored.job_changes import JobChanges
from pilotflame.runtime.jobs.stored.job_store import JobStore

FUNCTIONS = ("tone", "echo")
OWNERS = ("", "key-1", "key-2")


class StoreMachine(RuleBasedStateMachine):
    """Runs any sequence of calls. After each call, everything that the store returns must equal the model.

    A subclass says in `make_store` how a store is made.
    """

    ids = Bundle("ids")
    most_inline: float = math.inf

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(large_bodies, "MOST_INLINE_BYTES", self.most_inline)
        self.folder = Path(tempfile.mkdtemp(prefix="pf-jobs-"))
        self.runner = asyncio.Runner()
        self.model = Model(self.most_inline)
        self.queued: list[str] = []
        self.cancelled: list[tuple[str, str]] = []
        self.open()

    def make_store(self) -> JobStore:
        """Return the store of a new gateway on the same jobs, which `open` opens. It keeps jobs for KEEP_S, on the model's clock."""
        raise NotImplementedError

    def open(self) -> None:
        self.store = self.make_store()
        self.store.on_commit = self.on_commit
        self.run(self.store.open())

    def on_commit(self, changes: JobChanges) -> None:
        self.queued += sorted(changes.queued)
        self.cancelled += changes.cancelled

    def teardown(self) -> None:
        self.close()
        self.patch.undo()
        self.runner.close()
        shutil.rmtree(self.folder)

    def close(self) -> None:
        self.run(self.store.close())

    def run(self, asked: Coroutine[None, None, Any]) -> Any:
        return self.runner.run(asked)

    def refused(self, error: type[PilotflameError], asked: Coroutine[None, None, Any]) -> None:
        with pytest.raises(error):
            self.run(asked)

    @initialize(target=ids)
    def unknown(self) -> str:
        return "job-unknown"

    @rule(
        target=ids,
        function=st.sampled_from(FUNCTIONS),
        body=st.sampled_from([b"a", b"bb"]),
        key=st.sampled_from(["", "", "k1", "k2"]),
        wanted=st.sampled_from(["", "", "mine"]),
        owner=st.sampled_from(OWNERS),
        priority=st.integers(0, 2),
        max_attempts=st.integers(1, 3),
        ttl_s=st.sampled_from([30.0, 5000.0]),
        webhook=st.sampled_from([None, HOOK]),
    )
    def submit(self, function: str, body: bytes, key: str, wanted: str, **more: Any) -> str:
        asked = new_job(function, body, idempotency=key, wanted_id=wanted, **more)
        expected = self.model.replayed(asked)
        self.queued.clear()
        if isinstance(expected, PilotflameError):
            self.refused(type(expected), self.store.submit(asked))
            assert not self.queued
            return wanted or "job-unknown"
        made = new_job_id(self.model.now_s)
        job, replayed = self.run(self.store.submit(asked, made))
        assert (job.id if replayed else None) == expected
        if not replayed:
            assert job.id == (wanted or made)
            self.model.submit(job.id, asked)
            assert job == self.run(self.store.get(function, job.id))
        assert self.queued == [function] * (not replayed)
        if not wanted:
            # A caller that did not receive the answer submits again with the same id.
            assert self.run(self.store.submit(asked, made)) == (job, replayed)
        return str(job.id)

    @rule(job_id=ids)
    def take(self, job_id: str) -> None:
        fence = self.model.take(job_id)
        assert [self.run(self.store.take(job_id, "w")) for _ in range(2)] == [fence, fence]
        assert self.run(self.store.take(job_id, "other")) is None
        if fence is not None:
            kept = self.model.jobs[job_id]
            job = self.run(self.store.get(kept.new.function, job_id))
            assert (job.worker, job.started_s, job.attempts) == ("w", kept.started_s, fence)

    @rule(
        target=ids,
        function=st.sampled_from(FUNCTIONS),
        owner=st.sampled_from(OWNERS),
        ttl_s=st.sampled_from([30.0, 50.0]),
    )
    def start(self, function: str, owner: str, ttl_s: float) -> str:
        """Store a job that a worker runs already."""
        job_id, asked = f"started-{self.model.arrived}", new_job(function, owner=owner, ttl_s=ttl_s)
        for _ in range(2):
            assert self.run(self.store.start(asked, job_id, "w")) == 1
        self.model.submit(job_id, asked)
        assert self.model.take(job_id)
        return job_id

    @rule(
        target=ids,
        function=st.sampled_from(FUNCTIONS),
        owner=st.sampled_from(OWNERS),
        state=st.sampled_from(["COMPLETED", "FAILED"]),
    )
    def record(self, function: str, owner: str, state: str) -> str:
        """Store a job that has already ended. The rows must be the same as after submit, take and finish."""
        asked, outcome = new_job(function, owner=owner), JobOutcome(JobState(state), output=b"o", logs="l")
        queued = asked.queued(f"ended-{self.model.arrived}", self.model.now_s)
        started = dataclasses.replace(queued, worker="w", started_s=self.model.now_s)
        job = self.run(self.store.record(asked, started, outcome))
        assert self.run(self.store.record(asked, started, outcome)) == job
        self.model.submit(job.id, asked)
        self.model.take(job.id)
        self.model.end(job.id, outcome)
        assert job == self.run(self.store.get(function, job.id))
        return str(job.id)

    def fence(self, job_id: str, off: int) -> int:
        return self.model.jobs[job_id].attempts - off if job_id in self.model.jobs else 1

    @rule(
        job_id=ids,
        off=st.sampled_from([0, 0, 0, 1, -1]),
        state=st.sampled_from([s for s in JobState if s.final]),
    )
    def finish(self, job_id: str, off: int, state: JobState) -> None:
        fence = self.fence(job_id, off)
        outcome = JobOutcome(state, output=b"o" if state is JobState.COMPLETED else None, logs="l")
        finished = self.run(self.store.finish(job_id, fence, outcome))
        job = self.model.jobs.get(job_id)
        if job is not None and job.given_up and job.state is QUEUED and job.attempts == fence:
            job.started_s = self.model.now_s
            self.model.end(job_id, outcome)
        elif self.model.held(job_id, fence):
            self.model.end(job_id, outcome)
        assert finished == self.model.ended(job_id, fence, outcome)
        assert self.run(self.store.finish(job_id, fence, outcome)) == finished

    @rule(
        job_id=ids,
        off=st.sampled_from([0, 0, 0, 1]),
        delay_s=st.sampled_from([0.0, 50.0]),
        counted=st.booleans(),
    )
    def requeue(self, job_id: str, off: int, delay_s: float, counted: bool) -> None:
        fence, error = self.fence(job_id, off), {"type": "worker_died"}
        failure = JobOutcome(JobState.FAILED, error=error, logs="l")
        requeued = self.run(self.store.requeue(job_id, fence, failure, delay_s=delay_s, counted=counted))
        assert requeued == self.model.held(job_id, fence)
        if requeued:
            self.model.requeue(job_id, delay_s, counted=counted, logs="l")
            function = self.model.jobs[job_id].new.function
            assert self.run(self.store.get(function, job_id)).error == error

    @rule(job_id=ids, off=st.sampled_from([0, 0, 1]), again=st.integers(0, 2), count=st.integers(0, 3))
    def add_pieces(self, job_id: str, off: int, again: int, count: int) -> None:
        fence = self.fence(job_id, off)
        job = self.model.jobs.get(job_id)
        first = max(1, len(job.pieces) + 1 - again) if job else 1
        more = [b"%d" % number for number in range(first, first + count)]
        stored = self.run(self.store.add_pieces(job_id, fence, first, more))
        assert stored == self.model.held(job_id, fence)
        if stored and job:
            fresh = more[len(job.pieces) + 1 - first :]
            job.pieces += fresh
            if fresh:
                self.model.notify(job_id, "output")
            self.refused(JobConflict, self.store.add_pieces(job_id, fence, len(job.pieces) + 2, [b"gap"]))

    @rule(job_id=ids, off=st.sampled_from([0, 0, 1]))
    def set_progress(self, job_id: str, off: int) -> None:
        fence = self.fence(job_id, off)
        stored = self.run(self.store.set_progress(job_id, fence, b"50"))
        assert stored == self.model.held(job_id, fence)
        if stored:
            self.model.jobs[job_id].progress = b"50"
            self.model.notify(job_id, "output")

    @rule(job_id=ids, function=st.sampled_from(FUNCTIONS), owner=st.sampled_from((ALL, *OWNERS)))
    def cancel(self, job_id: str, function: str, owner: str) -> None:
        if error := self.model.absent(function, job_id, owner):
            self.refused(error, self.store.cancel(function, job_id, owner))
            return
        was = self.model.jobs[job_id].state
        self.cancelled.clear()
        job = self.run(self.store.cancel(function, job_id, owner))
        assert self.cancelled == ([] if was.final else [(function, job_id)])
        if not was.final:
            self.model.end(job_id, JobOutcome(JobState.CANCELLED))
        assert job.state is self.model.jobs[job_id].state

    @rule(job_id=ids, function=st.sampled_from(FUNCTIONS), owner=st.sampled_from((ALL, *OWNERS)))
    def retry(self, job_id: str, function: str, owner: str) -> None:
        if error := self.model.absent(function, job_id, owner):
            self.refused(error, self.store.retry(function, job_id, owner))
        elif self.model.retry(job_id):
            self.queued.clear()
            job = self.run(self.store.retry(function, job_id, owner))
            assert (job.id, job.state, self.queued) == (job_id, QUEUED, [function])
        else:
            self.refused(JobConflict, self.store.retry(function, job_id, owner))

    @rule(
        function=st.sampled_from(FUNCTIONS), delete=st.booleans(), owner=st.sampled_from((ALL, *OWNERS[1:]))
    )
    def purge(self, function: str, delete: bool, owner: str) -> None:
        jobs = self.model.owned(function, ALL if delete else owner)
        purged = [JobState.IN_PROGRESS, QUEUED] if delete else [QUEUED]
        ended = [job_id for state in purged for job_id, job in jobs.items() if job.state is state]
        self.cancelled.clear()
        if delete:
            self.run(self.store.purge(function, running=True))
            for job in jobs.values():
                job.forgotten |= job.state.final
        else:
            assert self.run(self.store.purge(function, owner)) == len(ended)
        assert sorted(self.cancelled) == sorted((function, job_id) for job_id in ended)
        for job_id in ended:
            self.model.end(job_id, JobOutcome(JobState.CANCELLED))

    @rule(passes_s=st.sampled_from([10.0, 60.0, 150.0]), limit=st.sampled_from([1, 2, 100]))
    def expire(self, passes_s: float, limit: int) -> None:
        self.model.now_s += passes_s
        self.model.expire()
        while self.run(self.store.next_expiry(self.model.now_s)) <= self.model.now_s:
            assert self.run(self.store.expire(limit))

    @rule()
    def restart(self) -> None:
        self.close()
        self.open()
        running = [job_id for job_id, job in self.model.jobs.items() if job.state is JobState.IN_PROGRESS]
        assert sum(self.run(self.store.requeue_dead())) == len(running)
        for job_id in running:
            job = self.model.jobs[job_id]
            streamed = bool(job.pieces)
            self.model.requeue(job_id, 0.0, counted=True)
            job.given_up = job.state is QUEUED and not streamed

    @rule(job_ids=st.lists(ids, max_size=3))
    def claims_and_runs_of_a_live_gateway(self, job_ids: list[str]) -> None:
        """Unclaim changes nothing that a single gateway can see, and requeue_dead finds no dead gateway."""
        self.run(self.store.unclaim(job_ids))
        assert self.run(self.store.requeue_dead()) == (0, 0)

    @invariant()
    def everything_equals_the_model(self) -> None:
        self.run(self.check())

    async def check(self) -> None:
        for job_id, kept in self.model.jobs.items():
            await self.check_job(job_id, kept)
        for job_id, (function, *_) in self.model.deleted.items():
            if job_id not in self.model.jobs:
                for owner in (ALL, *OWNERS):
                    with pytest.raises(self.model.absent(function, job_id, owner) or AssertionError):
                        await self.store.get(function, job_id, owner)
        with pytest.raises(UnknownJob):
            await self.store.get("tone", "job-unknown")
        for function in FUNCTIONS:
            await self.check_function(function)
        waiting = [function for function in sorted(FUNCTIONS) if self.model.counts(function).in_queue]
        assert await self.store.functions_waiting() == waiting
        assert await self.store.next_expiry(self.model.now_s) == self.model.next_expiry()
        assert await self.store.stored_bytes() == self.model.stored_bytes()

    async def check_job(self, job_id: str, kept: ModelJob) -> None:
        job = await self.store.get(kept.new.function, job_id)
        assert (job.state, job.attempts, job.max_attempts, job.retries, job.due_s, job.expires_s) == (
            kept.state, kept.attempts, kept.max_attempts, kept.retries, kept.due_s, kept.expires_s,
        )  # fmt: skip
        assert (job.input, job.output, job.logs, job.progress, job.pieces, job.webhook, job.created_s) == (
            kept.new.input, kept.output, kept.logs, kept.progress, len(kept.pieces), kept.new.webhook,
            kept.created_s,
        )  # fmt: skip
        if kept.pieces:
            assert await self.store.pieces(job_id, 0, 100) == list(enumerate(kept.pieces, 1))

    async def check_function(self, function: str) -> None:
        claimed = await self.store.claim(function, 100, self.model.now_s)
        assert [job.id for job in claimed] == self.model.due(function)
        sent = reversed(await self.store.deliveries(function, limit=10_000))
        assert [(one.job_id, one.event) for one in sent] == self.model.events.get(function, [])
        assert await self.store.next_due(function) == self.model.next_due(function)
        for owner in (ALL, *OWNERS[1:]):
            assert await self.store.counts(function, owner) == self.model.counts(function, owner)
            ours = sorted(self.model.owned(function, owner).items(), key=lambda item: -item[1].number)
            found = await self.store.newest(function, owner=owner)
            assert [job.id for job in found] == [job_id for job_id, _ in ours]
