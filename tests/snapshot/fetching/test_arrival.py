"""Chunks that have landed, and the threads that wait for them: the cost of a wait, and the effect of an error."""

from __future__ import annotations

import threading

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
    # A look before the wait, and a look at its beginning.
    for _ in range(2):
        assert arrival.looks.acquire(timeout=30)
    for chunk in range(CHUNKS - 1):
        arrival.land(chunk)
        assert arrival.looks.acquire(timeout=30)
    arrival.land(CHUNKS - 1)
    waiter.join(60)
    assert not waiter.is_alive()
    # At each landing, the chunk that landed and the next one. From the first one on, it would be two millions.
    assert arrival.looked_at == 2 * CHUNKS
    assert arrival.complete
