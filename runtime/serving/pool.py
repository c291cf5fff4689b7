"""The pool starts, picks and stops one revision's replicas; the revision decides when and how many."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from ...errors import ActivationFailed, PilotflameError, SourceDenied
from ..launching.fetcher_client import FetcherClient, FetchProgress
from ..launching.launcher import Child, Launcher
from ..link.worker_spec import WEIGHTS_TIMEOUT_S, WorkerSpec
from ..telemetry.logs import LogBook
from ..telemetry.timeline import Activation
from .replica import START_TIMEOUT_S, Replica, ReplicaState, RevisionEvents
from .zygote_supervisor import ZygoteSupervisor

STOP_TIMEOUT_S = 30.0


class Pool:
    """The workers of one revision, and the weights that they share on this node."""

    def __init__(
        self, spec: WorkerSpec, launcher: Launcher, logs: LogBook, tasks: asyncio.TaskGroup,
        events: RevisionEvents, *, standby: bool, keep_zygote: bool, weights: FetcherClient,
        secrets: Callable[[], dict[str, str]], measure: bool,
    ) -> None:  # fmt: skip
        """If `measure`, workers measure their latency curve until one has done so."""
        self.replicas: list[Replica] = []
        self.activations = 0
        self.zygote = ZygoteSupervisor(
            spec, launcher, logs, tasks, lambda: self.in_flight > 0, with_standby=standby, keep=keep_zygote
        )
        self._spec, self._tasks, self._events, self._secrets = spec, tasks, events, secrets
        self._measure = measure
        self._forking = 0
        self._last: Replica | None = None
        self._past_busy_s = self._past_ready_s = 0.0
        self._weights = weights if spec.source else None
        self._fetching: FetchProgress | None = None
        self._holding = asyncio.Lock()

    # -- state

    @property
    def ready(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.state is ReplicaState.READY]

    @property
    def starting(self) -> int:
        """How many workers are being forked or restore their weights."""
        return self._forking + sum(replica.state is ReplicaState.RESTORING for replica in self.replicas)

    @property
    def in_flight(self) -> int:
        count = 0
        # A loop: this runs with every invocation, and a generator would cost as much again.
        for replica in self.replicas:
            count += len(replica.outstanding.calls)
        return count

    def worked_s(self, now_s: float) -> tuple[float, float]:
        """Return for how long workers had work, and for how long they were ready; of all workers so far."""
        busy_s, ready_s = self._past_busy_s, self._past_ready_s
        for replica in self.replicas:
            busy_s += replica.outstanding.total_busy_s(now_s)
            ready_s += now_s - replica.activation.ready_s if replica.activation.ready_s else 0.0
        return busy_s, ready_s

    def idle(self) -> list[Replica]:
        """Return ready workers without work, the longest idle first."""
        idle = [replica for replica in self.ready if not replica.outstanding.calls]
        return sorted(idle, key=lambda replica: replica.idle_since_s)

    def pick(self) -> Replica | None:
        """Return the worker for the next invocation: the least busy; of idle ones the newest, so others stop.

        Of workers that prefetch it is the busiest with room: it is awake, while another process would have to
        be woken and to wait for the processor.
        """
        if self._last is not None and self._last.can_prefetch:
            return self._last
        best: Replica | None = None
        for replica in self.replicas:
            if replica.credit > 0 and (best is None or _preferred(replica, best)):
                best = replica
        self._last = best
        return best

    # -- starting

    def start(self, count: int) -> None:
        """Start workers: the standby at once, others as soon as they are forked."""
        for _ in range(count):
            activation = Activation(time.monotonic())
            self.activations += 1
            standby = self.zygote.take_standby()
            if standby is not None and self._weights is None:
                self._activate(standby, activation)
            else:
                self._forking += 1
                self._tasks.create_task(self._start(activation, standby))

    async def _start(self, activation: Activation, standby: Child | None) -> None:
        child: Child | None = None
        try:
            child = await self._fork_and_fetch(activation, standby)
            self.zygote.check_open()
        except PilotflameError as error:
            if child is not None:
                child.link.close()
            self._forking -= 1
            self._events.on_start_failed(error)
            return
        self._forking -= 1
        self._activate(child, activation)

    async def _fork_and_fetch(self, activation: Activation, standby: Child | None) -> Child:
        """Return a child once its weights are held on this node; both are prepared at the same time."""
        if self._weights is None:
            return await self._child(standby)
        fork: asyncio.Task[Child] | None = None
        try:
            async with asyncio.TaskGroup() as both:
                fork = both.create_task(self._child(standby))
                activation.mark_fetching((await self._hold(self._weights)).fetch)
        except BaseException as failed:
            forked = fork is not None and fork.done() and not fork.cancelled() and fork.exception() is None
            if (child := fork.result() if fork is not None and forked else standby) is not None:
                child.link.close()
            if isinstance(failed, ExceptionGroup):
                raise failed.exceptions[0] from None
            raise
        return fork.result()

    async def _child(self, standby: Child | None) -> Child:
        return standby or await self.zygote.fork()

    def _activate(self, child: Child, activation: Activation) -> None:
        activation.mark_forked(time.monotonic())
        # While weights are fetched, `setup` may wait for them.
        timeout_s = START_TIMEOUT_S + (WEIGHTS_TIMEOUT_S if self._weights is not None else 0.0)
        self.replicas.append(
            Replica(child, activation, self._events, self._secrets(), timeout_s, measure=self._measure)
        )

    def note_ready(self, replica: Replica) -> None:
        """A worker is ready; the next ones need not measure if it did."""
        self.zygote.reset_delay()
        self._measure = self._measure and not replica.measured

    # -- weights: all workers of the pool share one hold

    async def _hold(self, weights: FetcherClient) -> FetchProgress:
        async with self._holding:
            if self._fetching is not None and self._fetching.error is not None:
                self._release_weights()
            if self._fetching is None:
                self._fetching = await weights.hold(self._spec)
            return self._fetching

    def _release_weights(self) -> None:
        fetching, self._fetching = self._fetching, None
        if fetching is not None and self._weights is not None:
            self._weights.release(fetching)

    def explain(self, error: PilotflameError) -> PilotflameError:
        """Return the fetcher's error in place of a worker's that says only that its weights are missing."""
        cause = self._fetching.error if self._fetching is not None else None
        if cause is None or error.details.get("cause") != SourceDenied.code:
            return error
        return ActivationFailed(
            f"The weights are not whole: {cause.message}",
            remedy=cause.remedy,
            details={**cause.details, "cause": cause.code},
        )

    # -- stopping

    def stop(self, count: int) -> None:
        """Drain the workers that were idle longest."""
        for replica in self.idle()[:count]:
            replica.drain(STOP_TIMEOUT_S)

    def remove(self, replica: Replica) -> None:
        """Forget a worker that is dead."""
        self.replicas.remove(replica)
        self._last = None
        self._past_busy_s += replica.outstanding.busy_s
        if replica.activation.ready_s:
            self._past_ready_s += time.monotonic() - replica.activation.ready_s
        # At zero the fork disturbs no invocation, and the next activation may be near.
        if not self.replicas:
            self.zygote.replenish()

    def release(self) -> None:
        """At zero: release the weights, which no worker maps; and the zygote, unless it is kept."""
        if not self.replicas and not self.starting:
            self._release_weights()
            self.zygote.release()

    async def close(self, timeout_s: float) -> None:
        """Drain all workers, kill those that do not end in time, and end the zygote."""
        self.zygote.close()
        children = [replica.child for replica in self.replicas]
        for replica in list(self.replicas):
            replica.drain(timeout_s)
        for child in children:
            await child.gone.wait()
        self._release_weights()
        await self.zygote.wait_closed()


def _preferred(replica: Replica, other: Replica) -> bool:
    return replica.load > other.load if replica.prefetches else replica.load <= other.load
