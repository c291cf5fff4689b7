"""Defines a replica, which is the gateway's view of one worker."""

from __future__ import annotations

import asyncio
import enum
import math
import time
from typing import Any, Protocol

from ....errors import HandlerFailed, LinkError, OutputInvalid, PilotflameError
from ....handlers.codec import JSON_TYPE
from ...ground.telemetry.timeline import Activation, Transfer, WorkerTiming
from ..batching.latency_curve import Point
from ..batching.outstanding import BatchEnd
from ..link.child import Child
from ..link.frames import MAX_ERROR_BYTES, TIMING, Frame, FrameKind, Timing
from .invocation import Invocation, Output
from .sent_calls import SentCalls
from .start_limit import StartLimit

# A worker is killed if it has not exited this long after it reported a failed start, or after it ended its last
# invocation while it drains. `teardown` runs in this time.
EXIT_TIMEOUT_S = 30.0
# The worker does not measure invocations that fail or are given back. So they count with this timing and a cost of 0.
UNKNOWN = Timing(0.0, 0.0, 1, 0.0)
MAX_TYPE_CHARS = 1024


class ReplicaState(enum.StrEnum):
    RESTORING = "restoring"
    READY = "ready"
    PARKED = "parked"
    """The worker has freed, or is freeing, device memory. It has no invocations, and wakes faster than a worker starts."""
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
    def on_start_failed(self, error: PilotflameError, worker: str = "") -> None: ...
    def on_leaving(self, replica: Replica) -> None:
        """A worker has begun to drain on its own decision, and takes no more invocations."""

    def on_parked(self, replica: Replica, freed_bytes: int, reserved: list[int]) -> None:
        """A worker has given back device memory. `reserved` has the bytes that torch's allocator keeps of each GPU."""

    def on_need(self, replica: Replica, name: str) -> None:
        """A worker waits for an adapter, which is fetched on use."""

    def on_lost(self, replica: Replica, unstarted: list[Invocation], started: list[Invocation]) -> None:
        """A worker's link is closed. The worker had started, or may have started, the `started` invocations."""


class WorkerStart:
    """The start of one worker, from ACTIVATE until the worker is ready or its start has failed."""

    def __init__(
        self, child: Child, activation: Activation, env: dict[str, str], limit: StartLimit, *, measure: bool, weights_s: float | None
    ) -> None:  # fmt: skip
        """The worker gets the environment variables `env`. If `measure` and the handler has examples, it first measures its latency curve.

        `weights_s` is the time that fetched weights may still take to arrive.
        """
        self._activation, self._limit = activation, limit
        self.failed = False
        """True if the worker has reported that its start failed."""
        self.device = ""
        """The device and the dtype that the worker has reported."""
        self.measured: list[Point] = []
        """The latency curve that the worker measured before it was ready."""
        head: dict[str, Any] = {"env": env} | ({"measure": True} if measure else {})
        if weights_s is not None:
            head["weights_s"] = weights_s
        child.link.send_json(FrameKind.ACTIVATE, 0, head)

    @property
    def uses_device(self) -> bool:
        """True if the worker has reported a device other than the host."""
        return self.device.partition(" ")[0] not in {"", "cpu"}

    def note_ready(self, head: dict[str, Any], now_s: float) -> None:
        """Learn what the worker has reported with READY."""
        self.stop_timer()
        self._activation.mark_ready(now_s)
        self.device = f"{head.get('device', '')} {head.get('dtype', '')}".strip()
        for copy in head.get("copies") or ():
            self.note_copied(copy)
        self.measured = [Point(*point) for point in head.get("curve") or ()]

    def note_copied(self, head: dict[str, Any]) -> None:
        """Record the start or the end of a copy of weights to the device, and when the worker made its context there."""
        now_s, context = time.monotonic(), head["context"]
        started_s, took_s = now_s - head["ago_s"], head["took_s"]
        ended_s = 0.0 if took_s is None else started_s + took_s
        self._activation.mark_copied(Transfer(started_s, ended_s, head["name"]))
        made_s = now_s - context["ago_s"]
        self._activation.mark_context(Transfer(made_s, made_s + context["took_s"]))

    def stop_timer(self) -> None:
        """End the time limit of the start, because the worker is ready, or ends."""
        self._limit.end()


class Parking:
    """The parked time of one worker, and the limit of the time in which it must park."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self.count = 0
        """The number of PARK frames that were sent to the worker."""
        self._past_s, self._since_s = 0.0, math.inf
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, now_s: float) -> None:
        self._since_s = now_s
        self.count += 1
        self._child.link.send(FrameKind.PARK, self.count)
        late = f"it was not parked after {EXIT_TIMEOUT_S:.0f} s"
        self._timer = asyncio.get_running_loop().call_later(EXIT_TIMEOUT_S, self._child.kill_stuck, late)

    def stop_timer(self) -> None:
        """End the time limit of parking, because the worker has parked, or does not have to park any more."""
        if self._timer is not None:
            self._timer.cancel()

    def end(self, now_s: float) -> None:
        """End the parked time, if there is one, because the worker wakes or ends. If the worker has not begun to park yet, it does
        not park, and sends no PARKED.
        """
        self.stop_timer()
        self._past_s, self._since_s = self.total_s(now_s), math.inf

    def total_s(self, now_s: float) -> float:
        """Return the total number of seconds for which the worker has been parked."""
        return self._past_s + max(0.0, now_s - self._since_s)


class Replica:
    """A worker with its state, its capacity, and the invocations that were sent to it. It changes no invocation."""

    def __init__(
        self, child: Child, activation: Activation, call_events: CallEvents, worker_events: WorkerEvents,
        env: dict[str, str], limit: StartLimit, *, measure: bool, weights_s: float | None,
    ) -> None:  # fmt: skip
        """`limit` ends the start if it takes too long. `WorkerStart` describes `env`, `measure` and `weights_s`."""
        self.child, self.name, self.activation = child, child.name, activation
        self.state = ReplicaState.RESTORING
        self.calls, self.parking = SentCalls(child), Parking(child)
        self.outstanding = self.calls.outstanding
        self.idle_since_s = time.monotonic()
        self.completed = 0
        self.window = 0
        """The number of invocations (batches, if the handler takes batches) that it may have at a time."""
        self.batch_limit: int | None = None
        """The largest batch that fits into the worker's memory; None until the worker has reported a limit."""
        self.left = False
        """True if the worker drained before its end, so that the end was expected."""
        self.relieved = False
        """True once the gateway has ended the worker's running invocations, so that the worker ends soon."""
        self._call_events, self._worker_events = call_events, worker_events
        self.start = WorkerStart(child, activation, env, limit, measure=measure, weights_s=weights_s)
        child.link.bind(self._on_frame, self._on_lost)
        # Report a worker that died while it was a standby: its link was closed before `_on_lost` was bound to the link.
        if child.link.closed:
            asyncio.get_running_loop().call_soon(self._on_lost)

    @property
    def credit(self) -> int:
        """The number of further invocations (batches, if the handler takes batches) that may be sent to it now."""
        return self.window - self.outstanding.load if self.state is ReplicaState.READY else 0

    @property
    def prefetches(self) -> bool:
        """True if it asks for more invocations than it can run, because they are short (batching/prefetch.py)."""
        return self.window > self.outstanding.slots

    # -- commands

    def tell_held(self, name: str, held: float | PilotflameError) -> None:
        """Answer a worker that needs an adapter. `held` is the error of the fetch or, if the files can be mapped, the number of
        seconds within which their bytes arrive.
        """
        outcome = {"error": held.to_wire()} if isinstance(held, PilotflameError) else {"weights_s": held}
        self.child.link.send_json(FrameKind.HELD, 0, {"name": name, **outcome})

    def replace(self, invocation: Invocation) -> None:
        """Drain the worker, because a handler call does not end. Kill the worker once it runs only such calls.

        The worker's other calls may go on. Each of them ends, or exceeds its own limit and is then passed to this
        method too.
        """
        if self.calls.note_stuck(invocation):
            if self.state is ReplicaState.READY:
                self.drain(None)
            self.calls.kill_if_only_stuck()

    def park(self, now_s: float) -> None:
        """Have a ready worker without invocations give back its device memory."""
        self.state = ReplicaState.PARKED
        self.parking.begin(now_s)

    def wake(self, now_s: float) -> None:
        """Have a parked worker bring its weights back. Invocations may be sent to it at once."""
        self.state = ReplicaState.READY
        self.parking.end(now_s)
        self.child.link.send(FrameKind.UNPARK)

    def drain(self, kill_after_s: float | None) -> None:
        """Ask the worker to end its invocations and to exit. Kill it if it still runs after `kill_after_s`.

        If `kill_after_s` is None, the worker may run until its last invocation has ended, which deadlines limit.
        """
        if self.state is not ReplicaState.DEAD:
            self.state = ReplicaState.DRAINING
            self.parking.end(time.monotonic())
            self.child.link.send(FrameKind.DRAIN)
            self.calls.tell_leaving()
            if kill_after_s is not None:
                self.child.kill_after(kill_after_s)

    def relieve(self, kill_after_s: float) -> None:
        """End the worker, whose invocations the gateway has ended. Kill it if its `teardown` takes longer than `kill_after_s`."""
        self.relieved = True
        self.drain(kill_after_s)

    def cancel_start(self) -> None:
        """End a worker that is not ready yet. It has no invocations."""
        self.state = ReplicaState.DRAINING
        self.child.kill()

    # -- frames from the worker

    def _on_frame(self, frame: Frame) -> None:
        kind = frame.kind
        if kind == FrameKind.RESULT:
            self._on_end(frame.channel, _output_of(frame), TIMING.unpack_from(frame.head))
        elif kind == FrameKind.END:
            self._on_end(frame.channel, Output(b"", JSON_TYPE), Timing.unpack(frame.head))
        elif kind == FrameKind.ERROR:
            self._on_end(frame.channel, _error_of(frame), UNKNOWN)
        elif kind in (FrameKind.CHUNK, FrameKind.PROGRESS, FrameKind.METRICS, FrameKind.READ):
            self.calls.take_piece(frame)
        elif kind == FrameKind.RETURNED:
            self._on_end(frame.channel, None, UNKNOWN)
        elif kind == FrameKind.PARKED:
            self._on_parked(frame)
        else:
            self._on_control(kind, frame.json())

    def _on_end(self, channel: int, outcome: Output | PilotflameError | None, timing: WorkerTiming) -> None:
        """Remove an invocation, and report its end. `outcome` is None if the worker gave the invocation back."""
        now_s, calls = time.monotonic(), self.calls
        if channel in calls.recorded:
            calls.end_record(channel)
        invocation, batch = self.outstanding.remove(channel, now_s, timing[3])
        if not self.outstanding.calls:
            self.idle_since_s = now_s
            if self.state is ReplicaState.DRAINING:
                self.child.kill_after(EXIT_TIMEOUT_S)
        if calls.stuck:
            calls.stuck.discard(channel)
            calls.kill_if_only_stuck()
        if invocation is None:
            return
        if outcome is None:
            self._call_events.on_returned(invocation)
        else:
            self.completed += 1
            self._call_events.on_end(self, invocation, outcome, timing, now_s, batch)

    def _on_control(self, kind: int, head: dict[str, Any]) -> None:
        if kind == FrameKind.READY:
            self._on_ready(head)
        elif kind == FrameKind.WINDOW:
            self._on_window(head)
        elif kind == FrameKind.DRAIN:
            # The worker wants to exit. The reply confirms that the gateway will send it no more invocations.
            if self.state is not ReplicaState.DRAINING:
                self.drain(None)
                # Set no limit for a worker with invocations. It may run until the last of them has ended, which deadlines limit.
                if not self.outstanding.calls:
                    self.child.kill_after(EXIT_TIMEOUT_S)
                self._worker_events.on_leaving(self)
        elif kind == FrameKind.COPIED:
            self.start.note_copied(head)
        elif kind == FrameKind.NEED:
            self._worker_events.on_need(self, str(head["name"]))
        elif kind == FrameKind.FAILED:
            self.start.failed = True
            self.start.stop_timer()
            self.child.kill_after(EXIT_TIMEOUT_S)
            self.state = ReplicaState.DRAINING
            self._worker_events.on_start_failed(PilotflameError.from_wire(head), self.name)
        # Ignore PRIMED, which arrives here if a standby became a worker before it was primed.
        elif kind != FrameKind.PRIMED:
            raise LinkError(f"A worker sent a frame of kind {kind}, which workers do not send.")

    def _on_parked(self, frame: Frame) -> None:
        # If the worker was woken and parked again meanwhile, only the answer to the last PARK shows that its memory is
        # free.
        if self.state is not ReplicaState.PARKED or frame.channel == self.parking.count:
            self.parking.stop_timer()
            head = frame.json()
            self._worker_events.on_parked(self, int(head["freed_bytes"]), list(head.get("reserved", ())))

    def _on_window(self, head: dict[str, Any]) -> None:
        self.window = int(head["window"])
        if "slots" in head:
            self.outstanding.resize(int(head["slots"]), time.monotonic())
        if "limit" in head:
            self.batch_limit = int(head["limit"])
        if "slots" in head or "limit" in head:
            self._call_events.on_resized(self)
        if "call" in head:
            self._call_events.on_split(self.outstanding.split(int(head["call"]), time.monotonic()))

    def _on_ready(self, head: dict[str, Any]) -> None:
        self.idle_since_s = time.monotonic()
        self.start.note_ready(head, self.idle_since_s)
        self.window = int(head["window"])
        self.outstanding.slots, self.outstanding.batching = int(head["slots"]), bool(head["batching"])
        self.batch_limit = int(head["limit"]) if "limit" in head else None
        if self.state is ReplicaState.RESTORING:
            self.state = ReplicaState.READY
        self._worker_events.on_ready(self)

    def _on_lost(self) -> None:
        if self.state is ReplicaState.DEAD:
            return
        self.start.stop_timer()
        self.parking.end(time.monotonic())
        if self.child.output is not None:
            # Read the last lines that the worker printed before its link ended.
            self.child.output.drain()
        # Kill the process, which is useless without a link, unless the worker drains and so exits by itself.
        self.left = self.state is ReplicaState.DRAINING and not self.start.failed
        if self.state is not ReplicaState.DRAINING:
            self.child.kill()
        self.state = ReplicaState.DEAD
        self._worker_events.on_lost(self, *self.outstanding.clear(time.monotonic()))


def _error_of(frame: Frame) -> PilotflameError:
    """Return the error in a frame ERROR. Workers cut long errors, but a container may send errors of any length."""
    if len(frame.head) <= MAX_ERROR_BYTES:
        return PilotflameError.from_wire(frame.json())
    return HandlerFailed(f"The handler failed with an error of more than {MAX_ERROR_BYTES} bytes.")


def _output_of(frame: Frame) -> Output | OutputInvalid:
    """Return the output in a frame RESULT, or an error if its Content-Type, which the handler has chosen, cannot be in a header."""
    if len(frame.head) == TIMING.size:
        return Output(frame.payload, JSON_TYPE)
    content_type = frame.head[TIMING.size :].decode(errors="replace")
    if content_type.isprintable() and len(content_type) <= MAX_TYPE_CHARS:
        return Output(frame.payload, content_type)
    message = f"The output's Content-Type is {content_type[:80]!r}, which no header can hold."
    return OutputInvalid(message, remedy="Return another Content-Type, without line breaks.")
