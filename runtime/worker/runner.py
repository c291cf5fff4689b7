"""The runner: executes a worker's invocations. What is common to those on threads and those on the event loop.

Invocations come in groups: one of a batch handler is what the gateway gathered for it, one of any other is a single
call. After a crash it must be known which invocations never ran. Both kinds of runner start groups in order of arrival
and send what has finished before they start what follows, so the oldest groups at a worker are those that run.
"""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Set, Sized
from pathlib import Path
from typing import Any

import orjson

from ...errors import (
    ActivationFailed,
    BadInput,
    Cancelled,
    HandlerFailed,
    InputInvalid,
    OutputInvalid,
    PilotflameError,
    SnapshotError,
)
from ...handlers.codec import JSON_TYPE
from ...handlers.contract import Cancellation, Context
from ...handlers.failure import explain
from ...handlers.handler import Handler
from ..batching.prefetch import window
from ..link.link import HEADER, JOIN_BYTES, FrameKind, Link, Timing, encode, encode_json
from ..link.stream_credit import Credit
from .exhaustion import REMEDY, exhausted

SMOOTHING = 0.2
# They have a length, but are no answers in order.
ONE_VALUE = (str, bytes, bytearray, Mapping, Set)


class Call:
    """One invocation inside a worker."""

    __slots__ = ("accept", "body", "cancellation", "channel", "company", "content_type", "context", "cost", "credit",
                 "event", "received_s", "task")  # fmt: skip

    def __init__(
        self,
        channel: int,
        body: bytes,
        content_type: str,
        context: Context,
        cancellation: Cancellation,
        accept: str = "",
    ) -> None:
        self.channel = channel
        self.body = body
        self.content_type = content_type
        self.context = context
        self.cancellation = cancellation
        self.accept = accept
        self.received_s = time.monotonic()
        self.event: Any = None  # of a batch, once it was decoded
        self.cost = 1.0
        self.credit: Credit | None = None
        self.task: asyncio.Task[None] | None = None
        self.company: Sequence[Call] = ()  # who is in the same call of a batch handler, itself among them


class Runner(ABC):
    """Runs calls of one handler and writes their frames."""

    def __init__(
        self, handler: Handler, root: Path, link: Link, concurrency: int, on_idle: Callable[[], None]
    ) -> None:
        self.handler = handler
        self._root = root
        self._link = link
        self._concurrency = concurrency
        self._on_idle = on_idle
        self._exec_s: float | None = None
        self._calls: dict[int, Call] = {}
        self._coming: list[Call] = []
        self._lock = threading.Lock()
        self.limit = (
            handler.batch.max_size if handler.batch else 1
        )  # less, once memory did not suffice for as many
        self.slots = self.window = concurrency

    def submit(self, call: Call, more: int = 0) -> None:
        """Queues a call; of a batch handler, once no `more` of its group are to come.

        Loop thread only, as all but what happens while a group runs.
        """
        self._calls[call.channel] = call
        if self.handler.batch is None:
            self.enqueue([call])
            return
        self._coming.append(call)
        if not more:
            group, self._coming = self._coming, []
            self.enqueue(group)

    def cancel(self, channel: int) -> None:
        """Nobody waits for this call any more: it is dropped if it has not started, and told if it has."""
        if (call := self._calls.get(channel)) is not None:
            call.cancellation.flag = True
            if call.credit is not None:
                call.credit.close()  # wakes a generator that waits for its reader

    def grant(self, channel: int, count: int) -> None:
        """The reader of a streamed answer has taken `count` chunks."""
        if (call := self._calls.get(channel)) is not None and call.credit is not None:
            call.credit.grant(count)

    def close(self) -> list[Call]:
        """Takes nothing more; returns the calls that never started. `on_idle` is called once the last has ended."""
        coming, self._coming = self._coming, []
        return self.stop() + coming

    @abstractmethod
    def enqueue(self, group: list[Call]) -> None:
        """Takes a group into the queue."""

    @abstractmethod
    def stop(self) -> list[Call]:
        """Ends the queue; returns the calls of the groups in it."""

    def resize(self, concurrency: int) -> None:  # noqa: B027  a thread's handler was not written for company
        """From now on so many at the same time, if the handler is async. Loop thread only."""

    def forget(self, group: list[Call]) -> None:
        """These are answered."""
        for call in group:
            self._calls.pop(call.channel, None)

    def send(self, frames: list[bytes]) -> None:
        """Sends them in one system call, if they are small."""
        if len(frames) > 1 and sum(map(len, frames)) <= JOIN_BYTES:
            self._link.send_encoded(b"".join(frames))
        elif frames:
            self._link.send_encoded(*frames)

    def repeats(self, call: Call) -> bytes:
        """The frame that says that the handler is called once more for the same group, for `call` among others."""
        return encode_json(FrameKind.WINDOW, 0, {"window": self.window, "call": call.channel})

    def shrink(self, size: int) -> None:
        """Memory did not suffice for `size` events in one call: from now on half of that, and the gateway knows."""
        with self._lock:
            self._limit_to(max(1, min(self.limit, size) // 2))

    def regrow(self, limit: int) -> None:
        """It was one event that memory did not suffice for: as many may run together again as before it."""
        with self._lock:
            if self.limit < limit:
                self._limit_to(limit)

    def _limit_to(self, limit: int) -> None:
        self.limit = limit
        self._link.send(FrameKind.WINDOW, 0, orjson.dumps({"window": self.window, "limit": limit}))

    def failed(self, call: Call, error: PilotflameError) -> bytes:
        try:
            return encode_json(FrameKind.ERROR, call.channel, error.to_wire())
        except (
            TypeError
        ):  # a text with half a surrogate pair, details of some type: the caller still gets an answer
            plain = type(error).__new__(type(error))
            PilotflameError.__init__(plain, _writable(error.message), remedy=_writable(error.remedy))
            return encode_json(FrameKind.ERROR, call.channel, plain.to_wire())

    def describe(self, error: BaseException, what: str = "The handler") -> PilotflameError:
        """What the caller is told of an exception in the handler, or in what else of the user's."""
        if isinstance(error, (BadInput, HandlerFailed, InputInvalid, OutputInvalid)):
            return error
        if isinstance(
            error, SnapshotError
        ):  # weights that were to arrive while the handler ran: not its fault
            told = {**error.details, "cause": error.code}
            return ActivationFailed(
                f"The weights are not whole: {error.message}", remedy=error.remedy, details=told
            )
        remedy = REMEDY if exhausted(error) else ""
        return explain(HandlerFailed, what, error, self._root, remedy=remedy)

    def decode(self, group: list[Call]) -> tuple[list[Call], list[Any], list[bytes]]:
        """(calls that may run, their events, frames that answer the others: cancelled or of bad input)."""
        calls, events, frames = [], [], []
        for call in group:
            if call.cancellation.flag:
                frames.append(
                    self.failed(call, Cancelled("The caller went away before the handler started."))
                )
                continue
            try:
                events.append(self.handler.input.decode(call.body, call.content_type))
                calls.append(call)
            except Exception as error:  # noqa: BLE001  the user's own validators run here
                frames.append(self.failed(call, self.describe(error)))
        return calls, events, frames

    def arguments(self, calls: list[Call], events: list[Any]) -> tuple[Any, ...]:
        """What the handler is called with."""
        if self.handler.batch is None:
            context = calls[0].context
            return (events[0], context) if self.handler.takes_context else (events[0],)
        if not self.handler.takes_context:
            return (events,)
        contexts = [call.context for call in calls]
        first = contexts[0]
        joint = Context(
            first.function, first.revision, state=first.state, invocation_id=first.id, items=contexts
        )
        return events, joint

    def answers(self, calls: list[Call], answer: Any) -> list[Any]:
        """One answer a call. Raises OutputInvalid if a batch handler returned another number."""
        if self.handler.batch is None:
            return [answer]
        if not isinstance(answer, ONE_VALUE) and isinstance(answer, Sized) and isinstance(answer, Iterable):
            answer = list(answer)  # an array, say
        if not isinstance(answer, (list, tuple)) or len(answer) != len(calls):
            got = f"{len(answer)} answers" if isinstance(answer, (list, tuple)) else type(answer).__name__
            raise OutputInvalid(
                f"The batch handler was given {len(calls)} events and returned {got}.",
                remedy="Return a list with one answer for each event, in order.",
            )
        return list(answer)

    def results(self, calls: list[Call], answer: Any, started_s: float) -> list[bytes]:
        """The RESULT and ERROR frames of calls that ran together."""
        ended_s = time.monotonic()
        if self.handler.batch is None:
            self._learn(ended_s - started_s)
        frames = []
        for call, item in zip(calls, self.answers(calls, answer), strict=True):
            timing = Timing(started_s - call.received_s, ended_s - started_s, len(calls), call.cost)
            frames.append(self._result(call, item, timing))
        return frames

    def failures(self, calls: list[Call], error: BaseException) -> list[bytes]:
        told = self.describe(error)
        return [self.failed(call, told) for call in calls]

    def chunk(self, call: Call, value: Any) -> bytes:
        payload, content_type = self.handler.output.encode(value)
        if content_type != JSON_TYPE:
            raise OutputInvalid(
                "A streamed answer's pieces must be JSON, this one is bytes.",
                remedy="Yield strings, or decode the bytes.",
            )
        return encode(FrameKind.CHUNK, call.channel, b"", payload)

    def chunk_bytes(self, frame: bytes) -> int:
        """Of a piece, as its credit counts it."""
        return len(frame) - HEADER.size

    def end(self, call: Call, started_s: float) -> bytes:
        timing = Timing(started_s - call.received_s, time.monotonic() - started_s)
        return encode(FrameKind.END, call.channel, timing.pack())

    def _result(self, call: Call, item: Any, timing: Timing) -> bytes:
        if isinstance(item, BaseException):
            return self.failed(call, self.describe(item))
        try:
            payload, content_type = self.handler.output.encode(item, call.accept)
        except Exception as error:  # noqa: BLE001  the user's own serializers run here; the others' answers stand
            return self.failed(call, self.describe(error))
        head = timing.pack()
        if content_type != JSON_TYPE:
            return encode(FrameKind.RESULT, call.channel, head + content_type.encode(), payload)
        return encode(FrameKind.RESULT, call.channel, head, payload)

    def _learn(self, exec_s: float) -> None:
        """Follows how long a dispatch takes, and asks the gateway for more or less at a time."""
        known = self._exec_s
        self._exec_s = exec_s if known is None else known + SMOOTHING * (exec_s - known)
        wanted = window(self._concurrency, self._exec_s)
        if wanted != self.window:
            self.window = wanted
            self._link.send(FrameKind.WINDOW, 0, orjson.dumps({"window": wanted}))


def _writable(text: str) -> str:
    return str(text).encode("utf-8", "replace").decode()
