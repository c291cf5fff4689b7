"""Runs one group of a batch handler, in as many calls as it takes.

A group may be larger than one call may be (`max_cost`, or a limit that memory has set). A call that raises is
repeated with each half of its events, until the events that cannot be answered have failed alone.
"""

from __future__ import annotations

import gc
import math
from collections import deque
from collections.abc import Sequence
from typing import Any

from ...errors import Cancelled, DeadlineExceeded, PilotflameError, SnapshotError
from ...handlers.contract import BatchSpec
from ...handlers.failure import is_out_of_memory
from .runner import Call, Runner


class BatchRun:
    """The rest of a group. Its runner takes a piece, calls the handler, and reports the outcome.

    `frames` are the frames to send. `next_piece` sends them, except after the last piece.
    """

    def __init__(self, runner: Runner, group: list[Call]) -> None:
        self._runner = runner
        self._spec = runner.handler.batch or BatchSpec(1)
        self._pieces: deque[list[Call]] = deque()
        self._started = False
        self._first_limit = runner.limit
        calls, events, self.frames = runner.decode(group)
        self._pack([call for call, event in zip(calls, events, strict=True) if self._weigh(call, event)])

    def next_piece(self) -> list[Call]:
        """Return the calls to run next in one call of the handler; none at the end."""
        while self._pieces:
            piece = self._pieces.popleft()
            if len(piece) > self._runner.limit:
                # Memory ran out since it was packed.
                self._pack(piece)
            elif calls := [call for call in piece if not self._is_over(call)]:
                # A time limit applies to each call of the handler, so the gateway needs to know of each.
                again = [self._runner.next_call_frame(calls[0])] if self._started else []
                self._runner.send(self.frames + again)
                self._started, self.frames = True, []
                return calls
        return []

    def succeed(self, calls: list[Call], answer: Any, started_s: float) -> None:
        """The handler returned."""
        try:
            frames = self._runner.result_frames(calls, answer, started_s)
        except Exception as error:  # noqa: BLE001  iterating the answer runs user code
            frames = self._runner.failure_frames(calls, error)
        self._finish(calls, frames)

    def fail(self, calls: list[Call], error: BaseException) -> None:
        """The handler raised."""
        out_of_memory = is_out_of_memory(error)
        final = not isinstance(error, Exception) or isinstance(error, (Cancelled, SnapshotError))
        if len(calls) == 1 or final:
            self._finish(calls, self._runner.failure_frames(calls, error))
            if out_of_memory:
                self._runner.regrow(self._first_limit)
        elif out_of_memory:
            self._runner.shrink(len(calls))
            self._pack(calls)
            # The frames of the traceback hold the objects that filled the memory.
            error.__traceback__ = None
            gc.collect()
        else:
            half = (len(calls) + 1) // 2
            self._pieces.extendleft([calls[half:], calls[:half]])

    def give_up(self, calls: list[Call], error: PilotflameError) -> None:
        """Fail calls without another try."""
        self._finish(calls, [self._runner.error_frame(call, error) for call in calls])

    def _pack(self, calls: list[Call]) -> None:
        packed = pack([call.cost for call in calls], self._runner.limit, self._spec.max_cost)
        self._pieces.extendleft([calls[index] for index in piece] for piece in reversed(packed))

    def _weigh(self, call: Call, event: Any) -> bool:
        try:
            call.set_event(event, self._spec.weigh(event))
        except Exception as error:  # noqa: BLE001  the user's cost function fails this event only
            self.give_up([call], self._runner.describe(error, "The cost function of @batch"))
            return False
        return True

    def _is_over(self, call: Call) -> bool:
        """Return True if the caller went away or the deadline passed, and fail the call."""
        if not call.context.cancelled:
            return False
        if call.cancellation.flag:
            self.give_up([call], Cancelled("The caller went away before the handler was called."))
        else:
            self.give_up([call], DeadlineExceeded("The deadline passed before the handler was called."))
        return True

    def _finish(self, calls: list[Call], frames: list[bytes]) -> None:
        self.frames += frames
        self._runner.forget(calls)
        for call in calls:
            call.drop_event()


def pack(costs: Sequence[float], max_size: int, max_cost: float | None = None) -> list[list[int]]:
    """Return the indices of `costs`, in lists of at most `max_size` that cost at most `max_cost` together.

    What fits in one list keeps its order. Otherwise the items are sorted by cost, cheapest first, so that
    items of about the same size share a call and little is spent on padding. An item over `max_cost` is
    alone.
    """
    limit = math.inf if max_cost is None else max_cost
    if len(costs) <= max_size and sum(costs) <= limit:
        return [list(range(len(costs)))] if costs else []
    packed: list[list[int]] = []
    spent = 0.0
    for index in sorted(range(len(costs)), key=costs.__getitem__):
        if not packed or len(packed[-1]) == max_size or spent + costs[index] > limit:
            packed.append([])
            spent = 0.0
        packed[-1].append(index)
        spent += costs[index]
    return packed
