"""Makes a gateway a member of the gateways that share a database. Each second, a heartbeat renews its lease and gets reports of the others.

If another gateway has changed functions or documents, or has applied a change of functions, PostgreSQL notifies this gateway, which makes
the next heartbeat at once. A PgBouncer that shares sessions does not pass notifications on. Then changes are seen up to a second later.

The lease ends if the database cannot be reached, or if the gateway stood still. Then other gateways may run the gateway's jobs again
and take its duties. The gateway goes on with its calls and jobs, but the result of a job counts only if no other gateway has taken
the job. With the next heartbeat, the gateway is a member again.
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
"""The thread that waits for notifications checks this often whether the gateway ends."""
LEASE_S = 10.0
"""A lease lasts longer than a restart of PostgreSQL, or a stop of the whole machine for a snapshot. After a gateway's death, its jobs wait until
its lease ends.
"""
CLOSE_TIMEOUT_S = 5.0
_BEGIN = f"{BEGIN}; SET LOCAL statement_timeout = '{int(LEASE_S / 2)}s'"
REPORT_WAIT_S = 0.1
"""A heartbeat waits this long for a report. If the event loop is busy for longer, the heartbeat sends the last report again."""
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
        """True if no earlier run on the state folder was a member."""
        self.generation = 0
        """The newest change of functions that this gateway has applied. Each heartbeat sends it to the other gateways."""
        self.members: tuple[GatewayMember, ...] = ()
        self.reporter: Callable[[], GatewayReport] = GatewayReport
        """Called on the event loop before each heartbeat."""
        self.told = GatewayReport()
        """The report that the latest heartbeat has sent to the other gateways."""
        self.reports: Mapping[str, Any] = {}
        """The latest `GatewayReport.uses` of each living gateway, by incarnation. Gateways of older versions have none."""
        self.spent: Mapping[str, DaySpending] = {}
        """What the other gateways, living and dead, have used of each function's budget on the latest day."""
        self.followers: list[Callable[[], object]] = []
        """Called on the event loop after each heartbeat, and when the lease has ended."""
        self.duties = SharedDuties(lambda: self.alive)
        self._until_s = self._since_s = 0.0
        # The number of the newest figures in `spent`, and the report for the next heartbeat.
        self._known, self._report = 0, self.told
        self._lapse: asyncio.TimerHandle | None = None
        self._news, self._ended = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []
        self._connection: PostgresConnection | None = None

    @property
    def alive(self) -> bool:
        """True while the lease of this gateway lasts."""
        return time.monotonic() < self._until_s

    @property
    def dead(self) -> bool:
        """True if the lease of another gateway has ended. This gateway must have had its own lease for LEASE_S: if the database was away, the
        others could not renew their leases either.
        """
        judges = self.alive and time.monotonic() - self._since_s > LEASE_S
        return judges and not all(one.alive for one in self.members)

    def open(self, previous: str) -> None:
        """Upgrade the tables, and become a member. `previous` is the incarnation of the last run on this state folder.

        If that run has ended, end its lease, so that its jobs need not wait. It may still run if this state folder is a copy, so first wait
        to see whether a heartbeat renews the lease. Blocks. Raise GatewayError if the database cannot be used.
        """
        with usable():
            self._connection = PostgresConnection(self.url)
            migrate(self._connection)
            until = self._until_of(previous)
            waited = until is not None and not self._ended.wait(1.5 * BEAT_S)
            if waited and self._until_of(previous) == until:
                self._connection.execute(_LEAVE, (previous,))
            self._note(self._beat([], self._report))

    def start(self) -> None:
        """Begin the heartbeats. Call this on the event loop, after `open`."""
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
        """Return the report that the event loop makes now, or the last report if that takes too long. The next heartbeat then sends the new one."""
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
        """Renew the lease, and send `report` to the other gateways."""
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
        # Take only known fields: a newer gateway may have replaced the database's function `heartbeat` by one that returns more.
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
        # End the duties when the lease ends, even if the next heartbeat hangs. The next heartbeat that succeeds replaces this timer.
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
