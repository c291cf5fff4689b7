"""The courier: sends what lies in the outbox, and sends it again until it was taken or is given up.

All that it has to know after a crash lies in the table, so whatever happens a delivery is attempted at least once, with
the same id each time. What it holds itself are only the requests that are on their way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp.abc import AbstractResolver

from ...errors import JobStoreFailed
from . import outbox
from .database import Database
from .http_post import HttpPoster
from .webhook_addresses import AddressPolicy
from .webhook_backoff import Schedule
from .webhook_delivery import Delivery, DeliveryAttempt, DeliveryState
from .webhook_signing import SigningKey

_log = logging.getLogger(__name__)

LONGEST_SLEEP_S = 300.0
"""Times in the table are of the wall clock: one that was set forward is noticed after that."""
PAUSE_S = 5.0
"""After the store refused: nothing is sent of which it could not be written down that it was."""


@dataclass(frozen=True, slots=True)
class WebhookLimits:
    """How much at once, how long, how often."""

    in_flight: int = 64
    per_host: int = 8
    timeout_s: float = 15.0
    connect_timeout_s: float = 5.0
    schedule: Schedule = field(default_factory=Schedule)
    keep_s: float = 7 * 86400.0
    """How long deliveries that ended are kept, if their jobs are not forgotten before."""


class WebhookSender:
    """Runs as a task of the group it is started in; `wake` it when something new may be due."""

    def __init__(
        self,
        database: Database,
        key: SigningKey,
        policy: AddressPolicy,
        *,
        limits: WebhookLimits | None = None,
        resolver: AbstractResolver | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._key = key
        """The gateway's: each function's is made of it."""
        self._limits = limits or WebhookLimits()
        self._clock = clock
        self._poster = HttpPoster(
            policy,
            timeout_s=self._limits.timeout_s,
            connect_timeout_s=self._limits.connect_timeout_s,
            resolver=resolver,
        )
        self._awake = asyncio.Event()
        self._over = asyncio.Event()
        self._sending: dict[asyncio.Task[None], tuple[str, str]] = {}
        self._rounds: asyncio.Task[None] | None = None
        self._paused = False

    def start(self, group: asyncio.TaskGroup) -> None:
        """Begin to send, at first what a former life has left."""
        self._rounds = group.create_task(self._run(group), name="webhooks")

    def wake(self) -> None:
        """Something new may be due. To be called on the event loop; costs nothing."""
        self._awake.set()

    async def redeliver(self, function: str, delivery_id: str) -> Delivery:
        """Send a delivery again, with the same id, whatever became of it. UnknownDelivery, JobStoreFailed."""
        delivery = await self._database.write(
            lambda connection: outbox.redeliver(connection, function, delivery_id, self._clock())
        )
        self.wake()
        return delivery

    def secret(self, function: str) -> str:
        """What receivers of that function's deliveries verify them with."""
        return self._key.of(function).secret

    async def close(self, *, deadline_s: float) -> None:
        """Take nothing new, let requests end within that time, break off the rest: they are sent again by the next life."""
        self._over.set()
        self.wake()
        if self._sending:
            await asyncio.wait(self._sending, timeout=deadline_s)
        for task in list(self._sending):
            task.cancel()
        if self._rounds is not None:
            await asyncio.wait([self._rounds])

    async def _run(self, group: asyncio.TaskGroup) -> None:
        async with self._poster:
            while not self._over.is_set():
                self._awake.clear()
                await _until(self._awake, await self._round(group))
                if self._paused:
                    self._paused = False
                    await _until(self._over, PAUSE_S)
            if self._sending:  # the client is theirs until they end; `close` sees to it that they do
                await asyncio.wait(self._sending)

    async def _round(self, group: asyncio.TaskGroup) -> float:
        """Send what is due as far as there is room; how long there is nothing more to do."""
        room = self._limits.in_flight - len(self._sending)
        if room <= 0:
            return LONGEST_SLEEP_S  # whoever ends wakes
        now_s, busy = self._clock(), list(self._sending.values())
        try:
            found, next_s = await self._database.read(
                lambda connection: outbox.due(
                    connection, now_s, room=room, room_per_host=self._limits.per_host, busy=busy
                )
            )
        except JobStoreFailed as error:
            self._pause(error)
            return 0.0
        if self._over.is_set() or self._paused:
            return 0.0
        for delivery in found:
            task = group.create_task(self._send(delivery), name=f"webhook {delivery.id}")
            self._sending[task] = (delivery.host, delivery.job_id)
            task.add_done_callback(self._sent)
        # What was due and found no room is seen again when somebody ends.
        return LONGEST_SLEEP_S if next_s is None else max(0.0, next_s - self._clock())

    async def _send(self, delivery: Delivery) -> None:
        now_s = self._clock()
        headers = self._key.of(delivery.function).headers(delivery.id, delivery.body, now_s)
        attempt = await self._poster.post(delivery.url, headers, delivery.body, now_s)
        try:
            after = await self._record(delivery.id, attempt)
        except JobStoreFailed as error:
            self._pause(error)
            return
        if after is not None and after.state is DeliveryState.DEAD:
            _log.warning(
                "webhook %s (%s of %s) was given up after %d attempts: %s",
                after.id,
                after.event,
                after.job_id,
                after.attempts,
                attempt.error or f"status {attempt.status}",
            )

    async def _record(self, delivery_id: str, attempt: DeliveryAttempt) -> Delivery | None:
        chance = random.random()  # noqa: S311  jitter
        return await self._database.write(
            lambda connection: outbox.record(
                connection,
                delivery_id,
                attempt,
                self._limits.schedule,
                now_s=self._clock(),
                chance=chance,
                keep_s=self._limits.keep_s,
            )
        )

    def _sent(self, task: asyncio.Task[None]) -> None:
        del self._sending[task]
        self.wake()

    def _pause(self, error: JobStoreFailed) -> None:
        self._paused = True
        _log.error("webhooks pause for %g s: %s", PAUSE_S, error)


async def _until(event: asyncio.Event, longest_s: float) -> None:
    """Wait for the event, at most that long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(min(longest_s, LONGEST_SLEEP_S)):
            await event.wait()
