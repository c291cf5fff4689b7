"""Observes the load of a revision: how many calls wait and run, their predicted time, and the workers needed so far."""

from __future__ import annotations

import math

from ...calls.serving.revision import Revision
from ...ground.settings.scale_spec import ScaleSpec
from ..scaling.load import buffered, wanted
from ..scaling.recent_load import RecentLoad
from ..scaling.recent_need import RecentNeed
from ..scaling.seen import Load, Seen
from .pool import Pool


class Demand:
    """The observations that decide how many workers one revision has."""

    def __init__(self, pool: Pool, revision: Revision) -> None:
        self._pool, self._replicas, self._revision = pool, pool.replicas, revision
        self._dispatcher = revision.dispatcher
        self._need, self._load = RecentNeed(), RecentLoad()

    def note_need(self, workers: int, now_s: float) -> None:
        """Learn that this number of workers is needed now, for a reason other than the load."""
        self._need.note(now_s, workers)

    def see(self, spec: ScaleSpec, now_s: float, arriving: int = 0) -> Seen:
        """Return the present observations, and remember how many workers were needed since `see` was last called.

        `arriving` invocations are about to be queued.
        """
        replicas, queued = self._replicas, len(self._dispatcher.queue) + arriving
        leaving, starting, ready = replicas.leaving, replicas.starting, len(replicas.ready)
        in_flight = replicas.in_flight - leaving
        load = self._note_load(queued, starting, now_s)
        peak = Seen(queued, max(in_flight, self._revision.peak), starting, ready, load=load)
        # This need leaves out the workers that signals and the owner ask for: other proposals keep them.
        self._need.note(now_s, buffered(spec, peak))
        self._revision.peak = in_flight
        parks_s = spec.park_after_s if spec.park_after_s < math.inf else 0.0
        self._need.forget(now_s, max(spec.scale_down_s, parks_s))
        return Seen(
            queued, in_flight, starting, ready, tuple(replica.idle_since_s for replica in replicas.idle), load,
            self._need.peak(now_s, spec.scale_down_s), tuple(replica.idle_since_s for replica in replicas.parked),
            self._need.peak(now_s, parks_s), leaving,
        )  # fmt: skip

    def ahead(self, spec: ScaleSpec, invocations: int, now_s: float) -> int:
        """Return how many workers `invocations` invocations need. They run already, or are about to come."""
        replicas, in_flight = self._replicas, self._replicas.in_flight
        queued, starting = max(len(self._dispatcher.queue), invocations - in_flight), replicas.starting
        load = self._predict(queued, starting, now_s)
        return wanted(spec, Seen(queued, in_flight, starting, len(replicas.ready), load=load))

    def _note_load(self, queued: int, starting: int, now_s: float) -> Load | None:
        """Remember the present load, and return its predicted times."""
        queue, late = self._dispatcher.queue, self._dispatcher.late
        lasting = self._load.note(now_s, self._pool.load_s(now_s), queued, queue.admitted, queue.emptied)
        if (load := self._predict(queued, starting, now_s)) is None:
            return None
        return load._replace(stuck=late.stuck() if queued else 0.0, lasting=lasting)

    def _predict(self, queued: int, starting: int, now_s: float) -> Load | None:
        """Return the predicted times of a load; None while the duration of an invocation is unknown."""
        durations = self._dispatcher.durations
        if (work_s := durations.work_s(queued)) is None:
            return None
        started_s = self._replicas.started_s(now_s, durations.activation_s) if starting else 0.0
        each_s = durations.work_s(1) or 0.0
        return Load(work_s, durations.activation_s, started_s, stuck=0.0, lasting=0.0, each_s=each_s)
