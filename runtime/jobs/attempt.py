"""An attempt: one job on its way through a worker. Stores what becomes of it; the fence keeps late words out."""

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
"""A streamed answer is the job's output too, as a list, up to this size."""
MAX_STREAM_BYTES = 256 << 20
"""So much of a streamed answer is stored: what is larger fails."""
ROW_BYTES = 32
"""What a piece takes beside its bytes: many that are tiny are much too."""
BACKOFF_S = 2.0
MAX_BACKOFF_S = 300.0
LOG_LINES = 20
STORE_RETRY_S = 5.0


class JobAttempt:
    """Submits a job's invocation to a revision, and sees it to its end."""

    def __init__(
        self,
        job: Job,
        revision: Revision,
        store: JobStore,
        tasks: asyncio.TaskGroup,
        closing: asyncio.Event,
        last_lines: Callable[[str], str],
    ) -> None:
        """`last_lines` gives what a worker printed last. Once `closing`, what the disk refuses is left to the next life."""
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
        self._writing: asyncio.Task[None] | None = None
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
        """Raises QueueFull, RevisionRetired."""
        self._revision.submit(self.invocation)

    @property
    def sent(self) -> bool:
        """Whether a worker has it, or had."""
        return self._sent.done()

    def cancel(self) -> None:
        """The job was cancelled: the store knows already."""
        self._revision.cancel(self.invocation)

    async def run(self) -> None:
        """To the end of the attempt. JobStoreFailed if the gateway closes before the disk took what became of it."""
        answer = self.invocation.output
        await self._sent
        went = bool(self.invocation.worker) or not answer.done()  # else it ended before a worker had it
        try:
            if went and not (await self._take() and await self._store_pieces(self.invocation.stream)):
                self.cancel()  # it is another's by now, or nobody's
                return
        except OutputInvalid as too_large:
            self.cancel()
            await self._finish(JobOutcome(JobState.FAILED, error=too_large.to_wire(), logs=self._logs()))
            return
        await asyncio.wait([answer])  # which never raises what the answer holds
        if answer.cancelled():
            return
        if (error := answer.exception()) is not None:
            await self._fail(error)
        else:
            await self._complete(answer.result())

    async def give_up(self, error: Exception) -> None:
        """It broke in our own hands: nobody is to wait for it for ever."""
        self.cancel()
        wire = GatewayError(f"What became of the job could not be stored: {type(error).__name__}.").to_wire()
        await self._finish(JobOutcome(JobState.FAILED, error=wire))

    # -- progress: the last word counts, and one is written at a time

    def _on_progress(self, said: bytes) -> None:
        self._progress = said
        self._write_soon()

    def _write_soon(self) -> None:
        idle = self._writing is None or self._writing.done()
        if self._fence and self._progress is not None and idle:
            self._writing = self._tasks.create_task(self._write_progress())

    async def _write_progress(self) -> None:
        # Its end is what must be stored, and says so if it cannot be: whatever is wrong here harms no other job.
        with contextlib.suppress(Exception):
            while (said := self._progress) is not None:
                self._progress = None
                await self._store.set_progress(self.job.id, self._fence, said)

    # -- what the store is told

    async def _take(self) -> bool:
        """Say that a worker has it, if that was not said yet; False if it is nobody's any more."""
        if not self._fence:
            taken = await self._surely(lambda: self._store.take(self.job.id, self.invocation.worker))
            if taken is None:
                return False
            self._fence = taken.attempts
            self._write_soon()
        return True

    async def _store_pieces(self, stream: Stream | None) -> bool:
        """The pieces of a streamed answer as they come; False as `_take`. OutputInvalid if they are too much."""
        number = 1
        while stream is not None and (pieces := await stream.take()):
            self._stored_bytes += sum(len(piece) + ROW_BYTES for piece in pieces)
            if self._stored_bytes > MAX_STREAM_BYTES:
                raise OutputInvalid(
                    f"The streamed answer is larger than {MAX_STREAM_BYTES >> 20} MiB.",
                    remedy="Yield less, or put large results elsewhere and yield their addresses.",
                )
            if not await self._surely(self._adding(number, pieces)):
                return False
            number += len(pieces)
            stream.consumed(len(pieces))
        return True

    def _adding(self, number: int, pieces: list[bytes]) -> Callable[[], Awaitable[bool]]:
        return lambda: self._store.add_pieces(self.job.id, self._fence, number, pieces)

    async def _complete(self, answer: Output) -> None:
        if self.invocation.stream is None:
            kind = "" if answer.content_type == "application/json" else answer.content_type
            await self._finish(JobOutcome(JobState.COMPLETED, answer.payload, kind))
        else:
            aggregate = await self._surely(self._aggregate) if self._revision.policy.aggregates else b"[]"
            await self._finish(JobOutcome(JobState.COMPLETED, aggregate))

    async def _aggregate(self) -> bytes:
        """All pieces as one list; an empty one if that would be too much, of which nothing is read."""
        if self._stored_bytes > MAX_AGGREGATE_BYTES:
            return b"[]"
        found: list[bytes] = []
        while some := await self._store.pieces(self.job.id, len(found), 1000):
            found += [piece for _, piece in some]
        return b"[" + b",".join(found) + b"]"

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
        elif not self.invocation.worker:  # none could start: the next one may, a little later
            delay_s = min(MAX_BACKOFF_S, BACKOFF_S * 4.0**self.job.attempts)
            await self._requeue(wire, delay_s)
        elif isinstance(
            error, WorkerDied
        ):  # at the end of a revision those are killed that are late: not the job's fault
            await self._requeue(wire, counted=not self._revision.retiring)
        else:
            await self._finish(JobOutcome(JobState.FAILED, error=wire, logs=self._logs()))

    async def _requeue(self, error: dict[str, object], delay_s: float = 0.0, *, counted: bool = True) -> None:
        if not self._fence and not counted:
            return  # it is still queued
        if await self._take():
            await self._surely(
                lambda: self._store.requeue(
                    self.job.id, self._fence, error=error, delay_s=delay_s, counted=counted, logs=self._logs()
                )
            )

    async def _finish(self, outcome: JobOutcome) -> None:
        if await self._take():
            await self._surely(lambda: self._store.finish(self.job.id, self._fence, outcome))

    async def _surely(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Asks the store until the disk does not refuse: what a worker has done is not to be done again for that."""
        while True:
            try:
                return await ask()
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
