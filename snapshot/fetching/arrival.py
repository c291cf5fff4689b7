"""Arrival: which chunks of a snapshot have landed and are verified. Waiters wake when theirs do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import accumulate

from ...errors import PilotflameError, SourceUnavailable
from ..format.manifest import Manifest


class Arrival:
    """Chunks are counted through all shards: chunk `c` of shard `s` is `first[s] + c`. Thread-safe.

    Landing is for good: what has landed is verified and is never written again.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.first = (0, *accumulate(len(shard.chunks) for shard in manifest.shards))
        self.count = self.first[-1]
        self._landed = bytearray(self.count)
        self._missing = self.count
        self._error: PilotflameError | None = None
        self._changed = threading.Condition()
        self._on_land: list[Callable[[int], None]] = []
        self._on_demand: list[Callable[[int, int], None]] = []

    @property
    def complete(self) -> bool:
        return self._missing == 0

    @property
    def error(self) -> PilotflameError | None:
        return self._error

    def landed(self, chunk: int) -> bool:
        return bool(self._landed[chunk])

    def land(self, chunk: int) -> None:
        """Chunk `chunk` is there and verified."""
        with self._changed:
            if self._landed[chunk]:
                return
            self._landed[chunk] = 1
            self._missing -= 1
            listeners = list(self._on_land)
            self._changed.notify_all()
        for listener in listeners:
            listener(chunk)

    def land_all(self) -> None:
        """Everything is there and verified."""
        with self._changed:
            new = [chunk for chunk, landed in enumerate(self._landed) if not landed] if self._on_land else []
            self._landed = bytearray(b"\1") * self.count
            self._missing = 0
            listeners = list(self._on_land)
            self._changed.notify_all()
        for listener in listeners:
            for chunk in new:
                listener(chunk)

    def fail(self, error: PilotflameError) -> None:
        """Nothing more will come; the first error counts. Who waits for what is missing gets it raised."""
        with self._changed:
            if self._error is None:
                self._error = error
            self._changed.notify_all()

    def wait(self, first: int, last: int, timeout_s: float | None = None) -> None:
        """Block until chunks [first, last] are all there; raises what made them fail, or SourceUnavailable in time."""
        if self.complete or all(self._landed[first : last + 1]):
            return
        self.demand(first, last)
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while not all(self._landed[first : last + 1]):
                if self._error is not None:
                    raise self._error
                left_s = None if deadline_s is None else deadline_s - time.monotonic()
                if (left_s is not None and left_s <= 0) or not self._changed.wait(left_s):
                    raise SourceUnavailable(f"The weights did not arrive within {timeout_s:.0f} s.")

    def on_land(self, listener: Callable[[int], None]) -> None:
        """Call `listener(chunk)` for every chunk: those that are there now, and each that lands."""
        with self._changed:
            already = [chunk for chunk in range(self.count) if self._landed[chunk]]
            self._on_land.append(listener)
        for chunk in already:
            listener(chunk)

    def demand(self, first: int, last: int) -> None:
        """Somebody wants chunks [first, last] now."""
        for demand in list(self._on_demand):
            demand(first, last)

    def on_demand(self, demand: Callable[[int, int], None]) -> None:
        """Call `demand(first, last)` when somebody starts to wait for these chunks: fetch them next."""
        self._on_demand.append(demand)
