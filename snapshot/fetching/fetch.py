"""A fetch brings the chunks of a snapshot from a source into files, and verifies each as it lands.

One thread per connection takes the most wanted range, reads it into place and takes the next. The calling
thread supervises: it gives up the connection of a part that is silent for much longer than usual, and that
connection's thread puts back what is left for another. A thread that finds nothing to take halves the longest
part that is still being read, so that all end together. Memory: one buffer of 512 KiB per connection.
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
from .landing import BOUNCE_BYTES, DIRECT_BYTES, Landing, ShardTarget
from .ranges import Part, Ranges, wanted_order

ATTEMPTS = 8
"""Failures in a row, with hardly a byte in between, before a range is given up."""
STALLS = 12
"""Connections given up in a row for one range: the stall limit doubles each time, to minutes."""
PROGRESS_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class FetchStats:
    """What a fetch did. Bytes that came twice are received twice; `connections` is the settled number."""

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
) -> FetchStats:
    """Fetch every chunk that has not landed, in the order of first touch. Block until all have or one fails.

    `connections` and `part_bytes` fix what is otherwise measured. Whatever fails is passed to `arrival` and
    raised: SnapshotCorrupt, SnapshotChanged, SourceMissing, SourceDenied, FetchFailed, CacheError, Cancelled.
    """
    control = ConcurrencyControl(connections=connections, part_bytes=part_bytes)
    try:
        return _Fetch(manifest, source, targets, arrival, control, verify, progress, cancelled).run()
    except PilotflameError as error:
        arrival.fail(error)
        raise
    except BaseException:
        arrival.fail(Cancelled("The fetch was broken off."))
        raise


@dataclass(eq=False)
class _Fetch:
    manifest: Manifest
    source: Source
    targets: Sequence[ShardTarget]
    arrival: Arrival
    control: ConcurrencyControl
    verify: bool
    progress: Progress | None
    cancelled: threading.Event | None

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        """Guards all below. Notified when a range comes back, when a thread ends, and at the end."""
        missing = [chunk for chunk in wanted_order(self.manifest) if not self.arrival.landed(chunk)]
        self._ranges = Ranges(self.manifest, missing)
        self._landing = Landing(
            self.manifest, self.targets, self.arrival, self._ranges, self._changed, self._on_bytes,
            self.verify, self.progress,
        )  # fmt: skip
        self._fetched_bytes = self._ranges.waiting_bytes
        self._versions: dict[int, str] = {}
        self._connections: dict[Part, Connection] = {}
        self._threads: list[threading.Thread] = []
        self._working = 0
        self._error: BaseException | None = None
        self._over = False
        self._received_bytes = 0
        self._requests = self._retries = self._stalls = 0

    def run(self) -> FetchStats:
        started_s = time.monotonic()
        self.arrival.on_demand(self._demand)
        try:
            self._supervise()
        finally:
            self._stop()
        if self._error is not None:
            raise self._error
        return FetchStats(
            fetched_bytes=self._fetched_bytes, received_bytes=self._received_bytes,
            connections=self.control.settled_connections, requests=self._requests, retries=self._retries,
            stalls=self._stalls, seconds=time.monotonic() - started_s,
        )  # fmt: skip

    # -- the supervisor

    def _supervise(self) -> None:
        processors = os.cpu_count() or 1
        with self._changed, Path("/proc/uptime").open("rb") as uptime:
            self.control.update(time.monotonic(), 0, 0.0, processors)
            while self._error is None and not self._ranges.idle:
                if self.cancelled is not None and self.cancelled.is_set():
                    raise Cancelled("The fetch was cancelled.", remedy="What has landed is kept.")
                self._open_connections()
                before_s = time.monotonic()
                wait_s = self.control.next_update_s(before_s)
                self._changed.wait(wait_s)
                now_s = time.monotonic()
                # The second number is the idle time of all processors since the machine started.
                idle_s = float(os.pread(uptime.fileno(), 64, 0).split()[1])
                self.control.update(now_s, self._received_bytes, idle_s, processors)
                self._give_up_silent(now_s, late_s=now_s - before_s - wait_s)

    def _open_connections(self) -> None:
        """Start threads up to the wanted number, as long as there is a waiting chunk for each."""
        chunks = -(-self._ranges.waiting_bytes // self.manifest.chunk_bytes)
        wanted = min(self.control.connections, self._working + chunks)
        while self._working < wanted:
            self._working += 1
            thread = threading.Thread(target=self._work, args=(self._working,), name="fetch", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _give_up_silent(self, now_s: float, late_s: float) -> None:
        """Break off parts that are silent for longer than usual, less the time this thread was late."""
        for part in self._ranges.active:
            if late_s > 0.01:
                part.asked_s += late_s
            silent_s = now_s - part.asked_s
            limit_s = self.control.stall_s(started=part.started, attempts=part.attempts)
            if part in self._connections and not part.broken_off and silent_s > limit_s:
                part.broken_off = True
                self._stalls += 1
                self._connections[part].close()

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
            connection = self.source.connect()
            while (part := self._next(number)) is not None:
                self._fetch_part(connection, part, buffer)
                if part.broken_off:
                    # The supervisor closed this connection, for good.
                    connection.close()
                    connection = self.source.connect()
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
        """Wait for the next part to fetch, and return it; None if connection `number` is not needed."""
        ranges, control = self._ranges, self.control
        with self._changed:
            while not (self._over or self._error or ranges.idle or number > control.connections):
                now_s = time.monotonic()
                part = ranges.take(control.part_bytes(ranges.waiting_bytes), now_s)
                part = part or ranges.split(control.least_split_bytes(len(ranges.active)), DIRECT_BYTES)
                if part is not None:
                    part.asked_s = now_s
                    return part
                due_s = ranges.next_due_s()
                self._changed.wait(None if due_s is None else max(0.0, due_s - now_s))
        return None

    def _fetch_part(self, connection: Connection, part: Part, buffer: memoryview) -> None:
        with self._changed:
            self._connections[part] = connection
            self._requests += 1
        problem: SourceUnavailable | None = None
        begun = part.at
        try:
            name, version = self.manifest.shards[part.shard].name, self._versions.get(part.shard, "")
            self._check_version(part, connection.begin(name, part.at, part.end, version))
            now_s = time.monotonic()
            waited_s, part.asked_s, part.started = now_s - part.asked_s, now_s, True
            with self._changed:
                self.control.add_latency(waited_s)
            self._landing.receive(connection, part, buffer)
        except SourceUnavailable as error:
            problem = error
        finally:
            with self._changed:
                del self._connections[part]
                self._put_back(part, problem, begun)

    def _on_bytes(self, part: Part, count: int) -> None:
        part.asked_s = time.monotonic()
        # Not under the lock: an increment that another thread overwrites only bends a measured rate.
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
        """Raise SnapshotChanged unless the object has its size, and the version that the first answer had."""
        shard = self.manifest.shards[part.shard]
        with self._changed:
            version = self._versions.setdefault(part.shard, info.version)
        if info.size_bytes != shard.size_bytes or not same_version(info.version, version):
            raise SnapshotChanged(
                f"{shard.name} at {self.source.url} was replaced: it has {info.size_bytes} bytes and version "
                f"{info.version!r}, not {shard.size_bytes} and {version!r}.",
                remedy="Publish new weights under a new name, and make their manifest anew.",
                details={"object": shard.name},
            )

    def _failed(self, part: Part, problem: SourceUnavailable) -> FetchFailed:
        shard = self.manifest.shards[part.shard]
        chunk = part.at // self.manifest.chunk_bytes
        names = chunk_tensors(self.manifest, part.shard, chunk)
        return FetchFailed(
            f"Shard {shard.name}: chunk {chunk} (from byte {part.at}), which {holding(names)}, "
            f"was given up after {ATTEMPTS} attempts: {problem.message}",
            remedy="Check the source, and try again: what has landed is kept.",
            details={"shard": shard.name, "chunk": chunk, "tensors": names[:100]},
        )
