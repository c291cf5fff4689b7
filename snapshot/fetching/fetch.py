"""Fetch: a snapshot's chunks from a source into files, over several connections, each verified as it lands.

A thread a connection takes the most wanted range, reads it into place and takes the next. Nothing else is needed while all
goes well; one supervisor, the calling thread, watches for silence: it gives up the connection of a part that is silent for
much longer than usual, whose thread then puts back what is left for another. Threads that find nothing more to take halve
the longest part that is still being read, so that all end together. Memory: one kept buffer of 512 KiB a connection.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import Cancelled, FetchFailed, PilotflameError, SnapshotChanged, SourceUnavailable
from ..format.manifest import Manifest
from ..format.verify import chunk_tensors, holding
from ..sources.ranged import delay_s
from ..sources.source import Connection, ObjectInfo, Progress, Source, same_version
from .arrival import Arrival
from .concurrency_control import ConcurrencyControl
from .landing import BOUNCE_BYTES, DIRECT_BYTES, Landing
from .learned import recall, remember
from .ranges import Part, Ranges, wanted_order
from .target import ShardTarget

ATTEMPTS = 8
"""Failures in a row, with hardly a byte in between, before a range is given up."""
STALLS = 12
"""Connections given up in a row for one range: patience doubles each time, to minutes."""
PROGRESS_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class FetchStats:
    """What a fetch did. `received_bytes` counts what came twice twice; `connections` is where it ended."""

    fetched_bytes: int
    received_bytes: int
    connections: int
    requests: int
    retries: int
    stalls: int
    seconds: float


def fetch(
    manifest: Manifest,
    source: Source,
    targets: Sequence[ShardTarget],
    arrival: Arrival,
    *,
    connections: int | None = None,
    part_bytes: int | None = None,
    verify: bool = True,
    progress: Progress | None = None,
    cancelled: threading.Event | None = None,
    learned: Path | None = None,
) -> FetchStats:
    """Bring every chunk that has not landed, in the order of first touch. Blocks until all have, or one cannot.

    `connections` and `part_bytes` fix what is otherwise measured, and remembered in file `learned`. What fails is told to
    `arrival` and raised: SnapshotCorrupt, SnapshotChanged, SourceMissing, SourceDenied, FetchFailed, CacheError, Cancelled.
    """
    habit = recall(learned, source.url) if learned is not None else None
    pace = ConcurrencyControl(habit, connections=connections, part_bytes=part_bytes)
    run = _Fetch(manifest, source, targets, arrival, pace, verify=verify, progress=progress)
    try:
        stats = run.run(cancelled)
    except PilotflameError as error:
        arrival.fail(error)
        raise
    except BaseException:
        arrival.fail(Cancelled("The fetch was broken off."))
        raise
    if learned is not None and stats.received_bytes:
        remember(learned, source.url, pace.habit)
    return stats


class _Fetch:
    def __init__(
        self,
        manifest: Manifest,
        source: Source,
        targets: Sequence[ShardTarget],
        arrival: Arrival,
        pace: ConcurrencyControl,
        *,
        verify: bool,
        progress: Progress | None,
    ) -> None:
        self._manifest = manifest
        self._source = source
        self._arrival = arrival
        self._pace = pace
        self._changed = threading.Condition()
        """Guards all below. Notified when ranges come back, when connections may grow, and at the end."""
        missing = [chunk for chunk in wanted_order(manifest) if not arrival.landed(chunk)]
        self._ranges = Ranges(manifest, missing)
        self._landing = Landing(
            manifest, targets, arrival, self._ranges, self._changed, verify=verify, progress=progress
        )
        self._landing.landed_bytes = manifest.total_bytes - self._ranges.waiting_bytes
        self._fetched_bytes = self._ranges.waiting_bytes
        self._versions: dict[int, str] = {}
        self._connections: dict[Part, Connection] = {}
        self._threads: list[threading.Thread] = []
        self._working = 0
        self._error: BaseException | None = None
        self._over = False
        self._received_bytes = 0
        self._requests = self._retries = self._stalls = 0

    def run(self, cancelled: threading.Event | None) -> FetchStats:
        started_s = time.monotonic()
        self._arrival.on_demand(self._demand)
        try:
            self._supervise(cancelled)
        finally:
            self._stop()
        if self._error is not None:
            raise self._error
        return FetchStats(
            fetched_bytes=self._fetched_bytes,
            received_bytes=self._received_bytes,
            connections=self._pace.habit.connections,
            requests=self._requests,
            retries=self._retries,
            stalls=self._stalls,
            seconds=time.monotonic() - started_s,
        )

    # -- the supervisor

    def _supervise(self, cancelled: threading.Event | None) -> None:
        processors = os.cpu_count() or 1
        with self._changed, Path("/proc/uptime").open("rb") as uptime:
            self._pace.look(time.monotonic(), 0, 0.0, processors)
            while self._error is None and not self._ranges.idle:
                if cancelled is not None and cancelled.is_set():
                    raise Cancelled(
                        "The fetch was cancelled.", remedy="What has landed is kept for the next one."
                    )
                self._grow()
                asked_s = self._pace.next_look_s(time.monotonic())
                looked_s = time.monotonic()
                self._changed.wait(asked_s)
                now_s = time.monotonic()
                self._pace.look(now_s, self._received_bytes, _idle_s(uptime.fileno()), processors)
                self._give_up_silent(now_s, late_s=now_s - looked_s - asked_s)

    def _grow(self) -> None:
        wanted = min(self._pace.connections, self._working + self._room())
        while self._working < wanted:
            self._working += 1
            thread = threading.Thread(target=self._work, args=(self._working,), name="fetch", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _room(self) -> int:
        """How many more connections would find something to do."""
        return -(-self._ranges.waiting_bytes // self._manifest.chunk_bytes)

    def _give_up_silent(self, now_s: float, late_s: float) -> None:
        """Break off parts that are silent for longer than usual. If this thread was late, all were paused: not theirs."""
        for part in self._ranges.active:
            if late_s > 0.01:
                part.asked_s += late_s
            silent_s = now_s - part.asked_s
            connection = self._connections.get(part)
            if connection is None or part.broken_off:
                continue
            if silent_s > self._pace.stall_s(started=part.started, attempts=part.attempts):
                part.broken_off = True
                self._stalls += 1
                connection.close()

    def _stop(self) -> None:
        with self._changed:
            self._over = True
            for connection in self._connections.values():
                connection.close()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _demand(self, first: int, last: int) -> None:
        with self._changed:
            if not self._over:
                self._ranges.demand(first, last)

    # -- a connection's thread

    def _work(self, number: int) -> None:
        buffer = memoryview(bytearray(BOUNCE_BYTES))
        connection: Connection | None = None
        try:
            connection = self._source.connect()
            while (part := self._next(number)) is not None:
                self._fetch_part(connection, part, buffer)
                if part.broken_off:  # closed by the supervisor, and for good
                    connection.close()
                    connection = self._source.connect()
        except BaseException as error:  # noqa: BLE001  raised again by the supervisor
            with self._changed:
                self._error = self._error or error
        finally:
            if connection is not None:
                connection.close()
            with self._changed:
                self._working -= 1
                self._changed.notify_all()

    def _next(self, number: int) -> Part | None:
        """The next part to fetch; waits while there may be one. None: this connection is not needed any more."""
        with self._changed:
            while True:
                if (
                    self._over
                    or self._error is not None
                    or self._ranges.idle
                    or number > self._pace.connections
                ):
                    return None
                now_s = time.monotonic()
                part = self._ranges.take(self._pace.part_bytes(self._ranges.waiting_bytes), now_s)
                part = part or self._ranges.split(
                    self._pace.least_split_bytes(len(self._ranges.active)), DIRECT_BYTES
                )
                if part is not None:
                    part.asked_s = now_s
                    return part
                due_s = self._ranges.next_due_s()
                self._changed.wait(None if due_s is None else max(0.0, due_s - now_s))

    def _fetch_part(self, connection: Connection, part: Part, buffer: memoryview) -> None:
        with self._changed:
            self._connections[part] = connection
            self._requests += 1
        problem: SourceUnavailable | None = None
        begun = part.at
        try:
            name, version = self._manifest.shards[part.shard].name, self._versions.get(part.shard, "")
            self._check_version(part, connection.begin(name, part.at, part.end, version))
            now_s = time.monotonic()
            waited_s, part.asked_s, part.started = now_s - part.asked_s, now_s, True
            with self._changed:
                self._pace.first_byte(waited_s)
            self._landing.receive(connection, part, buffer, self._on_bytes)
        except SourceUnavailable as error:
            problem = error
        finally:
            with self._changed:
                del self._connections[part]
                self._put_back(part, problem, begun)

    def _on_bytes(self, part: Part, count: int) -> None:
        part.asked_s = time.monotonic()
        # Not under the lock: a count lost between two threads' loads and stores bends a rate, nothing else.
        self._received_bytes += count

    def _put_back(self, part: Part, problem: SourceUnavailable | None, begun: int) -> None:
        attempts, due_s = 0, 0.0
        if problem is not None:
            attempts = 1 if part.at - begun >= PROGRESS_BYTES else part.attempts + 1
            self._retries += 1
            if attempts >= (STALLS if part.broken_off else ATTEMPTS):
                self._error = self._error or self._failed(part, problem)
            if not part.broken_off:
                due_s = time.monotonic() + delay_s(attempts, problem.retry_after_s)
        self._ranges.finish(part, attempts=attempts, due_s=due_s)
        self._changed.notify_all()

    def _check_version(self, part: Part, info: ObjectInfo) -> None:
        """The first answer says which version of an object this is; from then on only that one will do."""
        shard = self._manifest.shards[part.shard]
        with self._changed:
            version = self._versions.setdefault(part.shard, info.version)
        if info.size_bytes != shard.size_bytes or not same_version(info.version, version):
            what = f"it has {info.size_bytes} bytes, {shard.size_bytes} expected"
            if info.size_bytes == shard.size_bytes:
                what = "it was replaced while it was fetched"
            raise SnapshotChanged(
                f"{shard.name} at {self._source.url} is not the object that the manifest describes: {what}.",
                remedy="Publish new weights under a new name, and make their manifest anew.",
                details={"object": shard.name},
            )

    def _failed(self, part: Part, problem: SourceUnavailable) -> FetchFailed:
        shard = self._manifest.shards[part.shard]
        chunk = part.at // self._manifest.chunk_bytes
        names = chunk_tensors(self._manifest, part.shard, chunk)
        return FetchFailed(
            f"Shard {shard.name}: chunk {chunk} (from byte {part.at}), which {holding(names)}, was given up after "
            f"{ATTEMPTS} attempts: {problem.message}",
            remedy="Check the source, and try again: what has landed is kept.",
            details={"shard": shard.name, "chunk": chunk, "tensors": names[:100]},
        )


def _idle_s(uptime: int) -> float:
    """Time of all processors that nobody used since the machine started: the second number of /proc/uptime."""
    return float(os.pread(uptime, 64, 0).split()[1])
