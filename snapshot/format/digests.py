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
    # A buffer is not larger than the largest file: the page faults of new memory take longer than reading.
    buffer_bytes = min(chunk_bytes, max(sizes.values(), default=0))
    jobs = (
        partial(_digest_chunk, source, name, index, min(chunk_bytes, size_bytes - begin), begin)
        for name, size_bytes in sizes.items()
        for index, begin in enumerate(range(0, size_bytes, chunk_bytes))
    )
    return in_order(jobs, readers, buffer_bytes)


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


def _digest_chunk(
    source: Source, name: str, position: int, size_bytes: int, begin: int, buffer: memoryview
) -> DigestedChunk:
    count = source.read_into(name, begin, buffer[:size_bytes])
    return DigestedChunk(name, position, count, xxhash.xxh3_128_hexdigest(buffer[:count]))
