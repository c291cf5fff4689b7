"""The batcher: gathers invocations inside a worker. The policy is pure; the queue below carries it out."""

from __future__ import annotations

import queue
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

# A worker whose invocations are shorter than the way to the gateway and back holds so much work in advance.
PREFETCH_S = 0.002
MAX_PREFETCH = 32


@dataclass(frozen=True, slots=True)
class Load:
    """What the policy may look at."""

    queued: int
    max_size: int


def decide(load: Load) -> int:
    """How many to take now: what is there, up to the limit. Never waits (see reference/batching.md, "greedy")."""
    return min(load.queued, load.max_size)


def window(slots: int, exec_s: float | None) -> int:
    """How many invocations a worker asks for at a time: what it can run, and for short ones some in advance.

    `exec_s` is the recent time of one dispatch, None before the first. Advance work only pays where the round trip to
    the gateway is a large part of it; for longer ones it would wait here while another worker is free. The advance is a
    power of two, so that a jittering measurement does not make a stream of window changes.
    """
    if exec_s is None or exec_s >= PREFETCH_S:
        return slots
    fits = min(MAX_PREFETCH, int(PREFETCH_S / max(exec_s, 1e-6)))
    return slots + (1 << fits.bit_length() - 1 if fits else 0)


class Batcher(Generic[T]):
    """A queue from the link's thread to the runner's threads, from which groups are taken."""

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        self._queue: queue.SimpleQueue[T | None] = queue.SimpleQueue()

    def put(self, item: T) -> None:
        self._queue.put(item)

    def take(self) -> list[T]:
        """Blocks until something is there; empty once closed."""
        first = self._queue.get()
        return [] if first is None else self._gather(first)

    def take_nowait(self) -> list[T]:
        """A group if there is one now, else empty."""
        try:
            first = self._queue.get_nowait()
        except queue.Empty:
            return []
        if first is None:
            self._queue.put(None)  # closed: leave it for `take`
            return []
        return self._gather(first)

    def close(self, takers: int = 1) -> list[T]:
        """Ends every `take`, and returns what nobody took."""
        left: list[T] = []
        while True:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                break
            if item is not None:
                left.append(item)
        for _ in range(takers):
            self._queue.put(None)
        return left

    def _gather(self, first: T) -> list[T]:
        group = [first]
        wanted = decide(Load(self._queue.qsize() + 1, self.max_size))
        while len(group) < wanted:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                break
            if item is None:
                self._queue.put(None)
                break
            group.append(item)
        return group
