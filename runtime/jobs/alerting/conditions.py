"""Decides when a condition of a function begins and ends, and when an alert is sent.

A new condition is a class in CONDITIONS and its settings in `[alerts]`. The table in docs/operations.md is made from them. All
methods take the time as an argument.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Self

from ...ground.settings.alerts import Alerts

# The pause between two alerts of a condition is as long as the window, so that the second counts no calls of the first.
PAUSE_S = WINDOW_S = 300.0
# With fewer calls, two failed calls would be more than a tenth, which is the default of `error_share`.
MIN_CALLS = 20
SLICES = 10
"""The number of parts of the window of the share of errors. Calls leave the window one part at a time."""


class CountedCall(NamedTuple):
    """What a condition may learn from a call that has ended or was refused."""

    failed: bool
    cold_start_ms: float | None = None
    request_id: str = ""


@dataclass(slots=True)
class Condition:
    """The state of a condition, as its receiver knows it. It changes at most once in `pause_s` seconds."""

    name: ClassVar[str]
    begins: ClassVar[str]
    ends: ClassVar[str]
    """When it begins and ends, for the documentation."""
    pause_s: float
    begun: bool = False
    """True if its beginning was sent, and its end was not sent yet."""
    _again_s: float = -math.inf

    @classmethod
    def of(cls, settings: Alerts, *, begun: bool, now_s: float) -> Self | None:
        """Return the condition of a function with these settings; None if the settings turn it off."""
        raise NotImplementedError

    def observe(self, now_s: float, call: CountedCall) -> None:
        raise NotImplementedError

    def holds(self, now_s: float) -> bool:
        raise NotImplementedError

    def report(self, now_s: float) -> Sequence[float | str]:
        """Return this gateway's calls in the form that the other gateways pass to `hear`; () if there were no calls lately."""
        raise NotImplementedError

    def hear(self, now_s: float, reports: Sequence[Sequence[Any]]) -> None:
        """Take the latest reports of the other gateways, in place of their earlier reports."""
        raise NotImplementedError

    def figures(self) -> Mapping[str, float | str]:
        """Return the numbers to be sent, by name."""
        raise NotImplementedError

    def changed(self, now_s: float) -> bool:
        """Return True if the condition has begun or ended, and an alert must be sent now."""
        if now_s < self._again_s or self.holds(now_s) == self.begun:
            return False
        self.begun, self._again_s = not self.begun, now_s + self.pause_s
        return True

    def not_sent(self) -> None:
        """Undo the last change, because its alert could not be stored. `changed` reports the change again after the
        pause.
        """
        self.begun = not self.begun

    def due_s(self, now_s: float) -> float:
        """Return the time at which `changed` may return True even if no call ends until then; infinity if there is no
        such time.
        """
        return self._again_s if self.holds(now_s) != self.begun else math.inf


@dataclass(slots=True)
class _Slice:
    begun_s: float
    calls: int = 0
    errors: int = 0


@dataclass(slots=True)
class ErrorShare(Condition):
    """Holds while too many calls of the last `window_s` seconds have failed."""

    name = "error_share"
    begins = f"of at least {MIN_CALLS} calls in {WINDOW_S:g} s, the share `error_share` has failed"
    ends = "the share is lower, or the window has no calls left"
    limit: float = 0.1
    window_s: float = WINDOW_S
    min_calls: int = MIN_CALLS
    quiet_until_s: float = 0.0
    """Until this time, a window without calls does not end the condition, because a restart has emptied the window."""
    calls: int = 0
    errors: int = 0
    elsewhere: tuple[int, int] = (0, 0)
    """The calls and errors of the other gateways."""
    _slices: deque[_Slice] = field(default_factory=deque)

    @classmethod
    def of(cls, settings: Alerts, *, begun: bool, now_s: float) -> Self:
        share, quiet_until_s = settings.error_share, now_s + WINDOW_S
        return cls(PAUSE_S, begun, limit=share, min_calls=MIN_CALLS, quiet_until_s=quiet_until_s)

    def observe(self, now_s: float, call: CountedCall) -> None:
        self.note(now_s, failed=call.failed)

    def note(self, now_s: float, *, failed: bool) -> None:
        """Count a call that has ended."""
        self._expire(now_s)
        if not self._slices or now_s >= self._slices[-1].begun_s + self.window_s / SLICES:
            self._slices.append(_Slice(now_s))
        newest = self._slices[-1]
        self.calls, newest.calls = self.calls + 1, newest.calls + 1
        self.errors, newest.errors = self.errors + failed, newest.errors + failed

    def holds(self, now_s: float) -> bool:
        """Return True if the share of errors has reached the limit. Only the beginning of the condition needs
        `min_calls`.
        """
        self._expire(now_s)
        calls, errors = self._of_all()
        if not calls:
            return self.begun and now_s < self.quiet_until_s
        return errors >= self.limit * calls and (self.begun or calls >= self.min_calls)

    def report(self, now_s: float) -> Sequence[float | str]:
        self._expire(now_s)
        return (self.calls, self.errors) if self.calls else ()

    def hear(self, now_s: float, reports: Sequence[Sequence[Any]]) -> None:
        self.elsewhere = sum(one[0] for one in reports), sum(one[1] for one in reports)

    def figures(self) -> Mapping[str, float | str]:
        calls, errors = self._of_all()
        share = errors / calls if calls else 0.0
        return {
            "value": round(share, 4), "limit": self.limit, "calls": calls, "errors": errors,
            "window_s": self.window_s,
        }  # fmt: skip

    def due_s(self, now_s: float) -> float:
        sent_s = Condition.due_s(self, now_s)
        if not self.begun:
            return sent_s
        quiet_s = self.quiet_until_s if self.quiet_until_s > now_s else math.inf
        return min(sent_s, self._leaves_s(self._slices[0]) if self._slices else quiet_s)

    def _of_all(self) -> tuple[int, int]:
        """Return the calls and errors of all gateways."""
        return self.calls + self.elsewhere[0], self.errors + self.elsewhere[1]

    def _expire(self, now_s: float) -> None:
        while self._slices and self._leaves_s(self._slices[0]) <= now_s:
            old = self._slices.popleft()
            self.calls -= old.calls
            self.errors -= old.errors

    def _leaves_s(self, one: _Slice) -> float:
        return one.begun_s + self.window_s / SLICES + self.window_s


class ReportedStart(NamedTuple):
    """A cold start of a function."""

    at_s: float
    took_ms: float
    request_id: str


@dataclass(slots=True)
class SlowColdStart(Condition):
    """Holds while the latest cold start took longer than `limit_ms`."""

    name = "cold_start"
    begins = "a cold start took longer than `cold_start_ms`, which has no default"
    ends = "the next cold start is fast enough"
    limit_ms: float = math.inf
    # The latest cold starts of this gateway and of the others.
    _own: ReportedStart | None = None
    _other: ReportedStart | None = None

    @classmethod
    def of(cls, settings: Alerts, *, begun: bool, now_s: float) -> Self | None:
        if (limit_ms := settings.cold_start_ms) is None:
            return None
        return cls(PAUSE_S, begun, limit_ms=limit_ms)

    def observe(self, now_s: float, call: CountedCall) -> None:
        if call.cold_start_ms is not None:
            self.note(ReportedStart(now_s, call.cold_start_ms, call.request_id))

    def note(self, start: ReportedStart) -> None:
        self._own = start

    def holds(self, now_s: float) -> bool:
        latest = self._latest()
        return self.begun if latest is None else latest.took_ms > self.limit_ms

    def report(self, now_s: float) -> Sequence[float | str]:
        own = self._own
        if own is None or now_s - own.at_s > WINDOW_S:
            return ()
        # Report the age and not the time, because the monotonic clocks of machines differ.
        return round(now_s - own.at_s, 3), own.took_ms, own.request_id

    def hear(self, now_s: float, reports: Sequence[Sequence[Any]]) -> None:
        starts = [ReportedStart(now_s - age_s, *more) for age_s, *more in (one[:3] for one in reports)]
        self._other = max(starts, default=self._other)

    def figures(self) -> Mapping[str, float | str]:
        latest = self._latest() or ReportedStart(0.0, 0.0, "")
        value = round(latest.took_ms, 3)
        return {"value": value, "limit": self.limit_ms, "request_id": latest.request_id}

    def _latest(self) -> ReportedStart | None:
        return max((one for one in (self._own, self._other) if one is not None), default=None)


CONDITIONS: tuple[type[Condition], ...] = (ErrorShare, SlowColdStart)
"""All conditions."""
