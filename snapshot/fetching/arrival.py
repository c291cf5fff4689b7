"""Records which chunks of a snapshot have landed, and wakes the threads that wait for them.

A chunk has landed once its bytes are in the file and verified.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ...errors import PilotflameError, SourceUnavailable
from ..format.manifest import Manifest
from ..sources.source import ReportProgress
from .ranges import Chunks

# How long all chunks may take to land, unless the owner of the arrival sets another deadline.
ARRIVAL_TIMEOUT_S = 3600.0


class View(Protocol):
    """Shows the bytes of landed chunks to readers. A mapping is a view. Only one thread at a time calls its methods."""

    def move(self, root: Path) -> None:
        """Show the chunks that land from now on from the files in folder `root`."""

    def show(self, chunk: int) -> None:
        """Make the bytes of `chunk` readable, before any waiting thread or listener sees that the chunk has landed."""


class Arrival:
    """The record of the landed chunks of one snapshot. A landed chunk is never written again. Thread-safe."""

    def __init__(self, manifest: Manifest) -> None:
        self.chunks = Chunks(manifest)
        self.count = self.chunks.count
        self.landed_bytes = 0
        self._total_bytes = manifest.needed_bytes
        self._landed = bytearray(self.count)
        needed = self.chunks.needed()
        # `_awaited` has a 1 for each chunk that has not landed. Chunks that are not needed have a 0 and never land.
        self._missing = len(needed)
        self._awaited = bytearray(b"\1") * self.count
        if self._missing < self.count:
            self._awaited = bytearray(self.count)
            for chunk in needed:
                self._awaited[chunk] = 1
        self.error: PilotflameError | None = None
        self._changed = threading.Condition()
        self._root: Path | None = None
        self._views: list[View] = []
        self._on_land: list[Callable[[int], None]] = []
        self._on_demand: list[Callable[[int, int], None]] = []
        self._on_fail: list[Callable[[PilotflameError], None]] = []
        self._relayed_to: Arrival | None = None
        self.deadline_s = time.monotonic() + ARRIVAL_TIMEOUT_S
        """When all chunks must have landed, in monotonic seconds. All waits for chunks end then."""

    @property
    def complete(self) -> bool:
        return self._missing == 0

    def landed(self, chunk: int) -> bool:
        return bool(self._landed[chunk])

    def has(self, first: int, last: int) -> bool:
        """Return True if all needed chunks from `first` to `last`, both included, have landed."""
        return self._missing == 0 or self._first_missing(first, last) > last

    def land(self, chunk: int) -> None:
        """Record that `chunk` has landed, and call the listeners (see `on_land`)."""
        extent = self.chunks.extent(chunk)
        with self._changed:
            if not self._awaited[chunk]:
                return
            self._show(chunk)
            self._landed[chunk], self._awaited[chunk] = 1, 0
            self._missing -= 1
            self._drop_views()
            self.landed_bytes += extent.end - extent.begin
            listeners = self._listeners()
            self._changed.notify_all()
        for listener in listeners:
            listener(chunk)

    def land_all(self) -> None:
        """Record that every chunk has landed, and call the listeners (see `on_land`)."""
        with self._changed:
            wanted = self._on_land or self._views
            new = [chunk for chunk, awaited in enumerate(self._awaited) if awaited] if wanted else []
            for chunk in new:
                self._show(chunk)
            # A bytewise OR sets the flag of each chunk that had landed before or was awaited.
            both = int.from_bytes(self._landed, "big") | int.from_bytes(self._awaited, "big")
            self._landed = bytearray(both.to_bytes(self.count, "big"))
            self._awaited = bytearray(self.count)
            self._missing = 0
            self._drop_views()
            self.landed_bytes = self._total_bytes
            listeners = self._listeners()
            self._changed.notify_all()
        for listener in listeners:
            for chunk in new:
                listener(chunk)

    def _listeners(self) -> list[Callable[[int], None]]:
        """Return the listeners for landed chunks. After the last chunk, forget the listeners, to free the memory that they use."""
        listeners = list(self._on_land)
        if self._missing == 0:
            self._on_land.clear()
            self._on_fail.clear()
        return listeners

    def fail(self, error: PilotflameError) -> None:
        """Raise `error` in threads that wait, now or later, for a missing chunk. The error of the first call is not replaced."""
        with self._changed:
            if self.error is None:
                self.error = error
            self._changed.notify_all()
            relayed_to, listeners = self._relayed_to, list(self._on_fail)
        for listener in listeners:
            listener(error)
        if relayed_to is not None:
            relayed_to.fail(error)

    def on_fail(self, listener: Callable[[PilotflameError], None]) -> None:
        """Call `listener` with each error of the fetch, now or later, until all chunks have landed."""
        with self._changed:
            if self._missing == 0:
                return
            self._on_fail.append(listener)
            error = self.error
        if error is not None:
            listener(error)

    def relay(self, other: Arrival) -> None:
        """Let each chunk that has landed, or lands later, also land in `other`.

        Errors are passed on to `other`, and demands on `other` are passed on to this arrival.
        """
        with self._changed:
            self._relayed_to, error = other, self.error
        self.on_land(other.land)
        other.on_demand(self.demand)
        if error is not None:
            other.fail(error)

    def wait(self, first: int, last: int, timeout_s: float | None = None, *, demand: bool = True) -> None:
        """Block until chunks `first` to `last`, both included, have landed. With `demand`, ask for them to be fetched next.

        Raise the error given to `fail`, or SourceUnavailable if the chunks have not landed within `timeout_s`, which
        is by default the time until `deadline_s`.
        """
        if self.has(first, last):
            return
        if demand:
            self.demand(first, last)
        at = first

        def over() -> bool:
            # After every landing, continue the search at the first chunk that was missing before. A search from `first` would
            # check the landed chunks again.
            nonlocal at
            at = last + 1 if self._missing == 0 else self._first_missing(at, last)
            return at > last or self.error is not None

        left_s = max(0.0, self.deadline_s - time.monotonic()) if timeout_s is None else timeout_s
        with self._changed:
            self._changed.wait_for(over, left_s)
            if at <= last:
                raise self.error or SourceUnavailable(
                    f"The weights did not arrive: the wait ended after {left_s:.0f} s."
                )

    def _first_missing(self, first: int, last: int) -> int:
        """Return the first of the chunks `first` to `last` that is needed and has not landed, or `last` + 1."""
        found = self._awaited.find(1, first, last + 1)
        return last + 1 if found < 0 else found

    def move(self, root: Path) -> None:
        """Record that chunks land in the files in folder `root` from now on.

        Chunks that landed before are in `root` too, but the views continue to show them from the earlier folder.
        """
        with self._changed:
            for view in self._views:
                view.move(root)
            self._root = root

    def attach(self, view: View) -> None:
        """Let `view` show every chunk that has landed already, and each chunk that lands later."""
        with self._changed:
            if self._root is not None:
                view.move(self._root)
            for chunk, landed in enumerate(self._landed):
                if landed:
                    view.show(chunk)
            self._views.append(view)
            self._drop_views()

    def _show(self, chunk: int) -> None:
        for view in self._views:
            view.show(chunk)

    def _drop_views(self) -> None:
        """Forget the views after they have shown the last chunk, because they keep files open."""
        if self._missing == 0:
            self._views.clear()

    def on_land(self, listener: Callable[[int], None]) -> None:
        """Call `listener(chunk)` for every chunk that has landed already, and for each chunk that lands later."""
        with self._changed:
            already = [chunk for chunk, landed in enumerate(self._landed) if landed]
            if self._missing:
                self._on_land.append(listener)
        for chunk in already:
            listener(chunk)

    def report(self, progress: ReportProgress) -> None:
        """Call `progress` now, and for every chunk that lands later. The reported number of bytes never decreases."""
        lock = threading.Lock()

        def landed(_chunk: int = 0) -> None:
            with lock:
                progress(self.landed_bytes, self._total_bytes)

        with self._changed:
            self._on_land.append(landed)
        landed()

    def demand(self, first: int, last: int) -> None:
        """Ask for chunks `first` to `last`, both included, to be fetched next, before all other chunks."""
        for listener in list(self._on_demand):
            listener(first, last)

    def on_demand(self, listener: Callable[[int, int], None]) -> None:
        """Call `listener(first, last)` at each later `demand`, such as when a thread starts to wait."""
        self._on_demand.append(listener)
