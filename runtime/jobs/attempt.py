"""An attempt: one job on its way through a worker. Stores what becomes of it; the fence keeps late words out."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from ...errors import (
    ActivationFailed,
    Cancelled,
    DeadlineExceeded,
    GatewayError,
    JobStoreFailed,
    PilotlightError,
    RevisionRetired,
    WorkerDied,
)
from ..invocation import Invocation, Stream
from ..revision import Revision
from .board import Board
from .job import Job, Outcome, State
from .store import JobStore

MAX_PIECES_AT_ONCE = 64
MAX_AGGREGATE_BYTES = 20 << 20
"""A streamed answer is the job's output too, as a list, up to this size."""
BACKOFF_S = 2.0
MAX_BACKOFF_S = 300.0
LOG_LINES = 20


class Attempt:
    """Submits a job's invocation to a revision, and sees it to its end."""

    def __init__(
        self,
        job: Job,
        revision: Revision,
        store: JobStore,
        board: Board,
        tasks: asyncio.TaskGroup,
        last_lines: Callable[[str], str],
    ) -> None:
        """`last_lines` gives what a worker printed last."""
        self._tasks = tasks
        self.job = job
        self._revision = revision
        self._store = store
        self._board = board
        self._last_lines = last_lines
        self._sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._fence = 0
        self._progress: bytes | None = None
        self._writing: asyncio.Task[None] | None = None
        self._cancelled = False
        now_s, waited_s = time.monotonic(), max(0.0, time.time() - job.created_s)
        deadline_s = now_s + max(0.0, job.ttl_s - waited_s)
        self.invocation = Invocation(
            job.id, job.input,
            now_s=now_s, deadline_s=deadline_s, hold_until_s=deadline_s,
            content_type=job.content_type, traceparent=job.traceparent,
            streaming=revision.streaming, execution_s=job.execution_timeout_s, on_sent=self._on_sent,
            extra={**(job.extra or {}), "bare": True, "job": {"id": job.id, "attempt": job.attempts + 1}},
            on_progress=self._on_progress,
        )  # fmt: skip
        self.invocation.answer.add_done_callback(self._on_sent)

    def submit(self) -> None:
        """Raises QueueFull."""
        self._revision.submit(self.invocation)

    @property
    def sent(self) -> bool:
        """Whether a worker has it, or had."""
        return self._sent.done()

    def cancel(self) -> None:
        """The job was cancelled: the store knows already."""
        self._cancelled = True
        self._revision.cancel(self.invocation)

    async def run(self) -> None:
        """To the end of the attempt; what is raised is the store's."""
        try:
            if not await self._take():
                return
            if self.invocation.stream is not None:
                await self._store_pieces(self.invocation.stream)
            answer = await self.invocation.answer
        except PilotlightError as error:
            await self._fail(error)
        except asyncio.CancelledError:
            if not self._cancelled:
                raise
        else:
            if self.invocation.stream is None:
                kind = "" if answer.content_type == "application/json" else answer.content_type
                await self._finish(Outcome(State.COMPLETED, answer.payload, kind))
            else:
                aggregate = await self._aggregate() if self._revision.aggregates else b"[]"
                await self._finish(Outcome(State.COMPLETED, aggregate))
        finally:
            self._board.tell(self.job.id)

    # -- progress: the last word counts, and one is written at a time

    def _on_progress(self, said: bytes) -> None:
        self._progress = said
        self._start_writing()

    def _start_writing(self) -> None:
        """Not before the store knows of this attempt."""
        idle = self._writing is None or self._writing.done()
        if idle and self._fence and self._progress is not None:
            self._writing = self._tasks.create_task(self._write_progress())

    async def _write_progress(self) -> None:
        with contextlib.suppress(
            JobStoreFailed
        ):  # its end is what must be stored, and says so if it cannot be
            while (said := self._progress) is not None:
                self._progress = None
                await self._store.set_progress(self.job.id, self._fence, said)
                self._board.tell(self.job.id)

    async def _take(self) -> bool:
        """Wait until a worker has it, and say so; False if it is nobody's any more. Raises what kept it from that."""
        await self._sent
        if not self.invocation.worker and self.invocation.answer.done():
            self.invocation.answer.result()
        taken = await self._store.take(self.job.id, self.invocation.worker)
        if taken is None:
            self._revision.cancel(self.invocation)
            return False
        self._fence = taken.attempts
        self._board.tell(self.job.id)
        self._start_writing()
        return True

    async def _store_pieces(self, stream: Stream) -> None:
        number = 1
        while (piece := await stream.get()) is not None:
            pieces = [piece]
            while len(pieces) < MAX_PIECES_AT_ONCE and (piece := stream.get_nowait()) is not None:
                pieces.append(piece)
            await self._store.add_pieces(self.job.id, self._fence, number, pieces)
            number += len(pieces)
            self._board.tell(self.job.id)

    async def _aggregate(self) -> bytes:
        """All pieces as one list, as far as that is not too much."""
        found: list[bytes] = []
        size_bytes, after = 0, 0
        while some := await self._store.pieces(self.job.id, after, 1000):
            for number, piece in some:
                after, size_bytes = number, size_bytes + len(piece) + 1
                if size_bytes > MAX_AGGREGATE_BYTES:
                    return b"[]"
                found.append(piece)
        return b"[" + b",".join(found) + b"]"

    async def _fail(self, error: PilotlightError) -> None:
        wire = error.to_wire()
        if isinstance(error, (RevisionRetired, GatewayError)):
            await self._requeue(wire, 0.0, counted=False)
        elif isinstance(error, (WorkerDied, ActivationFailed)):
            delay_s = min(MAX_BACKOFF_S, BACKOFF_S * 4.0 ** (self.job.attempts))
            await self._requeue(wire, 0.0 if isinstance(error, WorkerDied) else delay_s, counted=True)
        elif isinstance(error, DeadlineExceeded):
            await self._finish(Outcome(State.TIMED_OUT, error=wire, logs=self._logs()))
        elif isinstance(error, Cancelled):
            await self._finish(Outcome(State.CANCELLED, error=wire))
        else:
            await self._finish(Outcome(State.FAILED, error=wire, logs=self._logs()))

    async def _requeue(self, error: dict[str, object], delay_s: float, *, counted: bool) -> None:
        if not self._fence:  # it failed before a worker had it
            if not counted:
                return
            taken = await self._store.take(self.job.id)
            if taken is None:
                return
            self._fence = taken.attempts
        await self._store.requeue(self.job.id, self._fence, error=error, delay_s=delay_s, counted=counted)

    async def _finish(self, outcome: Outcome) -> None:
        if not self._fence:
            taken = await self._store.take(self.job.id)
            if taken is None:
                return
            self._fence = taken.attempts
        await self._store.finish(self.job.id, self._fence, outcome)

    def _logs(self) -> str:
        return self._last_lines(self.invocation.worker)

    def _on_sent(self, _answer: object = None) -> None:
        if not self._sent.done():
            self._sent.set_result(None)
