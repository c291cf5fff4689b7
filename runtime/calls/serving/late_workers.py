"""Finds workers whose calls are late, asks them for the invocations that wait there, and reports when another worker should start."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator

from ..batching.assignment import late_after_s
from ..batching.queue import Queue
from .deadlines import EARLY_S
from .durations import Durations
from .invocation import Invocation
from .replica import Replica
from .replicas import Replicas

# If the timer fires more than this after its time, the event loop was busy, and may not have read the results of workers yet.
BUSY_S = 0.005


class LateWorkers:
    """Judges the workers when its timer fires. The timer is set only while an invocation waits, in the queue or at a worker
    without a free slot.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, replicas: Replicas, queue: Queue[Invocation], durations: Durations,
        look: Callable[[], None],
    ) -> None:  # fmt: skip
        """`look` is called when invocations wait in the queue, and the start of another worker pays."""
        self._loop, self._replicas, self._queue = loop, replicas, queue
        self._durations, self._look = durations, look
        self._timer: asyncio.TimerHandle | None = None
        self.due_s = math.inf
        """When the timer fires; infinity if it is not set."""
        # The latest time at which the timer has fired and all results of workers had been read.
        self._judged_s = 0.0
        self._closed = False

    def close(self) -> None:
        self._closed = True
        self._stop()

    def stuck(self) -> float:
        """Return the number of ready workers that are so late that the start of another worker pays.

        If only some slots of a worker are late, count the share of these slots in place of the whole worker.
        """
        return sum(one.outstanding.overdue(self._judged_s - self._pays_after_s(one)) for one in self._busy())

    def watch(self, now_s: float) -> None:
        """Set the timer for the next time at which a worker is late, because an invocation waits."""
        if self._closed:
            return
        due_s = min((at_s for at_s in self._times() if at_s > self._judged_s), default=math.inf)
        due_s = max(due_s, now_s) + EARLY_S
        if due_s < self.due_s:
            self._stop()
            self.due_s = due_s
            self._timer = self._loop.call_later(due_s - now_s, self._judge, due_s)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _busy(self) -> Iterator[Replica]:
        return (one for one in self._replicas.ready if one.outstanding.load >= one.outstanding.slots)

    def _pays_after_s(self, replica: Replica) -> float:
        # The end of the running calls is unknown. So the start pays once the calls are late by as much as the start takes:
        # then no caller waits more than twice as long as if that end had been known. On a busy machine, calls are late more
        # often, and starts take longer, too.
        return late_after_s(replica, self._durations.curve) + self._durations.activation_s

    def _times(self) -> Iterator[float]:
        """For each busy worker, yield when it is late, and when the start of another worker pays.

        Leave out the first time unless an invocation waits at the worker, and the second unless one waits in the queue.
        """
        for replica in self._busy():
            start_s = replica.outstanding.newest_start_s
            if len(self._queue):
                yield start_s + self._pays_after_s(replica)
            if replica.outstanding.load > replica.outstanding.slots:
                yield start_s + late_after_s(replica, self._durations.curve)

    def _judge(self, due_s: float) -> None:
        now_s = time.monotonic()
        if now_s - due_s > BUSY_S:
            # Results may have arrived, so read them first.
            self._timer = self._loop.call_later(EARLY_S, self._judge, math.inf)
            return
        self._timer, self.due_s, self._judged_s = None, math.inf, now_s
        for replica in self._busy():
            if replica.outstanding.newest_start_s + late_after_s(replica, self._durations.curve) <= now_s:
                replica.calls.ask_back()
        if len(self._queue) and self.stuck():
            self._look()
        self.watch(now_s)
