"""The course: one group of a batch handler on its way through it, in as many calls as it takes.

A group may be more than one call may be given (`max_cost`, or a limit that memory has set). A call that raises is
repeated with each half of its events, and so on, until what cannot be answered has failed alone.
"""

from __future__ import annotations

import gc
from collections import deque
from typing import Any

from ...errors import Cancelled, DeadlineExceeded, PilotflameError, SnapshotError
from ...handlers.contract import BatchSpec
from .exhaustion import exhausted
from .packing import pack
from .runner import Call, Runner


class Course:
    """What of a group is still to be run. Its runner takes a piece, calls the handler, and says how that went."""

    def __init__(self, runner: Runner, group: list[Call]) -> None:
        self._runner = runner
        self._spec = runner.handler.batch or BatchSpec(1)
        self._pieces: deque[list[Call]] = deque()
        self._begun = False
        self._limit = runner.limit
        calls, events, self.frames = runner.decode(group)
        self._pack([call for call, event in zip(calls, events, strict=True) if self._weigh(call, event)])

    def take(self) -> list[Call]:
        """Those that are to be run next, in one call; none at the end. What came of the ones before is sent first.

        After the last piece `frames` is what is left to be sent.
        """
        while self._pieces:
            piece = self._pieces.popleft()
            if len(piece) > self._runner.limit:  # memory has run out since, here or beside
                self._pack(piece)
                continue
            if waiting := [call for call in piece if not self._left_out(call)]:
                # A call of the handler may take so long, and no longer: the gateway has to know of each.
                again = [self._runner.repeats(waiting[0])] if self._begun else []
                self._runner.send(self.frames + again)
                self._begun, self.frames = True, []
                return waiting
        return []

    def answer(self, calls: list[Call], answer: Any, started_s: float) -> None:
        """The handler returned."""
        try:
            frames = self._runner.results(calls, answer, started_s)
        except Exception as error:  # noqa: BLE001  the handler's answer is iterated; to repeat it would not mend it
            frames = self._runner.failures(calls, error)
        self._end(calls, frames)

    def fail(self, calls: list[Call], error: BaseException) -> None:
        """The handler raised."""
        if (
            len(calls) == 1
            or not isinstance(error, Exception)
            or isinstance(error, (Cancelled, SnapshotError))
        ):
            self._end(calls, self._runner.failures(calls, error))
            if exhausted(error):  # it fits into no call: that says nothing of how many others do
                self._runner.regrow(self._limit)
        elif exhausted(error):
            self._runner.shrink(len(calls))
            self._pack(calls)
            error.__traceback__ = None  # its frames hold what filled the memory
            gc.collect()
        else:
            half = (len(calls) + 1) // 2
            self._pieces.extendleft([calls[half:], calls[:half]])

    def end(self, calls: list[Call], error: PilotflameError) -> None:
        """They are not to be repeated."""
        self._end(calls, [self._runner.failed(call, error) for call in calls])

    def _pack(self, calls: list[Call]) -> None:
        """Puts them in front, in as many pieces as may be run."""
        packed = pack([call.cost for call in calls], self._runner.limit, self._spec.max_cost)
        self._pieces.extendleft([calls[index] for index in piece] for piece in reversed(packed))

    def _weigh(self, call: Call, event: Any) -> bool:
        try:
            call.event, call.cost = event, self._spec.weigh(event)
        except Exception as error:  # noqa: BLE001  the user's function, and only this event's failure
            self.end([call], self._runner.describe(error, "The cost function of @batch"))
            return False
        return True

    def _left_out(self, call: Call) -> bool:
        """Whether nobody waits for its answer any more; then it is answered here."""
        if not call.context.cancelled:
            return False
        if call.cancellation.flag:
            self.end([call], Cancelled("The caller went away before the handler was called."))
        else:
            self.end([call], DeadlineExceeded("The time was up before the handler was called."))
        return True

    def _end(self, calls: list[Call], frames: list[bytes]) -> None:
        self.frames += frames
        self._runner.forget(calls)
        for call in calls:
            call.event = None
