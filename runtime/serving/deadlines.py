"""Deadlines: a timer for each invocation, and the errors of those that run out of time.

Nearly all invocations end long before their deadline, so setting and cancelling must be cheap: a timer far
ahead is one entry in a slot of a second, as in a timing wheel (Varghese and Lauck, SOSP '87).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from ...errors import ActivationTimeout, DeadlineExceeded
from .invocation import Invocation

# An invocation gets its own timer only this long before it is due.
SOON_S = 2.0
# A timer may fire this much early.
EARLY_S = 0.001

_Slot = dict[Invocation, float]


class Deadlines:
    """At most one timer for each invocation."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_due: Callable[[Invocation], None]) -> None:
        self._loop = loop
        self._on_due = on_due
        self._slots: dict[int, _Slot] = {}
        self._timers: dict[Invocation, asyncio.TimerHandle | _Slot] = {}

    def set(self, invocation: Invocation, when_s: float, now_s: float) -> None:
        """Call `on_due` at `when_s`, and not at the time that was set before."""
        if invocation in self._timers:
            self.cancel(invocation)
        if when_s - now_s <= SOON_S:
            self._start(invocation, when_s - now_s)
            return
        second = int(when_s - SOON_S / 2)
        slot = self._slots.get(second)
        if slot is None:
            slot = self._slots[second] = {}
            self._loop.call_later(max(0.0, second - now_s), self._open, second)
        slot[invocation] = when_s
        self._timers[invocation] = slot

    def cancel(self, invocation: Invocation) -> None:
        timer = self._timers.pop(invocation, None)
        if timer is None:
            return
        if isinstance(timer, dict):
            timer.pop(invocation, None)
        else:
            timer.cancel()

    def _start(self, invocation: Invocation, delay_s: float) -> None:
        self._timers[invocation] = self._loop.call_later(max(0.0, delay_s), self._fire, invocation)

    def _fire(self, invocation: Invocation) -> None:
        self._timers.pop(invocation, None)
        self._on_due(invocation)

    def _open(self, second: int) -> None:
        """Start a timer for each invocation of a slot that still waits."""
        now_s = time.monotonic()
        for invocation, when_s in self._slots.pop(second).items():
            self._start(invocation, when_s - now_s)


def waiting_limit_s(invocation: Invocation, now_s: float) -> float:
    """Return the end of a waiting invocation's hold time or, once that has passed, its deadline."""
    holding = invocation.hold_until_s > now_s + EARLY_S
    return min(invocation.deadline_s, invocation.hold_until_s) if holding else invocation.deadline_s


def deadline_exceeded(waited_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"The invocation did not end within its deadline ({waited_s:.1f} s).",
        remedy="Raise timeout_s in pilotflame.toml, or ask for less.",
    )


def execution_timeout(limit_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"One call of the handler took longer than execution_timeout_s, which is {limit_s:g} s.",
        remedy="Raise execution_timeout_s in pilotflame.toml, or do less in one call.",
    )


def activation_timeout(function: str, waited_s: float) -> ActivationTimeout:
    return ActivationTimeout(
        f"No worker of {function!r} was ready within the hold time ({waited_s:.1f} s).",
        remedy="Try again: the activation goes on. hold_s in pilotflame.toml, or the header"
        " X-Scale-Up-Timeout (seconds), lets callers wait longer.",
    )
