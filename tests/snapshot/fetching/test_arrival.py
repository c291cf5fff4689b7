"""Which chunks have been received and verified, who is notified of them, and how waits for missing chunks end."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from pilotflame.errors import SourceDenied, SourceUnavailable
from pilotflame.snapshot.fetching.arrival import Arrival
from pilotflame.snapshot.format.manifest import Manifest, Shard

CHUNKS = 2_000
CHUNK_BYTES = 4096


class Watched(Arrival):
    """Counts the chunks that waits look at, and signals each look."""

    looked_at = 0

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(manifest)
        self.looks = threading.Semaphore(0)

    def _first_missing(self, first: int, last: int) -> int:
        found = super()._first_missing(first, last)
        self.looked_at += found - first + 1
        self.looks.release()
        return found


def test_waiting_for_many_chunks_looks_at_each_of_them_once() -> None:
    digests = ("0" * 32,) * CHUNKS
    shard = Shard(name="a", size_bytes=CHUNKS * CHUNK_BYTES, data_offset_bytes=8, chunks=digests)
    arrival = Watched(Manifest.build(chunk_bytes=CHUNK_BYTES, shards=(shard,), tensors=()))
    waiter = threading.Thread(target=arrival.wait, args=(0, CHUNKS - 1, 60.0))
    waiter.start()
    # `wait` looks once before it blocks, and once when it begins to block.
    for _ in range(2):
        assert arrival.looks.acquire(timeout=30)
    for chunk in range(CHUNKS - 1):
        arrival.land(chunk)
        assert arrival.looks.acquire(timeout=30)
    arrival.land(CHUNKS - 1)
    waiter.join(60)
    assert not waiter.is_alive()
    # At each landing, the wait looks at the chunk that landed and at the next one. If it began at the first chunk each
    # time, it would look at two million chunks.
    assert arrival.looked_at == 2 * CHUNKS
    assert arrival.complete


# -- listeners, views, errors and waits


def arrival_of(chunks: int) -> Arrival:
    """Return an arrival of chunks of 4,096 bytes. The last chunk is shorter."""
    size_bytes = (chunks - 1) * CHUNK_BYTES + 100
    shard = Shard(name="a", size_bytes=size_bytes, data_offset_bytes=8, chunks=("0" * 32,) * chunks)
    return Arrival(Manifest.build(chunk_bytes=CHUNK_BYTES, shards=(shard,), tensors=()))


class Shown:
    """A view that notes its calls."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def move(self, root: Path) -> None:
        self.told.append(root)

    def show(self, chunk: int) -> None:
        self.told.append(chunk)


def test_each_chunk_is_told_once_to_listeners_and_views_early_and_late() -> None:
    arrival, early, late = arrival_of(3), list[int](), list[int]()
    views, done = [Shown(), Shown()], list[tuple[int, int]]()
    arrival.on_land(early.append)
    arrival.attach(views[0])
    arrival.report(lambda landed, total: done.append((landed, total)))
    for chunk in (1, 1, 0):
        arrival.land(chunk)
    arrival.on_land(late.append)
    arrival.move(Path("/moved"))
    arrival.attach(views[1])
    assert (arrival.complete, arrival.landed(2), arrival.has(0, 1), arrival.has(1, 2)) == (
        False,
        False,
        True,
        False,
    )
    arrival.land(2)
    assert (arrival.complete, arrival.landed(2), arrival.has(0, 2)) == (True, True, True)
    assert (early, late) == ([1, 0, 2], [0, 1, 2])
    assert [one.told for one in views] == [[1, 0, Path("/moved"), 2], [Path("/moved"), 0, 1, 2]]
    total = 2 * CHUNK_BYTES + 100
    assert done == [(0, total), (CHUNK_BYTES, total), (2 * CHUNK_BYTES, total), (total, total)]
    # After the last chunk, the arrival drops its views and listeners, which may keep memory or files in use.
    assert not arrival._views + arrival._on_land  # type: ignore[operator]


def test_all_chunks_land_at_once_and_only_the_missing_ones_are_told() -> None:
    arrival, told, view = arrival_of(3), list[int](), Shown()
    arrival.land(1)
    arrival.on_land(told.append)
    arrival.attach(view)
    arrival.land_all()
    assert (told, view.told) == ([1, 0, 2], [1, 0, 2])
    assert arrival.complete
    assert all(map(arrival.landed, range(3)))
    assert arrival.landed_bytes == 2 * CHUNK_BYTES + 100


def test_an_error_ends_waits_for_missing_chunks_only() -> None:
    arrival, told = arrival_of(2), list[Any]()
    arrival.on_fail(told.append)
    arrival.land(0)
    first = SourceDenied("no")
    arrival.fail(first)
    arrival.fail(SourceUnavailable("later"))
    arrival.wait(0, 0)
    with pytest.raises(SourceDenied, match="no"):
        arrival.wait(0, 1)
    late = list[Any]()
    arrival.on_fail(late.append)
    assert (told[0], len(told), late) == (first, 2, [first])
    arrival.land(1)
    arrival.wait(0, 1)
    arrival.on_fail(late.append)
    assert len(late) == 1


def test_a_wait_has_the_chunks_fetched_next_and_ends_at_its_time() -> None:
    arrival, asked = arrival_of(2), list[tuple[int, int]]()
    arrival.on_demand(lambda first, last: asked.append((first, last)))
    with pytest.raises(SourceUnavailable, match="the wait ended after 0 s"):
        arrival.wait(0, 1, 0.0)
    with pytest.raises(SourceUnavailable):
        arrival.wait(1, 1, 0.0, demand=False)
    arrival.deadline_s = 0.0
    with pytest.raises(SourceUnavailable):
        arrival.wait(1, 1)
    assert asked == [(0, 1), (1, 1)]


def test_another_arrival_gets_chunks_and_errors_and_passes_on_its_demands() -> None:
    arrival, other, asked = arrival_of(2), arrival_of(2), list[tuple[int, int]]()
    arrival.on_demand(lambda first, last: asked.append((first, last)))
    arrival.land(0)
    arrival.relay(other)
    other.demand(1, 1)
    arrival.fail(SourceDenied("no"))
    assert (other.landed(0), other.landed(1), asked, str(other.error)) == (True, False, [(1, 1)], "no")
    arrival.land(1)
    assert other.complete
    failed, last = arrival_of(1), arrival_of(1)
    failed.fail(SourceDenied("no"))
    failed.relay(last)
    assert last.error is failed.error
