"""Stores jobs. Transitions run in the database's writer thread, queries in its reader thread.

Large inputs and outputs are files. They are written before the transition that refers to them, and read after the query.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import time
from collections.abc import Callable, Collection, Coroutine
from dataclasses import replace
from functools import wraps
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec, TypeVar

from ....errors import JobBodyMissing, UnknownJob
from ...ground.access.keys import ALL
from ..webhooks.delivery import MAX_BODY_BYTES, Delivery, DeliveryAttempt, DeliveryState, RetrySchedule
from . import outbox, queries, schema, transitions, turns
from .database import Database
from .job import Job, JobOutcome, JobState, NewJob
from .large_bodies import LargeBodies, is_large, size_of
from .transaction import Transaction

P = ParamSpec("P")
T = TypeVar("T")


def _transition(
    change: Callable[Concatenate[Transaction, P], T],
) -> Callable[Concatenate[JobStore, P], Coroutine[Any, Any, T]]:
    """Return a method of JobStore that runs `change` and returns its result after the commit."""

    @wraps(change)
    async def method(self: JobStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._commit(lambda transaction: change(transaction, *args, **kwargs))

    return method


def _query(
    query: Callable[Concatenate[sqlite3.Connection, P], T],
) -> Callable[Concatenate[JobStore, P], Coroutine[Any, Any, T]]:
    """Return a method of JobStore that runs `query` in the reader thread and returns its result."""

    @wraps(query)
    async def method(self: JobStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._database.read(lambda connection: query(connection, *args, **kwargs))

    return method


def _whole(
    method: Callable[Concatenate[JobStore, P], Coroutine[Any, Any, Job]],
) -> Callable[Concatenate[JobStore, P], Coroutine[Any, Any, Job]]:
    """Return a method that also reads the large bodies of the job that `method` returns."""

    @wraps(method)
    async def whole(self: JobStore, /, *args: P.args, **kwargs: P.kwargs) -> Job:
        try:
            return await self._read_bodies(await method(self, *args, **kwargs))
        except JobBodyMissing:
            # The job may have been deleted since. Then `method` raises the error for that.
            return await self._read_bodies(await method(self, *args, **kwargs))

    return whole


class JobStore:
    """The stored jobs of all functions.

    Most methods run a function of `transitions`, `queries` or `outbox`. Each takes the arguments of its function except
    the first. With an `owner`, a method treats jobs of other owners as if they did not exist. All methods raise
    JobStoreFailed if the database cannot be read or written.
    """

    def __init__(
        self,
        database: Database,
        *,
        keep_s: float,
        on_commit: Callable[[Transaction], object] = lambda _: None,
        clock: Callable[[], float] = time.time,
        bodies: outbox.WebhookBodies = MappingProxyType({}),
    ) -> None:
        """Jobs are kept for `keep_s` after their end. `bodies` makes the bodies of webhooks whose form is not
        pilotflame's own.

        After each transition, the event loop calls `on_commit`, even if the caller of the transition was cancelled.
        """
        self._database = database
        self._large = LargeBodies(database.path.with_suffix(".bodies"))
        self._keep_s = keep_s
        self._bodies = bodies
        self._on_commit = on_commit
        self.most_stored_bytes = sys.maxsize
        """The limit of `StoredBytes`, which `submit` keeps."""
        self.clock = clock

    _recover = _transition(transitions.recover)
    _give_up = _transition(transitions.give_up)
    take = _transition(transitions.take)
    requeue = _transition(transitions.requeue)
    add_pieces = _transition(transitions.add_pieces)
    set_progress = _transition(transitions.set_progress)
    tell_logs = _transition(transitions.tell_logs)
    cancel = _whole(_transition(transitions.cancel))
    retry = _whole(_transition(transitions.retry))
    expire = _transition(transitions.expire)
    redeliver = _transition(transitions.redeliver)
    alert = _transition(transitions.alert)
    drop_alerts = _transition(transitions.drop_alerts)
    _purge_slice = _transition(transitions.purge)

    get = _whole(_query(queries.get))
    glance = _query(queries.glance)
    glance_any = _query(queries.glance_any)
    _found = _query(queries.find)
    find = _whole(_found)
    _due = _query(turns.due)
    next_due = _query(queries.next_due)
    next_expiry = _query(transitions.next_expiry)
    newest = _query(queries.newest)
    latest = _query(queries.latest)
    newer_ids = _query(queries.newer_ids)
    pieces = _query(queries.pieces)
    counts = _query(queries.counts)
    all_counts = _query(queries.all_counts)
    functions_waiting = _query(queries.functions_waiting)
    deliveries = _query(outbox.newest)
    pending_deliveries = _query(outbox.pending)
    _due_deliveries = _query(outbox.due)
    _delivery_body = _query(outbox.body_of)
    begun_alerts = _query(queries.begun_alerts)
    stored_bytes = _query(schema.stored_bytes)

    async def shift(self, by_s: float, follow: Callable[[], object]) -> None:
        """Run `transitions.shift`. `follow`, which lets the clock follow, is called before any other write."""
        await self._database.write(lambda connection: transitions.shift(connection, by_s), at_commit=follow)

    async def purge(self, function: str, owner: str = ALL, *, running: bool = False) -> int:
        """Cancel an owner's queued jobs. Return their number.

        With `running`, which is for a deleted function, also cancel the running jobs, and forbid the retry of ended jobs. They
        count, too.

        Jobs that are submitted after the start of the purge are not cancelled. The purge uses several
        transactions, so that other writers can run between them.
        """
        # A deletion includes the jobs whose commit waits.
        find = self._database.write if running else self._database.read
        last, cancelled = await find(queries.last_number), 0
        while count := await self._purge_slice(function, last, owner=owner, running=running):
            cancelled += count
        return cancelled

    async def recover(self) -> tuple[int, int]:
        """Run `transitions.recover`. Before it, delete the large bodies that a crash has left."""
        names = await self._database.read(schema.large_bodies)
        await asyncio.to_thread(self._large.keep, names)
        return await self._recover()

    def close(self) -> None:
        """Wait until large bodies are written and deleted. Blocks. Close the database first."""
        self._large.close()

    # -- with large bodies

    async def submit(self, new: NewJob) -> tuple[Job, bool]:
        """Run `transitions.submit`."""
        new = await self._with_file(new)
        job, earlier = await self._commit(
            lambda transaction: transitions.submit(transaction, new), {new.large_input}
        )
        return await self._read_bodies(job), earlier

    async def admit(self, new: NewJob) -> Job:
        """Run `transitions.admit`."""
        new = await self._with_file(new)
        return await self._commit(lambda transaction: transitions.admit(transaction, new), {new.large_input})

    async def start(self, new: NewJob, worker: str) -> int | None:
        """Store a new job whose first attempt has been sent to `worker`, and return the attempt's fence."""
        new = await self._with_file(new)
        return await self._commit(
            lambda transaction: transitions.take(transaction, transaction.add(new).id, worker),
            {new.large_input},
        )

    async def record(self, new: NewJob, job: Job, outcome: JobOutcome) -> Job:
        """Run `Transaction.add_ended`."""
        new, outcome = await self._with_file(new), await self._outcome_with_file(outcome)
        return await self._commit(
            lambda transaction: transaction.add_ended(new, job, outcome),
            {new.large_input, outcome.large_output},
        )

    async def finish(self, job_id: str, fence: int, outcome: JobOutcome) -> bool:
        """Run `transitions.finish`."""
        outcome = await self._outcome_with_file(outcome)
        return await self._commit(
            lambda transaction: transitions.finish(transaction, job_id, fence, outcome),
            {outcome.large_output},
        )

    async def due(self, *args: Any) -> list[Job]:
        """Run `turns.due`, and read the inputs. A job whose input is missing has FAILED."""
        found: list[Job] = []
        for job in await self._due(*args):
            try:
                found.append(await self._read_bodies(job))
            except JobBodyMissing as error:
                outcome = JobOutcome(JobState.FAILED, error=error.to_wire())
                await self._give_up(job.id, outcome)
        return found

    async def due_deliveries(
        self, *, most: int, most_per_host: int, sending: Collection[Delivery]
    ) -> tuple[list[Delivery], float | None]:
        """Run `outbox.due`."""
        return await self._due_deliveries(
            self.clock(), most=most, most_per_host=most_per_host, sending=sending
        )

    async def record_attempt(
        self, delivery: Delivery, attempt: DeliveryAttempt, schedule: RetrySchedule
    ) -> DeliveryState | None:
        """Run `outbox.record`."""
        return await self._database.write(
            lambda connection: outbox.record(connection, delivery.id, attempt, schedule, self.clock())
        )

    async def webhook_body(self, delivery: Delivery) -> bytes | None:
        """Return the body of a delivery that is made when it is sent, or None if its job is missing."""
        try:
            job = await self._found(delivery.job_id, lambda _function: True, ())
            job = await self._read_bodies(job, MAX_BODY_BYTES)
        except (UnknownJob, JobBodyMissing):
            return None
        return await self._delivery_body(job, delivery.event, delivery.created_s, self._bodies)

    async def _with_file(self, new: NewJob) -> NewJob:
        return replace(new, large_input=await self._large.write(new.input)) if is_large(new.input) else new

    async def _outcome_with_file(self, outcome: JobOutcome) -> JobOutcome:
        if not is_large(outcome.output):
            return outcome
        return replace(outcome, large_output=await self._large.write(outcome.output))

    async def _read_bodies(self, job: Job, most: int = sys.maxsize) -> Job:
        """Return the job with its large bodies, but for those of more than `most` bytes."""
        if 0 < size_of(job.large_input) <= most:
            job = replace(job, input=await self._read(job, job.large_input), large_input="")
        if 0 < size_of(job.large_output) <= most:
            job = replace(job, output=await self._read(job, job.large_output), large_output="")
        return job

    async def _read(self, job: Job, name: str) -> bytes:
        if (body := await self._large.read(name)) is None:
            raise JobBodyMissing(
                f"The file {name} of job {job.id} is missing from the state folder.",
                remedy="Submit the job again.",
            )
        return body

    async def _commit(self, change: Callable[[Transaction], T], files: Collection[str] = ()) -> T:
        """Run `change` in a transaction. Delete those of these files to which no row refers after it."""
        names = set(files) - {""}

        def run(connection: sqlite3.Connection) -> tuple[Transaction, T]:
            # If the group commit failed, `run` is called again: it starts with a new, empty Transaction.
            transaction = Transaction(
                connection,
                self.clock(),
                self._keep_s,
                self._bodies,
                most_stored_bytes=self.most_stored_bytes,
                unused_bodies=set(names),
            )
            return transaction, change(transaction)

        def committed(done: tuple[Transaction, T]) -> None:
            self._large.delete(done[0].unused_bodies)
            self._on_commit(done[0])

        try:
            _, result = await self._database.write(run, committed)
        except Exception:
            # Not for a cancelled caller: its change may still be committed.
            self._large.delete(names)
            raise
        return result
