"""Defines the algorithms of digests, and computes digests of a source's files.

Each chunk of a shard has a digest, and each asset has one. The field `algorithm` of a manifest names their algorithm.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, Protocol, TypeVar

import xxhash
from typing_extensions import Buffer

from ..sources.source import Source

T = TypeVar("T")
ASSET_BUFFER_BYTES = 1 << 20
RUN_BYTES = 32 << 20
"""The size of one read if several threads read a remote source. Each read uses a new connection: a used connection may
deliver a second answer to an earlier request, and without known digests this would not be noticed."""

AlgorithmName = Literal["xxh3-128", "sha256"]


class Hasher(Protocol):
    """A digest that is being computed, as in `hashlib`."""

    def update(self, data: Buffer, /) -> None: ...

    def hexdigest(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Algorithm:
    """An algorithm of digests. A digest has `digits` lower-case hexadecimal digits.

    Each algorithm has its own number of digits, so digests of different algorithms are never equal.
    """

    new: Callable[[], Hasher]
    digits: int

    def digest(self, content: Buffer) -> str:
        hasher = self.new()
        hasher.update(content)
        return hasher.hexdigest()


XXH3 = Algorithm(xxhash.xxh3_128, 32)
"""Finds corruption, at 29 GB/s per core (docs/decisions.md). It does not find bytes that are forged to have the same digest."""
SHA256 = Algorithm(hashlib.sha256, 64)
"""Also finds forged bytes, but takes longer."""
ALGORITHMS: Mapping[AlgorithmName, Algorithm] = {"xxh3-128": XXH3, "sha256": SHA256}


class DigestedChunk(NamedTuple):
    """The digest of chunk number `position` of file `name`.

    `size_bytes` is the number of bytes that were read. It is smaller than the chunk if the file has become shorter.
    """

    name: str
    position: int
    size_bytes: int
    digest: str


def chunk_digests(
    source: Source,
    sizes: Mapping[str, int],
    chunk_bytes: int,
    readers: int = 1,
    *,
    algorithm: Algorithm,
) -> Iterator[DigestedChunk]:
    """Yield the digests of all chunks of the files, in the order of `sizes`, which maps the name of each file to its size."""
    run_bytes = max(1, RUN_BYTES // chunk_bytes) * chunk_bytes if readers > 1 else chunk_bytes
    # Keep the buffer no larger than the largest file: page faults of new memory take longer than the reading.
    buffer_bytes = min(run_bytes, max(sizes.values(), default=0))
    jobs = (
        partial(_digest_run, source, name, begin, min(run_bytes, size_bytes - begin), chunk_bytes, algorithm)
        for name, size_bytes in sizes.items()
        for begin in range(0, size_bytes, run_bytes)
    )
    for run in in_order(jobs, readers, buffer_bytes):
        yield from run


def file_digest(
    source: Source, name: str, size_bytes: int, buffer: memoryview, algorithm: Algorithm
) -> tuple[str, int]:
    """Read at most `size_bytes` of file `name` through `buffer`. Return the digest and the number of the bytes read."""
    state, done_bytes = algorithm.new(), 0
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
    source: Source,
    name: str,
    begin: int,
    size_bytes: int,
    chunk_bytes: int,
    algorithm: Algorithm,
    buffer: memoryview,
) -> list[DigestedChunk]:
    """Read `size_bytes` from byte `begin` on with one request. Return the digests of the chunks in these bytes."""
    count = source.read_into(name, begin, buffer[:size_bytes])
    found = []
    for at in range(0, size_bytes, chunk_bytes):
        chunk = buffer[at : min(at + chunk_bytes, count)]
        found.append(DigestedChunk(name, (begin + at) // chunk_bytes, len(chunk), algorithm.digest(chunk)))
    return found
