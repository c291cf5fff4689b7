"""Runs one group of invocations of a batch handler, in one or more handler calls.

A group may be too large for one handler call, because of `max_cost` or because of the limit that is lowered when memory
runs out. If a handler call raises an ordinary exception, each half of its events is tried in a separate handler call.
The halves are halved again until each event either was answered or has failed alone.
"""

from __future__ import annotations

import gc
import math
from collections import deque
from collections.abc import Sequence
from typing import Any

from ....errors import Cancelled, DeadlineExceeded, PilotflameError, SnapshotError
from ....handlers.contract import BatchSpec, Context
from ....handlers.failure import is_out_of_memory
from ..link.frames import FrameKind, encode_json
from .call import Call
from .runner import Runner


class BatchRun:
    """A group that is being run in pieces. A piece is the list of invocations of one handler call.

    Until `next_piece` returns an empty list, the runner calls the handler with each piece and reports the
    outcome with `succeed`, `fail` or `give_up`. `frames` are the unsent frames. `next_piece` sends them
    before it returns a piece; the runner sends the frames of the last piece.
    """

    def __init__(self, runner: Runner, group: list[Call]) -> None:
        self._runner = runner
        self._spec = runner.handler.batch or BatchSpec(1)
        self._pieces: deque[list[Call]] = deque()
        self._started = False
        self._first_limit = runner.limits.limit
        calls, events, self.frames = runner.answers.decode(group)
        self._pack([call for call, event in zip(calls, events, strict=True) if self._weigh(call, event)])

    def next_piece(self) -> list[Call]:
        """Return the invocations of the next handler call; an empty list if none are left."""
        while self._pieces:
            piece = self._pieces.popleft()
            if len(piece) > self._runner.limits.limit:
                # Memory has run out since this piece was packed, so the limit is lower now.
                self._pack(piece)
            elif calls := [call for call in piece if not self._is_over(call)]:
                if self._started:
                    # The gateway restarts its time limit for each handler call, so report the start of this call.
                    head = {"window": self._runner.limits.window, "call": calls[0].channel}
                    self.frames.append(encode_json(FrameKind.WINDOW, 0, head))
                self._runner.send(self.frames)
                self._started, self.frames = True, []
                return calls
        return []

    def arguments(self, calls: list[Call]) -> tuple[Any, ...]:
        """Return the arguments of the handler for one piece."""
        context = Context.of_batch([call.context for call in calls])
        return self._runner.handler.arguments(context, [call.event for call in calls])

    def succeed(self, calls: list[Call], answer: Any, started_s: float) -> None:
        """Encode the handler's answer for `calls` as frames."""
        try:
            frames = self._runner.answers.result_frames(calls, answer, started_s)
        except Exception as error:  # noqa: BLE001  iterating the answer runs user code
            frames = self._runner.answers.failure_frames(calls, error)
        self._finish(calls, frames)

    def fail(self, calls: list[Call], error: BaseException) -> None:
        """Handle `error`, which the handler raised for `calls`: try them again in smaller pieces, or fail them."""
        out_of_memory = is_out_of_memory(error)
        final = not isinstance(error, Exception) or isinstance(error, (Cancelled, SnapshotError))
        if len(calls) == 1 or final:
            self._finish(calls, self._runner.answers.failure_frames(calls, error))
            if out_of_memory:
                self._runner.limits.regrow(self._first_limit)
        elif out_of_memory:
            self._runner.limits.shrink(len(calls))
            self._pack(calls)
            # Free the objects that filled the memory. The stack frames of the traceback refer to these objects.
            error.__traceback__ = None
            gc.collect()
        else:
            half = (len(calls) + 1) // 2
            self._pieces.extendleft([calls[half:], calls[:half]])

    def give_up(self, calls: list[Call], error: PilotflameError) -> None:
        """Fail invocations with `error`, without another try."""
        self._finish(calls, [self._runner.answers.error_frame(call, error) for call in calls])

    def _pack(self, calls: list[Call]) -> None:
        packed = pack([call.cost for call in calls], self._runner.limits.limit, self._spec.max_cost)
        self._pieces.extendleft([calls[index] for index in piece] for piece in reversed(packed))

    def _weigh(self, call: Call, event: Any) -> bool:
        try:
            call.set_event(event, self._spec.weigh(event))
        except Exception as error:  # noqa: BLE001  the user's cost function fails this event only
            self.give_up([call], self._runner.answers.describe(error, "The cost function of @batch"))
            return False
        return True

    def _is_over(self, call: Call) -> bool:
        """Return True, and fail the invocation, if its caller went away or its deadline passed."""
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
            call.set_event(None, call.cost)


def pack(costs: Sequence[float], max_size: int, max_cost: float | None = None) -> list[list[int]]:
    """Distribute items with these costs to handler calls. Return a list of item indices for each call.

    A call has at most `max_size` items and a total cost of at most `max_cost`. An item that alone costs more than
    `max_cost` gets its own call. If all items fit in one call, they stay in order. Otherwise they are sorted by cost,
    cheapest first, so that the items of a call have similar sizes and need little padding.
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
