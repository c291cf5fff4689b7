"""Keeps a timer for each invocation, and makes the errors of invocations whose time is over.

Nearly all invocations end long before their deadline, so setting and cancelling a timer must be cheap. A time that is
not soon is only an entry in a slot, as in a hierarchical timing wheel (Varghese and Lauck, SOSP '87): slots of one
second for the next two minutes, and wider slots after that. All slots share one timer of the event loop. When a slot
opens, its invocations move to narrower slots, or get timers of their own.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import NamedTuple

from ....errors import ActivationTimeout, DeadlineExceeded
from ...ground.settings.scale_spec import ReachedLimit
from .invocation import Invocation

# An invocation that is due within this time gets its own timer. An invocation that is due later waits in a slot, which
# opens SOON_S / 2 to SOON_S before the invocation is due.
SOON_S = 2.0
# The slots of each level are RATIO times as wide as the slots of the level before. A time goes into the first level
# on which the time is less than 2 * RATIO slots away.
RATIO = 64
# Tolerance: a time at most this far in the future counts as reached, because timers may fire slightly early.
EARLY_S = 0.001

_Slot = dict[Invocation, float]


class Deadlines:
    """The timers of invocations, at most one for each. A timer calls `on_due` with each invocation that is due.

    There are few slots, so empty slots stay until they open. But after `close`, empty slots and their timer are
    removed at once, so that no timer keeps a retired revision in memory.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_due: Callable[[Invocation], None]) -> None:
        self._loop = loop
        self._on_due = on_due
        # The slots by the second at which each opens.
        self._slots: dict[int, _Slot] = {}
        self._timers: dict[Invocation, asyncio.TimerHandle | _Slot] = {}
        self._next: asyncio.TimerHandle | None = None
        self._next_s = math.inf
        self._closed = False

    def set(self, invocation: Invocation, when_s: float, now_s: float) -> None:
        """Make an invocation due at `when_s`. This replaces the time that was set before."""
        if invocation in self._timers:
            self.cancel(invocation)
        left_s = when_s - now_s
        if left_s <= SOON_S:
            self._timers[invocation] = self._loop.call_later(max(0.0, left_s), self._fire, invocation)
            return
        width = 1
        while left_s >= 2 * RATIO * width:
            width *= RATIO
        second = int(when_s - SOON_S / 2) // width * width
        if (slot := self._slots.get(second)) is None:
            slot = self._slots[second] = {}
            if second < self._next_s:
                self._open_at(second, now_s)
        slot[invocation] = when_s
        self._timers[invocation] = slot

    def cancel(self, invocation: Invocation) -> None:
        timer = self._timers.pop(invocation, None)
        if isinstance(timer, dict):
            del timer[invocation]
            if self._closed and not timer:
                self._remove_empty()
        elif timer is not None:
            timer.cancel()

    def close(self) -> None:
        """Drop empty slots now and later, so that only invocations keep timers of the event loop."""
        self._closed = True
        self._remove_empty()

    def _remove_empty(self) -> None:
        self._slots = {second: slot for second, slot in self._slots.items() if slot}
        if not self._slots:
            self._stop()

    def _fire(self, invocation: Invocation) -> None:
        self._timers.pop(invocation, None)
        self._on_due(invocation)

    def _open_at(self, second: int, now_s: float) -> None:
        self._stop()
        self._next_s = second
        self._next = self._loop.call_later(max(0.0, second - now_s), self._open)

    def _stop(self) -> None:
        if self._next is not None:
            self._next.cancel()
        self._next, self._next_s = None, math.inf

    def _open(self) -> None:
        """Open the slots whose time has come: set their invocations again, and start the timer of the next slot."""
        self._next, self._next_s = None, math.inf
        now_s = time.monotonic()
        for second in [second for second in self._slots if second <= now_s + EARLY_S]:
            for invocation, when_s in self._slots.pop(second).items():
                del self._timers[invocation]
                self.set(invocation, when_s, now_s)
        if self._slots:
            self._open_at(min(self._slots), now_s)


def limit_s(invocation: Invocation, now_s: float) -> float:
    """Return when to check an invocation next: at its deadline, or at the end of an earlier limit."""
    if invocation.worker:
        return min(invocation.deadline_s, invocation.execution_deadline_s)
    holding = invocation.hold_until_s > now_s + EARLY_S
    return min(invocation.deadline_s, invocation.hold_until_s) if holding else invocation.deadline_s


class _Taken(NamedTuple):
    """The parts of the error message for a caller that gets no worker because of a limit."""

    text: str
    remedy: str


def _all_taken(reached: ReachedLimit) -> _Taken:
    workers = "1 worker" if reached.most == 1 else f"{reached.most} workers"
    if reached.name == "max_workers":
        return _Taken(
            f"The gateway may run {workers} (max_workers), and all are taken.",
            "Try again later, raise PILOTFLAME_MAX_WORKERS, or lower scale.max of other functions.",
        )
    if reached.name == "gpus":
        return _Taken(
            f"The node's GPUs ({reached.most}) have no room for another worker, and none of theirs was idle.",
            "Try again later, lower resources.gpu_memory_mb or scale.max of functions, or add GPUs.",
        )
    return _Taken(
        f"The functions of its owner may have {workers} together, and all are taken.",
        "Try again later, lower scale.max of the owner's other functions, or deploy with a key that allows more workers.",
    )


def deadline_exceeded(
    waited_s: float, reached: ReachedLimit | None = None, *, allowed_s: float | None = None
) -> DeadlineExceeded:
    """Return the error of a late invocation. `reached` is the limit of workers, if it made the invocation wait.

    `allowed_s` is the function's time limit, if the caller has set a shorter time limit.
    """
    if reached is not None:
        text, remedy = _all_taken(reached)
        message = f"The invocation waited {waited_s:.1f} s for a worker. {text}"
        return DeadlineExceeded(message, remedy=remedy, details={reached.name: reached.most})
    if allowed_s is not None:
        message = f"The invocation did not end within the caller's own time limit ({waited_s:.1f} s)."
        remedy = (
            f"Send a longer X-Request-Timeout, or other header of it: the function allows {allowed_s:g} s."
        )
        return DeadlineExceeded(message, remedy=remedy)
    message = f"The invocation did not end within its deadline ({waited_s:.1f} s)."
    return DeadlineExceeded(message, remedy="Raise timeout_s in pilotflame.toml, or ask for less.")


def execution_timeout(limit_s: float) -> DeadlineExceeded:
    message = f"One call of the handler took longer than execution_timeout_s, which is {limit_s:g} s."
    return DeadlineExceeded(message, remedy="Raise execution_timeout_s, or do less in one call.")


def activation_timeout(
    function: str, waited_s: float, reached: ReachedLimit | None = None
) -> ActivationTimeout:
    """Return the error of an invocation that got no worker within its hold time.

    `reached` has the same meaning as in `deadline_exceeded`.
    """
    message = f"No worker of {function!r} was ready within the hold time ({waited_s:.1f} s)."
    if reached is not None:
        text, remedy = _all_taken(reached)
        return ActivationTimeout(f"{message} {text}", remedy=remedy, details={reached.name: reached.most})
    remedy = "Try again: the activation goes on. To wait longer, raise hold_s or send X-Scale-Up-Timeout."
    return ActivationTimeout(message, remedy=remedy)
