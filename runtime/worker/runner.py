"""Runs the invocations of one worker: what runners on threads and on the event loop have in common.

Invocations come in groups: the batch that the gateway formed for a batch handler, or a single invocation.
Runners start groups in order of arrival and send what has finished before they start the next. When a worker
crashes, the gateway therefore knows that its oldest groups are those that had started.
"""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
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
from ...handlers.failure import OUT_OF_MEMORY_REMEDY, explain, is_out_of_memory
from ...handlers.handler import Handler
from ..batching.prefetch import window
from ..link.connection import JOIN_BYTES, Link
from ..link.frames import HEADER, FrameKind, Timing, encode, encode_json
from ..link.stream_credit import Credit

SMOOTHING = 0.2


class Call:
    """One invocation inside a worker. `credit` is for streams; `event` and `cost` are set for batch handlers.

    `task` is what runs the call of an async handler, and `peers` are the invocations in that call.
    """

    __slots__ = ("accept", "body", "cancellation", "channel", "content_type", "context", "cost", "credit",
                 "event", "peers", "received_s", "task")  # fmt: skip

    def __init__(
        self, channel: int, body: bytes, content_type: str, context: Context, cancellation: Cancellation,
        accept: str = "", credit: Credit | None = None,
    ) -> None:  # fmt: skip
        self.channel = channel
        self.body = body
        self.content_type = content_type
        self.context = context
        self.cancellation = cancellation
        self.accept = accept
        self.credit = credit
        self.received_s = time.monotonic()
        self.event: Any = None
        self.cost = 1.0
        self.task: asyncio.Task[Any] | None = None
        self.peers: Sequence[Call] = ()

    def set_task(self, task: asyncio.Task[Any] | None, peers: Sequence[Call] = ()) -> None:
        self.task, self.peers = task, peers

    def set_event(self, event: Any, cost: float) -> None:
        self.event, self.cost = event, cost

    def drop_event(self) -> None:
        self.event = None


class Runner(ABC):
    """Runs calls of one handler and sends their frames."""

    def __init__(
        self, handler: Handler, root: Path, link: Link, concurrency: int, on_idle: Callable[[], None]
    ) -> None:
        """`on_idle` is called once everything has ended after `close`."""
        self.handler = handler
        self._root = root
        self._link = link
        self._concurrency = concurrency
        self._on_idle = on_idle
        self._exec_s: float | None = None
        self._calls: dict[int, Call] = {}
        self._incomplete: list[Call] = []
        self._lock = threading.Lock()
        self.slots = self.window = concurrency
        # Smaller once the memory did not suffice for as many events in one call.
        self.limit = handler.batch.max_size if handler.batch else 1

    def submit(self, call: Call, more: int = 0) -> None:
        """Queue a call. Of a batch handler, queue its group once `more` is 0.

        Loop thread only, as everything except what happens while a group runs.
        """
        self._calls[call.channel] = call
        if self.handler.batch is None:
            self.enqueue([call])
            return
        self._incomplete.append(call)
        if not more:
            group, self._incomplete = self._incomplete, []
            self.enqueue(group)

    def cancel(self, channel: int) -> None:
        """Mark a call whose caller went away. It is dropped if it has not started."""
        if (call := self._calls.get(channel)) is not None:
            call.cancellation.flag = True
            if call.credit is not None:
                call.credit.close()

    def grant(self, channel: int, count: int) -> None:
        """The reader of a stream has received `count` chunks."""
        if (call := self._calls.get(channel)) is not None and call.credit is not None:
            call.credit.grant(count)

    def close(self) -> list[Call]:
        """Take nothing new, and return the calls that never started."""
        incomplete, self._incomplete = self._incomplete, []
        return self.stop() + incomplete

    @abstractmethod
    def enqueue(self, group: list[Call]) -> None:
        """Add a group to the queue."""

    @abstractmethod
    def stop(self) -> list[Call]:
        """Close the queue, and return the calls in it."""

    def resize(self, concurrency: int) -> None:  # noqa: B027  for async handlers only
        """Run `concurrency` calls at the same time, if the handler is async. Loop thread only."""

    def forget(self, group: list[Call]) -> None:
        for call in group:
            self._calls.pop(call.channel, None)

    def send(self, frames: list[bytes]) -> None:
        """Send frames, in one system call if they are small."""
        if len(frames) > 1 and sum(map(len, frames)) <= JOIN_BYTES:
            self._link.send_encoded(b"".join(frames))
        elif frames:
            self._link.send_encoded(*frames)

    # -- what the gateway needs to know

    def next_call_frame(self, call: Call) -> bytes:
        """Return the frame that reports one more call of the handler, for the group of `call`."""
        return encode_json(FrameKind.WINDOW, 0, {"window": self.window, "call": call.channel})

    def set_first_limit(self, limit: int) -> None:
        """Set the limit that READY reports."""
        self.limit = limit

    def shrink(self, size: int) -> None:
        """Halve the limit: memory did not suffice for `size` events in one call."""
        with self._lock:
            self._set_limit(max(1, min(self.limit, size) // 2))

    def regrow(self, limit: int) -> None:
        """Restore the limit: one event alone is too large for the memory, so the limit is not the cause."""
        with self._lock:
            if self.limit < limit:
                self._set_limit(limit)

    def _set_limit(self, limit: int) -> None:
        self.limit = limit
        self._link.send(FrameKind.WINDOW, 0, orjson.dumps({"window": self.window, "limit": limit}))

    def _update_window(self, exec_s: float) -> None:
        """Follow how long a call takes, and ask the gateway for more or fewer calls at a time."""
        known = self._exec_s
        self._exec_s = exec_s if known is None else known + SMOOTHING * (exec_s - known)
        wanted = window(self._concurrency, self._exec_s)
        if wanted != self.window:
            self.window = wanted
            self._link.send(FrameKind.WINDOW, 0, orjson.dumps({"window": wanted}))

    # -- in: from calls to arguments

    def decode(self, group: list[Call]) -> tuple[list[Call], list[Any], list[bytes]]:
        """Return (calls to run, their events, frames for the others: cancelled or of bad input)."""
        calls, events, frames = [], [], []
        for call in group:
            if call.cancellation.flag:
                gone = Cancelled("The caller went away before the handler started.")
                frames.append(self.error_frame(call, gone))
                continue
            try:
                events.append(self.handler.input.decode(call.body, call.content_type))
                calls.append(call)
            except Exception as error:  # noqa: BLE001  the user's validators run here
                frames.append(self.error_frame(call, self.describe(error)))
        return calls, events, frames

    def arguments(self, calls: list[Call], events: list[Any]) -> tuple[Any, ...]:
        """Return the arguments of the handler."""
        if self.handler.batch is None:
            return self.handler.arguments(calls[0].context, events[0])
        return self.handler.arguments(Context.of_batch([call.context for call in calls]), events)

    # -- out: from answers to frames

    def result_frames(self, calls: list[Call], answer: Any, started_s: float) -> list[bytes]:
        """Return the RESULT and ERROR frames of calls that ran together. Raise OutputInvalid."""
        ended_s = time.monotonic()
        if self.handler.batch is None:
            self._update_window(ended_s - started_s)
        frames = []
        for call, item in zip(calls, self.handler.answers(answer, len(calls)), strict=True):
            timing = Timing(started_s - call.received_s, ended_s - started_s, len(calls), call.cost)
            frames.append(self._result_frame(call, item, timing))
        return frames

    def _result_frame(self, call: Call, item: Any, timing: Timing) -> bytes:
        if isinstance(item, BaseException):
            return self.error_frame(call, self.describe(item))
        try:
            payload, content_type = self.handler.output.encode(item, call.accept)
        except Exception as error:  # noqa: BLE001  the user's serializers run here
            return self.error_frame(call, self.describe(error))
        head = timing.pack() if content_type == JSON_TYPE else timing.pack() + content_type.encode()
        return encode(FrameKind.RESULT, call.channel, head, payload)

    def chunk_frame(self, call: Call, value: Any) -> tuple[bytes, int]:
        """Return the frame of one chunk, and its size for the stream's credit. Raise OutputInvalid."""
        payload, content_type = self.handler.output.encode(value)
        if content_type != JSON_TYPE:
            raise OutputInvalid(
                "The chunks of a streamed answer must be JSON, this one is bytes.",
                remedy="Yield strings, or decode the bytes.",
            )
        frame = encode(FrameKind.CHUNK, call.channel, b"", payload)
        return frame, len(frame) - HEADER.size

    def end_frame(self, call: Call, started_s: float) -> bytes:
        timing = Timing(started_s - call.received_s, time.monotonic() - started_s)
        return encode(FrameKind.END, call.channel, timing.pack())

    def failure_frames(self, calls: list[Call], error: BaseException) -> list[bytes]:
        described = self.describe(error)
        return [self.error_frame(call, described) for call in calls]

    def error_frame(self, call: Call, error: PilotflameError) -> bytes:
        try:
            return encode_json(FrameKind.ERROR, call.channel, error.to_wire())
        except TypeError:
            # The text has half a surrogate pair, or the details are no JSON. Send what can be sent.
            plain = {
                "type": error.code,
                "message": _encodable(error.message),
                "remedy": _encodable(error.remedy),
            }
            return encode_json(FrameKind.ERROR, call.channel, plain)

    def describe(self, error: BaseException, what: str = "The handler") -> PilotflameError:
        """Return the error for the caller, of what the handler or other user code raised."""
        if isinstance(error, (BadInput, HandlerFailed, InputInvalid, OutputInvalid)):
            return error
        if isinstance(error, SnapshotError):
            # The handler was waiting for weights that do not arrive. It did not fail.
            return ActivationFailed(
                f"The weights are not whole: {error.message}",
                remedy=error.remedy,
                details={**error.details, "cause": error.code},
            )
        remedy = OUT_OF_MEMORY_REMEDY if is_out_of_memory(error) else ""
        return explain(HandlerFailed, what, error, self._root, remedy=remedy)


def _encodable(text: str) -> str:
    return str(text).encode("utf-8", "replace").decode()
