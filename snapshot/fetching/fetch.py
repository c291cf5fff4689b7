"""Fetches the chunks of a snapshot from a source into files, and verifies each chunk once it is complete.

Each connection has a thread, which takes the next range, receives it into its file, and repeats. The calling
thread supervises: if a part receives nothing for much longer than usual, the calling thread closes its connection.
Then the connection's thread puts the unread bytes back, for any thread to take. If no range waits, an idle
thread takes over half of the longest part that is still being read, so that all threads end at about the same time.
A fetch needs memory for one buffer of 512 KiB per connection.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import (
    Cancelled,
    FetchFailed,
    PilotflameError,
    SnapshotChanged,
    SourceError,
    SourceUnavailable,
    StorageFull,
)
from ..format.manifest import UNKNOWN_DIGEST, Manifest
from ..format.verify import chunk_tensors, holding
from ..sources.response import MISPLACED
from ..sources.retries import delay_s
from ..sources.source import Connection, ObjectInfo, ReportProgress, Source, new_buffer, same_version
from .arrival import Arrival
from .blob_digests import BlobDigests
from .concurrency_control import ConcurrencyControl
from .landing import BOUNCE_BYTES, DIRECT_BYTES, Landing, ShardTarget
from .ranges import Part, Ranges, wanted_order

ATTEMPTS = 8
"""The fetch fails after this many failures of one range in a row. If at least PROGRESS_BYTES were received before a
failure, the count begins again at this failure."""
STALLS = 12
"""The limit instead of ATTEMPTS if the last failure was a stall: the connection was closed because it received nothing. The
time after which a connection counts as stalled doubles with each failure, up to minutes."""
PROGRESS_BYTES = 64 << 10
_REPUBLISH = "Publish new weights under a new name, and make their manifest anew."
_REDEPLOY = "Deploy the function again, or pull again: the weights are then taken as they are now."


@dataclass(slots=True)
class FetchStats:
    """The statistics of a fetch.

    `fetched_bytes` is the size of the chunks that were missing. `received_bytes` also counts bytes that were received
    again. `connections` is the last number that the measurements supported (see ConcurrencyControl). `taken_bytes` is the size of the
    chunks that came from other nodes. These chunks do not count as fetched.
    """

    fetched_bytes: int
    received_bytes: int = 0
    connections: int = 0
    requests: int = 0
    retries: int = 0
    stalls: int = 0
    seconds: float = 0.0
    taken_bytes: int = 0

    def add(self, later: FetchStats) -> None:
        """Add the statistics of a later fetch of the chunks that this fetch has left out."""
        self.fetched_bytes += later.fetched_bytes
        self.received_bytes += later.received_bytes
        self.requests += later.requests
        self.retries += later.retries
        self.stalls += later.stalls
        self.seconds += later.seconds


def fetch(
    manifest: Manifest,
    source: Source,
    targets: Sequence[ShardTarget],
    arrival: Arrival,
    *,
    connections: int | None = None,
    part_bytes: int | None = None,
    verify: bool = True,
    progress: ReportProgress | None = None,
    cancelled: threading.Event | None = None,
    count_received: Callable[[int], None] | None = None,
    left_out: Container[int] = (),
) -> FetchStats:
    """Fetch every chunk that has not landed and is not in `left_out`, in the order of first touch.

    Block until all these chunks have landed.

    `connections` and `part_bytes` replace the numbers that are otherwise chosen by measuring. If the fetch
    fails, the error is raised here and in the threads that wait for chunks (see Arrival.fail):
    SnapshotCorrupt, SnapshotChanged, SourceMissing, SourceDenied, FetchFailed, CacheError or, once
    `cancelled` is set, Cancelled. For any other exception, the waiting threads get a SourceError. Only StorageFull is
    not raised in the waiting threads: the caller may continue on another file system, or fail `arrival`.

    At the end, also if the fetch fails, this calls `count_received` with the number of received bytes.
    """
    control = ConcurrencyControl(connections=connections, part_bytes=part_bytes)
    if progress is not None:
        arrival.report(progress)
    try:
        work = _Fetch(
            manifest, source, targets, arrival, control, verify, cancelled, count_received, left_out
        )
        return work.run()
    except StorageFull:
        raise
    except PilotflameError as error:
        arrival.fail(error)
        raise
    except Exception as error:
        remedy = "This is a fault of the source: report it with the gateway's log."
        arrival.fail(SourceError(f"The source of the weights broke off: {error!r}.", remedy=remedy))
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
    cancelled: threading.Event | None
    count_received: Callable[[int], None] | None
    left_out: Container[int]

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        """Guards the attributes below. Notified when a part, a thread or the fetch ends."""
        wanted = (chunk for chunk in wanted_order(self.manifest) if chunk not in self.left_out)
        missing = [chunk for chunk in wanted if not self.arrival.landed(chunk)]
        self._ranges = Ranges(self.manifest, missing)
        descriptors = [target.descriptor for target in self.targets]
        blob_digests = BlobDigests(self.manifest, self.source, descriptors, self.arrival, set(missing))
        self._landing = Landing(
            self.manifest, self.targets, self.arrival, self._ranges, self._changed, self.verify, blob_digests
        )
        self._stats = FetchStats(self._ranges.waiting_bytes)
        self._versions = self._required_versions()
        self._connections: dict[Part, Connection] = {}
        self._threads: list[threading.Thread] = []
        self._working = 0
        self._error: BaseException | None = None
        self._over = False

    def run(self) -> FetchStats:
        started_s = time.monotonic()
        self.arrival.on_demand(self._demand)
        try:
            self._supervise()
        finally:
            self._stop()
            if self.count_received is not None:
                self.count_received(self._landing.received_bytes)
        if self._error is not None:
            raise self._error
        self._stats.received_bytes = self._landing.received_bytes
        self._stats.connections = self.control.settled_connections
        self._stats.seconds = time.monotonic() - started_s
        return self._stats

    def _required_versions(self) -> dict[int, str] | None:
        """Return the version that each shard must have, by number. None if versions do not matter, because the fetch verifies the
        digests of all needed chunks.
        """
        observed, chunks = self.manifest.observed, self.arrival.chunks
        versions = observed.versions if observed else ()
        if self.verify and all(chunks.digests[chunk] != UNKNOWN_DIGEST for chunk in chunks.needed()):
            return None
        return {shard: version for shard, version in enumerate(versions) if version}

    def _supervise(self) -> None:
        processors = os.cpu_count() or 1
        with self._changed, Path("/proc/uptime").open("rb") as uptime:
            self.control.update(time.monotonic(), 0, 0.0, processors)
            while self._error is None and not self._ranges.idle:
                if self.cancelled is not None and self.cancelled.is_set():
                    raise Cancelled("The fetch was cancelled.", remedy="Chunks that have landed are kept.")
                self._open_connections()
                before_s = time.monotonic()
                wait_s = self.control.next_update_s(before_s)
                self._changed.wait(wait_s)
                now_s = time.monotonic()
                # The second number in the file is the idle time since boot, summed over all processors.
                idle_s = float(os.pread(uptime.fileno(), 64, 0).split()[1])
                self.control.update(now_s, self._landing.received_bytes, idle_s, processors)
                self._give_up_silent(now_s, late_s=now_s - before_s - wait_s)

    def _open_connections(self) -> None:
        """Start threads up to the wanted number of connections, but at most one new thread for each waiting chunk."""
        chunks = -(-self._ranges.waiting_bytes // self.manifest.chunk_bytes)
        wanted = min(self.control.connections, self._working + chunks)
        while self._working < wanted:
            self._working += 1
            thread = threading.Thread(target=self._work, args=(self._working,), name="fetch", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _give_up_silent(self, now_s: float, late_s: float) -> None:
        """Close the connection of each part that received nothing for longer than its limit.

        This thread woke `late_s` too late. Do not count that time as silence of the source, because the receiving threads
        had the same delay.
        """
        for part in self._ranges.active:
            if late_s > 0.01:
                part.asked_s += late_s
            silent_s = now_s - part.asked_s
            limit_s = self.control.stall_s(started=part.started, attempts=part.attempts)
            if part in self._connections and not part.broken_off and silent_s > limit_s:
                part.broken_off = True
                self._stats.stalls += 1
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

    def _work(self, number: int) -> None:
        buffer = new_buffer(BOUNCE_BYTES)
        connection: Connection | None = None
        try:
            connection, fresh = self.source.connect(), True
            while (part := self._next(number)) is not None:
                believed = self._fetch_part(connection, part, buffer, fresh=fresh)
                fresh = part.broken_off or not believed or part.at < part.asked_end
                if fresh:
                    # Replace the connection. Either the supervisor has closed it, or its answer belongs to another
                    # request, or the source goes on sending bytes that another connection has taken over.
                    connection.close()
                    connection = self.source.connect()
            connection.release()
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
        """Wait for the next part to fetch, and return it. None if the thread should end.

        `number` counts connections from 1. The thread ends if `number` exceeds the wanted number of connections.
        """
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

    def _fetch_part(self, connection: Connection, part: Part, buffer: memoryview, *, fresh: bool) -> bool:
        """Fetch a part. After a failure, put back the rest. Return False if the rest must be requested on a new connection.

        If a server or a proxy answers a request twice, the second answer looks like the answer to the next request. Then
        the object seems to have changed, or the answer has another range. If this happens on a connection that is not
        `fresh`, only a new connection shows whether the object has really changed.
        """
        with self._changed:
            if self._over:
                # Do not read: `_stop` ran before this connection was in `_connections`, so nothing would end the read.
                self._ranges.finish(part)
                return True
            self._connections[part] = connection
            self._stats.requests += 1
        problem: SourceUnavailable | None = None
        begun, doubtful = part.at, False
        try:
            name, version = self.manifest.shards[part.shard].name, (self._versions or {}).get(part.shard, "")
            self._check_version(part, self._begin(connection, name, part, version))
            now_s = time.monotonic()
            waited_s, part.asked_s, part.started = now_s - part.asked_s, now_s, True
            with self._changed:
                self.control.add_latency(waited_s)
            self._landing.receive(connection, part, buffer)
        except SourceUnavailable as error:
            doubtful = MISPLACED in error.details and (connection.used or not fresh)
            problem = None if doubtful else error
        except SnapshotChanged:
            if fresh and not connection.used:
                raise
            doubtful = True
        finally:
            with self._changed:
                del self._connections[part]
                self._put_back(part, problem, begun, doubtful=doubtful)
        return not doubtful

    def _begin(self, connection: Connection, name: str, part: Part, version: str) -> ObjectInfo:
        try:
            part.asked_end = part.end
            return connection.begin(name, part.at, part.asked_end, version)
        except SnapshotChanged as error:
            if self.manifest.observed is None:
                raise
            raise SnapshotChanged(error.message, remedy=_REDEPLOY, details=error.details) from error

    def _put_back(self, part: Part, problem: SourceUnavailable | None, begun: int, *, doubtful: bool) -> None:
        # A doubtful answer may belong to another request, so it does not change the number of failed attempts.
        attempts, due_s = part.attempts if doubtful else 0, 0.0
        self._stats.retries += doubtful
        if problem is not None:
            attempts = 1 if part.at - begun >= PROGRESS_BYTES else part.attempts + 1
            self._stats.retries += 1
            if attempts >= (STALLS if part.broken_off else ATTEMPTS):
                self._error = self._error or self._failed(part, problem, attempts)
            if not part.broken_off:
                due_s = time.monotonic() + delay_s(attempts, problem.retry_after_s)
        self._ranges.finish(part, attempts=attempts, due_s=due_s)
        self._changed.notify_all()

    def _check_version(self, part: Part, info: ObjectInfo) -> None:
        """Raise SnapshotChanged if the size differs from the manifest. If digests are missing, also compare the version with the
        observed version or, if there is none, with the version in the first answer.
        """
        shard = self.manifest.shards[part.shard]
        if info.size_bytes != shard.size_bytes:
            how = f"it has {info.size_bytes} bytes instead of {shard.size_bytes}"
        elif self._versions is None:
            return
        else:
            with self._changed:
                version = self._versions.setdefault(part.shard, info.version)
            if same_version(info.version, version):
                return
            how = f"its version is {info.version!r} instead of {version!r}"
        raise SnapshotChanged(
            f"{shard.name} at {self.source.url} was replaced: {how}.",
            remedy=_REPUBLISH if self.manifest.observed is None else _REDEPLOY,
            details={"object": shard.name},
        )

    def _failed(self, part: Part, problem: SourceUnavailable, attempts: int) -> FetchFailed:
        shard = self.manifest.shards[part.shard]
        chunk = part.at // self.manifest.chunk_bytes
        names = chunk_tensors(self.manifest, part.shard, chunk)
        return FetchFailed(
            f"Shard {shard.name}: chunk {chunk} (from byte {part.at}), which {holding(names)}, "
            f"was given up after {attempts} attempts: {problem.message}",
            remedy="Check the source, and try again: what has landed is kept.",
            details={"shard": shard.name, "chunk": chunk, "tensors": names[:100]},
        )
