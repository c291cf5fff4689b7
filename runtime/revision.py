"""A revision: one immutable version of a function, live. Owns its queue and the number of its replicas."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..errors import (
    ActivationFailed,
    ActivationTimeout,
    DeadlineExceeded,
    PilotlightError,
    RevisionRetired,
    WorkerDied,
)
from . import autoscaler
from .alarms import Alarms
from .batching.curve import Curve, Point
from .batching.queue import Lanes, Queue
from .given import Ended
from .invocation import Invocation
from .launcher import Launcher
from .logs import LogBook
from .pool import Pool
from .replica import Replica, State
from .spec import WorkerSpec
from .weights import Weights

# How often a start may fail in a row without a word from the worker before those who wait are told.
MAX_SILENT_FAILURES = 3
MAX_ATTEMPTS = 3
PROOF_TIMEOUT_S = 900.0
CANCEL_GRACE_S = 5.0
# What workers that have nothing left to answer get for their `teardown`, however late it is.
LAST_GRACE_S = 2.0
# For how long workers that nobody waits for (min, buffer) are not started after a failed start; doubles each time.
FIRST_REST_S = 0.5
MAX_REST_S = 300.0
# A full group is sent to a worker so long before it will need one: the way there, and what else the loop has to do.
AHEAD_S = 0.003
# What async handlers get to be interrupted in.
INTERRUPT_S = 1.0
SMOOTHING = 0.3


@dataclass(frozen=True, slots=True)
class Policy:
    """How a revision treats its invocations. Seconds, counts."""

    scale: autoscaler.Spec
    timeout_s: float = 600.0
    execution_timeout_s: float | None = None
    batch: int = 1
    """How many a worker runs together."""
    on_loop: bool = False
    """Whether the handler is async, so that it can be interrupted."""
    hold_s: float = 60.0
    max_queue: int = 1000
    max_body_bytes: int = 20 << 20
    idempotent: bool = False
    standby: bool = True
    keep_zygote: bool = True


@dataclass(frozen=True, slots=True)
class Census:
    """A count of what a revision holds, for status and metrics."""

    queued: int
    in_flight: int
    starting: int
    ready: int
    draining: int
    standby: bool
    zygote: bool
    busy_s: float = 0.0
    ready_s: float = 0.0

    @property
    def workers(self) -> int:
        return self.starting + self.ready + self.draining


class Revision:
    """Takes invocations, holds them while there is no worker, hands them out, and scales."""

    def __init__(
        self,
        spec: WorkerSpec,
        policy: Policy,
        launcher: Launcher,
        logs: LogBook,
        tasks: asyncio.TaskGroup,
        on_activation: Callable[[str], None] = lambda _outcome: None,
        weights: Weights | None = None,
        secrets: Callable[[], dict[str, str]] = dict,
        curve: Curve | None = None,
    ) -> None:
        """`curve` is how fast it was when it last ran; without one, the first worker measures it if it can."""
        self.spec = spec
        self.streaming = False
        self.aggregates = True
        """Whether all pieces of a streamed answer are a job's output too."""
        self.policy = policy
        self.pool = Pool(
            spec, launcher, logs, tasks, self,
            standby=policy.standby, keep_zygote=policy.keep_zygote, weights=weights, secrets=secrets,
        )  # fmt: skip
        self.pool.measuring = curve is None
        self.queue: Queue[Invocation] = Queue(
            spec.function, limit=policy.batch, most=policy.max_queue, curve=curve
        )
        self._loop = asyncio.get_running_loop()
        self._alarms = Alarms(self._loop, self._on_alarm)
        self._gather: asyncio.TimerHandle | None = None
        self._activation_s = 0.0
        self._calm = 0.0
        self._logs = logs
        self._wake: asyncio.TimerHandle | None = None
        self._wake_s = 0.0
        self._prewarm = 0
        self._silent_failures = 0
        self._failures = 0
        self._rest_until_s = 0.0
        self._proof: asyncio.Future[None] | None = None
        self._retiring = False
        self._over = False
        self._empty = asyncio.Event()
        self._on_activation = on_activation

    @property
    def id(self) -> str:
        return self.spec.revision

    @property
    def failures(self) -> int:
        """How many starts of workers have failed in a row."""
        return self._failures

    @property
    def retiring(self) -> bool:
        """Whether it ends what runs, and takes nothing new after that."""
        return self._retiring

    def configure(self, policy: Policy) -> None:
        """What is known of it once its handler was looked at."""
        self.policy = policy
        self.queue.limit, self.queue.most = policy.batch, policy.max_queue

    # -- invocations

    def submit(self, invocation: Invocation) -> None:
        """Takes an invocation: to a worker if one is free, else into the queue. QueueFull, Overloaded, RevisionRetired."""
        if self._over:
            raise self._retired()
        now_s = invocation.timeline.received_s
        replica = None
        if self.policy.batch == 1 and not len(self.queue):
            replica = self.pool.pick()
        if replica is None:
            now_s = time.monotonic()
            invocation.timeline.waits_cold = not self.pool.ready
            self.queue.admit(invocation, now_s, self.lanes(now_s))
        self._alarms.set(invocation, min(invocation.deadline_s, invocation.hold_until_s), now_s)
        if replica is None:
            self._pump()
        else:
            self._send(replica, [invocation], time.monotonic())
        self._look()

    def lanes(self, now_s: float) -> Lanes:
        """Where groups run, or will once the workers that start are ready."""
        ready = self.pool.ready
        # Of a handler that takes no batch each slot is a lane.
        count = sum(replica.given.slots for replica in ready)
        each = max(
            (replica.given.slots for replica in ready),
            default=max(1, self.policy.scale.concurrency // self.policy.batch),
        )
        count += each * self.pool.restoring
        if ready:
            curve = self.queue.curve
            return Lanes(count, min(replica.given.free_at(now_s, curve) for replica in ready))
        asked_s = min((replica.activation.asked_s for replica in self.pool.replicas), default=now_s)
        return Lanes(max(count, each), max(now_s, asked_s + self._activation_s))

    def cancel(self, invocation: Invocation) -> None:
        """The caller has gone: the invocation leaves the queue, or its worker is told."""
        invocation.abandon()
        self._drop(invocation)

    def _drop(self, invocation: Invocation) -> None:
        if not self.queue.drop(invocation) and (replica := self._replica_of(invocation)) is not None:
            # A plain handler cannot be interrupted: it may finish, but not outlive the deadline it was given.
            left_s = max(0.0, invocation.deadline_s - time.monotonic())
            replica.cancel(invocation, left_s + CANCEL_GRACE_S)
        self._scale()

    def _replica_of(self, invocation: Invocation) -> Replica | None:
        return next((one for one in self.pool.replicas if one.name == invocation.worker), None)

    def _on_alarm(self, invocation: Invocation) -> None:
        now_s = time.monotonic()
        if now_s >= invocation.deadline_s - 0.001:
            invocation.fail(
                DeadlineExceeded(
                    f"The invocation did not end within its deadline ({now_s - invocation.timeline.received_s:.1f} s).",
                    remedy="Raise timeout_s in pilotlight.toml, or ask for less.",
                )
            )
            self._drop(invocation)
        elif invocation.worker and now_s >= invocation.overrun_s - 0.001:
            self._on_overrun(invocation, now_s)
        elif not invocation.worker and not self.pool.ready:
            invocation.fail(
                ActivationTimeout(
                    f"No worker of {self.spec.function!r} was ready within the hold time"
                    f" ({now_s - invocation.timeline.received_s:.1f} s).",
                    remedy="Try again: the activation goes on. hold_s in pilotlight.toml, or the header"
                    " X-Scale-Up-Timeout (seconds), lets callers wait longer.",
                )
            )
            self._drop(invocation)
        else:  # held for load, not for an activation: only the deadline counts
            self._alarms.set(invocation, min(invocation.deadline_s, invocation.overrun_s), now_s)

    def _on_overrun(self, invocation: Invocation, now_s: float) -> None:
        """One call of the handler has taken longer than it may."""
        replica, limit_s = self._replica_of(invocation), self.policy.execution_timeout_s
        if replica is None or limit_s is None:
            return
        if not replica.runs(invocation):  # it stands behind the one that does not end
            self._time_execution(invocation, now_s, limit_s)
        elif invocation.companions:  # it may be one of them alone: all are run again, each by itself
            replica.replace(invocation)
        else:
            invocation.fail(
                DeadlineExceeded(
                    f"One call of the handler took longer than execution_timeout_s, which is {limit_s:g} s.",
                    remedy="Raise execution_timeout_s in pilotlight.toml, or do less in one call.",
                )
            )
            if self.policy.on_loop:
                replica.cancel(invocation, INTERRUPT_S)
            else:
                replica.replace(invocation)
        self._scale()

    def _pump(self) -> None:
        """Hands out what waits, as far as workers are free."""
        now_s = time.monotonic()
        while len(self.queue):
            replica, start_s = self.pool.pick(), now_s
            if replica is None:
                replica, start_s = self._nearly_free(now_s)
                if replica is None:
                    return
            found = self.queue.next(start_s)
            for invocation in found.refused:
                invocation.fail(self.queue.refusal(invocation, now_s, self.lanes(now_s)))
            if found.wait_until_s is not None:
                self._gather_at(found.wait_until_s, now_s)
                return
            if found.taken:
                self._send(replica, found.taken, now_s)

    def _nearly_free(self, now_s: float) -> tuple[Replica | None, float]:
        """The worker that will be free next, if that is so soon that a full group should be on its way, and when."""
        if self.policy.batch == 1 or len(self.queue) < self.queue.limit:
            return None, now_s
        soonest: Replica | None = None
        free_s = 0.0
        for replica in self.pool.ready:
            if replica.given.groups == replica.given.slots:
                when_s = replica.given.free_at(now_s, self.queue.curve)
                if soonest is None or when_s < free_s:
                    soonest, free_s = replica, when_s
        if soonest is not None and free_s - now_s > AHEAD_S:
            self._gather_at(free_s - AHEAD_S, now_s)
            return None, now_s
        return soonest, free_s

    def _gather_at(self, when_s: float, now_s: float) -> None:
        """Looks at the queue again then, if nothing happens before."""
        if self._gather is not None:
            self._gather.cancel()
        self._gather = self._loop.call_later(max(0.0, when_s - now_s), self._pump)

    def _send(self, replica: Replica, group: list[Invocation], now_s: float) -> None:
        limit_s = self.policy.execution_timeout_s
        for invocation in group:
            line = invocation.timeline
            if line.waits_cold and replica.activation.ready_s > line.received_s:
                line.activation = replica.activation
            if invocation.execution_s is not None:
                self._start_clock(invocation, now_s + invocation.execution_s)
            if limit_s is not None:
                self._time_execution(invocation, now_s, limit_s)
        replica.send(group, now_s)
        for invocation in group:
            if invocation.on_sent is not None:
                invocation.on_sent()

    def _time_execution(self, invocation: Invocation, now_s: float, limit_s: float) -> None:
        invocation.overrun_s = now_s + limit_s
        self._alarms.set(invocation, min(invocation.deadline_s, invocation.overrun_s), now_s)

    def _start_clock(self, invocation: Invocation, deadline_s: float) -> None:
        """From here on its deadline is that of its execution; or again that of its waiting."""
        invocation.deadline_s = deadline_s
        self._alarms.set(invocation, deadline_s, time.monotonic())

    # -- the number of workers

    def warm(self, workers: int) -> None:
        """Starts workers ahead of need, up to `workers`; they go as others do, once idle for long enough."""
        self._prewarm = workers
        self._scale()
        self._prewarm = 0

    def refresh(self) -> None:
        """Looks at the number of workers, as at start when a minimum is wanted."""
        self._scale()

    async def prove(self) -> None:
        """Starts one worker to see that it gets ready, and lets it go. Raises what kept it from that."""
        self._proof = self._loop.create_future()
        self.pool.start(1)
        try:
            async with asyncio.timeout(PROOF_TIMEOUT_S):
                await self._proof
        except TimeoutError:
            raise ActivationFailed(
                f"The first worker was not ready within {PROOF_TIMEOUT_S:.0f} s.",
                remedy="Make `setup` faster.",
            ) from None
        finally:
            self._proof = None
        self.pool.stop(max(0, len(self.pool.ready) - self.policy.scale.min))
        self.pool.replenish()

    def _settle_proof(self, error: PilotlightError | None) -> None:
        if self._proof is None or self._proof.done():
            return
        if error is None:
            self._proof.set_result(None)
        else:
            self._proof.set_exception(error)

    def census(self) -> Census:
        pool = self.pool
        busy_s, ready_s = pool.worked_s(time.monotonic())
        return Census(
            queued=len(self.queue),
            in_flight=pool.in_flight,
            starting=pool.restoring,
            ready=len(pool.ready),
            draining=sum(1 for replica in pool.replicas if replica.state is State.DRAINING),
            standby=pool.standby is not None and pool.standby_primed,
            zygote=pool.source is not None,
            busy_s=busy_s,
            ready_s=ready_s,
        )

    def _look(self, idle: Replica | None = None) -> None:
        """Looks at the number of workers if it could be another: more is to be done, or there is somebody idle."""
        if (
            len(self.queue)
            or self._retiring
            or self.pool.in_flight > self._calm
            or (idle and self._wake is None)
        ):
            self._scale()

    def _scale(self) -> None:
        now_s = time.monotonic()
        spec, stats = self._scale_spec(), self._stats()
        self._calm = autoscaler.calm(spec, stats)
        decision = autoscaler.decide(spec, stats, now_s)
        if decision.start:
            self.pool.start(decision.start)
        if decision.stop:
            self.pool.stop(decision.stop)
        wake_at_s = decision.wake_at_s
        if self._rest_until_s > now_s:
            wake_at_s = min(wake_at_s or self._rest_until_s, self._rest_until_s)
        if wake_at_s is not None:
            self._wake_at(wake_at_s, now_s)
        if self._retiring and not len(self.queue) and not self.pool.in_flight:
            self._empty.set()

    def _wake_at(self, when_s: float, now_s: float) -> None:
        """Looks again then. An earlier look that is already due is left alone: it costs less than moving it each time."""
        if self._wake is not None:
            if self._wake_s <= when_s:
                return
            self._wake.cancel()
        self._wake_s = when_s
        self._wake = self._loop.call_later(max(0.0, when_s - now_s), self._on_wake)

    def _on_wake(self) -> None:
        self._wake = None
        self._scale()

    def _scale_spec(self) -> autoscaler.Spec:
        spec = self.policy.scale
        # What a worker holds at a time is its to say: it learns how short its invocations are.
        windows = [replica.window * self.policy.batch for replica in self.pool.ready]
        if windows and (held := min(windows)) > spec.concurrency:
            spec = replace(spec, concurrency=held)
        if self._retiring:
            return replace(spec, min=0, buffer=0, idle_timeout_s=0.0)
        if self._rest_until_s > time.monotonic():  # workers that keep failing are not started for nobody
            return replace(spec, min=0, buffer=0)
        return spec

    def _stats(self) -> autoscaler.Stats:
        pool = self.pool
        return autoscaler.Stats(
            queued=len(self.queue),
            in_flight=pool.in_flight,
            starting=pool.restoring,
            ready=len(pool.ready),
            idle_since_s=tuple(replica.idle_since_s for replica in pool.idle()),
            prewarm=self._prewarm,
        )

    # -- the end

    async def retire(self, timeout_s: float) -> None:
        """Takes nothing new, answers what it has, and ends its processes; what is not done in time is failed."""
        started_s = time.monotonic()
        self._retiring = True
        self._scale()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        # From here on nobody would hand out what comes back from workers that end.
        self._over = True
        self._fail_waiting(self._retired())
        if self._wake is not None:
            self._wake.cancel()
        left_s = timeout_s - (time.monotonic() - started_s)
        await self.pool.close(max(left_s, min(timeout_s, LAST_GRACE_S)))

    def _fail_waiting(self, error: PilotlightError) -> None:
        for invocation in list(self.queue):
            self.queue.drop(invocation)
            invocation.fail(error)

    # -- what the pool says

    def on_ready(self, replica: Replica) -> None:
        self._silent_failures = self._failures = 0
        self._settle_proof(None)
        took_s = replica.activation.ready_s - replica.activation.asked_s
        self._activation_s += (SMOOTHING if self._activation_s else 1.0) * (took_s - self._activation_s)
        self._learn(replica.warmth)
        self._pump()
        self._scale()

    def _learn(self, warmth: dict[str, Any]) -> None:
        """What the worker measured before it was ready, if it did."""
        self.on_limit(int(warmth.get("limit", self.queue.limit)))
        if measured := warmth.get("curve"):
            self.queue.curve.recall(Point(*point) for point in measured)
            self.pool.measuring = False

    def on_capacity(self, replica: Replica) -> None:
        if len(self.queue):
            self._pump()
        self._look(None if replica.given.calls else replica)

    def on_ended(self, ended: Ended) -> None:
        if ended.seconds > 0:
            self.queue.ended(time.monotonic(), ended.size, ended.cost, ended.seconds)

    def on_cost(self, invocation: Invocation, cost: float) -> None:
        self.queue.charge(invocation, cost)

    def on_limit(self, limit: int) -> None:
        """So many fit into a worker's memory together."""
        self.queue.limit = max(1, min(self.queue.limit, limit))

    def on_change(self) -> None:
        self._scale()

    def on_returned(self, invocation: Invocation) -> None:
        self._put_back(invocation)
        self._pump()
        self._scale()

    def _put_back(self, invocation: Invocation) -> None:
        """It has waited longest of those with its time, so it is soon in front again."""
        if invocation.ended:
            return
        invocation.worker, invocation.overrun_s = "", math.inf
        if self._over:
            invocation.fail(self._retired())
            return
        if invocation.execution_s is not None:
            self._start_clock(invocation, invocation.hold_until_s)
        self.queue.put_back(invocation)

    def _retired(self) -> RevisionRetired:
        return RevisionRetired(f"Revision {self.id} was stopped before this invocation could run.")

    def on_start_failed(self, error: PilotlightError) -> None:
        """A worker said why it cannot start: so will the next, so those who wait for one are told."""
        self._note_failure()
        self._logs.write("gateway", f"activation failed: {error}")
        self._settle_proof(error)
        if not self.pool.ready:
            self._fail_waiting(error)
        self._scale()
        if not len(self.queue):
            self.pool.release()

    def on_worker_died(
        self, replica: Replica, unstarted: list[Invocation], started: list[Invocation], cause: str
    ) -> None:
        repeated = [invocation for invocation in started if self._may_repeat(invocation, cause)]
        for invocation in reversed([*repeated, *unstarted]):  # in their order
            self._put_back(invocation)
        if not replica.activation.ready_s and not replica.failure_told:
            self._count_silent_failure(cause)
        self._pump()
        self._scale()
        if not self.pool.replicas and not len(self.queue):
            self.pool.release()

    def _may_repeat(self, invocation: Invocation, cause: str) -> bool:
        """Whether what a dead worker had started is run once more; if not, its caller is told.

        What ran together with others is, alone: it may have been any one of them that the worker died of, and whoever
        takes batches is called again with fewer when one fails.
        """
        if invocation.companions and not invocation.ended:
            invocation.company, invocation.companions = 1, 0
            invocation.attempt += 1
            return True
        harmless = self.policy.idempotent and invocation.stream is None
        if harmless and invocation.attempt < MAX_ATTEMPTS:
            invocation.attempt += 1
            return True
        remedy = "See `pilotlight logs` for its last words."
        if not harmless:
            remedy += " If running it twice is harmless, set idempotent = true in pilotlight.toml: then it is repeated."
        invocation.fail(
            WorkerDied(
                f"The worker that ran this invocation died of {cause} (attempt {invocation.attempt}).",
                remedy=remedy,
            )
        )
        return False

    def _note_failure(self) -> None:
        self._on_activation("failed")
        self._failures += 1
        self._rest_until_s = time.monotonic() + min(MAX_REST_S, FIRST_REST_S * 2 ** min(self._failures, 16))

    def _count_silent_failure(self, cause: str) -> None:
        self._silent_failures += 1
        self._note_failure()
        error = ActivationFailed(
            f"A worker died while starting, of {cause}, as did {self._silent_failures - 1} in a row before it.",
            remedy="See `pilotlight logs` for their last words (out of memory?).",
        )
        self._settle_proof(error)
        if self._silent_failures >= MAX_SILENT_FAILURES and not self.pool.ready:
            self._silent_failures = 0
            self._fail_waiting(error)
