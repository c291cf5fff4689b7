"""Tells the autoscaler what a revision's load is, what it will take, and how many workers it needed of late."""

from __future__ import annotations

from ..scaling import autoscaler
from ..scaling.recent_load import RecentLoad
from ..scaling.recent_need import RecentNeed
from .dispatcher import Dispatcher
from .pool import Pool


class Demand:
    """The numbers of one revision on which its number of workers depends."""

    def __init__(self, pool: Pool, dispatcher: Dispatcher) -> None:
        self._pool, self._dispatcher = pool, dispatcher
        self._need, self._load = RecentNeed(), RecentLoad()
        # The largest number of running invocations since the last call of `stats`.
        self._peak = 0

    def note_running(self, in_flight: int) -> None:
        """Learn how many invocations run, while that is too few for another decision."""
        self._peak = max(self._peak, in_flight)

    def note_need(self, workers: int, now_s: float) -> None:
        """Learn that so many workers are needed now, for other reasons than the load."""
        self._need.note(now_s, workers)

    def stats(self, spec: autoscaler.ScaleSpec, prewarm: int, now_s: float) -> autoscaler.Stats:
        """Return the present numbers, and remember how many workers were needed since the last call."""
        pool, queued, in_flight = self._pool, len(self._dispatcher.queue), self._pool.in_flight
        idle_since_s = tuple(replica.idle_since_s for replica in pool.idle())
        parked_since_s = tuple(replica.idle_since_s for replica in pool.parked)
        starting, ready = pool.starting, len(pool.ready)
        load = self._predict(queued, starting, now_s)
        peak = max(in_flight, self._peak)
        # What is wanted ahead of need is kept as long as its signal says.
        self._need.note(
            now_s, autoscaler.wanted(spec, autoscaler.Stats(queued, peak, starting, ready, load=load))
        )
        self._peak = in_flight
        recent = self._need.peak(now_s, spec.scale_down_s)
        return autoscaler.Stats(
            queued, in_flight, starting, ready, idle_since_s, prewarm, load, *recent, parked_since_s
        )

    def ahead(self, spec: autoscaler.ScaleSpec, invocations: int, now_s: float) -> int:
        """Return how many workers are wanted for so many invocations, which run already or are about to come."""
        pool, in_flight = self._pool, self._pool.in_flight
        queued, wake_s = (
            max(len(self._dispatcher.queue), invocations - in_flight),
            self._dispatcher.activation_s,
        )
        starting, load = pool.starting, None
        if (work_s := self._dispatcher.work_s(queued)) is not None:
            started_s = pool.started_s(now_s, wake_s) if starting else 0.0
            load = autoscaler.Load(work_s, wake_s, started_s, stuck=0.0, lasting=0.0)
        return autoscaler.wanted(
            spec, autoscaler.Stats(queued, in_flight, starting, len(pool.ready), load=load)
        )

    def _predict(self, queued: int, starting: int, now_s: float) -> autoscaler.Load | None:
        """Return what the load will take; None while it is not known how long invocations take."""
        pool, wake_s, queue = self._pool, self._dispatcher.activation_s, self._dispatcher.queue
        lasting = self._load.note(now_s, pool.load_s(now_s), queued, queue.admitted, queue.emptied)
        if (work_s := self._dispatcher.work_s(queued)) is None:
            return None
        started_s = pool.started_s(now_s, wake_s) if starting else 0.0
        load = autoscaler.Load(work_s, wake_s, started_s, 0.0, lasting)
        if not queued:
            return load
        overdue_s = now_s - load.delay_s - self._dispatcher.longest_s()
        stuck = sum(replica.outstanding.overdue(overdue_s) for replica in pool.ready)
        return autoscaler.Load(work_s, wake_s, started_s, stuck, lasting) if stuck else load
