"""Carries out the rows and the grants of one revision.

Only this module makes the pool and the zygote supervisor start and end processes, and makes the held weights leave the
memory. It decides nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from ....errors import PilotflameError, for_callers
from ...calls.serving.call_ends import CallEnd, replaced
from ...calls.serving.replica import Replica
from ...ground.telemetry.decisions import describe
from ...ground.telemetry.rung_name import RungName
from ...ground.telemetry.timeline import StartCause
from ..launching.launcher import WorkerSource
from ..scaling.claims import Grant
from ..scaling.load import BUFFER, CALLS
from ..scaling.placement import MemoryByGpu
from ..scaling.revision_state import Phase
from ..scaling.seen import Seen
from ..scaling.table import Aim, AtRest, Rank, Row
from .drain import MIN_TEARDOWN_S, Drain
from .revision_parts import RevisionParts


class CarryOut:
    """The steps of one revision."""

    def __init__(self, one: RevisionParts) -> None:
        self._one, self._fetches = one, bool(one.spec.remote)

    # -- a row

    def row(self, row: Row, seen: Seen, planned: Sequence[MemoryByGpu | None]) -> bool:
        """Start, wake, stop and park workers until the revision has the number of workers that the row names.

        `planned` has the GPU memory of each worker that starts. It is empty for workers without GPUs. Return True if
        workers woke, stop or park: then the revision has a new row.
        """
        missing = row.start(seen)
        if not missing:
            self._one.starts.died = False
        if missing and seen.parked:
            # The most recently used worker wakes first.
            parked = self._one.replicas.parked[::-1]
            if self._sent(self._one.pool.wake(parked, missing), seen.queued):
                return True
        # Parked workers that cannot wake count against `max`, so they have to end before other workers start.
        room = max(0, row.most - seen.held)
        if missing:
            self._start(min(missing, room), row, seen, planned)
        stop, park = row.stop(seen) + min(seen.parked, max(0, missing - room)), row.park(seen)
        if stop:
            self._stop(stop, seen)
        if park:
            # The longest idle worker parks first.
            self._one.pool.park(self._one.replicas.idle[:park])
        return stop + park > 0

    def at_rest(self, rest: AtRest) -> None:
        """Launch or end the zygote and the standby, and release or drop the weights, as a row says."""
        zygote, standby = self._one.pool.zygote, self._one.pool.standby
        if rest.zygote is Aim.END:
            zygote.rest()
        elif rest.zygote is Aim.WANT:
            zygote.launch()
        if rest.standby is Aim.WANT:
            standby.replenish()
        elif rest.standby is Aim.END:
            standby.stop()
        if self._fetches and rest.weights is not RungName.READY:
            self._one.pool.weights.release()
            if rest.weights is RungName.LOCAL and self._one.pool.weights.resident_bytes:
                self._one.pool.weights.drop()

    def _start(self, workers: int, row: Row, seen: Seen, planned: Sequence[MemoryByGpu | None]) -> None:
        """Start workers for the proposals of a row."""
        one, number = self._one, 0
        for proposal, count in row.causes(seen, workers):
            if not seen.awake:
                one.function.ladder.note_start(one)
            cause = self._cause(seen)
            ahead = proposal.rank is Rank.AHEAD and proposal.cause != BUFFER
            signal = proposal.cause if ahead and cause is not StartCause.DEPLOY else ""
            one.pool.start(count, cause, signal, planned[number : number + count])
            number += count
            if cause is not StartCause.DEPLOY:
                self._note("start", proposal.cause, seen, workers=count)
        # Check the budget after the present look has ended, because the check may look at the revision.
        asyncio.get_running_loop().call_soon(one.function.account.check)

    def _cause(self, seen: Seen) -> StartCause:
        """Return why workers start now."""
        if self._one.phase is Phase.PROVING:
            return StartCause.DEPLOY
        if self._one.starts.died:
            return StartCause.CRASH
        return StartCause.SCALE_UP if seen.awake else StartCause.ZERO

    def _sent(self, woken: int, queued: int) -> int:
        """If workers woke, send waiting invocations to them. Return `woken`."""
        if woken:
            self._one.function.decisions.note("wake", CALLS, workers=woken, queued=queued)
            self._one.starts.note_workers(self._one.replicas)
            self._one.revision.dispatcher.dispatch()
        return woken

    def _stop(self, workers: int, seen: Seen) -> None:
        """Drain workers: first parked workers, then idle workers (the longest idle first), then the least busy."""
        one = self._one
        busy = [each for each in one.replicas.ready if each.outstanding.calls]
        busy.sort(key=lambda each: each.outstanding.load)
        one.pool.stop([*one.replicas.parked, *one.replicas.idle, *busy][:workers])
        if one.phase is not Phase.PROVEN:
            retired = "retired" if one.drain.end is None else "shutdown"
            scale = one.revision.policy.scale
            idle = "elsewhere" if scale.elsewhere and seen.held > scale.max else "idle"
            cause = one.function.stopped or (retired if one.phase is Phase.RETIRING else idle)
            self._note("stop", cause, seen, workers=workers, recent=seen.recent.workers)

    # -- a grant of the allocation

    def grant(self, grant: Grant, row: Row, seen: Seen) -> None:
        """Start, wake, park, stop and end workers as the allocation says. End the standby if the allocation needs its
        memory.
        """
        one, cause = self._one, grant.limit.name if grant.limit is not None else "gpus"
        for key in grant.stop:
            if isinstance(key, Replica):
                one.pool.stop([key])
                one.logs.write("gateway", self._note("stop", cause, seen, workers=1))
            else:
                self.renew_standby()
        if ended := [key for key in grant.end if isinstance(key, Replica)]:
            calls = self.end(ended, replaced(one.spec.function, one.node.limits.drain_s), MIN_TEARDOWN_S)
            one.logs.write("gateway", self._note("end", "replaced", seen, workers=len(ended), calls=calls))
        one.pool.park([key for key in grant.park if isinstance(key, Replica)], given=True)
        wakes = [key for key in grant.wake if isinstance(key, Replica)]
        self._sent(one.pool.wake(wakes, len(wakes)), seen.queued)
        if grant.start:
            self._start(len(grant.start), row, seen, grant.start)

    def note_refused(self, limit: str, most: int, missing: int, seen: Seen) -> None:
        """Record that a limit that revisions share keeps `missing` workers from starting."""
        self._note("refuse", limit, seen, **{"workers": missing, limit: most})

    def renew_standby(self) -> bool:
        """End the standby, because workers need its GPU memory, or because it had no GPU memory to rehearse.

        The next look forks a new standby. Return False if there is no standby.
        """
        if not self._one.pool.standby.end():
            return False
        self._one.node.reconciler.look_by(self._one.key, time.monotonic())
        return True

    # -- the life of the revision

    async def open(self) -> WorkerSource:
        """Launch the zygote for a deploy. Raise HandlerError or LauncherError."""
        return await self._one.pool.zygote.open()

    async def open_ahead(self, *, shared_only: bool) -> None:
        """Launch the zygote. A failure is only logged.

        If `shared_only`, launch only the processes that the zygote shares with zygotes of other revisions.
        """
        await self._one.pool.zygote.warm(shared_only=shared_only)

    def end(self, replicas: Sequence[Replica], end: CallEnd, teardown_s: float) -> int:
        """End workers and their invocations. Return the number of the invocations."""
        calls = sum(self._one.revision.dispatcher.end_started(replica, end) for replica in replicas)
        for replica in replicas:
            replica.relieve(teardown_s)
        return calls

    async def close(self, drain: Drain) -> None:
        """End all processes of a revision that retires."""
        one = self._one
        if drain.end is not None and (busy := [each for each in one.replicas if each.outstanding.calls]):
            calls = self.end(busy, drain.end, drain.teardown_s)
            one.function.decisions.note("end", "shutdown", workers=len(busy), calls=calls)
            drain.cut = calls
        await one.pool.close(drain.teardown_s)

    async def hold_adapter(self, replica: Replica, name: str) -> None:
        """Fetch an adapter that a worker needs. Tell the worker how long the bytes may take to arrive, or why they cannot be fetched."""
        try:
            held: float | PilotflameError = await self._one.pool.weights.fetch_on_use(name)
        except PilotflameError as error:
            self._one.logs.write(
                "gateway", f"adapter {name[:80]} could not be fetched: {error.whole}", "error"
            )
            held = for_callers(error)
        if not replica.child.link.closed:
            replica.tell_held(name, held)

    def _note(self, action: str, cause: str, seen: Seen, **figures: float) -> str:
        """Record a decision about the number of workers, with the figures behind it. Return the decision in words."""
        load = seen.load
        predicted = {"work_s": load.work_s, "wake_s": load.wake_s, "lasting": load.lasting} if load else {}
        return describe(self._one.function.decisions.note(
            action, cause, **figures, queued=seen.queued, in_flight=seen.in_flight,
            starting=seen.starting, ready=seen.ready, **predicted,
        ))  # fmt: skip
