"""The pool: one revision's zygote, standby and replicas. Starts, picks and stops them; when and how many is not its to say."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Protocol

from ...errors import ActivationFailed, LauncherError, PilotflameError, SourceDenied
from ..launching.fetcher_client import FetcherClient, FetchProgress
from ..launching.launcher import Child, Launcher, WorkerSource
from ..link.frames import Frame, FrameKind
from ..link.worker_spec import WEIGHTS_TIMEOUT_S, WorkerSpec
from ..telemetry.logs import LogBook
from ..telemetry.timeline import Activation
from .invocation import Invocation
from .replica import START_TIMEOUT_S, Learner, Replica, ReplicaState

STOP_TIMEOUT_S = 30.0
ZYGOTE_EXIT_TIMEOUT_S = 10.0
# A zygote that keeps dying is brought back ever more slowly.
FIRST_RELAUNCH_DELAY_S = 0.5
LAST_RELAUNCH_DELAY_S = 60.0
STABLE_AFTER_S = 30.0
MAX_LAUNCHES = 3
# The next standby is forked in a quiet moment: forking takes the processor from the requests that follow the first.
# (MiniLM, 2 cores: the request after a cold one took up to 69 ms instead of 23 when the fork came right away.)
QUIET_S = 0.2
LATEST_STANDBY_S = 2.0


class Keeper(Protocol):
    """Who is told what happens in a pool: its revision."""

    @property
    def line(self) -> Learner: ...
    def on_ready(self, replica: Replica) -> None: ...
    def on_capacity(self, replica: Replica) -> None: ...
    def on_change(self) -> None: ...
    def on_returned(self, invocation: Invocation) -> None: ...
    def on_start_failed(self, error: PilotflameError) -> None: ...
    def on_worker_died(
        self, replica: Replica, unstarted: list[Invocation], started: list[Invocation], cause: str
    ) -> None: ...


class Pool:
    """Workers of one revision."""

    def __init__(
        self, spec: WorkerSpec, launcher: Launcher, logs: LogBook, tasks: asyncio.TaskGroup, keeper: Keeper,
        *, standby: bool = True, keep_zygote: bool = True, weights: FetcherClient | None = None,
        secrets: Callable[[], dict[str, str]] = dict,
    ) -> None:  # fmt: skip
        self.spec = spec
        self.replicas: list[Replica] = []
        self.standby: Child | None = None
        self.standby_primed = False
        self.starting = 0
        self.activations = 0
        self.measuring = False
        """Whether the next worker is to measure its latency curve."""
        self._last: Replica | None = None
        self._past_busy_s = self._past_ready_s = 0.0
        self._launcher, self._logs, self._tasks, self._keeper = launcher, logs, tasks, keeper
        self._with_standby = standby
        self._keep_zygote = keep_zygote
        self._weights = weights if spec.source else None
        self._secrets = secrets
        self._fetching: FetchProgress | None = None
        self._holding = asyncio.Lock()
        self._source: WorkerSource | None = None
        self._launching = asyncio.Lock()
        self._names = itertools.count(1)
        self._forking_standby = False
        self._standby_timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._delay_s = 0.0
        self._launched_s = 0.0

    # -- what is

    @property
    def source(self) -> WorkerSource | None:
        """The zygote, while it lives."""
        return self._source if self._source is not None and self._source.alive else None

    @property
    def ready(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.state is ReplicaState.READY]

    @property
    def restoring(self) -> int:
        """Workers on their way: to be forked, or taking their weights."""
        return self.starting + sum(1 for replica in self.replicas if replica.state is ReplicaState.RESTORING)

    @property
    def in_flight(self) -> int:
        count = 0
        for replica in self.replicas:  # asked for with every invocation: a generator would cost as much again
            count += len(replica.given.calls)
        return count

    def worked_s(self, now_s: float) -> tuple[float, float]:
        """(seconds for which workers had something to do, seconds for which they were there), of all there ever were."""
        busy_s, ready_s = self._past_busy_s, self._past_ready_s
        for replica in self.replicas:
            busy_s += replica.given.working_s(now_s)
            ready_s += now_s - replica.activation.ready_s if replica.activation.ready_s else 0.0
        return busy_s, ready_s

    def idle(self) -> list[Replica]:
        """Ready workers without work, the longest idle first."""
        return sorted(
            (replica for replica in self.ready if not replica.in_flight),
            key=lambda replica: replica.idle_since_s,
        )

    def pick(self) -> Replica | None:
        """The worker for the next invocation: the least busy; among idle ones the newest, so that the others can go.

        Of workers that hold short ones in advance the busiest that has room: what would wake another process, and have
        it wait for the processor, is done sooner where one is awake.
        """
        if self._last is not None and self._last.holds_more:
            return self._last
        best: Replica | None = None
        for replica in self.replicas:
            if replica.free > 0 and (best is None or _before(replica, best)):
                best = replica
        self._last = best
        return best

    # -- starting

    async def open(self) -> WorkerSource:
        """Launches the zygote if there is none. Raises HandlerError or LauncherError."""
        async with self._launching:
            if (source := self.source) is not None:
                return source
            self._check_open()
            self._launched_s = time.monotonic()
            source = await self._launcher.launch(self.spec, self._logs, self._on_zygote_death)
            try:
                self._check_open()
            except LauncherError:  # it was closed meanwhile
                source.close()
                raise
            self._source = source
            return source

    def _check_open(self) -> None:
        if self._closed:
            raise LauncherError(f"Revision {self.spec.revision} has been stopped.")

    def start(self, count: int) -> None:
        """Starts workers: the standby at once, others as fast as they fork."""
        for _ in range(count):
            activation = Activation(time.monotonic())
            self.activations += 1
            child, self.standby = self.standby, None
            if child is not None and child.link.closed:
                child = None
            if child is not None and self._weights is None:
                self._activate(child, activation)
            else:
                self.starting += 1
                self._tasks.create_task(self._start(activation, child))

    def replenish(self) -> None:
        """Forks the next standby, if one is wanted and there is none."""
        if self._closed or not self._with_standby or self._forking_standby or self.standby is not None:
            return
        if self.source is not None:
            self._forking_standby = True
            self._tasks.create_task(self._fork_standby())

    def _replenish_when_quiet(self, since_s: float) -> None:
        """Forks the next standby once nothing runs, or nothing has been quiet for too long."""
        self._standby_timer = None
        if not self.in_flight or time.monotonic() - since_s > LATEST_STANDBY_S:
            self.replenish()
        elif not self._closed:
            self._schedule_standby(since_s)

    def _schedule_standby(self, since_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._standby_timer = loop.call_later(QUIET_S, self._replenish_when_quiet, since_s)

    async def _start(self, activation: Activation, standby: Child | None) -> None:
        try:
            child = await self._child_and_weights(activation, standby)
            if self._closed:
                child.link.close()
                self._check_open()
        except PilotflameError as error:
            self.starting -= 1
            self._keeper.on_start_failed(error)
            return
        self.starting -= 1
        self._activate(child, activation)
        self._keeper.on_change()

    async def _child_and_weights(self, activation: Activation, standby: Child | None) -> Child:
        """A child, and its weights held on this node: whatever is missing of both is brought at the same time."""
        if self._weights is None:
            return standby or await self._fork_surely()
        fork: asyncio.Task[Child] | None = None
        try:
            async with asyncio.TaskGroup() as both:
                fork = both.create_task(self._standby_or_fork(standby))
                activation.fetch = (await self._hold(self._weights)).fetch
        except BaseException as failed:
            found = fork.result() if fork is not None and _succeeded(fork) else standby
            if found is not None:
                found.link.close()
            if isinstance(failed, ExceptionGroup):
                raise failed.exceptions[0] from None
            raise
        return fork.result()

    async def _standby_or_fork(self, standby: Child | None) -> Child:
        return standby or await self._fork_surely()

    async def _hold(self, weights: FetcherClient) -> FetchProgress:
        """One hold for all workers of the pool."""
        async with self._holding:
            if self._fetching is not None and self._fetching.error is not None:
                self._release_weights()
            if self._fetching is None:
                self._fetching = await weights.hold(self.spec)
            return self._fetching

    def _release_weights(self) -> None:
        fetching, self._fetching = self._fetching, None
        if fetching is not None and self._weights is not None:
            self._weights.release(fetching)

    async def _fork_surely(self) -> Child:
        """A child, though its zygote may die under our hands: then from the next one, a few times."""
        for _ in range(MAX_LAUNCHES - 1):
            try:
                return await (await self.open()).fork(self._name(), self._logs)
            except LauncherError as error:
                if self._closed or self.source is not None:  # it lives, and could not all the same
                    raise
                self._logs.write("gateway", f"starting a worker once more: {error}")
        return await (await self.open()).fork(self._name(), self._logs)

    def _activate(self, child: Child, activation: Activation) -> None:
        activation.forked_s = time.monotonic()
        # Weights that are still coming may keep `setup` waiting for as long as a worker waits for them.
        waits_s = START_TIMEOUT_S + (WEIGHTS_TIMEOUT_S if self._weights is not None else 0.0)
        self.replicas.append(
            Replica(
                child, activation, self, self._keeper.line, self._secrets(), waits_s, measure=self.measuring
            )
        )

    async def _fork_standby(self) -> None:
        try:
            source = self.source
            if source is None:
                return
            child = await source.fork(self._name(), self._logs)
        except LauncherError as error:
            self._logs.write("gateway", f"no standby: {error}")
            return
        finally:
            self._forking_standby = False
        if self._closed or self.standby is not None:
            child.link.close()
            return
        self.standby = child
        self.standby_primed = False
        child.link.bind(self._on_standby_word, lambda: self._on_standby_lost(child))

    def _name(self) -> str:
        return f"{self.spec.function}-{self.spec.revision.partition('-')[0]}-{next(self._names)}"

    # -- stopping

    def stop(self, count: int) -> None:
        """Drains the longest idle workers."""
        for replica in self.idle()[:count]:
            replica.drain(STOP_TIMEOUT_S)

    def release(self) -> None:
        """At zero: lets the weights go, which nobody maps; the zygote too, if the owner did not want to keep it."""
        if self.replicas or self.restoring:
            return
        self._release_weights()
        if not self._keep_zygote and self._source is not None:
            self._drop_standby()
            self._source.close()
            self._source = None

    async def close(self, timeout_s: float) -> None:
        """Drains everything, waits for it, and ends the zygote. Workers that do not end in time are killed."""
        self._closed = True
        if self._standby_timer is not None:
            self._standby_timer.cancel()
        self._drop_standby()
        children = [replica.child for replica in self.replicas]
        for replica in list(self.replicas):
            replica.drain(timeout_s)
        for child in children:
            await child.gone.wait()
        self._release_weights()
        if self._source is not None:
            self._source.close()
            await self._source.wait_closed(ZYGOTE_EXIT_TIMEOUT_S)

    def _drop_standby(self) -> None:
        if self.standby is not None:
            self.standby.link.close()  # it ends when its link does
            self.standby = None

    # -- what replicas and zygotes do

    def on_ready(self, replica: Replica) -> None:
        self._delay_s = 0.0
        self._keeper.on_ready(replica)

    def on_free(self, replica: Replica) -> None:
        if self.standby is None and self._standby_timer is None and self._with_standby and not self._closed:
            self._schedule_standby(time.monotonic())
        self._keeper.on_capacity(replica)

    def on_returned(self, replica: Replica, invocation: Invocation) -> None:
        self._keeper.on_returned(invocation)

    def on_setup_failed(self, replica: Replica, error: PilotflameError) -> None:
        self._keeper.on_start_failed(self.refined(error))

    def refined(self, error: PilotflameError) -> PilotflameError:
        """What a worker says of weights that did not come: the fetcher knows better why."""
        cause = self._fetching.error if self._fetching is not None else None
        if cause is None or error.details.get("cause") != SourceDenied.code:
            return error
        return ActivationFailed(
            f"The weights are not whole: {cause.message}",
            remedy=cause.remedy,
            details={**cause.details, "cause": cause.code},
        )

    def on_dead(self, replica: Replica, unstarted: list[Invocation], started: list[Invocation]) -> None:
        self.replicas.remove(replica)
        self._last = None
        self._past_busy_s += replica.given.busy_s
        if replica.activation.ready_s:
            self._past_ready_s += time.monotonic() - replica.activation.ready_s
        if not self.replicas:
            self.replenish()  # at zero nobody is disturbed, and the next activation may be near
        self._tasks.create_task(self._tell_death(replica, unstarted, started))

    async def _tell_death(
        self, replica: Replica, unstarted: list[Invocation], started: list[Invocation]
    ) -> None:
        cause = await replica.child.cause() if started or not replica.activation.ready_s else ""
        self._keeper.on_worker_died(replica, unstarted, started, cause)

    def _on_standby_word(self, frame: Frame) -> None:
        if frame.kind == FrameKind.PRIMED:
            self.standby_primed = True

    def _on_standby_lost(self, child: Child) -> None:
        if self.standby is child:
            self.standby = None

    def _on_zygote_death(self) -> None:
        self._source = None
        if self._closed or not self._keep_zygote:
            return
        if time.monotonic() - self._launched_s > STABLE_AFTER_S:
            self._delay_s = 0.0
        self._logs.write("gateway", f"the zygote died; a new one is launched in {self._delay_s:.1f} s")
        asyncio.get_running_loop().call_later(self._delay_s, self._relaunch)
        self._delay_s = min(LAST_RELAUNCH_DELAY_S, max(FIRST_RELAUNCH_DELAY_S, self._delay_s * 2))

    def _relaunch(self) -> None:
        if not self._closed:
            self._tasks.create_task(self.warm_zygote())

    async def warm_zygote(self) -> None:
        """Brings the zygote up ahead of need, with its standby; a failure is logged and met again when it is needed."""
        try:
            await self.open()
        except PilotflameError as error:
            self._logs.write("gateway", f"the zygote could not be launched: {error}")
            return
        self.replenish()


def _before(replica: Replica, other: Replica) -> bool:
    return replica.load > other.load if replica.hurried else replica.load <= other.load


def _succeeded(task: asyncio.Task[Child]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
