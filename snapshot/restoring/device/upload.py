"""Copies the weights of a plan to a device as they land, in threads, while operations already run on the device.

Each thread takes the first piece whose bytes have landed, and submits its copy: from the pinned files if possible, else
from a buffer into which it has read the piece. An operation waits only for the copies of its own tensors: its thread
waits until they are submitted, and the device waits until they have ended.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from ....errors import PilotflameError, SnapshotChanged, SnapshotError, SourceUnavailable
from ...fetching.arrival import Arrival
from ...fetching.ranges import Chunks
from ..mapping import Mapping
from .buffers import copying_threads
from .copy_event import Event
from .device import Device
from .open_shards import OpenShards, between
from .pinned_shards import Part, PinnedShards
from .slab import PIECE_BYTES, SLAB, RawGroup, SlabLayout, SlabPiece, Span

_SEED = 27


class DeviceUpload:
    """The upload of one layout to a device. `slab` has the bytes on the device. `layout` has their places."""

    def __init__(
        self, device: Device, layout: SlabLayout, mapping: Mapping, *,
        threads: int = 0, slab: Tensor | None = None, kept: dict[int, Tensor] | None = None, parks: bool = True,
        pinned: PinnedShards | None = None,
    ) -> None:  # fmt: skip
        """Begin to copy the shards of `mapping` in `threads` threads, to `slab` or, if that is None, to a new slab.

        The spans whose numbers are in `kept` are copied from `kept` instead. Without `parks`, no checksums are made,
        so `park` copies all weights to the host. `pinned` has the same shards, and knows which parts are pinned. Raises
        SnapshotError if the device has no room for a new slab.
        """
        self.device, self.layout, self.mapping, self._parks = device, layout, mapping, parks
        self.pinned = pinned
        self.started_s, self.ended_s = time.monotonic(), 0.0
        """When the copy began and ended, by the monotonic clock. The end is 0 while it runs."""
        # Other threads write to the slab, which torch would forbid if the slab were made in inference mode.
        with torch.inference_mode(mode=False):
            self.slab = device.empty(layout.size_bytes) if slab is None else slab
        self.sums: dict[int, Tensor] = {}
        """For each span that is copied from the files, the checksum of the copied bytes, on the device."""
        self._span_of = {piece: number for number, span in enumerate(layout.spans) for piece in span.pieces}
        self._raw: dict[int, Tensor] = {}
        self._events: list[Event | None] = [None] * len(layout.pieces)
        self._taken = bytearray(len(layout.pieces))
        self._running = 0
        self._seen = 0
        """How many of the first pieces are known to be on the device."""
        self.compared = False
        """True once it is known that the copied bytes fit the manifest."""
        self._arrival: Arrival | None = None
        self._error: PilotflameError | None = None
        self._changed = threading.Condition()
        self._ready: list[tuple[int, int]] = []
        """A heap of the pieces whose bytes have landed, by number. Pieces that an operation waits for come first."""
        self._demanded: set[int] = set()
        self._submitting = threading.Lock()
        self.kept = dict(kept or {})
        for number, content in self.kept.items():
            self._put_back(number, content)
        self._left = self._taken.count(0)
        if self._left:
            self._start(threads or self._threads())
        else:
            self.ended_s, self.compared = self.started_s, True

    def _threads(self) -> int:
        if self.pinned is None:
            return copying_threads()
        buffered = sum(self.pinned.parts(piece) is None for piece in self.layout.pieces)
        return min(copying_threads(), 1 + buffered)

    def _start(self, threads: int) -> None:
        self._arrival = self.mapping.arrival
        self._files, self._chunks = OpenShards(self.mapping), Chunks(self.mapping.manifest)
        self._wait_for_chunks(self._arrival)
        self._running = min(threads, self._left)
        for number in range(self._running):
            threading.Thread(target=self._run, name=f"snapshot-upload-{number}", daemon=True).start()

    def _put_back(self, number: int, content: Tensor) -> None:
        span = self.layout.spans[number]
        event = self.device.copy(content, self.slab[span.begin : span.end])
        for piece in span.pieces:
            self._taken[piece], self._events[piece] = 1, event

    # -- for threads that wait

    @property
    def complete(self) -> bool:
        """True once all bytes are on the device."""
        # The gate reads this at each operation, so do not query again the events that were done before.
        seen, events = self._seen, self._events
        while seen < len(events) and (event := events[seen]) is not None and event.done():
            seen += 1
        self._seen = seen
        return seen == len(events)

    def fail(self, error: PilotflameError) -> None:
        """Raise `error` in threads that wait, now or later, for pieces that are not copied. The first call counts."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def has(self, begin: int, end: int) -> bool:
        """Return True if bytes [begin, end) of the slab are on the device."""
        events = [self._events[number] for number in self.layout.covering(begin, end)]
        return all(event is not None and event.done() for event in events)

    def placed(self) -> list[tuple[int, int, int, str]]:
        """Return for each tensor in the slab: 0, its first byte, the byte after its last byte, and its name."""
        pairs = zip(self.layout.tensors, self.layout.offsets, strict=True)
        return [(0, at, at + one.size_bytes, one.name) for one, at in pairs if one.size_bytes]

    def precede(self, begin: int, end: int, timeout_s: float | None) -> None:
        """Let operations that this thread submits from now on run after the copy of bytes [begin, end) of the slab.

        Raises the error of the fetch, or SourceUnavailable if the copies are not submitted within `timeout_s`.
        """
        for event in self._submitted(self.layout.covering(begin, end), timeout_s):
            if not event.done():
                event.precede()

    def end(self, timeout_s: float | None) -> bool:
        """Wait until no thread submits copies or frees memory any more. Return False if the fetch or a copy has failed.

        Raises SourceUnavailable after `timeout_s`.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._running, timeout_s):
                raise self._late(timeout_s)
        return all(event is not None for event in self._events)

    def _late(self, timeout_s: float | None) -> SourceUnavailable:
        return SourceUnavailable(
            f"The weights were not copied to {self.device.name} within {timeout_s:.0f} s."
        )

    def wait(self, timeout_s: float | None) -> None:
        """Block until all bytes are on the device, and no thread frees memory any more. Raises what `precede` raises.

        Afterwards a CUDA graph can be captured. A thread that frees memory during the capture would invalidate it.
        """
        begun_s = time.monotonic()
        for event in self._submitted(range(len(self._events)), timeout_s):
            event.wait()
        self.end(None if timeout_s is None else max(0.0, begun_s + timeout_s - time.monotonic()))
        if isinstance(self._error, SnapshotChanged):
            raise self._error

    def _submitted(self, pieces: Sequence[int], timeout_s: float | None) -> list[Event]:
        missing = [number for number in pieces if self._events[number] is None]
        # If all pieces are missing, no piece is more urgent than another, so keep the order.
        if missing and len(missing) < len(self._events):
            self._demand(missing)
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

    def _demand(self, pieces: Sequence[int]) -> None:
        """Let these pieces be fetched and copied next."""
        with self._changed:
            new = set(pieces) - self._demanded
            self._demanded |= new
            for number in new:
                if not self._awaited[number]:
                    # The piece is in the heap twice now. `_next` skips the second entry.
                    heapq.heappush(self._ready, (0, number))
        # Do this without the lock, because a thread of the fetch may wait for the lock in `_land`.
        if self._arrival is not None:
            for number in new:
                for segment in self.layout.pieces[number].segments:
                    self._arrival.demand(*self._chunks.covering(segment.shard, segment.begin, segment.end))

    # -- landed chunks

    def _wait_for_chunks(self, arrival: Arrival | None) -> None:
        """Count the chunks that each piece waits for, and listen for landed chunks."""
        self._awaited = [0] * len(self.layout.pieces)
        if arrival is None:
            self._ready = [(1, number) for number in range(len(self.layout.pieces))]
            return
        self._waiting: dict[int, list[int]] = {}
        for number, piece in enumerate(self.layout.pieces):
            chunks = {
                chunk
                for one in piece.segments
                for chunk in between(*self._chunks.covering(one.shard, one.begin, one.end))
            }
            self._awaited[number] = len(chunks)
            for chunk in chunks:
                self._waiting.setdefault(chunk, []).append(number)
        arrival.attach(self._files)
        # The arrival drops its listeners when all chunks have landed.
        arrival.on_land(self._land)
        arrival.on_fail(self.fail)

    def _land(self, chunk: int) -> None:
        with self._changed:
            for number in self._waiting.pop(chunk, ()):
                self._awaited[number] -= 1
                if not self._awaited[number]:
                    heapq.heappush(self._ready, (number not in self._demanded, number))
                    self._changed.notify_all()

    # -- the threads

    def _run(self) -> None:
        try:
            while (number := self._next()) is not None:
                self._copy(number, self.layout.pieces[number])
        except PilotflameError as error:
            self.fail(error)
        except Exception as error:  # noqa: BLE001  those that wait get it
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

    def _next(self) -> int | None:
        """Wait for a piece whose bytes have landed. Return None if no further piece will land."""
        with self._changed:
            while self._left:
                while self._ready:
                    number = heapq.heappop(self._ready)[1]
                    if not self._taken[number]:
                        self._taken[number] = True
                        self._left -= 1
                        return number
                # Check for an error only now, so that pieces that landed before the fetch failed are copied.
                if self._error is not None:
                    break
                self._changed.wait()
            self._changed.notify_all()
            return None

    def _copy(self, number: int, piece: SlabPiece) -> None:
        if self.pinned is not None and (parts := self.pinned.parts(piece)) is not None:
            self._submit(number, piece, parts)
            return
        buffer, event = self.device.buffers.take(self.layout.largest_bytes), None
        try:
            self._files.read(piece.segments, buffer.numpy().data)
            event = self._submit(number, piece, [(buffer[: piece.size_bytes], 0)])
        finally:
            self.device.buffers.give(buffer, event)

    def _submit(self, number: int, piece: SlabPiece, parts: Sequence[Part]) -> Event:
        # Store the event before another piece of the same group is submitted: the piece of a group that is
        # submitted last converts the group, and the events of the other pieces show which piece is last.
        with self._submitting:
            event = self._submit_next(number, piece, parts)
            with self._changed:
                self._events[number] = event
                self._changed.notify_all()
        return event

    def _submit_next(self, number: int, piece: SlabPiece, parts: Sequence[Part]) -> Event:
        if piece.raw == SLAB:
            target = self.slab[piece.begin : piece.begin + piece.size_bytes]
            return self._copies(parts, target, then=self._sum(self._span_of[number]))
        raw = self._raw.get(piece.raw)
        if raw is None:
            raw = self._raw[piece.raw] = self.device.empty(self.layout.raws[piece.raw].size_bytes)
        target = raw[piece.begin : piece.begin + piece.size_bytes]
        others = [one for one in self.layout.spans[self._span_of[number]].pieces if one != number]
        with self._changed:
            after = [event for one in others if (event := self._events[one]) is not None]
        if len(after) < len(others):
            return self._copies(parts, target)
        self._raw.pop(piece.raw)
        add_up = self._sum(self._span_of[number])

        def then() -> None:
            self._convert(self.layout.raws[piece.raw], raw)
            if add_up is not None:
                add_up()

        return self._copies(parts, target, after, then)

    def _copies(
        self,
        parts: Sequence[Part],
        target: Tensor,
        after: Sequence[Event] = (),
        then: Callable[[], None] | None = None,
    ) -> Event:
        """Copy the parts of a piece to `target`, as `Device.copy` does with one."""
        *others, (source, at) = parts
        before = [self.device.copy(one, target[begin : begin + len(one)]) for one, begin in others]
        return self.device.copy(source, target[at : at + len(source)], [*after, *before], then)

    def _convert(self, group: RawGroup, raw: Tensor) -> None:
        """Submit the conversion of all tensors of a group from the bytes in `raw`."""
        for number, at in zip(group.tensors, group.offsets, strict=True):
            tensor = self.layout.tensors[number]
            where, offset = tensor.place, self.layout.offsets[number]
            target = self.slab[offset : offset + tensor.size_bytes].view(tensor.dtype).view(where.shape)
            target.copy_(raw[at : at + tensor.file_bytes].view(where.dtype).view(where.shape))

    def _sum(self, number: int) -> Callable[[], None] | None:
        if not self._parks:
            return None
        span = self.layout.spans[number]

        def add_up() -> None:
            self.sums[number] = self.sum_of(span)

        return add_up

    def sum_of(self, span: Span) -> Tensor:
        """Return the checksum of the bytes that a span has on the device now."""
        # The bytes up to the next multiple of 8 belong to no tensor and are never written.
        return checksum(self.slab[span.begin : -(-span.end // 8) * 8], random_factors(self.slab.device))

    def _end(self) -> None:
        """Wait for the copies. Then close the files and release the memory that only the copies needed."""
        for event in self._events:
            if event is not None:
                event.wait()
        self.ended_s = time.monotonic()
        self._files.close()
        self.device.release()
        try:
            # A file may have been written to while it was copied.
            self.mapping.check()
        except SnapshotError as error:
            self.fail(error)
        else:
            self.compared = True


def checksum(content: Tensor, factors: Tensor) -> Tensor:
    """Return a number, on the same device, that changes if bytes change or swap places, unless the change is crafted.

    It is the sum modulo 2^64 of the 8-byte words, each multiplied by the odd random number at its position in
    `factors`. Before the multiplication, the upper half of a word is mixed into its lower half: otherwise, two flips of
    the highest bit, which is the sign of a number, would cancel out. The length and the offset of `content` must be
    multiples of 8 bytes.
    """
    words = content.view(torch.int64)
    total: Tensor | None = None
    # Compute in blocks, because the products take as much memory as the words.
    for begin in range(0, words.numel(), factors.numel()):
        block = words[begin : begin + factors.numel()]
        mixed = (block >> 31).bitwise_xor_(block).mul_(factors[: block.numel()])
        added = mixed.sum()
        total = added if total is None else total * factors[0] + added
    return torch.zeros((), dtype=torch.int64, device=content.device) if total is None else total


@cache
def random_factors(device: torch.device) -> Tensor:
    """Return odd random numbers for `checksum`, always the same for a device."""
    # Use a generator of its own: the handler may have seeded the default generator, and rely on its state.
    generator = torch.Generator(device).manual_seed(_SEED)
    found = torch.randint(-(1 << 63), (1 << 63) - 1, (PIECE_BYTES // 8,), device=device, generator=generator)
    return found.bitwise_or_(1)
