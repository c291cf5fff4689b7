"""The dispatcher: gives stored jobs to the live revisions of their functions, as fast as these take them.

A lane a function, for as long as it has jobs: it looks for the next ones when it is woken (a job came, one ended, one that
rested is due) and submits as many as the revision can hold, so that those who wait for an answer never queue behind a heap.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Protocol

from ...errors import GatewayError, JobStoreFailed, QueueFull, RevisionRetired, UnknownFunction
from ..serving.revision import Revision
from ..telemetry.logs import LogBook
from .attempt import LOG_LINES, STORE_RETRY_S, JobAttempt
from .job import Job
from .store import JobStore

LEAST_AHEAD = 8
"""For each invocation that all workers can run at a time, one more is at hand when it ends; so many at least."""
MAX_AT_ONCE = 1024
FULL_RETRY_S = 1.0


class JobTarget(Protocol):
    """What is known of a live function."""

    revision: Revision
    logs: LogBook


class JobDispatcher:
    """Runs jobs. `target` gives a function that is live, or raises UnknownFunction or GatewayError."""

    def __init__(self, store: JobStore, target: Callable[[str], JobTarget], tasks: asyncio.TaskGroup) -> None:
        self._store = store
        self._target = target
        self._tasks = tasks
        self._lanes: dict[str, _Lane] = {}
        self._running: dict[str, JobAttempt] = {}
        self._closing = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def wake(self, function: str) -> None:
        """There may be something to do for a function."""
        if self._closing.is_set():
            return
        lane = self._lanes.get(function)
        if lane is None:
            lane = self._lanes[function] = _Lane()
            self._tasks.create_task(self._serve(function, lane))
        lane.news.set()

    def cancel(self, job_id: str) -> None:
        """The job was cancelled in the store: stop what runs of it."""
        if (attempt := self._running.get(job_id)) is not None:
            attempt.cancel()

    def withdraw(self, function: str) -> None:
        """The queue was purged: what no worker has yet is taken back. What is still queued after all comes again."""
        for attempt in list(self._running.values()):
            if attempt.job.function == function and not attempt.sent:
                attempt.cancel()

    def stop(self) -> None:
        """Takes nothing more from the store."""
        self._closing.set()
        for lane in self._lanes.values():
            lane.news.set()

    async def join(self, timeout_s: float) -> None:
        """Until all that was taken has ended and is stored."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()

    async def _serve(self, function: str, lane: _Lane) -> None:
        loop = asyncio.get_running_loop()
        try:
            while not self._closing.is_set():
                lane.news.clear()
                again_s = await self._fill(function, lane)
                if again_s is None and not lane.running and not lane.news.is_set():
                    return
                timer = loop.call_later(max(0.0, again_s), lane.news.set) if again_s is not None else None
                await lane.news.wait()
                if timer is not None:
                    timer.cancel()
        finally:
            if self._lanes.get(function) is lane:
                del self._lanes[function]

    async def _fill(self, function: str, lane: _Lane) -> float | None:
        """Submit what the revision can hold; in how many seconds to look again, None: when woken."""
        try:
            room = self._room(function, lane)
            if room <= 0:
                return None
            lane.ended.clear()
            now_s = time.time()
            jobs = await self._store.next(function, room + len(lane.running), now_s=now_s)
            # Those that were due by then are in `jobs`; what waits for another moment is seen at that moment.
            due_s = await self._store.next_due(function, after_s=now_s)
            # What ended meanwhile was perhaps seen as it stood before: its end has woken us, to look again.
            passed = lane.running.keys() | lane.ended
            for job in [job for job in jobs if job.id not in passed][:room]:
                self._start(function, lane, job)
        except (UnknownFunction, GatewayError):
            return None  # deleted, or going down: whoever brings it back wakes us
        except (QueueFull, RevisionRetired):
            return FULL_RETRY_S
        except JobStoreFailed:
            return STORE_RETRY_S
        return None if due_s is None else max(0.0, due_s - time.time())

    def _room(self, function: str, lane: _Lane) -> int:
        scale = self._target(function).revision.policy.scale
        at_once = scale.max * scale.concurrency
        room = min(MAX_AT_ONCE, at_once + max(at_once, LEAST_AHEAD)) - lane.unanswered
        return min(room, MAX_AT_ONCE - len(lane.running))

    def _start(self, function: str, lane: _Lane, job: Job) -> None:
        if self._closing.is_set():
            return
        target = self._target(function)  # as it is now: it may have been replaced since we asked the store
        attempt = JobAttempt(
            job, target.revision, self._store, self._tasks, self._closing,
            lambda worker: _tail(target.logs, worker),
        )  # fmt: skip
        attempt.submit()
        lane.running[job.id] = attempt
        attempt.invocation.output.add_done_callback(lambda _: lane.news.set())
        self._running[job.id] = attempt
        self._idle.clear()
        self._tasks.create_task(self._run(function, lane, attempt))

    async def _run(self, function: str, lane: _Lane, attempt: JobAttempt) -> None:
        job_id = attempt.job.id
        try:
            await self._see_through(function, attempt)
        except JobStoreFailed as error:
            # The job stays in progress until the gateway starts again, and is run then.
            self._say(function, f"job {job_id}: {error.message}")
        finally:
            lane.running.pop(job_id, None)
            lane.ended.add(job_id)
            self._running.pop(job_id, None)
            if not self._running:
                self._idle.set()
            lane.news.set()

    async def _see_through(self, function: str, attempt: JobAttempt) -> None:
        try:
            await attempt.run()
        except JobStoreFailed:
            raise
        except Exception as error:  # noqa: BLE001  what is wrong with one job must not end the gateway, and all others
            self._say(function, f"job {attempt.job.id} was given up: {type(error).__name__}: {error}")
            await self._give_up(function, attempt, error)

    async def _give_up(self, function: str, attempt: JobAttempt, error: Exception) -> None:
        try:
            await attempt.give_up(error)
        except JobStoreFailed:
            raise
        except Exception as worse:  # noqa: BLE001  as above; as with a disk that refuses, the next start runs it
            self._say(
                function, f"job {attempt.job.id} could not be given up: {type(worse).__name__}: {worse}"
            )

    def _say(self, function: str, text: str) -> None:
        """Said where its owner looks."""
        with contextlib.suppress(UnknownFunction, GatewayError):
            self._target(function).logs.write("gateway", text)


class _Lane:
    """One function's jobs at work."""

    def __init__(self) -> None:
        self.news = asyncio.Event()
        self.running: dict[str, JobAttempt] = {}
        self.ended: set[str] = set()
        """Since the store was asked last."""

    @property
    def unanswered(self) -> int:
        """How many a worker has, or is to have; the others are only still to be stored."""
        return sum(not attempt.invocation.ended for attempt in self.running.values())


def _tail(logs: LogBook, worker: str) -> str:
    lines = [line.text for line in logs.tail(10 * LOG_LINES) if line.source == worker]
    return "\n".join(lines[-LOG_LINES:])
