"""Learns from the idle periods of one function that have ended, once the arrivals that followed each period are known.

It does no I/O and reads no clock.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from . import keep_alive
from .idle_distribution import Prior, SharedPrior
from .idle_period import Followers, IdlePeriod
from .keep_alive import Choice, History
from .ladder import Ladder
from .rung_figures import differs

# The largest number of ended periods that wait for later arrivals. If there are more periods, the function learns from the
# oldest period with the arrivals so far.
MOST_OBSERVATIONS = 64
# At most this many arrivals are remembered for these periods. Further arrivals do not count.
MOST_ARRIVALS = 4096


class Observation(NamedTuple):
    """An idle period that has ended. The function learns from the period once the arrivals after it are known."""

    idle_s: float
    since_s: float
    followers: Followers


class Learning(NamedTuple):
    """A copy of ended periods, from which a thread can learn."""

    known: History
    """The history before these periods."""
    ladder: Ladder
    prior: Prior
    observations: tuple[Observation, ...]
    arrivals_s: Sequence[float]

    def history(self) -> History:
        """Return the history with these periods."""
        history, wakes_s = self.known, [rung.wake_s for rung in self.ladder.rungs]
        for idle_s, since_s, followers in self.observations:
            waits = followers.waits(wakes_s, self.arrivals_s)
            history = keep_alive.learn(history, self.ladder, idle_s, since_s, waits, self.prior)
        return history

    def settle(self, since_s: float) -> tuple[History, Choice]:
        """Return the history with these periods, and the plan of the period that began `since_s` after the last wake."""
        history = self.history()
        return history, keep_alive.choose(history, self.ladder, since_s, self.prior)


class EndedPeriods:
    """The idle periods of one function that have ended: their history, and the periods that are not learned yet."""

    def __init__(self, shared: SharedPrior, ladder: Ladder) -> None:
        self.history = History()
        self.ladder = ladder
        """The ladder for which the policies have planned."""
        self._shared = shared
        self._observations: deque[Observation] = deque()
        self._followers: Followers | None = None
        # The arrivals since the oldest observation, in monotonic seconds.
        self._arrivals_s = array("d")

    def add(self, ended: IdlePeriod, woken_s: float, ladder: Ladder) -> None:
        """Observe a period that an arrival has ended at `woken_s`. `ladder` is the ladder at that time."""
        wakes_s = [rung.wake_s for rung in ladder.rungs]
        self._followers = Followers(woken_s, wakes_s, self._followers)
        self._observations.append(Observation(woken_s - ended.begun_s, ended.since_s, self._followers))

    @property
    def follows_until_s(self) -> float:
        """`note_arrival` must report the arrivals until this time."""
        return max((one.followers.until_s for one in self._observations), default=-math.inf)

    def note_arrival(self, arrived_s: float) -> None:
        """Record the arrival of an invocation that has ended, in monotonic seconds."""
        if len(self._arrivals_s) < MOST_ARRIVALS:
            self._arrivals_s.append(arrived_s)

    def learning(self, ladder: Ladder) -> Learning:
        """Return a copy of all periods. It has only the arrivals so far, although later arrivals may follow the periods."""
        observations = tuple(self._observations)
        return Learning(self.history, ladder, self._shared.prior, observations, self._arrivals_s[:])

    def take(self, ladder: Ladder, now_s: float) -> Learning:
        """Take out the periods whose later arrivals are known. If `ladder` has changed much, plan for it from now on."""
        if differs(self.ladder, ladder):
            self.ladder, self.history = ladder, self.history.unplanned()
        taken, arrivals_s = list[Observation](), self._arrivals_s
        while self._observations and (
            self._observations[0].followers.until_s <= now_s or len(self._observations) > MOST_OBSERVATIONS
        ):
            taken.append(self._observations.popleft())
        from_s = self._observations[0].followers.from_s if self._observations else math.inf
        self._arrivals_s = array("d", [at_s for at_s in arrivals_s if at_s >= from_s])
        return Learning(self.history, self.ladder, self._shared.prior, tuple(taken), arrivals_s)

    def keep(self, learned: Learning, history: History) -> None:
        """Keep `history`, which was learned from the periods that `take` has returned. Add these periods to the node's prior."""
        self.history = history
        for number, observation in enumerate(learned.observations, learned.known.periods):
            self._shared.prior = self._shared.prior.learn(observation.idle_s, number)
