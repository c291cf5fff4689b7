"""An attempt: one run of a job on a worker, whose start, output and end are stored under its fence."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ...errors import (
    Cancelled,
    DeadlineExceeded,
    GatewayError,
    JobStoreFailed,
    OutputInvalid,
    PilotflameError,
    RevisionRetired,
    WorkerDied,
)
from ..serving.invocation import LAST, NORMAL, Invocation, Output, Stream
from ..serving.revision import Revision
from .job import Job, JobOutcome, JobState
from .store import JobStore

T = TypeVar("T")

MAX_AGGREGATE_BYTES = 20 << 20
"""The largest streamed output that is also stored as one list, the job's output."""
MAX_STREAM_BYTES = 256 << 20
"""The largest streamed output; a larger one fails the job."""
ROW_BYTES = 32
"""The overhead of storing a piece, so that many tiny pieces count too."""
BACKOFF_S = 2.0
MAX_BACKOFF_S = 300.0
LOG_LINES = 20
STORE_RETRY_S = 5.0


class JobAttempt:
    """Submits a job's invocation to a revision and stores what becomes of it."""

    def __init__(
        self,
        job: Job,
        revision: Revision,
        store: JobStore,
        tasks: asyncio.TaskGroup,
        closing: asyncio.Event,
        last_lines: Callable[[str], str],
    ) -> None:
        """`last_lines` returns the last log lines of a worker.

        Once `closing` is set, a write that the disk refuses is not repeated: the next start recovers the job.
        """
        self._tasks = tasks
        self.job = job
        self._revision = revision
        self._store = store
        self._closing = closing
        self._last_lines = last_lines
        self._sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._fence = 0
        self._stored_bytes = 0
        self._progress: bytes | None = None
        self._progress_writer: asyncio.Task[None] | None = None
        now_s, waited_s = time.monotonic(), max(0.0, time.time() - job.created_s)
        deadline_s = now_s + max(0.0, job.ttl_s - waited_s)
        self.invocation = Invocation(
            job.id, job.input,
            now_s=now_s, deadline_s=deadline_s, hold_until_s=deadline_s,
            content_type=job.content_type, traceparent=job.traceparent,
            streaming=revision.streaming, execution_s=job.execution_timeout_s, on_sent=self._on_sent,
            extra={**(job.extra or {}), "bare": True, "job": {"id": job.id, "attempt": job.attempts + 1}},
            on_progress=self._on_progress, tenant=job.owner, priority=LAST if job.priority else NORMAL,
        )  # fmt: skip
        self.invocation.output.add_done_callback(self._on_sent)

    def submit(self) -> None:
        """Queue the invocation. QueueFull, RevisionRetired."""
        self._revision.submit(self.invocation)

    @property
    def sent(self) -> bool:
        """Return True once a worker has received the job, or the invocation has ended."""
        return self._sent.done()

    def cancel(self) -> None:
        """Cancel the invocation of a job that is CANCELLED in the store."""
        self._revision.cancel(self.invocation)

    async def run(self) -> None:
        """Store the attempt until it ends. JobStoreFailed if the gateway closes while the disk refuses."""
        output = self.invocation.output
        await self._sent
        reached_worker = bool(self.invocation.worker) or not output.done()
        try:
            if reached_worker and not (
                await self._take() and await self._store_pieces(self.invocation.stream)
            ):
                # Another attempt holds the job, or it has ended.
                self.cancel()
                return
        except OutputInvalid as too_large:
            self.cancel()
            await self._finish(JobOutcome(JobState.FAILED, error=too_large.to_wire(), logs=self._logs()))
            return
        # `wait` does not raise the exception of the future.
        await asyncio.wait([output])
        if output.cancelled():
            return
        if (error := output.exception()) is not None:
            await self._fail(error)
        else:
            await self._complete(output.result())

    async def give_up(self, error: Exception) -> None:
        """End the job as FAILED after an internal error, so that no caller waits for it forever."""
        self.cancel()
        wire = GatewayError(f"The job's result could not be stored: {type(error).__name__}.").to_wire()
        await self._finish(JobOutcome(JobState.FAILED, error=wire))

    # -- progress: only the latest report is stored, by one write at a time

    def _on_progress(self, progress: bytes) -> None:
        self._progress = progress
        self._store_progress()

    def _store_progress(self) -> None:
        idle = self._progress_writer is None or self._progress_writer.done()
        if self._fence and self._progress is not None and idle:
            self._progress_writer = self._tasks.create_task(self._write_progress())

    async def _write_progress(self) -> None:
        # A failed progress report harms nothing: a broken store is reported when the result is stored.
        with contextlib.suppress(Exception):
            while (progress := self._progress) is not None:
                self._progress = None
                await self._store.set_progress(self.job.id, self._fence, progress)

    # -- what the store records

    async def _take(self) -> bool:
        """Record the attempt's start once. Return False if the job is no longer queued."""
        if not self._fence:
            fence = await self._retried(lambda: self._store.take(self.job.id, self.invocation.worker))
            if fence is None:
                return False
            self._fence = fence
            self._store_progress()
        return True

    async def _store_pieces(self, stream: Stream | None) -> bool:
        """Store a streamed output. Return False if the job was lost; OutputInvalid if it is too large."""
        number = 1
        while stream is not None and (pieces := await stream.take()):
            self._stored_bytes += sum(len(piece) + ROW_BYTES for piece in pieces)
            if self._stored_bytes > MAX_STREAM_BYTES:
                raise OutputInvalid(
                    f"The streamed output is larger than {MAX_STREAM_BYTES >> 20} MiB.",
                    remedy="Yield less, or store large results elsewhere and yield their addresses.",
                )
            if not await self._add_pieces(number, pieces):
                return False
            number += len(pieces)
            stream.consumed(len(pieces))
        return True

    async def _add_pieces(self, number: int, pieces: list[bytes]) -> bool:
        return await self._retried(lambda: self._store.add_pieces(self.job.id, self._fence, number, pieces))

    async def _complete(self, output: Output) -> None:
        if self.invocation.stream is None:
            output_type = "" if output.content_type == "application/json" else output.content_type
            await self._finish(JobOutcome(JobState.COMPLETED, output.payload, output_type))
        else:
            aggregate = await self._retried(self._aggregate) if self._revision.policy.aggregates else b"[]"
            await self._finish(JobOutcome(JobState.COMPLETED, aggregate))

    async def _aggregate(self) -> bytes:
        """Return all pieces as one JSON list; an empty list if they exceed MAX_AGGREGATE_BYTES."""
        if self._stored_bytes > MAX_AGGREGATE_BYTES:
            return b"[]"
        pieces: list[bytes] = []
        while more := await self._store.pieces(self.job.id, len(pieces)):
            pieces += [piece for _, piece in more]
        return b"[" + b",".join(pieces) + b"]"

    async def _fail(self, error: BaseException) -> None:
        if not isinstance(error, PilotflameError):
            raise error
        wire = error.to_wire()
        if isinstance(error, Cancelled):
            await self._finish(JobOutcome(JobState.CANCELLED, error=wire))
        elif isinstance(error, DeadlineExceeded):
            await self._finish(JobOutcome(JobState.TIMED_OUT, error=wire, logs=self._logs()))
        elif isinstance(error, (RevisionRetired, GatewayError)):
            await self._requeue(wire, counted=False)
        elif not self.invocation.worker:
            # No worker could start. A later one may.
            await self._requeue(wire, min(MAX_BACKOFF_S, BACKOFF_S * 4.0**self.job.attempts))
        elif isinstance(error, WorkerDied):
            # A revision that retires kills workers that are late, which is not the job's fault.
            await self._requeue(wire, counted=not self._revision.retiring)
        else:
            await self._finish(JobOutcome(JobState.FAILED, error=wire, logs=self._logs()))

    async def _requeue(self, error: dict[str, object], delay_s: float = 0.0, *, counted: bool = True) -> None:
        if not self._fence and not counted:
            # The store still has it in the queue.
            return
        if await self._take():
            await self._retried(
                lambda: self._store.requeue(
                    self.job.id, self._fence, error=error, delay_s=delay_s, counted=counted, logs=self._logs()
                )
            )

    async def _finish(self, outcome: JobOutcome) -> None:
        if await self._take():
            await self._retried(lambda: self._store.finish(self.job.id, self._fence, outcome))

    async def _retried(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat a call of the store while the disk refuses, so that finished work does not run again."""
        while True:
            try:
                return await call()
            except JobStoreFailed:
                if self._closing.is_set():
                    raise
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STORE_RETRY_S):
                    await self._closing.wait()

    def _logs(self) -> str:
        return self._last_lines(self.invocation.worker)

    def _on_sent(self, _answer: object = None) -> None:
        if not self._sent.done():
            self._sent.set_result(None)
