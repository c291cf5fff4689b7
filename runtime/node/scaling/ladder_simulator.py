"""Replays the arrivals of one function on a ladder, on a simulated clock, under any keep-alive policy.

The function has one worker, which runs any number of invocations at a time. If the function is below READY at an arrival,
the arrival waits until the worker is READY. Arrivals during this wake wait for the rest of the wake.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Protocol

from . import keep_alive
from .idle_distribution import SharedPrior
from .keep_alive import History
from .ladder import BurstWait, IdlePlan, Ladder, Step, course

# A caller notices a wait that is longer than this.
FELT_S = 0.1


class KeepAlivePolicy(Protocol):
    """Plans idle periods."""

    def plan(self, since_s: float) -> IdlePlan:
        """Return the plan of an idle period that begins `since_s` seconds after the arrival that ended the last period."""

    def learn(self, idle_s: float, since_s: float, burst_waits: Sequence[BurstWait]) -> None:
        """Learn from an idle period that ended after `idle_s` seconds. `burst_waits` has for each rung how long
        arrivals would have waited for a wake from the rung.
        """


class Learned:
    """The policy of `keep_alive`, which learns from each idle period."""

    def __init__(self, ladder: Ladder, shared: SharedPrior | None = None) -> None:
        self.history = History()
        self._ladder, self._shared = ladder, shared or SharedPrior()

    def plan(self, since_s: float) -> IdlePlan:
        return keep_alive.choose(self.history, self._ladder, since_s, self._shared.prior).plan

    def learn(self, idle_s: float, since_s: float, burst_waits: Sequence[BurstWait]) -> None:
        prior = self._shared.prior
        self._shared.prior = prior.learn(idle_s, self.history.periods)
        self.history = keep_alive.learn(self.history, self._ladder, idle_s, since_s, burst_waits, prior)


class Fixed:
    """A policy that always gives the same plan, such as an idle timeout."""

    def __init__(self, plan: IdlePlan) -> None:
        self._plan = plan

    def plan(self, since_s: float) -> IdlePlan:
        return self._plan

    def learn(self, idle_s: float, since_s: float, burst_waits: Sequence[BurstWait]) -> None:
        """Learn nothing."""


def timeout(timeout_s: float, rung: int) -> IdlePlan:
    """Return the plan that holds READY until `timeout_s`, then `rung`."""
    return (Step(0.0, 0),) if timeout_s == math.inf else (Step(0.0, 0), Step(timeout_s, rung))


@dataclass(slots=True)
class LadderRun:
    """The cost of a replay. The price of the time in which invocations run is left out, because any policy holds the
    worker then.
    """

    requests: int = 0
    held: float = 0.0
    """Money for holding rungs, in idle periods and while waking."""
    waited_s: float = 0.0
    felt: int = 0
    """The number of requests that waited longer than FELT_S."""
    woken: int = 0
    """The number of idle periods that ended below READY."""
    periods: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    """The waiting time, in seconds, of each request that had to wait."""
    rung_s: list[float] = field(default_factory=list)
    """The seconds held on each rung, in idle periods and while waking."""
    busy_s: float = 0.0
    """The seconds in which invocations ran."""

    def bill(self, wait_per_s: float) -> float:
        return self.held + wait_per_s * self.waited_s

    def __iadd__(self, other: LadderRun) -> LadderRun:
        self.requests += other.requests
        self.held += other.held
        self.waited_s += other.waited_s
        self.felt += other.felt
        self.woken += other.woken
        self.periods += other.periods
        self.waits += other.waits
        self.rung_s = [sum(pair) for pair in zip_longest(self.rung_s, other.rung_s, fillvalue=0.0)]
        self.busy_s += other.busy_s
        return self


class BurstWaits:
    """Sums the seconds that the arrivals so far would have waited for wakes of `wake_s` seconds.

    Each arrival that ends an idle period begins a wake, whatever the rung was, unless a wake is under way.
    """

    def __init__(self, wake_s: float) -> None:
        self._wake_s = wake_s
        self._ready_s = -math.inf
        self._sum = BurstWait()

    def arrive(self, arrival_s: float, *, ends_idle: bool) -> None:
        """Add the time that an arrival would have waited for the wake under way, or for the wake that it begins."""
        waited_s, wakes = self._sum
        if ends_idle and arrival_s >= self._ready_s:
            self._ready_s = arrival_s + self._wake_s
            wakes += 1
        self._sum = BurstWait(waited_s + max(0.0, self._ready_s - arrival_s), wakes)

    def take(self) -> BurstWait:
        """Return the sum since the last `take`."""
        taken, self._sum = self._sum, BurstWait()
        return taken


class Replay:
    """The replay of one function. `run` replays it alone. `run_together` replays several functions in the order of
    their `next_s`.
    """

    def __init__(
        self, arrivals: Sequence[float], service_s: float, ladder: Ladder, policy: KeepAlivePolicy,
        quiet_s: float = 0.0,
    ) -> None:  # fmt: skip
        """`arrivals` are ascending times in seconds. Each invocation runs for `service_s`.

        An idle period begins only after `quiet_s` without work, and until then the worker stays. The length of the
        period still counts from the end of the work.
        """
        self.result = LadderRun(len(arrivals), rung_s=[0.0] * len(ladder.rungs))
        self._arrivals, self._service_s, self._ladder, self._policy = arrivals, service_s, ladder, policy
        self._quiet_s = quiet_s
        self._burst_waits = [BurstWaits(rung.wake_s) for rung in ladder.rungs]
        self._next = 0
        self._idle_from_s = 0.0
        self._woken_at_s = arrivals[0] if arrivals else 0.0
        self._serve(0.0)

    @property
    def next_s(self) -> float | None:
        """When the present idle period ends; None if no arrival is left."""
        return self._arrivals[self._next] if self._next < len(self._arrivals) else None

    def step(self) -> None:
        """Replay one idle period, the arrival that ends it, and the invocations until the next idle period begins."""
        arrival_s = self._arrivals[self._next]
        since_s, idle_s = self._idle_from_s - self._woken_at_s, arrival_s - self._idle_from_s
        plan = self._policy.plan(since_s)
        self.result.periods.append(idle_s)
        wake_s = self._hold(plan, idle_s)
        for burst_wait in self._burst_waits:
            burst_wait.arrive(arrival_s, ends_idle=True)
        self._policy.learn(idle_s, since_s, [burst_wait.take() for burst_wait in self._burst_waits])
        self._woken_at_s = arrival_s
        self._serve(wake_s)

    def _hold(self, plan: IdlePlan, idle_s: float) -> float:
        """Pay for the idle period. Return the seconds that the wake at its end takes."""
        wakes = [rung.wake_s for rung in self._ladder.rungs]
        stays, _, wake_s = course(_after(plan, self._quiet_s), wakes, idle_s)
        for rung, seconds in stays:
            self._pay(rung, seconds)
        self._pay(0, wake_s)
        self.result.woken += wake_s > 0
        return wake_s

    def _pay(self, rung: int, seconds: float) -> None:
        self.result.held += self._ladder.rungs[rung].hold_per_s * seconds
        self.result.rung_s[rung] += seconds

    def _serve(self, wake_s: float) -> None:
        """Serve the next arrival, and all later arrivals before the worker is idle again."""
        if self._next >= len(self._arrivals):
            return
        first = self._next
        ready_s = busy_until_s = self._arrivals[first] + wake_s
        limit, paused_s = len(self._arrivals), 0.0
        while self._next < limit and self._arrivals[self._next] <= busy_until_s + self._quiet_s:
            arrival_s = self._arrivals[self._next]
            paused_s += max(0.0, arrival_s - busy_until_s)
            if self._next > first:
                for burst_wait in self._burst_waits:
                    burst_wait.arrive(arrival_s, ends_idle=False)
            waited_s = max(0.0, ready_s - arrival_s)
            if waited_s:
                self.result.waited_s += waited_s
                self.result.waits.append(waited_s)
            self.result.felt += waited_s > FELT_S
            busy_until_s = max(busy_until_s, max(arrival_s, ready_s) + self._service_s)
            self._next += 1
        self._pay(0, paused_s)
        self.result.busy_s += busy_until_s - ready_s - paused_s
        self._idle_from_s = busy_until_s


def _after(plan: IdlePlan, quiet_s: float) -> IdlePlan:
    """Return `plan`, changed so that the worker first stays for `quiet_s`."""
    if not quiet_s:
        return plan
    passed = [step.rung for step in plan if step.offset_s <= quiet_s]
    later = (step for step in plan if step.offset_s > quiet_s)
    return (Step(0.0, 0), Step(quiet_s, passed[-1]), *later)


def run(replay: Replay) -> LadderRun:
    """Replay one function to its end."""
    while replay.next_s is not None:
        replay.step()
    return replay.result


def run_together(replays: Sequence[Replay]) -> list[LadderRun]:
    """Replay the functions of a node together. Their idle periods are replayed in the order of their ends."""
    waiting = [(first_s, number) for number, one in enumerate(replays) if (first_s := one.next_s) is not None]
    waiting.sort(reverse=True)
    while waiting:
        _, number = waiting.pop()
        replays[number].step()
        if (following_s := replays[number].next_s) is not None:
            bisect.insort(waiting, (following_s, number), key=lambda entry: -entry[0])
    return [one.result for one in replays]
