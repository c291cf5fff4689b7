"""Runs the invocations of a revision, which is one immutable version of a function.

It accepts invocations, queues them, and has workers run them. It starts and stops no worker. It tells its watcher
(reconciling/observed.py) when more or fewer workers may be needed.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Protocol

from ....errors import HandlerFailed, OutputInvalid, Overloaded, PilotflameError
from ...ground.access.fair_share import SharedRoom
from ...ground.telemetry.invocation_end import InvocationEnd
from ...ground.telemetry.load_history import Arrivals, LoadSeries
from ...ground.telemetry.logs import RevisionLog
from ...ground.telemetry.timeline import WorkerTiming
from ..batching.outstanding import BatchEnd
from ..link.worker_spec import WorkerSpec
from .call_ends import retired
from .dispatcher import Dispatcher, Policy
from .equal_calls import EqualCalls
from .invocation import Invocation, Output
from .latency_curve_store import LatencyCurveStore
from .replica import CallEvents, Replica, ReplicaState
from .replicas import Replicas

FAILURES = (HandlerFailed, OutputInvalid)
# The minimum time between two calls of `on_called`.
CALL_NOTICE_S = 0.5


class CallWatcher(Protocol):
    """Decides how many workers a revision has. The revision reports its invocations to the watcher."""

    def look(self, arriving: int = 0) -> None:
        """The present invocations may need more or fewer workers. `arriving` invocations are not queued yet."""

    def look_soon(self) -> None:
        """An invocation waits, for which no further worker is needed yet."""

    def on_refused(self) -> None:
        """A caller was refused, because it could not wait for the start of a worker."""

    def on_followed(self, arrived_s: float) -> None:
        """An invocation has ended that had arrived by `Revision.follows_until_s`."""

    def on_room(self, replica: Replica, *, waiting: bool) -> None:
        """A worker takes more invocations now, and waiting invocations were sent to it. `waiting` is True if more than
        `Revision.enough_queued` still wait.
        """

    def explain(self, error: PilotflameError) -> PilotflameError:
        """Return the error of an invocation, with the cause added if the worker could not know the cause."""


class Revision(CallEvents):
    """The queue and the dispatch of one revision."""

    def __init__(
        self, spec: WorkerSpec, policy: Policy, replicas: Replicas, watcher: CallWatcher, curves: LatencyCurveStore,
        log: RevisionLog, load: LoadSeries, arrivals: Arrivals, on_called: Callable[[float], None],
        on_ended: Callable[[InvocationEnd], None], on_begun: Sequence[Callable[[str, Invocation], None]], room: SharedRoom,
    ) -> None:  # fmt: skip
        """The revision calls `on_called` with the arrival time of an invocation, at most once every CALL_NOTICE_S. It
        calls `on_ended` when an invocation has ended with an output or an error, and each of `on_begun` before an
        invocation is queued or sent. `room` limits the bodies that wait in this queue and in others.
        """
        self.spec, self.policy, self.streaming, self.replicas = spec, policy, policy.streaming, replicas
        self.dispatcher = Dispatcher(spec, policy, replicas, curves, watcher.look, on_ended, room)
        self._equal = EqualCalls(self.dispatcher, self._queue_aside)
        self._watcher, self._log, self._load, self._note_arrival = watcher, log, load, arrivals.note
        self._on_called, self._notice_at_s, self._on_begun = on_called, 0.0, on_begun
        self.retiring = False
        """True if no further invocation is accepted. Accepted invocations still run."""
        self.observe: Callable[[Invocation], None] | None = None
        """Called with each invocation before it is sent or queued."""
        self.enough = self.enough_queued = -1.0
        """An arrival causes no look while at most `enough` invocations run and at most `enough_queued` wait. The watcher sets both."""
        self.follows_until_s = -math.inf
        """The watcher gets `on_followed` for each invocation that has arrived by this time. The watcher sets the time."""
        self.peak = 0
        """The largest number of running invocations since the last look. Each look sets it to the number at that time."""
        self._waited = self._refused = 0
        self._returns = False

    def retire(self) -> None:
        """Accept no more invocations, and let open connections connect to the next revision."""
        self.retiring = True
        for replica in self.replicas:
            replica.calls.tell_leaving()

    def configure(self, policy: Policy) -> None:
        self.policy, self.streaming = policy, policy.streaming
        self.dispatcher.configure(policy)

    # -- invocations

    def submit(self, invocation: Invocation, key: Hashable | None = None) -> bool:
        """Send an invocation, or queue it. Raise QueueFull, Overloaded, RevisionRetired, or the error of `Dispatcher.bar`.

        If another invocation with the same `key` has not ended, `invocation` may wait for its output. Then return True.
        """
        if self.retiring:
            raise retired(self.spec)
        if key is None:
            self._submit(invocation)
        elif self._equal.wait(key, invocation):
            return True
        else:
            self._submit(invocation)
            self._equal.start(key, invocation)
        return False

    def _submit(self, invocation: Invocation) -> None:
        self._begin(invocation)
        replicas = self.replicas
        if self.enough < 0 and replicas.parked and not replicas.ready:
            # Let the watcher wake a parked worker first, which then takes the invocation at once.
            self._watcher.look(arriving=1)
        if (arrived_s := invocation.timeline.received_s) >= self._notice_at_s:
            self._notice_at_s = arrived_s + CALL_NOTICE_S
            self._on_called(arrived_s)
        try:
            sent = self.dispatcher.submit(invocation)
        except PilotflameError as error:
            # Cancel the output, so that its observers do not wait for it.
            invocation.output.cancel()
            if isinstance(error, Overloaded) and not replicas.ready:
                self._refused += 1
                self._watcher.on_refused()
            raise
        in_flight = replicas.in_flight
        queued = 0 if sent else len(self.dispatcher.queue)
        # If there are `max` workers already, a longer queue changes nothing.
        may_lack = not (sent or replicas.has(self.policy.scale.max))
        if in_flight > self.enough or (may_lack and queued > self.enough_queued):
            self._watcher.look()
            return
        self.peak = max(self.peak, in_flight)
        if not sent:
            self._load.note_queued(arrived_s, queued)
        if may_lack:
            self._watcher.look_soon()

    def _begin(self, invocation: Invocation) -> None:
        if self.observe is not None:
            self.observe(invocation)
        for begun in self._on_begun:
            begun(self.spec.function, invocation)

    def _queue_aside(self, invocations: Iterable[Invocation]) -> None:
        """Queue invocations that waited for the output of another one, even if the revision retires."""
        for invocation in invocations:
            try:
                self._begin(invocation)
            except PilotflameError as error:
                self.dispatcher.cancel(invocation, error)
            else:
                self.dispatcher.queue_aside(invocation)
        self.dispatcher.dispatch()
        self._watcher.look()

    def cancel(self, invocation: Invocation, error: PilotflameError | None = None) -> None:
        """Cancel an invocation. It fails with `error`; None means that its caller has disconnected."""
        self.dispatcher.cancel(invocation, error)

    # -- what has happened so far

    @property
    def arrived(self) -> int:
        """The number of invocations accepted so far, except the invocations that have failed in the queue."""
        return self.replicas.completed + self.replicas.in_flight + len(self.dispatcher.queue)

    @property
    def slow(self) -> tuple[int, int]:
        """The number of invocations that waited, or could not wait, for the start of a worker, and the number of all invocations."""
        lost = self._refused + self.dispatcher.limits.given_up
        return self._waited + lost, self.arrived + lost

    # -- events of the replicas

    def on_end(
        self, replica: Replica, invocation: Invocation, outcome: Output | PilotflameError,
        timing: WorkerTiming, now_s: float, batch: BatchEnd | None,
    ) -> None:  # fmt: skip
        if not isinstance(outcome, Output):
            if isinstance(outcome, FAILURES):
                text = f"{outcome.whole.message}\n{outcome.trace}".rstrip()
                self._log.write(replica.name, text, "error", request_id=invocation.id)
            outcome = self._watcher.explain(outcome)
        self.dispatcher.complete(replica, invocation, outcome, timing, now_s, batch)
        timeline = invocation.timeline
        self._note_arrival(timeline.received_s)
        if timeline.received_s <= self.follows_until_s:
            self._watcher.on_followed(timeline.received_s)
        if timeline.received_s < replica.activation.ready_s:
            self._waited += 1
        # A worker takes another batch only after the last invocation of a batch has ended.
        if batch is not None or not replica.outstanding.batching:
            self._use_room(replica)

    def _use_room(self, replica: Replica) -> None:
        """Dispatch waiting invocations, because a worker takes more invocations now."""
        if waiting := len(self.dispatcher.queue):
            self.dispatcher.dispatch()
            waiting = len(self.dispatcher.queue)
        self._watcher.on_room(replica, waiting=waiting > max(0.0, self.enough_queued))

    def on_returned(self, invocation: Invocation) -> None:
        self.dispatcher.requeue(invocation)
        if not self._returns:
            # Dispatch once all invocations that the worker gives back have arrived, so that the invocations of a batch stay together.
            self._returns = True
            asyncio.get_running_loop().call_soon(self._dispatch_returned)

    def _dispatch_returned(self) -> None:
        self._returns = False
        self.dispatcher.dispatch()
        self._watcher.look()

    def on_split(self, invocations: list[Invocation]) -> None:
        self.dispatcher.limits.restart(invocations)

    def on_resized(self, replica: Replica) -> None:
        self.dispatcher.limit_batch()
        if replica.state is ReplicaState.READY:
            self._use_room(replica)
