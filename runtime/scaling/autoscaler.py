"""Decides how many workers a revision should have. It does no I/O and reads no clock.

How long the waiting invocations will take is predicted from the time that their batches take. A worker is started
if it would still have enough to do when it is awake. While it is not known how long invocations take, the number depends on
the load (the waiting and the running invocations) divided by the concurrency of one worker, as in Knative's pod autoscaler.
So it does for a load that lasts: that needs workers before it has to wait.

A worker is stopped when the load of a whole window has not needed it, and the last one when there was no load for a
time of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# A load that lasts and is larger by so little is not larger: it is a difference of large sums.
ROUNDING = 1e-3
# Nor is one more worker needed for this share of it.
HUNDREDTH = 0.01
# The load should use at most this share of the workers' concurrency: above it one more worker is started,
# before invocations have to wait.
NEAR_LIMIT = 0.8
# A worker is started for what waits if it will have as much to do as its start takes, or at least for so long: a
# caller hardly notices a shorter delay, and starting a worker takes processor time from those that run.
TARGET_S = 0.1
# A load that is near the limit is checked again so often, while no event reports it.
NEAR_CHECK_S = 1.0
# The default window, as in Knative: workers that it did not need are stopped.
WINDOW_S = 60.0
# While there is load, it is checked this often per window whether workers are not needed any more, but not more
# often than every MIN_RECHECK_S: no event reports that the load has become less.
CHECKS = 4
MIN_RECHECK_S = 1.0


@dataclass(frozen=True, slots=True)
class ScaleSpec:
    """The owner's limits, and for how long workers stay that are not needed."""

    min: int = 0
    max: int = 4
    buffer: int = 0
    """How many workers to have above the need while there is any load."""
    concurrency: int = 1
    """How many invocations one worker runs at a time, those of all its batches included."""
    scale_to_zero_s: float = 60.0
    """For how long the last worker stays without load; infinity if somebody else decides when it ends."""
    scale_down_s: float = WINDOW_S
    """The window whose largest need decides how many workers stay besides the last one."""
    park_after_s: float = math.inf
    """A worker that is not needed is parked when it had no work for so long."""


@dataclass(frozen=True, slots=True)
class Load:
    """What the load will take, in seconds."""

    work_s: float
    """How long one worker would take for all waiting invocations."""
    wake_s: float
    """How long the start of a worker takes; 0 if that is unknown."""
    started_s: float
    """How long the starting workers have been starting, summed, none for more than `wake_s`."""
    stuck: float
    """How many ready workers run calls that take much longer than usual. Nobody knows when they end."""
    lasting: float
    """The number of running and waiting invocations that lasts (recent_load.py)."""

    @property
    def delay_s(self) -> float:
        """What waits may take so long on workers that are awake."""
        return max(self.wake_s, TARGET_S)


@dataclass(frozen=True, slots=True)
class Stats:
    """The present numbers of invocations and workers, and what was needed of late."""

    queued: int
    in_flight: int
    starting: int
    ready: int
    idle_since_s: tuple[float, ...] = ()
    """One time for each ready worker without work, the earliest first."""
    prewarm: int = 0
    """How many workers are wanted now even without load."""
    load: Load | None = None
    """None while it is not known how long invocations take."""
    recent: int = 0
    """The most workers that were wanted at a time of the last `scale_down_s` seconds (recent_need.py)."""
    recent_until_s: float = math.inf
    """When `recent` becomes less, if no more are wanted."""
    parked_since_s: tuple[float, ...] = ()
    """For each parked worker when its last work ended, the earliest first. `ready` does not count them."""

    @property
    def parked(self) -> int:
        return len(self.parked_since_s)

    @property
    def awake(self) -> int:
        """The workers that run invocations, or will without another decision."""
        return self.ready + self.starting

    @property
    def held(self) -> int:
        return self.awake + self.parked


@dataclass(frozen=True, slots=True)
class Decision:
    """How many workers to start and to stop, those idle for longest first. Decide again at `wake_at_s`, if set.

    To start also means to wake: parked workers come first in both.
    """

    start: int = 0
    stop: int = 0
    park: int = 0
    wake_at_s: float | None = None


def wanted(spec: ScaleSpec, stats: Stats) -> int:
    """Return how many workers the load and `prewarm` need, within the owner's limits."""
    load = stats.queued + stats.in_flight
    need = _by_share(spec, load) if stats.load is None else _by_work(spec, stats, stats.load)
    if load:
        need += spec.buffer
    return min(spec.max, max(spec.min, need, stats.prewarm))


def _by_share(spec: ScaleSpec, load: float) -> int:
    """Return how many workers a load needs that are to use their concurrency up to NEAR_LIMIT."""
    # A load of one is typically one caller who sends one request after the other: one worker is enough.
    if load <= 1 + ROUNDING:
        return math.ceil(min(load, 1))
    return math.ceil(load / (spec.concurrency * NEAR_LIMIT) - HUNDREDTH)


def _by_work(spec: ScaleSpec, stats: Stats, load: Load) -> int:
    """Return how many workers are needed to end what waits in time, and to carry the load that lasts."""
    running = math.ceil(stats.in_flight / spec.concurrency)
    need = max(running, _by_share(spec, load.lasting)) if stats.queued + stats.in_flight else 0
    if not stats.queued:
        return need
    # What is left when a worker that is started now would be awake. All workers share it then.
    ready = max(0.0, stats.ready - load.stuck)
    left_s = load.work_s - ready * load.wake_s - load.started_s
    sharing = math.ceil(max(0.0, left_s) / load.delay_s + min(load.stuck, stats.ready))
    useful = math.ceil((stats.queued + stats.in_flight) / spec.concurrency)
    return max(need, 1, min(sharing, useful))


def sufficient_load(spec: ScaleSpec, stats: Stats) -> float:
    """Return the largest load for which the present workers suffice without another look; infinity if there are `max`."""
    have = stats.ready + stats.starting
    if have >= spec.max:
        return math.inf
    # Any load also needs the buffer. If only the buffer's workers are there, or fewer, no load suffices.
    enough = have - spec.buffer
    near = max(1.0, enough * spec.concurrency * NEAR_LIMIT) if enough > 0 else 0.0
    # `decide` has set a time for another look.
    return math.inf if _lasting(stats, near) else near


def _lasting(stats: Stats, near: float) -> bool:
    """Return True if the load is near the limit, nothing waits, and it is not known whether that lasts."""
    return stats.load is not None and not stats.queued and 0 < near < stats.in_flight


def decide(spec: ScaleSpec, stats: Stats, now_s: float) -> Decision:
    """Return what to do at `now_s`. Workers start without a delay."""
    want = wanted(spec, stats)
    if want > stats.awake:
        return Decision(start=want - stats.awake)
    loaded = stats.queued + stats.in_flight
    decision = (_while_loaded if loaded else _without_load)(spec, stats, want, now_s)
    # With fewer that are ready, those that wait would take longer.
    parks = spec.park_after_s < math.inf and not stats.queued
    return _with_parking(spec, stats, want, decision, now_s) if parks else decision


def _with_parking(spec: ScaleSpec, stats: Stats, want: int, decision: Decision, now_s: float) -> Decision:
    """Add which of the workers that stay are parked: those that neither the load, nor an owner or a signal, needs now."""
    # Parked workers stop first, then those that are idle for the longest time.
    stopping = max(0, decision.stop - stats.parked)
    spare = max(0, min(len(stats.idle_since_s) - stopping, stats.awake - stopping - want))
    due_s = [since_s + spec.park_after_s for since_s in stats.idle_since_s[stopping : stopping + spare]]
    park = sum(at_s <= now_s for at_s in due_s)
    wakes = [at_s for at_s in (decision.wake_at_s, *due_s[park : park + 1]) if at_s is not None]
    return Decision(stop=decision.stop, park=park, wake_at_s=min(wakes, default=None))


def _while_loaded(spec: ScaleSpec, stats: Stats, want: int, now_s: float) -> Decision:
    stop, checks = _spare(spec, stats, max(1, want)), list[float]()
    left, awake = stats.held - stop, stats.awake - max(0, stop - stats.parked)
    if left > max(1, spec.min):
        checks.append(max(spec.scale_down_s / CHECKS, MIN_RECHECK_S))
    if stats.load is not None and awake < spec.max:
        # Calls may take longer than predicted, and a load near the limit may last.
        if stats.queued:
            checks.append(stats.load.delay_s)
        elif stats.in_flight > (awake - spec.buffer) * spec.concurrency * NEAR_LIMIT:
            checks.append(NEAR_CHECK_S)
    return Decision(stop=stop, wake_at_s=now_s + min(checks) if checks else None)


def _without_load(spec: ScaleSpec, stats: Stats, want: int, now_s: float) -> Decision:
    idle_since_s = (*stats.parked_since_s, *stats.idle_since_s)
    if not idle_since_s:
        return Decision()
    zero_at_s = max(idle_since_s) + spec.scale_to_zero_s
    if zero_at_s <= now_s:
        return Decision(stop=min(stats.held - want, len(idle_since_s)))
    stop = _spare(spec, stats, max(1, want))
    if stop == len(idle_since_s):
        return Decision(stop=stop)
    left = stats.held - stop
    # What the window holds ends with it, the last worker later.
    wakes = [zero_at_s] if left > want else []
    if left > max(1, want) and stats.recent_until_s > now_s:
        wakes.append(stats.recent_until_s)
    soonest_s = min(wakes, default=math.inf)
    return Decision(stop=stop, wake_at_s=soonest_s if soonest_s < math.inf else None)


def _spare(spec: ScaleSpec, stats: Stats, want: int) -> int:
    """Return how many ready and parked workers neither the present nor the recent load needs."""
    needed = max(want, min(stats.recent, spec.max))
    # Those that are stuck are why as many are wanted: without them, the next decision would stop another one.
    stuck = math.ceil(min(stats.load.stuck, stats.ready)) if stats.load is not None and stats.queued else 0
    return max(0, min(stats.held - needed, stats.ready - stuck + stats.parked))
