"""A store of jobs on SQL. Transitions run in the database's writer thread, queries in its reader threads.

`LargeBodies` stores large inputs and outputs outside of the rows. They are written before the transition that refers to
them, and read after the query.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass
from functools import wraps
from types import MappingProxyType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from ....errors import JobBodyMissing, JobStoreFailed, UnknownJob
from ...ground.access.keys import ALL
from ..stored.job import Job, JobOutcome, JobState, NewJob, new_job_id
from ..stored.job_changes import JobChanges
from ..stored.large_bodies import LargeBodies
from ..stored.webhook_body import WebhookBodies
from ..webhooks.delivery import MAX_BODY_BYTES, Delivery, DeliveryAttempt, DeliveryState, RetrySchedule
from . import outbox, queries, rows, transitions
from .connection import SqlConnection
from .group_commit import GroupCommit, RunTogether
from .transaction import Transaction

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class JobChange(Generic[T]):
    """A change that a call of a store's method requests."""

    store: SqlJobStore
    change: Callable[[Transaction], T]
    files: Collection[str] = ()
    """The names of the large bodies that the change may store in a row."""
    job_ids: Collection[str] = ()
    """If not empty, the change reads only the rows of the jobs with these ids, and the row with the idempotency key of
    `new`. It returns no job to the queue. A store may run it together with other such changes.
    """
    new: NewJob | None = None
    """The job that may be inserted."""

    def __call__(
        self, connection: SqlConnection, make: Callable[..., Transaction] = Transaction
    ) -> tuple[Transaction, T]:
        # Begin with a new, empty Transaction at each call: this is called again if the commit of its group has failed.
        store = self.store
        transaction = make(
            connection,
            store.clock(),
            store.keep_s,
            store.bodies,
            store.incarnation,
            most_stored_bytes=store.most_stored_bytes,
            unused_bodies=set(self.files),
        )
        return transaction, self.change(transaction)


def transition(
    change: Callable[Concatenate[Transaction, P], T], *, of_job: bool = False
) -> Callable[Concatenate[SqlJobStore, P], Coroutine[Any, Any, T]]:
    """Return a method of SqlJobStore that runs `change` and returns its result after the commit.

    If `of_job` is True, the first argument of the method is a job's id. `JobChange.job_ids` then contains only this id.
    """

    @wraps(change)
    async def method(self: SqlJobStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        job_ids: Any = args[:1] if of_job else ()
        return await self.commit(lambda transaction: change(transaction, *args, **kwargs), job_ids=job_ids)

    return method


def query(
    asked: Callable[Concatenate[SqlConnection, P], T],
) -> Callable[Concatenate[SqlJobStore, P], Coroutine[Any, Any, T]]:
    """Return a method of SqlJobStore that runs `asked` in a reader thread and returns its result."""

    @wraps(asked)
    async def method(self: SqlJobStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._database.read(lambda connection: asked(connection, *args, **kwargs))

    return method


def _whole(
    method: Callable[Concatenate[SqlJobStore, P], Coroutine[Any, Any, Job]],
) -> Callable[Concatenate[SqlJobStore, P], Coroutine[Any, Any, Job]]:
    """Return a method that also reads the large bodies of the job that `method` returns."""

    @wraps(method)
    async def whole(self: SqlJobStore, /, *args: P.args, **kwargs: P.kwargs) -> Job:
        try:
            return await self._large.read_bodies(await method(self, *args, **kwargs))
        except JobBodyMissing:
            # Call `method` again. If the job has been deleted since, `method` raises the error for a deleted job.
            return await self._large.read_bodies(await method(self, *args, **kwargs))

    return whole


class SqlJobStore(ABC):
    """What all stores on SQL have in common. Most methods run a function of `transitions`, `queries` or `outbox`, and
    take the arguments of this function except the first.
    """

    def __init__(
        self,
        database: GroupCommit,
        large: LargeBodies,
        *,
        keep_s: float,
        clock: Callable[[], float] = time.time,
        bodies: WebhookBodies = MappingProxyType({}),
        together: RunTogether | None = None,
        incarnation: str = "",
    ) -> None:
        """Jobs are kept for `keep_s` after their end. `bodies` makes the bodies of webhooks whose form is not
        pilotflame's own. `together` runs several `JobChange` objects in one call, if all of them have `job_ids`. Without
        `together`, each change runs by itself. `incarnation` names this run of the gateway for other gateways.
        """
        self._database = database
        self._large = large
        self.keep_s = keep_s
        self.bodies = bodies
        self._together = together
        self.incarnation = incarnation or secrets.token_hex(8)
        self.on_commit: Callable[[JobChanges], object] = lambda _: None
        self.most_stored_bytes = sys.maxsize
        self.clock = clock

    _requeue_dead = transition(transitions.requeue_dead)
    _give_up = transition(transitions.give_up)
    take = transition(transitions.take, of_job=True)
    requeue = transition(transitions.requeue)
    add_pieces = transition(transitions.add_pieces, of_job=True)
    set_progress = transition(transitions.set_progress, of_job=True)
    tell_logs = transition(transitions.tell_logs, of_job=True)
    cancel = _whole(transition(transitions.cancel))
    retry = _whole(transition(transitions.retry))
    redeliver = transition(transitions.redeliver)
    alert = transition(transitions.alert)
    drop_alerts = transition(transitions.drop_alerts)
    _purge_slice = transition(transitions.purge)

    get = _whole(query(queries.get))
    glance = query(queries.glance)
    glance_any = query(queries.glance_any)
    glances = query(queries.glances)
    _found = query(queries.find)
    find = _whole(_found)
    next_due = query(queries.next_due)
    newest = query(queries.newest)
    latest = query(queries.latest)
    newer_ids = query(queries.newer_ids)
    pieces = query(queries.pieces)
    counts = query(rows.counts)
    all_counts = query(queries.all_counts)
    functions_waiting = query(queries.functions_waiting)
    deliveries = query(outbox.newest)
    pending_deliveries = query(outbox.pending)
    _due_deliveries = query(outbox.due)
    _delivery_body = query(outbox.body_of)
    begun_alerts = query(queries.begun_alerts)
    stored_bytes = query(rows.stored_bytes)

    async def open(self) -> None:
        """Open the database, and delete the large bodies that a crash has left."""
        await asyncio.to_thread(self._database.open)
        names = await self._database.read(rows.large_bodies)
        await asyncio.to_thread(self._large.keep, names)

    async def close(self) -> None:
        """Close the database, and wait until large bodies are written and deleted."""
        await asyncio.to_thread(self._database.close)
        await asyncio.to_thread(self._large.close)

    async def purge(self, function: str, owner: str = ALL, *, running: bool = False) -> int:
        """Cancel the jobs in several transactions, so that other writers can run between them."""
        # With `running`, read the last number in the writer thread, so that jobs whose commit still waits are
        # cancelled, too.
        find = self._database.write if running else self._database.read
        last, cancelled = await find(queries.last_number), 0
        while count := await self._purge_slice(function, last, owner=owner, running=running):
            cancelled += count
        return cancelled

    # -- with large bodies

    async def submit(self, new: NewJob, job_id: str = "") -> tuple[Job, bool]:
        new = await self._large.store_input(new)
        # Make the id outside of the change. The change may be run again, and must then make no second job.
        job_id = job_id or new_job_id(self.clock())
        job, earlier = await self.commit(
            lambda transaction: transitions.submit(transaction, new, job_id),
            {new.large_input},
            (job_id, new.wanted_id),
            new,
        )
        return await self._large.read_bodies(job), earlier

    async def admit(self, new: NewJob, job_id: str) -> Job:
        new = await self._large.store_input(new)
        return await self.commit(
            lambda transaction: transitions.admit(transaction, new, job_id),
            {new.large_input},
            (job_id, new.wanted_id),
            new,
        )

    async def start(self, new: NewJob, job_id: str, worker: str) -> int | None:
        new = await self._large.store_input(new)
        return await self.commit(
            lambda transaction: transitions.start(transaction, new, job_id, worker),
            {new.large_input},
            (job_id, new.wanted_id),
            new,
        )

    async def record(self, new: NewJob, job: Job, outcome: JobOutcome) -> Job:
        new, outcome = await self._large.store_input(new), await self._large.store_output(outcome)
        job = await self.commit(
            lambda transaction: transitions.record(transaction, new, job, outcome),
            {new.large_input, outcome.large_output},
            (job.id,),
            new,
        )
        return await self._large.read_bodies(job)

    async def finish(self, job_id: str, fence: int, outcome: JobOutcome) -> bool:
        outcome = await self._large.store_output(outcome)
        return await self.commit(
            lambda transaction: transitions.finish(transaction, job_id, fence, outcome),
            {outcome.large_output},
            (job_id,),
        )

    async def claim(
        self, function: str, limit: int, now_s: float, known: Collection[str] = (), after: str = "",
        most_bytes: float = math.inf,
    ) -> list[Job]:  # fmt: skip
        found: list[Job] = []
        for job in await self._claim(function, limit, now_s, known, after, most_bytes):
            try:
                found.append(await self._large.read_bodies(job))
            except JobBodyMissing as error:
                outcome = JobOutcome(JobState.FAILED, error=error.to_wire())
                await self._give_up(job.id, outcome)
        return found

    @abstractmethod
    async def _claim(
        self, function: str, limit: int, now_s: float, known: Collection[str], after: str, most_bytes: float
    ) -> list[Job]:
        """Claim jobs, and return them without their large inputs."""

    async def due_deliveries(
        self, *, most: int, most_per_host: int, sending: Collection[Delivery]
    ) -> tuple[list[Delivery], float | None]:
        return await self._due_deliveries(
            self.clock(), most=most, most_per_host=most_per_host, sending=sending
        )

    async def record_attempt(
        self, delivery: Delivery, attempt: DeliveryAttempt, schedule: RetrySchedule
    ) -> DeliveryState | None:
        return await self._database.write(
            lambda connection: outbox.record(connection, delivery.id, attempt, schedule, self.clock())
        )

    async def webhook_body(self, delivery: Delivery) -> bytes | None:
        try:
            job = await self._found(delivery.job_id, lambda _function: True, ())
            job = await self._large.read_bodies(job, MAX_BODY_BYTES)
        except (UnknownJob, JobBodyMissing):
            return None
        return await self._delivery_body(job, delivery.event, delivery.created_s, self.bodies)

    async def commit(
        self, change: Callable[[Transaction], T], files: Collection[str] = (), job_ids: Collection[str] = (),
        new: NewJob | None = None,
    ) -> T:  # fmt: skip
        """Run a `JobChange` in a transaction. Then delete the large bodies in `files` to which no row refers."""
        names = set(files) - {""}

        def committed(done: tuple[Transaction, T]) -> None:
            self._large.delete(done[0].unused_bodies)
            self.on_commit(done[0].changes)

        asked = JobChange(self, change, names, job_ids, new)
        try:
            together = self._together if job_ids else None
            _, result = await self._database.write(asked, committed, together=together)
        except Exception as error:
            # Delete nothing if the change may still be committed: for a cancelled caller, or if the answer to the
            # commit may be lost. Bodies to which no row refers are deleted later.
            if not (self._database.in_doubt and isinstance(error, JobStoreFailed)):
                self._large.delete(names)
            raise
        return result
