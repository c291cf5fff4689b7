"""Defines a replica, which is the gateway's view of one worker."""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from functools import partial
from typing import Any, Protocol

from ....errors import LinkError, OutputInvalid, PilotflameError
from ....handlers.codec import JSON_TYPE
from ...ground.telemetry.timeline import Activation, Transfer, WorkerTiming
from ..batching.latency_curve import Point
from ..batching.outstanding import BatchEnd, Outstanding
from ..link.child import Child
from ..link.frames import TIMING, Frame, FrameKind, Timing
from .invocation import Invocation, Output

_log = logging.getLogger(__name__)

MAX_REPORT_BYTES = 256 << 10
"""The most bytes of a report of progress or metrics. Larger ones are dropped, and the log tells the first of a worker."""
# A worker is killed if it is not READY this long after ACTIVATE.
START_TIMEOUT_S = 900.0
# A worker is killed if it has not exited this long after it reported a failed start, or after it ended its last
# invocation while it drains. `teardown` runs in this time.
EXIT_TIMEOUT_S = 30.0
# The worker does not measure invocations that fail or are given back. So they count with this timing and a cost of 0.
UNKNOWN = Timing(0.0, 0.0, 1, 0.0)


class ReplicaState(enum.StrEnum):
    RESTORING = "restoring"
    READY = "ready"
    PARKED = "parked"
    """Its weights have given back their device memory. It has no invocations, and wakes faster than a worker starts."""
    DRAINING = "draining"
    DEAD = "dead"


class CallEvents(Protocol):
    """The events of invocations that replicas report to their revision, on its event loop."""

    def on_end(
        self, replica: Replica, invocation: Invocation, outcome: Output | PilotflameError,
        timing: WorkerTiming, now_s: float, batch: BatchEnd | None,
    ) -> None:  # fmt: skip
        """A worker ended an invocation. `batch` is set if the whole batch of the invocation has now ended."""

    def on_returned(self, invocation: Invocation) -> None:
        """A worker gave back an invocation that it has not started."""

    def on_split(self, invocations: list[Invocation]) -> None:
        """A worker makes one more handler call for the `invocations` of a batch that have not ended."""

    def on_resized(self, replica: Replica) -> None:
        """A worker takes more or fewer invocations at a time than before."""


class WorkerEvents(Protocol):
    """The events of workers that replicas report to `reconciling`, which decides about workers."""

    def on_ready(self, replica: Replica) -> None: ...
    def on_start_failed(self, error: PilotflameError) -> None: ...
    def on_leaving(self, replica: Replica) -> None:
        """A worker has begun to drain on its own decision, and takes no more invocations."""

    def on_parked(self, replica: Replica, freed_bytes: int, reserved: list[int]) -> None:
        """A worker has given back device memory. `reserved` has the bytes that torch's allocator keeps of each GPU."""

    def on_need(self, replica: Replica, name: str) -> None:
        """A worker waits for an adapter, which is fetched on use."""

    def on_lost(self, replica: Replica, unstarted: list[Invocation], started: list[Invocation]) -> None:
        """A worker's link is closed. The worker had started, or may have started, the `started` invocations."""


class Replica:
    """A worker with its state, its capacity, and the invocations that were sent to it. It changes no invocation."""

    def __init__(
        self, child: Child, activation: Activation, calls: CallEvents, events: WorkerEvents, env: dict[str, str],
        *, measure: bool = False, weights_s: float | None = None,
    ) -> None:  # fmt: skip
        """If `measure` and the handler has examples, the worker first measures its latency curve.

        `weights_s` is the time that fetched weights may still take to arrive. The start may take longer by this time.
        """
        self.child, self.name, self.activation = child, child.name, activation
        self.state = ReplicaState.RESTORING
        self.outstanding: Outstanding[Invocation] = Outstanding()
        self.idle_since_s = time.monotonic()
        self.completed = 0
        self.window = 0
        """The number of invocations (batches, if the handler takes batches) that it may have at a time."""
        self.batch_limit: int | None = None
        """The largest batch that fits into the worker's memory; None until the worker has reported a limit."""
        self.reported_failure = False
        self.device = ""
        """The device and the dtype that the worker has reported."""
        self.measured: list[Point] = []
        """The latency curve that the worker measured before it was ready."""
        self.left = False
        """True if the worker drained before its end, so that the end was expected."""
        self.relieved = False
        """True once the gateway has ended its running invocations to end it soon."""
        self.parks = 0
        """The number of PARK frames that were sent to it."""
        self._parked_since_s = self._past_parked_s = 0.0
        self._park_timer: asyncio.TimerHandle | None = None
        self._calls, self._events = calls, events
        self._told_dropped = False
        # The channels of invocations whose handler call has not ended in time.
        self._stuck: set[int] = set()
        # The channels of invocations whose printed lines are captured.
        self._recorded: set[int] = set()
        start_timeout_s = START_TIMEOUT_S + (weights_s or 0.0)
        # Without this limit, a worker that hangs while it starts would count as starting for ever.
        late = f"it was not ready after {start_timeout_s:.0f} s"
        self._start_timer = asyncio.get_running_loop().call_later(start_timeout_s, child.kill_stuck, late)
        child.link.bind(self._on_frame, self._on_lost)
        head: dict[str, Any] = {"env": env} | ({"measure": True} if measure else {})
        if weights_s is not None:
            head["weights_s"] = weights_s
        child.link.send_json(FrameKind.ACTIVATE, 0, head)
        # If the worker died while it was a standby, the link was closed before `_on_lost` was bound to it.
        if child.link.closed:
            asyncio.get_running_loop().call_soon(self._on_lost)

    @property
    def uses_device(self) -> bool:
        """True if it has reported a device other than the host."""
        return self.device.partition(" ")[0] not in {"", "cpu"}

    @property
    def load(self) -> int:
        return self.outstanding.load

    @property
    def credit(self) -> int:
        """The number of further invocations (batches, if the handler takes batches) that may be sent to it now."""
        return self.window - self.outstanding.load if self.state is ReplicaState.READY else 0

    @property
    def prefetches(self) -> bool:
        """True if it asks for more invocations than it can run, because they are short (batching/prefetch.py)."""
        return self.window > self.outstanding.slots

    # -- commands

    def send(self, invocations: list[Invocation], now_s: float) -> None:
        """Send one batch of invocations. If the handler takes no batches, the batch must be one invocation."""
        link = self.child.link
        if not self.outstanding.batching:
            for invocation in invocations:
                channel = self.outstanding.add(invocation, now_s)
                if invocation.capture is not None or self._recorded:
                    self._record(channel, invocation)
                if invocation.stream is not None:
                    invocation.stream.connect(partial(self._grant, channel))
                if invocation.input is not None:
                    invocation.input.connect(partial(self._pass_input, channel))
                link.send_json(FrameKind.INVOKE, channel, invocation.head(now_s), invocation.body)
            return
        channels = self.outstanding.add_batch(invocations, now_s)
        for place, (channel, invocation) in enumerate(zip(channels, invocations, strict=True), start=1):
            if invocation.capture is not None or self._recorded:
                self._record(channel, invocation)
            head = invocation.head(now_s, len(channels) - place)
            link.send_json(FrameKind.INVOKE, channel, head, invocation.body)
        # Without this flush, the frames would be sent at the end of this iteration of the event loop, after the
        # responses of the last batch.
        link.flush()

    def _record(self, channel: int, invocation: Invocation) -> None:
        """Capture the lines that an invocation prints, if it has a `capture`. Else note that it shares the worker."""
        if (output := self.child.output) is None:
            return
        if invocation.capture is None:
            output.crowd()
            return
        alone = len(self.outstanding.calls) == 1
        output.record(channel, invocation.id, invocation.capture, alone=alone)
        self._recorded.add(channel)

    def _grant(self, channel: int, count: int) -> None:
        if channel in self.outstanding.calls:
            self.child.link.send_json(FrameKind.MORE, channel, {"count": count})

    def tell_held(self, name: str, held: float | PilotflameError) -> None:
        """Tell the worker that an adapter's files can be mapped, and within how many seconds its bytes arrive; or why not."""
        outcome = {"error": held.to_wire()} if isinstance(held, PilotflameError) else {"weights_s": held}
        self.child.link.send_json(FrameKind.HELD, 0, {"name": name, **outcome})

    def _pass_input(self, channel: int, piece: bytes, *, last: bool) -> None:
        if channel in self.outstanding.calls:
            self.child.link.send(FrameKind.INPUT_END if last else FrameKind.INPUT, channel, b"", piece)

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
        self.child.link.send(FrameKind.CANCEL, channel)
        return True

    def ask_back(self) -> None:
        """Ask the worker for the invocations that wait there. It gives back those that it has not started."""
        if self.load > self.outstanding.slots:
            self.child.link.send(FrameKind.ASK_BACK)

    def started_s(self, invocation: Invocation) -> float | None:
        """Return when the present handler call for an invocation started; None while it waits at the worker."""
        channel = self.outstanding.channel_of(invocation)
        return self.outstanding.started_s(channel) if channel is not None else None

    def awaited(self, invocation: Invocation) -> bool:
        """Return True if a caller waits for an invocation, or for another invocation of its batch."""
        if (channel := self.outstanding.channel_of(invocation)) is None:
            return False
        calls = self.outstanding.calls
        return any(not calls[peer].ended for peer in self.outstanding.batch_of(channel))

    def replace(self, invocation: Invocation) -> None:
        """Drain the worker, because a handler call does not end. Kill the worker once it runs only such calls.

        The worker's other calls may go on. Each of them ends, or exceeds its own limit and is then passed to this
        method too.
        """
        if (channel := self.outstanding.channel_of(invocation)) is None:
            return
        self._stuck |= self.outstanding.batch_of(channel)
        if self.state is ReplicaState.READY:
            self.drain(None)
        self._kill_if_only_stuck()

    def _kill_if_only_stuck(self) -> None:
        if self._stuck and self.outstanding.running() <= self._stuck:
            self.child.kill_stuck("a call of the handler did not end in time")

    def park(self, now_s: float) -> None:
        """Have a ready worker without invocations give back its device memory."""
        self.state, self._parked_since_s = ReplicaState.PARKED, now_s
        self.parks += 1
        self.child.link.send(FrameKind.PARK, self.parks)
        late = f"it was not parked after {EXIT_TIMEOUT_S:.0f} s"
        self._park_timer = asyncio.get_running_loop().call_later(EXIT_TIMEOUT_S, self.child.kill_stuck, late)

    def wake(self, now_s: float) -> None:
        """Have a parked worker bring its weights back. Invocations may be sent to it at once."""
        # If the worker has not begun to park yet, it does not park, and sends no PARKED.
        self._drop_park_timer()
        self._past_parked_s, self.state = self.parked_s(now_s), ReplicaState.READY
        self.child.link.send(FrameKind.UNPARK)

    def parked_s(self, now_s: float) -> float:
        """Return the total number of seconds for which the worker has been parked."""
        present_s = now_s - self._parked_since_s if self.state is ReplicaState.PARKED else 0.0
        return self._past_parked_s + present_s

    def drain(self, kill_after_s: float | None) -> None:
        """Ask the worker to end its invocations and to exit. Kill it if it still runs after `kill_after_s`.

        If `kill_after_s` is None, the worker may run until its last invocation has ended, which deadlines limit.
        """
        if self.state is not ReplicaState.DEAD:
            self._leave_parked()
            self.state = ReplicaState.DRAINING
            self.child.link.send(FrameKind.DRAIN)
            self.tell_leaving()
            if kill_after_s is not None:
                self.child.kill_after(kill_after_s)

    def relieve(self, kill_after_s: float) -> None:
        """End the worker, whose invocations the gateway has ended. Its `teardown` has `kill_after_s`."""
        self.relieved = True
        self.drain(kill_after_s)

    def cancel_start(self) -> None:
        """End a worker that is not ready yet. It has no invocations."""
        self.state = ReplicaState.DRAINING
        self.child.kill()

    def _drop_park_timer(self) -> None:
        if self._park_timer is not None:
            self._park_timer.cancel()
            self._park_timer = None

    def _leave_parked(self) -> None:
        self._drop_park_timer()
        self._past_parked_s = self.parked_s(time.monotonic())

    # -- frames from the worker

    def _on_frame(self, frame: Frame) -> None:
        kind = frame.kind
        if kind == FrameKind.RESULT:
            self._on_end(frame.channel, _output_of(frame), TIMING.unpack_from(frame.head))
        elif kind == FrameKind.END:
            self._on_end(frame.channel, Output(b"", JSON_TYPE), Timing.unpack(frame.head))
        elif kind == FrameKind.ERROR:
            self._on_end(frame.channel, PilotflameError.from_wire(frame.json()), UNKNOWN)
        elif kind in (FrameKind.CHUNK, FrameKind.PROGRESS, FrameKind.METRICS, FrameKind.READ):
            self._on_piece(frame)
        elif kind == FrameKind.RETURNED:
            self._on_end(frame.channel, None, UNKNOWN)
        elif kind == FrameKind.PARKED:
            self._on_parked(frame)
        else:
            self._on_control(kind, frame.json())

    def _on_end(self, channel: int, outcome: Output | PilotflameError | None, timing: WorkerTiming) -> None:
        """Remove an invocation, and report its end. `outcome` is None if the worker gave the invocation back."""
        now_s = time.monotonic()
        if channel in self._recorded:
            self._recorded.discard(channel)
            if self.child.output is not None:
                self.child.output.end(channel)
        invocation, batch = self.outstanding.remove(channel, now_s, timing[3])
        if not self.outstanding.calls:
            self.idle_since_s = now_s
            if self.state is ReplicaState.DRAINING:
                self.child.kill_after(EXIT_TIMEOUT_S)
        if self._stuck:
            self._stuck.discard(channel)
            self._kill_if_only_stuck()
        if invocation is None:
            return
        if outcome is None:
            self._calls.on_returned(invocation)
        else:
            self.completed += 1
            self._calls.on_end(self, invocation, outcome, timing, now_s, batch)

    def _on_piece(self, frame: Frame) -> None:
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

    def _on_control(self, kind: int, head: dict[str, Any]) -> None:
        if kind == FrameKind.READY:
            self._on_ready(head)
        elif kind == FrameKind.WINDOW:
            self._on_window(head)
        elif kind == FrameKind.DRAIN:
            # The worker wants to exit. The reply confirms that the gateway will send it no more invocations.
            if self.state is not ReplicaState.DRAINING:
                self._leave_parked()
                self.state = ReplicaState.DRAINING
                self.child.link.send(FrameKind.DRAIN)
                self.tell_leaving()
                # A worker with invocations may run until the last of them has ended, which deadlines limit.
                if not self.outstanding.calls:
                    self.child.kill_after(EXIT_TIMEOUT_S)
                self._events.on_leaving(self)
        elif kind == FrameKind.COPIED:
            self._on_copied(head)
        elif kind == FrameKind.NEED:
            self._events.on_need(self, str(head["name"]))
        elif kind == FrameKind.FAILED:
            self.reported_failure = True
            self._start_timer.cancel()
            self.child.kill_after(EXIT_TIMEOUT_S)
            self.state = ReplicaState.DRAINING
            self._events.on_start_failed(PilotflameError.from_wire(head))
        # PRIMED arrives here if a standby became a worker before it was primed.
        elif kind != FrameKind.PRIMED:
            raise LinkError(f"A worker sent a frame of kind {kind}, which workers do not send.")

    def _on_copied(self, head: dict[str, Any]) -> None:
        now_s, context = time.monotonic(), head["context"]
        started_s, took_s = now_s - head["ago_s"], head["took_s"]
        ended_s = 0.0 if took_s is None else started_s + took_s
        self.activation.mark_copied(Transfer(started_s, ended_s, head["name"]))
        made_s = now_s - context["ago_s"]
        self.activation.mark_context(Transfer(made_s, made_s + context["took_s"]))

    def _on_parked(self, frame: Frame) -> None:
        # If the worker was woken and parked again meanwhile, only the answer to the last PARK shows that its memory is
        # free.
        if self.state is not ReplicaState.PARKED or frame.channel == self.parks:
            self._drop_park_timer()
            head = frame.json()
            self._events.on_parked(self, int(head["freed_bytes"]), list(head.get("reserved", ())))

    def _on_window(self, head: dict[str, Any]) -> None:
        self.window = int(head["window"])
        if "slots" in head:
            self.outstanding.resize(int(head["slots"]), time.monotonic())
        if "limit" in head:
            self.batch_limit = int(head["limit"])
        if "slots" in head or "limit" in head:
            self._calls.on_resized(self)
        if "call" in head:
            calls, call = self.outstanding.calls, int(head["call"])
            self.outstanding.note_call(call, time.monotonic())
            channels = self.outstanding.batch_of(call)
            self._calls.on_split([calls[channel] for channel in channels if channel in calls])

    def _on_ready(self, head: dict[str, Any]) -> None:
        self.idle_since_s = time.monotonic()
        self.activation.mark_ready(self.idle_since_s)
        self._start_timer.cancel()
        self.window = int(head["window"])
        self.outstanding = Outstanding(int(head["slots"]), batching=bool(head["batching"]))
        self.batch_limit = int(head["limit"]) if "limit" in head else None
        self.device = f"{head.get('device', '')} {head.get('dtype', '')}".strip()
        for copy in head.get("copies") or ():
            self._on_copied(copy)
        self.measured = [Point(*point) for point in head.get("curve") or ()]
        if self.state is ReplicaState.RESTORING:
            self.state = ReplicaState.READY
        self._events.on_ready(self)

    def _on_lost(self) -> None:
        if self.state is ReplicaState.DEAD:
            return
        self._start_timer.cancel()
        self._drop_park_timer()
        if self.child.output is not None:
            # Read the last lines that the worker printed before its link ended.
            self.child.output.drain()
        # A worker without a link is useless, even if its process still runs. A draining worker exits by itself.
        self.left = self.state is ReplicaState.DRAINING and not self.reported_failure
        if self.state is not ReplicaState.DRAINING:
            self.child.kill()
        self._leave_parked()
        self.state = ReplicaState.DEAD
        calls, running = self.outstanding.calls, self.outstanding.running()
        unstarted = [invocation for channel, invocation in calls.items() if channel not in running]
        started = [invocation for channel, invocation in calls.items() if channel in running]
        self.outstanding.clear(time.monotonic())
        self._events.on_lost(self, unstarted, started)


def _output_of(frame: Frame) -> Output | OutputInvalid:
    """Return the output in a frame RESULT, or why its Content-Type cannot be in a header: a handler or a container has chosen it."""
    if len(frame.head) == TIMING.size:
        return Output(frame.payload, JSON_TYPE)
    content_type = frame.head[TIMING.size :].decode(errors="replace")
    if content_type.isprintable():
        return Output(frame.payload, content_type)
    message = f"The output's Content-Type is {content_type[:80]!r}, which no header can hold."
    return OutputInvalid(message, remedy="Return another Content-Type, without line breaks.")
