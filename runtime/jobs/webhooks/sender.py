"""Sends the webhook deliveries of an outbox, and repeats each until it is accepted or given up.

A delivery is sent at least once, even if the gateway crashes. Each attempt has the same id.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection
from functools import partial
from typing import Protocol

from ....errors import JobStoreFailed
from ...ground.access.fair_share import SharedRoom
from ...ground.telemetry.background import BackgroundTasks
from .delivery import GONE, MAX_MESSAGE_BYTES, Delivery, DeliveryAttempt, DeliveryState, RetrySchedule
from .http_post import AddressPolicy, HttpPoster
from .signing import SigningKey

_log = logging.getLogger(__name__)

MAX_SLEEP_S = 300.0
"""The longest sleep. After it, the clock is read again, because the clock may have been set."""
MAX_REQUESTS = 128
"""The limits of requests at a time, in all and per host. An owner that is alone gets half of each limit, so that other
owners need not wait for receivers that do not answer.
"""
MAX_REQUESTS_PER_HOST = 16
MAX_SENDING_BYTES = 64 << 20
"""Limit for the bytes of the messages that are made when they are sent: 8 of the largest messages. Owners share the limit."""
SIGNED_ON_LOOP_BYTES = 256 << 10
TIMEOUT_S = 15.0
PAUSE_S = 5.0
"""The pause after the store failed. Without the pause, an attempt that cannot be stored would be repeated at once."""


class Outbox(Protocol):
    """The stored deliveries. Its methods raise JobStoreFailed if they cannot be read or written."""

    clock: Callable[[], float]
    """Returns the present time in Unix seconds, on the clock that deliveries use."""

    async def due_deliveries(
        self, *, most: int, most_per_host: int, sending: Collection[Delivery]
    ) -> tuple[list[Delivery], float | None]:
        """Return deliveries that may be sent now, and the time at which the next delivery is due; None if there is
        none.

        Together with the deliveries in `sending`, return at most `most`, and at most `most_per_host` to a host. Owners
        share both limits.
        """

    async def webhook_body(self, delivery: Delivery) -> bytes | None:
        """Return the body for a delivery that is stored without one; None if its job is missing."""

    async def record_attempt(
        self, delivery: Delivery, attempt: DeliveryAttempt, schedule: RetrySchedule
    ) -> DeliveryState | None:
        """Store an attempt, and return the delivery's new state; None if the delivery was deleted."""


class WebhookSender:
    """Sends due deliveries in tasks of a task group. Call `wake` when a delivery may be due."""

    def __init__(
        self, outbox: Outbox, key: SigningKey, policy: AddressPolicy, schedule: RetrySchedule | None = None, *,
        on_attempt: Callable[[str, str], None] = lambda _function, _outcome: None, may_send: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        """`key` is the gateway's key, from which the key of each function is derived.

        After each attempt, the sender calls `on_attempt` with the function and the outcome. While `may_send()` is False, another gateway
        sends.
        """
        self._outbox, self._key, self._policy = outbox, key, policy
        self._schedule = schedule or RetrySchedule()
        self._awake = asyncio.Event()
        self._closing = asyncio.Event()
        self._room, self._left_room = SharedRoom(MAX_SENDING_BYTES), asyncio.Condition()
        self._requests: dict[asyncio.Task[None], Delivery] = {}
        """For each sending task, its delivery."""
        self._running: asyncio.Task[None]
        self._paused = False
        self._on_attempt, self._may_send = on_attempt, may_send

    def start(self, tasks: BackgroundTasks) -> None:
        """Start to send deliveries, including the deliveries that the previous run of the gateway left pending."""
        self._running = tasks.keep(partial(self._run, tasks), name="webhooks")

    def wake(self) -> None:
        """Make the sender look for due deliveries. Call it on the event loop."""
        self._awake.set()

    async def close(self, *, deadline_s: float) -> None:
        """Start no more requests, and cancel the requests that have not ended after `deadline_s` seconds."""
        self._closing.set()
        self.wake()
        if self._requests:
            await asyncio.wait(self._requests, timeout=deadline_s)
        for task in list(self._requests):
            task.cancel()
        await asyncio.wait([self._running])

    async def _run(self, tasks: asyncio.TaskGroup) -> None:
        async with HttpPoster(self._policy, timeout_s=TIMEOUT_S) as poster:
            while not self._closing.is_set():
                self._awake.clear()
                await wait(self._awake, await self._send_due(tasks, poster))
                if self._paused:
                    self._paused = False
                    await wait(self._closing, PAUSE_S)
            # The HTTP client must stay open until its requests end. `close` cancels them at its deadline.
            if self._requests:
                await asyncio.wait(self._requests)

    async def _send_due(self, tasks: asyncio.TaskGroup, poster: HttpPoster) -> float:
        """Start to send as many due deliveries as MAX_REQUESTS and MAX_REQUESTS_PER_HOST allow.

        Return the seconds after which to call this again, unless the sender is woken before.
        """
        if len(self._requests) >= MAX_REQUESTS or not self._may_send():
            # `_ended` wakes the loop when a request ends. The duty wakes the loop when this gateway may send.
            return MAX_SLEEP_S
        try:
            deliveries, next_s = await self._outbox.due_deliveries(
                most=MAX_REQUESTS, most_per_host=MAX_REQUESTS_PER_HOST, sending=list(self._requests.values())
            )
        except JobStoreFailed as error:
            self._pause(error)
            return 0.0
        if self._closing.is_set() or self._paused:
            return 0.0
        for delivery in deliveries:
            task = tasks.create_task(self._send(delivery, poster), name=f"webhook {delivery.id}")
            self._requests[task] = delivery
            task.add_done_callback(self._ended)
        # Due deliveries for which there was no room are read again when a request ends.
        return MAX_SLEEP_S if next_s is None else max(0.0, next_s - self._outbox.clock())

    async def _send(self, delivery: Delivery, poster: HttpPoster) -> None:
        try:
            if delivery.body:
                attempt = await self._post(delivery, delivery.body, poster)
            else:
                async with self._roomy(delivery.owner):
                    attempt = await self._post(delivery, await self._outbox.webhook_body(delivery), poster)
            state = await self._outbox.record_attempt(delivery, attempt, self._schedule)
        except JobStoreFailed as error:
            self._pause(error)
            return
        outcome = "delivered" if state is DeliveryState.DELIVERED else "failed"
        self._on_attempt(delivery.function, "given_up" if state is DeliveryState.DEAD else outcome)
        if state is DeliveryState.DEAD:
            _log.warning(
                "webhook %s (%s of %s) was given up after %d attempts: %s", delivery.id, delivery.event,
                delivery.job_id or delivery.subject, delivery.attempts + 1, attempt.error or f"status {attempt.status}",
            )  # fmt: skip

    async def _post(self, delivery: Delivery, body: bytes | None, poster: HttpPoster) -> DeliveryAttempt:
        now_s = time.time()
        if body is None:
            return DeliveryAttempt(now_s, GONE, "its job was deleted", 0)
        key, owners = self._key.of(delivery.function), self._key.of_owner(delivery.owner)
        sign = partial(key.headers, delivery.id, body, now_s, owners)
        signed = sign() if len(body) <= SIGNED_ON_LOOP_BYTES else await asyncio.to_thread(sign)
        return await poster.post(delivery.url, {**delivery.trace, **signed}, body, now_s)

    @contextlib.asynccontextmanager
    async def _roomy(self, owner: str) -> AsyncIterator[None]:
        """Reserve the bytes of the largest message during the block. Wait until they are free: each other message frees
        its bytes after at most 15 s.
        """
        async with self._left_room:
            await self._left_room.wait_for(lambda: self._room.takes(owner, MAX_MESSAGE_BYTES))
            self._room.add(owner, MAX_MESSAGE_BYTES)
        try:
            yield
        finally:
            self._room.remove(owner, MAX_MESSAGE_BYTES)
            async with self._left_room:
                self._left_room.notify_all()

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._requests[task]
        self.wake()

    def _pause(self, error: JobStoreFailed) -> None:
        self._paused = True
        _log.error("webhooks pause for %g s: %s", PAUSE_S, error)


async def wait(event: asyncio.Event, timeout_s: float) -> None:
    """Wait for the event, but not longer than the smaller of `timeout_s` and MAX_SLEEP_S."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(min(timeout_s, MAX_SLEEP_S)):
            await event.wait()
