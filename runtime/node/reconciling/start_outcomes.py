"""Records how the starts of a revision's workers end. Outcomes end waits for workers; failures delay the next start."""

from __future__ import annotations

import asyncio
import math
import time
from typing import NamedTuple

from ....errors import ActivationFailed, CrashLoop, PilotflameError, QueueFull, wrapped
from ...calls.serving.replicas import Replicas

# After n failed starts in a row, workers are started only for calls, and not for example for `min`, `buffer` or a warm-up,
# for FIRST_BACKOFF_S x 2^(n - 1) seconds, at most MAX_BACKOFF_S. After MAX_FAILURES failed starts in a row, and without a
# ready worker, no worker is started in this time.
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 300.0
MAX_FAILURES = 5
# If this many workers in a row died while they started, without a report, the waiting invocations fail.
MAX_UNEXPLAINED_DEATHS = 3
# The largest number of callers that may wait at the same time until workers of a revision are ready.
MAX_WAITING = 1000


class Breaker:
    """Counts the starts that have failed since a worker was last ready. After MAX_FAILURES failures, the breaker opens.

    While the breaker is open, invocations are refused at once with the reason of the last failure. After the back-off,
    one more start may be tried. If that start fails too, the breaker stays open for twice as long.
    """

    def __init__(self) -> None:
        self.failures = 0
        self.backoff_until_s = 0.0
        """Until this time, workers start only for calls. If the breaker is open and no worker is ready, no worker starts."""
        self.error: PilotflameError | None = None
        """The error of the latest failed start."""

    def fail(self, error: PilotflameError, now_s: float) -> None:
        """Count a failed start."""
        self.failures += 1
        self.error = error
        backoff_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(self.failures - 1, 16))
        self.backoff_until_s = now_s + backoff_s

    def reset(self) -> None:
        """Forget all failures: a worker is ready, or the owner has removed the cause."""
        self.failures, self.backoff_until_s, self.error = 0, 0.0, None

    def open(self, now_s: float) -> bool:
        return self.failures >= MAX_FAILURES and now_s < self.backoff_until_s

    def refusal(self, function: str, now_s: float) -> CrashLoop:
        """Return the error of an invocation that arrives while the breaker is open."""
        error = self.error
        wait_s = max(0.0, self.backoff_until_s - now_s)
        text = f"The last {self.failures} starts of a worker of {function} failed. The next is tried in {math.ceil(wait_s)} s."
        remedy = f"Mend the handler and redeploy it. If the cause was elsewhere: pilotflame reset {function}"
        if error is None:
            return CrashLoop(text, remedy=remedy, details={"retry_after_s": wait_s})
        details = {"cause": error.code, "retry_after_s": wait_s}
        text += " The last error: {}"
        return wrapped(CrashLoop, error, text.format, remedy=remedy, details=details)


class _Waiter(NamedTuple):
    workers: int
    settled: bool
    done: asyncio.Future[None]

    def is_reached(self, ready: int, starting: int) -> bool:
        return ready >= self.workers or (self.settled and not starting)


class StartOutcomes:
    """Records whether each starting worker became ready, failed or died, and informs the callers that wait for it."""

    def __init__(self) -> None:
        self.breaker = Breaker()
        self.unexpected_ends = 0
        """The number of workers that have ended unexpectedly, before or after they were ready."""
        self.died = False
        """True from the unexpected end of a worker until no worker is missing. Starts in this time have the cause CRASH."""
        self._waiting: list[_Waiter] = []
        self._deaths = 0

    async def reached(self, workers: int, timeout_s: float, *, settled: bool = False) -> None:
        """Wait for this number of ready workers. Raise TimeoutError, QueueFull, or the error of a start that fails.

        If `settled`, a worker was ready already. Then the wait also ends when no worker is starting, and a start that
        fails raises no error here.
        """
        if len(self._waiting) >= MAX_WAITING:
            raise QueueFull(f"{MAX_WAITING} callers wait for workers already.", remedy="Try again later.")
        waiter = _Waiter(workers, settled, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                await waiter.done
        finally:
            self._waiting.remove(waiter)

    def note_workers(self, replicas: Replicas) -> None:
        """End the waits for which enough workers are ready now, and `settled` waits if no worker is starting any more."""
        if not self._waiting:
            return
        ready, starting = len(replicas.ready), replicas.starting
        for waiter in self._waiting:
            if waiter.is_reached(ready, starting) and not waiter.done.done():
                waiter.done.set_result(None)

    def note_ready(self) -> None:
        """Record that a worker became ready."""
        self._deaths = 0
        self.breaker.reset()

    def note_failure(self, error: PilotflameError) -> None:
        """Record that a worker could not be started."""
        self.breaker.fail(error, time.monotonic())
        self.refuse(error)

    def refuse(self, error: PilotflameError) -> None:
        """Fail the waits for workers, except `settled` waits: no worker will become ready."""
        for waiter in self._waiting:
            if not waiter.settled and not waiter.done.done():
                waiter.done.set_exception(error)

    def note_death(self, function: str, cause: str) -> ActivationFailed:
        """Count a worker that died while it started, without a report. Return the error of this start."""
        self._deaths += 1
        remedy = f"See `pilotflame logs {function}`."
        if cause.startswith("signal 9 "):
            remedy += " The system may have been out of memory."
        error = ActivationFailed(f"A worker died while starting, of {cause}.", remedy=remedy)
        self.note_failure(error)
        return error

    def give_up(self) -> bool:
        """Return True if the waiting invocations should fail: too many workers died in a row, or the breaker is open.

        If the result is True, count deaths from 0 again.
        """
        # Do not let invocations wait while the breaker is open, because no worker starts for them.
        hopeless = self._deaths >= MAX_UNEXPLAINED_DEATHS or self.breaker.open(time.monotonic())
        if hopeless:
            self._deaths = 0
        return hopeless
