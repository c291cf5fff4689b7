"""The dispatcher: the invocations of one revision that wait for a worker, and those that run.

It alone changes an invocation's state: it queues, sends, limits, requeues and ends invocations.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from ...errors import PilotflameError, RevisionRetired, WorkerDied
from ..batching.assignment import assign
from ..batching.outstanding import BatchEnd
from ..batching.queue import Queue, Slots
from ..link.worker_spec import WorkerSpec
from ..scaling import autoscaler
from ..telemetry.timeline import WorkerTiming
from . import deadlines
from .deadlines import EARLY_S, Deadlines
from .invocation import Invocation, Output
from .latency_curve_store import LatencyCurveStore
from .pool import Pool
from .replica import Replica, RevisionEvents

MAX_ATTEMPTS = 3
CANCEL_GRACE_S = 5.0
# How long an async handler has to react to its interruption.
INTERRUPT_S = 1.0
SMOOTHING = 0.3
# The latency curve learns from one in so many single invocations: they are alike, and learning costs time.
OBSERVED_EVERY = 16


@dataclass(frozen=True, slots=True)
class Policy:
    """How a revision treats its invocations, from its settings and its handler."""

    scale: autoscaler.ScaleSpec
    timeout_s: float = 600.0
    execution_timeout_s: float | None = None
    max_batch: int = 1
    """How many invocations a worker runs together."""
    interruptible: bool = False
    """True for async handlers."""
    streaming: bool = False
    aggregates: bool = True
    """True if all pieces of a streamed output together are a job's output."""
    hold_s: float = 60.0
    max_queue: int = 1000
    max_body_bytes: int = 20 << 20
    idempotent: bool = False
    standby: bool = True
    keep_zygote: bool = True


class Dispatcher:
    """Sends invocations to the workers of one revision and sees each to its end, on one event loop."""

    def __init__(
        self, spec: WorkerSpec, policy: Policy, pool: Pool, curves: LatencyCurveStore, events: RevisionEvents
    ) -> None:
        """`curves` hold how fast earlier workers of the same code were."""
        self.queue: Queue[Invocation] = Queue(
            spec.function, max_batch=policy.max_batch, max_queue=policy.max_queue
        )
        self._policy = policy
        self._device = ""
        self._curves = curves
        self._spec = spec
        self._pool = pool
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._deadlines = Deadlines(self._loop, self._on_due)
        self._batch_timer: asyncio.TimerHandle | None = None
        self._activation_s = 0.0
        self._closed = False

    def configure(self, policy: Policy) -> None:
        self._policy = policy
        self.queue.configure(max_batch=policy.max_batch, max_queue=policy.max_queue)

    def close(self) -> None:
        """Send nothing more; fail what waits, and what ending workers return."""
        self._closed = True
        self.fail_queued(self._retired())
        if self._batch_timer is not None:
            self._batch_timer.cancel()

    # -- arrivals

    def submit(self, invocation: Invocation) -> bool:
        """Send the invocation to a free worker and return True, or queue it.

        :raises QueueFull, Overloaded: if it cannot be queued.
        :raises RevisionRetired: if the dispatcher is closed.
        """
        if self._closed:
            raise self._retired()
        now_s = time.monotonic()
        if self._policy.max_batch == 1 and not len(self.queue) and (replica := self._pool.pick()) is not None:
            self._deadlines.set(invocation, invocation.deadline_s, now_s)
            self._send(replica, [invocation], now_s)
            return True
        invocation.mark_queued(cold=not self._pool.ready)
        self.queue.admit(invocation, now_s, self._slots(now_s))
        self._deadlines.set(invocation, min(invocation.deadline_s, invocation.hold_until_s), now_s)
        self.dispatch()
        return False

    def _slots(self, now_s: float) -> Slots:
        """Return the slots, those of starting workers included; a single invocation is a batch of one."""
        ready = self._pool.ready
        at_once = max(1, self._policy.scale.concurrency // self._policy.max_batch)
        count = sum(replica.outstanding.slots for replica in ready) + at_once * self._pool.starting
        if ready:
            curve = self.queue.curve
            return Slots(count, min(replica.outstanding.free_at(now_s, curve) for replica in ready))
        asked_s = min((replica.activation.asked_s for replica in self._pool.replicas), default=now_s)
        return Slots(max(count, at_once), max(now_s, asked_s + self._activation_s))

    def requeue(self, invocation: Invocation) -> None:
        """Queue an invocation again that its worker did not run."""
        if invocation.ended:
            return
        invocation.mark_requeued()
        if self._closed:
            self._fail(invocation, self._retired())
            return
        now_s = time.monotonic()
        self._deadlines.set(invocation, deadlines.waiting_limit_s(invocation, now_s), now_s)
        self.queue.requeue(invocation)

    # -- to the workers

    def dispatch(self) -> None:
        """Send what waits to workers that have room."""
        now_s = time.monotonic()
        for replica, selection in assign(self.queue, self._pool.pick, self._pool.ready, now_s):
            for invocation in selection.refused:
                self._fail(invocation, self.queue.refusal(invocation, now_s, self._slots(now_s)))
            if replica is not None and selection.batch:
                self._send(replica, selection.batch, now_s)
            if selection.wait_until_s is not None:
                self._dispatch_at(selection.wait_until_s, now_s)

    def _dispatch_at(self, when_s: float, now_s: float) -> None:
        """Dispatch again at `when_s`, if no event causes it before."""
        if self._batch_timer is not None:
            self._batch_timer.cancel()
        self._batch_timer = self._loop.call_later(max(0.0, when_s - now_s), self.dispatch)

    def _send(self, replica: Replica, batch: list[Invocation], now_s: float) -> None:
        limit_s = self._policy.execution_timeout_s
        for invocation in batch:
            invocation.mark_sent(replica.name, len(batch), now_s, replica.activation)
            if limit_s is not None:
                self._limit_execution(invocation, now_s, now_s + limit_s)
            elif invocation.patient:
                self._deadlines.set(invocation, invocation.deadline_s, now_s)
        replica.send(batch, now_s)
        for invocation in batch:
            if invocation.on_sent is not None:
                invocation.on_sent()

    def cancel(self, invocation: Invocation) -> None:
        """The caller has disconnected: remove the invocation from the queue, or cancel it at its worker."""
        self._deadlines.cancel(invocation)
        invocation.abandon()
        self._remove(invocation)

    def _remove(self, invocation: Invocation) -> None:
        if not self.queue.remove(invocation) and (replica := self._replica_of(invocation)) is not None:
            # A plain handler cannot be interrupted: it may finish, but not outlive the deadline it was given.
            left_s = max(0.0, invocation.deadline_s - time.monotonic())
            replica.cancel(invocation, left_s + CANCEL_GRACE_S)
        self._events.on_left()

    def _replica_of(self, invocation: Invocation) -> Replica | None:
        return next((one for one in self._pool.replicas if one.name == invocation.worker), None)

    def fail_queued(self, error: PilotflameError) -> None:
        """Fail all that wait: no worker will run them."""
        for invocation in list(self.queue):
            self.queue.remove(invocation)
            self._fail(invocation, error)

    def _fail(self, invocation: Invocation, error: PilotflameError) -> None:
        self._deadlines.cancel(invocation)
        invocation.fail(error)

    def _retired(self) -> RevisionRetired:
        return RevisionRetired(
            f"Revision {self._spec.revision} was stopped before this invocation could run."
        )

    # -- limits of time

    def _limit_execution(self, invocation: Invocation, now_s: float, until_s: float) -> None:
        invocation.limit_execution(until_s)
        self._deadlines.set(invocation, min(invocation.deadline_s, until_s), now_s)

    def _on_due(self, invocation: Invocation) -> None:
        now_s = time.monotonic()
        waited_s = now_s - invocation.timeline.received_s
        if now_s >= invocation.deadline_s - EARLY_S:
            self._fail(invocation, deadlines.deadline_exceeded(waited_s))
            self._remove(invocation)
        elif invocation.worker:
            if now_s >= invocation.execution_deadline_s - EARLY_S:
                self._on_overrun(invocation, now_s)
            else:
                due_s = min(invocation.deadline_s, invocation.execution_deadline_s)
                self._deadlines.set(invocation, due_s, now_s)
        elif not self._pool.ready and now_s >= invocation.hold_until_s - EARLY_S:
            self._fail(invocation, deadlines.activation_timeout(self._spec.function, waited_s))
            self._remove(invocation)
        else:
            self._deadlines.set(invocation, deadlines.waiting_limit_s(invocation, now_s), now_s)

    def _on_overrun(self, invocation: Invocation, now_s: float) -> None:
        """A call took longer than execution_timeout_s, or the invocation waited behind another."""
        replica, limit_s = self._replica_of(invocation), self._policy.execution_timeout_s
        if replica is None or limit_s is None:
            return
        started_s = replica.started_s(invocation)
        if started_s is None or now_s < started_s + limit_s - EARLY_S:
            self._limit_execution(invocation, now_s, (now_s if started_s is None else started_s) + limit_s)
        # One of the batch may be the cause: replacing the worker runs each of them again, alone.
        elif invocation.batch_size > 1:
            replica.replace(invocation)
        else:
            self._fail(invocation, deadlines.execution_timeout(limit_s))
            if self._policy.interruptible:
                replica.cancel(invocation, INTERRUPT_S)
            else:
                replica.replace(invocation)
        self._events.on_left()

    def restart_execution(self, invocations: list[Invocation]) -> None:
        """Their handler is called again, with fewer of them: each call has the full time."""
        now_s, limit_s = time.monotonic(), self._policy.execution_timeout_s
        for invocation in invocations:
            if limit_s is not None and not invocation.ended:
                self._limit_execution(invocation, now_s, now_s + limit_s)

    # -- from the workers

    def complete(
        self, replica: Replica, invocation: Invocation, outcome: Output | PilotflameError,
        timing: WorkerTiming, now_s: float, batch: BatchEnd | None,
    ) -> None:  # fmt: skip
        """End an invocation, and learn from what it took."""
        timeline = invocation.timeline
        timeline.mark_completed(now_s, timing)
        if replica.outstanding.batching:
            if timing[3]:
                self.queue.charge(invocation, timing[3])
        elif replica.completed % OBSERVED_EVERY == 1:
            self._observe(BatchEnd(1, 1.0, now_s - timeline.sent_s - timeline.wait_s))
        self._deadlines.cancel(invocation)
        if isinstance(outcome, Output):
            invocation.resolve(outcome)
        else:
            invocation.fail(self._pool.explain(outcome))
        if batch is not None:
            self._observe(batch)

    def _observe(self, batch: BatchEnd) -> None:
        if batch.seconds <= 0:
            return
        now_s = time.monotonic()
        self.queue.observe_batch(now_s, *batch)
        # When this turn of the loop ends, all callers of the batch have their responses.
        if self._policy.max_batch > 1:
            self._loop.call_soon(self._observe_response, now_s)

    def _observe_response(self, ended_s: float) -> None:
        """Learn what a response takes: this turn of the loop, and as much on the caller's side."""
        self.queue.observe_response(2 * (time.monotonic() - ended_s))

    def adopt(self, replica: Replica) -> None:
        """A worker is ready: take its latency curve, or the stored one of its device, and dispatch."""
        self.limit_batch()
        curve = self.queue.curve
        if replica.measured:
            curve.load(replica.measured)
        else:
            # The time of an activation that measured a curve is no typical one: it is measured once.
            took_s = replica.activation.ready_s - replica.activation.asked_s
            self._activation_s += (SMOOTHING if self._activation_s else 1.0) * (took_s - self._activation_s)
            if replica.device != self._device:
                curve.load(self._curves.of_device(replica.device))
        self._device = replica.device
        self.dispatch()

    def limit_batch(self) -> None:
        """A batch may go to any worker, so it must fit into the memory of each."""
        limits = [replica.batch_limit for replica in self._pool.ready if replica.batch_limit is not None]
        self.queue.configure(max_batch=max(1, min([self._policy.max_batch, *limits])))

    def recover(self, unstarted: list[Invocation], started: list[Invocation], cause: str) -> None:
        """A worker died: requeue what it had not started; repeat or fail what it had."""
        repeated = [invocation for invocation in started if self._may_repeat(invocation, cause)]
        for invocation in [*repeated, *unstarted]:
            self.requeue(invocation)
        self.dispatch()

    def _may_repeat(self, invocation: Invocation, cause: str) -> bool:
        """Return True if an invocation may run again; otherwise fail it.

        A batch is repeated one by one, whether idempotent or not: any one of it may have killed the worker,
        and batch handlers are called again with a part of the batch after an error anyway.
        """
        harmless = self._policy.idempotent and invocation.stream is None
        if invocation.batch_size > 1 or (harmless and invocation.attempt < MAX_ATTEMPTS):
            invocation.mark_repeated()
            return True
        remedy = "See `pilotflame logs` for its last words."
        if not harmless:
            remedy += " If running it twice is harmless, set idempotent = true in pilotflame.toml:"
            remedy += " then it is repeated."
        message = f"The worker that ran this invocation died of {cause} (attempt {invocation.attempt})."
        self._fail(invocation, WorkerDied(message, remedy=remedy))
        return False

    async def store_curve(self) -> None:
        """Write how fast the workers were, for the next activation; not if nothing new is known."""
        points = self.queue.curve.points
        if points and self._curves.differs(self._device, points):
            await asyncio.to_thread(self._curves.write, self._device, points)
