"""Submits stored jobs to the live revisions of their functions.

Each function with jobs has a task. It reads the next jobs from the store when a job was submitted, when a job
ended and when a delayed job is due. The number of jobs that are submitted at a time is limited, so that a
direct invocation does not wait behind all stored jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

from ....errors import (
    CrashLoop,
    FunctionStopped,
    GatewayError,
    JobStoreFailed,
    QueueFull,
    RevisionRetired,
    UnknownFunction,
)
from ...calls.serving.live_function import LiveFunction
from ...ground.telemetry.background import BackgroundTasks
from .attempt import STORE_RETRY_S, JobAttempt
from .job import Job, NewJob, new_job_id
from .job_store import JobStore

MIN_PREFETCH = 8
"""The limit for submitted jobs that wait for a worker. If all workers run more jobs at a time, that number is the limit."""
MAX_SUBMITTED = 1024
"""The most jobs of one function that are submitted at a time."""
MAX_INPUT_BYTES = 256 << 20
"""If the inputs of all submitted jobs together have this size, further inputs are read only for functions without submitted jobs."""
FULL_RETRY_S = 1.0
"""The pause after the revision refused a job, because its queue was full or it was being replaced."""


class JobDispatcher:
    """Submits jobs to revisions. `live(name)` returns a live function. It raises UnknownFunction, or GatewayError
    during shutdown.
    """

    def __init__(
        self, store: JobStore, live: Callable[[str], LiveFunction], tasks: BackgroundTasks, full: Callable[[str], bool]
    ) -> None:  # fmt: skip
        """`full(owner)` returns True while no further result of the owner may be stored. Then the owner's jobs wait."""
        self._store, self._live, self._tasks, self._full = store, live, tasks, full
        self._functions: dict[str, _FunctionJobs] = {}
        self._closing = asyncio.Event()
        self._runs: set[asyncio.Task[None]] = set()
        # One read of jobs at a time, so that all reads together keep to MAX_INPUT_BYTES.
        self._reading = asyncio.Lock()
        self._input_bytes = 0
        self.prepare: Callable[[Job], Awaitable[Job]] | None = None
        """See `Jobs.prepare_with`."""

    def wake(self, function: str) -> None:
        """Let the function's task read the next jobs from the store and run them."""
        if self._closing.is_set():
            return
        jobs = self._jobs_of(function)
        jobs.waiting = True
        jobs.news.set()

    def run_unstored(self, new: NewJob) -> JobAttempt | None:
        """Run a job that is not stored, and return its attempt. Return None if it must be stored before it runs.

        A job must be stored first if its caller can refer to it before its end (it has a webhook, an idempotency key or
        a wanted id), if its handler streams, or if the function cannot take it now. An unstored job waits in the
        revision's queue, which serves jobs with the same ttl in the order of their arrival.
        """
        jobs = self._functions.get(new.function)
        full = jobs is not None and len(jobs.attempts) >= 2 * MAX_SUBMITTED
        known = new.webhook is not None or new.idempotency or new.wanted_id
        if self._closing.is_set() or full or known or self._input_bytes >= MAX_INPUT_BYTES:
            return None
        with contextlib.suppress(UnknownFunction, GatewayError, QueueFull, RevisionRetired):
            live, now_s = self._live(new.function), self._store.clock()
            if not live.revision.streaming:
                return self._submit(new.queued(new_job_id(now_s), now_s), live, new)
        return None

    def _jobs_of(self, function: str) -> _FunctionJobs:
        """Return the function's entry, or a new entry. A function has no entry while the store has no jobs of it that
        can run.
        """
        if function not in self._functions:
            jobs = self._functions[function] = _FunctionJobs()
            run = self._tasks.keep(partial(self._run, function, jobs), name="jobs")
            self._runs.add(run)
            run.add_done_callback(self._runs.discard)
        return self._functions[function]

    def cancel(self, function: str, job_id: str) -> None:
        """Cancel the attempt of a job that was cancelled in the store, if the job has an attempt."""
        if (jobs := self._functions.get(function)) is not None:
            # A read of the store that started earlier may still return the job as queued. `ended` excludes it.
            jobs.ended.add(job_id)
            if job_id in jobs.attempts:
                jobs.attempts[job_id].cancel()

    def attempts(self) -> list[JobAttempt]:
        """Return the attempts whose end is not yet stored."""
        return [attempt for jobs in self._functions.values() for attempt in jobs.attempts.values()]

    def stop(self) -> None:
        """Submit no more jobs. Attempts that have started go on."""
        self._closing.set()
        for jobs in self._functions.values():
            jobs.news.set()

    async def join(self, timeout_s: float) -> None:
        """Wait, up to `timeout_s`, until all attempts have ended and are stored. Call `stop` before."""
        if self._runs:
            await asyncio.wait(self._runs, timeout=timeout_s)

    async def _run(self, function: str, jobs: _FunctionJobs) -> None:
        """Submit jobs. Return when no attempt runs and nothing is left to submit, now or later."""
        while True:
            jobs.news.clear()
            delay_s = None if self._closing.is_set() else await self._submit_next(function, jobs)
            if delay_s is None and not jobs.attempts and not jobs.news.is_set():
                del self._functions[function]
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await jobs.news.wait()

    async def _submit_next(self, function: str, jobs: _FunctionJobs) -> float | None:
        """Submit as many jobs as `_room` allows.

        Return the seconds after which to call this again, or None to wait only for `news`.
        """
        try:
            room = self._room(function, jobs)
            if room <= 0:
                return None
            if jobs.waiting or jobs.due_s <= time.monotonic():
                await self._submit_due(function, jobs, room)
        except (UnknownFunction, GatewayError):
            # The function was deleted or the gateway shuts down. If a function of this name becomes live again, its
            # events call `wake`.
            return None
        except (FunctionStopped, CrashLoop) as error:
            # If the error names no time, an event calls `wake` when the function may run again.
            after_s = error.details.get("retry_after_s")
            return None if after_s is None else max(FULL_RETRY_S, float(after_s))
        except (QueueFull, RevisionRetired):
            return FULL_RETRY_S
        except JobStoreFailed:
            return STORE_RETRY_S
        return None if jobs.due_s == math.inf else max(0.0, jobs.due_s - time.monotonic())

    async def _submit_due(self, function: str, jobs: _FunctionJobs, room: int) -> None:
        """Read up to `room` jobs from the store and submit them."""
        jobs.ended.clear()
        # Reset this before the read, not after it: a job that is queued during the read may not be in its result.
        jobs.waiting, now_s = False, self._store.clock()
        left = True
        try:
            async with self._reading:
                left_bytes = max(0, MAX_INPUT_BYTES - self._input_bytes)
                if not left_bytes and jobs.attempts:
                    # The end of the function's next attempt sets `news`.
                    return
                known = tuple(jobs.attempts)
                due = await self._store.claim(function, room, now_s, known, jobs.last_owner, left_bytes)
                # A job that ended during the read may be in `due` as queued, so it is left out. If it was really
                # queued again, the next read finds it: its end has set `news`.
                new = [job for job in due if job.id not in jobs.attempts.keys() | jobs.ended]
                held = {job.id for job in new if self._full(job.owner)}
                try:
                    for job in new:
                        if job.id not in held:
                            self._start(job if self.prepare is None else await self.prepare(job))
                        jobs.last_owner = job.owner
                finally:
                    if unused := [job.id for job in due if job.id not in jobs.attempts]:
                        await self._store.unclaim(unused)
            # Jobs that were due at `now_s` are in `due`, or are read when there is room again. So the timer
            # is for jobs that are due later.
            next_s = await self._store.next_due(function, now_s)
            # Use the later time, because the clock may have been set back during the read.
            wait_s = math.inf if next_s is None else next_s - max(now_s, self._store.clock())
            jobs.due_s = time.monotonic() + (min(wait_s, FULL_RETRY_S) if held else wait_s)
            left = len(due) == room or sum(len(job.input) for job in due) >= left_bytes
        finally:
            jobs.waiting |= left

    def _room(self, function: str, jobs: _FunctionJobs) -> int:
        """Return how many more jobs may be submitted now."""
        scale = self._live(function).revision.policy.scale
        capacity = scale.max * scale.concurrency
        if not capacity and scale.elsewhere == 1:
            # Another gateway has the only worker, and runs the jobs.
            return 0
        # Do not count attempts for waiting callers. Otherwise a steady flow of such callers would keep out stored jobs.
        # Do not count an attempt whose invocation has ended: it waits only for the store and uses no worker.
        queued = [attempt for attempt in jobs.attempts.values() if not attempt.awaited]
        outstanding = sum(not attempt.invocation.ended for attempt in queued)
        room = min(MAX_SUBMITTED, capacity + max(capacity, MIN_PREFETCH)) - outstanding
        return min(room, MAX_SUBMITTED - len(queued))

    def _start(self, job: Job) -> None:
        if not self._closing.is_set():
            # The revision may have been replaced during the read of the store.
            self._submit(job, self._live(job.function))

    def _submit(self, job: Job, live: LiveFunction, unstored: NewJob | None = None) -> JobAttempt:
        attempt = JobAttempt(job, live, self._store, self._tasks, self._closing, unstored)
        live.revision.submit(attempt.invocation)
        jobs = self._jobs_of(job.function)
        jobs.attempts[job.id] = attempt
        self._input_bytes += len(job.input)
        attempt.invocation.output.add_done_callback(lambda _: jobs.news.set())
        self._tasks.create_task(self._attend(attempt, jobs))
        return attempt

    async def _attend(self, attempt: JobAttempt, jobs: _FunctionJobs) -> None:
        """Run an attempt to its end. Errors go to the function's log, because no code awaits this task."""
        job_id = attempt.job.id
        try:
            await attempt.run()
        except JobStoreFailed as error:
            attempt.log(f"stays in progress until the gateway starts again: {error.message}")
        except Exception as error:  # noqa: BLE001
            attempt.log(f"could not be given up: {type(error).__name__}: {error}")
        finally:
            attempt.reports.release()
            del jobs.attempts[job_id]
            self._input_bytes -= len(attempt.job.input)
            jobs.ended.add(job_id)
            jobs.news.set()


@dataclass(eq=False)
class _FunctionJobs:
    """The jobs of one function that are submitted to its revision."""

    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there may be room for a job, when there may be a job to submit, and at shutdown."""
    waiting: bool = False
    """True if the store may have jobs that may start and are not in `attempts`."""
    due_s: float = math.inf
    """The time at which the first delayed job may start, in monotonic seconds."""
    attempts: dict[str, JobAttempt] = field(default_factory=dict)
    """By job id, the attempts whose end is not yet stored."""
    last_owner: str = ""
    """The owner of the last job that was submitted. The next turn belongs to the next owner, by id."""
    ended: set[str] = field(default_factory=set)
    """The ids of the jobs that ended or were cancelled since the latest read of the store began."""
