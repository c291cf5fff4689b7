"""Compares the digests of blobs, such as the layers of a registry, while their chunks arrive.

An Attested source knows the digests of its blobs, but a fetch receives ranges in any order. So each blob is hashed in
order, from the files, as far as its chunks have arrived. The last chunk of a blob lands only after the blob's digest is
compared, so no model can run with all of its weights before the comparison.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import NamedTuple

from ...errors import FetchFailed, SnapshotChanged, SourceUnavailable
from ..format.manifest import Manifest
from ..sources.source import Attested, Blob, Source
from .arrival import Arrival

# How many bytes a thread hashes after each chunk that it has received. The number is larger than a usual chunk, so that
# hashing catches up after chunks have arrived out of order.
_STEP_BYTES = 16 << 20
_BUFFER_BYTES = 1 << 20


class BlobDigests:
    """The blobs that one fetch completes. Each chunk that is received and verified passes through `settle`.

    A blob is compared only if this fetch brings all of its missing chunks. So it is not compared if the function needs only a
    part of it. It is not compared either while some of its chunks are copied from another snapshot on this node: the blobs of
    that snapshot were compared when it was fetched.
    """

    def __init__(
        self,
        manifest: Manifest,
        source: Source,
        descriptors: Sequence[int],
        arrival: Arrival,
        missing: Collection[int],
    ) -> None:
        """`missing` are the chunks that the fetch brings. `descriptors` are the open files of the shards."""
        self._arrival = arrival
        self._of_shard: dict[int, _Hashing] = {}
        if not isinstance(source, Attested) or not missing:
            return
        numbers = {shard.name: number for number, shard in enumerate(manifest.shards)}
        for blob in {source.blob_of(name): None for name in numbers}:
            shards = {numbers[name]: offset for name, offset in blob.objects if name in numbers}
            chunks = [chunk for number in shards for chunk in arrival.chunks.of_shard(number)]
            pending = sum(chunk in missing for chunk in chunks)
            if pending and all(chunk in missing or arrival.landed(chunk) for chunk in chunks):
                sizes = {number: manifest.shards[number].size_bytes for number in shards}
                places = [
                    _Segment(offset, offset + sizes[number], number, descriptors[number])
                    for number, offset in shards.items()
                    if sizes[number]
                ]
                hashing = _Hashing(blob, source, arrival, _covering(places, blob.size_bytes), pending)
                self._of_shard |= dict.fromkeys(shards, hashing)

    def settle(self, chunk: int) -> None:
        """Let a chunk land. If it is the last missing chunk of a blob, first compare the digest of the blob.

        Raise SnapshotCorrupt, which names the blob, and the errors of Attested.read_blob.
        """
        hashing = self._of_shard.get(self._arrival.chunks.extent(chunk).shard)
        if hashing is None:
            self._arrival.land(chunk)
        elif hashing.is_last():
            hashing.finish()
            self._arrival.land(chunk)
        else:
            self._arrival.land(chunk)
            hashing.advance()


class _Segment(NamedTuple):
    """Bytes [begin, end) of a blob. They are a whole shard, which is in a file, or bytes that only the source has (shard -1)."""

    begin: int
    end: int
    shard: int = -1
    descriptor: int = -1


class _Hashing:
    """Hashes one blob in order. Thread-safe: one thread at a time hashes, and others do not wait for it."""

    def __init__(
        self, blob: Blob, source: Attested, arrival: Arrival, segments: Sequence[_Segment], pending: int
    ) -> None:
        """`pending` is the number of chunks that have not arrived."""
        self._blob, self._source, self._arrival = blob, source, arrival
        self._segments, self._pending = segments, pending
        self._counting = threading.Lock()
        self._hashing = threading.Lock()
        """Guards the attributes below."""
        self._hasher = hashlib.new(blob.digest.partition(":")[0])
        self._at = self._segment = 0
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))

    def is_last(self) -> bool:
        """Count a chunk that has arrived. Return True if it was the last missing chunk."""
        with self._counting:
            self._pending -= 1
            return self._pending == 0

    def advance(self) -> None:
        """Hash some of the bytes that have arrived. Return at once if another thread is hashing."""
        if not self._hashing.acquire(blocking=False):
            return
        try:
            # Ignore these errors: the next call tries again, and `finish` reports an error that remains.
            with suppress(SourceUnavailable, SnapshotChanged):
                until = self._at + _STEP_BYTES
                while self._at < until and self._hash_next(every=False):
                    pass
        finally:
            self._hashing.release()

    def finish(self) -> None:
        """Hash the rest of the blob and compare its digest. All chunks must have arrived. Raise SnapshotCorrupt or FetchFailed."""
        with self._hashing:
            try:
                while self._hash_next(every=True):
                    pass
            except (SourceUnavailable, SnapshotChanged) as error:
                fault = f"{self._blob.digest} could not be verified: {error.message}"
                raise FetchFailed(fault, remedy="Try again: the landed chunks are kept.") from error
            found = f"{self._hasher.name}:{self._hasher.hexdigest()}"
            if self._at != self._blob.size_bytes or found != self._blob.digest:
                names = ", ".join(name for name, _ in self._blob.objects[:3])
                raise self._source.corrupt(self._blob.digest, f"it holds {names}, and has the digest {found}")

    def _hash_next(self, *, every: bool) -> bool:
        """Hash the next bytes. Return False at the end or, unless `every`, at a chunk that has not landed."""
        while self._segment < len(self._segments) and self._at >= self._segments[self._segment].end:
            self._segment += 1
        if self._segment == len(self._segments):
            return False
        segment = self._segments[self._segment]
        view = self._buffer[: segment.end - self._at]
        if segment.shard < 0:
            self._source.read_blob(self._blob, self._at, view)
        else:
            offset = self._at - segment.begin
            chunk = self._arrival.chunks.at(segment.shard, offset)
            if not every and not self._arrival.landed(chunk):
                return False
            view = view[: self._arrival.chunks.extent(chunk).end - offset]
            view = view[: os.preadv(segment.descriptor, [view], offset)]
        self._hasher.update(view)
        self._at += len(view)
        return len(view) > 0


def _covering(places: Sequence[_Segment], size_bytes: int) -> list[_Segment]:
    """Return all segments of a blob, in order: `places`, and the bytes before, between and after them."""
    found, at = list[_Segment](), 0
    for place in sorted(places):
        if at < place.begin:
            found.append(_Segment(at, place.begin))
        found.append(place)
        at = place.end
    return [*found, _Segment(at, size_bytes)] if at < size_bytes else found
