"""The store of jobs: what was accepted is on the disk, and every change of state is one transaction."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from ...errors import JobConflict
from . import counters, expiry, queries, transitions
from .database import Database
from .job import Job, JobCounts, JobOutcome, JobState, NewJob
from .transaction import Tell, Transaction

T = TypeVar("T")


def _nobody(*_: object) -> None:
    """Whom nobody has asked to be told."""


class JobStore:
    """All jobs of all functions. Whatever it returns was committed; JobStoreFailed if the disk refuses.

    `tell` is called within the transaction of an event that a job's webhook asked for, in the writer's thread; `told`
    once such a transaction is on the disk. `wake(function)` is called when something may be taken, or has got another
    time at which it may; `changed(job id)` for each job that has another state, another piece or another progress, whoever
    brought that about. They come on the event loop, also if the caller was cancelled while it waited.
    """

    def __init__(
        self,
        database: Database,
        *,
        keep_s: float,
        tell: Tell = _nobody,
        wake: Callable[[str], None] = _nobody,
        told: Callable[[], None] = _nobody,
        changed: Callable[[str], None] = _nobody,
    ) -> None:
        self._database = database
        self._keep_s = keep_s
        self._tell = tell
        self._wake = wake
        self._told = told
        self._changed = changed

    async def recover(self, *, now_s: float | None = None) -> int:
        """At the start: what ran when the gateway died is queued again, or FAILED after its last attempt; how many."""
        return await self._change(transitions.recover, now_s)

    async def submit(self, new: NewJob, *, now_s: float | None = None) -> tuple[Job, bool]:
        """The job and False; the job that was submitted before with the same idempotency key, and True.

        IdempotencyConflict if that one's input was another; JobConflict if the wanted id is taken; QueueFull if more
        waits than the job says may.
        """
        return await self._change(partial(transitions.submit, new=new), now_s)

    async def take(self, job_id: str, worker: str = "", *, now_s: float | None = None) -> Job | None:
        """Begin an attempt; its number, `attempts`, is the fence. None if the job is not queued any more.

        This, `finish` and `requeue` give the job without input, output and logs.
        """
        return await self._change(partial(transitions.take, job_id=job_id, worker=worker), now_s)

    async def finish(
        self, job_id: str, fence: int, outcome: JobOutcome, *, now_s: float | None = None
    ) -> Job | None:
        """End an attempt and its job. None if another attempt, or none, holds the job."""
        if not outcome.state.final:
            raise JobConflict(f"A job does not end as {outcome.state}.")
        return await self._change(
            partial(transitions.finish, job_id=job_id, fence=fence, outcome=outcome), now_s
        )

    async def requeue(
        self,
        job_id: str,
        fence: int,
        *,
        error: Mapping[str, Any] | None,
        delay_s: float = 0.0,
        counted: bool = True,
        logs: str = "",
        now_s: float | None = None,
    ) -> Job | None:
        """End an attempt; the job may have another, unless this was the last one: FAILED, with error and logs.

        An attempt that is not counted was not the job's fault: it gets one more. None as with `finish`.
        """
        change = partial(
            transitions.requeue, job_id=job_id, fence=fence, error=error, delay_s=delay_s, counted=counted, logs=logs
        )  # fmt: skip
        return await self._change(change, now_s)

    async def add_pieces(self, job_id: str, fence: int, first_number: int, pieces: Sequence[bytes]) -> bool:
        """Store more of a streamed answer, numbered from 1; False as `finish` has None.

        What came before may be sent again; JobConflict if a piece between is missing.
        """
        change = partial(
            transitions.add_pieces, job_id=job_id, fence=fence, first_number=first_number, pieces=pieces
        )
        return await self._change(change, None)

    async def set_progress(self, job_id: str, fence: int, progress: bytes) -> bool:
        """Store how far it is; False as `finish` has None."""
        change = partial(transitions.set_progress, job_id=job_id, fence=fence, progress=progress)
        return await self._change(change, None)

    async def cancel(self, function: str, job_id: str, *, now_s: float | None = None) -> tuple[Job, bool]:
        """The job, CANCELLED unless it had ended, and whether it was running."""
        return await self._change(partial(transitions.cancel, function=function, job_id=job_id), now_s)

    async def retry(self, function: str, job_id: str, *, now_s: float | None = None) -> Job:
        """Queue a job that FAILED or TIMED_OUT again, under its id; JobConflict for any other."""
        return await self._change(partial(transitions.retry, function=function, job_id=job_id), now_s)

    async def purge(self, function: str, *, now_s: float | None = None) -> int:
        """Cancel what is queued now; how many those were. In slices, so that others may write between them."""
        return await self._purge(function, await self._database.read(queries.last_number), now_s)

    async def _purge(self, function: str, last: int, now_s: float | None) -> int:
        removed = 0
        while done := await self._change(partial(transitions.purge, function=function, last=last), now_s):
            removed += done
        return removed

    async def forget(self, function: str, *, now_s: float | None = None) -> list[str]:
        """A function was deleted: what is queued is cancelled; the ids of those that still run.

        What comes meanwhile is not its own: a new function may have its name already.
        """
        last = await self._database.read(queries.last_number)
        await self._purge(function, last, now_s)
        return await self._database.read(partial(queries.running, function=function, last=last))

    async def expire(self, limit: int = 200, *, now_s: float | None = None) -> int:
        """One slice of what `next_expiry` says is due: jobs whose ttl has passed in the queue are TIMED_OUT, results
        that were kept long enough are forgotten; how many were handled. To be called again while more is due.
        """
        return await self._change(partial(expiry.expire, limit=limit), now_s)

    async def next_expiry(self, *, now_s: float | None = None) -> float | None:
        """When `expire` has something to do, which may be past; None if nothing waits for its time."""
        now_s = time.time() if now_s is None else now_s
        return await self._database.read(partial(expiry.next_expiry, now_s=now_s))

    async def get(self, function: str, job_id: str) -> Job:
        """A function's job; UnknownJob, or JobExpired if it was forgotten."""
        return await self._database.read(partial(queries.get, function=function, job_id=job_id))

    async def find(self, job_id: str, allows: Callable[[str], bool], among: Collection[str]) -> Job:
        """A job of a function that `allows`; JobExpired if one of those `among` had it, UnknownJob."""
        return await self._database.read(partial(queries.find, job_id=job_id, allows=allows, among=among))

    async def next(self, function: str, limit: int, *, now_s: float | None = None) -> list[Job]:
        """The queued jobs that may be taken, by priority, then by age."""
        now_s = time.time() if now_s is None else now_s
        return await self._database.read(partial(queries.due, function=function, limit=limit, now_s=now_s))

    async def next_due(self, function: str, *, after_s: float = 0.0) -> float | None:
        """When the first of the queued jobs that must wait may be taken; past if it may be now. None if none waits.

        With `after_s`, of those that may be taken after that.
        """
        return await self._database.read(partial(queries.next_due, function=function, after_s=after_s))

    async def pieces(self, job_id: str, after: int, limit: int) -> list[tuple[int, bytes]]:
        """(number, piece) of a streamed answer, those with numbers above `after`; not too many bytes at a time."""
        return await self._database.read(partial(queries.pieces, job_id=job_id, after=after, limit=limit))

    async def list(
        self, function: str, states: Collection[JobState] = (), limit: int = 100, before_id: str = ""
    ) -> list[Job]:
        """Jobs in these states (none: in any), the newest first, without inputs, outputs and logs."""
        look = partial(queries.newest, function=function, states=states, limit=limit, before_id=before_id)
        return await self._database.read(look)

    async def counts(self, function: str) -> JobCounts:
        return await self._database.read(partial(counters.counts, function=function))

    async def functions_waiting(self) -> Sequence[str]:
        """The functions that have jobs in the queue."""
        return await self._database.read(counters.waiting)

    async def _change(self, change: Callable[[Transaction], T], now_s: float | None) -> T:
        turns: list[Transaction] = []

        def run(connection: sqlite3.Connection) -> T:
            turns.append(
                Transaction(connection, time.time() if now_s is None else now_s, self._keep_s, self._tell)
            )
            return change(turns[-1])

        def committed() -> None:
            for function in sorted(turns[-1].wakes):
                self._wake(function)
            for job_id in turns[-1].changed:
                self._changed(job_id)
            if turns[-1].told:
                self._told()

        return await self._database.write(run, committed)
