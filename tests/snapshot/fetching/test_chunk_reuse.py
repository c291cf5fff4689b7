"""Copying chunks from a file that presumably has them: right chunks are kept, and many wrong chunks end the copying."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash
from pilotflame.snapshot.fetching.arrival import Arrival
from pilotflame.snapshot.fetching.chunk_reuse import COPIERS, MOST_WRONG, ChunkReuse, Place
from pilotflame.snapshot.fetching.landing import ShardTarget
from pilotflame.snapshot.format.digests import XXH3
from pilotflame.snapshot.format.manifest import Manifest, Shard

CHUNK, COUNT = 64 << 10, 200


class Presumed:
    """A snapshot of random bytes, and a file that presumably has its chunks. `spoil` changes chunks of the file."""

    def __init__(self, folder: Path) -> None:
        self.data = os.urandom(COUNT * CHUNK)
        parts = [self.data[at : at + CHUNK] for at in range(0, len(self.data), CHUNK)]
        digests = tuple(xxhash.xxh3_128_hexdigest(part) for part in parts)
        shard = Shard(name="s", size_bytes=len(self.data), data_offset_bytes=0, chunks=digests)
        self.digests, self.arrival = (
            digests,
            Arrival(Manifest.build(chunk_bytes=CHUNK, shards=(shard,), tensors=())),
        )
        (folder / "there").write_bytes(self.data)
        self.there = os.open(folder / "there", os.O_RDWR)
        self.target = ShardTarget("s", os.open(folder / "here", os.O_RDWR | os.O_CREAT), XXH3)
        os.ftruncate(self.target.descriptor, len(self.data))

    def close(self) -> None:
        os.close(self.there)
        os.close(self.target.descriptor)

    def spoil(self, chunks: range) -> None:
        for chunk in chunks:
            os.pwrite(self.there, b"other", chunk * CHUNK)

    def borrow(self) -> set[int]:
        """Return the chunks that were written to, right or wrong."""
        places = {
            chunk: Place(self.there, chunk * CHUNK, digest) for chunk, digest in enumerate(self.digests)
        }
        with ChunkReuse(self.arrival, [self.target], places, threading.Event()):
            pass
        written = (os.pread(self.target.descriptor, CHUNK, chunk * CHUNK) for chunk in range(COUNT))
        return {chunk for chunk, content in enumerate(written) if any(content)}


@pytest.fixture
def presumed(tmp_path: Path) -> Iterator[Presumed]:
    found = Presumed(tmp_path)
    yield found
    found.close()


def test_copying_ends_when_most_chunks_are_wrong(presumed: Presumed) -> None:
    presumed.spoil(range(4, COUNT))
    written = presumed.borrow()
    assert len(written) <= 4 + MOST_WRONG + COPIERS
    assert [chunk for chunk in range(COUNT) if presumed.arrival.landed(chunk)] == [0, 1, 2, 3]


def test_some_wrong_chunks_do_not_end_it(presumed: Presumed) -> None:
    presumed.spoil(range(100, 150))
    assert presumed.borrow() == set(range(COUNT))
    right = {chunk for chunk in range(COUNT) if presumed.arrival.landed(chunk)}
    assert right == set(range(COUNT)) - set(range(100, 150))
    assert os.pread(presumed.target.descriptor, 100 * CHUNK, 0) == presumed.data[: 100 * CHUNK]
