"""A revision: one immutable version of a function, live. Owns its queue and the number of its replicas."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ...errors import ActivationFailed, Overloaded, PilotflameError
from ..launching.fetcher_client import FetcherClient
from ..launching.launcher import Launcher
from ..link.worker_spec import WorkerSpec
from ..scaling import autoscaler
from ..telemetry.logs import LogBook
from .dispatcher import Dispatcher
from .invocation import Invocation
from .latency_curve_store import LatencyCurveStore
from .policy import Policy
from .pool import Pool
from .replica import Replica, ReplicaState

# How often a start may fail in a row without a word from the worker before those who wait are told.
MAX_SILENT_FAILURES = 3
PROOF_TIMEOUT_S = 900.0
# What workers that have nothing left to answer get for their `teardown`, however late it is.
LAST_GRACE_S = 2.0
# For how long workers that nobody waits for (min, buffer) are not started after a failed start; doubles each time.
FIRST_REST_S = 0.5
MAX_REST_S = 300.0


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
        weights: FetcherClient | None = None,
        secrets: Callable[[], dict[str, str]] = dict,
        curves: LatencyCurveStore | None = None,
    ) -> None:
        self.spec = spec
        self.streaming = False
        self.aggregates = True
        """Whether all pieces of a streamed answer are a job's output too."""
        self.pool = Pool(
            spec, launcher, logs, tasks, self,
            standby=policy.standby, keep_zygote=policy.keep_zygote, weights=weights, secrets=secrets,
        )  # fmt: skip
        self._curves = curves or LatencyCurveStore()
        self.line = Dispatcher(spec, policy, self.pool, self._curves, self._scale)
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
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

    @property
    def policy(self) -> Policy:
        return self.line.policy

    # -- invocations

    def submit(self, invocation: Invocation) -> None:
        """Takes an invocation: to a worker if one is free, else into the queue. QueueFull, Overloaded, RevisionRetired."""
        try:
            if self.line.submit(invocation) and self.pool.in_flight <= self._calm and not self._retiring:
                return
        except Overloaded:
            if (
                not self.pool.ready
            ):  # who cannot wait for an activation, and is told to come again, is a reason for one
                self.warm(1)
            raise
        self._scale()

    def cancel(self, invocation: Invocation) -> None:
        """The caller has gone: the invocation leaves the queue, or its worker is told."""
        self.line.cancel(invocation)

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

    def _settle_proof(self, error: PilotflameError | None) -> None:
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
            queued=len(self.line),
            in_flight=pool.in_flight,
            starting=pool.restoring,
            ready=len(pool.ready),
            draining=sum(1 for replica in pool.replicas if replica.state is ReplicaState.DRAINING),
            standby=pool.standby is not None and pool.standby_primed,
            zygote=pool.source is not None,
            busy_s=busy_s,
            ready_s=ready_s,
        )

    def _look(self, replica: Replica) -> None:
        """Looks at the number of workers if it could be another: somebody waits, or is idle and nobody looks later."""
        if len(self.line) or self._retiring or (not replica.given.calls and self._wake is None):
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
        if self._retiring and not len(self.line) and not self.pool.in_flight:
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

    def _scale_spec(self) -> autoscaler.ScaleSpec:
        spec = self.policy.scale
        # What a worker holds at a time is its to say: it learns how short its invocations are.
        windows = [replica.window for replica in self.pool.ready if replica.hurried]
        if (
            windows
        ):  # what it holds in advance is done in no time: all of that is no sign that one more is needed
            spec = replace(spec, concurrency=math.ceil(min(windows) / autoscaler.NEAR_LIMIT))
        elif (slots := self._slots()) > spec.concurrency:  # its handler asked for more company
            spec = replace(spec, concurrency=slots)
        if self._retiring:
            return replace(spec, min=0, buffer=0, idle_timeout_s=0.0)
        if self._rest_until_s > time.monotonic():  # workers that keep failing are not started for nobody
            return replace(spec, min=0, buffer=0)
        return spec

    def _slots(self) -> int:
        """How many singles each worker runs at a time at least; 0 for batch handlers."""
        return min(
            (replica.given.slots for replica in self.pool.ready if not replica.given.batching), default=0
        )

    def _stats(self) -> autoscaler.Stats:
        pool = self.pool
        return autoscaler.Stats(
            queued=len(self.line),
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
        self.line.close()
        if self._wake is not None:
            self._wake.cancel()
        left_s = timeout_s - (time.monotonic() - started_s)
        await self.pool.close(max(left_s, min(timeout_s, LAST_GRACE_S)))

    # -- what the pool says

    def on_ready(self, replica: Replica) -> None:
        self._silent_failures = self._failures = 0
        self._settle_proof(None)
        self.line.on_ready(replica)
        self._scale()

    def on_capacity(self, replica: Replica) -> None:
        if len(self.line):
            self.line.pump()
        elif replica.given.calls and not self._retiring:
            return  # no fewer workers are wanted while each of them has something to do, and no more
        self._look(replica)

    def on_change(self) -> None:
        self._scale()

    def on_returned(self, invocation: Invocation) -> None:
        self.line.put_back(invocation)
        self.line.pump()
        self._scale()

    def on_start_failed(self, error: PilotflameError) -> None:
        """A worker said why it cannot start: so will the next, so those who wait for one are told."""
        self._note_failure()
        self._logs.write("gateway", f"activation failed: {error}")
        self._settle_proof(error)
        if not self.pool.ready:
            self.line.fail_waiting(error)
        self._scale()
        if not len(self.line):
            self.pool.release()

    def on_worker_died(
        self, replica: Replica, unstarted: list[Invocation], started: list[Invocation], cause: str
    ) -> None:
        self.line.on_worker_died(unstarted, started, cause)
        if not replica.activation.ready_s and not replica.failure_told:
            self._count_silent_failure(cause)
        self._scale()
        if not self.pool.replicas and not len(self.line):
            self.pool.release()
            self._tasks.create_task(self._remember())

    async def _remember(self) -> None:
        """At zero: how fast it was, for when it starts again."""
        traits, points = self.line.traits, self.line.queue.curve.points
        if points and self._curves.news(traits, points):
            await asyncio.to_thread(self._curves.write, traits, points)

    def _note_failure(self) -> None:
        self._on_activation("failed")
        self._failures += 1
        self._rest_until_s = time.monotonic() + min(MAX_REST_S, FIRST_REST_S * 2 ** min(self._failures, 16))

    def _count_silent_failure(self, cause: str) -> None:
        self._silent_failures += 1
        self._note_failure()
        error = ActivationFailed(
            f"A worker died while starting, of {cause}, as did {self._silent_failures - 1} in a row before it.",
            remedy="See `pilotflame logs` for their last words (out of memory?).",
        )
        self._settle_proof(error)
        if self._silent_failures >= MAX_SILENT_FAILURES and not self.pool.ready:
            self._silent_failures = 0
            self.line.fail_waiting(error)
