"""Queues the invocations of one revision, sends them to workers, and ends them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from ....errors import CallEnded, FunctionStopped, PilotflameError, RevisionRetired
from ...ground.access.fair_share import SharedRoom
from ...ground.settings.function_settings import FunctionSettings
from ...ground.settings.scale_spec import ScaleSpec
from ...ground.telemetry.invocation_end import InvocationEnd
from ...ground.telemetry.timeline import WorkerTiming
from ..batching.assignment import LATE_S, assign
from ..batching.outstanding import BatchEnd
from ..batching.queue import Queue
from ..link.child import EndCause
from ..link.worker_spec import WorkerSpec
from .call_ends import CallEnd, death, retired
from .durations import Durations
from .invocation import Invocation, Output
from .late_workers import LateWorkers
from .latency_curve_store import LatencyCurveStore
from .replica import Replica
from .replicas import Replicas
from .time_limits import TimeLimits, limit_s

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

    @property
    def slots(self) -> int:
        """The number of invocations, or batches, that a starting worker will run at a time."""
        return max(1, self.scale.concurrency // self.max_batch)


class Dispatcher:
    """Sends the invocations of one revision to its workers, and ends each of them."""

    def __init__(
        self, spec: WorkerSpec, policy: Policy, replicas: Replicas, curves: LatencyCurveStore,
        look: Callable[[], None], on_ended: Callable[[InvocationEnd], None], room: SharedRoom,
    ) -> None:  # fmt: skip
        """The dispatcher calls `look` when another number of workers may be needed: after a cancellation or a time limit, and
        when invocations wait and a worker is late.

        It calls `on_ended` once for each invocation that has ended with an output or an error, unless the invocation got the
        output of an equal call, or its job will run again without counting this attempt.
        """
        settings = policy.settings
        self.queue: Queue[Invocation] = Queue(
            spec.function, max_batch=policy.max_batch, max_queue=settings.max_queue, room=room
        )
        self._spec, self._policy, self._replicas = spec, policy, replicas
        self._look, self._on_ended = look, on_ended
        self.durations = Durations(self.queue, replicas, curves, policy.slots)
        self.aside: dict[Invocation, Invocation] = {}
        """Accepted invocations outside the queue, each with the invocation for whose output it waits."""
        self.limits = TimeLimits(spec.function, settings, replicas, self.aside, self.cancel, look)
        self._deadlines = self.limits.deadlines
        self._loop = asyncio.get_running_loop()
        self._batch_timer: asyncio.TimerHandle | None = None
        self.late = LateWorkers(self._loop, replicas, self.queue, self.durations, look)
        # Set by `close`: returns the error of the invocations that no worker will run.
        self._closed: Callable[[], PilotflameError] | None = None
        self._refusal: Refusal | None = None
        self._fails_queued = True

    def configure(self, policy: Policy) -> None:
        self._policy, settings = policy, policy.settings
        self.limits.settings, self.durations.at_once = settings, policy.slots
        self.queue.configure(max_queue=settings.max_queue)
        self.limit_batch()

    def bar(self, refusal: Refusal | None, *, queued: bool = True) -> None:
        """Refuse invocations for which no worker is free, while `refusal` returns an error. They fail with this error.

        If `refusal` is None, accept invocations again. Unless `queued` is False, invocations that already wait fail with the error.
        """
        self._refusal, self._fails_queued = refusal, queued
        if queued and refusal is not None and (error := refusal()) is not None:
            self.fail_queued(error)

    def close(self, end: CallEnd | None = None) -> None:
        """Stop sending. Fail the waiting invocations, and later the invocations that exiting workers give back.

        They fail with an error of `end`, or with RevisionRetired.
        """
        self._closed = partial(retired, self._spec) if end is None else partial(end, True)
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
            raise retired(self._spec)
        now_s = time.monotonic()
        if (
            self._policy.max_batch == 1
            and not len(self.queue)
            and (replica := self._replicas.pick(now_s, self.durations.each_s)) is not None
        ):
            self._deadlines.set(invocation, invocation.deadline_s, now_s)
            self._send(replica, [invocation], now_s)
            return True
        if self._refusal is not None and (error := self._refusal()) is not None:
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
        refusal = self._closed or (self._refusal if self._fails_queued else None)
        if refusal is not None and (error := refusal()) is not None:
            self._end(invocation, error)
            return
        now_s = time.monotonic()
        self._deadlines.set(invocation, limit_s(invocation, now_s), now_s)
        self.queue.requeue(invocation)

    # -- invocations that wait for the output of another one

    def set_aside(self, invocation: Invocation, first: Invocation) -> None:
        """Let an invocation wait for the output of `first`, with the time limits of a queued invocation."""
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
        """Send waiting invocations to workers that take more invocations."""
        now_s = time.monotonic()
        pick = partial(self._replicas.pick, now_s, self.durations.each_s)
        for replica, selection in assign(self.queue, pick, self._replicas.ready, now_s):
            for invocation in selection.refused:
                self._end(invocation, self.queue.refusal(invocation, now_s, self.durations.slots(now_s)))
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
        most_s = self._policy.settings.execution_timeout_s
        # Once the worker has ended an invocation, the others have waited for that one, and not only for the worker's start.
        activation = None if replica.completed else replica.activation
        for invocation in batch:
            invocation.mark_sent(replica.name, len(batch), now_s, activation)
            if most_s is not None:
                invocation.limit_execution(now_s, most_s)
            if most_s is not None or invocation.patient:
                self._deadlines.set(invocation, limit_s(invocation, now_s), now_s)
        replica.calls.send(batch, now_s)
        # This runs for every invocation, so call `watch` only if its timer would fire too late. A worker that has just got
        # an invocation is not late before LATE_S have passed.
        if self.late.due_s > now_s + LATE_S and replica.outstanding.load > replica.outstanding.slots:
            self.late.watch(now_s)
        for invocation in batch:
            if invocation.on_sent is not None:
                invocation.on_sent()

    def cancel(self, invocation: Invocation, error: PilotflameError | None = None) -> None:
        """Remove an invocation from the queue, or cancel it at its worker, where it may still run for a while.

        The invocation fails with `error`. If that is None, its caller has disconnected, and `on_ended` is not called.
        """
        self.aside.pop(invocation, None)
        if error is not None:
            self._end(invocation, error)
        else:
            self._deadlines.cancel(invocation)
            invocation.end(None)
        queued = self.queue.remove(invocation)
        replica = None if queued else self._replicas.named(invocation.worker)
        if replica is not None and replica.calls.cancel(invocation):
            self.limits.check_stuck(invocation, replica, time.monotonic())
        self._look()

    def fail_queued(self, error: PilotflameError) -> None:
        """Fail all waiting invocations with `error`, because no worker will run them."""
        for invocation in [*self.queue, *self.aside]:
            self.queue.remove(invocation)
            self.aside.pop(invocation, None)
            self._end(invocation, error)

    def end_started(self, replica: Replica, end: CallEnd) -> int:
        """Fail the invocations that a worker has begun, because the gateway ends the worker. Return their number."""
        calls = [replica.outstanding.calls[channel] for channel in replica.outstanding.running()]
        waited_for = [invocation for invocation in calls if not invocation.ended]
        for invocation in waited_for:
            self._end(invocation, end(self._policy.settings.idempotent))
            replica.calls.cancel(invocation)
        return len(waited_for)

    def _end(self, invocation: Invocation, outcome: Output | PilotflameError) -> None:
        """End an invocation, unless it has ended before. All outputs and errors of invocations pass through here."""
        self._deadlines.cancel(invocation)
        if invocation.ended:
            return
        output, error = (outcome, None) if isinstance(outcome, Output) else (None, outcome)
        if not invocation.timeline.completed_s:
            invocation.timeline.mark_responded(time.monotonic())
        invocation.end(outcome)
        repeatable = isinstance(error, CallEnded) and error.repeatable
        if invocation.patient and (repeatable or isinstance(error, (RevisionRetired, FunctionStopped))):
            # Report no end: the job of the invocation goes back to the queue of jobs, and this attempt does not count.
            return
        end = InvocationEnd(
            self._spec.function, self._spec.revision, invocation.id, invocation.source, invocation.timeline, error,
            invocation.worker, invocation.trace, invocation, output,
        )  # fmt: skip
        self._on_ended(end)

    # -- from the workers

    def complete(
        self, replica: Replica, invocation: Invocation, outcome: Output | PilotflameError,
        timing: WorkerTiming, now_s: float, batch: BatchEnd | None,
    ) -> None:  # fmt: skip
        """End an invocation with its outcome, and learn from its duration and cost."""
        invocation.timeline.mark_completed(now_s, timing)
        if replica.outstanding.batching:
            if timing[3]:
                self.queue.charge(invocation, timing[3])
        else:
            self.durations.note_call(replica, invocation, now_s)
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
        self.queue.forecast.max_batch = max(1, min([self._policy.max_batch, *limits]))

    def recover(self, unstarted: list[Invocation], started: list[Invocation], cause: EndCause) -> None:
        """Queue the unstarted invocations of a dead worker again. Repeat or fail its started invocations."""
        repeated = [invocation for invocation in started if self._may_repeat(invocation, cause)]
        for invocation in [*repeated, *unstarted]:
            self.requeue(invocation)
        self.dispatch()

    def _may_repeat(self, invocation: Invocation, cause: EndCause) -> bool:
        """Return True if an invocation whose worker died of `cause` may run again. Otherwise fail it."""
        if invocation.answered:
            self._end(invocation, Output(b"", ""))
            return False
        harmless = self._policy.settings.idempotent and invocation.stream is None
        # Any invocation of the batch may have killed the worker. So each is repeated alone, even if it is not
        # idempotent: after an error, batch handlers are called again with parts of the batch anyway.
        if invocation.batch_size > 1 or (harmless and invocation.attempt < MAX_ATTEMPTS):
            invocation.mark_repeated()
            return True
        self._end(invocation, death(self._policy.settings, cause, invocation, harmless=harmless))
        return False
