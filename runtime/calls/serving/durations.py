"""Learns how long a revision's workers take to start, and how long its handler calls take. Computes from both when slots are free."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence

from ..batching.latency_curve import LatencyCurve, Point
from ..batching.outstanding import BatchEnd
from ..batching.queue import Queue, Slots
from .invocation import Invocation
from .latency_curve_store import LatencyCurveStore
from .replica import Replica
from .replicas import Replicas

# The weight of the latest activation in the mean time of an activation.
SMOOTHING = 0.3
# Without batches, the latency curve learns from one in this many invocations of a worker, because their durations are
# similar and learning takes processor time.
OBSERVED_EVERY = 16
# The median time in the handler is computed from this many of the latest observed times.
KEPT = 31


class Durations:
    """The latency curve of a revision, and the mean time of an activation."""

    def __init__(
        self, queue: Queue[Invocation], replicas: Replicas, curves: LatencyCurveStore, at_once: int
    ) -> None:
        self._queue, self._replicas, self._curves = queue, replicas, curves
        self._device = ""
        # The latest observed times in the handler.
        self._exec_s: deque[float] = deque(maxlen=KEPT)
        # The curve of earlier workers, which serves until a worker of this revision is ready.
        self._stored = LatencyCurve(curves.latest())
        self.each_s = 0.0
        """The median of the latest times in the handler; 0 until one was observed."""
        self.activation_s = 0.0
        """The mean time of an activation; 0 until one is known."""
        self.at_once = at_once
        """The number of invocations, or batches, that a starting worker will run at a time."""

    @property
    def curve(self) -> LatencyCurve:
        """The latency curve of the present workers, or else the stored curve."""
        return self._queue.curve if self._queue.curve.points else self._stored

    @property
    def learned(self) -> Sequence[Point]:
        """The points of the latency curve: the curve of the present workers, or else the stored curve."""
        return self._queue.curve.points or self._curves.latest()

    async def store(self) -> None:
        """Store the latency curve for later activations, if it differs enough from the stored one."""
        points = self._queue.curve.points
        if points and self._curves.differs(self._device, points):
            await asyncio.to_thread(self._curves.write, self._device, points)

    def slots(self, now_s: float) -> Slots:
        """Return the slots of all workers, starting workers included. Without batches, each invocation needs a slot."""
        ready = self._replicas.ready
        count = sum(replica.outstanding.slots for replica in ready) + self.at_once * self._replicas.starting
        if ready:
            curve = self._queue.curve
            return Slots(count, min(replica.outstanding.expected_at(now_s, curve) for replica in ready))
        # A slot is expected to be free when the oldest activation has taken the mean time of an activation.
        asked_s = min((replica.activation.asked_s for replica in self._replicas), default=now_s)
        return Slots(max(count, self.at_once), max(now_s, asked_s + self.activation_s))

    def work_s(self, waiting: int) -> float | None:
        """Return the seconds that one worker would take for this number of waiting invocations; None if that is unknown."""
        curve, most = self.curve, self._queue.forecast.max_batch
        if not curve.points:
            return None
        slots = [replica.outstanding.slots for replica in self._replicas.ready]
        at_once = min(slots) if slots else self.at_once
        if most == 1 and self.each_s:
            # Use no times of the curve: they include the way to the worker, which is slow while many invocations are sent.
            return waiting * self.each_s / at_once
        full, rest = divmod(waiting, most)
        return (full * curve.typical(most) + (curve.typical(rest) if rest else 0.0)) / at_once

    # -- what is observed

    def note_ready(self, replica: Replica) -> None:
        """Load the curve that a new ready worker has measured, or the stored curve of its device."""
        curve = self._queue.curve
        if replica.start.measured:
            curve.load(replica.start.measured)
        else:
            # An activation in which the curve is measured takes longer. So the mean counts only activations without a
            # measurement.
            took_s = replica.activation.ready_s - replica.activation.asked_s
            self.activation_s += (SMOOTHING if self.activation_s else 1.0) * (took_s - self.activation_s)
            if replica.start.device != self._device:
                curve.load(self._curves.of_device(replica.start.device))
        self._device = replica.start.device

    def note_call(self, replica: Replica, invocation: Invocation, now_s: float) -> None:
        """Learn from one in OBSERVED_EVERY invocations that have ended without a batch. Leave out open connections."""
        timeline = invocation.timeline
        if replica.completed % OBSERVED_EVERY != 1 or invocation.idle_s is not None:
            return
        if timeline.exec_s:
            self._exec_s.append(timeline.exec_s)
            self.each_s = sorted(self._exec_s)[len(self._exec_s) // 2]
        self.note_batch(BatchEnd(1, 1.0, now_s - timeline.sent_s - timeline.wait_s))

    def note_batch(self, batch: BatchEnd) -> None:
        """Learn from a batch that has ended."""
        if batch.seconds <= 0:
            return
        now_s = time.monotonic()
        self._queue.forecast.observe_batch(now_s, *batch)
        # Measure at the end of this iteration of the event loop, when the responses of the whole batch have been sent.
        if self._queue.forecast.max_batch > 1:
            asyncio.get_running_loop().call_soon(self._note_responses, now_s)

    def _note_responses(self, ended_s: float) -> None:
        """Learn the time from the end of a batch to its last response."""
        # Double the time, because receiving the responses probably takes the callers as long as the loop took to send them.
        self._queue.forecast.observe_response(2 * (time.monotonic() - ended_s))
