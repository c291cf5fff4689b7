"""The dispatcher hands stored jobs to the live revisions of their functions.

Each function with jobs has a task. It reads the next jobs when it is woken (a job was submitted, one ended, a delayed
one is due) and submits only as many as the revision can hold: direct invocations never queue behind a backlog.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ...errors import GatewayError, JobStoreFailed, QueueFull, RevisionRetired, UnknownFunction
from ..functions.live import Live
from ..telemetry.logs import LogBook
from .attempt import LOG_LINES, STORE_RETRY_S, JobAttempt
from .job import Job
from .store import JobStore

MIN_PREFETCH = 8
"""Jobs are prefetched, one for each that the workers run at a time, and at least this many."""
MAX_SUBMITTED = 1024
FULL_RETRY_S = 1.0


class JobDispatcher:
    """Runs jobs. `live` returns a live function or raises UnknownFunction or GatewayError."""

    def __init__(self, store: JobStore, live: Callable[[str], Live], tasks: asyncio.TaskGroup) -> None:
        self._store = store
        self._live = live
        self._tasks = tasks
        self._functions: dict[str, _FunctionJobs] = {}
        self._closing = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def wake(self, function: str) -> None:
        """Look for jobs of a function."""
        if self._closing.is_set():
            return
        if function not in self._functions:
            jobs = _FunctionJobs(function, self._store, self._live, self._tasks, self._closing)
            self._functions[function] = jobs
            self._idle.clear()
            self._tasks.create_task(self._run(function, jobs))
        self._functions[function].news.set()

    def cancel(self, function: str, job_id: str) -> None:
        """Stop the attempt of a job that was cancelled in the store."""
        if (jobs := self._functions.get(function)) is not None and job_id in jobs.attempts:
            jobs.attempts[job_id].cancel()

    def withdraw(self, function: str) -> None:
        """Take back jobs that no worker has, after a purge. Those that are still queued are read again."""
        if (jobs := self._functions.get(function)) is not None:
            for attempt in list(jobs.attempts.values()):
                if not attempt.sent:
                    attempt.cancel()

    def stop(self) -> None:
        """Take no more jobs from the store."""
        self._closing.set()
        for jobs in self._functions.values():
            jobs.news.set()

    async def join(self, timeout_s: float) -> None:
        """After `stop`, wait until all attempts have ended and are stored."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()

    async def _run(self, function: str, jobs: _FunctionJobs) -> None:
        try:
            await jobs.run()
        finally:
            del self._functions[function]
            if not self._functions:
                self._idle.set()


@dataclass(eq=False)
class _FunctionJobs:
    """The jobs of one function that are submitted to its revision."""

    function: str
    store: JobStore
    live: Callable[[str], Live]
    tasks: asyncio.TaskGroup
    closing: asyncio.Event
    news: asyncio.Event = field(default_factory=asyncio.Event)
    attempts: dict[str, JobAttempt] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    """Ids of the jobs that ended since the last read of the store."""

    async def run(self) -> None:
        """Submit jobs until there are none, and none is delayed."""
        while True:
            self.news.clear()
            delay_s = None if self.closing.is_set() else await self._submit_next()
            if delay_s is None and not self.attempts and not self.news.is_set():
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self.news.wait()

    async def _submit_next(self) -> float | None:
        """Submit as many jobs as the revision can hold. Return the seconds until the next read; None: at `news`."""
        try:
            room = self._room()
            if room <= 0:
                return None
            self.ended.clear()
            now_s = time.time()
            jobs = await self.store.due(self.function, room + len(self.attempts), now_s)
            # `jobs` holds all that were due at `now_s`, so only later ones need a timer.
            due_s = await self.store.next_due(self.function, now_s)
            # A job that ended during the read may appear as queued. Its end has set `news`: the next read follows.
            known = self.attempts.keys() | self.ended
            for job in [job for job in jobs if job.id not in known][:room]:
                self._start(job)
        except (UnknownFunction, GatewayError):
            # The function was deleted or the gateway shuts down. `wake` is called when it is live again.
            return None
        except (QueueFull, RevisionRetired):
            return FULL_RETRY_S
        except JobStoreFailed:
            return STORE_RETRY_S
        return None if due_s is None else max(0.0, due_s - time.time())

    def _room(self) -> int:
        scale = self.live(self.function).revision.policy.scale
        capacity = scale.max * scale.concurrency
        # An attempt whose invocation has ended only waits for the store.
        outstanding = sum(not attempt.invocation.ended for attempt in self.attempts.values())
        room = min(MAX_SUBMITTED, capacity + max(capacity, MIN_PREFETCH)) - outstanding
        return min(room, MAX_SUBMITTED - len(self.attempts))

    def _start(self, job: Job) -> None:
        if self.closing.is_set():
            return
        # The revision may have been replaced during the read of the store.
        live = self.live(self.function)
        attempt = JobAttempt(
            job, live.revision, self.store, self.tasks, self.closing,
            lambda worker: _last_lines(live.logs, worker),
        )  # fmt: skip
        attempt.submit()
        self.attempts[job.id] = attempt
        attempt.invocation.output.add_done_callback(lambda _: self.news.set())
        self.tasks.create_task(self._attend(attempt))

    async def _attend(self, attempt: JobAttempt) -> None:
        """Run an attempt to its end. No error of one job may end the gateway."""
        job_id = attempt.job.id
        try:
            await self._run_or_give_up(attempt)
        except JobStoreFailed as error:
            self._log(f"job {job_id} stays in progress until the gateway starts again: {error.message}")
        except Exception as error:  # noqa: BLE001
            self._log(f"job {job_id} could not be given up: {type(error).__name__}: {error}")
        finally:
            del self.attempts[job_id]
            self.ended.add(job_id)
            self.news.set()

    async def _run_or_give_up(self, attempt: JobAttempt) -> None:
        try:
            await attempt.run()
        except JobStoreFailed:
            raise
        except Exception as error:  # noqa: BLE001
            self._log(f"job {attempt.job.id} was given up: {type(error).__name__}: {error}")
            await attempt.give_up(error)

    def _log(self, text: str) -> None:
        with contextlib.suppress(UnknownFunction, GatewayError):
            self.live(self.function).logs.write("gateway", text)


def _last_lines(logs: LogBook, worker: str) -> str:
    lines = [line.text for line in logs.tail(10 * LOG_LINES) if line.source == worker]
    return "\n".join(lines[-LOG_LINES:])
