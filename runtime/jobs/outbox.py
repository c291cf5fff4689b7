"""The outbox: deliveries of webhooks as rows, written in the transaction of what they tell of.

A job's events go out in their order: one that failed makes the job's later ones wait with it, by their `next_s`, until it
has failed HELD_TRIES times; then they go on without it. Of "output" only the last is kept while none was taken: a slow
receiver hears less often, and not of the past.
"""

from __future__ import annotations

import dataclasses
import secrets
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import orjson

from ...errors import UnknownDelivery
from .job import Job
from .message import body
from .webhook_backoff import Schedule
from .webhook_delivery import MAX_LOG, Delivery, DeliveryAttempt, DeliveryState, after

HELD_TRIES = 3
MAX_FORGOTTEN = 4
"""How many old rows go with each one that ended: more than come, so that the old ones come to an end."""

_LIGHT = (
    "id, job_id, function, event, url, host, state, attempts, next_s, created_s, last_status, last_error, log"
)
_INSERT = """
INSERT INTO deliveries (id, job_id, function, event, url, host, body, state, attempts, next_s, created_s, last_status,
    last_error, log) VALUES (?, ?, ?, ?, ?, ?, ?, 'PENDING', ?, ?, ?, 0, '', ?)"""
MAX_HOSTS = 256
"""Of so many hosts the deliveries are looked at in one round: those whose next ones are due first."""
# Steps from host to host through the index, however many rows each has.
_HOSTS = """
WITH RECURSIVE hosts (host) AS (
    SELECT min(host) FROM deliveries WHERE state = 'PENDING'
    UNION ALL
    SELECT (SELECT min(host) FROM deliveries WHERE state = 'PENDING' AND host > hosts.host) FROM hosts
        WHERE hosts.host IS NOT NULL
) SELECT host, (SELECT min(next_s) FROM deliveries WHERE state = 'PENDING' AND host = hosts.host) AS first_s
FROM hosts WHERE host IS NOT NULL ORDER BY first_s LIMIT ?"""
# Columns before the body only: what follows it can be read only by way of all of it.
_DUE = """
SELECT rowid, job_id, next_s FROM deliveries WHERE state = 'PENDING' AND host = ? AND next_s <= ? ORDER BY next_s, rowid"""
_WHOLE = f"SELECT {_LIGHT}, body FROM deliveries WHERE rowid = ?"  # noqa: S608  our names
_NEXT = "SELECT min(next_s) FROM deliveries WHERE state = 'PENDING' AND host = ? AND next_s > ?"


def add(connection: sqlite3.Connection, job: Job, event: str, now_s: float) -> bool:
    """Insert a delivery of `event` if the job's webhook asks for it; whether it did."""
    webhook = job.webhook
    if webhook is None or event not in webhook.events:
        return False
    attempts, next_s, log = 0, max(now_s, _held_until(connection, job.id)), "[]"
    if event == "output" and (former := _superseded(connection, job.id)):
        # The new one goes on where the old one stood: a receiver that is down is not asked more often for it.
        attempts, next_s, log = former["attempts"], max(next_s, former["next_s"]), former["log"]
    name = f"msg_{secrets.token_hex(16)}"
    row = (name, job.id, job.function, event, webhook.url, _host(webhook.url), body(job, event, now_s))
    connection.execute(_INSERT, (*row, attempts, next_s, now_s, log))
    return True


def due(
    connection: sqlite3.Connection,
    now_s: float,
    *,
    room: int,
    room_per_host: int,
    busy: Collection[tuple[str, str]] = (),
) -> tuple[list[Delivery], float | None]:
    """What can be sent now, oldest first, and when more is due among hosts that have room (None: nothing waits).

    `busy` are (host, job id) of what is being sent: at most one event of a job at a time.
    """
    found: list[tuple[float, int]] = []
    later_s: list[float] = []
    # Those that are busy may have nothing to send now, however long it has been due: they take nobody's place.
    hosts = connection.execute(_HOSTS, (MAX_HOSTS + len(busy),)).fetchall()
    for host, first_s in hosts:
        jobs = {job_id for busy_host, job_id in busy if busy_host == host}
        if first_s > now_s:
            later_s += [first_s] if len(jobs) < room_per_host else []
        elif len(jobs) < room_per_host:
            found += _due_at(connection, host, now_s, jobs, min(room, room_per_host - len(jobs)))
            (next_s,) = connection.execute(_NEXT, (host, now_s)).fetchone()
            later_s += [] if next_s is None else [next_s]
    found.sort()
    whole = [connection.execute(_WHOLE, (rowid,)).fetchone() for _, rowid in found[:room]]
    return [_delivery(row) for row in whole], min(later_s, default=None)


def record(
    connection: sqlite3.Connection,
    delivery_id: str,
    attempt: DeliveryAttempt,
    schedule: Schedule,
    *,
    now_s: float,
    chance: float,
    keep_s: float,
) -> Delivery | None:
    """Write down an attempt and what follows from it; None if the delivery is no longer there."""
    row = connection.execute(
        f"SELECT {_LIGHT}, rowid FROM deliveries WHERE id = ?",  # noqa: S608
        (delivery_id,),
    ).fetchone()
    if row is None:
        return None
    before = _delivery(row)
    tried = before.attempts + 1
    state, next_s = after(attempt, tried, schedule, now_s=now_s, chance=chance)
    log = (*before.log, attempt)[-MAX_LOG:]
    error = attempt.error
    connection.execute(
        "UPDATE deliveries SET state = ?, attempts = ?, next_s = ?, last_status = ?, last_error = ?, log = ? WHERE id = ?",
        (state, tried, next_s, attempt.status, error, orjson.dumps(log).decode(), delivery_id),
    )
    if state is not DeliveryState.PENDING:
        forget(connection, now_s - keep_s, MAX_FORGOTTEN)
    elif tried < HELD_TRIES:
        connection.execute(
            "UPDATE deliveries SET next_s = max(next_s, ?) WHERE job_id = ? AND state = 'PENDING' AND rowid > ?",
            (next_s, before.job_id, row["rowid"]),
        )
    return dataclasses.replace(
        before,
        state=state,
        attempts=tried,
        next_s=next_s,
        last_status=attempt.status,
        last_error=error,
        log=log,
    )


def redeliver(connection: sqlite3.Connection, function: str, delivery_id: str, now_s: float) -> Delivery:
    """Send it again, with the same id, from now on as often as a new one. UnknownDelivery."""
    changed = connection.execute(
        "UPDATE deliveries SET state = 'PENDING', attempts = 0, next_s = ? WHERE id = ? AND function = ?",
        (now_s, delivery_id, function),
    ).rowcount
    if not changed:
        raise _unknown(function, delivery_id)
    return get(connection, function, delivery_id)


def get(connection: sqlite3.Connection, function: str, delivery_id: str) -> Delivery:
    """One delivery with its body. UnknownDelivery."""
    row = connection.execute(
        f"SELECT {_LIGHT}, body FROM deliveries WHERE id = ? AND function = ?",  # noqa: S608
        (delivery_id, function),
    ).fetchone()
    if row is None:
        raise _unknown(function, delivery_id)
    return _delivery(row)


def newest(
    connection: sqlite3.Connection,
    function: str,
    *,
    states: Sequence[DeliveryState] = tuple(DeliveryState),
    job_id: str = "",
    limit: int = 100,
    before_id: str = "",
) -> list[Delivery]:
    """A function's deliveries without their bodies, newest first, from the one after `before_id` on."""
    marks = ", ".join("?" * len(states))
    where, values = f"function = ? AND state IN ({marks})", [function, *states]
    if job_id:
        where, values = f"{where} AND job_id = ?", [*values, job_id]
    if before_id:
        where += " AND (created_s, rowid) < (SELECT created_s, rowid FROM deliveries WHERE id = ?)"
        values = [*values, before_id]
    rows = connection.execute(
        f"SELECT {_LIGHT} FROM deliveries WHERE {where} ORDER BY created_s DESC, rowid DESC LIMIT ?",  # noqa: S608  marks only
        (*values, limit),
    )
    return [_delivery(row) for row in rows]


def forget(connection: sqlite3.Connection, before_s: float, limit: int) -> int:
    """Remove deliveries that ended and were made before that time, the oldest first; how many."""
    return connection.execute(
        "DELETE FROM deliveries WHERE rowid IN (SELECT rowid FROM deliveries WHERE state <> 'PENDING' AND created_s < ?"
        " ORDER BY created_s LIMIT ?)",
        (before_s, limit),
    ).rowcount


def _held_until(connection: sqlite3.Connection, job_id: str) -> float:
    """Until when the job's events wait for an earlier one that failed."""
    (next_s,) = connection.execute(
        "SELECT max(next_s) FROM deliveries WHERE job_id = ? AND state = 'PENDING' AND attempts < ?",
        (job_id, HELD_TRIES),
    ).fetchone()
    return float(next_s or 0.0)


def _superseded(connection: sqlite3.Connection, job_id: str) -> Any:
    """Take away the job's waiting "output". One that is just being sent may arrive: it only goes unrecorded."""
    row = connection.execute(
        "SELECT id, attempts, next_s, log FROM deliveries"
        " WHERE job_id = ? AND event = 'output' AND state = 'PENDING'",
        (job_id,),
    ).fetchone()
    if row is not None:
        connection.execute("DELETE FROM deliveries WHERE id = ?", (row["id"],))
    return row


def _due_at(
    connection: sqlite3.Connection, host: str, now_s: float, jobs: Collection[str], room: int
) -> Iterator[tuple[float, int]]:
    """(when it was due, rowid) of what a host may be sent now."""
    taken = set(jobs)
    rows = connection.execute(_DUE, (host, now_s))
    while room > 0 and (row := rows.fetchone()) is not None:
        if row["job_id"] not in taken:
            taken.add(row["job_id"])
            room -= 1
            yield row["next_s"], row["rowid"]


def _delivery(row: sqlite3.Row) -> Delivery:
    fields = {key: row[key] for key in row.keys() if key != "rowid"}  # noqa: SIM118  a row's own keys
    log = tuple(DeliveryAttempt(**attempt) for attempt in orjson.loads(fields.pop("log")))
    return Delivery(**fields | {"state": DeliveryState(fields["state"]), "log": log})


def _host(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}".lower()


def _unknown(function: str, delivery_id: str) -> UnknownDelivery:
    return UnknownDelivery(
        f"There is no delivery {delivery_id} of {function}.",
        remedy="List those that are kept: pilotflame webhooks list.",
    )
