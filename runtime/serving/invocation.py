"""The invocation: one request's life, from accepted to answered, as the gateway sees it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ...errors import PilotflameError
from ..telemetry.timeline import Timeline

NORMAL, LAST = 3, 5
"""The priority of who asks for none, and of who can wait: 1 is served first."""


class Answer(NamedTuple):
    """What the handler answered: bytes that nobody on the way decoded."""

    payload: bytes
    content_type: str


def _ignore(_: object) -> None:
    return None


def _unheard() -> None:
    return None


class Stream:
    """The pieces of a streamed answer on their way to the caller; bounded by the credit the worker was given."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._arrived = asyncio.Event()
        self._closed = False
        self.on_taken: Callable[[int], None] = _ignore
        """Told how many more the worker may send."""

    @property
    def ready(self) -> bool:
        """Whether `take` has something at once, be it the end."""
        return bool(self._pieces) or self._closed

    def put(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._arrived.set()

    def close(self) -> None:
        self._closed = True
        self._arrived.set()

    async def take(self) -> list[bytes]:
        """All pieces that are here, once there is one; none at the end. Safe to cancel."""
        while not self._pieces:
            if self._closed:
                return []
            self._arrived.clear()
            await self._arrived.wait()
        pieces, self._pieces = self._pieces, []
        return pieces

    def passed(self, count: int) -> None:
        """So many of those taken have reached who reads: the worker may send as many more."""
        self.on_taken(count)


class Invocation:
    """A request on its way. Ends once: answered, failed or abandoned; whoever ends it first wins."""

    __slots__ = ("_ended", "accept", "answer", "attempt", "body", "companions", "company", "content_type", "deadline_s", "due_s", "execution_s", "extra",
                 "hold_until_s", "id", "on_answer", "on_progress", "on_sent", "overrun_s", "priority", "sheet", "stream", "tenant", "timeline", "timer", "traceparent",
                 "worker")  # fmt: skip

    def __init__(
        self,
        invocation_id: str,
        body: bytes,
        *,
        now_s: float,
        deadline_s: float,
        hold_until_s: float,
        content_type: str = "",
        traceparent: str = "",
        streaming: bool = False,
        extra: Mapping[str, Any] | None = None,
        on_progress: Callable[[bytes], None] = _ignore,
        execution_s: float | None = None,
        on_sent: Callable[[], None] | None = None,
        tenant: str = "",
        priority: int = NORMAL,
        accept: str = "",
    ) -> None:
        """`extra` is JSON that the handler finds in `context.extra`; `on_progress` hears each word of how far it is.

        With `execution_s`, `deadline_s` is how long it may wait: from when it is sent to a worker, it has so long.
        `on_sent` is called then, each time that is done. `tenant` is who shares the workers with others in fair turns,
        `priority` goes before that: 1 is served first. `accept` are the media types that the caller wants, "" for any.
        """
        self.id = invocation_id
        self.body = body
        self.content_type = content_type
        self.traceparent = traceparent
        self.extra = extra
        self.on_progress = on_progress
        self.deadline_s = deadline_s
        self.hold_until_s = hold_until_s
        self.execution_s = execution_s
        self.on_sent = on_sent
        self.tenant = tenant
        self.priority = priority
        self.accept = accept
        self.attempt = 1
        self.company = 0
        """With how many it may run together at most; 0: with as many as there is room for."""
        self.companions = 0
        """With how many others it was sent to its worker."""
        self.worker = ""
        self.timeline = Timeline(now_s)
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.stream = Stream() if streaming else None
        self.overrun_s = math.inf
        """When its call of the handler will have taken too long; infinity while no worker has it."""
        self.timer: asyncio.TimerHandle | None = None
        self.sheet: set[Invocation] | None = None
        self.due_s = 0.0
        self.on_answer: Callable[[], None] = _unheard
        """Called at once when there is an answer or an error, unless it was abandoned before."""
        self._ended = False

    @property
    def ended(self) -> bool:
        return self._ended

    def forget_alarm(self) -> None:
        """The alarm that was set for it (see alarms.py) does not ring."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        if self.sheet is not None:
            self.sheet.discard(self)
            self.sheet = None

    @property
    def timeout_s(self) -> float:
        """How long it had until its deadline when it came."""
        return self.deadline_s - self.timeline.received_s

    @property
    def patient(self) -> bool:
        """Whether it waits for as long as it takes: stored, it is not refused for being late."""
        return self.execution_s is not None

    def resolve(self, answer: Answer) -> None:
        if self._end():
            self.answer.set_result(answer)
            self.on_answer()

    def fail(self, error: PilotflameError) -> None:
        if self._end():
            self.answer.set_exception(error)
            self.answer.exception()  # seen: a caller that has gone must not leave a warning behind
            self.on_answer()

    def abandon(self) -> None:
        """Nobody waits for the answer any more."""
        if self._end():
            self.answer.cancel()

    def head(self, now_s: float, more: int = 0) -> dict[str, Any]:
        """What the worker is told beside the body; `more` of its group follow."""
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

    def _end(self) -> bool:
        if self._ended:
            return False
        self._ended = True
        self.forget_alarm()
        if self.stream is not None:
            self.stream.close()
        return not self.answer.done()
