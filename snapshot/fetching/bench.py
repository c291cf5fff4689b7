"""The bench: a snapshot read several times into the same memory, and what each time took."""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

from ...errors import CacheError
from ..format.manifest import Manifest, TensorEntry
from ..sources.http import WebSource
from ..sources.source import Progress, Source
from .arrival import Arrival
from .ceiling import ceiling
from .fetch import FetchStats, fetch
from .target import ShardTarget

LATENCY_PROBES = 5


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
class Bench:
    """What was measured. `latency_s`: from asking on a kept connection to the first byte, median."""

    latency_s: float | None
    first_tensor: TensorEntry | None
    rounds: Sequence[Round]

    @property
    def connections(self) -> int:
        """Where it settled."""
        return self.rounds[-1].stats.connections

    def median(self, value: Callable[[Round], float | None]) -> float | None:
        """Of the rounds but the first; None if there are none, or nothing was measured."""
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
) -> Bench:
    """Read the snapshot `rounds` times, verified, into memory that is reused from the second time on.

    What is learned of the source in one round is used in the next, as it is between pulls. After each round the ceiling is
    taken from the largest shard. CacheError if the snapshot does not fit into the memory that is available.
    """
    latency_s, first = _latency_s(manifest, source), _first_tensor(manifest)
    done = []
    with _Memory(manifest) as memory, TemporaryDirectory(prefix="pilotflame-bench-") as folder:
        learned = Path(folder) / "learned.json"
        for number in range(rounds):
            report = None if progress is None else _shifted(progress, number, rounds)
            arrival = Arrival(manifest)
            there = _watch(manifest, arrival, first)
            started_s = time.monotonic()
            stats = fetch(
                manifest, source, memory.targets(), arrival,
                connections=connections, part_bytes=part_bytes, progress=report, learned=learned,
            )  # fmt: skip
            first_s = there[0] - started_s if there else None
            rate = manifest.total_bytes / max(stats.seconds, 1e-9)
            done.append(Round(stats.seconds, rate, first_s, _ceiling(manifest, source), stats))
    return Bench(latency_s, first, tuple(done))


class _Memory:
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
        """For one more round: fresh pages the first time, mapped ones from then on."""
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
    """The first in the order of first touch; where none was recorded, the first in the files."""
    placed = sorted(manifest.tensors, key=lambda tensor: (tensor.shard, tensor.offset_bytes))
    places = {tensor.name: tensor for tensor in placed}
    order = [places[name] for name in manifest.first_touch] or placed
    return next((tensor for tensor in order if tensor.size_bytes), None)


def _watch(manifest: Manifest, arrival: Arrival, tensor: TensorEntry | None) -> list[float]:
    """A list that gets the time at which all of `tensor` was there."""
    there: list[float] = []
    if tensor is None:
        return there
    first, chunk_bytes = arrival.first[tensor.shard], manifest.chunk_bytes
    last = (tensor.offset_bytes + tensor.size_bytes - 1) // chunk_bytes
    missing = set(range(first + tensor.offset_bytes // chunk_bytes, first + last + 1))

    def landed(chunk: int) -> None:
        if chunk in missing:
            missing.discard(chunk)
            if not missing:
                there.append(time.monotonic())

    arrival.on_land(landed)
    return there


def _latency_s(manifest: Manifest, source: Source) -> float | None:
    name = next((shard.name for shard in manifest.shards if shard.size_bytes), None)
    if name is None:
        return None
    source.stat(name)  # tries again what may pass: from here on it is known to answer
    connection, byte, waited_s = source.connect(), memoryview(bytearray(1)), []
    try:
        for _ in range(LATENCY_PROBES + 1):
            asked_s = time.monotonic()
            connection.begin(name, 0, 1)
            connection.read_into(byte)
            waited_s.append(time.monotonic() - asked_s)
    finally:
        connection.close()
    return statistics.median(waited_s[1:])  # the first one connected


def _ceiling(manifest: Manifest, source: Source) -> float | None:
    if not isinstance(source, WebSource):
        return None
    largest = max(manifest.shards, key=lambda shard: shard.size_bytes, default=None)
    if largest is None:
        return None
    return ceiling(source.locate(largest.name, fresh=False), largest.size_bytes)


def _shifted(progress: Progress, number: int, rounds: int) -> Progress:
    return lambda done, total: progress(number * total + done, rounds * total)
