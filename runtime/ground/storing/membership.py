"""Keeps a gateway among those that share a database. Each second, a heartbeat renews its lease and learns what the others do.

If another gateway has changed functions, or has followed a change, PostgreSQL notifies this one, and the next heartbeat comes at once. A
PgBouncer that shares sessions passes no notifications on; then changes are followed a second later.

If the lease ends because the database cannot be reached, or the gateway stood still, the other gateways may run its jobs again
and take its duties. The gateway goes on with its calls, and with jobs, whose results count only while no other gateway runs
them. With the next heartbeat it is a member again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import orjson
import psycopg

from .duties import SharedDuties
from .members import DaySpending, GatewayMember, GatewayReport
from .postgres import BEGIN, PostgresConnection, migrate, usable

LOG = logging.getLogger(__name__)
BEAT_S = 1.0
LISTEN_S = 0.25
"""How long the end of a gateway waits for the thread that waits for notifications."""
LEASE_S = 10.0
"""Longer than a restart of PostgreSQL, or a stop of the whole machine for a snapshot. After a gateway's death, its jobs wait for this time."""
CLOSE_TIMEOUT_S = 5.0
_BEGIN = f"{BEGIN}; SET LOCAL statement_timeout = '{int(LEASE_S / 2)}s'"
REPORT_WAIT_S = 0.1
"""A heartbeat waits this long for a report. If the event loop is busy for longer, the heartbeat repeats the last one."""
_BEAT = "SELECT heartbeat(?, ?, ?, ?, ?, ?, ?, ?, ?)::text"
_LEAVE = (
    "WITH left_duties AS (DELETE FROM duties WHERE incarnation = ?1) DELETE FROM nodes WHERE incarnation = ?1"
)


class _Beat(NamedTuple):
    """The result of a heartbeat: the monotonic time of the end of the lease, and attributes of Membership."""

    until_s: float
    members: tuple[GatewayMember, ...]
    reports: Mapping[str, Any] = {}
    known: int = 0
    spent: Mapping[str, DaySpending] = {}
    told: GatewayReport = GatewayReport()


class Membership:
    """The membership of this gateway. Its methods, except `open` and `close`, must be called on the event loop."""

    def __init__(self, url: str, incarnation: str, name: str, version: str) -> None:
        """`url` is a connection string of libpq."""
        self.url, self.incarnation = url, incarnation
        self._told = (incarnation, name, version)
        self.first = False
        """True if the state folder belongs to no earlier member."""
        self.generation = 0
        """Told to the other gateways with each heartbeat."""
        self.members: tuple[GatewayMember, ...] = ()
        self.reporter: Callable[[], GatewayReport] = GatewayReport
        """Called on the event loop before each heartbeat."""
        self.told = GatewayReport()
        """What the latest heartbeat has told the other gateways."""
        self.reports: Mapping[str, Any] = {}
        """The latest `GatewayReport.uses` of each living gateway, by incarnation. Gateways of older versions have none."""
        self.spent: Mapping[str, DaySpending] = {}
        """What the other gateways, living and dead, have used of each function's budget on the latest day."""
        self.followers: list[Callable[[], object]] = []
        """Called on the event loop after each heartbeat, and when the lease has ended."""
        self.duties = SharedDuties(lambda: self.alive)
        self._until_s = self._since_s = 0.0
        # The number of the newest spending that is in `spent`, and what to tell next.
        self._known, self._report = 0, self.told
        self._lapse: asyncio.TimerHandle | None = None
        self._news, self._ended = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []
        self._connection: PostgresConnection | None = None

    @property
    def alive(self) -> bool:
        """True while the other gateways count on this one."""
        return time.monotonic() < self._until_s

    @property
    def dead(self) -> bool:
        """True if the lease of another gateway has ended although the database was there for the time of a lease."""
        judges = self.alive and time.monotonic() - self._since_s > LEASE_S
        return judges and not all(one.alive for one in self.members)

    def open(self, previous: str) -> None:
        """Upgrade the tables, and become a member. `previous` is the incarnation of the last run on this state folder.

        That run has ended, or the state folder is a copy. So its lease is ended only if no heartbeat renews it. Blocks. Raise GatewayError if the database cannot be used.
        """
        with usable():
            self._connection = PostgresConnection(self.url)
            migrate(self._connection)
            until = self._until_of(previous)
            if until is not None and (self._ended.wait(1.5 * BEAT_S) or self._until_of(previous) == until):
                self._connection.execute(_LEAVE, (previous,))
            self._note(self._beat([], self._report))

    def start(self) -> None:
        """Begin with heartbeats. Call it on the event loop, after `open`."""
        loop = asyncio.get_running_loop()
        beating = threading.Thread(target=self._run, args=(loop,), name="members", daemon=True)
        listening = threading.Thread(target=self._listen, name="members-news", daemon=True)
        self._threads = [beating, listening]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the membership, so that other gateways take jobs and duties at once. Blocks."""
        self._ended.set()
        self._news.set()
        for thread in self._threads:
            thread.join(CLOSE_TIMEOUT_S)

    def beat(self) -> None:
        """Make the next heartbeat at once."""
        self._news.set()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        failing = False
        while not self._ended.is_set():
            self._news.wait(BEAT_S)
            self._news.clear()
            try:
                beat = self._beat([*self.duties.names], self._ask(loop))
            except Exception as error:  # noqa: BLE001  without heartbeats, other gateways would run the jobs of this one
                self._disconnect()
                if not failing:
                    LOG.warning("the heartbeat in the database failed: %s", str(error).strip())
                failing = True
                continue
            failing = False
            try:
                loop.call_soon_threadsafe(self._follow, beat)
            except RuntimeError:
                # The event loop has ended.
                break
        with suppress(psycopg.Error):
            self._connected().execute(_LEAVE, (self.incarnation,))
        self._disconnect()

    def _listen(self) -> None:
        """Make a heartbeat at each notification."""
        while not self._ended.is_set():
            with suppress(psycopg.Error):
                connection = PostgresConnection(self.url)
                try:
                    connection.run("LISTEN pilotflame")
                    while not self._ended.is_set():
                        for _ in connection.session.notifies(timeout=LISTEN_S, stop_after=1):
                            self._news.set()
                finally:
                    connection.close()
            self._ended.wait(BEAT_S)

    def _ask(self, loop: asyncio.AbstractEventLoop) -> GatewayReport:
        """Return what the event loop reports now. The next heartbeat sends a report that comes later."""
        made = threading.Event()

        def report() -> None:
            self._report = self.reporter()
            made.set()

        # The event loop may have ended.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(report)
            made.wait(REPORT_WAIT_S)
        return self._report

    def _beat(self, duties: list[str], report: GatewayReport) -> _Beat:
        """Renew the lease, and tell `report`."""
        begun_s = time.monotonic()
        spent = [{"function": name, **row._asdict()} for name, row in report.spent.items()]
        # orjson refuses named tuples.
        uses = orjson.dumps(report.uses, default=tuple).decode()
        told = (uses, orjson.dumps(spent).decode(), self._known)
        values = (*self._told, self.generation, LEASE_S, duties, *told)
        connection = self._connected()
        connection.run(_BEGIN)
        ((text,),) = connection.execute(_BEAT, values).fetchall()
        connection.run("COMMIT")
        found = orjson.loads(text)
        # A newer gateway may have made a heartbeat that tells more.
        members = [{name: one[name] for name in GatewayMember._fields} for one in found["members"]]
        spending = {one.pop("function"): DaySpending(**one) for one in found["spent"]}
        return _Beat(
            begun_s + LEASE_S, tuple(GatewayMember(**one) for one in members),
            found["reports"], found["known"], spending, report,
        )  # fmt: skip

    def _until_of(self, incarnation: str) -> object:
        """Return the end of a lease; None if there is no such member."""
        query = "SELECT until FROM nodes WHERE incarnation = ?"
        row = self._connected().execute(query, (incarnation,)).fetchone()
        return None if row is None else row[0]

    def _follow(self, beat: _Beat) -> None:
        self._note(beat)
        if self._lapse is not None:
            self._lapse.cancel()
        # A heartbeat may hang for longer than the lease.
        loop = asyncio.get_running_loop()
        self._lapse = loop.call_later(max(0.0, self._until_s - time.monotonic()) + 0.01, self._end_duties)
        self._tell()

    def _end_duties(self) -> None:
        self.duties.note(())
        self._tell()

    def _tell(self) -> None:
        for follower in self.followers:
            follower()

    def _note(self, beat: _Beat) -> None:
        if not self.alive:
            self._since_s = time.monotonic()
        self._until_s, self.members, self.reports, self._known, spent, self.told = beat
        if spent:
            today = max(row.day for row in spent.values())
            self.spent = {**{name: row for name, row in self.spent.items() if row.day >= today}, **spent}
        self.duties.note(
            [duty for one in beat.members if one.incarnation == self.incarnation for duty in one.duties]
        )

    def _connected(self) -> PostgresConnection:
        if self._connection is None:
            self._connection = PostgresConnection(self.url)
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None
