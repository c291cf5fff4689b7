"""Keeps a timer for each invocation, and has the errors of invocations whose time is over.

Nearly all invocations end long before their deadline, so it must be cheap to set and to cancel a timer. A
time that is not soon is only an entry in a slot, which holds the invocations of one second. Their real timers
start when the slot opens, as in a timing wheel (Varghese and Lauck, SOSP '87).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from ...errors import ActivationTimeout, DeadlineExceeded
from .invocation import Invocation

# An invocation that is due within this time gets its own timer. A later one waits in a slot, which opens
# SOON_S / 2 to SOON_S before it is due.
SOON_S = 2.0
# Tolerance: a time at most this far in the future counts as reached, because timers may fire slightly early.
EARLY_S = 0.001

_Slot = dict[Invocation, float]


class Deadlines:
    """The timers of invocations, at most one for each. `on_due` is called with an invocation that is due."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_due: Callable[[Invocation], None]) -> None:
        self._loop = loop
        self._on_due = on_due
        self._slots: dict[int, _Slot] = {}
        self._timers: dict[Invocation, asyncio.TimerHandle | _Slot] = {}

    def set(self, invocation: Invocation, when_s: float, now_s: float) -> None:
        """Make an invocation due at `when_s`. This replaces the time that was set before."""
        if invocation in self._timers:
            self.cancel(invocation)
        if when_s - now_s <= SOON_S:
            self._timers[invocation] = self._loop.call_later(max(0.0, when_s - now_s), self._fire, invocation)
            return
        second = int(when_s - SOON_S / 2)
        if (slot := self._slots.get(second)) is None:
            slot = self._slots[second] = {}
            self._loop.call_later(max(0.0, second - now_s), self._open, second)
        slot[invocation] = when_s
        self._timers[invocation] = slot

    def cancel(self, invocation: Invocation) -> None:
        timer = self._timers.pop(invocation, None)
        if isinstance(timer, dict):
            timer.pop(invocation, None)
        elif timer is not None:
            timer.cancel()

    def _fire(self, invocation: Invocation) -> None:
        self._timers.pop(invocation, None)
        self._on_due(invocation)

    def _open(self, second: int) -> None:
        """Start a timer for each invocation that is still in the slot of `second`."""
        now_s = time.monotonic()
        for invocation, when_s in self._slots.pop(second).items():
            self._timers[invocation] = self._loop.call_later(max(0.0, when_s - now_s), self._fire, invocation)


def limit_s(invocation: Invocation, now_s: float) -> float:
    """Return when to check an invocation next: at its deadline, or at the end of an earlier limit."""
    if invocation.worker:
        return min(invocation.deadline_s, invocation.execution_deadline_s)
    holding = invocation.hold_until_s > now_s + EARLY_S
    return min(invocation.deadline_s, invocation.hold_until_s) if holding else invocation.deadline_s


def deadline_exceeded(waited_s: float) -> DeadlineExceeded:
    message = f"The invocation did not end within its deadline ({waited_s:.1f} s)."
    return DeadlineExceeded(message, remedy="Raise timeout_s in pilotflame.toml, or ask for less.")


def execution_timeout(limit_s: float) -> DeadlineExceeded:
    message = f"One call of the handler took longer than execution_timeout_s, which is {limit_s:g} s."
    return DeadlineExceeded(message, remedy="Raise execution_timeout_s, or do less in one call.")


def activation_timeout(function: str, waited_s: float) -> ActivationTimeout:
    message = f"No worker of {function!r} was ready within the hold time ({waited_s:.1f} s)."
    remedy = "Try again: the activation goes on. To wait longer, raise hold_s or send X-Scale-Up-Timeout."
    return ActivationTimeout(message, remedy=remedy)
