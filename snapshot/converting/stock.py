"""Plans how to store an object if the store already has some of its chunks.

The plan divides the object into pieces that the store copies from other objects, and pieces that are sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..format.manifest import UNKNOWN_DIGEST, Manifest, Shard
from ..sources.source import Piece, Source

PART_BYTES = 8 << 20
"""The least bytes of a part. S3 refuses parts smaller than 5 MiB, except the last part of an object."""
MOST_PARTS = 10_000
COPY_BYTES = 256 << 20
"""The most bytes that one request copies. The store answers only after the copy, and the request may time out."""
_MOST_PLACES = 8
"""The most places of one chunk that are remembered. A chunk of zeros, for example, may be at many places."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a store has a chunk: in an object, from byte `offset` on."""

    source: Source
    name: str
    offset: int

    def after(self, size_bytes: int) -> _Place:
        return _Place(self.source, self.name, self.offset + size_bytes)


class Stock:
    """The chunks that a store has, according to the manifests of snapshots in it."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, int], list[_Place]] = {}
        """Maps the digest and the size of a chunk to its places."""
        self._gone: set[str] = set()
        """The URLs of objects that were overwritten. A URL identifies an object even if several sources have it."""

    def add(self, source: Source, manifest: Manifest, sizes: Mapping[str, int]) -> None:
        """Add the shards of a snapshot whose stored objects have the right size. `sizes` has the objects' sizes."""
        for shard in manifest.shards:
            if sizes.get(shard.name) == shard.size_bytes:
                for index, key in enumerate(_keys(shard, manifest.chunk_bytes)):
                    places = self._places.setdefault(key, [])
                    if len(places) < _MOST_PLACES and key[0] != UNKNOWN_DIGEST:
                        places.append(_Place(source, shard.name, index * manifest.chunk_bytes))

    def forget(self, source: Source, name: str) -> None:
        """Record that an object has been overwritten."""
        self._gone.add(f"{source.url}/{name}")

    def pieces(self, shard: Shard, chunk_bytes: int) -> list[Piece]:
        """Return the pieces of a shard, in their order. Only the last piece may be smaller than PART_BYTES."""
        keys, pieces = _keys(shard, chunk_bytes), list[Piece]()
        least_bytes = max(PART_BYTES, -(-shard.size_bytes // MOST_PARTS))
        count = -(-least_bytes // chunk_bytes)
        for first in range(0, len(keys), count):
            begin = first * chunk_bytes
            end = min(begin + count * chunk_bytes, shard.size_bytes)
            place = self._find(keys[first : first + count], chunk_bytes)
            piece = (
                Piece(begin, end, (place.source, place.name), place.offset) if place else Piece(begin, end)
            )
            if pieces and (whole := pieces[-1].joined(piece, COPY_BYTES)) is not None:
                pieces[-1] = whole
            else:
                pieces.append(piece)
        return pieces

    def _find(self, keys: Sequence[tuple[str, int]], chunk_bytes: int) -> _Place | None:
        """Return the place where these chunks follow each other directly in one object, or None."""
        for first in self._places.get(keys[0], ()):
            rest = enumerate(keys[1:], 1)
            if f"{first.source.url}/{first.name}" in self._gone:
                continue
            if all(first.after(index * chunk_bytes) in self._places.get(key, ()) for index, key in rest):
                return first
        return None


def _keys(shard: Shard, chunk_bytes: int) -> list[tuple[str, int]]:
    return [
        (digest, min(chunk_bytes, shard.size_bytes - index * chunk_bytes))
        for index, digest in enumerate(shard.chunks)
    ]
