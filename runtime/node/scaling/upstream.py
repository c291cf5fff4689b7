"""Learns which function is called soon after another function, and whether a worker should wait for that call.

A window is a time in which a worker is held for the call. Its price is the cost of holding the worker. The window pays if
calls come in it often enough that the saved waiting is worth more than this price. Calls that come at any time say nothing about
the function that was called before: only what exceeds the usual rate of a function's calls counts.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from .ladder import IdlePlan, Step
from .route import reached

# The upper bounds of the bins of delays, in seconds: four a decade. A call after a longer time does not count as a follower.
BOUNDS_S = tuple(0.1 * 10 ** (power / 4) for power in range(15))
HORIZON_S = BOUNDS_S[-1]
NEVER_READY = (0.0,) * len(BOUNDS_S)
# The weight of earlier calls is multiplied by this at each call of the upstream function, because calling patterns change.
DECAY = 1 - 1 / 32
# Fewer hits than this predict nothing.
LEAST_HITS = 2.5
# In a window, a call must be at least this probable: the start of a worker takes processor time from other calls.
LEAST_PROBABILITY = 1 / 2
# In each bin, only the calls beyond this factor times the usual number count.
LIFT = 3.0
# The weight of the latest interval in the mean interval between a function's calls.
SMOOTHING = 1 / 8
# A window stays open after its last bound for this share of that bound, and at least until LEAST_UNTIL_S.
MARGIN = 0.25
LEAST_UNTIL_S = 1.0
# A function that was called within this time has a worker anyway, so its next call is no sample.
SELDOM_S = 1.0
# The largest numbers of upstream functions and of followers of one function. The pair with the fewest hits is dropped first.
MOST_UPSTREAMS = MOST_FOLLOWERS = 16
# Only the last MOST_RECENT functions that were called can become new upstream functions.
MOST_RECENT = 16


class ClimbCost(NamedTuple):
    """The cost of a worker that waits for a call, and the waiting cost that it saves."""

    hold_per_s: float
    """The price of holding the worker, in money per second, minus the price of the rung that is held anyway."""
    saved: float
    """The cost of a call without the worker, minus its cost with the worker, in the same money."""
    wake_s: float
    """How long the start of the worker takes."""


class Window(NamedTuple):
    """The time in which a worker should wait for a call, in seconds after the upstream function's call."""

    from_s: float
    until_s: float
    probability: float
    """The probability that the call comes in this time."""


@dataclass(slots=True)
class Delays:
    """The delays of one function's calls after calls of another function. Older calls count less."""

    calls: float = 1.0
    """The number of calls of the upstream function. The latest call counts at once, before another call follows it."""
    hits: list[float] = field(default_factory=lambda: [0.0] * len(BOUNDS_S))
    """By the bound of the delay, the number of upstream calls that a call of this function followed."""

    def note_call(self) -> None:
        """Count a call of the upstream function. From now on, a call of the other function may follow it."""
        self.calls = self.calls * DECAY + 1
        # Use one object for all zeros to save memory: most bounds have no hits, and each of many functions may have sixteen
        # pairs.
        self.hits = [hit * DECAY if hit else 0.0 for hit in self.hits]

    def note_hit(self, delay_s: float) -> None:
        """Record that a call followed the latest upstream call after `delay_s`. Ignore a delay beyond HORIZON_S."""
        if delay_s <= HORIZON_S:
            self.hits[bisect.bisect_left(BOUNDS_S, delay_s)] += 1

    @property
    def known(self) -> bool:
        return sum(self.hits) >= LEAST_HITS

    def span_s(self) -> float:
        """Return the delay, in seconds, that nearly all calls do not exceed."""
        longest_s = max(bound_s for bound_s, hit in zip(BOUNDS_S, self.hits, strict=True) if hit)
        return max(longest_s * (1 + MARGIN), LEAST_UNTIL_S)

    def best_window(
        self, cost: ClimbCost, ready_shares: Sequence[float] = NEVER_READY, interval_s: float = math.inf
    ) -> Window | None:
        """Return the window with the largest gain; None if no window gains anything.

        The search goes backwards from the last bin: a waiting worker goes on waiting while the calls that may still
        come are worth its price. `ready_shares` is the result of the function `ready_shares`. In these shares of the
        bins, the plan holds a worker anyway, so a window neither gains nor costs anything there. `interval_s` is the mean
        time between the function's calls.
        """
        if not self.known:
            return None
        share, hold, gain, expected = 1 / self.calls, cost.hold_per_s, 0.0, 0.0
        best_gain, first, last, stop = 0.0, -1, -1, len(BOUNDS_S) - 1
        # The share of upstream calls that have not been followed before a bin begins.
        left = 1 - sum(self.hits) * share
        for index in reversed(range(len(BOUNDS_S))):
            met = self.hits[index] * share
            length_s = BOUNDS_S[index] - (begin_s := BOUNDS_S[index - 1] if index else 0.0)
            needed, usual = 1 - ready_shares[index], -math.expm1(-length_s / interval_s) * (left + met)
            gain += needed * ((met - LIFT * usual) * cost.saved - hold * length_s * (left + met / 2))
            left += met
            expected += met
            if gain <= 0:
                gain, expected, stop = 0.0, 0.0, index - 1
            elif expected >= LEAST_PROBABILITY and (
                (begun := gain - hold * left * min(begin_s, cost.wake_s)) > best_gain
            ):
                best_gain, first, last = begun, index, stop
        if first < 0:
            return None
        from_s = max(0.0, (BOUNDS_S[first - 1] if first else 0.0) - cost.wake_s)
        until_s = max(BOUNDS_S[last] * (1 + MARGIN), LEAST_UNTIL_S)
        return Window(from_s, until_s, sum(self.hits[first : last + 1]) * share)


def ready_shares(plan: IdlePlan, wakes: Sequence[float], elapsed_s: float) -> tuple[float, ...]:
    """For each bin of delays, return the share of the bin in which `plan`, which began `elapsed_s` ago, holds READY."""
    steps = [*reached(plan, wakes), Step(math.inf, 0)]
    held = [
        (step.offset_s - elapsed_s, following.offset_s - elapsed_s)
        for step, following in pairwise(steps)
        if step.rung == 0
    ]
    return tuple(
        sum(max(0.0, min(until_s, end_s) - max(from_s, begin_s)) for from_s, until_s in held)
        / (end_s - begin_s)
        for begin_s, end_s in pairwise((0.0, *BOUNDS_S))
    )


class Upstreams:
    """The delays of calls after calls of another function, for all pairs of functions of one owner on a node."""

    def __init__(self) -> None:
        # The time of each function's last call. The latest call is the last entry.
        self._last_s: dict[str, float] = {}
        # The mean interval between a function's calls, for functions that were called at least twice.
        self._intervals_s: dict[str, float] = {}
        # The delays between calls, by function and then by upstream function.
        self._pairs: dict[str, dict[str, Delays]] = {}
        self._followers: dict[str, set[str]] = {}

    def adopt(self, name: str, pairs: dict[str, Delays]) -> None:
        """Start with the known pairs of a function, by upstream function. Later calls change `pairs` in place."""
        self._pairs[name] = pairs
        for upstream in pairs:
            self._followers.setdefault(upstream, set()).add(name)

    def note(self, name: str, now_s: float) -> None:
        """Record a call of the function `name`."""
        before_s = self._last_s.pop(name, None)
        if before_s is not None:
            mean_s, latest_s = self._intervals_s.get(name), now_s - before_s
            self._intervals_s[name] = latest_s if mean_s is None else mean_s + SMOOTHING * (latest_s - mean_s)
        if before_s is None or now_s - before_s >= SELDOM_S:
            for upstream, called_s in list(self._recent(name, now_s)):
                # Only the first call of `name` after the upstream call counts as its follower.
                if before_s is None or before_s < called_s:
                    self._pair(name, upstream).note_hit(now_s - called_s)
        for follower in self._followers.get(name, ()):
            self._pairs[follower][name].note_call()
        self._last_s[name] = now_s

    def followers(self, name: str) -> Iterator[tuple[str, Delays]]:
        """Yield the functions that are called after `name` often enough to be known, with their delays."""
        for follower in self._followers.get(name, ()):
            if (delays := self._pairs[follower][name]).known:
                yield follower, delays

    def interval_s(self, name: str) -> float:
        """Return the mean time between calls of a function; infinity if it is unknown."""
        return self._intervals_s.get(name, math.inf)

    def delays(self, name: str, upstream: str) -> Delays | None:
        """Return the delays of calls of `name` after calls of `upstream`; None if no call has followed."""
        return self._pairs.get(name, {}).get(upstream)

    def forget(self, name: str) -> None:
        """Forget a function that was deleted."""
        self._last_s.pop(name, None)
        self._intervals_s.pop(name, None)
        for upstream in self._pairs.pop(name, {}):
            self._followers[upstream].discard(name)
        for follower in self._followers.pop(name, ()):
            del self._pairs[follower][name]

    def _recent(self, name: str, now_s: float) -> Iterator[tuple[str, float]]:
        """Yield the functions that may be upstream: known upstream functions, and the functions that were called last.

        Each comes with the time of its last call. Leave out functions whose last call is longer ago than HORIZON_S.
        """
        known = self._pairs.get(name, {})
        latest = itertools.islice(reversed(self._last_s), MOST_RECENT)
        for upstream in dict.fromkeys([*latest, *known]):
            if upstream in self._last_s and now_s - (called_s := self._last_s[upstream]) <= HORIZON_S:
                yield upstream, called_s

    def _pair(self, name: str, upstream: str) -> Delays:
        """Return the delays of a pair. If a new pair is one too many, drop the pair with the fewest hits."""
        pairs = self._pairs.setdefault(name, {})
        if upstream not in pairs:
            followers = self._followers.setdefault(upstream, set())
            if len(pairs) >= MOST_UPSTREAMS:
                self._drop(name, min(pairs, key=lambda one: sum(pairs[one].hits)))
            if len(followers) >= MOST_FOLLOWERS:
                self._drop(min(followers, key=lambda one: sum(self._pairs[one][upstream].hits)), upstream)
            pairs[upstream] = Delays()
            followers.add(name)
        return pairs[upstream]

    def _drop(self, name: str, upstream: str) -> None:
        del self._pairs[name][upstream]
        self._followers[upstream].discard(name)
