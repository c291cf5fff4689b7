"""Counts the processes of one revision, and finds its present rung."""

from __future__ import annotations

import time

from ...calls.serving.replica import Replica
from ...ground.telemetry.metrics import WorkerCounts
from ...ground.telemetry.rung_name import RungName
from .revision_parts import RevisionParts


class Inventory:
    """The processes and the weights of one revision, for its status, the metrics and the measurement of memory."""

    def __init__(self, one: RevisionParts) -> None:
        self._one = one

    @property
    def resident_bytes(self) -> int:
        """The number of bytes of the fetched weights that are in memory."""
        return self._one.pool.weights.resident_bytes

    @property
    def zygote_pid(self) -> int | None:
        return source.zygote_pid if (source := self._one.pool.zygote.source) is not None else None

    @property
    def activations(self) -> int:
        """The number of workers that were started, except the workers that deploys have started."""
        return self._one.pool.activations

    @property
    def used_s(self) -> float:
        """The latest time at which a worker ended that had run invocations; 0 before the first such end."""
        return self._one.pool.used_s

    @property
    def exist(self) -> bool:
        """True if there is a zygote or a worker, or one of them is being started."""
        return self._one.pool.zygote.exists or self._one.replicas.total > 0

    def processes(self) -> list[tuple[int, str, str]]:
        """Return the pid, the role and the name of each process of the revision."""
        rows = [(replica.child.pid, "worker", replica.name) for replica in self._one.replicas]
        if (standby := self._one.pool.standby.child) is not None:
            rows.append((standby.pid, "standby", standby.name))
        return rows if (pid := self.zygote_pid) is None else [*rows, (pid, "zygote", "zygote")]

    @property
    def rung(self) -> RungName:
        """The present rung, among the rungs that the ladder plans. It is READY even if all workers are parked."""
        if self._one.replicas.ready or self._one.replicas.parked:
            return RungName.READY
        if self._one.pool.zygote.source is not None:
            return RungName.ZYGOTE
        return RungName.RESIDENT if self.resident_bytes else RungName.LOCAL

    @property
    def stands_on(self) -> RungName:
        """The present rung, as the status shows it. It is PARKED if all workers are parked."""
        rung = self.rung
        return RungName.PARKED if rung is RungName.READY and not self._one.replicas.ready else rung

    def worker_counts(self) -> WorkerCounts:
        replicas, pool, standby = self._one.replicas, self._one.pool, self._one.pool.standby
        busy_s, ready_s = pool.worked_s(time.monotonic())
        return WorkerCounts(
            queued=len(self._one.revision.dispatcher.queue), in_flight=replicas.in_flight, starting=replicas.starting,
            ready=len(replicas.ready), parked=len(replicas.parked), draining=replicas.draining,
            standby=standby.child is not None and standby.primed, zygote=pool.zygote.source is not None,
            busy_s=busy_s, ready_s=ready_s, deaths=self._one.starts.unexpected_ends,
        )  # fmt: skip

    def devices(self, replica: Replica) -> float:
        """Return the number of GPUs that a worker uses: the sum of the shares of GPUs in its booking.

        Without a booking, return 1 if the worker uses a device, else 0.
        """
        placed = self._one.node.gpus.share(replica)
        return float(replica.start.uses_device) if placed is None else placed
