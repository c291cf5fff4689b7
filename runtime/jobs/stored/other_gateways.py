"""Follows what the other gateways of a shared store do with its jobs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from ....errors import JobStoreFailed
from ...ground.telemetry.background import BackgroundTasks
from .dispatcher import JobDispatcher
from .job import Job
from .job_store import JobStore
from .stored_bytes import StoredBytes

POLL_S = 0.25
"""The pause between two reads of the jobs that run at other gateways and for which callers wait at this one."""
MOST_ASKED = 500
RECOVER_EVERY = 30
"""Every 30th call of `look` also queues the jobs of gateways that died long ago. A suspended gateway may have claimed
jobs after the others took it for dead, and then died.
"""


class OtherGateways:
    """Passes the changes of other gateways to the parts that follow the commits of this one."""

    def __init__(
        self, store: JobStore, dispatcher: JobDispatcher, watchers: Mapping[str, set[asyncio.Event]],
        stored: StoredBytes, wake_webhooks: Callable[[], object],
    ) -> None:  # fmt: skip
        self._store, self._dispatcher, self._watchers, self._stored = store, dispatcher, watchers, stored
        self._wake_webhooks = wake_webhooks
        self._looks = 0
        self._known: dict[str, tuple[object, ...]] = {}
        """The latest known facts of each job for which callers wait."""

    def start(self, tasks: BackgroundTasks) -> None:
        """Begin to watch the jobs for which callers wait."""
        self._watching = tasks.keep(self._watch, name="jobs_elsewhere")

    def close(self) -> None:
        self._watching.cancel()

    async def look(self, *, left: bool, dead: bool) -> None:
        """Run waiting jobs. Cancel attempts of jobs that other gateways have ended or started. Load the counts of
        stored bytes. Call this each second.

        If a gateway has `left`, or is `dead`, queue its jobs again.
        """
        with contextlib.suppress(JobStoreFailed):
            self._looks += 1
            if left or dead or self._looks % RECOVER_EVERY == 0:
                await self._store.requeue_dead(expired=dead)
            for function in await self._store.functions_waiting():
                self._dispatcher.wake(function)
            self._wake_webhooks()
            await self._end_attempts()
            self._stored.load(await self._store.stored_bytes())

    async def _end_attempts(self) -> None:
        attempts = [(one, one.fence) for one in self._dispatcher.attempts()]
        found = {job.id: job for job in await self._glances([one.job.id for one, _ in attempts])}
        # Ignore attempts that have changed since the read: meanwhile, the job may have been started again.
        present = set(self._dispatcher.attempts())
        for attempt, fence in attempts:
            job = found.get(attempt.job.id)
            same = attempt in present and attempt.fence == fence
            if same and job is not None and (job.state.final or (fence and job.attempts > fence)):
                self._dispatcher.cancel(attempt.job.function, attempt.job.id)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            with contextlib.suppress(JobStoreFailed):
                await self._tell_watchers()

    async def _tell_watchers(self) -> None:
        here = {one.job.id for one in self._dispatcher.attempts()}
        asked = [job_id for job_id in self._watchers if job_id not in here]
        before, self._known = self._known, {}
        for job in await self._glances(asked):
            self._known[job.id] = (job.state, job.attempts, job.pieces, job.progress)
            # The first look at a job counts as a change: the job may have changed before it.
            if before.get(job.id) != self._known[job.id]:
                for news in self._watchers.get(job.id, ()):
                    news.set()

    async def _glances(self, job_ids: list[str]) -> list[Job]:
        found: list[Job] = []
        for at in range(0, len(job_ids), MOST_ASKED):
            found += await self._store.glances(job_ids[at : at + MOST_ASKED])
        return found
