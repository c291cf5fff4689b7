"""Lets equal calls wait for the output of the first call while the first call runs. The response cache decides which calls are equal."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

from .dispatcher import Dispatcher
from .invocation import Invocation

MOST_WAITING = 1024
"""The most calls that wait for one call. Further calls run."""


def _urgency(invocation: Invocation) -> tuple[int, float]:
    """Return the key by which the queue sorts the calls of one tenant, the most urgent first."""
    return invocation.priority, invocation.deadline_s


@dataclass(eq=False, slots=True)
class _SharedRun:
    """A call that runs or waits in the queue, and the equal calls that wait for it."""

    first: Invocation
    waiting: dict[Invocation, None] = field(default_factory=dict)

    def takes(self, invocation: Invocation) -> bool:
        """Return True if a call may wait for `first`. At most MOST_WAITING calls wait, and no call waits for a queued call that
        is less urgent than itself.
        """
        in_time = bool(self.first.worker) or _urgency(self.first) <= _urgency(invocation)
        return in_time and len(self.waiting) < MOST_WAITING


class EqualCalls:
    """The calls of a revision for which equal calls may wait. Equal calls have the same key."""

    def __init__(self, dispatcher: Dispatcher, queue: Callable[[Iterable[Invocation]], None]) -> None:
        """`queue` queues calls that the dispatcher has set aside."""
        self._dispatcher, self._queue = dispatcher, queue
        self._runs: dict[Hashable, _SharedRun] = {}

    def wait(self, key: Hashable, invocation: Invocation) -> bool:
        """Let a call wait for an equal call, and return True. Return False if it must run.

        A waiting call gets the output of the first call. If the handler fails, each waiting call runs. If the first call
        ends without an answer of the handler, the most urgent waiting call runs, and the others wait for it.
        """
        run = self._runs.get(key)
        if run is None or not run.takes(invocation):
            return False
        # Share the body, so that each waiting call takes little memory.
        invocation.body = run.first.body
        self._add(run, invocation)
        return True

    def start(self, key: Hashable, first: Invocation) -> None:
        """Let later equal calls wait for a submitted call, unless they wait for an earlier call with the same key."""
        if key not in self._runs:
            self._share(key, first)

    def _share(self, key: Hashable, first: Invocation) -> _SharedRun:
        run = self._runs[key] = _SharedRun(first)
        first.output.add_done_callback(lambda _: self._end(key, run))
        return run

    def _add(self, run: _SharedRun, invocation: Invocation) -> None:
        run.waiting[invocation] = None
        invocation.output.add_done_callback(lambda _: run.waiting.pop(invocation, None))
        self._dispatcher.set_aside(invocation, run.first)

    def _end(self, key: Hashable, run: _SharedRun) -> None:
        """End the calls that wait for a call that has ended now, or let them run."""
        del self._runs[key]
        first, output = run.first, run.first.output
        waiting = sorted((one for one in run.waiting if not one.ended), key=_urgency)
        if not waiting:
            return
        if not output.cancelled() and output.exception() is None:
            for one in waiting:
                self._dispatcher.end_aside(one, output.result())
            waiting = []
        elif first.worker:
            # Start the hold times again: these calls could not be sent in time, because they waited for a call that ran.
            for one in waiting:
                one.renew_hold(time.monotonic())
        if waiting and not first.timeline.completed_s:
            following = self._share(key, waiting[0])
            for one in waiting[1:]:
                self._add(following, one)
            del waiting[1:]
        self._queue(waiting)
