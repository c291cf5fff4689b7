"""Runs one attempt of a job on a worker, and stores its start, output and end with the attempt's fence."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import ParamSpec, TypeVar

from ....errors import (
    CallEnded,
    Cancelled,
    DeadlineExceeded,
    FunctionStopped,
    GatewayError,
    JobStoreFailed,
    OutputInvalid,
    PilotflameError,
    RevisionRetired,
    WorkerDied,
)
from ....handlers.caller import NORMAL
from ....handlers.codec import JSON_TYPE
from ...calls.serving.invocation import LAST, Invocation, Output
from ...calls.serving.live_function import LiveFunction
from ...ground.telemetry.logs import Capture
from .job import Job, JobOutcome, JobState, NewJob
from .job_store import JobStore

P = ParamSpec("P")
T = TypeVar("T")

MAX_AGGREGATE_BYTES = 20 << 20
"""A streamed output up to this size is also stored as the job's output, as one JSON list of all pieces."""
MAX_STREAM_BYTES = 256 << 20
"""A job with a larger streamed output fails."""
ROW_BYTES = 32
"""The overhead of a row. It is added to the size of each piece, so that tiny pieces count too."""
BACKOFF_S = 2.0
"""The delay before the second attempt if no worker could start. Each further delay is 4 times longer."""
MAX_BACKOFF_S = 300.0
MAX_LOG_CHARS = 64 << 10
"""The last lines that a job has printed, up to this size, are stored with its result."""
LOGS_EVERY_S = 0.5
"""The shortest time between two webhook deliveries of a job's printed lines, as in Cog."""
UNSTORED_S = 0.5
"""An unstored job that has not ended after this time is stored. Then it can be listed and cancelled, and it
survives an end of the gateway."""
STORE_RETRY_S = 5.0
"""The pause before a failed call of the store is repeated."""


class JobReports:
    """The reports of a running attempt: its progress, its metrics and the lines that it prints.

    A report of progress or lines may be lost. If the store fails, the error is reported only when the result is stored.
    """

    def __init__(self, job: Job, invocation: Invocation, store: JobStore, tasks: asyncio.TaskGroup) -> None:
        self._invocation, self._store, self._tasks = invocation, store, tasks
        invocation.on_progress, invocation.on_metrics = self._store_progress, self._keep_metrics
        invocation.capture = Capture(MAX_LOG_CHARS, self._tell_lines)
        self._tells_lines = job.webhook is not None and "logs" in job.webhook.events
        self._fence, self._told = 0, ""
        self._progress: bytes | None = None
        self.metrics: bytes | None = None
        """The latest report of metrics, which is stored with the result."""
        self._progress_writer: asyncio.Task[None] | None = None
        self._teller: asyncio.Task[None] | None = None

    @property
    def lines(self) -> str:
        """The lines that this job has printed, without lines of other invocations of the worker."""
        return self._invocation.capture.text() if self._invocation.capture is not None else ""

    def begin(self, fence: int) -> None:
        """Store what was reported so far, because the start of the attempt is now stored with this fence."""
        self._fence = fence
        self._store_progress()
        self._tell_lines()

    def release(self) -> None:
        """Remove the callbacks at the attempt's end, because the invocation refers to this object through them.

        Otherwise this reference cycle would keep the input and the output in memory until the garbage collector runs,
        perhaps for long.
        """
        self._invocation.on_progress = self._invocation.on_metrics = self._invocation.capture = None

    def _store_progress(self, progress: bytes | None = None) -> None:
        """Store the latest report. While a report is being written, only the latest of the new reports is kept."""
        self._progress = progress or self._progress
        idle = self._progress_writer is None or self._progress_writer.done()
        if self._fence and self._progress is not None and idle:
            self._progress_writer = self._tasks.create_task(self._write_progress())

    def _keep_metrics(self, metrics: bytes) -> None:
        self.metrics = metrics

    async def _write_progress(self) -> None:
        with contextlib.suppress(Exception):
            while (progress := self._progress) is not None:
                self._progress = None
                await self._store.set_progress(self._invocation.id, self._fence, progress)

    def _tell_lines(self) -> None:
        """Send the printed lines to the webhook, at most once in LOGS_EVERY_S."""
        idle = self._teller is None or self._teller.done()
        if self._tells_lines and self._fence and idle and not self._invocation.output.done():
            self._teller = self._tasks.create_task(self._send_lines())

    async def _send_lines(self) -> None:
        with contextlib.suppress(Exception):
            while await self.send_new_lines():
                await asyncio.wait([self._invocation.output], timeout=LOGS_EVERY_S)

    async def send_new_lines(self) -> bool:
        """Send the printed lines. Return False if nothing was printed since the last call, or the attempt has ended."""
        lines = self.lines
        if not self._tells_lines or lines == self._told:
            return False
        self._told = lines
        return await self._store.tell_logs(self._invocation.id, self._fence, lines)


class JobAttempt:
    """Follows the invocation of a job at a revision, and stores its progress and result."""

    def __init__(
        self, job: Job, live: LiveFunction, store: JobStore, tasks: asyncio.TaskGroup, closing: asyncio.Event,
        unstored: NewJob | None,
    ) -> None:  # fmt: skip
        """Create the invocation; the caller submits it to the revision of `live`.

        With `unstored`, the job is not stored yet; see `stored`.
        Once `closing` is set, a failed write to the store is not repeated: the gateway queues the job again at its next start.
        """
        self.job, self._revision, self._log_channel = job, live.revision, live.logs
        self._store, self._closing, self._unstored = store, closing, unstored
        self.awaited = unstored is not None
        """True if the invocation was submitted before the job was stored, for a caller who waits."""
        self.stored: asyncio.Future[Job | None] = asyncio.get_running_loop().create_future()
        """For an unstored job. Its result is the job once the job is stored, at its end or after UNSTORED_S. The result
        is None if the job did not run, because its revision or the gateway ends or no worker could start. If the job
        could not be stored, or not run to its end, the future has an error.
        """
        self._sent = asyncio.Event()
        """Set when the invocation was sent to a worker, or ended before that."""
        self._stored_bytes = 0
        self.fence = 0
        """The fence of the attempt; 0 while the start is not stored."""
        now_s, waited_s = time.monotonic(), max(0.0, store.clock() - job.created_s)
        deadline_s = now_s + max(0.0, job.ttl_s - waited_s)
        self.invocation = Invocation(
            job.id, job.input,
            now_s=now_s, deadline_s=deadline_s, hold_until_s=deadline_s,
            content_type=job.content_type, traceparent=job.traceparent,
            streaming=live.revision.streaming, execution_s=job.execution_timeout_s, on_sent=self._sent.set,
            extra={"bare": True, **(job.extra or {}), "job": {"id": job.id, "attempt": job.attempts + 1}},
            tenant=job.owner, priority=LAST if job.priority else NORMAL, source=job.source,
        )  # fmt: skip
        self.invocation.output.add_done_callback(lambda _: self._sent.set())
        self.reports = JobReports(job, self.invocation, store, tasks)

    def cancel(self, error: PilotflameError | None = None) -> None:
        """Cancel the invocation, which fails with `error` if there is one. This does not change the job in the store."""
        self._revision.cancel(self.invocation, error)

    def log(self, text: str) -> None:
        """Write a line about the job to the function's log."""
        self._log_channel.write("gateway", f"job {self.job.id} {text}", "error", request_id=self.job.id)

    async def run(self) -> None:
        """Store the start, output and end of the attempt. Raise JobStoreFailed if this fails while the gateway ends."""
        try:
            if self._unstored is None or not await self._run_unstored(self._unstored):
                await self._run()
        except JobStoreFailed:
            raise
        except Exception as error:  # noqa: BLE001
            # The job must end: otherwise its callers would wait forever.
            self.log(f"was given up: {type(error).__name__}: {error}")
            self.cancel()
            internal = GatewayError(f"The job's result could not be stored: {type(error).__name__}.")
            await self._finish(JobOutcome(JobState.FAILED, error=internal.to_wire()))
        finally:
            # If this task was cancelled or the code above has a bug, end the wait of the caller with an error.
            if self._unstored is not None and not self.stored.done():
                self._refuse(GatewayError("The job was not run to its end.", remedy="Submit it again."))

    async def _run_unstored(self, new: NewJob) -> bool:
        """Wait for the end of an unstored job, and store it. Return False if the job was stored before its end.

        Until `stored` is resolved, no caller knows the job's id. So if the job cannot be stored, the caller gets the
        error.
        """
        output = self.invocation.output
        try:
            await asyncio.wait([output], timeout=UNSTORED_S)
            if (outcome := self._ended()) is not None:
                outcome = replace(outcome, metrics=self.reports.metrics)
                self.stored.set_result(await self._store.record(new, self._as_sent(), outcome))
            elif output.done() and not self.invocation.worker:
                self.stored.set_result(None)
            else:
                await self._store_early(new)
        except PilotflameError as error:
            self.cancel()
            self._refuse(error)
            return True
        return self.stored.result() is not self.job

    def _refuse(self, error: PilotflameError) -> None:
        self.stored.set_exception(error)
        # Mark the exception as retrieved: if the caller has gone, asyncio must not warn about it.
        self.stored.exception()

    def _ended(self) -> JobOutcome | None:
        """Return the outcome of an unstored job; None if it has not ended, or if it must be queued again."""
        output = self.invocation.output
        if not output.done() or output.cancelled():
            return None
        error = output.exception()
        if error is None:
            return _completed(output.result(), self.reports.lines)
        return self._failure(error, error.to_wire()) if isinstance(error, PilotflameError) else None

    def _as_sent(self) -> Job:
        """Return the job with its worker, and with the time at which it was sent to the worker."""
        sent_s, now_s = self.invocation.sent_s, time.monotonic()
        started_s = self._store.clock() - (now_s - sent_s if sent_s else 0.0)
        return replace(self.job, worker=self.invocation.worker, started_s=started_s)

    async def _store_early(self, new: NewJob) -> None:
        """Store an unstored job before its end, as IN_PROGRESS if it was sent to a worker."""
        if self.invocation.worker:
            self.fence = await self._store.start(new, self.job.id, self.invocation.worker) or 0
            self.reports.begin(self.fence)
        else:
            await self._store.admit(new, self.job.id)
        if self._log_channel.ended:
            # Cancel the job of a deleted function: `Jobs.forget` may have run before the job was stored.
            await self._finish(JobOutcome(JobState.CANCELLED))
        self.stored.set_result(self.job)

    async def _run(self) -> None:
        output = self.invocation.output
        await self._sent.wait()
        try:
            if (self.invocation.worker or not output.done()) and not await self._store_pieces():
                # The job has ended, is queued again or is run by another attempt.
                self.cancel()
                return
        except OutputInvalid as too_large:
            self.cancel(too_large)
            await self._finish(
                JobOutcome(JobState.FAILED, error=too_large.to_wire(), logs=self.reports.lines)
            )
            return
        # Use `wait` because, unlike `await output`, it does not raise the exception of the future.
        await asyncio.wait([output])
        if output.cancelled():
            return
        if (error := output.exception()) is not None:
            await self._fail(error)
        else:
            await self._complete(output.result())

    # -- what is stored

    async def _take(self) -> bool:
        """Store the start of the attempt if it is not stored yet. Return False if the job was not queued."""
        if not self.fence:
            fence = await self._retried(self._store.take, self.job.id, self.invocation.worker)
            self.fence = fence or 0
            self.reports.begin(self.fence)
        return bool(self.fence)

    async def _store_pieces(self) -> bool:
        """Store the start of the attempt and its streamed output. Raise OutputInvalid if the output is too large.

        Return False if this is not, or no longer, the job's running attempt.
        """
        if not await self._take():
            return False
        stream, number = self.invocation.stream, 1
        while stream is not None and (pieces := await stream.take()):
            self._stored_bytes += sum(len(piece) + ROW_BYTES for piece in pieces)
            if self._stored_bytes > MAX_STREAM_BYTES:
                raise OutputInvalid(
                    f"The streamed output is larger than {MAX_STREAM_BYTES >> 20} MiB.",
                    remedy="Yield less, or store large results elsewhere and yield their addresses.",
                )
            if not await self._retried(self._store.add_pieces, self.job.id, self.fence, number, pieces):
                return False
            number += len(pieces)
            stream.consumed(len(pieces))
        return True

    async def _complete(self, output: Output) -> None:
        if self.invocation.stream is not None:
            output = Output(await self._retried(self._aggregate), JSON_TYPE)
        await self._finish(_completed(output, self.reports.lines))

    async def _aggregate(self) -> bytes:
        """Return all pieces as one JSON list. It is empty if the output is too large or the handler wants no list."""
        if not self._revision.policy.aggregates or self._stored_bytes > MAX_AGGREGATE_BYTES:
            return b"[]"
        pieces: list[bytes] = []
        while more := await self._store.pieces(self.job.id, len(pieces)):
            pieces += [piece for _, piece in more]
        return b"[" + b",".join(pieces) + b"]"

    async def _fail(self, error: BaseException) -> None:
        if not isinstance(error, PilotflameError):
            raise error
        wire = error.to_wire()
        if (outcome := self._failure(error, wire)) is not None:
            await self._finish(outcome)
        elif isinstance(error, (FunctionStopped, RevisionRetired, GatewayError)):
            await self._requeue(wire, counted=False)
        elif not self.invocation.worker and not isinstance(error, CallEnded):
            # No worker could start. The job is delayed, since a worker may be able to start later.
            await self._requeue(wire, min(MAX_BACKOFF_S, BACKOFF_S * 4.0**self.job.attempts))
        else:
            # A call that the gateway has ended counts as an attempt only if it may have had effects.
            await self._requeue(wire, counted=not (isinstance(error, CallEnded) and error.repeatable))

    def _failure(self, error: BaseException, wire: Mapping[str, object]) -> JobOutcome | None:
        """Return the job's outcome for an error of its invocation; None if the job is queued again."""
        if isinstance(error, Cancelled):
            return JobOutcome(JobState.CANCELLED, error=wire)
        if isinstance(error, DeadlineExceeded):
            return JobOutcome(JobState.TIMED_OUT, error=wire, logs=self.reports.lines)
        again = isinstance(error, (RevisionRetired, GatewayError, WorkerDied, CallEnded))
        if again or not self.invocation.worker:
            # A job of a deleted function may not run on the next function of its name.
            return JobOutcome(JobState.CANCELLED, error=wire) if self._log_channel.ended else None
        return JobOutcome(JobState.FAILED, error=wire, logs=self.reports.lines)

    async def _requeue(self, error: dict[str, object], delay_s: float = 0.0, *, counted: bool = True) -> None:
        # Without a fence, no start was stored and the job is still queued. If the attempt does not count, only end the
        # claim. If it counts, store its start first, which increments `attempts`.
        if not self.fence and not counted:
            await self._retried(self._store.unclaim, (self.job.id,))
        elif await self._take():
            failure = JobOutcome(JobState.FAILED, error=error, logs=self.reports.lines)
            requeue = partial(self._store.requeue, failure=failure, delay_s=delay_s, counted=counted)
            await self._retried(requeue, self.job.id, self.fence)

    async def _finish(self, outcome: JobOutcome) -> None:
        if await self._take():
            outcome = replace(outcome, metrics=self.reports.metrics)
            await self._retried(self.reports.send_new_lines)
            await self._retried(self._store.finish, self.job.id, self.fence, outcome)

    async def _retried(self, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Repeat a call of the store until it succeeds, so that the result of a finished job is not lost.

        Raise JobStoreFailed if the call fails after `closing` was set.
        """
        while True:
            try:
                return await call(*args, **kwargs)
            except JobStoreFailed:
                if self._closing.is_set():
                    raise
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STORE_RETRY_S):
                    await self._closing.wait()


def _completed(output: Output, logs: str) -> JobOutcome:
    output_type = "" if output.content_type == JSON_TYPE else output.content_type
    return JobOutcome(JobState.COMPLETED, output.payload, output_type, logs=logs)
