"""Readers: pieces of a source read by a few threads, each through one buffer that it keeps, results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


def in_order(jobs: Iterable[Callable[[memoryview], T]], readers: int, buffer_bytes: int) -> Iterator[T]:
    """Each job's result, called with a buffer of `buffer_bytes`; at most `readers` at once, one of them without threads.

    The first job to fail, in the jobs' order, ends it with its error.
    """
    if readers == 1:
        buffer = memoryview(bytearray(buffer_bytes))
        yield from (job(buffer) for job in jobs)
        return
    buffers: SimpleQueue[memoryview] = SimpleQueue()
    for _ in range(readers):
        buffers.put(memoryview(bytearray(buffer_bytes)))

    def run(job: Callable[[memoryview], T]) -> T:
        buffer = buffers.get_nowait()  # as many as there are threads
        try:
            return job(buffer)
        finally:
            buffers.put(buffer)

    pool = ThreadPoolExecutor(readers, thread_name_prefix="snapshot-reader")
    waiting: deque[Future[T]] = deque()
    try:
        for job in jobs:
            waiting.append(pool.submit(run, job))
            if len(waiting) > 2 * readers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
