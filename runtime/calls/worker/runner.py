"""Defines the base class of runners, which run the invocations of one worker on threads or on the event loop.

Invocations come in groups. A group is the batch that the gateway formed for a batch handler, or one invocation of
another handler. Runners start groups in order of arrival and send the results of a group before they start another in
its place. So when a worker with n slots crashes, the gateway knows that only the n oldest unfinished groups can have
started.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ....errors import (
    ActivationFailed,
    BadInput,
    Cancelled,
    EngineStopped,
    HandlerFailed,
    InputInvalid,
    InputTooLarge,
    NoSuchSnapshot,
    OutputInvalid,
    Overloaded,
    PackageMissing,
    PilotflameError,
    SnapshotChanged,
    SnapshotError,
    SnapshotMismatch,
)
from ....handlers.arrays import TENSORS_TYPE
from ....handlers.caller import NO_ORIGIN, CallOrigin
from ....handlers.codec import JSON_TYPE
from ....handlers.contract import Cancellation, Context
from ....handlers.failure import OUT_OF_MEMORY_REMEDY, cut, explain, is_out_of_memory
from ....handlers.handler import Handler
from ..batching.prefetch import window
from ..link.connection import JOIN_BYTES, Link
from ..link.frames import HEADER, MAX_PAYLOAD_BYTES, FrameKind, Timing, check_output, encode, encode_json
from ..link.stream_credit import Credit
from .devices import may_be_of_device
from .exchange import WorkerExchange

# The weight of the newest duration in the moving average of durations.
SMOOTHING = 0.2
# These are faults of the handler or of its settings. Other errors of snapshots say that bytes are missing.
OF_HANDLERS = (NoSuchSnapshot, PackageMissing, SnapshotMismatch)


@dataclass(eq=False, slots=True)
class Call:
    """One invocation inside a worker. Only streams use `credit`. Only batch handlers use `event` and `cost`.

    `task` is the task that runs an async handler. `peers` are all invocations in the same handler call of a
    batch handler, including this one.
    """

    channel: int
    body: bytes
    content_type: str
    context: Context
    cancellation: Cancellation
    accept: str = ""
    credit: Credit | None = None
    execution_s: float | None = None
    """The time limit of a job's handler call, from its start."""
    exchange: WorkerExchange | None = None
    """The pieces that the handler and the caller exchange; None in most calls."""
    origin: CallOrigin = NO_ORIGIN
    received_s: float = field(default_factory=time.monotonic, init=False)
    event: Any = field(default=None, init=False)
    cost: float = field(default=1.0, init=False)
    task: asyncio.Task[Any] | None = field(default=None, init=False)
    peers: Sequence[Call] = field(default=(), init=False)

    def start(self, now_s: float) -> None:
        if self.execution_s is not None:
            self.context.limit(now_s + self.execution_s)

    def set_task(self, task: asyncio.Task[Any] | None, peers: Sequence[Call] = ()) -> None:
        self.task, self.peers = task, peers

    def set_event(self, event: Any, cost: float) -> None:
        self.event, self.cost = event, cost


class CallObserver(Protocol):
    """Watches the handler calls of a worker, for a plugin of the gateway (`WorkerSpec.observers`)."""

    def begin(self, contexts: Sequence[Context]) -> None:
        """The handler is called next for the invocations with these contexts, on this thread or in this task."""

    def close(self) -> None:
        """The worker has drained, and its process ends after this call. It must return within a few seconds."""


@dataclass(eq=False)
class Runner(ABC):
    """Runs the invocations of one handler, whose files are in `root`, and sends their frames.

    The runner calls `on_idle` after `close`, once all running groups have ended. `probe` blocks until it knows whether
    the devices still work. If a call has failed with an error that a device may have caused, the runner calls `probe`
    before it sends the answers. `check` raises SnapshotChanged if the weights have changed since the deploy. The
    runner calls it before and after each call of the handler, and before it sends a chunk.
    """

    handler: Handler
    root: Path
    link: Link
    concurrency: int
    on_idle: Callable[[], None]
    probe: Callable[[], None] = field(default=lambda: None, kw_only=True)
    check: Callable[[], None] = field(default=lambda: None, kw_only=True)
    observers: Sequence[CallObserver] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        self._streaming = self.handler.kind.streaming
        self._exec_s: float | None = None
        self._calls: dict[int, Call] = {}
        self._incomplete: list[Call] = []
        self._lock = threading.Lock()
        self.suspicious = False
        """True if a call has failed with an error that a device or other weights may have caused."""
        self.slots = self.window = self.concurrency
        # The largest number of events in one handler call. It is lowered when memory runs out.
        self.limit = self.handler.batch.max_size if self.handler.batch else 1

    def submit(self, call: Call, more: int = 0) -> None:
        """Queue an invocation. For a batch handler, collect it, and queue its group once `more` is 0.

        `more` is the number of invocations of the group that follow. Call this on the event loop's thread only, like
        all methods that are not part of running a group.
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
        """Mark an invocation whose caller went away. If it has not started, the handler is not called."""
        if (call := self._calls.get(channel)) is not None:
            call.cancellation.flag = True
            if call.credit is not None:
                call.credit.close()
            if call.exchange is not None:
                call.exchange.close()

    def grant(self, channel: int, count: int) -> None:
        """Record that the reader of a stream has received `count` chunks."""
        if (call := self._calls.get(channel)) is not None:
            if call.credit is not None:
                call.credit.grant(count)
            if call.exchange is not None:
                call.exchange.grant(count)

    def feed(self, channel: int, piece: bytes, *, last: bool) -> None:
        """Add a piece of the input of an invocation whose handler exchanges pieces with its caller."""
        if (call := self._calls.get(channel)) is not None and call.exchange is not None:
            call.exchange.put(piece, last=last)

    def close(self) -> list[Call]:
        """Start no more groups, and return the invocations that were never started."""
        return self.stop() + self._incomplete

    def probe_if_suspected(self) -> None:
        """Call `probe` if a call has failed with an error that a device or other weights may have caused."""
        if self.suspicious:
            self.suspicious = False
            self.probe()

    @abstractmethod
    def enqueue(self, group: list[Call]) -> None:
        """Add a group to the queue."""

    def give_back(self) -> list[Call]:
        """Return the invocations that wait for a slot. They run on another worker."""
        left = self.empty()
        self.forget(left)
        return left

    @abstractmethod
    def empty(self) -> list[Call]:
        """Empty the queue, and return the invocations in it."""

    @abstractmethod
    def stop(self) -> list[Call]:
        """Close the queue, and return the invocations in it."""

    def resize(self, concurrency: int) -> None:  # noqa: B027  for async handlers only
        """Run `concurrency` groups at a time, if the handler is async."""

    def forget(self, group: list[Call]) -> None:
        for call in group:
            self._calls.pop(call.channel, None)

    def send(self, frames: list[bytes]) -> None:
        """Send frames, in one system call if they are small."""
        if len(frames) > 1 and sum(map(len, frames)) <= JOIN_BYTES:
            self.link.send_encoded(b"".join(frames))
        elif frames:
            self.link.send_encoded(*frames)

    def set_first_limit(self, limit: int) -> None:
        """Set the limit before READY is sent, so that READY reports it."""
        self.limit = limit

    def shrink(self, size: int) -> None:
        """Halve the limit, because memory did not suffice for `size` events in one handler call."""
        with self._lock:
            self._set_limit(max(1, min(self.limit, size) // 2))

    def regrow(self, limit: int) -> None:
        """Raise the limit back to `limit`: one event alone was too large, so smaller batches do not help."""
        with self._lock:
            if self.limit < limit:
                self._set_limit(limit)

    def _set_limit(self, limit: int) -> None:
        self.limit = limit
        self.link.send_json(FrameKind.WINDOW, 0, {"window": self.window, "limit": limit})

    def _update_window(self, exec_s: float) -> None:
        """Update the average duration, and tell the gateway if the window changes with it."""
        if self.handler.exchanges:
            return
        known = self._exec_s
        self._exec_s = exec_s if known is None else known + SMOOTHING * (exec_s - known)
        wanted = window(self.concurrency, self._exec_s)
        if wanted != self.window:
            self.window = wanted
            self.link.send_json(FrameKind.WINDOW, 0, {"window": wanted})

    def tell_observers(self, calls: list[Call]) -> None:
        """Tell the observers that the handler is called next for `calls`, on this thread or in this task."""
        for observer in self.observers:
            observer.begin([call.context for call in calls])

    @staticmethod
    def started(calls: list[Call]) -> float:
        """Return the time at which the handler is called. The time limits of jobs start at this time."""
        now_s = time.monotonic()
        for call in calls:
            call.start(now_s)
        return now_s

    def decode(self, group: list[Call]) -> tuple[list[Call], list[Any], list[bytes]]:
        """Return the invocations to run, their events, and error frames for cancelled and invalid invocations."""
        calls, events, frames = [], [], []
        for call in group:
            if call.cancellation.flag:
                frames.append(self.error_frame(call, Cancelled("The caller went away before the handler started.")))  # fmt: skip
                continue
            try:
                events.append(self.handler.input.decode(call.body, call.content_type))
                calls.append(call)
            except Exception as error:  # noqa: BLE001  the user's validators run here
                frames.append(self.error_frame(call, self.describe(error)))
        return calls, events, frames

    def result_frames(self, calls: list[Call], answer: Any, started_s: float) -> list[bytes]:
        """Return a RESULT or ERROR frame for each of `calls`, which ran in one handler call.

        Raise OutputInvalid if a batch handler did not return one answer per event.
        """
        ended_s = time.monotonic()
        if self.handler.batch is None:
            self._update_window(ended_s - started_s)
        return [
            self._result_frame(call, item, Timing(started_s - call.received_s, ended_s - started_s, len(calls), call.cost))
            for call, item in zip(calls, self.handler.answers(answer, len(calls)), strict=True)
        ]  # fmt: skip

    def _result_frame(self, call: Call, item: Any, timing: Timing) -> bytes:
        if isinstance(item, BaseException):
            return self.error_frame(call, self.describe(item))
        try:
            payload, content_type = self.handler.output.encode(item, call.accept)
            check_output(payload)
        except Exception as error:  # noqa: BLE001  the user's serializers run here
            return self.error_frame(call, self.describe(error))
        head = timing.pack() if content_type == JSON_TYPE else timing.pack() + content_type.encode()
        return encode(FrameKind.RESULT, call.channel, head, payload)

    def chunk_frame(self, call: Call, value: Any) -> tuple[bytes, int]:
        """Return the frame of a chunk, and the size that counts against the credit. Raise OutputInvalid if it is neither
        JSON nor tensors, or too large.
        """
        accept = call.accept if call.accept.startswith(TENSORS_TYPE) else ""
        payload, content_type = self.handler.output.encode(value, accept)
        if content_type.startswith(TENSORS_TYPE):
            # A frame of a chunk has no head, so the content type and a line feed come before tensors.
            payload = b"%s\n%s" % (content_type.encode(), payload)
        elif content_type != JSON_TYPE:
            raise OutputInvalid("A chunk of a stream must be JSON, not bytes.", remedy="Decode the bytes.")
        check_output(payload)
        frame = encode(FrameKind.CHUNK, call.channel, b"", payload)
        return frame, len(frame) - HEADER.size

    def end_frame(self, call: Call, started_s: float) -> bytes:
        timing = Timing(started_s - call.received_s, time.monotonic() - started_s)
        return encode(FrameKind.END, call.channel, timing.pack())

    def failure_frames(self, calls: list[Call], error: BaseException) -> list[bytes]:
        described = self.describe(error)
        if isinstance(error, EngineStopped):
            calls[0].context.retire()
        return [self.error_frame(call, described) for call in calls]

    def error_frame(self, call: Call, error: PilotflameError) -> bytes:
        with contextlib.suppress(TypeError):
            frame = encode_json(FrameKind.ERROR, call.channel, error.to_wire(private=True))
            if len(frame) <= MAX_PAYLOAD_BYTES:
                return frame
        # The frame is too large, a text has half a surrogate pair, or the details are not JSON. Repair texts and omit
        # details.
        texts = {"type": error.code, "message": error.message, "remedy": error.remedy}
        plain = {name: cut(str(text)).encode("utf-8", "replace").decode() for name, text in texts.items()}
        return encode_json(FrameKind.ERROR, call.channel, plain)

    def describe(self, error: BaseException, what: str = "The handler") -> PilotflameError:
        """Return the error that the caller gets for an exception of user code. `what` names that code."""
        self.suspicious = self.suspicious or may_be_of_device(error) or isinstance(error, SnapshotChanged)
        if isinstance(error, (BadInput, HandlerFailed, InputInvalid, InputTooLarge, OutputInvalid, Overloaded)):  # fmt: skip
            return error
        if isinstance(error, SnapshotError) and not isinstance(error, OF_HANDLERS):
            return not_whole(error)
        remedy = OUT_OF_MEMORY_REMEDY if is_out_of_memory(error) else ""
        return explain(HandlerFailed, what, error, self.root, remedy=remedy)


def not_whole(error: SnapshotError) -> ActivationFailed:
    """Return the error for weights that could not be fetched or read: no code of the function has failed."""
    message, details = f"The weights are not whole: {error.message}", {"cause": error.code}
    return ActivationFailed(message, remedy=error.remedy, details=error.details | details)
