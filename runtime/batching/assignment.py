"""The handing out: which group goes to which worker now, and when to look again. Pure: the caller sends and sets timers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from .latency_curve import LatencyCurve
from .queue import Item, Queue

# A full group is sent to a worker so long before it will need one: the way there, and what else the loop has to do.
AHEAD_S = 0.003
# What is nearer than that is now: a look set for an instant must not find itself a rounding error too early, for ever.
NOW_S = 1e-4


class OutstandingView(Protocol):
    """What one worker was given: asked of each that is ready."""

    @property
    def groups(self) -> int: ...
    @property
    def slots(self) -> int: ...
    def expected_at(self, now_s: float, curve: LatencyCurve) -> float:
        """When one of its lanes should be free; in the past if that has not come true."""
        ...


class WorkerView(Protocol):
    @property
    def given(self) -> OutstandingView: ...


T = TypeVar("T", bound=Item)
W = TypeVar("W", bound=WorkerView)


@dataclass(slots=True)
class Assignment(Generic[T, W]):
    """Send `taken` to `worker`, refuse `refused`, look again at `look_at_s`: whatever of these is there."""

    worker: W | None = None
    taken: list[T] = field(default_factory=list)
    refused: list[T] = field(default_factory=list)
    look_at_s: float | None = None


def hand_out(
    queue: Queue[T], pick: Callable[[], W | None], ready: Iterable[W], now_s: float
) -> Iterator[Assignment[T, W]]:
    """What to do now, step by step: each is to be carried out before the next is asked for.

    `pick` finds a worker that has room, `ready` are all that may have some soon.
    """
    while len(queue):
        worker, start_s = pick(), now_s
        if worker is None:
            worker, start_s = _nearly_free(queue, ready, now_s)
            if worker is None:
                return
            if start_s - now_s > AHEAD_S + NOW_S:
                yield Assignment(look_at_s=start_s - AHEAD_S)
                return
        found = queue.next(start_s)
        yield Assignment(worker, found.taken, found.refused, found.wait_until_s)
        if found.wait_until_s is not None:
            return


def _nearly_free(queue: Queue[T], ready: Iterable[W], now_s: float) -> tuple[W | None, float]:
    """The worker that will be free next if a full group waits for it, and when; nobody otherwise."""
    if queue.limit == 1 or len(queue) < queue.limit:
        return None, now_s
    full = [worker for worker in ready if worker.given.groups == worker.given.slots]
    expected = [worker.given.expected_at(now_s, queue.curve) for worker in full]
    if not full or min(expected) < now_s - AHEAD_S:
        return None, now_s  # late: nobody knows when it will be free, or whether another is sooner
    soonest_s = min(expected)
    return full[expected.index(soonest_s)], max(now_s, soonest_s)
