"""Which chunks of a snapshot have landed. Waiting threads wake when their chunks have."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ...errors import PilotflameError, SourceUnavailable
from ..format.manifest import Manifest
from .ranges import Chunks


class Arrival:
    """The chunks that are in place and verified, never written again. Thread-safe."""

    def __init__(self, manifest: Manifest) -> None:
        self.chunks = Chunks(manifest)
        self.count = self.chunks.count
        self.landed_bytes = 0
        self._total_bytes = manifest.total_bytes
        self._landed = bytearray(self.count)
        self._missing = self.count
        self.error: PilotflameError | None = None
        self._changed = threading.Condition()
        self._on_land: list[Callable[[int], None]] = []
        self._on_demand: list[Callable[[int, int], None]] = []

    @property
    def complete(self) -> bool:
        return self._missing == 0

    def landed(self, chunk: int) -> bool:
        return bool(self._landed[chunk])

    def has(self, first: int, last: int) -> bool:
        """Return True if chunks [first, last] have landed."""
        return self._missing == 0 or all(self._landed[first : last + 1])

    def land(self, chunk: int) -> None:
        """Mark `chunk` as in place and verified."""
        extent = self.chunks.extent(chunk)
        with self._changed:
            if self._landed[chunk]:
                return
            self._landed[chunk] = 1
            self._missing -= 1
            self.landed_bytes += extent.end - extent.begin
            listeners = list(self._on_land)
            self._changed.notify_all()
        for listener in listeners:
            listener(chunk)

    def land_all(self) -> None:
        """Mark every chunk as in place and verified."""
        with self._changed:
            new = [chunk for chunk, landed in enumerate(self._landed) if not landed] if self._on_land else []
            self._landed = bytearray(b"\1") * self.count
            self._missing = 0
            self.landed_bytes = self._total_bytes
            listeners = list(self._on_land)
            self._changed.notify_all()
        for listener in listeners:
            for chunk in new:
                listener(chunk)

    def fail(self, error: PilotflameError) -> None:
        """Raise `error` in every thread that waits for a missing chunk. Only the first error counts."""
        with self._changed:
            if self.error is None:
                self.error = error
            self._changed.notify_all()

    def wait(self, first: int, last: int, timeout_s: float | None = None) -> None:
        """Block until chunks [first, last] have landed. Raise their error, or SourceUnavailable in time."""
        if self.has(first, last):
            return
        self.demand(first, last)
        with self._changed:
            self._changed.wait_for(lambda: self.error is not None or self.has(first, last), timeout_s)
            if self.has(first, last):
                return
            raise self.error or SourceUnavailable(f"The weights did not arrive within {timeout_s:.0f} s.")

    def on_land(self, listener: Callable[[int], None]) -> None:
        """Call `listener(chunk)` for every chunk that has landed, and for each that lands from now on."""
        with self._changed:
            already = [chunk for chunk, landed in enumerate(self._landed) if landed]
            self._on_land.append(listener)
        for chunk in already:
            listener(chunk)

    def demand(self, first: int, last: int) -> None:
        """Ask for chunks [first, last] to be fetched next."""
        for listener in list(self._on_demand):
            listener(first, last)

    def on_demand(self, listener: Callable[[int, int], None]) -> None:
        """Call `listener(first, last)` when a thread starts to wait for these chunks."""
        self._on_demand.append(listener)
