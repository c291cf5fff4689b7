"""Ends invocations that exceed a time limit, and replaces workers whose handler call does not end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from ....errors import DeadlineExceeded, PilotflameError
from ...ground.settings.function_settings import FunctionSettings
from ...ground.settings.scale_spec import ReachedLimit
from .call_ends import activation_timeout, deadline_exceeded, execution_timeout
from .deadlines import EARLY_S, Deadlines
from .invocation import Invocation
from .replica import Replica
from .replicas import Replicas

# An async handler is cancelled at its limit, and closes files and connections in this time. A longer time would only delay the
# worker that replaces the worker of a stuck call.
CANCEL_GRACE_S = 5.0


class TimeLimits:
    """The time limits of the invocations of one revision, in the queue and at its workers."""

    def __init__(
        self, function: str, settings: FunctionSettings, replicas: Replicas, aside: Mapping[Invocation, Invocation],
        fail: Callable[[Invocation, PilotflameError], None], look: Callable[[], None],
    ) -> None:  # fmt: skip
        """`aside` has invocations outside the queue, each with the invocation for whose output it waits.

        `fail` ends a late invocation with an error, wherever it is. `look` is called after a worker was replaced.
        """
        self._function, self.settings = function, settings
        self._replicas, self._aside, self._fail, self._look = replicas, aside, fail, look
        self.deadlines = Deadlines(asyncio.get_running_loop(), self._check)
        self.reached: ReachedLimit | None = None
        """The limit, shared with other functions, that now keeps workers from starting; None without such a limit. `reconciling` sets it."""
        self.elsewhere: ReachedLimit | None = None
        """The part of `scale.max` that other gateways have, if this now keeps workers from starting."""
        self.given_up = 0
        """The number of invocations that have failed because their time was over before a worker had started."""

    def _check(self, invocation: Invocation) -> None:
        """Fail an invocation if its time is over. Otherwise set its next time."""
        now_s, reached = time.monotonic(), self.reached or self.elsewhere
        waited_s = now_s - invocation.timeline.received_s
        cold = not (self._aside.get(invocation, invocation).worker or self._replicas.ready)
        if (replica := self._replicas.named(invocation.worker)) is not None:
            self._check_at_worker(invocation, replica, now_s)
        elif now_s >= invocation.deadline_s - EARLY_S:
            self.given_up += cold
            queued = not invocation.worker and invocation not in self._aside and bool(self._replicas.ready)
            self._fail(invocation, self._late(invocation, waited_s, reached, queued=queued))
        elif cold and now_s >= invocation.hold_until_s - EARLY_S:
            self.given_up += 1
            self._fail(invocation, activation_timeout(self._function, waited_s, reached))
        else:
            # If the invocation's worker has died, only the deadline limits the invocation until `recover` decides about it.
            died = bool(invocation.worker)
            until_s = invocation.deadline_s if died else limit_s(invocation, now_s)
            self.deadlines.set(invocation, until_s, now_s)

    def _late(
        self,
        invocation: Invocation,
        waited_s: float,
        reached: ReachedLimit | None = None,
        *,
        queued: bool = False,
    ) -> DeadlineExceeded:
        """Return the error of an invocation whose deadline has passed. `reached` is the limit that made it wait."""
        allowed_s = self.settings.timeout_s
        by_caller = not invocation.patient and invocation.timeout_s < allowed_s
        return deadline_exceeded(waited_s, reached, allowed_s=allowed_s if by_caller else None, queued=queued)

    def _check_at_worker(self, invocation: Invocation, replica: Replica, now_s: float) -> None:
        most_s, started_s = self.settings.execution_timeout_s, replica.outstanding.started_s(invocation)
        invocation.limit_execution(now_s if started_s is None else started_s, most_s)
        if invocation.ended or (invocation.answered and now_s >= limit_s(invocation, now_s) - EARLY_S):
            self.check_stuck(invocation, replica, now_s)
        elif now_s >= invocation.deadline_s - EARLY_S:
            self._fail(invocation, self._late(invocation, now_s - invocation.timeline.received_s))
        elif most_s is None or now_s < invocation.execution_deadline_s - EARLY_S:
            self.deadlines.set(invocation, limit_s(invocation, now_s), now_s)
        elif invocation.batch_size > 1:
            # Any invocation of the batch may be the cause. Replace the worker, so that each invocation runs again
            # outside a batch. Until the other calls of the worker have ended, only its deadline limits this invocation.
            replica.replace(invocation)
            self.deadlines.set(invocation, invocation.deadline_s, now_s)
            self._look()
        else:
            self._fail(invocation, execution_timeout(most_s))

    def check_stuck(self, invocation: Invocation, replica: Replica, now_s: float) -> None:
        """Replace the worker if the handler call of an ended or answered invocation is stuck. Otherwise check again when
        it may be stuck.

        A handler call may outlive its caller and the caller's deadline. It is stuck if it takes longer than the
        function allows plus `CANCEL_GRACE_S`. If other callers of its batch still wait, their limits apply first.
        """
        settings, started_s = self.settings, replica.outstanding.started_s(invocation)
        most_s = settings.execution_timeout_s or max(settings.timeout_s, invocation.execution_s or 0.0)
        # The time of an open connection counts from its last message.
        began_s = now_s if started_s is None else max(started_s, invocation.active_s)
        stuck_s = began_s + most_s + CANCEL_GRACE_S
        if now_s < stuck_s - EARLY_S:
            self.deadlines.set(invocation, stuck_s, now_s)
        elif not replica.calls.awaited(invocation):
            replica.replace(invocation)
            self._look()

    def restart(self, invocations: list[Invocation]) -> None:
        """Restart the time limits for the rest of a batch, because each handler call gets the full limits."""
        for invocation in invocations:
            self._check(invocation)


def limit_s(invocation: Invocation, now_s: float) -> float:
    """Return when to check an invocation next: at its deadline, or at the end of an earlier limit."""
    if invocation.worker:
        return min(invocation.deadline_s, invocation.execution_deadline_s)
    holding = invocation.hold_until_s > now_s + EARLY_S
    return min(invocation.deadline_s, invocation.hold_until_s) if holding else invocation.deadline_s
