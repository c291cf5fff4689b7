"""Copies chunks from other places than the source, so that fewer chunks are fetched. Verifies each chunk.

Chunks may be in other snapshots on this machine (see `caching.related`), or on other nodes (see `peering`).
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, Self

from ...errors import CacheError
from ..publish import cannot_write
from .arrival import Arrival
from .landing import BOUNCE_BYTES, ShardTarget

COPIERS = 4
"""The most threads that copy by default. Copying and hashing release the interpreter lock."""
MOST_WRONG = 16
"""Copying ends when at least this many chunks, and more than half of all copied chunks, were wrong. The rest is fetched."""


class Lender(Protocol):
    """A place that may have the bytes of one chunk."""

    def copy(self, target: ShardTarget, begin: int, end: int, buffer: memoryview) -> str:
        """Fill bytes [begin, end) of a shard. Return their digest, or "" if the bytes are not available.

        Raise OSError if the bytes cannot be written.
        """


class Place(NamedTuple):
    """Bytes of an open file, from byte `offset` on, that may be a chunk. They are the chunk only if their digest is `digest`."""

    descriptor: int
    offset: int
    digest: str

    def copy(self, target: ShardTarget, begin: int, end: int, buffer: memoryview) -> str:
        """Copy the bytes of the file into the shard. Return "" also if they do not have the digest `digest`."""
        found = target.fill(begin, end, buffer, self._read_into)
        return found if found == self.digest else ""

    def _read_into(self, view: memoryview, done: int) -> int:
        """Read the bytes after the first `done` bytes. Return their number: 0 at the file's end, or if the file cannot be read."""
        try:
            return os.preadv(self.descriptor, [view], self.offset + done)
        except OSError:
            return 0


class ChunkReuse:
    """Copies the chunks in `places`, in their order, on threads of its own. The `with` block ends when the threads have ended.

    If `cancelled` is set, copying ends without an error. A chunk that has another digest, or cannot be read, stays
    missing. If most chunks are wrong, copying ends. Chunks that a reader waits for are copied next.
    """

    def __init__(
        self,
        arrival: Arrival,
        targets: Sequence[ShardTarget],
        places: Mapping[int, Lender],
        cancelled: threading.Event,
        copiers: int | None = None,
    ) -> None:
        """`copiers` is the number of threads, by default one for each processor, but at most COPIERS."""
        self._arrival, self._targets = arrival, targets
        self._places = OrderedDict(places)
        self._cancelled = cancelled
        self._lock = threading.Lock()
        self._error: CacheError | None = None
        self._right = self._wrong = 0
        arrival.on_demand(self._demand)
        self._threads = [
            threading.Thread(target=self._run, name="borrow", daemon=True)
            for _ in range(min(len(places), copiers or min(COPIERS, os.cpu_count() or 1)))
        ]

    def __enter__(self) -> Self:
        started = []
        try:
            for thread in self._threads:
                thread.start()
                started.append(thread)
        except RuntimeError:
            # The process may start no more threads. Continue with the threads that have started. Without any thread, all
            # chunks are fetched.
            self._threads = started
        return self

    def __exit__(self, kind: type[BaseException] | None, *failure: object) -> None:
        """Wait for the threads, or end them after an error. Raise CacheError if the files cannot be written."""
        if kind is not None:
            self._end()
        for thread in self._threads:
            thread.join()
        if kind is None and self._error is not None:
            raise self._error

    def _end(self) -> None:
        with self._lock:
            self._places.clear()

    def _demand(self, first: int, last: int) -> None:
        with self._lock:
            if self._places:
                for chunk in range(last, first - 1, -1):
                    if chunk in self._places:
                        self._places.move_to_end(chunk, last=False)

    def _next(self) -> tuple[int, Lender] | None:
        with self._lock:
            ended = not self._places or self._cancelled.is_set()
            return None if ended else self._places.popitem(last=False)

    def _run(self) -> None:
        buffer = memoryview(bytearray(BOUNCE_BYTES))
        while (item := self._next()) is not None:
            chunk, place = item
            extent = self._arrival.chunks.extent(chunk)
            target = self._targets[extent.shard]
            try:
                digest = place.copy(target, extent.begin, extent.end, buffer)
            except OSError as error:
                self._end()
                self._error = cannot_write(Path(target.name), error)
                return
            right = bool(digest) and self._arrival.chunks.accept(chunk, digest)
            if right:
                self._arrival.land(chunk)
            self._count(right=right)

    def _count(self, *, right: bool) -> None:
        with self._lock:
            self._right += right
            self._wrong += not right
            if self._wrong >= MOST_WRONG and self._wrong > self._right:
                self._places.clear()
