"""Starts workers before they are needed, when a schedule or a call of an upstream function asks for them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from ....errors import GatewayError, UnknownFunction
from ...ground.settings.schedule import Schedule
from ...ground.telemetry.metrics import Reading
from ..reconciling.prewarms import WARM_S
from ..scaling.upstream import Upstreams, Window
from .live import Live
from .registry import Functions

# The event loop's timers ignore changes of the wall clock and the time during which the machine sleeps. So a timer for
# a schedule waits at most this long before the clock is read again. A schedule fires at most REARM_S too late.
REARM_S = 30.0
# No timer is shorter than this, because the event loop's timers are exact to a millisecond.
SOONEST_S = 0.001


@dataclass(slots=True)
class _Alarm:
    """A schedule of a live function, and when it fires next, in Unix seconds; None if it never fires again."""

    function: str
    schedule: Schedule
    next_at: float | None
    fired_at: float | None = None
    """The time in the schedule at which it fired last."""


class Alarms:
    """The schedules of all functions. This class reads no clock: callers pass the times, in Unix seconds."""

    def __init__(self) -> None:
        self._alarms: list[_Alarm] = []
        self._looked_at = 0.0

    def put(
        self, function: str, schedules: Iterable[Schedule], at: float
    ) -> Iterator[tuple[Schedule, float]]:
        """Replace a function's schedules. Yield the schedules that have fired before and whose time has not ended.

        Also yield the seconds that are left of each schedule's time.
        """
        self.drop(function)
        for schedule in schedules:
            alarm = _Alarm(function, schedule, _next(schedule, at))
            self._alarms.append(alarm)
            if (left_s := _left_s(schedule, at)) > 0:
                alarm.fired_at = round(at + left_s - schedule.for_s)
                yield schedule, left_s

    def drop(self, function: str) -> None:
        """Forget a function's schedules."""
        self._alarms = [alarm for alarm in self._alarms if alarm.function != function]

    def due(self, at: float) -> Iterator[tuple[str, Schedule, float]]:
        """Yield each schedule that has fired since the last call, with its function and the seconds left of its time.

        A schedule whose whole time passed while the machine slept is left out.
        """
        was_set_back = at < self._looked_at
        self._looked_at = at
        for alarm in self._alarms:
            fired = alarm.next_at is not None and alarm.next_at <= at
            if fired and (left_s := _left_s(alarm.schedule, at)) > 0:
                yield alarm.function, alarm.schedule, left_s
            if fired:
                alarm.fired_at = alarm.next_at
            if fired or was_set_back:
                alarm.next_at = _next(alarm.schedule, at)
                if alarm.next_at is not None and alarm.next_at == alarm.fired_at:
                    # The schedule has already fired at this time, before the clock was set back. Do not fire twice.
                    alarm.next_at = _next(alarm.schedule, alarm.next_at)

    def next_at(self) -> float | None:
        """Return when the next schedule fires, in Unix seconds; None if there is none."""
        return min((alarm.next_at for alarm in self._alarms if alarm.next_at is not None), default=None)


def _next(schedule: Schedule, at: float) -> float | None:
    following = schedule.next_fire(datetime.fromtimestamp(at, UTC))
    return None if following is None else following.timestamp()


def _left_s(schedule: Schedule, at: float) -> float:
    """Return the seconds for which the schedule still wants its workers; 0 or less if its time has ended."""
    last = schedule.last_fire(datetime.fromtimestamp(at, UTC))
    return 0.0 if last is None else last.timestamp() + schedule.for_s - at


@dataclass(slots=True)
class _Expected:
    """An expected call of a function after a call of its upstream function. `until_s` is the end of the expectation, in
    monotonic seconds.
    """

    until_s: float
    timer: asyncio.TimerHandle | None = None


class Prewarming:
    """Starts workers for the schedules of the live functions, and for functions that are often called after another
    function.
    """

    def __init__(self, functions: Functions, clock: Callable[[], float] = time.time) -> None:
        """`clock` returns the Unix seconds."""
        self._functions, self._clock = functions, clock
        self._loop = asyncio.get_running_loop()
        self._alarms = Alarms()
        self._timer: asyncio.TimerHandle | None = None
        # The owner of each function.
        self._owners: dict[str, str] = {}
        # The delays between calls of functions, by the owner of the functions. Calls of one owner's functions
        # reveal nothing to other owners, and start no workers of other owners.
        self._upstreams: dict[str, Upstreams] = {}
        # By upstream function: the functions whose settings name it. Each call of the upstream function starts a worker
        # of each of them.
        self._declared: dict[str, set[str]] = {}
        # The expected calls, by function and upstream function.
        self._expected: dict[tuple[str, str], _Expected] = {}

    def follow(self, name: str) -> None:
        """Follow the schedules and the upstream functions of a function that has a new live revision."""
        live = self._functions.get(name)
        settings, owner = live.record.settings, live.record.deployed_by
        for schedule, left_s in list(self._alarms.put(name, settings.schedule, self._clock())):
            self._fire(name, schedule, left_s)
        self._arm()
        self._declare(name, settings.after)
        if self._owners.get(name) != owner:
            self._forget_pairs(name)
            self._owners[name] = owner
            self._upstreams.setdefault(owner, Upstreams()).adopt(name, live.function.upstreams)

    def forget(self, name: str) -> None:
        """Forget the schedules and the upstream functions of a deleted function."""
        self._alarms.drop(name)
        self._arm()
        self._declare(name, ())
        self._forget_pairs(name)
        for pair in [pair for pair in self._expected if name in pair]:
            self._drop(pair)

    def _forget_pairs(self, name: str) -> None:
        if (owner := self._owners.pop(name, None)) is not None:
            self._upstreams[owner].forget(name)
            if owner not in self._owners.values():
                del self._upstreams[owner]

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for pair in list(self._expected):
            self._drop(pair)

    async def readings(self) -> list[Reading]:
        """Return the metrics of the workers that were started ahead of need."""
        counts = Counter[tuple[str, ...]]()
        for live in self._functions.all():
            prewarms = live.function.prewarms
            prewarms.settle()
            for (signal, used), count in prewarms.counts.items():
                counts[live.record.function, signal, str(used).lower()] = count
        text = "Workers that a signal started ahead of need, by whether a call used them."
        return [Reading("prewarms", text, counts, ("function", "signal", "used"), total=True)]

    # -- schedules

    def _arm(self) -> None:
        """Set the timer for the next schedule."""
        if self._timer is not None:
            self._timer.cancel()
        if (next_at := self._alarms.next_at()) is not None:
            delay_s = min(REARM_S, max(SOONEST_S, next_at - self._clock()))
            self._timer = self._loop.call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        try:
            for name, schedule, left_s in self._alarms.due(self._clock()):
                # GatewayError: the gateway is shutting down.
                with contextlib.suppress(GatewayError):
                    self._fire(name, schedule, left_s)
        finally:
            self._arm()

    def _fire(self, name: str, schedule: Schedule, left_s: float) -> None:
        live = self._functions.get(name)
        live.workers.warm(schedule.workers, f"schedule {schedule.cron}", left_s)
        workers = f"{schedule.workers} worker{'' if schedule.workers == 1 else 's'}"
        live.logs.write("gateway", f"schedule {schedule.cron}: {workers} for {left_s:.0f} s")

    # -- upstream functions

    def note_call(self, name: str, called_s: float) -> None:
        """Record a call of the function `name`, which calls of other functions may follow. `called_s` is in monotonic
        seconds.
        """
        # Do this after the event loop has handled the call itself.
        self._loop.call_soon(self._expect_followers, name, called_s)

    def _expect_followers(self, name: str, called_s: float) -> None:
        if (owner := self._owners.get(name)) is None:
            # The function was deleted.
            return
        upstreams = self._upstreams[owner]
        upstreams.note(name, called_s)
        declared = self._declared.get(name, ())
        for follower, delays in upstreams.followers(name):
            if follower not in declared and (live := self._find(follower)) is not None:
                ladder = live.function.ladder
                cost, interval_s = ladder.climb_cost(), upstreams.interval_s(follower)
                window = delays.best_window(cost, ladder.ready_shares(), interval_s)
                if window is not None:
                    self._expect(follower, name, "upstream", called_s, window)
        for follower in declared:
            found = upstreams.delays(follower, name)
            span_s = found.span_s() if found is not None and found.known else WARM_S
            self._expect(follower, name, f"upstream {name}", called_s, Window(0.0, span_s, 1.0))

    def _declare(self, name: str, upstreams: Iterable[str]) -> None:
        """Replace the upstream functions that the settings of a function name."""
        for upstream in [upstream for upstream, followers in self._declared.items() if name in followers]:
            self._declared[upstream].discard(name)
            if not self._declared[upstream]:
                del self._declared[upstream]
        for upstream in upstreams:
            self._declared.setdefault(upstream, set()).add(name)

    def _expect(self, follower: str, name: str, cause: str, called_s: float, window: Window) -> None:
        """Have a worker of `follower` ready during a window after the call of `name`. If the timer for an earlier call
        of `name` still runs, only extend the window of that call.
        """
        until_s = called_s + window.until_s
        if (expected := self._expected.get((follower, name))) is not None:
            expected.until_s = max(expected.until_s, until_s)
            return
        self._expected[follower, name] = expected = _Expected(until_s)
        delay_s = called_s + window.from_s - time.monotonic()
        start = functools.partial(self._prewarm, follower, name, cause, window.probability)
        if delay_s <= SOONEST_S:
            start()
        else:
            expected.timer = self._loop.call_later(delay_s, start)

    def _prewarm(self, follower: str, name: str, cause: str, probability: float) -> None:
        until_s = self._expected.pop((follower, name)).until_s
        if (live := self._find(follower)) is None:
            return
        workers, for_s = live.workers, until_s - time.monotonic()
        if not workers.replicas.ready and not workers.replicas.starting:
            live.function.decisions.note("expect", cause, probability_share=probability, for_s=for_s)
        workers.warm(1, cause, for_s)

    def _find(self, name: str) -> Live | None:
        """Return a function; None if the function is deleted or the gateway is shutting down."""
        with contextlib.suppress(GatewayError, UnknownFunction):
            return self._functions.get(name)
        return None

    def _drop(self, pair: tuple[str, str]) -> None:
        if (timer := self._expected.pop(pair).timer) is not None:
            timer.cancel()
