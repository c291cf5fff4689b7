"""Offers the operations on jobs to routes and event sources: submit, read, wait, cancel, retry."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial

from ....errors import GatewayError, JobStoreFailed, UnknownFunction
from ...calls.serving.live_function import LiveFunction
from ...ground.access.keys import ALL
from ...ground.settings.gateway_settings import GatewaySettings
from ...ground.storing.duties import Duties
from ...ground.telemetry.background import BackgroundTasks
from ...ground.telemetry.metrics import Numbers, Reading
from ..webhooks.http_post import AddressPolicy
from ..webhooks.sender import MAX_SLEEP_S, WebhookSender, wait
from ..webhooks.signing import SigningKey
from .dispatcher import JobDispatcher
from .job import Job, NewJob, new_job_id
from .job_changes import JobChanges
from .job_store import JobStore
from .other_gateways import OtherGateways
from .steady_clock import SteadyClock
from .stored_bytes import StoredBytes

CLOSE_TIMEOUT_S = 10.0
"""How long `close` waits until attempts are stored, and how long it then waits for webhook requests."""
WEBHOOKS = "webhooks"
"""The duty to send webhooks. Only one gateway has it, so that webhooks are sent in order."""
EXPIRY_RETRY_S = 5.0
"""The pause after the store failed, before jobs are expired again."""


class Expiry:
    """Expires each job of a store as soon as its ttl or its retention has passed."""

    def __init__(self, store: JobStore, keep_s: float, clock: SteadyClock) -> None:
        """Ended jobs are kept for `keep_s`. `clock` says how much the system's clock was set."""
        self._store, self._keep_s, self._clock = store, keep_s, clock
        self._next_s = 0.0
        self._earlier = asyncio.Event()
        self._task: asyncio.Task[None]

    def start(self, tasks: BackgroundTasks) -> None:
        self._task = tasks.keep(self._run, name="jobs_expiry")

    def close(self) -> None:
        self._task.cancel()

    def expect(self, job: Job) -> None:
        """Check the store when a job that was stored may expire."""
        self._expect(job.expires_s or job.created_s + min(job.ttl_s, self._keep_s))

    def expect_ended(self) -> None:
        """Check the store when jobs that end now may expire."""
        self._expect(self._store.clock() + self._keep_s)

    def _expect(self, at_s: float) -> None:
        if at_s < self._next_s:
            self._next_s = at_s
            self._earlier.set()

    async def _run(self) -> None:
        while True:
            self._earlier.clear()
            self._next_s = self._store.clock() + MAX_SLEEP_S
            try:
                if by_s := self._clock.behind_s:
                    await self._store.shift(by_s, partial(self._clock.follow, by_s))
                    continue
                while (due_s := await self._store.next_expiry(self._store.clock())) <= self._store.clock():
                    await self._store.expire()
            except JobStoreFailed:
                due_s = self._store.clock() + EXPIRY_RETRY_S
            self._next_s = min(self._next_s, due_s)
            await wait(self._earlier, self._next_s - self._store.clock())


class Jobs:
    """All jobs of a gateway. Every id and state that its methods return is durably on disk."""

    def __init__(
        self, store: JobStore, clock: SteadyClock, key: SigningKey, live: Callable[[str], LiveFunction],
        tasks: BackgroundTasks, settings: GatewaySettings, duties: Duties | None = None,
    ) -> None:  # fmt: skip
        """For `clock` see Expiry. `key` signs webhooks. `live` returns a live function by name; see `JobDispatcher`."""
        self._tasks, self._live = tasks, live
        self.addresses = AddressPolicy.parse(settings.webhook_networks)
        """The addresses to which webhooks may be sent."""
        self.store = store
        store.on_commit = self._on_commit
        self._expiry = Expiry(store, settings.keep_result_s, clock)
        self._stored = StoredBytes(0)
        self._dispatcher = JobDispatcher(
            store, live, tasks, full=lambda owner: self._stored.refusal(owner, 0) is not None
        )
        self._most_stored = settings.max_stored_bytes
        self._watchers: dict[str, set[asyncio.Event]] = {}
        self.key = key
        self._duties = duties or Duties()
        self._sender = WebhookSender(
            store,
            key,
            self.addresses,
            on_attempt=self._attempted,
            may_send=lambda: self._duties.has(WEBHOOKS),
        )
        self._webhook_attempts: Counter[tuple[str, ...]] = Counter()

    # -- startup and shutdown

    async def start(self) -> tuple[int, int]:
        """Open the store and resume the jobs of the previous run.

        Return how many of the jobs that were running are queued again, and how many of them have failed.
        """
        await self.store.open()
        self._stored.load(await self.store.stored_bytes())
        if (most_bytes := self._most_stored) is None:
            most_bytes = self._stored.of_all + await self.store.free_bytes() // 2
        self._stored.most = self.store.most_stored_bytes = most_bytes
        self._sender.start(self._tasks)
        self._duties.keep(WEBHOOKS, lambda _mine: self._sender.wake())
        # Do not treat a gateway as dead because its lease has ended: while the database was unreachable, it could not
        # renew the lease. Its next heartbeat does.
        recovered = await self.store.requeue_dead(expired=False)
        for function in await self.store.functions_waiting():
            self._dispatcher.wake(function)
        self._expiry.start(self._tasks)
        return recovered

    def stop(self) -> None:
        """Submit no more jobs to workers. Call it before the functions are closed."""
        self._dispatcher.stop()

    async def close(self) -> None:
        """Wait until the results of all attempts are stored, and close. Close the functions first."""
        self.stop()
        await self._dispatcher.join(CLOSE_TIMEOUT_S)
        self._expiry.close()
        await self._sender.close(deadline_s=CLOSE_TIMEOUT_S)
        await self.store.close()

    def prepare_with(self, prepare: Callable[[Job], Awaitable[Job]]) -> None:
        """Call `prepare` with each stored job before it runs, and run the job that `prepare` returns. If `prepare` raises
        JobStoreFailed, the job runs later.
        """
        self._dispatcher.prepare = prepare

    def others(self) -> OtherGateways:
        """Return the part that follows the changes of other gateways in a shared store."""
        return OtherGateways(self.store, self._dispatcher, self._watchers, self._stored, self._sender.wake)

    # -- for callers, who use `store` directly to read, cancel and retry jobs and to redeliver webhooks

    async def submit(self, new: NewJob) -> tuple[Job, bool]:
        """Queue a job. Return what `JobStore.submit` returns, and raise its errors. Also raise WebhookRefused if its
        webhook is not allowed.
        """
        if new.webhook is not None:
            self.addresses.check(new.webhook.url)
        job, replayed = await self.store.submit(new, new_job_id(self.store.clock()))
        self._expiry.expect(job)
        return job, replayed

    async def run(self, new: NewJob, wait_s: float) -> tuple[Job, bool]:
        """Submit a job, and wait at most `wait_s` for its end. Return what `submit` returns, and raise its errors.

        The caller gets the job's id only when this returns. So a job that ends soon is stored only at its end, in one commit.
        """
        until_s = time.monotonic() + wait_s
        has_room = self._stored.refusal(new.owner, len(new.input)) is None
        if has_room and (attempt := self._dispatcher.run_unstored(new)) is not None:
            # Shield the attempt: it goes on if the caller is cancelled.
            stored = await asyncio.shield(attempt.stored)
            if stored is not None:
                self._expiry.expect(stored)
                if stored.state.final:
                    return stored, False
                return await self.wait(stored.function, stored.id, until_s - time.monotonic()), False
            # The job was not run, so submit it below. This line raises an error if the gateway is shutting down.
            self._live(new.function)
        job, replayed = await self.submit(new)
        return await self.wait(job.function, job.id, until_s - time.monotonic()), replayed

    @contextlib.contextmanager
    def watch(self, job_id: str) -> Iterator[asyncio.Event]:
        """Yield an event that is set when the job's state, progress or pieces change.

        Read the job inside the `with` block: a change before the block does not set the event.
        """
        news = asyncio.Event()
        self._watchers.setdefault(job_id, set()).add(news)
        try:
            yield news
        finally:
            self._watchers[job_id].discard(news)
            if not self._watchers[job_id]:
                del self._watchers[job_id]

    async def wait(self, function: str, job_id: str, timeout_s: float) -> Job:
        """Wait until the job is final, but not longer than `timeout_s`, and return the job."""
        with self.watch(job_id) as news, contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not (await self.store.glance(function, job_id)).state.final:
                    await news.wait()
                    news.clear()
        return await self.store.get(function, job_id)

    async def follow(
        self, function: str, job_id: str, after: int, *, every_s: float = MAX_SLEEP_S
    ) -> AsyncIterator[tuple[Job, list[tuple[int, bytes]]]]:
        """Yield the job and its new pieces, numbered above `after`, until the job is final.

        Yield at each change of the job, and after `every_s` without a change. Only the last job has its input and result.
        """
        with self.watch(job_id) as news:
            while True:
                news.clear()
                job = await self.store.glance(function, job_id)
                pieces = await self.store.pieces(job_id, after)
                after = pieces[-1][0] if pieces else after
                if job.state.final and not pieces:
                    yield await self.store.get(function, job_id), pieces
                    return
                yield job, pieces
                if not pieces:
                    await wait(news, every_s)

    async def purge(self, function: str, owner: str = ALL) -> int:
        """Cancel an owner's queued jobs, and return their number. The purge goes on if the caller is cancelled."""
        # Don't use the task group, which would log an error instead of raising it here.
        return await asyncio.shield(asyncio.create_task(self.store.purge(function, owner)))

    # -- for functions that are deployed or deleted

    def wake(self, function: str) -> None:
        """Run the queued jobs of a function that has become live."""
        self._dispatcher.wake(function)

    def forget(self, function: str) -> None:
        """Cancel all jobs of a deleted function, in the background, and drop the counts of its webhook attempts."""
        for key in [key for key in self._webhook_attempts if key[0] == function]:
            del self._webhook_attempts[key]
        self._tasks.create_task(self._forget(function))

    async def _forget(self, function: str) -> None:
        # If the store fails, the jobs stay queued until their ttl ends, or until the next function of this name is created.
        with contextlib.suppress(JobStoreFailed):
            await self.store.purge(function, running=True)

    def _attempted(self, function: str, outcome: str) -> None:
        # Do not count the deliveries of a deleted function, which are still sent. Otherwise, counts of deleted
        # functions would accumulate.
        with contextlib.suppress(UnknownFunction, GatewayError):
            self._live(function)
            self._webhook_attempts[function, outcome] += 1

    async def readings(self) -> list[Reading]:
        """Return the metrics of jobs and webhooks. If the store cannot be read, return only the metric that says so."""
        up = "1 if the jobs database can be read, else 0."
        try:
            counts, pending = await self.store.all_counts(), await self.store.pending_deliveries()
        except JobStoreFailed:
            return [Reading("job_store_up", up, {(): 0.0}, ())]

        def by_state(*states: str) -> Numbers:
            return {(name, state): getattr(of, state) for name, of in counts.items() for state in states}

        live, ended = by_state("in_queue", "in_progress"), by_state("completed", "failed", "cancelled")
        state, outcome = ("function", "state"), ("function", "outcome")
        retried: Numbers = {(name,): of.retried for name, of in counts.items()}
        size: Numbers = {(name,): of.queued_bytes for name, of in counts.items()}
        waiting: Numbers = {(name,): count for name, count in pending.items()}
        sent: Numbers = dict(self._webhook_attempts)
        return [
            Reading("job_store_up", up, {(): 1.0}, ()),
            Reading("jobs", "Jobs that wait or run.", live, state),
            Reading("jobs_ended", "Jobs that have ended, by final state.", ended, state, total=True),
            Reading("job_retries", "Retries of jobs that callers requested.", retried, total=True),
            Reading("job_queue_bytes", "Size of the inputs of waiting jobs.", size),
            Reading("webhooks_pending", "Webhook deliveries to be sent, now or later.", waiting),
            Reading(
                "webhook_attempts", "Attempts to send a delivery, by outcome.", sent, outcome, total=True
            ),
        ]

    # -- after each transaction

    def _on_commit(self, changes: JobChanges) -> None:
        for function in sorted(changes.queued):
            self._dispatcher.wake(function)
        if changes.queued or changes.changed:
            self._expiry.expect_ended()
        for function, job_id in changes.cancelled:
            self._dispatcher.cancel(function, job_id)
        for job_id in changes.changed:
            for news in self._watchers.get(job_id, ()):
                news.set()
        if changes.notified:
            self._sender.wake()
        self._stored.add(changes.stored)
