"""What the starts of a revision's workers have come to: who is told, and when the next one may be tried."""

from __future__ import annotations

import asyncio
import time

from ...errors import ActivationFailed, PilotflameError
from .breaker import Breaker
from .prewarms import Readiness

# If this many workers in a row died while they started, without a report, the waiting invocations fail.
MAX_UNEXPLAINED_DEATHS = 3
# `try_start` fails if the worker is not ready after this time.
FIRST_START_TIMEOUT_S = 900.0


class StartOutcomes:
    """Learns of each start whether the worker became ready, failed or died."""

    def __init__(self) -> None:
        self.breaker = Breaker()
        self.readiness = Readiness()
        self._deaths = 0
        # The outcome of the first start of workers: the error if it failed. `_unproven` have not reported yet.
        self._first: asyncio.Future[PilotflameError | None] = asyncio.get_running_loop().create_future()
        self._unproven, self._proven = 1, False

    def expect_first(self, workers: int) -> None:
        """So many workers start together as the first ones of the revision."""
        self._unproven = workers

    async def wait_first(self) -> None:
        """Wait until the first start of workers has an outcome. Raise its error, or ActivationFailed if there is none in time."""
        await asyncio.wait([self._first], timeout=FIRST_START_TIMEOUT_S)
        if not self._first.done():
            message = f"The first worker was not ready within {FIRST_START_TIMEOUT_S:.0f} s."
            raise ActivationFailed(message, remedy="Make `setup` faster.")
        if (error := self._first.result()) is not None:
            raise error

    def note_ready(self, ready: int) -> None:
        """A worker became ready, as one of `ready`."""
        self._deaths = 0
        self.breaker.reset()
        self._settle_first(None)
        self.readiness.note_ready(ready)

    def note_failure(self, error: PilotflameError) -> None:
        """A worker could not be started."""
        self.breaker.fail(error, time.monotonic())
        self.readiness.note_failure(error)
        self._settle_first(error)

    def note_death(self, cause: str) -> ActivationFailed:
        """A worker died while it started, without a report. Return the error that this is."""
        self._deaths += 1
        message = f"A worker died while starting, of {cause}; that is {self._deaths} in a row."
        error = ActivationFailed(message, remedy="See `pilotflame logs` (out of memory?).")
        self.note_failure(error)
        return error

    def give_up(self) -> bool:
        """Return True if so many died in a row that those who wait should fail. They are counted from zero then."""
        # While the breaker is open, nobody would start a worker for those that wait.
        hopeless = self._deaths >= MAX_UNEXPLAINED_DEATHS or self.breaker.open(time.monotonic())
        if hopeless:
            self._deaths = 0
        return hopeless

    def _settle_first(self, error: PilotflameError | None) -> None:
        """Once one of the first workers is ready, those that fail, for lack of memory say, are not the revision's fault."""
        self._unproven -= 1
        self._proven = self._proven or error is None
        if not self._first.done() and (not self._proven or self._unproven <= 0):
            self._first.set_result(None if self._proven else error)
