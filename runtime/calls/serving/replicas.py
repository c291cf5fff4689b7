"""Lists the replicas of one revision. The dispatcher reads the list; only the pool (reconciling/pool.py) changes it."""

from __future__ import annotations

from collections.abc import Iterator

from ..batching.assignment import choose, is_soonest
from .replica import Replica, ReplicaState


class Replicas:
    """The replicas of one revision whose workers have not ended."""

    def __init__(self) -> None:
        self._present: list[Replica] = []
        # The start time of each worker that is being forked.
        self._asked: list[float] = []
        self._past_completed = 0
        # The worker to which the last invocation was sent.
        self._last: Replica | None = None

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._present)

    def __len__(self) -> int:
        return len(self._present)

    @property
    def ready(self) -> list[Replica]:
        return [replica for replica in self._present if replica.state is ReplicaState.READY]

    @property
    def parked(self) -> list[Replica]:
        """The parked workers, the longest idle first."""
        parked = [replica for replica in self._present if replica.state is ReplicaState.PARKED]
        return sorted(parked, key=lambda replica: replica.idle_since_s)

    @property
    def idle(self) -> list[Replica]:
        """The ready workers without work, the longest idle first."""
        idle = [replica for replica in self.ready if not replica.outstanding.calls]
        return sorted(idle, key=lambda replica: replica.idle_since_s)

    @property
    def draining(self) -> int:
        return sum(replica.state is ReplicaState.DRAINING for replica in self._present)

    @property
    def starting(self) -> int:
        """The number of workers that are not ready yet: they are being forked, or restore their weights."""
        return len(self._asked) + sum(replica.state is ReplicaState.RESTORING for replica in self._present)

    @property
    def total(self) -> int:
        """The number of workers, including workers that are being forked."""
        return len(self._present) + len(self._asked)

    @property
    def in_flight(self) -> int:
        count = 0
        # Use a loop, because this runs for every invocation, and a generator takes twice the time.
        for replica in self._present:
            count += len(replica.outstanding.calls)
        return count

    @property
    def leaving(self) -> int:
        """The number of invocations at workers that drain."""
        draining = (one for one in self._present if one.state is ReplicaState.DRAINING)
        return sum(len(replica.outstanding.calls) for replica in draining)

    @property
    def completed(self) -> int:
        """The number of invocations that all workers have ended so far, including dead workers."""
        return self._past_completed + sum(replica.completed for replica in self._present)

    @property
    def asked_s(self) -> list[float]:
        """The start time of each worker that is not ready yet."""
        restoring = [one for one in self._present if one.state is ReplicaState.RESTORING]
        return [replica.activation.asked_s for replica in restoring] + list(self._asked)

    def started_s(self, now_s: float, most_s: float) -> float:
        """Return the sum over starting workers of the seconds since each began to start, at most `most_s` for each."""
        return sum(min(most_s, now_s - asked_s) for asked_s in self.asked_s)

    def named(self, name: str) -> Replica | None:
        """Return the worker of this name; None if it has ended."""
        return next((replica for replica in self._present if replica.name == name), None)

    def has(self, workers: int) -> bool:
        """Return True if at least this number of workers is ready or starting."""
        return len(self.ready) + self.starting >= workers

    def pick(self, now_s: float, usual_s: float) -> Replica | None:
        """Return the worker for the next invocation or batch; None if it should wait in the queue.

        Pick the last worker again while `is_soonest` is true for it. `usual_s` is the usual time of an invocation in the handler.
        """
        if self._last is None or not is_soonest(self._last, usual_s, now_s):
            self._last = choose(self._present, now_s)
        return self._last


class ReplicaList(Replicas):
    """The list of replicas, with the methods by which the pool changes it."""

    def note_asked(self, asked_s: float) -> None:
        """Learn that a worker is being forked. `asked_s` is the time of the request for it, in monotonic seconds."""
        self._asked.append(asked_s)

    def note_answered(self, asked_s: float) -> None:
        """Learn that the fork of the worker that was requested at `asked_s` has succeeded or failed."""
        self._asked.remove(asked_s)

    def add(self, replica: Replica) -> None:
        self._present.append(replica)

    def remove(self, replica: Replica) -> None:
        """Remove a worker that has ended."""
        self._present.remove(replica)
        self._past_completed += replica.completed
        self._last = None
