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
"""The bytes of one read of a remote source, which several threads read. Each read has a new connection: a used
connection may deliver a second answer to an earlier request, and without known digests nothing would reveal that."""


class DigestedChunk(NamedTuple):
    """The digest of chunk number `position` of file `name`.

    `size_bytes` is the number of bytes read, which is too small if the file has become shorter.
    """

    name: str
    position: int
    size_bytes: int
    digest: str


def chunk_digests(
    source: Source, sizes: Mapping[str, int], chunk_bytes: int, readers: int = 1
) -> Iterator[DigestedChunk]:
    """Yield the digests of all chunks of the files in `sizes`, which maps names to bytes, in the order of `sizes`."""
    run_bytes = max(1, RUN_BYTES // chunk_bytes) * chunk_bytes if readers > 1 else chunk_bytes
    # Keep the buffer no larger than the largest file: page faults of new memory take longer than the reading.
    buffer_bytes = min(run_bytes, max(sizes.values(), default=0))
    jobs = (
        partial(_digest_run, source, name, begin, min(run_bytes, size_bytes - begin), chunk_bytes)
        for name, size_bytes in sizes.items()
        for begin in range(0, size_bytes, run_bytes)
    )
    for run in in_order(jobs, readers, buffer_bytes):
        yield from run


def file_digest(source: Source, name: str, size_bytes: int, buffer: memoryview) -> tuple[str, int]:
    """Read at most `size_bytes` of file `name` through `buffer`. Return the digest and the number of the bytes read."""
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

    At most `readers` jobs run at once, each on a thread. With one reader, the caller's thread runs the jobs. If a job
    raises, the results of the jobs before it are yielded, then its exception is raised.
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
    """Read `size_bytes` from byte `begin` on with one request. Return the digests of the chunks in these bytes."""
    count = source.read_into(name, begin, buffer[:size_bytes])
    found = []
    for at in range(0, size_bytes, chunk_bytes):
        chunk = buffer[at : min(at + chunk_bytes, count)]
        found.append(
            DigestedChunk(name, (begin + at) // chunk_bytes, len(chunk), xxhash.xxh3_128_hexdigest(chunk))
        )
    return found
