"""Decides which batch goes to which worker now, and when a worker is late. Calls that wait at a late worker go elsewhere.

It does no I/O: the caller sends batches, asks batches back and sets timers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

from .latency_curve import LatencyCurve
from .outstanding import Outstanding
from .prefetch import PREFETCH_S
from .queue import Item, Queue, Selection

# A full batch is sent this long before a worker is expected to be free, to cover the transfer over the link and the
# work of the event loop. If a worker is not free this long after the expected time, it is overdue.
AHEAD_S = 0.003
# Tolerance: without it, a timer that fires slightly early, because of rounding, would be set again and again.
NOW_S = 1e-4
# A worker without a free slot is late if all its running calls exceed their usual time by this much. On a busy machine,
# a usual call may take this much longer, because its process has to wait for a processor.
LATE_S = 0.01
# A worker without a free slot may prefetch another invocation only for this long after its newest running invocation started.
# Later, that invocation is not short. The time is longer than PREFETCH_S, because a loaded gateway reads results late.
SHORT_S = 0.005
# The process of an idle worker needs this time, including processor time, to wake up and to receive an invocation.
WAKE_S = 0.0002


class WorkerView(Protocol):
    @property
    def outstanding(self) -> Outstanding[Any]: ...


class Candidate(WorkerView, Protocol):
    """A worker that may get the next invocation or batch."""

    @property
    def credit(self) -> int:
        """The number of further invocations or batches that may be sent to it now, although they may have to wait there."""

    @property
    def prefetches(self) -> bool:
        """True if it takes more invocations than it runs at a time, because its latest invocations were short."""


T = TypeVar("T", bound=Item)
W = TypeVar("W", bound=WorkerView)
C = TypeVar("C", bound=Candidate)


def choose(workers: Iterable[C], now_s: float) -> C | None:
    """Return the least busy worker that takes another invocation or batch; None if none of them does.

    If several workers are equally busy, return the newest, so that older workers can stop.
    """
    best, least = None, (True, 0)
    for worker in workers:
        if takes(worker, now_s):
            load = worker.outstanding.load
            rank = (load >= worker.outstanding.slots, load)
            if best is None or rank <= least:
                best, least = worker, rank
    return best


def takes(worker: Candidate, now_s: float) -> bool:
    """Return True if the next invocation or batch has a slot at a worker, or waits there only for short invocations."""
    if worker.credit <= 0:
        return False
    outstanding = worker.outstanding
    return outstanding.load < outstanding.slots or now_s - outstanding.newest_start_s <= SHORT_S


def is_soonest(worker: Candidate, usual_s: float, now_s: float) -> bool:
    """Return True if a busy worker runs the next invocation sooner than an idle worker, whose process has to be woken.

    `usual_s` is the usual time of an invocation in the handler; 0 if it is unknown, or if the handler takes batches.
    """
    # This runs for every invocation, so it calls no method before it must.
    outstanding = worker.outstanding
    load = len(outstanding.calls)
    return (
        0.0 < load * usual_s <= WAKE_S
        and (now_s - outstanding.newest_start_s <= SHORT_S or load < outstanding.slots)
        and worker.credit > 0
    )


def late_after_s(worker: Candidate, curve: LatencyCurve) -> float:
    """Return the time after which a worker without a free slot is late, counted from the start of its newest running call."""
    # Do not use the curve if the worker prefetches: the curve is of all workers, and may not show yet that this worker's calls are short.
    usual_s = PREFETCH_S if worker.prefetches else curve.typical(worker.outstanding.largest)
    return usual_s + LATE_S


def assign(
    queue: Queue[T], pick: Callable[[], W | None], ready: Iterable[W], now_s: float
) -> Iterator[tuple[W | None, Selection[T]]]:
    """Yield pairs of a worker and a selection. Carry out each selection before you ask for the next pair.

    The worker is None if the selection has no batch, but only a time until which to wait. `pick` returns a worker
    that takes another invocation or batch; None if no worker does.
    """
    while len(queue):
        worker, start_s = pick(), now_s
        if worker is None:
            worker, start_s = _next_free(queue, ready, now_s)
            if worker is None:
                return
            if start_s - now_s > AHEAD_S + NOW_S:
                yield None, Selection(wait_until_s=start_s - AHEAD_S)
                return
        selection = queue.next_batch(start_s)
        yield worker, selection
        if selection.wait_until_s is not None:
            return


def _next_free(queue: Queue[T], ready: Iterable[W], now_s: float) -> tuple[W | None, float]:
    """Return the worker that is expected to be free first, and when. Unless a full batch waits, the worker is None."""
    if queue.forecast.max_batch == 1 or len(queue) < queue.forecast.max_batch:
        return None, now_s
    full = [worker for worker in ready if worker.outstanding.load == worker.outstanding.slots]
    expected = [worker.outstanding.expected_at(now_s, queue.curve) for worker in full]
    # Return no worker if one is overdue, because it is then unknown which worker will be free first.
    if not full or min(expected) < now_s - AHEAD_S:
        return None, now_s
    soonest_s = min(expected)
    return full[expected.index(soonest_s)], max(now_s, soonest_s)
