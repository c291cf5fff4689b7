"""Stores webhook deliveries as rows, which are added in the transaction that causes their event (an outbox).

A delivery has a subject: a job, or an alert of a function. The events of a subject are sent in order: if a delivery
fails, the subject's later deliveries wait until it is sent again, up to HELD_TRIES times. A job's next delivery of
"output" or "logs" replaces the pending delivery of the same event. So a slow receiver gets fewer deliveries, and no
outdated deliveries.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from itertools import islice
from types import MappingProxyType
from urllib.parse import urlsplit

import orjson

from ....errors import UnknownDelivery
from ...ground.access.keys import ALL
from ..stored.alert import Alert
from ..stored.delivery_shares import DeliveryShares, DueDelivery, shared
from ..stored.job import Job
from ..stored.webhook_body import WebhookBodies, message
from ..webhooks.delivery import JOB, Delivery, DeliveryAttempt, DeliveryState, RetrySchedule
from .connection import SqlConnection, SqlRow
from .rows import webhook_of

SUPERSEDED = ("output", "logs")
"""A pending delivery of one of these events is replaced by the job's next delivery of the same event."""
HELD_TRIES = 3
"""After this many failed attempts, a delivery no longer delays later deliveries of its subject."""
MAX_LOG = 20
"""How many attempts are stored in a delivery's log. The oldest are dropped."""
KEEP_ENDED_S = 7 * 86400.0
"""Deliveries that have ended are deleted this long after they were added, or earlier with their job."""
MAX_DELETED = 4
"""The most old rows that are deleted when a delivery ends. The number is above 1, so that a backlog shrinks."""
MAX_PIECES = 1000
"""The most pieces of an unfinished output that `WebhookBodies` get."""
MAX_HOSTS = 256
"""The number of hosts of an owner that `due` examines. It takes the hosts whose deliveries are due earliest."""
MAX_KNOWN_HOSTS = 4096
"""`due` knows only the first MAX_KNOWN_HOSTS hosts of an owner, in the order of their names, and chooses MAX_HOSTS of them.
This limits its time."""
MAX_OWNERS = 64
"""`due` examines the first MAX_OWNERS owners, in the order of their names. It also examines the owners of the
MAX_OWNERS deliveries that are due earliest.
"""


_COLUMNS = ", ".join(
    field.name for field in dataclasses.fields(Delivery) if field.name not in ("body", "trace")
)
_INSERT = """
INSERT INTO deliveries (id, subject, function, event, url, host, body, state, attempts, next_s, created_s, last_status,
    last_error, log, owner) VALUES (?, ?, ?, ?, ?, ?, ?, 'PENDING', ?, ?, ?, 0, '', ?, ?)"""
# Lists an owner's hosts with pending deliveries. Each step finds the next host in the index, so the time does not
# depend on the number of deliveries of a host.
_HOSTS = """
WITH RECURSIVE hosts (host, number) AS (
    SELECT min(host), 1 FROM deliveries WHERE state = 'PENDING' AND owner = ?1
    UNION ALL
    SELECT (SELECT min(host) FROM deliveries WHERE state = 'PENDING' AND owner = ?1 AND host > hosts.host), number + 1 FROM hosts
        WHERE hosts.host IS NOT NULL AND number < ?4
), timed (host, first_s) AS (
    SELECT host, (SELECT min(next_s) FROM deliveries WHERE state = 'PENDING' AND owner = ?1 AND host = hosts.host)
    FROM hosts WHERE host IS NOT NULL
) SELECT host, first_s FROM timed WHERE first_s <= ?2 ORDER BY first_s LIMIT ?3"""
# `next_s` is read from the index, and `subject` precedes `body` in the row. To reach a column after `body`,
# SQLite would have to read the body.
_DUE = """
SELECT rowid, subject, next_s FROM deliveries WHERE state = 'PENDING' AND owner = ? AND host = ? AND next_s <= ?
    ORDER BY next_s, rowid"""
_OLDEST = "SELECT owner FROM deliveries WHERE state = 'PENDING' AND next_s <= ? ORDER BY next_s LIMIT ?"
_OWNER = "SELECT min(owner) FROM deliveries WHERE state = 'PENDING' AND owner > ?"
_NEXT = "SELECT min(next_s) FROM deliveries WHERE state = 'PENDING' AND next_s > ?"
_DELETE_OLDEST = """
DELETE FROM deliveries WHERE rowid IN (
    SELECT rowid FROM deliveries WHERE state <> 'PENDING' AND created_s < ? %s ORDER BY created_s LIMIT ?)"""


def add(
    connection: SqlConnection, job: Job, event: str, now_s: float, bodies: WebhookBodies = MappingProxyType({})
) -> None:  # fmt: skip
    """Add a delivery if the job's webhook subscribes to the event. `bodies` makes the body if the webhook has a form.

    If the delivery's body needs a large body of the job, the delivery's body is made when it is sent, from the job's
    state at that time.
    """
    webhook = job.webhook
    if webhook is None or event not in webhook.events:
        return
    subject = JOB + job.id
    attempts, next_s, log = 0, max(now_s, _held_until(connection, subject)), "[]"
    if event in SUPERSEDED and (earlier := _take_superseded(connection, subject, event)) is not None:
        # The new delivery continues the retries of the replaced delivery. So a receiver that is down gets
        # no more requests than for a single delivery.
        attempts, next_s, log = earlier["attempts"], max(next_s, earlier["next_s"]), earlier["log"]
    row = (_new_id(), subject, job.function, event, webhook.url, _host(webhook.url))
    late = job.large_output or (webhook.form and job.large_input)
    body = b"" if late else body_of(connection, job, event, now_s, bodies)
    connection.execute(_INSERT, (*row, body, attempts, next_s, now_s, log, job.owner))


def body_of(connection: SqlConnection, job: Job, event: str, now_s: float, bodies: WebhookBodies) -> bytes:
    """Return the body of a delivery about a job that has a webhook."""
    make = bodies.get(job.webhook.form if job.webhook is not None else "")
    return message(job, event, now_s) if make is None else make(job, _pieces(connection, job))


def needs_job(connection: SqlConnection, job_id: str) -> bool:
    """Return True if the job has a pending delivery without a body, because the body is made from the job when it is sent."""
    pending = "SELECT 1 FROM deliveries WHERE subject = ? AND state = 'PENDING' AND length(body) = 0"
    return connection.execute(pending, (JOB + job_id,)).fetchone() is not None


def add_alert(connection: SqlConnection, alert: Alert, now_s: float) -> None:
    """Add the delivery of an alert."""
    # Each condition of each function has its own subject. So the alerts of one condition do not wait for other alerts.
    subject = f"alert:{alert.function}:{alert.condition}"
    next_s = max(now_s, _held_until(connection, subject))
    row = (_new_id(), subject, alert.function, alert.event, alert.url, _host(alert.url))
    connection.execute(_INSERT, (*row, alert.body(now_s), 0, next_s, now_s, "[]", alert.owner))


def _new_id() -> str:
    return f"msg_{secrets.token_hex(16)}"


def _host(url: str) -> str:
    return "{0.scheme}://{0.netloc}".format(urlsplit(url)).lower()


def _pieces(connection: SqlConnection, job: Job) -> list[bytes]:
    """Return the first pieces of the output of a job that still streams."""
    query = "SELECT body FROM jobs JOIN pieces ON pieces.job = jobs.number WHERE id = ? ORDER BY pieces.number LIMIT ?"
    return [] if job.state.final else [body for (body,) in connection.execute(query, (job.id, MAX_PIECES))]


def due(
    connection: SqlConnection,
    now_s: float,
    *,
    most: int,
    most_per_host: int,
    sending: Collection[Delivery] = (),
) -> tuple[list[Delivery], float | None]:
    """Return deliveries that may be sent now, in addition to those in `sending`, and the time at which the next
    delivery is due, or None.

    At most `most` deliveries are sent at a time, at most `most_per_host` of them to a host, and one of a subject.
    Owners share these limits fairly (`fair_queue.py`). Among an owner's deliveries, those that have been due longest
    come first. An owner may begin another delivery only while the number of its running deliveries is smaller than the
    free part of each limit. So slow receivers of one owner do not delay the deliveries of another owner.
    """
    subjects = {one.subject for one in sending}
    shares = DeliveryShares(most, most_per_host, sending)
    # List more hosts while deliveries are being sent: a busy host is listed, too, but may have nothing to send now.
    most_hosts = MAX_HOSTS + len(sending)
    found = [
        candidate
        for owner in _owners(connection, now_s)
        for host, _ in connection.execute(_HOSTS, (owner, now_s, most_hosts, MAX_KNOWN_HOSTS)).fetchall()
        if shares.takes(owner, host)
        for candidate in islice(_due_at(connection, owner, host, now_s, subjects), most_per_host)
    ]
    deliveries = [_read(connection, "rowid = ?", rowid) for rowid in shared(found, shares, sending)]
    (next_s,) = connection.execute(_NEXT, (now_s,)).fetchone()
    return [one for one in deliveries if one is not None], next_s


def record(
    connection: SqlConnection,
    delivery_id: str,
    attempt: DeliveryAttempt,
    schedule: RetrySchedule,
    now_s: float,
) -> DeliveryState | None:
    """Store an attempt and return the delivery's new state, or None if the delivery was deleted."""
    query = "SELECT rowid, subject, attempts, log FROM deliveries WHERE id = ?"
    row = connection.execute(query, (delivery_id,)).fetchone()
    if row is None:
        return None
    tried = row["attempts"] + 1
    state, next_s = schedule.next_state(attempt, tried, now_s)
    log = [*orjson.loads(row["log"]), attempt][-MAX_LOG:]
    connection.execute(
        "UPDATE deliveries SET state = ?, attempts = ?, next_s = ?, last_status = ?, last_error = ?, log = ? WHERE id = ?",
        (state, tried, next_s, attempt.status, attempt.error, orjson.dumps(log).decode(), delivery_id),
    )
    if state is not DeliveryState.PENDING:
        connection.execute(_DELETE_OLDEST % "", (now_s - KEEP_ENDED_S, MAX_DELETED))
    elif tried < HELD_TRIES:
        connection.execute(
            "UPDATE deliveries SET next_s = ? WHERE subject = ? AND state = 'PENDING' AND rowid > ? AND next_s < ?",
            (next_s, row["subject"], row["rowid"], next_s),
        )
    return state


def redeliver(
    connection: SqlConnection, function: str, delivery_id: str, now_s: float, owner: str = ALL
) -> Delivery:
    changed = connection.execute(
        "UPDATE deliveries SET state = 'PENDING', attempts = 0, next_s = ? "
        "WHERE id = ? AND function = ? AND ? IN (owner, ?)",
        (now_s, delivery_id, function, owner, ALL),
    ).rowcount
    delivery = _read(connection, "id = ?", delivery_id) if changed else None
    if delivery is None:
        raise UnknownDelivery(
            f"There is no delivery {delivery_id} of {function}.",
            remedy="`pilotflame webhooks list` shows the ids of all deliveries.",
        )
    return delivery


def newest(
    connection: SqlConnection,
    function: str,
    states: Sequence[DeliveryState] = (),
    subject: str = "",
    limit: int = 100,
    owner: str = ALL,
) -> list[Delivery]:
    states = states or tuple(DeliveryState)
    marks = ", ".join("?" * len(states))
    where, values = f"function = ? AND state IN ({marks})", [function, *states]
    if subject:
        where, values = f"{where} AND subject = ?", [*values, subject]
    if owner != ALL:
        where, values = f"{where} AND owner <> '' AND owner = ?", [*values, owner]
    rows = connection.execute(
        f"SELECT {_COLUMNS} FROM deliveries WHERE {where} ORDER BY created_s DESC, rowid DESC LIMIT ?",  # noqa: S608
        (*values, limit),
    )
    return [_delivery(row) for row in rows]


def pending(connection: SqlConnection) -> dict[str, int]:
    query = "SELECT function, count(*) FROM deliveries WHERE state = 'PENDING' GROUP BY function"
    return dict(connection.execute(query).fetchall())


def delete_orphans(connection: SqlConnection, before_s: float, limit: int) -> None:
    """Delete up to `limit` ended deliveries that were added before `before_s` and never had a job or have lost it."""
    connection.execute(
        _DELETE_OLDEST
        % "AND NOT EXISTS (SELECT 1 FROM jobs WHERE id = substr(subject, 5) AND subject LIKE 'job:%')",
        (before_s, limit),
    )


def _held_until(connection: SqlConnection, subject: str) -> float:
    """Return the time until which a new delivery of the subject must wait for earlier ones, or 0.0."""
    (next_s,) = connection.execute(
        "SELECT max(next_s) FROM deliveries WHERE subject = ? AND state = 'PENDING' AND attempts < ?",
        (subject, HELD_TRIES),
    ).fetchone()
    return float(next_s or 0.0)


def _take_superseded(connection: SqlConnection, subject: str, event: str) -> SqlRow | None:
    """Delete the job's pending delivery of this event and return its row; None if there is none.

    If the delivery is being sent, its attempt is not recorded: `record` will not find it.
    """
    pending = "subject = ? AND event = ? AND state = 'PENDING'"
    query = f"SELECT id, attempts, next_s, log FROM deliveries WHERE {pending}"  # noqa: S608
    row: SqlRow | None = connection.execute(query, (subject, event)).fetchone()
    if row is not None:
        connection.execute("DELETE FROM deliveries WHERE id = ?", (row["id"],))
    return row


def _owners(connection: SqlConnection, now_s: float) -> set[str]:
    """Return the owners that `due` examines. Each step finds the next owner in the index."""
    # One of these owners has the delivery that has been due longest, so no owner waits for ever.
    owners = {owner for (owner,) in connection.execute(_OLDEST, (now_s, MAX_OWNERS))}
    owner = ""
    for _ in range(MAX_OWNERS):
        owners.add(owner)
        (owner,) = connection.execute(_OWNER, (owner,)).fetchone()
        if owner is None:
            break
    return owners


def _due_at(
    connection: SqlConnection, owner: str, host: str, now_s: float, busy: Collection[str]
) -> Iterator[DueDelivery]:
    """Yield the due deliveries of an owner to a host, one for each subject except the subjects in `busy`."""
    subjects = set(busy)
    with closing(connection.execute(_DUE, (owner, host, now_s))) as rows:
        for row in rows:
            if row["subject"] not in subjects:
                subjects.add(row["subject"])
                yield DueDelivery(owner, row["next_s"], row["rowid"], host)


def _read(connection: SqlConnection, where: str, key: str | int) -> Delivery | None:
    select = f"SELECT {_COLUMNS}, body FROM deliveries WHERE {where}"  # noqa: S608
    row = connection.execute(select, (key,)).fetchone()
    if row is None:
        return None
    found = _delivery(row)
    return dataclasses.replace(found, trace=_trace(connection, found.job_id))


def _trace(connection: SqlConnection, job_id: str) -> dict[str, str]:
    """Return the trace headers that the job's caller sent.

    A dialect with its own form of webhooks keeps these headers in `extra`, as they were sent.
    """
    row = connection.execute(
        "SELECT traceparent, extra, webhook FROM jobs WHERE id = ?", (job_id,)
    ).fetchone()
    if row is None:
        return {}
    webhook, extra = webhook_of(row), orjson.loads(row["extra"]) if row["extra"] else {}
    sent: dict[str, str] = extra.get(webhook.form if webhook else "", {}).get("trace") or {}
    return sent or ({"traceparent": row["traceparent"]} if row["traceparent"] else {})


def _delivery(row: SqlRow) -> Delivery:
    log = tuple(DeliveryAttempt(**attempt) for attempt in orjson.loads(row["log"]))
    return Delivery(**dict(row) | {"state": DeliveryState(row["state"]), "log": log})
