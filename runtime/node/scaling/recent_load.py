"""Computes the lasting load of a revision from the load of the last seconds. It reads no clock."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

# A load that lasts for this time is a lasting load, as with Knative's panic window. MARKS marks divide the window, so
# its beginning is known only to one of MARKS parts.
LASTING_S = 6.0
MARKS = 12
# Recently queued requests add at least this to the lasting load. A queued request shows that two callers are active at
# once: if a single caller sends one request after the other, they do not wait for each other.
QUEUED_CALL = 0.005


class _Mark(NamedTuple):
    """The totals that were passed to `RecentLoad.note` at one time."""

    at_s: float
    in_flight_s: float
    admitted: int
    low: int
    """The least number of waiting invocations since the last mark."""


class RecentLoad:
    """The load of the last LASTING_S seconds."""

    def __init__(self) -> None:
        self._marks: deque[_Mark] = deque()
        self._queued = self._low = self._emptied = self._admitted = 0
        # The last time at which an invocation waited, and the last time at which an invocation began to wait.
        self._queued_s = self._joined_s = -LASTING_S

    def note(self, now_s: float, in_flight_s: float, queued: int, admitted: int, emptied: int) -> float:
        """Return the lasting load at `now_s`: the number of running and waiting invocations in the last LASTING_S seconds.

        It is the mean number of running invocations plus the least number of waiting invocations. The second number is
        at most the number of invocations that joined the queue in that time. The lasting load is 0 while a burst ends:
        then workers are busy with queued invocations, and no new invocations join the queue.

        `in_flight_s` is the time that invocations have spent at workers, `admitted` is the number of invocations that
        joined the queue, and `emptied` is the number of times that the queue became empty. All three are totals that
        are never reset. `queued` invocations wait now.
        """
        low = min(queued, self._queued) if emptied == self._emptied else 0
        if queued or emptied != self._emptied:
            self._queued_s = now_s
        if admitted != self._admitted:
            self._joined_s = now_s
        self._low, self._queued, self._emptied = min(self._low, low), queued, emptied
        self._admitted = admitted
        marks, from_s = self._marks, now_s - LASTING_S
        while len(marks) > 1 and marks[1].at_s <= from_s:
            marks.popleft()
        lasting = (in_flight_s - self._running_until(from_s, now_s, in_flight_s)) / LASTING_S
        if self._queued_s > from_s:
            ends = now_s - self._joined_s >= LASTING_S / 2
            lasting = 0.0 if ends else lasting + max(QUEUED_CALL, self._waiting(from_s, admitted))
        if not marks or now_s - marks[-1].at_s >= LASTING_S / MARKS:
            marks.append(_Mark(now_s, in_flight_s, admitted, self._low))
            self._low = queued
        return lasting

    def _waiting(self, from_s: float, admitted: int) -> int:
        """Return the least number of waiting invocations since `from_s`, at most the number that joined since then."""
        marks = self._marks
        if not self._low or len(marks) < 2 or marks[0].at_s > from_s:
            return 0
        inside = list(marks)[1:]
        return min(self._low, admitted - inside[0].admitted, *(mark.low for mark in inside))

    def _running_until(self, from_s: float, now_s: float, in_flight_s: float) -> float:
        """Return the value of `in_flight_s` at `from_s`. Between two marks, the load counts as constant."""
        if not self._marks:
            return in_flight_s
        before, (after_s, after) = self._marks[0], (now_s, in_flight_s)
        if len(self._marks) > 1:
            after_s, after = self._marks[1][:2]
        if from_s <= before.at_s or after_s <= before.at_s:
            return before.in_flight_s
        share = (from_s - before.at_s) / (after_s - before.at_s)
        return before.in_flight_s + (after - before.in_flight_s) * share
