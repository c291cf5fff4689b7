"""Copies the weights of a plan to a device as they land, in threads, while operations already run on the device.

Each thread takes the first piece whose bytes have landed, and submits its copy: from the pinned files if possible, else
from a buffer into which it has read the piece. An operation waits only for the copies of its own tensors: the thread of
the operation waits until these copies are submitted, and the device waits until they have ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from ....errors import PilotflameError, SnapshotChanged, SnapshotError, SourceUnavailable
from ..mapping import Mapping
from .buffers import copying_threads
from .copy_event import CopyEvent
from .device import Device
from .open_shards import OpenShards
from .piece_queue import PieceQueue
from .pinned_shards import PinnedShards
from .slab import SlabLayout, SlabPiece
from .slab_copies import SlabCopies


class DeviceUpload:
    """The upload of one layout to a device. `slab` is the memory on the device. `layout` has the offsets of the tensors in it."""

    def __init__(
        self, device: Device, layout: SlabLayout, mapping: Mapping, *,
        slab: Tensor | None = None, kept: dict[int, Tensor] | None = None, parks: bool = True,
        pinned: PinnedShards | None = None,
    ) -> None:  # fmt: skip
        """Begin to copy the shards of `mapping` in threads, to `slab` or, if that is None, to a new slab.

        Spans whose numbers are in `kept` are copied from `kept` instead. Without `parks`, no checksums are made, so `park`
        copies all weights to the host. `pinned` has the same shards, and pieces whose windows are pinned are copied from
        it. Raise SnapshotError if the device has too little memory for a new slab.
        """
        self.device, self.layout, self.mapping = device, layout, mapping
        self.pinned = pinned
        self.started_s, self.ended_s = time.monotonic(), 0.0
        """When the copy began and ended, by the monotonic clock. While the copy runs, `ended_s` is 0."""
        # Other threads write to the slab, which torch would forbid if the slab were made in inference mode.
        with torch.inference_mode(mode=False):
            self.slab = device.empty(layout.size_bytes) if slab is None else slab
        self._changed = threading.Condition()
        """Guards the shared state. Notified when a copy is submitted, a piece can be taken, or the upload fails or ends."""
        self.copies = SlabCopies(device, layout, self.slab, self._changed, sums=parks)
        # Keep these tensors, because copies may still be reading them.
        self._kept = kept or {}
        for number, content in self._kept.items():
            self.copies.put_back(layout.spans[number], content)
        self._events = self.copies.events
        self._queue = PieceQueue(
            layout.pieces, mapping.arrival, (event is not None for event in self._events), self._changed
        )
        self._running = 0
        self._seen = 0
        """All pieces with numbers lower than this are known to be on the device."""
        self.compared = False
        """True once it is known that the copied bytes fit the manifest."""
        self._error: PilotflameError | None = None
        if self._queue.left:
            self._start()
        else:
            self.ended_s, self.compared = self.started_s, True

    def _start(self) -> None:
        self._files = OpenShards(self.mapping)
        if (arrival := self.mapping.arrival) is not None:
            arrival.attach(self._files)
            # No listener need be removed: the arrival forgets its listeners when all chunks have landed.
            arrival.on_land(self._queue.land)
            arrival.on_fail(self.fail)
        self._running = min(self._threads(), self._queue.left)
        for number in range(self._running):
            threading.Thread(target=self._run, name=f"snapshot-upload-{number}", daemon=True).start()

    def _threads(self) -> int:
        if self.pinned is None:
            return copying_threads()
        buffered = sum(self.pinned.parts(piece) is None for piece in self.layout.pieces)
        return min(copying_threads(), 1 + buffered)

    # -- for threads that wait

    @property
    def complete(self) -> bool:
        """True once all bytes are on the device."""
        # The gate reads this at each operation, so query only events that were not done before.
        seen, events = self._seen, self._events
        while seen < len(events) and (event := events[seen]) is not None and event.done():
            seen += 1
        self._seen = seen
        return seen == len(events)

    def fail(self, error: PilotflameError) -> None:
        """Raise `error` in threads that wait, now or later, for pieces that are not copied. Ignore further errors."""
        with self._changed:
            self._error = self._error or error
            self._queue.end()

    def has(self, begin: int, end: int) -> bool:
        """Return True if bytes [begin, end) of the slab are on the device."""
        events = [self._events[number] for number in self.layout.covering(begin, end)]
        return all(event is not None and event.done() for event in events)

    def precede(self, begin: int, end: int, timeout_s: float | None) -> None:
        """Let operations that this thread submits from now on run after the copy of bytes [begin, end) of the slab.

        Raise the error of the fetch, or SourceUnavailable if the copies are not submitted within `timeout_s`.
        """
        for event in self._submitted(self.layout.covering(begin, end), timeout_s):
            if not event.done():
                event.precede()

    def end(self, timeout_s: float | None) -> None:
        """Wait until all threads of this upload have ended their work. Raise SourceUnavailable after `timeout_s`."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._running, timeout_s):
                raise self._late(timeout_s)

    def _late(self, timeout_s: float | None) -> SourceUnavailable:
        return SourceUnavailable(
            f"The weights were not copied to {self.device.name} within {timeout_s:.0f} s."
        )

    def wait(self, timeout_s: float | None) -> None:
        """Block until all bytes are on the device, and no thread frees memory any more. Raise what `precede` raises.

        Afterwards a CUDA graph can be captured. A thread that frees memory during the capture would invalidate it.
        """
        begun_s = time.monotonic()
        for event in self._submitted(range(len(self._events)), timeout_s):
            event.wait()
        self.end(None if timeout_s is None else max(0.0, begun_s + timeout_s - time.monotonic()))
        if isinstance(self._error, SnapshotChanged):
            raise self._error

    def _submitted(self, pieces: Sequence[int], timeout_s: float | None) -> list[CopyEvent]:
        missing = [number for number in pieces if self._events[number] is None]
        # If all pieces are missing, no piece is more urgent than another, so keep the order.
        if missing and len(missing) < len(self._events):
            self._queue.demand(missing)
        at = 0

        def over() -> bool:
            # Continue at the first event that was missing before, instead of checking all events after every copy.
            nonlocal at
            while at < len(missing) and self._events[missing[at]] is not None:
                at += 1
            return at == len(missing) or self._error is not None

        with self._changed:
            self._changed.wait_for(over, timeout_s)
            found = [event for number in pieces if (event := self._events[number]) is not None]
            if len(found) < len(pieces):
                raise self._error or self._late(timeout_s)
        return found

    # -- the threads

    def _run(self) -> None:
        try:
            while (number := self._queue.take()) is not None:
                self._copy(number, self.layout.pieces[number])
        except PilotflameError as error:
            self.fail(error)
        except Exception as error:  # noqa: BLE001  raised in the threads that wait
            self.fail(SnapshotError(f"The copy of the weights to {self.device.name} broke off: {error!r}."))
        with self._changed:
            last = self._running == 1
            self._running -= not last
        if last:
            try:
                self._end()
            except (RuntimeError, OSError) as error:
                self.fail(SnapshotError(f"What the copy to {self.device.name} used is not freed: {error!r}."))
            finally:
                with self._changed:
                    self._running = 0
                    self._changed.notify_all()

    def _copy(self, number: int, piece: SlabPiece) -> None:
        if self.pinned is not None and (parts := self.pinned.parts(piece)) is not None:
            self.copies.submit(number, piece, parts)
            return
        buffer, event = self.device.buffers.take(self.layout.largest_bytes), None
        try:
            self._files.read(piece.segments, buffer.numpy().data)
            event = self.copies.submit(number, piece, [(buffer[: piece.size_bytes], 0)])
        finally:
            self.device.buffers.give(buffer, event)

    def _end(self) -> None:
        """Wait for the copies. Then close the files and release the memory that only the copies needed."""
        for event in self._events:
            if event is not None:
                event.wait()
        self.ended_s = time.monotonic()
        self._files.close()
        self.device.release()
        try:
            # Compare the files now, because a file may have been written to while it was copied.
            self.mapping.check()
        except SnapshotError as error:
            self.fail(error)
        else:
            self.compared = True
