"""Fetches from sources that break off, stall, corrupt and change: a fetch is complete and right, or its error says what is wrong."""

from __future__ import annotations

import itertools
import mmap
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import hypothesis
import pytest
import xxhash
from hypothesis import strategies as st
from pilotflame.errors import (
    CacheError,
    Cancelled,
    FetchFailed,
    SnapshotChanged,
    SnapshotCorrupt,
    SourceDenied,
    SourceError,
    SourceUnavailable,
)
from pilotflame.snapshot.fetching import fetch as fetch_module
from pilotflame.snapshot.fetching.arrival import Arrival
from pilotflame.snapshot.fetching.fetch import FetchStats, fetch
from pilotflame.snapshot.fetching.landing import ShardTarget
from pilotflame.snapshot.format.digests import XXH3
from pilotflame.snapshot.format.manifest import Manifest, Shard, TensorEntry
from pilotflame.snapshot.sources.folder import FolderSource
from pilotflame.snapshot.sources.source import ObjectInfo

CHUNK = 64 << 10
Fault = Callable[["Ask"], None]


@dataclass
class Ask:
    """One request for a range; a fault may change its result."""

    number: int
    name: str
    begin: int
    end: int
    info: ObjectInfo
    breaks_at: int | None = None
    stalls_at: int | None = None
    flips_at: int | None = None
    refused: SourceError | None = None


class FaultySource:
    """Objects in memory, of which a read returns at most 10,000 bytes. `fault` is called with each request for a range."""

    url = "memory"

    def __init__(self, objects: dict[str, bytes], fault: Fault | None = None) -> None:
        self.objects = objects
        self.fault = fault
        self.asked: list[Ask] = []
        self.sent: Counter[str] = Counter()
        self.lock = threading.Lock()

    def stat(self, name: str) -> ObjectInfo:
        return ObjectInfo(len(self.objects[name]), "v1")

    def read_into(self, name: str, offset: int, view: memoryview) -> int:
        raise NotImplementedError

    def connect(self) -> FaultyConnection:
        return FaultyConnection(self)


@dataclass
class FaultyConnection:
    source: FaultySource
    ask: Ask | None = None
    at: int = 0
    used: bool = False
    closed: threading.Event = field(default_factory=threading.Event)

    def begin(self, name: str, begin: int, end: int, version: str = "") -> ObjectInfo:
        with self.source.lock:
            self.ask = Ask(len(self.source.asked), name, begin, end, self.source.stat(name))
            self.source.asked.append(self.ask)
        self.at = begin
        if self.source.fault is not None:
            self.source.fault(self.ask)
        if self.ask.refused is not None:
            raise self.ask.refused
        return self.ask.info

    def read_into(self, view: memoryview) -> int:
        ask = self.ask
        assert ask is not None
        count = min(len(view), ask.end - self.at, 10_000)
        if ask.stalls_at is not None and self.at + count > ask.stalls_at:
            assert self.closed.wait(20), "no silent connection was given up"
            raise SourceUnavailable("Closed while it waited.")
        if ask.breaks_at is not None and self.at + count > ask.breaks_at:
            raise SourceUnavailable("Reset by peer.")
        data = bytearray(self.source.objects[ask.name][self.at : self.at + count])
        if ask.flips_at is not None and self.at <= ask.flips_at < self.at + count:
            data[ask.flips_at - self.at] ^= 1
        view[:count] = data
        self.at += count
        with self.source.lock:
            self.source.sent[ask.name] += count
        return count

    def close(self) -> None:
        self.closed.set()

    def release(self) -> None:
        self.close()


def snapshot_of(*sizes: int, seed: int = 0) -> tuple[dict[str, bytes], Manifest]:
    objects = {f"s{number}": Random(seed + number).randbytes(size) for number, size in enumerate(sizes)}
    shards, tensors = [], []
    for number, (name, data) in enumerate(objects.items()):
        digests = [xxhash.xxh3_128_hexdigest(data[at : at + CHUNK]) for at in range(0, len(data), CHUNK)]
        shards.append(Shard(name=name, size_bytes=len(data), data_offset_bytes=0, chunks=tuple(digests)))
        for at in range(0, len(data), CHUNK):
            size = min(CHUNK, len(data) - at)
            tensor = f"{name}.t{at // CHUNK}"
            tensors.append(TensorEntry(name=tensor, dtype="U8", shape=(size,), shard=number, offset_bytes=at, size_bytes=size))  # fmt: skip
    return objects, Manifest.build(chunk_bytes=CHUNK, shards=tuple(shards), tensors=tuple(tensors))


@contextmanager
def targets_in(folder: Path, manifest: Manifest) -> Iterator[list[ShardTarget]]:
    opened = []
    try:
        for shard in manifest.shards:
            descriptor = os.open(folder / shard.name, os.O_RDWR | os.O_CREAT)
            os.ftruncate(descriptor, shard.size_bytes)
            opened.append(ShardTarget(shard.name, descriptor, XXH3))
        yield opened
    finally:
        for target in opened:
            os.close(target.descriptor)


def fetched(folder: Path, source: FaultySource, manifest: Manifest, **options: object) -> FetchStats:
    """Fetch everything and compare the files with the source."""
    arrival = Arrival(manifest)
    with targets_in(folder, manifest) as targets:
        stats = fetch(manifest, source, targets, arrival, **options)  # type: ignore[arg-type]
    assert arrival.complete
    for name, data in source.objects.items():
        assert (folder / name).read_bytes() == data
    return stats


def refused(folder: Path, source: FaultySource, manifest: Manifest) -> SourceError:
    arrival = Arrival(manifest)
    with targets_in(folder, manifest) as targets, pytest.raises(Exception) as caught:  # noqa: PT011
        fetch(manifest, source, targets, arrival)
    assert arrival.error is caught.value
    return caught.value  # type: ignore[return-value]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_module, "delay_s", lambda attempt, retry_after_s=None: 0.001 * attempt)


@pytest.mark.parametrize("connections", [None, 1, 7])
def test_everything_arrives(tmp_path: Path, connections: int | None) -> None:
    objects, manifest = snapshot_of(10 * CHUNK + 1, 0, CHUNK, 17)
    seen: list[tuple[int, int]] = []
    stats = fetched(tmp_path, FaultySource(objects), manifest, connections=connections,
                    progress=lambda done, total: seen.append((done, total)))  # fmt: skip
    assert stats.received_bytes == stats.fetched_bytes == manifest.total_bytes
    assert max(seen) == (manifest.total_bytes, manifest.total_bytes)
    assert seen[0] == (0, manifest.total_bytes)
    assert len(seen) == 1 + 13


def test_from_a_folder_too(tmp_path: Path) -> None:
    objects, manifest = snapshot_of(10 * CHUNK + 1)
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "s0").write_bytes(objects["s0"])
    arrival = Arrival(manifest)
    with targets_in(tmp_path, manifest) as targets:
        fetch(manifest, FolderSource(tmp_path / "from"), targets, arrival)
    assert (tmp_path / "s0").read_bytes() == objects["s0"]


def test_what_has_landed_is_not_fetched_again(tmp_path: Path) -> None:
    objects, manifest = snapshot_of(8 * CHUNK)
    source = FaultySource(objects)
    arrival = Arrival(manifest)
    with targets_in(tmp_path, manifest) as targets:
        targets[0].write(0, memoryview(objects["s0"])[: 3 * CHUNK])
        for chunk in range(3):
            arrival.land(chunk)
        stats = fetch(manifest, source, targets, arrival)
    assert (tmp_path / "s0").read_bytes() == objects["s0"]
    assert stats.fetched_bytes == 5 * CHUNK
    assert all(ask.begin >= 3 * CHUNK for ask in source.asked)


def test_memory_that_is_known_to_be_there_is_read_into(tmp_path: Path) -> None:
    objects, manifest = snapshot_of(3 * CHUNK + 5)
    memory = bytearray(b"\xff" * (3 * CHUNK + 5))
    arrival = Arrival(manifest)
    with targets_in(tmp_path, manifest) as (target,):
        touched = ShardTarget("s0", target.descriptor, XXH3, memoryview(memory))
        fetch(manifest, FaultySource(objects), [touched], arrival)
    assert bytes(memory) == objects["s0"]


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
    seed=st.integers(0, 1 << 32), connections=st.sampled_from([None, 1, 3, 8]), mapped=st.booleans()
)
def test_faults_that_pass_are_healed_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, seed: int, connections: int | None, mapped: bool
) -> None:
    draw = Random(seed)
    objects, manifest = snapshot_of(draw.randrange(1, 30 * CHUNK), draw.randrange(5 * CHUNK), seed=seed)
    flipped: set[int] = set()

    def fault(ask: Ask) -> None:
        kind = draw.choice(["none"] * 6 + ["break", "refuse", "flip"])
        at = draw.randrange(ask.begin, ask.end)
        chunk = (hash(ask.name) << 20) + at // CHUNK
        if kind == "break":
            ask.breaks_at = at
        elif kind == "refuse":
            ask.refused = SourceUnavailable("Busy.", details={"retry_after_s": 0.001})
        elif kind == "flip" and chunk not in flipped:
            # Flip only one bit in each chunk: after a second wrong digest, the fetch reports corruption.
            flipped.add(chunk)
            ask.flips_at = at

    source = FaultySource(objects, fault)
    folder = tmp_path_factory.mktemp("fetch")
    arrival = Arrival(manifest)
    with targets_in(folder, manifest) as targets:
        given = [ShardTarget(target.name, target.descriptor, XXH3, _mapped(target), fresh=True) if mapped else target
                 for target in targets]  # fmt: skip
        fetch(manifest, source, given, arrival, connections=connections)
    assert arrival.complete
    for name, content in objects.items():
        assert (folder / name).read_bytes() == content


def _mapped(target: ShardTarget) -> memoryview | None:
    size_bytes = os.fstat(target.descriptor).st_size
    return memoryview(mmap.mmap(target.descriptor, size_bytes)) if size_bytes else None


def test_silent_connections_are_given_up_and_their_ranges_fetched_by_others(tmp_path: Path) -> None:
    objects, manifest = snapshot_of(40 * CHUNK)

    def fault(ask: Ask) -> None:
        if ask.number in {1, 2}:
            ask.stalls_at = (ask.begin + ask.end) // 2

    stats = fetched(tmp_path, FaultySource(objects, fault), manifest, connections=4, part_bytes=4 * CHUNK)
    assert stats.stalls == 2
    # Bytes that came before the silence are kept: nothing is received twice.
    assert stats.received_bytes == manifest.total_bytes


class TwoTurns(FaultySource):
    """A source whose first connection is asked for all bytes. Its answer waits until the second connection is asked for a part of
    them. The second answer waits until the first connection is closed."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__(objects, self._turn)
        self._first = FaultyConnection(self)
        self._opened = itertools.count()
        self._asked = [threading.Event(), threading.Event()]

    def connect(self) -> FaultyConnection:
        if next(self._opened) == 0:
            return self._first
        assert self._asked[0].wait(20)
        return FaultyConnection(self)

    def _turn(self, ask: Ask) -> None:
        if ask.number < 2:
            self._asked[ask.number].set()
        if ask.number == 0:
            assert self._asked[1].wait(20), "no second connection took over a part"
        elif ask.number == 1:
            assert self._first.closed.wait(20), "the first connection was left open"


def test_a_connection_is_closed_once_others_fetch_what_it_would_bring(tmp_path: Path) -> None:
    objects, manifest = snapshot_of(8 << 20)
    source = TwoTurns(objects)
    fetched(tmp_path, source, manifest, connections=2)
    assert source.asked[0].end == 8 << 20
    assert source.asked[1].begin < 8 << 20


def test_a_chunk_that_differs_twice_is_named(tmp_path: Path) -> None:
    objects, manifest = snapshot_of(10 * CHUNK, 10 * CHUNK)

    def fault(ask: Ask) -> None:
        if ask.name == "s1" and ask.begin <= 5 * CHUNK + 9 < ask.end:
            ask.flips_at = 5 * CHUNK + 9

    error = refused(tmp_path, FaultySource(objects, fault), manifest)
    assert isinstance(error, SnapshotCorrupt)
    assert error.details == {"shard": "s1", "chunk": 5, "tensors": ["s1.t5"]}
    assert "s1.t5" in error.message


def test_a_flipped_bit_goes_unseen_only_without_verification(tmp_path: Path) -> None:
    objects, manifest = snapshot_of(2 * CHUNK)

    def fault(ask: Ask) -> None:
        ask.flips_at = 0 if ask.begin == 0 else None

    arrival = Arrival(manifest)
    with targets_in(tmp_path, manifest) as targets:
        fetch(manifest, FaultySource(objects, fault), targets, arrival, verify=False)
    assert (tmp_path / "s0").read_bytes() != objects["s0"]


def test_a_range_that_never_comes_is_given_up_by_name(tmp_path: Path) -> None:
    objects, manifest = snapshot_of(10 * CHUNK)

    def fault(ask: Ask) -> None:
        if ask.begin <= 7 * CHUNK < ask.end:
            ask.breaks_at = 7 * CHUNK

    error = refused(tmp_path, FaultySource(objects, fault), manifest)
    assert isinstance(error, FetchFailed)
    assert error.details == {"shard": "s0", "chunk": 7, "tensors": ["s0.t7"]}
    assert "Reset by peer" in error.message


@pytest.mark.parametrize(
    ("info", "digests"),
    [(ObjectInfo(10 * CHUNK, "v2"), False), (ObjectInfo(10 * CHUNK - 1, "v1"), False), (ObjectInfo(10 * CHUNK - 1, "v1"), True)],
)  # fmt: skip
def test_an_object_that_changes_under_us_is_found(tmp_path: Path, info: ObjectInfo, digests: bool) -> None:
    objects, manifest = snapshot_of(10 * CHUNK)

    def fault(ask: Ask) -> None:
        if ask.number >= 2:
            ask.info = info

    arrival = Arrival(manifest)
    with targets_in(tmp_path, manifest) as targets, pytest.raises(SnapshotChanged, match="s0"):
        fetch(
            manifest, FaultySource(objects, fault), targets, arrival, connections=2, part_bytes=CHUNK, verify=digests
        )  # fmt: skip


def test_another_version_with_the_digests_of_the_manifest_is_no_change(tmp_path: Path) -> None:
    objects, manifest = snapshot_of(10 * CHUNK)

    def fault(ask: Ask) -> None:
        ask.info = ObjectInfo(10 * CHUNK, f"v{ask.number}")

    arrival = Arrival(manifest)
    with targets_in(tmp_path, manifest) as targets:
        stats = fetch(
            manifest, FaultySource(objects, fault), targets, arrival, connections=2, part_bytes=CHUNK
        )
    assert arrival.complete
    assert stats.retries == stats.stalls


@pytest.mark.parametrize("info", [ObjectInfo(10 * CHUNK, "v2"), ObjectInfo(10 * CHUNK - 1, "v1")])
def test_one_odd_answer_on_a_used_connection_is_no_change(tmp_path: Path, info: ObjectInfo) -> None:
    """The odd answer may be a second answer to an earlier request, so a new connection repeats the request."""
    objects, manifest = snapshot_of(10 * CHUNK)

    def fault(ask: Ask) -> None:
        if ask.number == 2:
            ask.info = info

    arrival = Arrival(manifest)
    with targets_in(tmp_path, manifest) as targets:
        stats = fetch(
            manifest, FaultySource(objects, fault), targets, arrival,
            connections=1, part_bytes=CHUNK, verify=info.version == "v1",
        )  # fmt: skip
    assert arrival.complete
    assert stats.retries == 1


def test_denied_is_not_tried_again(tmp_path: Path) -> None:
    objects, manifest = snapshot_of(CHUNK)

    def fault(ask: Ask) -> None:
        ask.refused = SourceDenied("No.")

    source = FaultySource(objects, fault)
    assert isinstance(refused(tmp_path, source, manifest), SourceDenied)
    assert len(source.asked) == 1


def test_a_full_disk_is_reported(tmp_path: Path) -> None:
    objects, manifest = snapshot_of(CHUNK)
    descriptor = os.open("/dev/full", os.O_RDWR)
    try:
        with pytest.raises(CacheError, match="s0 cannot be written: No space left"):
            fetch(manifest, FaultySource(objects), [ShardTarget("s0", descriptor, XXH3)], Arrival(manifest))
    finally:
        os.close(descriptor)


def test_cancelling_ends_it_and_keeps_what_landed(tmp_path: Path) -> None:
    objects, manifest = snapshot_of(20 * CHUNK)
    cancelled = threading.Event()

    def fault(ask: Ask) -> None:
        if ask.number == 5:
            cancelled.set()
        if ask.number >= 5:
            ask.stalls_at = ask.begin

    source = FaultySource(objects, fault)
    arrival = Arrival(manifest)
    with targets_in(tmp_path, manifest) as targets:
        with pytest.raises(Cancelled):
            fetch(manifest, source, targets, arrival, connections=2, part_bytes=CHUNK, cancelled=cancelled)
        landed = [chunk for chunk in range(20) if arrival.landed(chunk)]
        assert 3 <= len(landed) < 20
        for chunk in landed:
            assert (tmp_path / "s0").read_bytes()[chunk * CHUNK :][:CHUNK] == objects["s0"][chunk * CHUNK :][
                :CHUNK
            ]
    assert not [thread for thread in threading.enumerate() if thread.name == "fetch"]


def test_what_a_thread_waits_for_is_fetched_next(tmp_path: Path) -> None:
    objects, manifest = snapshot_of(50 * CHUNK)
    arrival = Arrival(manifest)
    order: list[int] = []
    arrival.on_land(order.append)
    waiter = threading.Thread(target=arrival.wait, args=(40, 41, 20.0))

    def fault(ask: Ask) -> None:
        if ask.number == 3:
            waits = threading.Event()
            # The fetch registered its own listener earlier, so it knows the demand before `waits` is set.
            arrival.on_demand(lambda first, last: waits.set())
            waiter.start()
            assert waits.wait(20)

    with targets_in(tmp_path, manifest) as targets:
        fetch(manifest, FaultySource(objects, fault), targets, arrival, connections=1, part_bytes=CHUNK)
    waiter.join(20)
    assert order == [0, 1, 2, 3, 40, 41, *range(4, 40), *range(42, 50)]


def test_the_order_of_first_touch_is_the_order_of_fetching(tmp_path: Path) -> None:
    objects, manifest = snapshot_of(10 * CHUNK)
    manifest = manifest.model_copy(update={"first_touch": ("s0.t7", "s0.t2", "s0.t3")})
    source = FaultySource(objects)
    fetched(tmp_path, source, manifest, connections=1, part_bytes=CHUNK)
    assert [ask.begin // CHUNK for ask in source.asked] == [7, 2, 3, 0, 1, 4, 5, 6, 8, 9]
