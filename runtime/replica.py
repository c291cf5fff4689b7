"""The replica: the gateway's view of one worker."""

from __future__ import annotations

import asyncio
import enum
import time
from itertools import islice
from typing import Protocol

from ..errors import LinkError, PilotlightError
from ..handlers.codec import JSON_TYPE
from .invocation import Answer, Invocation
from .launcher import Child
from .link import TIMING, Frame, Kind, Timing
from .timeline import Activation


class State(enum.StrEnum):
    RESTORING = "restoring"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


# How long a worker may take from ACTIVATE to READY, and from saying that it cannot to its end.
START_TIMEOUT_S = 900.0
EXIT_TIMEOUT_S = 30.0


class Owner(Protocol):
    """Who is told what a replica does: its pool."""

    def on_ready(self, replica: Replica) -> None: ...
    def on_free(self, replica: Replica) -> None: ...
    def on_returned(self, replica: Replica, invocation: Invocation) -> None: ...
    def refined(self, error: PilotlightError) -> PilotlightError: ...
    def on_setup_failed(self, replica: Replica, error: PilotlightError) -> None: ...
    def on_dead(self, replica: Replica, unstarted: list[Invocation], started: list[Invocation]) -> None: ...


class Replica:
    """One worker: how much it may be given, and what it was given."""

    def __init__(
        self,
        child: Child,
        activation: Activation,
        owner: Owner,
        env: dict[str, str],
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self.child = child
        self.activation = activation
        self.state = State.RESTORING
        self.in_flight: dict[int, Invocation] = {}
        self.idle_since_s = time.monotonic()
        self.served = 0
        self.window = 0
        self.failure_told = False
        self._slots = 0
        self._owner = owner
        self._next_channel = 0
        # A worker that hangs while it starts would for ever count as one that is on its way.
        self._start_timer = asyncio.get_running_loop().call_later(start_timeout_s, child.kill)
        child.link.bind(self._on_frame, self._on_lost)
        child.link.send_json(Kind.ACTIVATE, 0, {"env": env})
        if child.link.closed:  # it died as a standby, and nobody noticed yet
            asyncio.get_running_loop().call_soon(self._on_lost)

    @property
    def name(self) -> str:
        return self.child.name

    @property
    def free(self) -> int:
        """How many more invocations it may be sent now."""
        return self.window - len(self.in_flight) if self.state is State.READY else 0

    def send(self, invocation: Invocation, now_s: float) -> None:
        """Gives the worker one invocation."""
        head = invocation.head(now_s)
        self._next_channel += 1
        channel = self._next_channel
        self.in_flight[channel] = invocation
        invocation.worker = self.name
        invocation.timeline.sent_s = now_s
        if invocation.stream is not None:
            invocation.stream.on_taken = lambda count: self._grant(channel, count)
        self.child.link.send_json(Kind.INVOKE, channel, head, invocation.body)

    def cancel(self, invocation: Invocation, kill_after_s: float) -> None:
        """Tells the worker that nobody waits; a worker that does not yield within `kill_after_s` is killed."""
        for channel, held in self.in_flight.items():
            if held is invocation:
                self.child.link.send(Kind.CANCEL, channel)
                asyncio.get_running_loop().call_later(kill_after_s, self._kill_if_stuck, channel)
                return

    def drain(self, kill_after_s: float) -> None:
        """Asks the worker to finish what runs and exit; kills it if that takes longer than `kill_after_s`."""
        if self.state is State.DEAD:
            return
        self.state = State.DRAINING
        self.child.link.send(Kind.DRAIN)
        self.child.kill_after(kill_after_s)

    def _kill_if_stuck(self, channel: int) -> None:
        if channel in self.in_flight and self.state is not State.DEAD:
            self.child.kill()

    def _grant(self, channel: int, count: int) -> None:
        if channel in self.in_flight:
            self.child.link.send_json(Kind.MORE, channel, {"count": count})

    # -- frames from the worker

    def _on_frame(self, frame: Frame) -> None:
        kind = frame.kind
        if kind == Kind.RESULT:
            self._on_result(frame)
        elif kind in (Kind.CHUNK, Kind.END, Kind.ERROR, Kind.RETURNED):
            self._on_other_outcome(frame)
        elif kind == Kind.PROGRESS:
            self._on_progress(frame)
        else:
            self._on_word(frame)

    def _on_result(self, frame: Frame) -> None:
        invocation = self._take(frame.channel)
        if invocation is None:
            return
        self._note(invocation, frame.head)
        kind = frame.head[TIMING.size :].decode() if len(frame.head) > TIMING.size else JSON_TYPE
        invocation.resolve(Answer(frame.payload, kind))
        self._owner.on_free(self)

    def _on_progress(self, frame: Frame) -> None:
        invocation = self.in_flight.get(frame.channel)
        if invocation is not None and not invocation.ended:
            invocation.on_progress(frame.payload)

    def _on_other_outcome(self, frame: Frame) -> None:
        if frame.kind == Kind.CHUNK:
            invocation = self.in_flight.get(frame.channel)
            if invocation is not None and invocation.stream is not None and not invocation.ended:
                invocation.stream.put(frame.payload)
            return
        invocation = self._take(frame.channel)
        if invocation is None:
            return
        if frame.kind == Kind.RETURNED:
            self._owner.on_returned(self, invocation)
            return
        self._note(invocation, frame.head if frame.kind == Kind.END else b"")
        if frame.kind == Kind.END:
            invocation.resolve(Answer(b"", JSON_TYPE))
        else:
            invocation.fail(self._owner.refined(PilotlightError.from_wire(frame.json())))
        self._owner.on_free(self)

    def _on_word(self, frame: Frame) -> None:
        head = frame.json()
        if frame.kind == Kind.READY:
            self.activation.ready_s = self.idle_since_s = time.monotonic()
            self.activation.restore_s = float(head.get("restore_s", 0.0))
            self._start_timer.cancel()
            self.window, self._slots = int(head["window"]), int(head["slots"])
            if self.state is State.RESTORING:
                self.state = State.READY
            self._owner.on_ready(self)
        elif frame.kind == Kind.WINDOW:
            self.window = int(head["window"])
            if "slots" in head:  # its handler asked for another size: what waits may fit now
                self._slots = int(head["slots"])
                if self.state is State.READY:
                    self._owner.on_free(self)
        elif frame.kind == Kind.DRAIN:
            if (
                self.state is not State.DRAINING
            ):  # its own wish: the answer says that nothing more is on its way
                self.state = State.DRAINING
                self.child.link.send(Kind.DRAIN)
        elif frame.kind == Kind.FAILED:
            self.failure_told = True
            self._start_timer.cancel()
            self.child.kill_after(EXIT_TIMEOUT_S)
            self.state = State.DRAINING
            self._owner.on_setup_failed(self, PilotlightError.from_wire(head))
        elif frame.kind != Kind.PRIMED:  # a standby that was needed before it was ready says so late
            raise LinkError(f"A worker sent a frame of kind {frame.kind}, which is not its to send.")

    def _running(self) -> set[int]:
        """Which channels the worker had started: the oldest."""
        return set(islice(self.in_flight, self._slots))

    def _take(self, channel: int) -> Invocation | None:
        invocation = self.in_flight.pop(channel, None)
        if not self.in_flight:
            self.idle_since_s = time.monotonic()
        return invocation

    def _note(self, invocation: Invocation, head: bytes) -> None:
        timing = Timing.unpack(head[: TIMING.size])
        line = invocation.timeline
        line.answered_s = time.monotonic()
        line.wait_s, line.exec_s, line.batch, _cost = timing
        self.served += 1

    def _on_lost(self) -> None:
        if self.state is State.DEAD:
            return
        self._start_timer.cancel()
        if self.state is not State.DRAINING:
            self.child.kill()  # a worker without a link is of no use, whatever it thinks
        self.state = State.DEAD
        running = self._running()
        unstarted = [held for channel, held in self.in_flight.items() if channel not in running]
        started = [held for channel, held in self.in_flight.items() if channel in running]
        self.in_flight.clear()
        self._owner.on_dead(self, unstarted, started)
