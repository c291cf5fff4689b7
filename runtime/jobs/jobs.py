"""Jobs, as routes and event sources see them: submit, look, wait, cancel, retry; and their life beside the gateway's."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ...errors import JobExpired, JobStoreFailed, UnknownJob
from . import outbox
from .database import Database
from .dispatcher import JobDispatcher, JobTarget
from .job import Job, JobCounts, JobState, NewJob
from .notifications import Notifications
from .schema import SCRIPTS
from .store import JobStore
from .webhook_addresses import AddressPolicy
from .webhook_delivery import Delivery, DeliveryState
from .webhook_sender import WebhookSender
from .webhook_signing import load_key

T = TypeVar("T")

DATABASE_FILE = "jobs.sqlite3"
CLOSE_TIMEOUT_S = 10.0
EXPIRE_PAUSE_S = 5.0
LONGEST_SLEEP_S = 300.0
"""Times are of the wall clock: one that was set forward is noticed after that."""


@dataclass(frozen=True, slots=True)
class JobSettings:
    """How long results are kept, and which private networks webhooks may call."""

    keep_s: float = 1800.0
    webhook_networks: tuple[str, ...] = ()


class Jobs:
    """All jobs of a gateway. What is accepted is on the disk; what it returns may be looked up after a crash."""

    def __init__(
        self, state: Path, target: Callable[[str], JobTarget], tasks: asyncio.TaskGroup, settings: JobSettings
    ) -> None:
        self._database = Database(state / DATABASE_FILE, SCRIPTS)
        self._state = state
        self._tasks = tasks
        self._settings = settings
        self.policy = AddressPolicy.parse(settings.webhook_networks)
        self.board = Notifications()
        self.store = JobStore(
            self._database, keep_s=settings.keep_s,
            tell=outbox.add, wake=self._wake, told=self._wake_courier, changed=self.board.tell,
        )  # fmt: skip
        self._dispatcher = JobDispatcher(self.store, target, tasks)
        self._courier: WebhookSender | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._due_s = 0.0
        self._due_news = asyncio.Event()

    # -- its life

    async def start(self) -> None:
        """Opens the store and goes on with what the last life of this gateway left."""
        await asyncio.to_thread(self._database.open)
        self._courier = WebhookSender(
            self._database, await asyncio.to_thread(load_key, self._state), self.policy
        )
        self._courier.start(self._tasks)
        await self.store.recover()
        for function in await self.store.functions_waiting():
            self._dispatcher.wake(function)
        self._keeping = self._tasks.create_task(self._keep())

    def stop(self) -> None:
        """Gives nothing more to workers; before the functions are closed."""
        self._dispatcher.stop()

    async def close(self) -> None:
        """Stores how what ran has ended, and closes the store; after the functions are closed."""
        await self._dispatcher.join(CLOSE_TIMEOUT_S)
        if self._keeping is not None:
            self._keeping.cancel()
        if self._courier is not None:
            await self._courier.close(deadline_s=CLOSE_TIMEOUT_S)
        await asyncio.to_thread(self._database.close)

    # -- what callers do

    async def submit(self, new: NewJob) -> tuple[Job, bool]:
        """The job, on the disk, and whether it was there before. WebhookRefused, IdempotencyConflict, JobConflict, QueueFull."""
        if new.webhook is not None:
            self.policy.check(new.webhook.url)
        job, replayed = await self.store.submit(new)
        self._note_due(job.created_s + min(job.ttl_s, self._settings.keep_s))
        return job, replayed

    async def get(self, function: str, job_id: str) -> Job:
        """UnknownJob, JobExpired."""
        return await self.store.get(function, job_id)

    async def find(self, job_id: str, allows: Callable[[str], bool], among: Collection[str]) -> Job:
        """A job of a function that `allows`, where only its id is said. UnknownJob, or JobExpired of one `among`."""
        return await self.store.find(job_id, allows, among)

    async def wait(self, function: str, job_id: str, timeout_s: float) -> Job:
        """The job once it has ended, or as it is after `timeout_s`."""
        with self.board.reading(job_id) as news, contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not (job := await self.store.get(function, job_id)).state.final:
                    await news.wait()
                    news.clear()
                return job
        return await self.store.get(function, job_id)

    async def follow(
        self, function: str, job_id: str, after: int, *, every_s: float = LONGEST_SLEEP_S
    ) -> AsyncIterator[tuple[Job, list[tuple[int, bytes]]]]:
        """The job and its pieces numbered above `after`, again and again as they come, until it has ended.

        If nothing has come for `every_s`, the job as it is.
        """
        with self.board.reading(job_id) as news:
            while True:
                news.clear()
                job = await self.store.get(function, job_id)
                pieces = await self.store.pieces(job_id, after, 1000)
                after = pieces[-1][0] if pieces else after
                yield job, pieces
                if job.state.final and not pieces:
                    return
                if not pieces:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(every_s):
                            await news.wait()

    async def cancel(self, function: str, job_id: str) -> Job:
        """The job, CANCELLED unless it had ended. What runs of it is stopped even if the caller leaves."""

        async def cancelled() -> Job:
            job, _ = await self.store.cancel(function, job_id)
            self._dispatcher.cancel(job_id)
            return job

        return await self._to_the_end(cancelled())

    async def retry(self, function: str, job_id: str) -> Job:
        """Queues a job that FAILED or TIMED_OUT again, under its id. JobConflict for any other."""
        return await self.store.retry(function, job_id)

    async def purge(self, function: str) -> int:
        """Cancels all that wait; how many. Goes on to the end even if the caller leaves."""

        async def purged() -> int:
            removed = await self.store.purge(function)
            self._dispatcher.withdraw(function)
            return removed

        return await self._to_the_end(purged())

    async def list(
        self, function: str, states: Collection[JobState] = (), limit: int = 100, before_id: str = ""
    ) -> list[Job]:
        return await self.store.list(function, states, limit, before_id)

    async def counts(self, function: str) -> JobCounts:
        return await self.store.counts(function)

    async def _to_the_end(self, change: Coroutine[Any, Any, T]) -> T:
        """Runs a change that must not stop half-way, even if its caller leaves meanwhile."""

        async def outcome() -> tuple[T, None] | tuple[None, Exception]:
            try:
                return await change, None
            except Exception as error:  # noqa: BLE001  raised where it was asked for, and not into the gateway's tasks
                return None, error

        result = await asyncio.shield(self._tasks.create_task(outcome()))
        if result[1] is not None:
            raise result[1]
        return result[0]

    def forget(self, function: str) -> None:
        """The function is deleted: nothing of it is to run any more."""
        self._tasks.create_task(self._forget(function))

    async def _forget(self, function: str) -> None:
        # If the store fails, they wait for a function of this name until their ttl ends.
        with contextlib.suppress(JobStoreFailed):
            for job_id in await self.store.forget(function):
                with contextlib.suppress(
                    UnknownJob, JobExpired
                ):  # it has ended meanwhile, and was not kept for long
                    await self.cancel(function, job_id)

    def wake(self, function: str) -> None:
        """The function is live (again): what waits for it may run."""
        self._dispatcher.wake(function)

    # -- deliveries of webhooks

    async def deliveries(
        self, function: str, *, job_id: str = "", states: Sequence[DeliveryState] = (), limit: int = 100
    ) -> Sequence[Delivery]:
        """The newest first."""
        return await self._database.read(
            lambda connection: list(
                outbox.newest(
                    connection, function, job_id=job_id, states=states or tuple(DeliveryState), limit=limit
                )
            )
        )

    async def redeliver(self, function: str, delivery_id: str) -> Delivery:
        """Sends a delivery again, under its id."""
        if self._courier is None:
            raise JobStoreFailed("The store of jobs is closed.")
        return await self._courier.redeliver(function, delivery_id)

    def webhook_secret(self, function: str) -> str:
        """What receivers verify a function's deliveries with: for those who may deploy it."""
        if self._courier is None:
            raise JobStoreFailed("The store of jobs is closed.")
        return self._courier.secret(function)

    # -- what the store says

    def _wake(self, function: str) -> None:
        self._dispatcher.wake(function)
        self._note_due(time.time() + self._settings.keep_s)

    def _wake_courier(self) -> None:
        if self._courier is not None:
            self._courier.wake()

    def _note_due(self, at_s: float) -> None:
        if at_s < self._due_s:
            self._due_s = at_s
            self._due_news.set()

    async def _keep(self) -> None:
        """Times out what waited too long and forgets what was kept long enough, when that is due."""
        while True:
            self._due_news.clear()
            self._due_s = time.time() + LONGEST_SLEEP_S
            try:
                while (due_s := await self.store.next_expiry()) is not None and due_s <= time.time():
                    await self.store.expire()
            except JobStoreFailed:
                due_s = time.time() + EXPIRE_PAUSE_S
            self._due_s = min(self._due_s, due_s) if due_s is not None else self._due_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._due_s - time.time())):
                    await self._due_news.wait()
