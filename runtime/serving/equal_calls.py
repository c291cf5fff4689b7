"""Lets equal calls wait for the output of the first of them while it runs. The response cache decides which calls are equal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial

from ...errors import PilotflameError
from .deadlines import EARLY_S, deadline_exceeded, limit_s
from .invocation import Invocation

MOST_WAITING = 1024
"""The most calls that wait for one call. Further calls run."""


@dataclass(eq=False, slots=True)
class _Waiting:
    """A call that waits for an equal call."""

    invocation: Invocation
    run: Callable[[], None]
    allowed_s: float | None
    timer: asyncio.TimerHandle | None = None

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


@dataclass(eq=False, slots=True)
class _SharedRun:
    """A running call, and the equal calls that wait for it, in the order of their arrival."""

    first: Invocation
    waiting: dict[Invocation, _Waiting] = field(default_factory=dict)

    def takes(self, invocation: Invocation) -> bool:
        """Return True if an invocation may wait: it does not wait in the queue behind calls that are less urgent."""
        in_time = bool(self.first.worker) or self.first.priority <= invocation.priority
        return in_time and len(self.waiting) < MOST_WAITING

    def remove(self, invocation: Invocation) -> None:
        if (one := self.waiting.pop(invocation, None)) is not None:
            one.stop_timer()


class EqualCalls:
    """The calls that run, by a key that is the same for equal calls."""

    def __init__(self) -> None:
        self._runs: dict[Hashable, _SharedRun] = {}

    def start(
        self, key: Hashable, invocation: Invocation, run: Callable[[], None], allowed_s: float | None = None
    ) -> bool:
        """Let an invocation wait for an equal one, and return True. If no equal one runs, call `run` and return False.

        `run` submits the invocation. If it raises an error here, this raises the error too. A waiting invocation gets the
        output of the first one. If the first one fails, each waiting one runs. If the caller of the first one has gone, the
        next one runs in its place. `allowed_s` is the function's time limit, if the caller has set a shorter one.
        """
        if (found := self._runs.get(key)) is None:
            run()
            made = self._runs[key] = _SharedRun(invocation)
            invocation.output.add_done_callback(lambda _: self._end(key, made))
            return False
        if not found.takes(invocation):
            run()
            return False
        # So that each waiting call takes little memory.
        invocation.body = found.first.body
        one = found.waiting[invocation] = _Waiting(invocation, run, allowed_s)
        invocation.output.add_done_callback(lambda _: found.remove(invocation))
        self._set_timer(found, one)
        return True

    def _end(self, key: Hashable, run: _SharedRun) -> None:
        """End the calls that wait for one that has ended, or let them run."""
        del self._runs[key]
        waiting, run.waiting = list(run.waiting.values()), {}
        output = run.first.output
        for one in waiting:
            one.stop_timer()
            invocation = one.invocation
            if invocation.ended:
                continue
            if output.cancelled():
                _try(invocation, partial(self.start, key, invocation, one.run, one.allowed_s))
            elif output.exception() is not None:
                _try(invocation, one.run)
            else:
                invocation.cache_status += "; collapsed"
                invocation.end(output.result())

    def _set_timer(self, run: _SharedRun, one: _Waiting) -> None:
        now_s = time.monotonic()
        delay_s = max(0.0, limit_s(one.invocation, now_s) - now_s)
        one.timer = asyncio.get_running_loop().call_later(delay_s, self._on_due, run, one)

    def _on_due(self, run: _SharedRun, one: _Waiting) -> None:
        """End a waiting call at its deadline. At the end of its hold time, let it run if the first call still waits for a worker."""
        now_s, invocation = time.monotonic(), one.invocation
        if now_s >= invocation.deadline_s - EARLY_S:
            waited_s = now_s - invocation.timeline.received_s
            invocation.end(deadline_exceeded(waited_s, allowed_s=one.allowed_s))
        elif run.first.worker:
            self._set_timer(run, one)
        else:
            run.remove(invocation)
            _try(invocation, one.run)


def _try(invocation: Invocation, run: Callable[[], object]) -> None:
    """Call `run`, and end the invocation with the error that it raises."""
    try:
        run()
    except PilotflameError as error:
        invocation.end(error)
