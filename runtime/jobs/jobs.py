"""Jobs, as routes and event sources use them: submit, read, wait, cancel, retry, and webhook deliveries."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ...errors import JobExpired, JobStoreFailed, UnknownJob
from ..functions.live import Live
from ..settings.gateway_settings import GatewaySettings
from . import outbox
from .database import Database
from .dispatcher import JobDispatcher
from .http_post import AddressPolicy
from .job import Job, JobCounts, JobState, NewJob
from .schema import SCRIPTS
from .store import JobStore
from .transaction import Transaction
from .webhook_delivery import Delivery, DeliveryState
from .webhook_sender import WebhookSender
from .webhook_signing import load_key

T = TypeVar("T")

DATABASE_FILE = "jobs.sqlite3"
CLOSE_TIMEOUT_S = 10.0
EXPIRY_RETRY_S = 5.0
MAX_SLEEP_S = 300.0
"""The longest sleep until a wall-clock time, after which a clock that was set forward is noticed."""


class Jobs:
    """All jobs of a gateway. Every result is on the disk: a returned id can be looked up after a crash."""

    def __init__(
        self, state: Path, live: Callable[[str], Live], tasks: asyncio.TaskGroup, settings: GatewaySettings
    ) -> None:
        self._database = Database(state / DATABASE_FILE, SCRIPTS)
        self._state = state
        self._tasks = tasks
        self._keep_s = settings.keep_result_s
        self._addresses = AddressPolicy.parse(settings.webhook_networks)
        self.store = JobStore(self._database, keep_s=self._keep_s, on_commit=self._on_commit)
        self._dispatcher = JobDispatcher(self.store, live, tasks)
        self._watchers: dict[str, set[asyncio.Event]] = {}
        self._sender: WebhookSender | None = None
        self._expiry: asyncio.Task[None] | None = None
        self._next_expiry_s = 0.0
        self._earlier_expiry = asyncio.Event()

    # -- startup and shutdown

    async def start(self) -> None:
        """Open the store and resume the jobs of the previous run."""
        await asyncio.to_thread(self._database.open)
        key = await asyncio.to_thread(load_key, self._state)
        self._sender = WebhookSender(self._database, key, self._addresses)
        self._sender.start(self._tasks)
        await self.store.recover()
        for function in await self.store.functions_waiting():
            self._dispatcher.wake(function)
        self._expiry = self._tasks.create_task(self._expire())

    def stop(self) -> None:
        """Hand no more jobs to workers. Call it before the functions are closed."""
        self._dispatcher.stop()

    async def close(self) -> None:
        """Store the ends of all attempts and close the store. Call it after the functions are closed."""
        self.stop()
        await self._dispatcher.join(CLOSE_TIMEOUT_S)
        if self._expiry is not None:
            self._expiry.cancel()
        if self._sender is not None:
            await self._sender.close(deadline_s=CLOSE_TIMEOUT_S)
        await asyncio.to_thread(self._database.close)

    # -- what callers do

    async def submit(self, new: NewJob) -> tuple[Job, bool]:
        """Queue a new job; see `transitions.submit`. WebhookRefused if its webhook may not be called."""
        if new.webhook is not None:
            self._addresses.check(new.webhook.url)
        job, replayed = await self.store.submit(new)
        self._expect_expiry(job.created_s + min(job.ttl_s, self._keep_s))
        return job, replayed

    async def get(self, function: str, job_id: str) -> Job:
        """Return a function's job. UnknownJob, JobExpired."""
        return await self.store.get(function, job_id)

    async def find(self, job_id: str, allows: Callable[[str], bool], among: Collection[str]) -> Job:
        """Return a job by its id alone; see `queries.find`. UnknownJob, JobExpired."""
        return await self.store.find(job_id, allows, among)

    @contextlib.contextmanager
    def watch(self, job_id: str) -> Iterator[asyncio.Event]:
        """Yield an event that is set when state, progress or pieces change. Read the job after entering."""
        news = asyncio.Event()
        self._watchers.setdefault(job_id, set()).add(news)
        try:
            yield news
        finally:
            watchers = self._watchers[job_id]
            watchers.discard(news)
            if not watchers:
                del self._watchers[job_id]

    async def wait(self, function: str, job_id: str, timeout_s: float) -> Job:
        """Return the job once it is final, or as it is after `timeout_s`."""
        with self.watch(job_id) as news, contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not (job := await self.store.get(function, job_id)).state.final:
                    await news.wait()
                    news.clear()
                return job
        return await self.store.get(function, job_id)

    async def follow(
        self, function: str, job_id: str, after: int, *, every_s: float = MAX_SLEEP_S
    ) -> AsyncIterator[tuple[Job, list[tuple[int, bytes]]]]:
        """Yield the job and its pieces numbered above `after`, at each change and every `every_s`, until it is final."""
        with self.watch(job_id) as news:
            while True:
                news.clear()
                job = await self.store.get(function, job_id)
                pieces = await self.store.pieces(job_id, after)
                after = pieces[-1][0] if pieces else after
                yield job, pieces
                if job.state.final and not pieces:
                    return
                if not pieces:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(every_s):
                            await news.wait()

    async def cancel(self, function: str, job_id: str) -> Job:
        """Cancel a job unless it is final and stop its attempt, even if the caller is cancelled."""

        async def cancelled() -> Job:
            job, _ = await self.store.cancel(function, job_id)
            self._dispatcher.cancel(function, job_id)
            return job

        return await self._shielded(cancelled())

    async def retry(self, function: str, job_id: str) -> Job:
        """Queue a job that FAILED or TIMED_OUT again under its id. JobConflict for any other."""
        return await self.store.retry(function, job_id)

    async def purge(self, function: str) -> int:
        """Cancel all queued jobs, even if the caller is cancelled. Return how many."""

        async def purged() -> int:
            cancelled = await self.store.purge(function)
            self._dispatcher.withdraw(function)
            return cancelled

        return await self._shielded(purged())

    async def list(
        self, function: str, states: Collection[JobState] = (), limit: int = 100, before_id: str = ""
    ) -> list[Job]:
        """Return jobs in these states (default: all), newest first, without input, output and logs."""
        return await self.store.newest(function, states, limit, before_id)

    async def counts(self, function: str) -> JobCounts:
        return await self.store.counts(function)

    async def _shielded(self, change: Coroutine[Any, Any, T]) -> T:
        """Run a change that must not stop halfway. Its error is raised here, not in the task group."""

        async def outcome() -> tuple[T, None] | tuple[None, Exception]:
            try:
                return await change, None
            except Exception as error:  # noqa: BLE001
                return None, error

        result = await asyncio.shield(self._tasks.create_task(outcome()))
        if result[1] is not None:
            raise result[1]
        return result[0]

    # -- what happens to functions

    def wake(self, function: str) -> None:
        """Run the queued jobs of a function that is live."""
        self._dispatcher.wake(function)

    def forget(self, function: str) -> None:
        """Cancel all jobs of a deleted function, in the background."""
        self._tasks.create_task(self._forget(function))

    async def _forget(self, function: str) -> None:
        # If the store fails, the jobs stay queued until their ttl ends or the function is deployed again.
        with contextlib.suppress(JobStoreFailed):
            for job_id in await self.store.purge_deleted(function):
                # The job may have ended and expired meanwhile.
                with contextlib.suppress(UnknownJob, JobExpired):
                    await self.cancel(function, job_id)

    # -- webhook deliveries

    async def deliveries(
        self, function: str, *, job_id: str = "", states: Sequence[DeliveryState] = (), limit: int = 100
    ) -> Sequence[Delivery]:
        """Return the function's deliveries in these states (default: all), newest first."""
        return await self._database.read(
            lambda connection: outbox.newest(connection, function, states=states, job_id=job_id, limit=limit)
        )

    async def redeliver(self, function: str, delivery_id: str) -> Delivery:
        """Send a delivery again under its id. UnknownDelivery."""
        return await self._started_sender().redeliver(function, delivery_id)

    def webhook_secret(self, function: str) -> str:
        """Return the secret with which receivers verify a function's deliveries."""
        return self._started_sender().secret(function)

    def _started_sender(self) -> WebhookSender:
        if self._sender is None:
            raise JobStoreFailed("The store of jobs is closed.")
        return self._sender

    # -- after each transaction

    def _on_commit(self, transaction: Transaction) -> None:
        for function in sorted(transaction.queued):
            self._dispatcher.wake(function)
            self._expect_expiry(time.time() + self._keep_s)
        for job_id in transaction.changed:
            for news in self._watchers.get(job_id, ()):
                news.set()
        if transaction.notified and self._sender is not None:
            self._sender.wake()

    def _expect_expiry(self, at_s: float) -> None:
        if at_s < self._next_expiry_s:
            self._next_expiry_s = at_s
            self._earlier_expiry.set()

    async def _expire(self) -> None:
        """Expire jobs when they are due."""
        while True:
            self._earlier_expiry.clear()
            self._next_expiry_s = time.time() + MAX_SLEEP_S
            try:
                while (
                    due_s := await self.store.next_expiry(time.time())
                ) is not None and due_s <= time.time():
                    await self.store.expire()
            except JobStoreFailed:
                due_s = time.time() + EXPIRY_RETRY_S
            self._next_expiry_s = (
                min(self._next_expiry_s, due_s) if due_s is not None else self._next_expiry_s
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._next_expiry_s - time.time())):
                    await self._earlier_expiry.wait()
