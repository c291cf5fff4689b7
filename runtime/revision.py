"""A revision: one immutable version of a function, live. Owns its queue and the number of its replicas."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..errors import (
    ActivationFailed,
    ActivationTimeout,
    DeadlineExceeded,
    PilotlightError,
    QueueFull,
    RevisionRetired,
    WorkerDied,
)
from . import autoscaler
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


@dataclass(frozen=True, slots=True)
class Policy:
    """How a revision treats its invocations. Seconds, counts."""

    scale: autoscaler.Spec
    timeout_s: float = 600.0
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
    """For how long workers had something to do, all together, and for how long they were ready to."""
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
    ) -> None:
        self.spec = spec
        self.streaming = False
        self.aggregates = True
        """Whether all pieces of a streamed answer are a job's output too."""
        self.policy = policy
        self.pool = Pool(
            spec, launcher, logs, tasks, self,
            standby=policy.standby, keep_zygote=policy.keep_zygote, weights=weights, secrets=secrets,
        )  # fmt: skip
        self._queue: deque[Invocation] = deque()
        self._loop = asyncio.get_running_loop()
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

    # -- invocations

    def submit(self, invocation: Invocation) -> None:
        """Takes an invocation: to a worker if one is free, else into the queue. Raises QueueFull, RevisionRetired."""
        if self._over:
            raise self._retired()
        if len(self._queue) >= self.policy.max_queue:
            raise QueueFull(
                f"Function {self.spec.function!r} has {len(self._queue)} invocations waiting, its limit.",
                remedy="Try again later, or raise max_queue or scale.max in pilotlight.toml.",
            )
        invocation.timeline.waits_cold = not self.pool.ready
        self._queue.append(invocation)
        left_s = min(invocation.deadline_s, invocation.hold_until_s) - time.monotonic()
        invocation.timer = self._loop.call_later(max(0.0, left_s), self._on_timer, invocation)
        self._pump()

    def cancel(self, invocation: Invocation) -> None:
        """The caller has gone: the invocation leaves the queue, or its worker is told."""
        invocation.abandon()
        self._drop(invocation)

    def _drop(self, invocation: Invocation) -> None:
        try:
            self._queue.remove(invocation)
        except ValueError:
            for replica in self.pool.replicas:
                if replica.name == invocation.worker:
                    # A plain handler cannot be interrupted: it may finish, but not outlive the deadline it was given.
                    left_s = max(0.0, invocation.deadline_s - time.monotonic())
                    replica.cancel(invocation, left_s + CANCEL_GRACE_S)
        self._scale()

    def _on_timer(self, invocation: Invocation) -> None:
        now_s = time.monotonic()
        if now_s >= invocation.deadline_s - 0.001:
            invocation.fail(
                DeadlineExceeded(
                    f"The invocation did not end within its deadline ({now_s - invocation.timeline.received_s:.1f} s).",
                    remedy="Raise timeout_s in pilotlight.toml, or ask for less.",
                )
            )
            self._drop(invocation)
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
            left_s = max(0.0, invocation.deadline_s - now_s)
            invocation.timer = self._loop.call_later(left_s, self._on_timer, invocation)

    def _pump(self) -> None:
        """Hands out what waits, as far as workers are free, then looks at the number of workers."""
        while self._queue and (replica := self.pool.pick()) is not None:
            invocation = self._queue.popleft()
            if invocation.ended:
                continue
            line = invocation.timeline
            if line.waits_cold and replica.activation.ready_s > line.received_s:
                line.activation = replica.activation
            now_s = time.monotonic()
            if invocation.execution_s is not None:
                self._start_clock(invocation, now_s + invocation.execution_s)
            replica.send(invocation, now_s)
            if invocation.on_sent is not None:
                invocation.on_sent()
        self._scale()

    def _start_clock(self, invocation: Invocation, deadline_s: float) -> None:
        """From here on its deadline is that of its execution; or again that of its waiting."""
        invocation.deadline_s = deadline_s
        if invocation.timer is not None:
            invocation.timer.cancel()
        left_s = max(0.0, invocation.deadline_s - time.monotonic())
        invocation.timer = self._loop.call_later(left_s, self._on_timer, invocation)

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
        return Census(
            queued=len(self._queue),
            in_flight=pool.in_flight,
            starting=pool.restoring,
            ready=len(pool.ready),
            draining=sum(1 for replica in pool.replicas if replica.state is State.DRAINING),
            standby=pool.standby is not None and pool.standby_primed,
            zygote=pool.source is not None,
        )

    def _scale(self) -> None:
        now_s = time.monotonic()
        decision = autoscaler.decide(self._scale_spec(), self._stats(), now_s)
        if decision.start:
            self.pool.start(decision.start)
        if decision.stop:
            self.pool.stop(decision.stop)
        wake_at_s = decision.wake_at_s
        if self._rest_until_s > now_s:
            wake_at_s = min(wake_at_s or self._rest_until_s, self._rest_until_s)
        if wake_at_s is not None:
            self._wake_at(wake_at_s, now_s)
        if self._retiring and not self._queue and not self.pool.in_flight:
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
        if self._retiring:
            return replace(spec, min=0, buffer=0, idle_timeout_s=0.0)
        if self._rest_until_s > time.monotonic():  # workers that keep failing are not started for nobody
            return replace(spec, min=0, buffer=0)
        return spec

    def _stats(self) -> autoscaler.Stats:
        pool = self.pool
        return autoscaler.Stats(
            queued=len(self._queue),
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
        waiting, self._queue = self._queue, deque()
        for invocation in waiting:
            invocation.fail(error)

    # -- what the pool says

    def on_capacity(self) -> None:
        if self.pool.ready:
            self._silent_failures = self._failures = 0
            self._settle_proof(None)
        self._pump()

    def on_change(self) -> None:
        self._scale()

    def on_returned(self, invocation: Invocation) -> None:
        self._put_back(invocation)
        self._pump()

    def _put_back(self, invocation: Invocation) -> None:
        """In front: it has waited longest."""
        if invocation.ended:
            return
        invocation.worker = ""
        if self._over:
            invocation.fail(self._retired())
            return
        if invocation.execution_s is not None:
            self._start_clock(invocation, invocation.hold_until_s)
        self._queue.appendleft(invocation)

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
        if not self._queue:
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
        if not self.pool.replicas and not self._queue:
            self.pool.release()

    def _may_repeat(self, invocation: Invocation, cause: str) -> bool:
        """Whether what a dead worker had started is run once more; if not, its caller is told."""
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
