"""Decides which batch goes to which worker now. It does no I/O: the caller sends batches and sets timers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

from .outstanding import Outstanding
from .queue import Item, Queue, Selection

# A full batch is sent this long before a worker is expected to be free, to cover the transfer over the link and the
# work of the event loop. If a worker is not free this long after the expected time, it is overdue.
AHEAD_S = 0.003
# Tolerance: without it, a timer that fires slightly early, because of rounding, would be set again and again.
NOW_S = 1e-4


class WorkerView(Protocol):
    @property
    def outstanding(self) -> Outstanding[Any]: ...


T = TypeVar("T", bound=Item)
W = TypeVar("W", bound=WorkerView)


def assign(
    queue: Queue[T], pick: Callable[[], W | None], ready: Iterable[W], now_s: float
) -> Iterator[tuple[W | None, Selection[T]]]:
    """Yield pairs of a worker and a selection. Carry out each selection before you ask for the next pair.

    The worker is None if the selection has no batch, but only a time until which to wait. `pick` returns a worker with
    room; None if no worker has room.
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
    if queue.max_batch == 1 or len(queue) < queue.max_batch:
        return None, now_s
    full = [worker for worker in ready if worker.outstanding.batches == worker.outstanding.slots]
    expected = [worker.outstanding.expected_at(now_s, queue.curve) for worker in full]
    # If a worker is overdue, the worker that will be free first is unknown.
    if not full or min(expected) < now_s - AHEAD_S:
        return None, now_s
    soonest_s = min(expected)
    return full[expected.index(soonest_s)], max(now_s, soonest_s)
