"""Assignment: which batch goes to which worker now. Pure: the caller sends, and sets timers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

from .outstanding import Outstanding
from .queue import Item, Queue, Selection

# A full batch is sent this long before a worker is free, to cover the way there and the event loop's work.
AHEAD_S = 0.003
# Less than this from now is now: a timer that fires a rounding error early must not be set again for ever.
NOW_S = 1e-4


class WorkerView(Protocol):
    @property
    def outstanding(self) -> Outstanding[Any]: ...


T = TypeVar("T", bound=Item)
W = TypeVar("W", bound=WorkerView)


def assign(
    queue: Queue[T], pick: Callable[[], W | None], ready: Iterable[W], now_s: float
) -> Iterator[tuple[W | None, Selection[T]]]:
    """Yield a worker and what to do; carry out each step before asking for the next.

    `pick` returns a worker with room; `ready` are all that may have room soon.
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
    """Return the worker that will be free first, and when, if a full batch waits for it."""
    if queue.max_batch == 1 or len(queue) < queue.max_batch:
        return None, now_s
    full = [worker for worker in ready if worker.outstanding.batches == worker.outstanding.slots]
    expected = [worker.outstanding.expected_at(now_s, queue.curve) for worker in full]
    # If one is overdue, it is not known when it will be free, or whether another will be free sooner.
    if not full or min(expected) < now_s - AHEAD_S:
        return None, now_s
    soonest_s = min(expected)
    return full[expected.index(soonest_s)], max(now_s, soonest_s)
