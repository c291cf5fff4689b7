"""Records the load of one function: workers, queue and cold starts as a coarse series, and the arrival times of calls.

The series and the arrivals wait in memory until they are stored. A call costs one `append` to the arrivals, and nothing
in the series.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from typing import NamedTuple

from .rung_name import RungName

# The length of an interval of the series. If numbers change in an interval, the series has a sample with the largest
# numbers of the interval.
BUCKET_S = 1.0
# The most samples and arrivals that wait to be stored. The oldest are dropped.
MAX_SAMPLES = 10_000
MAX_ARRIVALS = 100_000


class LoadState(NamedTuple):
    """The numbers of a function at one moment."""

    queued: int
    in_flight: int
    starting: int
    ready: int
    rung: RungName


class LoadSample(NamedTuple):
    """The numbers of a function from one second until the next sample."""

    at: float
    """The beginning of the second, in Unix seconds."""
    queued: int
    """The most invocations that waited at once in that second."""
    in_flight: int
    starting: int
    """The starting workers and the ready workers, at the moment with the most workers in total."""
    ready: int
    rung: str
    """The rung at the second's end."""
    cold: int = 0
    """How many of the answered invocations had waited for an activation."""
    slowest_cold_s: float = 0.0


class LoadSeries:
    """The samples of one function that are not stored yet."""

    def __init__(self) -> None:
        # The samples have monotonic seconds. `take` shifts all of them by the same amount to Unix seconds, which keeps
        # their order.
        self._done: deque[LoadSample] = deque(maxlen=MAX_SAMPLES)
        self._begun_s = self._ends_s = 0.0
        self._most = self._last = LoadState(0, 0, 0, 0, RungName.LOCAL)
        self._cold, self._slowest_s, self._dirty = 0, 0.0, True

    def note(self, now_s: float, state: LoadState) -> None:
        """Record the state at `now_s`, in monotonic seconds. Equal states cost one comparison."""
        if state == self._last and now_s < self._ends_s:
            return
        self._turn(now_s)
        if state != self._last:
            most = self._most
            fewer = state.starting + state.ready < most.starting + most.ready
            workers = (most.starting, most.ready) if fewer else (state.starting, state.ready)
            queued, in_flight = max(most.queued, state.queued), max(most.in_flight, state.in_flight)
            self._most = LoadState(queued, in_flight, *workers, state.rung)
            self._last, self._dirty = state, True

    def note_queued(self, now_s: float, queued: int) -> None:
        """Record how many invocations wait. Call this only if no other number has changed."""
        if queued > self._most.queued or now_s >= self._ends_s:
            self._turn(now_s)
            self._most = self._most._replace(queued=max(self._most.queued, queued))
            self._dirty = True

    def note_cold(self, now_s: float, waited_s: float) -> None:
        """Record the answer to an invocation that waited for an activation."""
        self._turn(now_s)
        self._cold += 1
        self._slowest_s, self._dirty = max(self._slowest_s, waited_s), True

    @property
    def pending(self) -> bool:
        """True if there is something that `take` has not returned."""
        return self._dirty or bool(self._done)

    def take(self, now_s: float) -> list[LoadSample]:
        """Return the samples that no call has returned before, to be stored. This ends the present second early."""
        if not self.pending:
            return []
        if self._ends_s:
            self._ends_s = min(self._ends_s, now_s)
        self._turn(now_s)
        shift_s = time.time() - time.monotonic()
        found = [sample._replace(at=sample.at + shift_s) for sample in self._done]
        self._done.clear()
        return found

    def _turn(self, now_s: float) -> None:
        """Begin a new second if the last one has ended."""
        if now_s < self._ends_s:
            return
        if self._ends_s and self._dirty:
            self._add(self._begun_s, self._most, self._cold, self._slowest_s)
            # If the last numbers differ from the largest ones, add a sample with the last numbers at the end of the second.
            if self._most[:4] != self._last[:4]:
                self._add(self._ends_s, self._last)
            self._dirty = False
        self._cold, self._slowest_s, self._most = 0, 0.0, self._last
        self._begun_s, self._ends_s = now_s, now_s + BUCKET_S

    def _add(self, begun_s: float, state: LoadState, cold: int = 0, slowest_s: float = 0.0) -> None:
        self._done.append(LoadSample(begun_s, *state[:4], state.rung.value, cold, slowest_s))


class Arrivals:
    """The arrival times of one function's invocations that are not stored yet."""

    def __init__(self) -> None:
        self._waiting: deque[float] = deque(maxlen=MAX_ARRIVALS)
        self.note = self._waiting.append
        """Call it with the arrival of an answered invocation, in monotonic seconds."""

    @property
    def pending(self) -> bool:
        """True if there is something that `take` has not returned."""
        return bool(self._waiting)

    def take(self) -> array[float]:
        """Return the arrivals that no call has returned before, in Unix seconds."""
        shift_s = time.time() - time.monotonic()
        found = array("d", [arrival_s + shift_s for arrival_s in self._waiting])
        self._waiting.clear()
        return found
