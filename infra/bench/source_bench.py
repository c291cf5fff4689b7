"""How fast a source of weights is: a snapshot is read several times into the same memory, verified.

    python infra/bench/source_bench.py URL [--rounds N] [--connections N] [--part-mib N] [--json]

URL is a folder, s3:// or http(s)://. The first round meets fresh memory, the others reuse it. Where URL is plain http,
8 bare sockets read the largest file after each round: the ceiling. Nothing is kept.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from pilotflame.errors import CacheError
from pilotflame.snapshot.fetching.arrival import Arrival
from pilotflame.snapshot.fetching.fetch import FetchStats, fetch
from pilotflame.snapshot.fetching.landing import ShardTarget
from pilotflame.snapshot.format.manifest import Manifest, TensorEntry, read_manifest
from pilotflame.snapshot.sources.http import WebSource
from pilotflame.snapshot.sources.locate import open_source
from pilotflame.snapshot.sources.location import Location, ServerAddress
from pilotflame.snapshot.sources.source import Progress, Source
from rich.console import Console
from rich.table import Table

LATENCY_PROBES = 5
CEILING_CONNECTIONS = 8
TIMEOUT_S = 30.0
_BUFFER_BYTES = 1 << 20
_MAX_HEAD_BYTES = 64 << 10
_PARTIAL = b"206"


@dataclass(frozen=True, slots=True)
class Round:
    """One reading. `first_tensor_s`: until the first tensor in the order of first touch was there and verified."""

    seconds: float
    bytes_per_s: float
    first_tensor_s: float | None
    ceiling_bytes_per_s: float | None
    stats: FetchStats

    @property
    def ceiling_share(self) -> float | None:
        return self.bytes_per_s / self.ceiling_bytes_per_s if self.ceiling_bytes_per_s else None


@dataclass(frozen=True, slots=True)
class SourceBench:
    """The measured rounds. `latency_s`: from the request on a kept connection to the first byte, median."""

    latency_s: float | None
    first_tensor: TensorEntry | None
    rounds: Sequence[Round]

    @property
    def connections(self) -> int:
        """How many the last round ended with."""
        return self.rounds[-1].stats.connections

    def median(self, value: Callable[[Round], float | None]) -> float | None:
        """The median of all rounds but the first; None if there are none, or nothing was measured."""
        found = [number for item in self.rounds[1:] if (number := value(item)) is not None]
        return statistics.median(found) if found else None


def bench(
    manifest: Manifest,
    source: Source,
    *,
    rounds: int = 3,
    connections: int | None = None,
    part_bytes: int | None = None,
    progress: Progress | None = None,
) -> SourceBench:
    """Read the snapshot `rounds` times, verified, into memory that is reused from the second round on.

    Raise CacheError if the snapshot does not fit into the memory that is available.
    """
    latency_s, first = _latency_s(manifest, source), _first_tensor(manifest)
    done = []
    with _ReusedMemory(manifest) as memory:
        for number in range(rounds):
            report = None if progress is None else _shifted(progress, number, rounds)
            arrival = Arrival(manifest)
            arrived = _watch(manifest, arrival, first)
            started_s = time.monotonic()
            stats = fetch(
                manifest, source, memory.targets(), arrival,
                connections=connections, part_bytes=part_bytes, progress=report,
            )  # fmt: skip
            first_s = arrived[0] - started_s if arrived else None
            rate = manifest.total_bytes / max(stats.seconds, 1e-9)
            done.append(Round(stats.seconds, rate, first_s, _ceiling(manifest, source), stats))
    return SourceBench(latency_s, first, tuple(done))


def ceiling(location: Location, size_bytes: int) -> float | None:
    """Return the bytes a second that 8 plain sockets receive of an object; connecting counts.

    None if the object is not served by plain http, has no bytes, or its server does not answer with ranges.
    """
    if not location.url.startswith("http://") or size_bytes == 0:
        return None
    count = min(CEILING_CONNECTIONS, size_bytes)
    ends = [size_bytes * number // count for number in range(count + 1)]
    with ThreadPoolExecutor(count, thread_name_prefix="ceiling") as pool:
        started_s = time.monotonic()
        jobs = [pool.submit(_receive, location, begin, end) for begin, end in pairwise(ends)]
        try:
            whole = all(job.result() for job in jobs)
        except (OSError, ValueError):
            return None
        return size_bytes / (time.monotonic() - started_s) if whole else None


def _receive(location: Location, begin: int, end: int) -> bool:
    """Receive bytes [begin, end). Return True if all of them came."""
    origin, parts = ServerAddress.of(location.url), urlsplit(location.url)
    target = f"{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}"
    headers = {"Host": origin.authority, "Range": f"bytes={begin}-{end - 1}", "Connection": "close"}
    lines = [f"GET {target} HTTP/1.1", *(f"{name}: {value}" for name, value in (headers | dict(location.headers)).items())]  # fmt: skip
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    with socket.create_connection((origin.host, origin.port), TIMEOUT_S) as connected:
        connected.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
        head = b""
        while b"\r\n\r\n" not in head and len(head) < _MAX_HEAD_BYTES:
            count = connected.recv_into(buffer)
            if count == 0:
                return False
            head += buffer[:count]
        first, _, body = head.partition(b"\r\n\r\n")
        if first.split(b" ", 2)[1:2] != [_PARTIAL]:
            return False
        left = end - begin - len(body)
        while left > 0 and (count := connected.recv_into(buffer)):
            left -= count
        return left <= 0


class _ReusedMemory:
    """A memory-backed file for every shard, mapped once its pages are there."""

    def __init__(self, manifest: Manifest) -> None:
        _check_room(manifest.total_bytes)
        self._manifest = manifest
        self._opened = ExitStack()
        self._descriptors: list[int] = []
        self._views: list[memoryview | None] = []
        self._used = False

    def __enter__(self) -> Self:
        for shard in self._manifest.shards:
            descriptor = os.memfd_create("shard", os.MFD_CLOEXEC)
            self._opened.callback(os.close, descriptor)
            os.ftruncate(descriptor, shard.size_bytes)
            self._descriptors.append(descriptor)
        return self

    def __exit__(self, *failure: object) -> None:
        self._views = []
        self._opened.close()

    def targets(self) -> Sequence[ShardTarget]:
        """The targets of one more round: fresh pages the first time, mapped ones from then on."""
        if self._used and not self._views:
            self._views = [_mapped(descriptor) for descriptor in self._descriptors]
        self._used = True
        views = self._views or [None] * len(self._descriptors)
        return [
            ShardTarget(shard.name, descriptor, view)
            for shard, descriptor, view in zip(self._manifest.shards, self._descriptors, views, strict=True)
        ]


def _mapped(descriptor: int) -> memoryview | None:
    size_bytes = os.fstat(descriptor).st_size
    if not size_bytes:
        return None
    return memoryview(mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))


def _check_room(size_bytes: int) -> None:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available_bytes = int(fields["MemAvailable"].split()[0]) << 10
    if size_bytes > available_bytes:
        raise CacheError(
            f"The snapshot has {size_bytes} bytes, and {available_bytes} of memory are available.",
            remedy="Measure a smaller snapshot at the same place.",
        )


def _first_tensor(manifest: Manifest) -> TensorEntry | None:
    """The first tensor in the order of first touch; where none was recorded, the first in the files."""
    placed = sorted(manifest.tensors, key=lambda tensor: (tensor.shard, tensor.offset_bytes))
    places = {tensor.name: tensor for tensor in placed}
    order = [places[name] for name in manifest.first_touch] or placed
    return next((tensor for tensor in order if tensor.size_bytes), None)


def _watch(manifest: Manifest, arrival: Arrival, tensor: TensorEntry | None) -> list[float]:
    """Return a list that gets the time at which all of `tensor` has landed."""
    arrived: list[float] = []
    if tensor is None:
        return arrived
    first, last = arrival.chunks.covering(
        tensor.shard, tensor.offset_bytes, tensor.offset_bytes + tensor.size_bytes
    )
    missing = set(range(first, last + 1))

    def landed(chunk: int) -> None:
        if chunk in missing:
            missing.discard(chunk)
            if not missing:
                arrived.append(time.monotonic())

    arrival.on_land(landed)
    return arrived


def _latency_s(manifest: Manifest, source: Source) -> float | None:
    name = next((shard.name for shard in manifest.shards if shard.size_bytes), None)
    if name is None:
        return None
    # `stat` retries: after it the source is known to answer.
    source.stat(name)
    connection, byte, waited_s = source.connect(), memoryview(bytearray(1)), []
    try:
        for _ in range(LATENCY_PROBES + 1):
            asked_s = time.monotonic()
            connection.begin(name, 0, 1)
            connection.read_into(byte)
            waited_s.append(time.monotonic() - asked_s)
    finally:
        connection.close()
    # The first request also connects.
    return statistics.median(waited_s[1:])


def _ceiling(manifest: Manifest, source: Source) -> float | None:
    if not isinstance(source, WebSource):
        return None
    largest = max(manifest.shards, key=lambda shard: shard.size_bytes, default=None)
    if largest is None:
        return None
    return ceiling(source.locate(largest.name, fresh=False), largest.size_bytes)


def _shifted(progress: Progress, number: int, rounds: int) -> Progress:
    return lambda done, total: progress(number * total + done, rounds * total)


_MEASURED = ("seconds", "bytes_per_s", "first_tensor_s", "ceiling_bytes_per_s", "ceiling_share")


def facts(url: str, manifest: Manifest, found: SourceBench) -> dict[str, Any]:
    """Everything that was measured, for JSON. `others`: medians of all rounds but the first."""
    tensor = found.first_tensor
    return {
        "url": url,
        "digest": manifest.digest,
        "bytes": manifest.total_bytes,
        "connections": found.connections,
        "latency_s": found.latency_s,
        "first_tensor": None if tensor is None else {
            "name": tensor.name, "bytes": tensor.size_bytes, "share": tensor.size_bytes / manifest.total_bytes,
            "recorded": bool(manifest.first_touch),
        },
        "rounds": [_round_facts(item) for item in found.rounds],
        "others": {name: found.median(lambda item, name=name: getattr(item, name)) for name in _MEASURED},  # type: ignore[misc]
    }  # fmt: skip


def _round_facts(item: Round) -> dict[str, Any]:
    stats = item.stats
    measured = {name: getattr(item, name) for name in _MEASURED}
    return {**measured, "connections": stats.connections, "requests": stats.requests, "retries": stats.retries,
            "stalls": stats.stalls}  # fmt: skip


def _print(told: dict[str, Any]) -> None:
    table = Table(title=f"{told['url']}: {told['bytes'] / 1e6:.1f} MB", title_justify="left")
    for column in ("", "first round", "median of the others"):
        table.add_column(column, justify="right" if column else "left")
    for name in _MEASURED:
        cells = (told["rounds"][0][name], told["others"][name])
        table.add_row(name, *("-" if cell is None else f"{cell:.4g}" for cell in cells))
    console = Console(width=110)
    console.print(table)
    console.print(f"connections {told['connections']}, latency_s {told['latency_s']}")
    console.print(f"first tensor {told['first_tensor']}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure a source of weights.")
    parser.add_argument("url", metavar="URL")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--connections", type=int, help="instead of adapting")
    parser.add_argument("--part-mib", type=int, help="instead of adapting")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    source = open_source(arguments.url)
    manifest = read_manifest(source)
    part_bytes = None if arguments.part_mib is None else arguments.part_mib << 20
    found = bench(
        manifest, source, rounds=arguments.rounds, connections=arguments.connections, part_bytes=part_bytes
    )
    told = facts(source.url, manifest, found)
    if arguments.json:
        print(json.dumps(told))
    else:
        _print(told)
    return 0


if __name__ == "__main__":
    sys.exit(main())
