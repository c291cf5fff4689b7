"""Limits the memory of idle functions: zygotes and standbys that wait for their next request, and idle workers.

A function that is not in use is moved down its ladder in three cases. Then its next cold start takes longer:

- The function is light, which means that its zygote was ready within LIGHT_S, and no call came within UNUSED_S after
  its deploy. Then its zygote ends. After a start of the gateway, a light function has no zygote until it is called.
- All zygotes together hold more than the limit. Then zygotes end. The zygote whose end costs callers least per freed
  byte ends first.
- The machine or the gateway's cgroup is short of memory. Then spare files and weights that no function uses go first.
  Idle workers and fetched weights follow, again in the order of cost per freed byte (scaling/eviction.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import psutil

from ....machine import memory_bytes
from ...calls.link.child import Child
from ...calls.serving.replica import ReplicaState
from ...ground.telemetry.background import BackgroundTasks
from ...ground.telemetry.rung_name import RungName
from ..launching.launcher import Launcher
from ..reconciling.revision_workers import RevisionWorkers
from ..scaling.eviction import StepDown, steps_down
from .live import Live, memory_of
from .memory_pressure import MemoryPressure

LIGHT_S = 0.25
UNUSED_S = 300.0
# A check measures the memory SETTLE_S after a worker started or a function was deployed. By that time, the zygote has
# forked the next standby. While the memory exceeds the limit, a check measures it again after RECHECK_S.
SETTLE_S = 5.0
RECHECK_S = 30.0
# While memory is short, ending workers have this time to end before more functions must give memory back.
RELIEF_S = 1.0
# If the settings have no limit, functions at rest may hold this share of the machine's memory.
SHARE = 1 / 8
# The causes that decisions name: PRESSURE if the machine or the cgroup is short of memory, REST_MB if zygotes hold too
# much.
PRESSURE, REST_MB = "pressure", "rest_mb"
_MIB = 1 << 20
# The log messages for steps down, by the rung that the function leaves.
_GIVEN_UP = {
    RungName.READY: "idle workers end because memory is short",
    RungName.ZYGOTE: "the zygote ended to save memory; the next call launches it again",
    RungName.RESIDENT: "fetched weights leave the memory because memory is short",
}


@dataclass(frozen=True, slots=True)
class RestStats:
    """The memory that a function holds at rest, and the times of its last use and its deploy."""

    name: str
    held_mb: float
    idle: bool
    """True if the function has no worker and no invocation."""
    light: bool
    used_s: float
    """`RevisionWorkers.used_s`: the last end of a worker that had run invocations, or 0 before the first such end."""
    since_s: float
    """The time at which the function's revision became live."""


def never_used(stats: Iterable[RestStats], now_s: float) -> list[str]:
    """Return the light functions whose zygotes should end, because no call came within UNUSED_S after the deploy."""
    unused = [one for one in stats if one.light and not one.used_s and now_s - one.since_s >= UNUSED_S]
    return [one.name for one in unused if one.idle and one.held_mb]


def next_check_s(stats: Iterable[RestStats], now_s: float) -> float | None:
    """Return the seconds until a light function may lose its zygote as unused, or None if no function may."""
    waits = [one.since_s + UNUSED_S - now_s for one in stats if one.light and not one.used_s and one.held_mb]
    # A function may be due but in use. Then check it again after RECHECK_S.
    return min((max(SETTLE_S, wait_s) if wait_s > 0 else RECHECK_S for wait_s in waits), default=None)


class EvictionCandidate(NamedTuple):
    """A step down that a function could take to free memory."""

    upper: RungName
    lower: RungName
    step: StepDown


class _Processes(NamedTuple):
    """The processes of a function at the time of a measurement."""

    zygote: tuple[int, ...]
    idle: tuple[int, ...]
    workers: int


class Rest:
    """Keeps the memory of functions at rest below the limit. Measures it whenever it may have changed."""

    def __init__(
        self, functions: Callable[[], Sequence[Live]], launcher: Launcher, tasks: BackgroundTasks,
        limit_mb: int | None, give_back: Callable[[], float],
    ) -> None:  # fmt: skip
        """`functions` returns all live functions. `give_back` frees unused memory and returns the freed bytes."""
        self._give_back = give_back
        self._functions, self._launcher, self._tasks = functions, launcher, tasks
        self._limit_mb = memory_bytes() * SHARE / _MIB if limit_mb is None else limit_mb
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._check_at_s = math.inf
        self._checking = self._closed = False
        self._pressure = MemoryPressure(self._start_relief)
        self._relieving, self._reported = asyncio.Lock(), False
        # The last measurement of each function, with the processes that the function had then.
        self._measured: dict[str, tuple[_Processes, RestStats]] = {}
        # The next check looks only at these functions. Most of a thousand functions have not changed since the last
        # check.
        self._changed, self._unsettled = set[str](), set[str]()

    def note_change(self, function: str = "", *_: str) -> None:
        """Check soon, because `function` has started a worker, or was deployed or deleted. Ignore other arguments."""
        self._changed.add(function)
        self._check_in(SETTLE_S)

    def note_processes(self, function: str) -> None:
        """Record that a process of a function has started or ended. The next check measures the function."""
        self._changed.add(function)

    def close(self) -> None:
        """Stop all checks. Later reports about processes have no effect."""
        self._closed = True
        self._pressure.close()
        self._cancel_timer()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check_in(self, delay_s: float) -> None:
        at_s = time.monotonic() + delay_s
        if self._closed or self._checking or at_s >= self._check_at_s:
            return
        self._cancel_timer()
        self._check_at_s = at_s
        self._timer = self._loop.call_later(delay_s, self._start_check)

    def _start_check(self) -> None:
        self._check_at_s = math.inf
        self._checking = True
        self._tasks.create_task(self._check())

    async def _check(self) -> None:
        try:
            next_s = await self._rest()
        finally:
            self._checking = False
        if next_s is not None:
            self._check_in(next_s)

    async def _rest(self) -> float | None:
        """Let functions give back memory if they must. Return the seconds until the next check, or None for none."""
        shared_mb = await asyncio.to_thread(_held_mb, self._launcher.base_pids())
        unmeasured = await self._measure_changed()
        stats, now_s = [one for _, one in self._measured.values()], time.monotonic()
        unused = set(never_used(stats, now_s))
        for live in self._functions():
            # A call may have arrived during the measurement.
            if live.record.function in unused and _idle(live.workers):
                live.function.ladder.yield_to(live.function.ladder.below(RungName.ZYGOTE)[0])
                live.note_rest(0.0)
                live.logs.write("gateway", _GIVEN_UP[RungName.ZYGOTE])
        await self._relieve()
        held_mb = shared_mb + sum(one.held_mb for one in stats)
        over_mb = held_mb - self._limit_mb - sum(one.held_mb for one in stats if one.name in unused)
        if over_mb > 0:
            self._free(over_mb * _MIB, REST_MB, {})
        if held_mb > self._limit_mb:
            self._launcher.end_unused()
            return RECHECK_S
        next_s = next_check_s([one for one in stats if one.name not in unused], now_s)
        if unmeasured:
            return RECHECK_S if next_s is None else min(next_s, RECHECK_S)
        return next_s

    async def _measure_changed(self) -> bool:
        """Measure the functions that may have changed.

        Return True if a measured function holds a rung whose memory is not known yet.
        """
        lives = {live.record.function: live for live in self._functions()}
        self._measured = {name: one for name, one in self._measured.items() if name in lives}
        due = (self._changed | self._unsettled | (lives.keys() - self._measured.keys())) & lives.keys()
        self._changed.clear()
        for name in sorted(due):
            await self._measure(lives[name])
        unmeasured = {name for name in due if _unmeasured(lives[name].workers)}
        self._unsettled = unmeasured | {name for name in due if not self._measured[name][1].idle}
        return bool(unmeasured)

    async def _measure(self, live: Live) -> None:
        """Measure the zygote, the standby and an idle worker of a function, unless the same processes were measured."""
        name, workers = live.record.function, live.workers
        idle = [replica.child.pid for replica in workers.replicas.idle[:1]]
        present = _Processes(tuple(workers.zygote_pids), tuple(idle), len(workers.replicas))
        before, stats = self._measured.get(name, (None, None))
        if stats is not None and before == present:
            held_mb = stats.held_mb
        else:
            held_mb = await self._measure_processes(live, present)
        live.note_rest(held_mb)
        light, now_idle = live.builds_within(LIGHT_S), _idle(workers)
        self._measured[name] = (
            present,
            RestStats(name, held_mb, now_idle, light, workers.used_s, live.since_s),
        )

    async def _measure_processes(self, live: Live, present: _Processes) -> float:
        """Return the MiB of the zygote and the standby. Report the memory of the rungs to the ladder."""
        workers, ladder, pids, idle = live.workers, live.function.ladder, [*present.zygote], [*present.idle]
        held_mb, resident_bytes = await asyncio.to_thread(_held_mb, pids), workers.resident_bytes
        if idle:
            ladder.note_held(RungName.RESIDENT, resident_bytes)
            worker_mb, own_mb = await asyncio.to_thread(_worker_mb, idle)
            ladder.note_held(RungName.READY, (held_mb + worker_mb) * _MIB)
            if pids and len(workers.replicas) == 1:
                # When the worker ends, the weights and the pages that it shares with zygote and standby stay.
                rest_bytes = (held_mb + worker_mb - own_mb) * _MIB
                ladder.note_held(RungName.ZYGOTE, rest_bytes + resident_bytes)
        elif pids and not len(workers.replicas):
            ladder.note_held(RungName.ZYGOTE, held_mb * _MIB + resident_bytes)
        return held_mb

    # -- giving memory back

    def _start_relief(self) -> None:
        # The kernel repeats its reports. If `_relieve` is already running, `_reported` makes it check again.
        self._reported = True
        if not self._relieving.locked():
            self._tasks.create_task(self._relieve())

    async def _short_bytes(self) -> float:
        short_bytes, self._reported = 0.0, True
        while self._reported and short_bytes <= 0:
            self._reported = False
            short_bytes = await asyncio.to_thread(self._pressure.short_bytes)
        return short_bytes

    async def _relieve(self) -> None:
        """While memory is short, let idle functions step down. If no function can step down, end warm-ups. Stop when no step is
        possible.
        """
        async with self._relieving:
            while (short := await self._short_bytes()) > 0:
                if self._give_back() > 0:
                    # If the freed memory is not enough, the next round takes memory from functions.
                    self._loop.call_later(RELIEF_S, self._start_relief)
                    return
                spare = [live for live in self._functions() if _spare(live.workers)]
                families = {live.record.function: _Family.of(live.workers) for live in spare}
                private = await asyncio.to_thread(_private, families)
                if not self._free(short, PRESSURE, private) and not self._end_a_warm_up():
                    return
                self._launcher.end_unused()
                if not (ending := list(self._ending())):
                    self._loop.call_later(RELIEF_S, self._start_relief)
                    return
                until_s = time.monotonic() + RELIEF_S
                for child in ending:
                    await child.wait_gone(max(0.0, until_s - time.monotonic()))

    def _end_a_warm_up(self) -> bool:
        """End the warm-ups of the function whose warm-up would last longest. Return False if no function has one."""
        until_s = {live: live.workers.held_until_s or 0.0 for live in self._functions()}
        longest = max(until_s, key=until_s.__getitem__, default=None)
        if longest is None or not until_s[longest]:
            return False
        longest.logs.write("gateway", "its warm-up ends because memory is short")
        longest.workers.end_warm_ups()
        return True

    def _ending(self) -> Iterator[Child]:
        for live in self._functions():
            for replica in live.workers.replicas:
                if replica.state is ReplicaState.DRAINING:
                    yield replica.child

    def _free(self, needed_bytes: float, cause: str, private: Mapping[str, float]) -> bool:
        """Take the cheapest steps down that free `needed_bytes`. Return False if no step is possible.

        `private` maps the functions whose idle workers may end to the private bytes of these workers.
        """
        lives = {live.record.function: live for live in self._functions()}
        # The limit REST_MB counts only the memory of processes. So weights leave the memory only under PRESSURE.
        weights = cause == PRESSURE
        candidates = {
            name: list(_candidates(live, private.get(name), weights=weights)) for name, live in lives.items()
        }
        chosen = steps_down([[one.step for one in of] for of in candidates.values()], needed_bytes)
        for step in chosen:
            live, candidate = lives[step.name], candidates[step.name].pop(0)
            live.function.ladder.evict(candidate.lower, cause, step)
            if candidate.upper is RungName.ZYGOTE:
                live.note_rest(0.0)
            live.logs.write("gateway", _GIVEN_UP[candidate.upper])
        return bool(chosen)


def _candidates(live: Live, private_bytes: float | None, *, weights: bool) -> Iterator[EvictionCandidate]:
    """Yield the steps down that a function can take now, from its present rung on.

    `private_bytes` is the private memory of its workers, or None if the workers must stay. With `weights`, fetched
    weights may also leave the memory.
    """
    workers, upper = live.workers, live.workers.rung
    if workers.held_until_s is not None:
        # A prewarm signal holds the function's workers, so they must stay.
        return
    spare = private_bytes is not None and _spare(workers)
    if not (spare or (_idle(workers) and upper in (RungName.ZYGOTE, RungName.RESIDENT))):
        return
    resident_bytes = float(workers.resident_bytes)
    freed = {RungName.READY: private_bytes, RungName.RESIDENT: resident_bytes}
    for lower in live.function.ladder.below(upper):
        if upper is RungName.RESIDENT and not (weights and resident_bytes):
            return
        step = live.function.ladder.step_down(live.record.function, upper, lower, freed.get(upper))
        yield EvictionCandidate(upper, lower, step)
        upper = lower


class _Family(NamedTuple):
    """The processes of a function that has idle workers."""

    zygote: int | None
    workers: tuple[int, ...]

    @classmethod
    def of(cls, workers: RevisionWorkers) -> _Family:
        pids = (replica.child.pid for replica in workers.replicas.ready + workers.replicas.parked)
        return cls(workers.zygote_pid, tuple(pids))


def _private(families: Mapping[str, _Family]) -> dict[str, float]:
    """Return the approximate private bytes of the workers of each function. Unlike PSS, they are quick to read."""
    return {
        name: float(sum(_anonymous(pid) - _anonymous(zygote) for pid in workers))
        for name, (zygote, workers) in families.items()
    }


def _anonymous(pid: int | None) -> int:
    """Return the anonymous memory of a process in bytes. A fork's unchanged pages count in the fork, too."""
    with contextlib.suppress(psutil.Error):
        if pid is not None:
            memory = psutil.Process(pid).memory_info()
            return int(memory.rss - memory.shared)
    return 0


def _unmeasured(workers: RevisionWorkers) -> bool:
    """Return True if the function holds a rung whose memory is not known yet.

    The memory of a rung is not known if the workers were busy in all checks so far.
    """
    known = workers.function.ladder.figures.held_bytes
    held = {RungName.READY: workers.replicas.ready, RungName.ZYGOTE: workers.zygote_pids}
    return any(processes and rung not in known for rung, processes in held.items())


def _idle(workers: RevisionWorkers) -> bool:
    return not workers.replicas.held and not len(workers.revision.dispatcher.queue)


def _spare(workers: RevisionWorkers) -> bool:
    """Return True if a function has ready or parked workers that no call, no setting and no prewarm signal needs."""
    replicas, revision = workers.replicas, workers.revision
    calls = replicas.in_flight or replicas.starting or len(revision.dispatcher.queue)
    kept = revision.policy.scale.min or workers.held_until_s is not None
    return bool(replicas.ready or replicas.parked) and not calls and not kept


def _held_mb(pids: list[int]) -> float:
    """Return the memory of processes in MiB (PSS). Each process counts an equal part of a page that it shares."""
    return sum(process.pss_mb for pid in pids for process in memory_of(pid, "", ""))


def _worker_mb(pids: list[int]) -> tuple[float, float]:
    """Return the memory of processes in MiB (PSS), and the part of it that no other process shares (USS)."""
    found = [process for pid in pids for process in memory_of(pid, "", "")]
    return sum(one.pss_mb for one in found), sum(one.uss_mb for one in found)
