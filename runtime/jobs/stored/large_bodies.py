"""Stores the large inputs and outputs of jobs as files beside the jobs database.

SQLite writes a large body twice, and other jobs wait for its commit. A file is written before the
transaction that refers to it, and deleted after the transaction that drops it. Files to which no row refers are what
a crash has left; the next start deletes them.

The name of a file is `SIZE-RANDOM-DIGEST`. It never changes, and so two names tell whether two bodies are equal.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
import sys
from collections.abc import Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeGuard

from ....errors import JobBodyMissing, JobStoreFailed
from ....snapshot.publish import publish
from .job import Job, JobOutcome, NewJob

LOG = logging.getLogger(__name__)
MOST_INLINE_BYTES = 256 << 10
"""Larger bodies are files."""
WRITE_BYTES = 4 << 20
"""Each part of a file of this size is written to the disk before the next one, so that commits need not wait for all of it."""
UNSENT_S = 60.0
"""How much longer a job stays each time if a delivery still needs its large bodies."""
THREADS = 2


def is_large(body: bytes | None) -> TypeGuard[bytes]:
    return body is not None and len(body) > MOST_INLINE_BYTES


def size_of(name: str) -> int:
    """Return the size of a large body in bytes; 0 for the name "", which stands for no file."""
    return int(name.partition("-")[0] or 0)


def same_body(one: str, other: str) -> bool:
    """Return True if two files have equal bodies."""
    parts = one.split("-"), other.split("-")
    return (parts[0][0], parts[0][-1]) == (parts[1][0], parts[1][-1])


class LargeBodies:
    """The files in one folder. Two threads read, write and delete them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="job-bodies")

    async def write(self, body: bytes) -> str:
        """Store a body durably on disk, and return its name. Raise JobStoreFailed if it cannot be written."""
        written = self._threads.submit(self._write, body)
        try:
            return await asyncio.wrap_future(written)
        except asyncio.CancelledError:
            written.add_done_callback(self._drop)
            raise

    async def read(self, name: str) -> bytes | None:
        """Return a body, or None if its file was deleted. Raise JobStoreFailed if it cannot be read."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._read, name)

    async def store_input(self, new: NewJob) -> NewJob:
        """Return the new job with the file of its input, if that is large. Raise JobStoreFailed."""
        return replace(new, large_input=await self.write(new.input)) if is_large(new.input) else new

    async def store_output(self, outcome: JobOutcome) -> JobOutcome:
        """Return the outcome with the file of its output, if that is large. Raise JobStoreFailed."""
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
                f"The file {name} of job {job.id} is missing from the state folder.",
                remedy="Submit the job again.",
            )
        return body

    def delete(self, names: Collection[str]) -> None:
        """Delete files in the background."""
        if names:
            # RuntimeError: the store is closed. The next start deletes the files.
            with suppress(RuntimeError):
                self._threads.submit(self._delete, tuple(names))

    def _drop(self, written: Future[str]) -> None:
        """Delete a file whose writer was cancelled."""
        if not written.cancelled() and written.exception() is None:
            self._delete((written.result(),))

    def keep(self, names: Collection[str]) -> None:
        """Delete all files but these. Blocks."""
        kept = frozenset(names)
        if self._folder.is_dir():
            self._delete(path.name for path in self._folder.iterdir() if path.name not in kept)

    def close(self) -> None:
        """Wait until the threads have ended. Blocks."""
        self._threads.shutdown()

    def _write(self, body: bytes) -> str:
        digest = hashlib.blake2b(body, digest_size=16).hexdigest()
        path = self._folder / f"{len(body)}-{secrets.token_hex(8)}-{digest}"
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            with publish(path, 0o600) as stream:
                for start in range(0, len(body), WRITE_BYTES):
                    stream.write(memoryview(body)[start : start + WRITE_BYTES])
                    stream.flush()
                    os.fdatasync(stream.fileno())
        except OSError as error:
            raise JobStoreFailed(
                f"{path} could not be written: {error.strerror}.",
                remedy="Check whether the disk of the state folder is full.",
            ) from error
        return path.name

    def _read(self, name: str) -> bytes | None:
        path = self._folder / name
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise JobStoreFailed(
                f"{path} could not be read: {error.strerror}.", remedy="Check the disk."
            ) from error

    def _delete(self, names: Iterable[str]) -> None:
        for name in names:
            try:
                (self._folder / name).unlink(missing_ok=True)
            except OSError as error:
                # The next start deletes it.
                LOG.warning("%s could not be deleted: %s", self._folder / name, error.strerror)
