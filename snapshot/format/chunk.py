"""Chunks: the fixed-size pieces of a shard, read and digested one by one through one buffer."""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

from ..sources.source import Source


def chunk_digests(
    source: Source, name: str, size_bytes: int, buffer: memoryview
) -> Iterator[tuple[str, int]]:
    """The digest and the length of every chunk of file `name`; `buffer`, one chunk long, is reused.

    A file shorter than `size_bytes` shows as a chunk shorter than it should be, and is the last one given.
    """
    for offset in range(0, size_bytes, len(buffer)):
        wanted_bytes = min(len(buffer), size_bytes - offset)
        count = source.read_into(name, offset, buffer[:wanted_bytes])
        yield xxhash.xxh3_128_hexdigest(buffer[:count]), count
        if count < wanted_bytes:
            return


def file_digest(source: Source, name: str, size_bytes: int, buffer: memoryview) -> tuple[str, int]:
    """The digest and the length of the whole file `name`, read through `buffer`; of at most `size_bytes` of it."""
    state, done_bytes = xxhash.xxh3_128(), 0
    while done_bytes < size_bytes:
        view = buffer[: size_bytes - done_bytes]
        count = source.read_into(name, done_bytes, view)
        state.update(view[:count])
        done_bytes += count
        if count < len(view):
            break
    return state.hexdigest(), done_bytes
