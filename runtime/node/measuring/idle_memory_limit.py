"""Limits the memory of idle functions: zygotes and standbys that wait for their next request, and idle workers.

A function that is not in use is moved down its ladder in three cases. Its next cold start then takes longer. The cases
are:

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
from ..functions.live import LIGHT_S, Live
from ..launching.launcher import Launcher
from ..reconciling.revision_workers import RevisionWorkers
from ..scaling.eviction import StepDown, steps_down
from .memory_pressure import MemoryPressure
from .node_memory import NO_MEMORY, FunctionMemory, NodeMemory

UNUSED_S = 300.0
# The next check for a light function that is unused comes after SOONEST_S at the earliest. While the memory exceeds the limit,
# it is measured again after RECHECK_S.
SOONEST_S = 5.0
RECHECK_S = 30.0
# While memory is short, ending workers have this time to end before more functions must give memory back.
RELIEF_S = 1.0
# If the settings have no limit, functions at rest may hold this share of the machine's memory.
SHARE = 1 / 8
# The causes that decisions name: PRESSURE if the machine or the cgroup is short of memory, REST_MB if zygotes hold too
# much, UNUSED if a light function has no calls.
PRESSURE, REST_MB, UNUSED = "pressure", "rest_mb", "unused"
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class IdleStats:
    """The memory that a function holds at rest, and the times of its last use and its deploy."""

    name: str
    held_mb: float
    idle: bool
    """True if the function has no worker and no invocation."""
    light: bool
    used_s: float
    """`Inventory.used_s`: the last end of a worker that had run invocations, or 0 before the first such end."""
    since_s: float
    """The time at which the live revision's `Live` was made, shortly before the revision became live."""


def never_used(stats: Iterable[IdleStats], now_s: float) -> list[str]:
    """Return the light functions whose zygotes should end, because no call came within UNUSED_S after the deploy."""
    unused = [one for one in stats if one.light and not one.used_s and now_s - one.since_s >= UNUSED_S]
    return [one.name for one in unused if one.idle and one.held_mb]


def next_check_s(stats: Iterable[IdleStats], now_s: float) -> float:
    """Return the seconds until a light function may lose its zygote as unused; infinity if no function may."""
    waits = [one.since_s + UNUSED_S - now_s for one in stats if one.light and not one.used_s and one.held_mb]
    # A function may be due but in use. Then check it again after RECHECK_S.
    return min((max(SOONEST_S, wait_s) if wait_s > 0 else RECHECK_S for wait_s in waits), default=math.inf)


class EvictionCandidate(NamedTuple):
    """A step down that a function could take to free memory."""

    upper: RungName
    lower: RungName
    step: StepDown


class IdleMemoryLimit:
    """Keeps the memory of functions at rest below the limit, at each measurement of the node."""

    def __init__(
        self, functions: Callable[[], Sequence[Live]], launcher: Launcher, tasks: BackgroundTasks,
        limit_mb: int | None, give_back: Callable[[], float],
    ) -> None:  # fmt: skip
        """`functions` returns all live functions. `give_back` frees unused memory and returns the freed bytes."""
        self._give_back = give_back
        self._functions, self._launcher, self._tasks = functions, launcher, tasks
        self._limit_mb = memory_bytes() * SHARE / _MIB if limit_mb is None else limit_mb
        self._loop = asyncio.get_running_loop()
        self._pressure = MemoryPressure(self._start_relief)
        self._relieving, self._reported = asyncio.Lock(), False
        # The last measurement of each function. A check uses it again if the function has not changed since then. Most
        # of a thousand functions have not.
        self._measured: dict[str, tuple[FunctionMemory, IdleStats]] = {}
        # The functions that the next check must compute again: they were busy, or the memory of one of their rungs was
        # not known.
        self._unsettled = set[str]()

    def close(self) -> None:
        """Stop listening to the kernel's reports."""
        self._pressure.close()

    async def check(self, memory: NodeMemory) -> float:
        """Let functions give back memory if they must. Return the seconds until the next check; infinity for none."""
        lives = {live.record.function: live for live in self._functions()}
        unmeasured = await self._note(lives, memory.functions)
        stats, now_s = [one for _, one in self._measured.values()], time.monotonic()
        unused = set(never_used(stats, now_s))
        for live in map(lives.__getitem__, unused):
            # Check again, because a call may have arrived since the function was noted.
            if _idle(live.workers):
                ladder = live.function.ladder
                lower = ladder.measured.spec.below(RungName.ZYGOTE)[0]
                text = ladder.evict(
                    lower, UNUSED, ladder.step_down(live.record.function, RungName.ZYGOTE, lower)
                )
                live.note_rest(0.0)
                live.logs.write("gateway", text)
        await self._relieve()
        held_mb = memory.bases_bytes / _MIB + sum(one.held_mb for one in stats)
        over_mb = held_mb - self._limit_mb - sum(one.held_mb for one in stats if one.name in unused)
        if over_mb > 0:
            self._free(over_mb * _MIB, REST_MB, {})
        if held_mb > self._limit_mb:
            self._launcher.end_unused()
            return RECHECK_S
        next_s = next_check_s([one for one in stats if one.name not in unused], now_s)
        return min(next_s, RECHECK_S) if unmeasured else next_s

    async def _note(self, lives: Mapping[str, Live], found: Mapping[str, FunctionMemory]) -> bool:
        """Note the functions that have changed. Return True if one of them holds a rung whose memory is not known yet."""
        before, unsettled, unmeasured = self._measured, self._unsettled, set[str]()
        self._measured, self._unsettled = {}, set()
        for name, live in lives.items():
            memory = found.get(name, NO_MEMORY)
            if name in before and before[name][0] is memory and name not in unsettled:
                self._measured[name] = before[name]
                continue
            self._measured[name] = memory, (stats := _noted(live, memory))
            if _unmeasured(live.workers):
                unmeasured.add(name)
            if not stats.idle:
                self._unsettled.add(name)
            # Let requests go on: there may be a thousand functions.
            await asyncio.sleep(0)
        self._unsettled |= unmeasured
        return bool(unmeasured)

    # -- giving memory back

    def _start_relief(self) -> None:
        # Start `_relieve` only once, because the kernel repeats its reports. If `_relieve` is already running,
        # `_reported` makes it check again.
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
        until_s = {live: live.workers.warm_until_s or 0.0 for live in self._functions()}
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
            text = live.function.ladder.evict(candidate.lower, cause, step)
            if candidate.upper is RungName.ZYGOTE:
                live.note_rest(0.0)
            live.logs.write("gateway", text)
        return bool(chosen)


def _noted(live: Live, memory: FunctionMemory) -> IdleStats:
    """Report the memory of a function's rungs to its ladder. Return the function's stats."""
    workers, rest_bytes, idle = live.workers, memory.rest_bytes, memory.idle
    ladder, resident_bytes = live.function.ladder, workers.inventory.resident_bytes
    if idle.held_bytes:
        ladder.note_held(RungName.RESIDENT, resident_bytes)
        ladder.note_held(RungName.READY, rest_bytes + idle.held_bytes)
        if rest_bytes and memory.workers == 1:
            # When the worker ends, the weights and the pages that it shares with zygote and standby stay.
            ladder.note_held(RungName.ZYGOTE, rest_bytes + idle.held_bytes - idle.own_bytes + resident_bytes)
    elif rest_bytes and not memory.workers:
        ladder.note_held(RungName.ZYGOTE, rest_bytes + resident_bytes)
    live.note_rest(rest_bytes / _MIB)
    light = live.builds_within(LIGHT_S)
    return IdleStats(
        live.record.function, rest_bytes / _MIB, _idle(workers), light, workers.inventory.used_s, live.since_s
    )


def _candidates(live: Live, private_bytes: float | None, *, weights: bool) -> Iterator[EvictionCandidate]:
    """Yield the steps down that a function can take now, from its present rung to the lowest.

    `private_bytes` is the private memory of its workers, or None if the workers must stay. With `weights`, fetched
    weights may also leave the memory.
    """
    workers, upper = live.workers, live.workers.rung
    if workers.warm_until_s is not None:
        # A prewarm signal still wants the function's workers, so they must stay.
        return
    spare = private_bytes is not None and _spare(workers)
    if not (spare or (_idle(workers) and upper in (RungName.ZYGOTE, RungName.RESIDENT))):
        return
    resident_bytes = float(workers.inventory.resident_bytes)
    freed = {RungName.READY: private_bytes, RungName.RESIDENT: resident_bytes}
    for lower in live.function.ladder.measured.spec.below(upper):
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
        return cls(workers.inventory.zygote_pid, tuple(pids))


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
    known = workers.function.ladder.measured.figures.held_bytes
    rests = any(role != "worker" for _, role, _ in workers.inventory.processes())
    held = {RungName.READY: bool(workers.replicas.ready), RungName.ZYGOTE: rests}
    return any(there and rung not in known for rung, there in held.items())


def _idle(workers: RevisionWorkers) -> bool:
    return not workers.replicas.total and not len(workers.revision.dispatcher.queue)


def _spare(workers: RevisionWorkers) -> bool:
    """Return True if a function has ready or parked workers that no call, no setting and no prewarm signal needs."""
    replicas, revision = workers.replicas, workers.revision
    calls = replicas.in_flight or replicas.starting or len(revision.dispatcher.queue)
    kept = revision.policy.scale.min or workers.warm_until_s is not None
    return bool(replicas.ready or replicas.parked) and not calls and not kept
