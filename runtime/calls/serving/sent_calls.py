"""Sends invocations to one worker, passes their pieces and reports on, and knows which of them are stuck."""

from __future__ import annotations

import logging
from functools import partial

from ..batching.outstanding import Outstanding
from ..link.child import Child
from ..link.frames import Frame, FrameKind
from .invocation import Invocation

_log = logging.getLogger(__name__)

MAX_REPORT_BYTES = 256 << 10
"""The most bytes of a report of progress or metrics. Larger reports are dropped. The log names the first dropped report of each worker."""


class SentCalls:
    """The invocations that were sent to one worker and have not ended, and their frames."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self.outstanding: Outstanding[Invocation] = Outstanding()
        self.recorded = set[int]()
        """The channels of invocations whose printed lines are captured."""
        self.stuck = set[int]()
        """The channels of invocations whose handler call has not ended in time."""
        self._told_dropped = False

    def send(self, invocations: list[Invocation], now_s: float) -> None:
        """Send one batch of invocations. If the handler takes no batches, the batch must be one invocation."""
        link = self._child.link
        if not self.outstanding.batching:
            for invocation in invocations:
                channel = self.outstanding.add(invocation, now_s)
                if invocation.capture is not None or self.recorded:
                    self._record(channel, invocation)
                if invocation.stream is not None:
                    invocation.stream.connect(partial(self._grant, channel))
                if invocation.input is not None:
                    invocation.input.connect(partial(self._pass_input, channel))
                link.send_json(FrameKind.INVOKE, channel, invocation.head(now_s), invocation.body)
            return
        channels = self.outstanding.add_batch(invocations, now_s)
        for place, (channel, invocation) in enumerate(zip(channels, invocations, strict=True), start=1):
            if invocation.capture is not None or self.recorded:
                self._record(channel, invocation)
            head = invocation.head(now_s, len(channels) - place)
            link.send_json(FrameKind.INVOKE, channel, head, invocation.body)
        # Flush now. Otherwise the frames would be sent at the end of this iteration of the event loop, after the responses of
        # the last batch.
        link.flush()

    def _record(self, channel: int, invocation: Invocation) -> None:
        """Capture the lines that an invocation prints, if it has a `capture`. Else let
        unmarked lines belong to no invocation from now on.
        """
        if (output := self._child.output) is None:
            return
        if invocation.capture is None:
            output.crowd()
            return
        alone = len(self.outstanding.calls) == 1
        output.record(channel, invocation.id, invocation.capture, alone=alone)
        self.recorded.add(channel)

    def end_record(self, channel: int) -> None:
        """Stop capturing the lines of an invocation that has ended."""
        self.recorded.discard(channel)
        if self._child.output is not None:
            self._child.output.end(channel)

    def _grant(self, channel: int, count: int) -> None:
        if channel in self.outstanding.calls:
            self._child.link.send_json(FrameKind.MORE, channel, {"count": count})

    def _pass_input(self, channel: int, piece: bytes, *, last: bool) -> None:
        if channel in self.outstanding.calls:
            self._child.link.send(FrameKind.INPUT_END if last else FrameKind.INPUT, channel, b"", piece)

    def take_piece(self, frame: Frame) -> None:
        """Pass on a piece of output, a request for input, or a report of a running invocation."""
        invocation = self.outstanding.calls.get(frame.channel)
        if invocation is None or invocation.ended:
            return
        if frame.kind == FrameKind.CHUNK:
            if invocation.stream is not None:
                invocation.stream.put(frame.payload)
        elif frame.kind == FrameKind.READ:
            if invocation.input is not None:
                invocation.input.grant(int(frame.json()["count"]))
        elif report := invocation.on_progress if frame.kind == FrameKind.PROGRESS else invocation.on_metrics:
            if len(frame.payload) <= MAX_REPORT_BYTES:
                report(frame.payload)
            elif not self._told_dropped:
                self._told_dropped = True
                text = "%s: a report of progress or metrics of %d bytes was dropped, since the limit is %d"
                _log.warning(text, invocation.id, len(frame.payload), MAX_REPORT_BYTES)

    def tell_leaving(self) -> None:
        """Tell open connections that they should connect again, because this worker or its revision ends."""
        for invocation in list(self.outstanding.calls.values()):
            if invocation.on_leaving is not None:
                invocation.on_leaving()

    def cancel(self, invocation: Invocation) -> bool:
        """Tell the worker that the caller of an invocation has left. The handler call may still go on.

        Return False if the worker has already ended the invocation.
        """
        if (channel := self.outstanding.channel_of(invocation)) is None:
            return False
        self._child.link.send(FrameKind.CANCEL, channel)
        return True

    def ask_back(self) -> None:
        """Ask the worker for the invocations that wait there. The worker gives back the invocations that it has not started."""
        if self.outstanding.load > self.outstanding.slots:
            self._child.link.send(FrameKind.ASK_BACK)

    def awaited(self, invocation: Invocation) -> bool:
        """Return True if a caller waits for an invocation, or for another invocation of its batch."""
        if (channel := self.outstanding.channel_of(invocation)) is None:
            return False
        return any(not (one.ended or one.answered) for one in self.outstanding.batch_of(channel).values())

    def note_stuck(self, invocation: Invocation) -> bool:
        """Record that the handler call of an invocation does not end. Return False if the worker has ended the invocation."""
        if (channel := self.outstanding.channel_of(invocation)) is None:
            return False
        self.stuck |= self.outstanding.batch_of(channel).keys()
        return True

    def kill_if_only_stuck(self) -> None:
        """Kill the worker if it runs only handler calls that do not end."""
        if self.stuck and self.outstanding.running() <= self.stuck:
            work = any(self.outstanding.calls[channel].answered for channel in self.outstanding.running())
            call = "the work of a call after its response" if work else "a call of the handler"
            self._child.kill_stuck(f"{call} did not end in time")
