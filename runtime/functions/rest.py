"""Limits what functions hold at rest: the zygotes and standbys that wait for their next request.

A function that is not in use loses its zygote and its standby, and its next cold start makes them again:

- if it is light, which means that its zygote was ready within LIGHT_S, and was not called for UNUSED_S after
  its deploy. After a start of the gateway, a light function has neither until it is called.
- if all functions together hold more than the limit: the function that was least recently used, and so on.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ...machine import memory_bytes
from ..launching.launcher import Launcher
from ..serving.revision import Revision
from ..telemetry.background import BackgroundTasks
from .live import Live, memory_of

LIGHT_S = 0.25
UNUSED_S = 300.0
# The memory is measured this long after a worker started or a function was deployed: by then the next standby
# has been forked. While the limit is exceeded, it is measured again after RECHECK_S.
SETTLE_S = 5.0
RECHECK_S = 30.0
# Without a limit in the settings, functions at rest may hold this share of the machine's memory.
SHARE = 1 / 8
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class RestStats:
    """What one function holds at rest, and when it was used."""

    name: str
    held_mb: float
    idle: bool
    """True if it has no worker and no invocation."""
    light: bool
    used_s: float
    """`Pool.used_s`: when a worker that had run invocations ended last; 0 if none has."""
    since_s: float
    """When its revision became live."""


def functions_to_rest(
    stats: Iterable[RestStats], shared_mb: float, limit_mb: float, now_s: float
) -> list[str]:
    """Return the functions that should lose their zygotes. `shared_mb` is held for all functions together."""
    stats = list(stats)
    unused = [one for one in stats if one.light and not one.used_s and now_s - one.since_s >= UNUSED_S]
    chosen = {one.name: one for one in unused if one.idle and one.held_mb}
    left_mb = shared_mb + sum(one.held_mb for one in stats if one.name not in chosen)
    for one in sorted(stats, key=lambda one: (one.used_s, one.since_s)):
        if left_mb <= limit_mb:
            break
        if one.idle and one.held_mb and one.name not in chosen:
            chosen[one.name] = one
            left_mb -= one.held_mb
    return list(chosen)


def next_check_s(stats: Iterable[RestStats], now_s: float) -> float | None:
    """Return after how many seconds one of these functions may have to rest; None if none will."""
    waits = [one.since_s + UNUSED_S - now_s for one in stats if one.light and not one.used_s and one.held_mb]
    # One that is due but in use is checked like an exceeded limit.
    return min((max(SETTLE_S, wait_s) if wait_s > 0 else RECHECK_S for wait_s in waits), default=None)


class Rest:
    """Measures what the functions hold at rest when that may have changed, and keeps it below the limit."""

    def __init__(
        self, functions: Callable[[], Sequence[Live]], launcher: Launcher, tasks: BackgroundTasks,
        limit_mb: int | None,
    ) -> None:  # fmt: skip
        """`functions` returns all live functions."""
        self._functions, self._launcher, self._tasks = functions, launcher, tasks
        self._limit_mb = memory_bytes() * SHARE / _MIB if limit_mb is None else limit_mb
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._check_at_s = math.inf
        self._checking = False
        # By function: its processes when they were measured, and the MiB that they held.
        self._measured: dict[str, tuple[list[int], float]] = {}

    def note_change(self, *_: str) -> None:
        """Check soon: a worker started, or a function was deployed or deleted. Arguments are ignored."""
        self._check_in(SETTLE_S)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check_in(self, delay_s: float) -> None:
        at_s = time.monotonic() + delay_s
        if self._checking or at_s >= self._check_at_s:
            return
        self.close()
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
        """Let functions rest. Return after how many seconds to check again, None for no further check."""
        shared_mb = await asyncio.to_thread(_held_mb, self._launcher.shared_pids())
        stats = [await self._measure(live) for live in self._functions()]
        self._measured = {one.name: self._measured[one.name] for one in stats}
        now_s = time.monotonic()
        resting = set(functions_to_rest(stats, shared_mb, self._limit_mb, now_s))
        for live in self._functions():
            # It may have been called during the measurement.
            if live.record.function in resting and _idle(live.revision):
                live.revision.pool.zygote.rest()
                live.note_rest(0.0)
                live.logs.write("gateway", "the zygote ended to save memory; the next call launches it again")
        if shared_mb + sum(one.held_mb for one in stats) > self._limit_mb:
            self._launcher.end_unused()
            return RECHECK_S
        return next_check_s([one for one in stats if one.name not in resting], now_s)

    async def _measure(self, live: Live) -> RestStats:
        name, pool = live.record.function, live.revision.pool
        pids = pool.zygote.pids
        if self._measured.get(name, ((), 0.0))[0] != pids:
            self._measured[name] = pids, await asyncio.to_thread(_held_mb, pids)
        held_mb = self._measured[name][1]
        live.note_rest(held_mb)
        return RestStats(
            name, held_mb, _idle(live.revision), live.builds_within(LIGHT_S), pool.used_s, live.since_s
        )


def _idle(revision: Revision) -> bool:
    pool = revision.pool
    return not pool.replicas and not pool.starting and not len(revision.dispatcher.queue)


def _held_mb(pids: list[int]) -> float:
    """Return the memory of processes in MiB. Pages that several processes share count in equal parts (PSS)."""
    return sum(process.pss_mb for pid in pids for process in memory_of(pid, "", ""))
