"""Queues the invocations of one revision, sends them to workers, and ends them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from ....errors import (
    CallEnded,
    DeadlineExceeded,
    FunctionStopped,
    PilotflameError,
    RevisionRetired,
)
from ...ground.access.fair_share import SharedRoom
from ...ground.settings.function_settings import FunctionSettings
from ...ground.settings.scale_spec import ReachedLimit, ScaleSpec
from ...ground.telemetry.invocation_end import InvocationEnd
from ...ground.telemetry.timeline import WorkerTiming
from ..batching.assignment import LATE_S, assign
from ..batching.outstanding import BatchEnd
from ..batching.queue import Queue
from ..link.child import EndCause
from ..link.worker_spec import WorkerSpec
from . import deadlines
from .call_ends import CallEnd, death
from .deadlines import EARLY_S, Deadlines
from .durations import Durations
from .invocation import Invocation, Output
from .late_workers import LateWorkers
from .latency_curve_store import LatencyCurveStore
from .replica import Replica
from .replicas import Replicas

# The largest number of attempts of an idempotent invocation whose workers die.
MAX_ATTEMPTS = 3
Refusal: TypeAlias = Callable[[], PilotflameError | None]


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules by which a revision treats its invocations, from its settings and its handler."""

    settings: FunctionSettings
    scale: ScaleSpec
    max_batch: int = 1
    """The largest number of invocations in one batch; 1 if the handler takes no batches."""
    streaming: bool = False
    aggregates: bool = True
    """True if the output of a job is the list of all pieces of a streamed output."""
    owner: str = ""
    """The id of the API key with which the function was deployed; "" if no key was needed."""


class Dispatcher:
    """Sends the invocations of one revision to its workers, and ends each of them."""

    def __init__(
        self, spec: WorkerSpec, policy: Policy, replicas: Replicas, curves: LatencyCurveStore,
        look: Callable[[], None], on_ended: Callable[[InvocationEnd], None] = lambda _end: None, room: SharedRoom | None = None,
    ) -> None:  # fmt: skip
        """The dispatcher calls `look` when another number of workers may be needed: after a cancellation or a time limit, and
        when invocations wait and a worker is late.

        It calls `on_ended` once for each invocation that has ended with an output or an error.
        """
        settings = policy.settings
        self.queue: Queue[Invocation] = Queue(
            spec.function, max_batch=policy.max_batch, max_queue=settings.max_queue,
            max_bytes=settings.max_queue_bytes, room=room,
        )  # fmt: skip
        self._spec, self._policy, self._replicas = spec, policy, replicas
        self._look, self._on_ended = look, on_ended
        self.durations = Durations(self.queue, replicas, curves)
        self._size_slots()
        self._loop = asyncio.get_running_loop()
        self._deadlines = Deadlines(self._loop, self._on_due)
        self._batch_timer: asyncio.TimerHandle | None = None
        self.late = LateWorkers(
            self._loop,
            replicas,
            self.queue,
            lambda: self.durations.curve,
            lambda: self.durations.activation_s,
            look,
        )
        self.given_up = 0
        """The number of invocations that have failed because their time was over before a worker had started."""
        # Set by `close`: returns the error of the invocations that no worker will run.
        self._closed: Callable[[], PilotflameError] | None = None
        # The limit, shared with other functions, that keeps workers from starting; None without such a limit.
        self._limit: ReachedLimit | None = None
        self._refusal: Refusal | None = None
        self._fails_queued = True
        self.aside: dict[Invocation, Invocation] = {}
        """Accepted invocations outside the queue, each with the invocation for whose output it waits."""

    def note_limit(self, reached: ReachedLimit | None) -> None:
        """Store the limit that now keeps workers from starting, or None if there is no such limit any more."""
        self._limit = reached

    def configure(self, policy: Policy) -> None:
        self._policy = policy
        self._size_slots()
        settings = policy.settings
        self.queue.configure(max_queue=settings.max_queue, max_bytes=settings.max_queue_bytes)
        self.limit_batch()

    def _size_slots(self) -> None:
        self.durations.at_once = max(1, self._policy.scale.concurrency // self._policy.max_batch)

    def bar(self, refusal: Refusal | None, *, queued: bool = True) -> None:
        """Refuse invocations for which no worker is free with the error that `refusal` returns, if it returns an error.

        If `refusal` is None, refuse no more invocations. Unless `queued` is False, invocations that already wait fail
        with the error.
        """
        self._refusal, self._fails_queued = refusal, queued
        if queued and (error := self._refused()) is not None:
            self.fail_queued(error)

    def _refused(self) -> PilotflameError | None:
        return None if self._refusal is None else self._refusal()

    def close(self, end: CallEnd | None = None) -> None:
        """Stop sending. Fail the waiting invocations, and later the invocations that exiting workers give back.

        They fail with an error of `end`, or with RevisionRetired.
        """
        self._closed = self.retired if end is None else partial(end, True)
        self.fail_queued(self._closed())
        if self._batch_timer is not None:
            self._batch_timer.cancel()
        self.late.close()
        self._deadlines.close()

    # -- arrivals

    def submit(self, invocation: Invocation) -> bool:
        """Send an invocation to a free worker and return True, or queue it and return False.

        Raise RevisionRetired after `close`, and the error of `bar`. Raise QueueFull or Overloaded if the queue refuses it.
        """
        if self._closed:
            raise self.retired()
        now_s = time.monotonic()
        if (
            self._policy.max_batch == 1
            and not len(self.queue)
            and (replica := self._replicas.pick(now_s, self.durations.each_s)) is not None
        ):
            self._deadlines.set(invocation, invocation.deadline_s, now_s)
            self._send(replica, [invocation], now_s)
            return True
        if (error := self._refused()) is not None:
            raise error
        self.queue.admit(invocation, now_s, self.durations.slots(now_s))
        self._deadlines.set(invocation, min(invocation.deadline_s, invocation.hold_until_s), now_s)
        self.dispatch()
        return False

    def requeue(self, invocation: Invocation) -> None:
        """Queue an invocation again, because its worker gave it back or did not end it."""
        if invocation.ended:
            self._deadlines.cancel(invocation)
            return
        invocation.mark_requeued()
        if self._closed is not None:
            self._fail(invocation, self._closed())
            return
        if self._fails_queued and (error := self._refused()) is not None:
            self._fail(invocation, error)
            return
        now_s = time.monotonic()
        self._deadlines.set(invocation, deadlines.limit_s(invocation, now_s), now_s)
        self.queue.requeue(invocation)

    # -- invocations that wait for the output of another one

    def set_aside(self, invocation: Invocation, first: Invocation) -> None:
        """Let an invocation wait for the output of `first`. It has the time limits of a queued invocation."""
        self.aside[invocation] = first
        until_s = min(invocation.deadline_s, invocation.hold_until_s)
        self._deadlines.set(invocation, until_s, time.monotonic())

    def queue_aside(self, invocation: Invocation) -> None:
        """Queue an invocation that was set aside. The queue does not refuse it, because it is accepted already."""
        del self.aside[invocation]
        self.requeue(invocation)

    def end_aside(self, invocation: Invocation, output: Output) -> None:
        """End an invocation with the output for which it was set aside. `on_ended` is not called."""
        del self.aside[invocation]
        self._deadlines.cancel(invocation)
        invocation.cache_status += "; collapsed"
        invocation.end(output)

    # -- to the workers

    def dispatch(self) -> None:
        """Send waiting invocations to workers that have room."""
        now_s = time.monotonic()
        pick = partial(self._replicas.pick, now_s, self.durations.each_s)
        for replica, selection in assign(self.queue, pick, self._replicas.ready, now_s):
            for invocation in selection.refused:
                self._fail(invocation, self.queue.refusal(invocation, now_s, self.durations.slots(now_s)))
            if replica is not None and selection.batch:
                self._send(replica, selection.batch, now_s)
            if selection.wait_until_s is not None:
                if self._batch_timer is not None:
                    self._batch_timer.cancel()
                delay_s = max(0.0, selection.wait_until_s - now_s)
                self._batch_timer = self._loop.call_later(delay_s, self.dispatch)
        if len(self.queue):
            self.late.watch(now_s)

    def _send(self, replica: Replica, batch: list[Invocation], now_s: float) -> None:
        limit_s = self._policy.settings.execution_timeout_s
        for invocation in batch:
            invocation.mark_sent(replica.name, len(batch), now_s, replica.activation)
            if limit_s is not None:
                invocation.limit_execution(now_s, limit_s)
            if limit_s is not None or invocation.patient:
                self._deadlines.set(invocation, deadlines.limit_s(invocation, now_s), now_s)
        replica.send(batch, now_s)
        # This runs for every invocation. No worker that takes invocations now is late before LATE_S have passed.
        if self.late.due_s > now_s + LATE_S and replica.load > replica.outstanding.slots:
            self.late.watch(now_s)
        for invocation in batch:
            if invocation.on_sent is not None:
                invocation.on_sent()

    def cancel(self, invocation: Invocation, error: PilotflameError | None = None) -> None:
        """Remove an invocation from the queue, or cancel it at its worker.

        The invocation fails with `error`. If that is None, its caller has disconnected, and `on_ended` is not called.
        """
        if error is not None:
            self._fail(invocation, error)
        else:
            self.aside.pop(invocation, None)
            self._deadlines.cancel(invocation)
            invocation.end(None)
        self._remove(invocation)

    def _remove(self, invocation: Invocation) -> None:
        """Remove an ended invocation from the queue, or cancel it at its worker, where it may still run for a while."""
        queued = self.queue.remove(invocation)
        replica = None if queued else self._replica_of(invocation)
        if replica is not None and replica.cancel(invocation):
            self._check_stuck(invocation, replica, time.monotonic())
        self._look()

    def _replica_of(self, invocation: Invocation) -> Replica | None:
        return next((one for one in self._replicas if one.name == invocation.worker), None)

    def fail_queued(self, error: PilotflameError) -> None:
        """Fail all waiting invocations with `error`, because no worker will run them."""
        for invocation in [*self.queue, *self.aside]:
            self.queue.remove(invocation)
            self._fail(invocation, error)

    def end_started(self, replica: Replica, end: CallEnd) -> int:
        """Fail the invocations that a worker has begun, because the gateway ends the worker. Return their number."""
        calls = [replica.outstanding.calls[channel] for channel in replica.outstanding.running()]
        waited_for = [invocation for invocation in calls if not invocation.ended]
        for invocation in waited_for:
            self._fail(invocation, end(self._policy.settings.idempotent))
            replica.cancel(invocation)
        return len(waited_for)

    def _fail(self, invocation: Invocation, error: PilotflameError) -> None:
        self._deadlines.cancel(invocation)
        self._end(invocation, error)

    def _end(self, invocation: Invocation, outcome: Output | PilotflameError) -> None:
        """End an invocation, unless it has ended before. All outputs and errors of invocations pass through here."""
        self.aside.pop(invocation, None)
        if invocation.ended:
            return
        timeline, error = invocation.timeline, outcome if isinstance(outcome, PilotflameError) else None
        if not timeline.completed_s:
            timeline.mark_responded(time.monotonic())
        invocation.end(outcome)
        repeatable = isinstance(error, CallEnded) and error.repeatable
        if invocation.patient and (repeatable or isinstance(error, (RevisionRetired, FunctionStopped))):
            # The job of the invocation goes back to the queue of jobs, and this attempt does not count.
            return
        output = outcome if isinstance(outcome, Output) else None
        self._on_ended(
            InvocationEnd(
                self._spec.function, self._spec.revision, invocation.id, invocation.source, timeline, error,
                invocation.worker, invocation.trace, invocation, output,
            )
        )  # fmt: skip

    def retired(self) -> RevisionRetired:
        """Return the error of an invocation that this revision does not run any more."""
        return RevisionRetired(f"Revision {self._spec.revision} was stopped before this invocation ran.")

    # -- time limits

    def _on_due(self, invocation: Invocation) -> None:
        now_s = time.monotonic()
        waited_s = now_s - invocation.timeline.received_s
        cold = not (self.aside.get(invocation, invocation).worker or self._replicas.ready)
        if (replica := self._replica_of(invocation)) is not None:
            self._on_due_at_worker(invocation, replica, now_s)
        elif now_s >= invocation.deadline_s - EARLY_S:
            self.given_up += cold
            self._fail(invocation, self._late(invocation, waited_s, self._limit))
            self._remove(invocation)
        elif cold and now_s >= invocation.hold_until_s - EARLY_S:
            self.given_up += 1
            self._fail(invocation, deadlines.activation_timeout(self._spec.function, waited_s, self._limit))
            self._remove(invocation)
        else:
            # If its worker has died, `recover` has not decided about it yet, and only its deadline limits it.
            died = bool(invocation.worker)
            until_s = invocation.deadline_s if died else deadlines.limit_s(invocation, now_s)
            self._deadlines.set(invocation, until_s, now_s)

    def _late(
        self, invocation: Invocation, waited_s: float, reached: ReachedLimit | None = None
    ) -> DeadlineExceeded:
        """Return the error of an invocation whose deadline has passed. `reached` is the limit that made it wait."""
        allowed_s = self._policy.settings.timeout_s
        by_caller = not invocation.patient and invocation.timeout_s < allowed_s
        return deadlines.deadline_exceeded(waited_s, reached, allowed_s=allowed_s if by_caller else None)

    def _on_due_at_worker(self, invocation: Invocation, replica: Replica, now_s: float) -> None:
        limit_s, started_s = self._policy.settings.execution_timeout_s, replica.started_s(invocation)
        invocation.limit_execution(now_s if started_s is None else started_s, limit_s)
        if invocation.ended:
            self._check_stuck(invocation, replica, now_s)
        elif now_s >= invocation.deadline_s - EARLY_S:
            waited_s = now_s - invocation.timeline.received_s
            self._fail(invocation, self._late(invocation, waited_s))
            self._remove(invocation)
        elif limit_s is None or now_s < invocation.execution_deadline_s - EARLY_S:
            self._deadlines.set(invocation, deadlines.limit_s(invocation, now_s), now_s)
        elif invocation.batch_size > 1:
            # Any invocation of the batch may be the cause. Replace the worker, so that each invocation runs again
            # outside a batch. Until the other calls of the worker have ended, only its deadline limits this invocation.
            replica.replace(invocation)
            self._deadlines.set(invocation, invocation.deadline_s, now_s)
            self._look()
        else:
            self._fail(invocation, deadlines.execution_timeout(limit_s))
            self._remove(invocation)

    def _check_stuck(self, invocation: Invocation, replica: Replica, now_s: float) -> None:
        """Replace the worker if the handler call of an ended invocation is stuck. Otherwise check again when it may be
        stuck.

        A handler call may outlive its caller and the caller's deadline. It is stuck if it takes longer than the
        function allows plus `cancel_grace_s`. If other callers of its batch still wait, their limits apply first.
        """
        settings, started_s = self._policy.settings, replica.started_s(invocation)
        limit_s = settings.execution_timeout_s or max(settings.timeout_s, invocation.execution_s or 0.0)
        # The time of an open connection counts from its last message.
        began_s = now_s if started_s is None else max(started_s, invocation.active_s)
        stuck_s = began_s + limit_s + settings.cancel_grace_s
        if now_s < stuck_s - EARLY_S:
            self._deadlines.set(invocation, stuck_s, now_s)
        elif not replica.awaited(invocation):
            replica.replace(invocation)
            self._look()

    def restart_execution(self, invocations: list[Invocation]) -> None:
        """Restart the time limits for the rest of a batch, because each handler call has the whole limits."""
        for invocation in invocations:
            self._on_due(invocation)

    # -- from the workers

    def complete(
        self, replica: Replica, invocation: Invocation, outcome: Output | PilotflameError,
        timing: WorkerTiming, now_s: float, batch: BatchEnd | None,
    ) -> None:  # fmt: skip
        """End an invocation with its outcome, and learn from its duration and cost."""
        timeline = invocation.timeline
        timeline.mark_completed(now_s, timing)
        if replica.outstanding.batching:
            if timing[3]:
                self.queue.charge(invocation, timing[3])
        else:
            self.durations.note_call(replica, invocation, now_s)
        self._deadlines.cancel(invocation)
        self._end(invocation, outcome)
        if batch is not None:
            self.durations.note_batch(batch)

    def adopt(self, replica: Replica) -> None:
        """Load the curve that a new ready worker has measured, or the stored curve of its device, and dispatch."""
        self.limit_batch()
        self.durations.note_ready(replica)
        self.dispatch()

    def limit_batch(self) -> None:
        """Limit batches to the size that fits into the memory of every ready worker: any of them may get a batch."""
        limits = [replica.batch_limit for replica in self._replicas.ready if replica.batch_limit is not None]
        self.queue.configure(max_batch=max(1, min([self._policy.max_batch, *limits])))

    def recover(self, unstarted: list[Invocation], started: list[Invocation], cause: EndCause) -> None:
        """Queue the unstarted invocations of a dead worker again. Repeat or fail its started invocations."""
        repeated = [invocation for invocation in started if self._may_repeat(invocation, cause)]
        for invocation in [*repeated, *unstarted]:
            self.requeue(invocation)
        self.dispatch()

    def _may_repeat(self, invocation: Invocation, cause: EndCause) -> bool:
        """Return True if an invocation whose worker died of `cause` may run again. Otherwise fail it."""
        harmless = self._policy.settings.idempotent and invocation.stream is None
        # Any invocation of the batch may have killed the worker. So each is repeated alone, even if it is not
        # idempotent: after an error, batch handlers are called again with parts of the batch anyway.
        if invocation.batch_size > 1 or (harmless and invocation.attempt < MAX_ATTEMPTS):
            invocation.mark_repeated()
            return True
        self._fail(invocation, death(self._policy.settings, cause, invocation.attempt, harmless=harmless))
        return False
