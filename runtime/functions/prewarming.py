"""Starts workers ahead of need, when signals outside of a function's own load ask for them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from ...errors import GatewayError
from ..settings.schedule import Schedule
from ..telemetry.metrics import Reading
from .registry import Functions

# Timers do not follow the wall clock when somebody sets it or when the machine sleeps. So no timer waits longer
# than this for a schedule: it fires at most so much later then.
REARM_S = 30.0
# The event loop's timers are exact to a millisecond.
SOONEST_S = 0.001


@dataclass(slots=True)
class _Alarm:
    """A schedule of a live function, and when it fires next, in Unix seconds; None if never."""

    function: str
    schedule: Schedule
    next_at: float | None


class Alarms:
    """The schedules of all functions. It reads no clock: times are passed in Unix seconds."""

    def __init__(self) -> None:
        self._alarms: list[_Alarm] = []
        self._looked_at = 0.0

    def put(
        self, function: str, schedules: Iterable[Schedule], at: float
    ) -> Iterator[tuple[Schedule, float]]:
        """Replace a function's schedules. Yield those that fired before and whose time has not ended.

        Each comes with the seconds that are left of its time.
        """
        self.drop(function)
        for schedule in schedules:
            self._alarms.append(_Alarm(function, schedule, _next(schedule, at)))
            if (left_s := _left_s(schedule, at)) > 0:
                yield schedule, left_s

    def drop(self, function: str) -> None:
        """Forget a function's schedules."""
        self._alarms = [alarm for alarm in self._alarms if alarm.function != function]

    def due(self, at: float) -> Iterator[tuple[str, Schedule, float]]:
        """Yield the function and schedule of each that has fired since the last call, and the seconds left of its time.

        One whose whole time has passed meanwhile, because the machine slept, is left out.
        """
        was_set_back = at < self._looked_at
        self._looked_at = at
        for alarm in self._alarms:
            fired = alarm.next_at is not None and alarm.next_at <= at
            if fired and (left_s := _left_s(alarm.schedule, at)) > 0:
                yield alarm.function, alarm.schedule, left_s
            if fired or was_set_back:
                alarm.next_at = _next(alarm.schedule, at)

    def next_at(self) -> float | None:
        """Return when the next schedule fires, in Unix seconds; None if there is none."""
        return min((alarm.next_at for alarm in self._alarms if alarm.next_at is not None), default=None)


def _next(schedule: Schedule, at: float) -> float | None:
    following = schedule.next_fire(datetime.fromtimestamp(at, UTC))
    return None if following is None else following.timestamp()


def _left_s(schedule: Schedule, at: float) -> float:
    """Return for how many seconds the schedule still wants its workers; 0 or less if it does not."""
    last = schedule.last_fire(datetime.fromtimestamp(at, UTC))
    return 0.0 if last is None else last.timestamp() + schedule.for_s - at


class Prewarming:
    """Watches the schedules of the live functions."""

    def __init__(self, functions: Functions, clock: Callable[[], float] = time.time) -> None:
        """`clock` returns the Unix seconds."""
        self._functions, self._clock = functions, clock
        self._loop = asyncio.get_running_loop()
        self._alarms = Alarms()
        self._timer: asyncio.TimerHandle | None = None

    def follow(self, name: str) -> None:
        """Follow the signals of a function, of which a revision became live."""
        settings = self._functions.get(name).record.settings
        for schedule, left_s in list(self._alarms.put(name, settings.schedule, self._clock())):
            self._fire(name, schedule, left_s)
        self._arm()

    def forget(self, name: str) -> None:
        """Forget the signals of a deleted function."""
        self._alarms.drop(name)
        self._arm()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def readings(self) -> list[Reading]:
        """Return the metrics of the workers that were started ahead of need."""
        counts = Counter[tuple[str, ...]]()
        for live in self._functions.all():
            prewarms = live.revision.history.prewarms
            prewarms.settle()
            for (signal, used), count in prewarms.counts.items():
                counts[live.record.function, signal, str(used).lower()] = count
        text = "Workers that a signal started ahead of need, by whether a call used them."
        return [Reading("prewarms", text, counts, ("function", "signal", "used"), total=True)]

    def _arm(self) -> None:
        """Set the timer for the next schedule."""
        self.close()
        if (next_at := self._alarms.next_at()) is not None:
            delay_s = min(REARM_S, max(SOONEST_S, next_at - self._clock()))
            self._timer = self._loop.call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        for name, schedule, left_s in self._alarms.due(self._clock()):
            # The gateway is shutting down.
            with contextlib.suppress(GatewayError):
                self._fire(name, schedule, left_s)
        self._arm()

    def _fire(self, name: str, schedule: Schedule, left_s: float) -> None:
        live = self._functions.get(name)
        live.revision.warm(schedule.workers, f"schedule {schedule.cron}", left_s)
        live.logs.write("gateway", f"schedule {schedule.cron}: {schedule.workers} workers for {left_s:.0f} s")
