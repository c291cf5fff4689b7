"""Defines the base class of runners, which run the invocations of one worker on threads or on the event loop.

Invocations come in groups. A group is the batch that the gateway formed for a batch handler, or one invocation of
another handler. Runners start groups in order of arrival and send the results of a group before they start another in
its place. So when a worker with n slots crashes, the gateway knows that only the n oldest unfinished groups can have
started.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ....handlers.contract import Context
from ....handlers.handler import Handler
from ..link.connection import JOIN_BYTES, Link
from .answers import Answers
from .call import Call
from .limits import Limits


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
        self._calls: dict[int, Call] = {}
        self._incomplete: list[Call] = []
        self.answers = Answers(self.handler, self.root)
        self.limits = Limits(self.handler, self.link, self.concurrency)

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
        if self.answers.suspicious:
            self.answers.suspicious = False
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
