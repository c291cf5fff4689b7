"""An invocation: one request, from acceptance to response."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ...errors import PilotflameError
from ..telemetry.timeline import Activation, Timeline

NORMAL, LAST = 3, 5
"""Priorities: the default, and the one of invocations that can wait. 1 is served first."""


class Output(NamedTuple):
    """What the handler returned, encoded by the worker; nothing on the way decodes it."""

    payload: bytes
    content_type: str


class Stream:
    """The pieces of a streamed output on their way to the caller, bounded by the worker's credit."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._arrived = asyncio.Event()
        self._closed = False
        self._grant: Callable[[int], None] | None = None

    @property
    def ready(self) -> bool:
        """True if `take` returns at once."""
        return bool(self._pieces) or self._closed

    def connect(self, grant: Callable[[int], None]) -> None:
        """Call `grant` with how many more pieces the worker may send, from now on."""
        self._grant = grant

    def put(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._arrived.set()

    def close(self) -> None:
        self._closed = True
        self._arrived.set()

    async def take(self) -> list[bytes]:
        """Wait for pieces and return all that have arrived; an empty list at the end. Safe to cancel."""
        while not self._pieces:
            if self._closed:
                return []
            self._arrived.clear()
            await self._arrived.wait()
        pieces, self._pieces = self._pieces, []
        return pieces

    def consumed(self, count: int) -> None:
        """The reader has `count` of the taken pieces: let the worker send as many more."""
        if self._grant is not None:
            self._grant(count)


class Invocation:
    """A request, which never changes, and the state of its execution, which only the dispatcher changes.

    It ends once: with an output, with an error, or abandoned by its caller. The first end counts.
    """

    __slots__ = (
        "_cold", "accept", "attempt", "batch_size", "body", "content_type", "deadline_s", "ended",
        "execution_deadline_s", "execution_s", "extra", "hold_until_s", "id", "max_batch", "on_end",
        "on_progress", "on_sent", "output", "patient", "priority", "stream", "tenant", "timeline",
        "timeout_s", "traceparent", "worker",
    )  # fmt: skip

    def __init__(
        self, invocation_id: str, body: bytes, *, now_s: float, deadline_s: float, hold_until_s: float,
        content_type: str = "", accept: str = "", traceparent: str = "", streaming: bool = False,
        extra: Mapping[str, Any] | None = None, execution_s: float | None = None, tenant: str = "",
        priority: int = NORMAL, on_sent: Callable[[], None] | None = None,
        on_progress: Callable[[bytes], None] | None = None, on_end: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """Times are in monotonic seconds.

        :param deadline_s: when it must have ended; with `execution_s`, when it must have been sent.
        :param hold_until_s: until when it may wait while no worker is ready.
        :param execution_s: the time it has once it is sent, as a stored job has. Until then it is patient: it
            is not refused for being late.
        :param accept: the media types that the caller wants; "" for any.
        :param extra: JSON that the handler finds in `context.extra`.
        :param tenant: shares the workers fairly with other tenants.
        :param priority: is served before others with a higher number; 1 is first.
        :param on_sent: is called each time it is sent to a worker.
        :param on_progress: is called with each progress report, as JSON.
        :param on_end: is called at once when it has an output or an error; not if it was abandoned.
        """
        # The request.
        self.id = invocation_id
        self.body = body
        self.content_type = content_type
        self.accept = accept
        self.traceparent = traceparent
        self.extra = extra
        self.hold_until_s = hold_until_s
        self.timeout_s = deadline_s - now_s
        self.execution_s = execution_s
        self.patient = execution_s is not None
        self.tenant = tenant
        self.priority = priority
        self.on_sent = on_sent
        self.on_progress = on_progress
        self.on_end = on_end
        # The state.
        self.output: asyncio.Future[Output] = asyncio.get_running_loop().create_future()
        self.stream = Stream() if streaming else None
        self.timeline = Timeline(now_s)
        self.ended = False
        self.deadline_s = deadline_s
        self.execution_deadline_s = math.inf
        """When the present call of the handler has taken too long; infinity while no worker has it."""
        self.attempt = 1
        self.max_batch = 0
        """The size of the largest batch it may run in; 0 for no limit."""
        self.batch_size = 1
        """How many were sent to its worker together, itself included."""
        self.worker = ""
        """The name of the worker that has it, or had it when it ended."""
        self._cold = False

    @property
    def sent_s(self) -> float:
        return self.timeline.sent_s

    def head(self, now_s: float, more: int = 0) -> dict[str, Any]:
        """Return what the worker gets beside the body; `more` invocations of its batch follow."""
        head: dict[str, Any] = {"id": self.id, "remaining_s": self.deadline_s - now_s}
        if more:
            head["more"] = more
        if self.attempt > 1:
            head["attempt"] = self.attempt
        if self.content_type:
            head["type"] = self.content_type
        if self.accept:
            head["accept"] = self.accept
        if self.traceparent:
            head["traceparent"] = self.traceparent
        if self.extra:
            head["extra"] = self.extra
        return head

    # -- transitions, in the order in which they happen; called by the dispatcher

    def mark_queued(self, *, cold: bool) -> None:
        """It waits; `cold` if no worker is ready."""
        self._cold = cold

    def mark_sent(self, worker: str, batch_size: int, now_s: float, activation: Activation) -> None:
        self.worker, self.batch_size = worker, batch_size
        waited = self._cold and activation.ready_s > self.timeline.received_s
        self.timeline.mark_sent(now_s, activation if waited else None)
        if self.execution_s is not None:
            self.deadline_s = now_s + self.execution_s

    def limit_execution(self, deadline_s: float) -> None:
        self.execution_deadline_s = deadline_s

    def mark_requeued(self) -> None:
        """Its worker did not run it, or died: it waits for another."""
        self.worker, self.execution_deadline_s = "", math.inf
        if self.execution_s is not None:
            self.deadline_s = self.hold_until_s

    def mark_repeated(self) -> None:
        """It runs again; alone, if it ran in a batch that killed its worker."""
        self.attempt += 1
        if self.batch_size > 1:
            self.max_batch = self.batch_size = 1

    def resolve(self, output: Output) -> None:
        if self._end():
            self.output.set_result(output)
            if self.on_end is not None:
                self.on_end()

    def fail(self, error: PilotflameError) -> None:
        if self._end():
            self.output.set_exception(error)
            # Mark it as retrieved: if the caller has gone, asyncio must not warn about it.
            self.output.exception()
            if self.on_end is not None:
                self.on_end()

    def abandon(self) -> None:
        """The caller no longer waits."""
        if self._end():
            self.output.cancel()

    def _end(self) -> bool:
        if self.ended:
            return False
        self.ended = True
        if self.stream is not None:
            self.stream.close()
        return not self.output.done()
