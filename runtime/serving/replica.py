"""The replica: the gateway's view of one worker."""

from __future__ import annotations

import asyncio
import enum
import time
from typing import Any, Protocol

from ...errors import LinkError, PilotflameError
from ...handlers.codec import JSON_TYPE
from ..launching.launcher import Child
from ..link.frames import TIMING, Frame, FrameKind, Timing
from ..telemetry.timeline import Activation
from .invocation import Answer, Invocation, Stream
from .outstanding import GroupEnd, Outstanding


class ReplicaState(enum.StrEnum):
    RESTORING = "restoring"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


# How long a worker may take from ACTIVATE to READY, and from saying that it cannot to its end.
START_TIMEOUT_S = 900.0
EXIT_TIMEOUT_S = 30.0
# What was not measured of an invocation that failed.
UNKNOWN = Timing(0.0, 0.0, 1, 0.0)
# What READY says of a worker beside its window.
WARMTH = ("curve", "device", "dtype")
# One in so many singles is learned from: they are alike, and it costs more than counting them.
LEARNED_EVERY = 16


class Owner(Protocol):
    """Who is told what a replica does: its pool."""

    def on_ready(self, replica: Replica) -> None: ...
    def on_free(self, replica: Replica) -> None: ...
    def on_returned(self, replica: Replica, invocation: Invocation) -> None: ...
    def refined(self, error: PilotflameError) -> PilotflameError: ...
    def on_setup_failed(self, replica: Replica, error: PilotflameError) -> None: ...
    def on_dead(self, replica: Replica, unstarted: list[Invocation], started: list[Invocation]) -> None: ...


class Learner(Protocol):
    """Who learns from what workers do, and minds the time they take: the line."""

    def on_ended(self, ended: GroupEnd) -> None: ...
    def on_cost(self, invocation: Invocation, cost: float) -> None: ...
    def on_limit(self) -> None: ...
    def on_call(self, invocations: list[Invocation]) -> None: ...


class Replica:
    """One worker: how much it may be given, and what it was given."""

    def __init__(
        self,
        child: Child,
        activation: Activation,
        owner: Owner,
        learner: Learner,
        env: dict[str, str],
        start_timeout_s: float = START_TIMEOUT_S,
        *,
        measure: bool = False,
    ) -> None:
        """`measure`: the worker is to measure its latency curve before it is ready, if it can."""
        self.child = child
        self.name = child.name
        self.activation = activation
        self.state = ReplicaState.RESTORING
        self.given = Outstanding()
        self.idle_since_s = time.monotonic()
        self.served = 0
        self.window = 0
        self.limit: int | None = None
        """How many its memory suffices for together, once it has said so."""
        self.failure_told = False
        self.warmth: dict[str, Any] = {}
        """What the worker said of its device and of how fast it is, when it was ready."""
        self._owner = owner
        self._learner = learner
        self._stuck: set[int] = set()
        # A worker that hangs while it starts would for ever count as one that is on its way.
        self._start_timer = asyncio.get_running_loop().call_later(start_timeout_s, child.kill)
        child.link.bind(self._on_frame, self._on_lost)
        child.link.send_json(
            FrameKind.ACTIVATE, 0, {"env": env, "measure": True} if measure else {"env": env}
        )
        if child.link.closed:  # it died as a standby, and nobody noticed yet
            asyncio.get_running_loop().call_soon(self._on_lost)

    @property
    def in_flight(self) -> dict[int, Invocation]:
        return self.given.calls

    @property
    def free(self) -> int:
        """How many more invocations it may be sent now; of a batch handler, how many groups."""
        if self.state is not ReplicaState.READY:
            return 0
        return self.window - self.load

    @property
    def load(self) -> int:
        return self.given.groups if self.given.batching else len(self.given.calls)

    @property
    def holds_more(self) -> bool:
        """Whether it is `hurried`, and has room."""
        given = self.given
        return self.state is ReplicaState.READY and given.slots < self.window > len(given.calls)

    @property
    def hurried(self) -> bool:
        """Whether its invocations are so short that it holds some in advance (see advance.py)."""
        return self.window > self.given.slots

    def send(self, invocations: list[Invocation], now_s: float) -> None:
        """Gives the worker invocations that are to run together; of a handler that takes no batch, one."""
        if not self.given.batching:
            for invocation in invocations:
                self._send_single(invocation, now_s)
            return
        channels = self.given.add(invocations, now_s)
        link, left = self.child.link, len(invocations)
        for channel, invocation in zip(channels, invocations, strict=True):
            left -= 1
            invocation.worker = self.name
            invocation.companions = len(invocations) - 1
            invocation.timeline.sent_s = now_s
            link.send_json(FrameKind.INVOKE, channel, invocation.head(now_s, left), invocation.body)
        link.flush()  # not after this turn of the loop, in which all the last group's callers are answered

    def _send_single(self, invocation: Invocation, now_s: float) -> None:
        channel = self.given.add_single(invocation, now_s)
        invocation.worker = self.name
        invocation.timeline.sent_s = now_s
        if invocation.stream is not None:
            self._feed(invocation.stream, channel)
        self.child.link.send_json(FrameKind.INVOKE, channel, invocation.head(now_s), invocation.body)

    def _feed(self, stream: Stream, channel: int) -> None:
        stream.on_taken = lambda count: self._grant(channel, count)

    def cancel(self, invocation: Invocation, kill_after_s: float) -> None:
        """Tells the worker that nobody waits; a worker that does not yield within `kill_after_s` is replaced."""
        channel = self.given.channel_of(invocation)
        if channel is not None:
            self.child.link.send(FrameKind.CANCEL, channel)
            asyncio.get_running_loop().call_later(kill_after_s, self._replace_if_stuck, channel)

    def began_s(self, invocation: Invocation) -> float | None:
        """Since when the worker runs it; None if it has only been given it."""
        channel = self.given.channel_of(invocation)
        return self.given.began_s(channel) if channel is not None else None

    def replace(self, invocation: Invocation) -> None:
        """Its call of the handler does not end: the worker takes nothing more, and is killed once nothing else runs."""
        channel = self.given.channel_of(invocation)
        if channel is None or self.state is ReplicaState.DEAD:
            return
        self._stuck |= self.given.together(channel)
        if self.state is ReplicaState.READY:
            self.state = ReplicaState.DRAINING
            self.child.link.send(FrameKind.DRAIN)
            self.child.kill_after(EXIT_TIMEOUT_S)
        self._kill_if_only_stuck()

    def _kill_if_only_stuck(self) -> None:
        if self._stuck and self.given.running() <= self._stuck:
            self.child.kill()

    def drain(self, kill_after_s: float) -> None:
        """Asks the worker to finish what runs and exit; kills it if that takes longer than `kill_after_s`."""
        if self.state is ReplicaState.DEAD:
            return
        self.state = ReplicaState.DRAINING
        self.child.link.send(FrameKind.DRAIN)
        self.child.kill_after(kill_after_s)

    def _replace_if_stuck(self, channel: int) -> None:
        if (invocation := self.given.calls.get(channel)) is not None:
            self.replace(invocation)

    def _grant(self, channel: int, count: int) -> None:
        if channel in self.in_flight:
            self.child.link.send_json(FrameKind.MORE, channel, {"count": count})

    # -- frames from the worker

    def _on_frame(self, frame: Frame) -> None:
        kind = frame.kind
        if kind == FrameKind.RESULT:
            self._on_result(frame)
        elif kind in (FrameKind.CHUNK, FrameKind.END, FrameKind.ERROR, FrameKind.RETURNED):
            self._on_other_outcome(frame)
        elif kind == FrameKind.PROGRESS:
            self._on_progress(frame)
        else:
            self._on_word(frame)

    def _on_result(self, frame: Frame) -> None:
        now_s, head = time.monotonic(), frame.head
        timing = TIMING.unpack_from(head)
        invocation, ended = self._take(frame.channel, timing[3], now_s)
        if invocation is None:
            return
        self._note(invocation, timing, now_s)
        kind = head[TIMING.size :].decode() if len(head) > TIMING.size else JSON_TYPE
        invocation.resolve(Answer(frame.payload, kind))
        self._after(ended)

    def _after(self, ended: GroupEnd | None) -> None:
        """Of a group, only the end of the last makes room for another."""
        if ended is not None:
            self._learner.on_ended(ended)
        if ended is not None or not self.given.batching:
            self._owner.on_free(self)

    def _on_progress(self, frame: Frame) -> None:
        invocation = self.in_flight.get(frame.channel)
        if invocation is not None and not invocation.ended:
            invocation.on_progress(frame.payload)

    def _on_other_outcome(self, frame: Frame) -> None:
        if frame.kind == FrameKind.CHUNK:
            invocation = self.in_flight.get(frame.channel)
            if invocation is not None and invocation.stream is not None and not invocation.ended:
                invocation.stream.put(frame.payload)
            return
        returned = frame.kind == FrameKind.RETURNED
        now_s = time.monotonic()
        invocation, ended = self._take(frame.channel, float(frame.kind == FrameKind.END), now_s)
        if invocation is None:
            return
        if returned:
            self._owner.on_returned(self, invocation)
            return
        timing = Timing.unpack(frame.head) if frame.kind == FrameKind.END else UNKNOWN
        self._note(invocation, timing, now_s)
        if frame.kind == FrameKind.END:
            invocation.resolve(Answer(b"", JSON_TYPE))
        else:
            invocation.fail(self._owner.refined(PilotflameError.from_wire(frame.json())))
        self._after(ended)

    def _on_word(self, frame: Frame) -> None:
        head = frame.json()
        if frame.kind == FrameKind.READY:
            self._on_ready(head)
        elif frame.kind == FrameKind.WINDOW:
            self._on_window(head)
        elif frame.kind == FrameKind.DRAIN:
            if (
                self.state is not ReplicaState.DRAINING
            ):  # its own wish: the answer says that nothing more is on its way
                self.state = ReplicaState.DRAINING
                self.child.link.send(FrameKind.DRAIN)
        elif frame.kind == FrameKind.FAILED:
            self.failure_told = True
            self._start_timer.cancel()
            self.child.kill_after(EXIT_TIMEOUT_S)
            self.state = ReplicaState.DRAINING
            self._owner.on_setup_failed(self, PilotflameError.from_wire(head))
        elif frame.kind != FrameKind.PRIMED:  # a standby that was needed before it was ready says so late
            raise LinkError(f"A worker sent a frame of kind {frame.kind}, which is not its to send.")

    def _on_window(self, head: dict[str, Any]) -> None:
        self.window = int(head["window"])
        if "slots" in head:  # its handler asked for another size: what waits may fit now
            self.given.slots = int(head["slots"])
            if self.state is ReplicaState.READY:
                self._owner.on_free(self)
        if "limit" in head:
            self.limit = int(head["limit"])
            self._learner.on_limit()
        if "call" in head:
            self._learner.on_call(self.given.beside(int(head["call"])))

    def _on_ready(self, head: dict[str, Any]) -> None:
        self.activation.ready_s = self.idle_since_s = time.monotonic()
        self.activation.restore_s = float(head.get("restore_s", 0.0))
        self._start_timer.cancel()
        self.window = int(head["window"])
        self.given.batching = bool(head["batching"])
        self.given.slots = int(head["slots"])
        self.limit = int(head["limit"]) if "limit" in head else None
        self.warmth = {key: head[key] for key in WARMTH if key in head}
        if self.state is ReplicaState.RESTORING:
            self.state = ReplicaState.READY
        self._owner.on_ready(self)

    def _take(self, channel: int, cost: float, now_s: float) -> tuple[Invocation | None, GroupEnd | None]:
        invocation, ended = self.given.take(channel, now_s, cost)
        if not self.given.calls:
            self.idle_since_s = now_s
        if self._stuck:
            self._stuck.discard(channel)
            self._kill_if_only_stuck()
        return invocation, ended

    def _note(self, invocation: Invocation, timing: tuple[float, float, int, float], now_s: float) -> None:
        line = invocation.timeline
        line.answered_s = now_s
        line.wait_s, line.exec_s, line.batch, line.cost = timing
        self.served += 1
        if self.given.batching:  # what groups teach is told when they end
            if line.cost:
                self._learner.on_cost(invocation, line.cost)
        elif self.served % LEARNED_EVERY == 1:
            self._learner.on_ended(GroupEnd(1, 1.0, line.answered_s - line.sent_s - line.wait_s))

    def _on_lost(self) -> None:
        if self.state is ReplicaState.DEAD:
            return
        self._start_timer.cancel()
        if self.state is not ReplicaState.DRAINING:
            self.child.kill()  # a worker without a link is of no use, whatever it thinks
        self.state = ReplicaState.DEAD
        calls, running = self.given.calls, self.given.running()
        unstarted = [held for channel, held in calls.items() if channel not in running]
        started = [held for channel, held in calls.items() if channel in running]
        self.given.clear(time.monotonic())
        self._owner.on_dead(self, unstarted, started)
