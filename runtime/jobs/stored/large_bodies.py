"""Stores the large inputs and outputs of jobs as blobs, apart from the rows of jobs.

SQLite writes a large body twice, and other jobs wait for its commit. A blob is written before the
transaction that refers to it, and deleted after the transaction that drops it. Blobs to which no row refers are what
a crash has left; the next start deletes them.

The name of a blob is `SIZE-RANDOM-DIGEST`. A blob never changes, so two names tell whether two bodies are equal.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import sys
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import TypeGuard

from ....errors import JobBodyMissing
from ...ground.storing.blobs import Blobs
from .job import Job, JobOutcome, NewJob

MOST_INLINE_BYTES = 256 << 10
"""Larger bodies are blobs."""
UNSENT_S = 60.0
"""If a delivery still needs the large bodies of a job at the end of its retention, keep the job for this much longer, and check again."""
THREADS = 2


def is_large(body: bytes | None) -> TypeGuard[bytes]:
    return body is not None and len(body) > MOST_INLINE_BYTES


def size_of(name: str) -> int:
    """Return the size of a large body in bytes; 0 for the name "", which stands for no blob."""
    return int(name.partition("-")[0] or 0)


def same_body(one: str, other: str) -> bool:
    """Return True if the blobs with these names have equal bodies."""
    parts = one.split("-"), other.split("-")
    return (parts[0][0], parts[0][-1]) == (parts[1][0], parts[1][-1])


class LargeBodies:
    """The large bodies of one store. Two threads read, write and delete them."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="job-bodies")

    async def write(self, body: bytes) -> str:
        """Store a body durably, and return its name. Raise JobStoreFailed if it cannot be written."""
        written = self._threads.submit(self._write, body)
        try:
            return await asyncio.wrap_future(written)
        except asyncio.CancelledError:
            written.add_done_callback(self._drop)
            raise

    async def read(self, name: str) -> bytes | None:
        """Return a body, or None if it was deleted. Raise JobStoreFailed if it cannot be read."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._blobs.get, name)

    async def store_input(self, new: NewJob) -> NewJob:
        """If the input is large, store it in a blob, and return the new job with the blob's name. Raise JobStoreFailed."""
        return replace(new, large_input=await self.write(new.input)) if is_large(new.input) else new

    async def store_output(self, outcome: JobOutcome) -> JobOutcome:
        """If the output is large, store it in a blob, and return the outcome with the blob's name. Raise
        JobStoreFailed.
        """
        if not is_large(outcome.output):
            return outcome
        return replace(outcome, large_output=await self.write(outcome.output))

    async def read_bodies(self, job: Job, most: int = sys.maxsize) -> Job:
        """Return the job with its large bodies of at most `most` bytes. Raise JobBodyMissing or JobStoreFailed."""
        if 0 < size_of(job.large_input) <= most:
            job = replace(job, input=await self._read_of(job, job.large_input), large_input="")
        if 0 < size_of(job.large_output) <= most:
            job = replace(job, output=await self._read_of(job, job.large_output), large_output="")
        return job

    async def _read_of(self, job: Job, name: str) -> bytes:
        if (body := await self.read(name)) is None:
            raise JobBodyMissing(
                f"The large body {name} of job {job.id} is missing from the store.",
                remedy="Submit the job again.",
            )
        return body

    def delete(self, names: Collection[str]) -> None:
        """Delete bodies in the background."""
        if names:
            # RuntimeError means that the store is closed. The next start deletes the bodies.
            with suppress(RuntimeError):
                self._threads.submit(self._blobs.delete, tuple(names))

    def _drop(self, written: Future[str]) -> None:
        """Delete a body whose writer was cancelled."""
        if not written.cancelled() and written.exception() is None:
            self._blobs.delete((written.result(),))

    def keep(self, names: Collection[str]) -> None:
        """Delete all bodies except `names`, because a crash has left them. Blocks."""
        self._blobs.keep(names)

    def close(self) -> None:
        """Wait until the threads have ended, and close the store of blobs. Blocks."""
        self._threads.shutdown()
        self._blobs.close()

    def _write(self, body: bytes) -> str:
        digest = hashlib.blake2b(body, digest_size=16).hexdigest()
        name = f"{len(body)}-{secrets.token_hex(8)}-{digest}"
        self._blobs.put(name, body)
        return name
