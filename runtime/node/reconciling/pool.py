"""Starts, parks, wakes and ends the workers of one revision. It decides nothing: the reconciler calls it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import psutil

from ....errors import ActivationFailed, PilotflameError
from ...calls.link.child import KILLED_S, Child
from ...calls.link.worker_spec import WorkerSpec
from ...calls.serving.replica import CallEvents, Replica, ReplicaState, WorkerEvents
from ...calls.serving.replicas import ReplicaList
from ...calls.serving.start_limit import StartLimit
from ...ground.billing.usage import RungClock, Usage
from ...ground.settings.function_settings import Scale
from ...ground.telemetry.logs import Log
from ...ground.telemetry.refusals import explained
from ...ground.telemetry.rung_name import RungName
from ...ground.telemetry.timeline import Activation, StartCause
from ..launching.fetcher_client import FetcherClient
from ..launching.launcher import RevisionLauncher
from ..scaling.placement import MemoryByGpu
from .gpu_bookings import GpuBooking, GpuBookings, GpuClaimant
from .held_weights import HeldWeights
from .standby import Standby
from .zygote_supervisor import ZygoteSupervisor

# An idle worker that is stopped is killed if it has not exited after this time.
STOP_TIMEOUT_S = 30.0


class PoolEvents(WorkerEvents, Protocol):
    """The events that the pool reports, in addition to the events of its workers."""

    def on_processes_changed(self) -> None:
        """Learn that a worker, the zygote or the standby has started or ended."""

    def on_zygote(self) -> None:
        """Learn that the zygote has died, or that a launch of the zygote has ended for which no start waits. After a
        death, `ZygoteSupervisor.relaunch_at_s` says when to launch a new zygote.
        """


class Pool:
    """The workers of one revision, and the weights that the fetcher keeps for them."""

    def __init__(
        self, spec: WorkerSpec, scale: Scale, replicas: ReplicaList, launcher: RevisionLauncher, logs: Log,
        tasks: asyncio.TaskGroup, calls: CallEvents, events: PoolEvents, fetcher: FetcherClient,
        secrets: Callable[[], dict[str, str]], measure: bool, gpus: GpuBookings, claimant: GpuClaimant,
        numbers: Iterator[int],
    ) -> None:  # fmt: skip
        """If `measure`, new workers measure their latency curve, until one worker has measured it. `numbers` yields the
        number at the end of each worker's name.

        `secrets` returns, by name, the environment variables that only the zygote and its workers get.
        """
        self.replicas = replicas
        self.activations = 0
        """The number of workers that were started, except the workers that deploys have started."""
        self.used_s = 0.0
        """The latest time at which a worker ended that had run invocations; 0 before the first such end."""
        self._rung = RungClock(time.monotonic())
        stays, revision = scale.rest == "zygote", spec.revision.partition("-")[0]
        names = (f"{spec.function}-{revision}-{number}" for number in numbers)
        self.standby = Standby(gpus, claimant, names, logs, tasks, self._note_rung, wanted=stays)
        self.zygote = ZygoteSupervisor(
            spec, launcher, logs, tasks, secrets, names, self.standby, self._note_rung, events.on_zygote, stays=stays
        )  # fmt: skip
        self._spec, self._tasks, self._secrets, self._logs = spec, tasks, secrets, logs.channel
        self._calls, self._events = calls, events
        self._measure = measure
        self.forking: list[GpuBooking | None] = []
        """The bookings of the workers that are being forked; None for a worker without GPUs."""
        self._starts = set[asyncio.Task[None]]()
        self._gpus, self._claimant = gpus, claimant
        self._past_busy_s = self._past_ready_s = self._past_load_s = 0.0
        self._past_held_s = self._past_parked_s = 0.0
        self.weights = HeldWeights(spec, fetcher, secrets)
        """The fetched weights, which all workers share."""
        self.ending = 0
        """The number of removed workers whose processes still run. The weights stay in memory until these processes have ended."""

    # -- state

    def worked_s(self, now_s: float) -> tuple[float, float]:
        """Return two sums over all workers, including dead workers: the seconds with work, and the seconds since each
        worker became ready.
        """
        busy_s, ready_s = self._past_busy_s, self._past_ready_s
        for replica in self.replicas:
            busy_s += replica.outstanding.total_busy_s(now_s)
            ready_s += now_s - replica.activation.ready_s if replica.activation.ready_s else 0.0
        return busy_s, ready_s

    def usage(self, now_s: float) -> Usage:
        """Return the usage so far of the zygote and of all workers, including dead workers."""
        busy_s, ready_s = self.worked_s(now_s)
        held_s = self._past_held_s + sum(now_s - replica.activation.asked_s for replica in self.replicas)
        parked_s = self._past_parked_s + sum(replica.parking.total_s(now_s) for replica in self.replicas)
        occupied_s, zygote_s, local_s = (
            self._rung.seconds(rung, now_s) for rung in (RungName.READY, RungName.ZYGOTE, RungName.LOCAL)
        )
        return Usage(
            busy_s=busy_s, idle_s=ready_s - busy_s, starting_s=held_s - ready_s, occupied_s=occupied_s,
            parked_s=parked_s, zygote_s=zygote_s, local_s=local_s, activations=self.activations, invocations=self.replicas.completed,
        )  # fmt: skip

    def _note_rung(self) -> None:
        """Record that a worker, the zygote or the standby has started or ended."""
        rest = RungName.LOCAL if self.zygote.source is None else RungName.ZYGOTE
        self._rung.move(RungName.READY if len(self.replicas) else rest, time.monotonic())
        self._events.on_processes_changed()

    def load_s(self, now_s: float) -> float:
        """Return the seconds that invocations have spent at workers so far, summed over all invocations.

        Invocations at dead workers are included.
        """
        load_s = self._past_load_s
        for replica in self.replicas:
            load_s += replica.outstanding.load_s(now_s)
        return load_s

    # -- starting

    def start(
        self, count: int, cause: StartCause, signal: str, planned: Sequence[MemoryByGpu | None]
    ) -> None:
        """Start `count` workers. The standby becomes the first worker, and the others are forked.

        `signal` names the signal that asks for the workers ahead of need; "" if the load asks for them. `planned` has the
        GPU memory of each worker. For workers without GPUs, it is empty or has None for each worker. The worker of a
        deploy does not count as an activation.
        """
        if cause is not StartCause.DEPLOY:
            self.activations += count
        for number in range(count):
            activation = Activation(time.monotonic(), signal=signal, cause=cause)
            standby = self.standby.take()
            at = planned[number] if planned else None
            booking = self._gpus.take(self._claimant, at, standby) if at is not None else None
            if standby is not None and not self.weights.at_start:
                self._activate(standby, activation, booking)
            else:
                self.replicas.note_asked(activation.asked_s)
                self.forking.append(booking)
                start = self._tasks.create_task(self._start(activation, standby, booking))
                self._starts.add(start)
                start.add_done_callback(self._starts.discard)

    async def _start(self, activation: Activation, child: Child | None, booking: GpuBooking | None) -> None:
        """Activate `child`, or fork a child first if it is None. Fetch the weights at the same time."""
        try:
            async with asyncio.TaskGroup() as tasks:
                if self.weights.at_start:
                    tasks.create_task(self.weights.fetch(activation))
                child = child or await self.zygote.fork(
                    self._gpus.rehearsals.limit_mb(self._claimant, booking)
                )
            self.zygote.check_open()
        except BaseException as failed:
            self._note_answered(activation, booking)
            if child is not None:
                child.link.close()
            self._gpus.bind(booking, child, self._tasks)
            error = failed.exceptions[0] if isinstance(failed, ExceptionGroup) else failed
            if not isinstance(error, Exception):
                raise
            self._events.on_start_failed(error if isinstance(error, PilotflameError) else _unexpected(error))
            if not isinstance(error, PilotflameError):
                raise
        else:
            self._note_answered(activation, booking)
            self._activate(child, activation, booking)

    def _note_answered(self, activation: Activation, booking: GpuBooking | None) -> None:
        self.replicas.note_answered(activation.asked_s)
        self.forking.remove(booking)

    def _activate(self, child: Child, activation: Activation, booking: GpuBooking | None) -> None:
        activation.mark_forked(time.monotonic())
        # Allow the start more time if weights are still being fetched: `setup` may have to wait for them.
        weights_s = self.weights.left_s
        env, contained = dict[str, str](), bool(self._spec.image)
        if booking is not None:
            env = self._gpus.hardware.environment(self._spec.resources, booking.full, contained=contained)
        limit = StartLimit(
            child, self._spec.start_timeout_s, lambda: self._progress(child), later_s=weights_s or 0.0
        )
        replica = Replica(
            child, activation, self._calls, self._events, env, limit, measure=self._measure, weights_s=weights_s
        )  # fmt: skip
        self.replicas.add(replica)
        if booking is not None:
            booking.replica = replica
            self._gpus.bind(booking, child, self._tasks)
        self._note_rung()

    def _progress(self, child: Child) -> object:
        """Return values that differ from an earlier call if a start makes progress: the last printed line, and the bytes read."""
        read = None
        with contextlib.suppress(psutil.Error):
            read = psutil.Process(child.pid).io_counters()
        return self._logs.tail(1, child.name), read

    def note_ready(self, replica: Replica) -> None:
        """Learn that a worker is ready. If it measured the latency curve, later workers do not measure it again."""
        self.zygote.note_works()
        self._measure = self._measure and not replica.start.measured

    # -- parking

    def park(self, replicas: Iterable[Replica], *, given: bool = False) -> None:
        """Park ready workers without work. `given` is True if the workers park to make room for other revisions."""
        now_s = time.monotonic()
        for replica in replicas:
            replica.park(now_s)
            if (booking := self._gpus.of(replica)) is not None:
                booking.given = given

    def wake(self, replicas: Iterable[Replica], most: int) -> int:
        """Wake at most `most` of these parked workers, and return how many woke. Woken workers are ready at once.

        A worker stays parked if its GPUs have no room for its full memory.
        """
        now_s, woken = time.monotonic(), 0
        for replica in replicas:
            if woken < most and self._gpus.resume(replica):
                replica.wake(now_s)
                woken += 1
        return woken

    # -- stopping

    def stop(self, replicas: Iterable[Replica]) -> None:
        """Drain workers. Each worker ends after its last invocation; deadlines limit the invocations. Cancel unfinished starts."""
        for replica in list(replicas):
            if replica.state is ReplicaState.RESTORING:
                replica.cancel_start()
            else:
                replica.drain(None if replica.outstanding.calls else STOP_TIMEOUT_S)

    def remove(self, replica: Replica) -> None:
        """Remove a dead worker from the replicas, and add its seconds to the sums."""
        self.replicas.remove(replica)
        self.ending += 1
        self._past_busy_s += replica.outstanding.busy_s
        self._past_load_s += replica.outstanding.load_s(time.monotonic())
        if replica.completed:
            self.used_s = time.monotonic()
        if replica.activation.ready_s:
            self._past_ready_s += time.monotonic() - replica.activation.ready_s
        self._past_held_s += time.monotonic() - replica.activation.asked_s
        self._past_parked_s += replica.parking.total_s(time.monotonic())
        self._note_rung()

    def note_gone(self) -> None:
        """Learn that the process of a worker that was removed has ended."""
        self.ending -= 1

    async def close(self, timeout_s: float) -> None:
        """Drain all workers, kill those that do not exit within `timeout_s`, and end the zygote."""
        self.zygote.close()
        children = [replica.child for replica in self.replicas]
        for replica in list(self.replicas):
            replica.drain(timeout_s)
        gone_by_s = time.monotonic() + timeout_s + KILLED_S
        for child in children:
            await child.wait_killed(gone_by_s - time.monotonic())
            if child.gone.is_set():
                # The gateway may not have read the worker's last answers yet.
                child.link.drain()
            else:
                child.link.close()
        self.weights.close()
        await self.zygote.wait_closed()
        # The unfinished starts have failed, but they count as workers until they have given their bookings back.
        if self._starts:
            await asyncio.wait(self._starts, timeout=KILLED_S)


def _unexpected(error: Exception) -> ActivationFailed:
    """Return the error for callers. Only the function's owner gets the text of `error` and the paths in it."""

    def made(details: dict[str, Any], *, named: bool) -> ActivationFailed:
        text, remedy = type(error).__name__, "See the gateway's log for the traceback."
        if (known := explained(error, named=named)) is not None:
            text, remedy = known.message, known.remedy
        elif named:
            text = f"{text}: {error}"
        return ActivationFailed(f"A worker could not be started: {text}", remedy=remedy, details=details)

    return made({"fault": made({}, named=True).to_wire()}, named=False)
