"""Resuming: which chunks are there already is found out from the files alone.

No journal says what has landed, so none can be wrong: whatever survived a crash, whole, torn or stale, is read and
hashed (5 GB/s from memory, holes skipped), and lands only if its digest fits.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence

import xxhash

from ..fetching.arrival import Arrival
from ..fetching.target import ShardTarget
from ..format.manifest import Manifest

_BUFFER_BYTES = 1 << 20


def land_what_is_there(
    manifest: Manifest, targets: Sequence[ShardTarget], arrival: Arrival, cancelled: threading.Event
) -> int:
    """Land every chunk whose bytes are in the files; returns how many."""
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    landed = 0
    for index, shard in enumerate(manifest.shards):
        data_at = 0
        for chunk, digest in enumerate(shard.chunks):
            begin = chunk * manifest.chunk_bytes
            end = min(begin + manifest.chunk_bytes, shard.size_bytes)
            if cancelled.is_set():
                return landed
            if data_at < end:
                data_at = _next_data(targets[index].descriptor, begin, shard.size_bytes)
            number = arrival.first[index] + chunk
            if data_at >= end or arrival.landed(number):
                continue
            if _digest(targets[index], begin, end, buffer) == digest:
                arrival.land(number)
                landed += 1
    return landed


def _next_data(descriptor: int, offset: int, size_bytes: int) -> int:
    """Where the first bytes from `offset` on are that were ever written; the file's size if none were."""
    try:
        return os.lseek(descriptor, offset, os.SEEK_DATA)
    except OSError as error:
        return size_bytes if error.errno == errno.ENXIO else offset


def _digest(target: ShardTarget, begin: int, end: int, buffer: memoryview) -> str:
    hasher, at = xxhash.xxh3_128(), begin
    while at < end and (count := target.read_into(at, buffer[: min(len(buffer), end - at)])):
        hasher.update(buffer[:count])
        at += count
    return hasher.hexdigest()
