"""Computes digests of a source's files: one for each chunk of a shard, and one for each asset."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, TypeVar

import xxhash

from ..sources.source import Source

T = TypeVar("T")
ASSET_BUFFER_BYTES = 1 << 20
RUN_BYTES = 32 << 20
"""How much several readers, of a remote source, read at once. Each read has a connection of its own: what it brings
cannot be verified, and a connection that was used before may bring the second answer to an earlier request."""


class DigestedChunk(NamedTuple):
    """The digest of chunk number `position` of file `name`.

    `size_bytes` is the number of bytes read. It is too small if the file has become shorter.
    """

    name: str
    position: int
    size_bytes: int
    digest: str


def chunk_digests(
    source: Source, sizes: Mapping[str, int], chunk_bytes: int, readers: int = 1
) -> Iterator[DigestedChunk]:
    """Yield the digest of every chunk of the files in `sizes` (bytes by name), in their order."""
    run_bytes = max(1, RUN_BYTES // chunk_bytes) * chunk_bytes if readers > 1 else chunk_bytes
    # A buffer is not larger than the largest file: the page faults of new memory take longer than reading.
    buffer_bytes = min(run_bytes, max(sizes.values(), default=0))
    jobs = (
        partial(_digest_run, source, name, begin, min(run_bytes, size_bytes - begin), chunk_bytes)
        for name, size_bytes in sizes.items()
        for begin in range(0, size_bytes, run_bytes)
    )
    for run in in_order(jobs, readers, buffer_bytes):
        yield from run


def file_digest(source: Source, name: str, size_bytes: int, buffer: memoryview) -> tuple[str, int]:
    """Read at most `size_bytes` of file `name` through `buffer`. Return these bytes' digest and number."""
    state, done_bytes = xxhash.xxh3_128(), 0
    while done_bytes < size_bytes:
        view = buffer[: size_bytes - done_bytes]
        count = source.read_into(name, done_bytes, view)
        state.update(view[:count])
        done_bytes += count
        if count < len(view):
            break
    return state.hexdigest(), done_bytes


def in_order(jobs: Iterable[Callable[[memoryview], T]], readers: int, buffer_bytes: int) -> Iterator[T]:
    """Call each job with a buffer of `buffer_bytes`, and yield the results in the order of the jobs.

    At most `readers` jobs run at once, each on a thread. One reader is the caller's thread. If a job raises,
    the results of the jobs before it are yielded, then its exception is raised.
    """
    if readers == 1:
        buffer = memoryview(bytearray(buffer_bytes))
        yield from (job(buffer) for job in jobs)
        return
    own = threading.local()

    def allocate() -> None:
        own.buffer = memoryview(bytearray(buffer_bytes))

    def run(job: Callable[[memoryview], T]) -> T:
        return job(own.buffer)

    pool = ThreadPoolExecutor(readers, "snapshot-reader", allocate)
    pending: deque[Future[T]] = deque()
    try:
        for job in jobs:
            pending.append(pool.submit(run, job))
            if len(pending) > 2 * readers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _digest_run(
    source: Source, name: str, begin: int, size_bytes: int, chunk_bytes: int, buffer: memoryview
) -> list[DigestedChunk]:
    """Return the digests of the chunks in `size_bytes` from byte `begin` on, which are read with one request."""
    count = source.read_into(name, begin, buffer[:size_bytes])
    found = []
    for at in range(0, size_bytes, chunk_bytes):
        chunk = buffer[at : min(at + chunk_bytes, count)]
        found.append(
            DigestedChunk(name, (begin + at) // chunk_bytes, len(chunk), xxhash.xxh3_128_hexdigest(chunk))
        )
    return found
