"""What has landed, and who waits for it: the cost of waiting, and what an error does."""

from __future__ import annotations

import threading
import time

from pilotflame.snapshot.fetching.arrival import Arrival
from pilotflame.snapshot.format.manifest import Manifest, Shard

CHUNKS = 80_000
CHUNK_BYTES = 4096
LIMIT_S = 8.0


def test_waiting_for_many_chunks_looks_at_each_of_them_once() -> None:
    digests = ("0" * 32,) * CHUNKS
    shard = Shard(name="a", size_bytes=CHUNKS * CHUNK_BYTES, data_offset_bytes=8, chunks=digests)
    arrival = Arrival(Manifest.build(chunk_bytes=CHUNK_BYTES, shards=(shard,), tensors=()))
    waiter = threading.Thread(target=arrival.wait, args=(0, CHUNKS - 1, 60.0))
    waiter.start()
    begun_s = time.process_time()
    for chunk in range(CHUNKS):
        arrival.land(chunk)
        # Give the processor away, so that the waiter looks after every chunk.
        time.sleep(0)
    waiter.join(60)
    assert not waiter.is_alive()
    # About 3 s of processor time, against 17 s if all chunks that it waits for are looked at each time.
    assert time.process_time() - begun_s < LIMIT_S
    assert arrival.complete
