"""Computes the load of a revision that lasts, from that of the last seconds. It reads no clock."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

# How long a load has to last, as in Knative's panic window. The window's beginning is known to one of MARKS parts of it.
LASTING_S = 6.0
MARKS = 12
# What is added if somebody had to wait of late: two callers, and not one who sends one request after the other.
SOMEBODY = 0.005


class _Mark(NamedTuple):
    """What was known at a time."""

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
        # When invocations were waiting last, and when the last one began to wait.
        self._queued_s = self._joined_s = -LASTING_S

    def note(self, now_s: float, in_flight_s: float, queued: int, admitted: int, emptied: int) -> float:
        """Return the number of invocations that run or wait lastingly at `now_s`.

        It is the mean number of running ones, and the least number of waiting ones, but no more than came meanwhile.
        It is 0 while a burst ends: then workers are busy with what was queued, and nobody joins the queue.

        `in_flight_s` are the seconds of all running invocations, `admitted` the number of those that had to wait, and
        `emptied` how often none waited any more, all of them counted from some beginning. `queued` wait now.
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
            lasting = 0.0 if ends else lasting + max(SOMEBODY, self._waiting(from_s, admitted))
        if not marks or now_s - marks[-1].at_s >= LASTING_S / MARKS:
            marks.append(_Mark(now_s, in_flight_s, admitted, self._low))
            self._low = queued
        return lasting

    def _waiting(self, from_s: float, admitted: int) -> int:
        """Return how many have waited at any time since `from_s`, but no more than came meanwhile."""
        marks = self._marks
        if not self._low or len(marks) < 2 or marks[0].at_s > from_s:
            return 0
        inside = list(marks)[1:]
        return min(self._low, admitted - inside[0].admitted, *(mark.low for mark in inside))

    def _running_until(self, from_s: float, now_s: float, in_flight_s: float) -> float:
        """Return what `in_flight_s` was at `from_s`. Between two marks, the load counts as constant."""
        if not self._marks:
            return in_flight_s
        before, (after_s, after) = self._marks[0], (now_s, in_flight_s)
        if len(self._marks) > 1:
            after_s, after = self._marks[1][:2]
        if from_s <= before.at_s or after_s <= before.at_s:
            return before.in_flight_s
        share = (from_s - before.at_s) / (after_s - before.at_s)
        return before.in_flight_s + (after - before.in_flight_s) * share
