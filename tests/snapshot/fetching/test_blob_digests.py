"""Digests of blobs: they are compared before the last chunk lands, in whatever order the chunks arrive."""

from __future__ import annotations

import hashlib
import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.errors import FetchFailed, SnapshotCorrupt, SourceUnavailable
from pilotflame.snapshot.fetching.arrival import Arrival
from pilotflame.snapshot.fetching.blob_digests import BlobDigests
from pilotflame.snapshot.format.manifest import MIN_CHUNK_BYTES, UNKNOWN_DIGEST, Manifest, Observed, Shard
from pilotflame.snapshot.sources.folder import FolderSource
from pilotflame.snapshot.sources.source import Blob

CHUNK = MIN_CHUNK_BYTES


class Layers(FolderSource):
    """Shards `a`, `b` and so on, which lie in one layer with bytes between them."""

    def __init__(self, layer: bytes, objects: dict[str, int]) -> None:
        self.url = "oci://here"
        self.layer = layer
        self.blob = Blob(f"sha256:{hashlib.sha256(layer).hexdigest()}", len(layer), tuple(objects.items()))
        self.broken = False

    def blob_of(self, name: str) -> Blob:
        return self.blob

    def read_blob(self, blob: Blob, offset: int, view: memoryview) -> None:
        if self.broken:
            raise SourceUnavailable("silent.")
        view[:] = self.layer[offset : offset + len(view)]

    def corrupt(self, digest: str, fault: str) -> SnapshotCorrupt:
        return SnapshotCorrupt(f"layer {digest}: {fault}")


def manifest_of(sizes: list[int]) -> Manifest:
    shards = tuple(
        Shard(
            name=chr(97 + number),
            size_bytes=size,
            data_offset_bytes=8,
            chunks=(UNKNOWN_DIGEST,) * -(-size // CHUNK),
        )
        for number, size in enumerate(sizes)
    )
    observed = Observed(url="oci://here", versions=("",) * len(sizes))
    return Manifest.build(
        shards=shards, tensors=(), chunk_bytes=CHUNK, observed=observed, provenance=observed.provenance
    )


@contextmanager
def made(sizes: list[int], gaps: list[int], seed: int = 0) -> Iterator[tuple[Layers, Manifest, list[int]]]:
    """Yield a source, a manifest of its shards, and the descriptors of files with the shards."""
    drawn, layer, objects = random.Random(seed), b"", {}
    with ExitStack() as opened:
        descriptors = []
        for number, size in enumerate(sizes):
            layer += drawn.randbytes(gaps[number])
            objects[chr(97 + number)] = len(layer)
            data = drawn.randbytes(size)
            layer += data
            file = opened.enter_context(tempfile.TemporaryFile())
            os.pwrite(file.fileno(), data, 0)
            descriptors.append(file.fileno())
        yield Layers(layer + drawn.randbytes(gaps[-1]), objects), manifest_of(sizes), descriptors


@given(
    st.lists(st.integers(8, 5 * CHUNK), min_size=1, max_size=3),
    st.lists(st.integers(0, 3000), min_size=4, max_size=4),
    st.randoms(use_true_random=False),
    st.booleans(),
    st.booleans(),
)
def test_the_last_chunk_lands_only_if_the_digest_is_right(
    sizes: list[int], gaps: list[int], drawn: random.Random, damaged: bool, resumed: bool
) -> None:
    with made(sizes, gaps) as (source, manifest, descriptors):
        arrival = Arrival(manifest)
        order = list(range(arrival.count))
        drawn.shuffle(order)
        there = order[: len(order) // 2] if resumed else []
        for chunk in there:
            arrival.land(chunk)
        missing = order[len(there) :]
        if damaged:
            shard = drawn.randrange(len(sizes))
            at = drawn.randrange(sizes[shard])
            os.pwrite(descriptors[shard], bytes([os.pread(descriptors[shard], 1, at)[0] ^ 8]), at)
        blobs = BlobDigests(manifest, source, descriptors, arrival, set(missing))
        for chunk in missing[:-1]:
            blobs.settle(chunk)
            assert arrival.landed(chunk)
        if damaged:
            with pytest.raises(SnapshotCorrupt, match=source.blob.digest):
                blobs.settle(missing[-1])
        else:
            blobs.settle(missing[-1])
        assert arrival.complete is not damaged


def test_a_blob_of_which_a_part_comes_from_elsewhere_is_not_compared() -> None:
    with made([3 * CHUNK], [0, 0]) as (source, manifest, descriptors):
        arrival = Arrival(manifest)
        os.pwrite(descriptors[0], b"other", 0)
        blobs = BlobDigests(manifest, source, descriptors, arrival, {0, 1})
        blobs.settle(0)
        blobs.settle(1)
        assert arrival.landed(0)
        assert arrival.landed(1)


def test_a_source_that_falls_silent_before_the_digest_is_known_fails_the_fetch() -> None:
    with made([2 * CHUNK], [100, 100]) as (source, manifest, descriptors):
        arrival = Arrival(manifest)
        blobs = BlobDigests(manifest, source, descriptors, arrival, {0, 1})
        source.broken = True
        blobs.settle(1)
        with pytest.raises(FetchFailed, match="silent"):
            blobs.settle(0)
        assert not arrival.complete
