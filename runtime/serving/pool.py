"""Starts, picks and stops the replicas of one revision. The revision decides when and how many."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from ...errors import ActivationFailed, PilotflameError, SourceDenied
from ..launching.fetcher_client import FetcherClient, FetchProgress
from ..launching.launcher import Child, Launcher
from ..link.worker_spec import WEIGHTS_TIMEOUT_S, WorkerSpec
from ..telemetry.logs import Log
from ..telemetry.timeline import Activation
from .replica import START_TIMEOUT_S, Replica, ReplicaState, RevisionEvents
from .zygote_supervisor import ZygoteSupervisor

# An idle worker that is stopped is killed if it has not exited after this time.
STOP_TIMEOUT_S = 30.0


class Pool:
    """The workers of one revision, and their hold on the weights, which they share on this node."""

    def __init__(
        self, spec: WorkerSpec, launcher: Launcher, logs: Log, tasks: asyncio.TaskGroup,
        events: RevisionEvents, *, standby: bool, keep_zygote: bool, weights: FetcherClient,
        secrets: Callable[[], dict[str, str]], measure: bool,
    ) -> None:  # fmt: skip
        """If `measure`, new workers measure their latency curve, until one worker has measured it.

        `secrets` returns the environment variables that only workers get, by name.
        """
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
        """The number of workers that are not ready yet: they are being forked, or restore their weights."""
        return self._forking + sum(replica.state is ReplicaState.RESTORING for replica in self.replicas)

    @property
    def in_flight(self) -> int:
        count = 0
        # A loop, because this runs for every invocation: with a generator it takes twice as long.
        for replica in self.replicas:
            count += len(replica.outstanding.calls)
        return count

    def worked_s(self, now_s: float) -> tuple[float, float]:
        """Return two sums over all workers, dead ones included.

        The first is of their seconds with work, the second of their seconds from READY until now or their
        death.
        """
        busy_s, ready_s = self._past_busy_s, self._past_ready_s
        for replica in self.replicas:
            busy_s += replica.outstanding.total_busy_s(now_s)
            ready_s += now_s - replica.activation.ready_s if replica.activation.ready_s else 0.0
        return busy_s, ready_s

    def idle(self) -> list[Replica]:
        """Return the ready workers without work, the one that is idle for the longest time first."""
        idle = [replica for replica in self.ready if not replica.outstanding.calls]
        return sorted(idle, key=lambda replica: replica.idle_since_s)

    def pick(self) -> Replica | None:
        """Return the worker for the next invocation or batch; None if no worker has room.

        It is the least busy worker. Of equally busy ones it is the newest, so that older ones stay idle and
        can stop. If workers prefetch, it is the busiest one that has room: its process is awake, while
        another process would first have to be woken and to wait for the processor.
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
        """Start `count` workers. The standby becomes the first, and the others are forked."""
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
        """Return a child, once its weights are held on this node. Forking and fetching run at the same time.

        `standby` is the child, if there is one; otherwise a child is forked.
        """
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
        # `setup` may have to wait for weights that are still being fetched.
        timeout_s = START_TIMEOUT_S + (WEIGHTS_TIMEOUT_S if self._weights is not None else 0.0)
        env = self._secrets()
        self.replicas.append(Replica(child, activation, self._events, env, timeout_s, measure=self._measure))

    def note_ready(self, replica: Replica) -> None:
        """Learn that a worker is ready. If it measured its latency curve, later workers do not measure."""
        self.zygote.reset_delay()
        self._measure = self._measure and not replica.measured

    # -- weights: one hold on the snapshot, for all workers of the pool

    async def _hold(self, weights: FetcherClient) -> FetchProgress:
        """Return the hold. It is made again if there is none, or if its fetch failed."""
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
        """Return `error`, or a better one if `error` only says that a worker's weights are missing.

        The better one has the message of the fetcher, which knows why they are missing.
        """
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
        """Drain `count` idle workers, those that are idle for the longest time."""
        for replica in self.idle()[:count]:
            replica.drain(STOP_TIMEOUT_S)

    def remove(self, replica: Replica) -> None:
        """Remove a dead worker from the replicas, and add its seconds to the sums."""
        self.replicas.remove(replica)
        self._last = None
        self._past_busy_s += replica.outstanding.busy_s
        if replica.activation.ready_s:
            self._past_ready_s += time.monotonic() - replica.activation.ready_s
        # Without workers, forking a standby disturbs no invocation, and the next activation may come soon.
        if not self.replicas:
            self.zygote.replenish()

    def release(self) -> None:
        """If there is no worker, release the weights, and end the zygote unless it is to be kept."""
        if not self.replicas and not self.starting:
            self._release_weights()
            self.zygote.release()

    async def close(self, timeout_s: float) -> None:
        """Drain all workers, kill those that do not exit within `timeout_s`, and end the zygote."""
        self.zygote.close()
        children = [replica.child for replica in self.replicas]
        for replica in list(self.replicas):
            replica.drain(timeout_s)
        for child in children:
            await child.gone.wait()
        self._release_weights()
        await self.zygote.wait_closed()


def _preferred(replica: Replica, other: Replica) -> bool:
    """Return True if `pick` prefers `replica` to an older one that also has room."""
    return replica.load > other.load if replica.prefetches else replica.load <= other.load
