"""Submits the copies of the pieces of a slab. Converts tensors that are not plain on the device, and computes checksums."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import Tensor

from .copy_event import CopyEvent
from .device import Device
from .pinned_shards import WindowPart
from .slab import PIECE_BYTES, SLAB, RawGroup, SlabLayout, SlabPiece, Span

_SEED = 27


class SlabCopies:
    """The copies to one slab. Several threads may submit copies."""

    def __init__(
        self, device: Device, layout: SlabLayout, slab: Tensor, changed: threading.Condition, *, sums: bool
    ) -> None:
        """With `sums`, compute a checksum of each span, except the spans of `put_back`."""
        self._device, self._layout, self._slab, self._adds_up = device, layout, slab, sums
        self._changed = changed
        """Guards `events`. Notified when a copy is submitted."""
        self.events: list[CopyEvent | None] = [None] * len(layout.pieces)
        """The end of the copy of each piece. None until the copy is submitted."""
        self.sums: dict[int, Tensor] = {}
        """For each span that is copied from the files, the checksum of the copied bytes, on the device."""
        self._span_of = {piece: number for number, span in enumerate(layout.spans) for piece in span.pieces}
        self._raw: dict[int, Tensor] = {}
        self._submitting = threading.Lock()

    def put_back(self, span: Span, content: Tensor) -> None:
        """Submit the copy of `content` to a whole span. The pieces of this span then need no other copy."""
        event = self._device.copy(content, self._slab[span.begin : span.end])
        for piece in span.pieces:
            self.events[piece] = event

    def submit(self, number: int, piece: SlabPiece, parts: Sequence[WindowPart]) -> CopyEvent:
        """Submit the copy of piece `number` from `parts`. Return the event of its end."""
        # Store the event before another piece of the same group is submitted: the last piece of a
        # group also converts the group, and a piece is the last if all other pieces of the group have events.
        with self._submitting:
            event = self._submit_next(number, piece, parts)
            with self._changed:
                self.events[number] = event
                self._changed.notify_all()
        return event

    def _submit_next(self, number: int, piece: SlabPiece, parts: Sequence[WindowPart]) -> CopyEvent:
        if piece.raw == SLAB:
            target = self._slab[piece.begin : piece.begin + piece.size_bytes]
            return self._copy(parts, target, then=self._sum(self._span_of[number]))
        raw = self._raw.get(piece.raw)
        if raw is None:
            raw = self._raw[piece.raw] = self._device.empty(self._layout.raws[piece.raw].size_bytes)
        target = raw[piece.begin : piece.begin + piece.size_bytes]
        others = [one for one in self._layout.spans[self._span_of[number]].pieces if one != number]
        with self._changed:
            after = [event for one in others if (event := self.events[one]) is not None]
        if len(after) < len(others):
            return self._copy(parts, target)
        self._raw.pop(piece.raw)
        add_up = self._sum(self._span_of[number])

        def then() -> None:
            self._convert(self._layout.raws[piece.raw], raw)
            if add_up is not None:
                add_up()

        return self._copy(parts, target, after, then)

    def _copy(
        self,
        parts: Sequence[WindowPart],
        target: Tensor,
        after: Sequence[CopyEvent] = (),
        then: Callable[[], None] | None = None,
    ) -> CopyEvent:
        """Copy all parts of a piece to `target`. For the other arguments see `Device.copy`, which copies one part."""
        *others, (source, at) = parts
        before = [self._device.copy(one, target[begin : begin + len(one)]) for one, begin in others]
        return self._device.copy(source, target[at : at + len(source)], [*after, *before], then)

    def _convert(self, group: RawGroup, raw: Tensor) -> None:
        """Submit the conversion of all tensors of a group from the bytes in `raw`."""
        for number, at in zip(group.tensors, group.offsets, strict=True):
            tensor = self._layout.tensors[number]
            where, offset = tensor.place, self._layout.offsets[number]
            target = self._slab[offset : offset + tensor.size_bytes].view(tensor.dtype).view(where.shape)
            target.copy_(raw[at : at + tensor.file_bytes].view(where.dtype).view(where.shape))

    def _sum(self, number: int) -> Callable[[], None] | None:
        return partial(self._add_up, number) if self._adds_up else None

    def _add_up(self, number: int) -> None:
        self.sums[number] = self.sum_of(number)

    def sum_of(self, number: int) -> Tensor:
        """Return the checksum of the bytes that span `number` has on the device now."""
        span = self._layout.spans[number]
        # Round the end up to a multiple of 8. The added bytes belong to no tensor and are never written.
        return checksum(self._slab[span.begin : -(-span.end // 8) * 8], random_factors(self._slab.device))


def checksum(content: Tensor, factors: Tensor) -> Tensor:
    """Return a number, on the same device, that changes if bytes change or swap places, unless the change is crafted.

    It is the sum modulo 2^64 of the 8-byte words, each multiplied by the odd random number at its position in
    `factors`. Before the multiplication, the upper half of a word is mixed into its lower half. Without this, changes of the
    highest bit, which is the sign of a number, in two words would cancel out. The length and the offset of `content` must be
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
