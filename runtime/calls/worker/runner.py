"""Defines the base class of runners, which run the invocations of one worker on threads or on the event loop.

Invocations come in groups. A group is the batch that the gateway formed for a batch handler, or one invocation of
another handler. Runners start groups in order of arrival and send the results of a group before they start another group
in the same slot. So when a worker with n slots crashes, the gateway knows that only the n oldest unfinished groups can have
started.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ....handlers.contract import Context
from ....handlers.handler import Handler
from ..batching.prefetch import window
from ..link.connection import JOIN_BYTES, Link
from ..link.frames import FrameKind, encode_json
from .answers import AnswerFrames
from .call import Call

# The weight of the newest duration in the moving average of durations.
SMOOTHING = 0.2


class CallObserver(Protocol):
    """Watches the handler calls of a worker, for a plugin of the gateway (`WorkerSpec.observers`)."""

    def begin(self, contexts: Sequence[Context]) -> None:
        """The handler is called next for the invocations with these contexts, on this thread or in this task."""

    def close(self) -> None:
        """The worker has drained, and its process ends after this call. The call must return within a few seconds."""


class WorkerLimits:
    """How many invocations a worker may have and run at a time, and how many events one handler call may have.

    READY reports the first limits, and WINDOW frames report changes.
    """

    def __init__(self, handler: Handler, link: Link, concurrency: int) -> None:
        self._handler, self._link = handler, link
        self._lock = threading.Lock()
        self._exec_s: float | None = None
        self.slots = self.window = concurrency
        self.limit = handler.batch.max_size if handler.batch else 1
        """The largest number of events in one handler call. It is lowered when memory runs out. READY reports its first value."""

    def shrink(self, size: int) -> None:
        """Halve the limit, because memory did not suffice for `size` events in one handler call."""
        with self._lock:
            self._set(max(1, min(self.limit, size) // 2))

    def regrow(self, limit: int) -> None:
        """Raise the limit back to `limit`: one event alone was too large, so smaller batches do not help."""
        with self._lock:
            if self.limit < limit:
                self._set(limit)

    def learn(self, concurrency: int, exec_s: float) -> list[bytes]:
        """Update the average duration of a call. If this changes the window, return the WINDOW frame for the gateway."""
        if self._handler.exchanges:
            return []
        known = self._exec_s
        self._exec_s = exec_s if known is None else known + SMOOTHING * (exec_s - known)
        wanted = window(concurrency, self._exec_s)
        if wanted == self.window:
            return []
        self.window = wanted
        return [encode_json(FrameKind.WINDOW, 0, {"window": wanted})]

    def resize(self, concurrency: int) -> None:
        """Let the gateway send as many invocations as `concurrency` groups at a time need."""
        # `slots` tells the gateway how many groups may have started. It never decreases: if this worker dies, only the
        # groups beyond that number run on another worker, so that no group runs twice.
        self.slots = max(self.slots, concurrency)
        whole = self._handler.batch is not None or self._handler.exchanges
        self.window = concurrency if whole else window(concurrency, self._exec_s)
        self._link.send_json(FrameKind.WINDOW, 0, {"window": self.window, "slots": self.slots})

    def _set(self, limit: int) -> None:
        self.limit = limit
        self._link.send_json(FrameKind.WINDOW, 0, {"window": self.window, "limit": limit})


@dataclass(eq=False)
class Runner(ABC):
    """Runs the invocations of one handler, whose files are in `root`, and sends their frames.

    The runner calls `on_idle` after `close`, once all running groups have ended. `probe` blocks until it knows whether
    the devices still work and the weights are unchanged. If one of them may have caused the error of a call, the runner
    calls `probe` before it sends the answers. `check` raises SnapshotChanged if the weights have changed since the deploy. The
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
        self._calls: dict[int, Call] = {}
        self._incomplete: list[Call] = []
        self.answers = AnswerFrames(self.handler, self.root)
        self.limits = WorkerLimits(self.handler, self.link, self.concurrency)

    def submit(self, call: Call, more: int = 0) -> None:
        """Queue an invocation. For a batch handler, collect it, and queue its group once `more` is 0.

        `more` is the number of invocations of the group that follow. Call this on the thread of the link's loop only. The
        same holds for `cancel`, `grant`, `feed`, `give_back`, `resize` and `close`.
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
        """Call `probe` if a call has failed with an error that a failed device or changed weights may have caused."""
        if self.answers.suspicious:
            self.answers.suspicious = False
            self.probe()

    @abstractmethod
    def enqueue(self, group: list[Call]) -> None:
        """Add a group to the queue."""

    def give_back(self) -> list[Call]:
        """Remove the invocations that wait for a slot, and return them. They run on another worker."""
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
