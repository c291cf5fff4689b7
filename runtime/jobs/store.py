"""Stores jobs. Transitions run in the database's writer thread, queries in its reader thread."""

from __future__ import annotations

import sqlite3
import sys
import time
from collections.abc import Callable, Coroutine
from functools import wraps
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec, TypeVar

from . import outbox, queries, schema, transitions, turns
from .database import Database
from .job import ALL
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
        self._keep_s = keep_s
        self._bodies = bodies
        self._on_commit = on_commit
        self.most_stored_bytes = sys.maxsize
        """The limit of `StoredBytes`, which `submit` keeps."""
        self._clock = clock

    recover = _transition(transitions.recover)
    submit = _transition(transitions.submit)
    take = _transition(transitions.take)
    admit = _transition(transitions.admit)
    start = _transition(transitions.start)
    record = _transition(transitions.record)
    finish = _transition(transitions.finish)
    requeue = _transition(transitions.requeue)
    add_pieces = _transition(transitions.add_pieces)
    set_progress = _transition(transitions.set_progress)
    tell_logs = _transition(transitions.tell_logs)
    cancel = _transition(transitions.cancel)
    retry = _transition(transitions.retry)
    expire = _transition(transitions.expire)
    redeliver = _transition(transitions.redeliver)
    alert = _transition(transitions.alert)
    drop_alerts = _transition(transitions.drop_alerts)
    _purge_slice = _transition(transitions.purge)

    get = _query(queries.get)
    find = _query(queries.find)
    due = _query(turns.due)
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
    begun_alerts = _query(queries.begun_alerts)
    stored_bytes = _query(schema.stored_bytes)

    async def purge(self, function: str, owner: str = ALL, *, running: bool = False) -> int:
        """Cancel an owner's queued jobs, and with `running` also the running jobs. Return their number.

        Jobs that are submitted after the start of the purge are not cancelled. The purge uses several
        transactions, so that other writers can run between them.
        """
        last, cancelled = await self._database.read(queries.last_number), 0
        while count := await self._purge_slice(function, last, owner=owner, running=running):
            cancelled += count
        return cancelled

    async def _commit(self, change: Callable[[Transaction], T]) -> T:
        def run(connection: sqlite3.Connection) -> tuple[Transaction, T]:
            # If the group commit failed, `run` is called again: it starts with a new, empty Transaction.
            transaction = Transaction(
                connection,
                self._clock(),
                self._keep_s,
                self._bodies,
                most_stored_bytes=self.most_stored_bytes,
            )
            return transaction, change(transaction)

        _, result = await self._database.write(run, lambda done: self._on_commit(done[0]))
        return result
