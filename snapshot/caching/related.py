"""Finds the chunks of a snapshot in other snapshots of the node, such as an earlier revision of the same weights.

Only complete snapshots of the same realm are searched (see `sources.realm`). A chunk is presumed to be where another
manifest lists its digest. If its digest is unknown, it is presumed to be at the same offset of a shard with the same
version. The copy verifies whether the chunk is really there.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import orjson

from ...errors import SnapshotError
from ..fetching.arrival import Arrival
from ..fetching.chunk_reuse import Place
from ..fetching.ranges import Chunks, Range, wanted_order
from ..format.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, UNKNOWN_DIGEST, Manifest, realm_digits
from ..sources.folder import FolderSource
from .flock import lock_shared
from .stored import is_published
from .tier import Tier

MOST_SNAPSHOTS = 8
"""How many snapshots are searched, the most recently used first. Reading a manifest with 25 000 chunks takes 5 ms."""

_HASH = re.compile(r'"(?!(.)\1*["-])[0-9a-f]{32,128}(-[0-9]+)?"')
"""An ETag that is a hash of the object or its parts. Some stores give a time or repeated digits instead, which do not match."""


@dataclass(frozen=True, slots=True)
class Related:
    """Finds chunks in the snapshots in `tiers`. Without tiers, it finds no chunks."""

    tiers: Sequence[Tier] = ()

    def places(
        self, manifest: Manifest, arrival: Arrival, opened: ExitStack, *, by_version: bool = False
    ) -> dict[int, Place]:
        """Return the places of the missing chunks of `manifest`, in the order in which the chunks are wanted.

        With `by_version`, a chunk without a known digest is looked for in a shard with the same version and size. Until
        `opened` is closed, the files stay open, and their snapshots are protected from eviction.
        """
        folders = list(self._folders(manifest)) if manifest.realm else []
        if not folders:
            return {}
        chunks = arrival.chunks
        missing = [chunk for chunk in wanted_order(manifest) if not arrival.landed(chunk)]
        known = [chunk for chunk in missing if chunks.digests[chunk] != UNKNOWN_DIGEST]
        unknown = (
            [chunk for chunk in missing if chunks.digests[chunk] == UNKNOWN_DIGEST] if by_version else []
        )
        found: dict[int, Place] = {}
        providers = [provider for folder in folders if (provider := _open(folder, opened)) is not None]
        for how, wanted in ((_Lender.same, known), (_Lender.versioned, unknown)):
            for provider in providers:
                rest = [chunk for chunk in wanted if chunk not in found]
                # OSError and SnapshotError mean that a file is missing. The other errors mean a damaged manifest.
                with suppress(OSError, SnapshotError, ValueError, LookupError, TypeError, AttributeError):
                    found |= how(provider, manifest, chunks, rest) if rest else {}
        return {chunk: found[chunk] for chunk in missing if chunk in found}

    def _folders(self, manifest: Manifest) -> Iterator[Path]:
        """Yield the folders of the realm's complete snapshots, tier by tier, with the most recently used first."""
        seen, ending = {manifest.digest}, realm_digits(manifest.realm)
        for tier in self.tiers:
            for folder in tier.folders(ending):
                if len(seen) <= MOST_SNAPSHOTS and folder.name not in seen and is_published(folder):
                    seen.add(folder.name)
                    yield folder


def _open(folder: Path, opened: ExitStack) -> _Lender | None:
    """Return the snapshot in `folder`, protected from eviction. None if it is gone or its manifest is damaged."""
    try:
        lock = lock_shared(folder)
        if lock is None or not is_published(folder):
            return None
        # The lock on the folder lasts as long as something references `lock`. `opened` references `lock` until `opened`
        # is closed, so the folder is not evicted before then.
        opened.enter_context(nullcontext(lock))
        with (folder / "files" / MANIFEST_NAME).open("rb") as stream:
            document = orjson.loads(stream.read(MAX_MANIFEST_BYTES))
        return _Lender(FolderSource(folder / "files"), document["shards"], document, opened)
    except (OSError, ValueError, LookupError, TypeError):
        return None


@dataclass(eq=False, slots=True)
class _Lender:
    """A complete snapshot. `document` is its manifest, not validated, because validation takes ten times as long."""

    source: FolderSource
    shards: list[dict[str, Any]]
    document: dict[str, Any]
    opened: ExitStack
    _descriptors: dict[int, int] = field(default_factory=dict)
    _first: list[int] = field(default_factory=list)
    """The number of each shard's first chunk. Empty until `_has` needs it."""

    def same(self, manifest: Manifest, chunks: Chunks, missing: Sequence[int]) -> dict[int, Place]:
        """Return the places of the missing chunks that have the same digest and size as a chunk of this snapshot."""
        del manifest
        wanted: dict[str, list[int]] = {}
        for chunk in missing:
            wanted.setdefault(chunks.digests[chunk], []).append(chunk)
        found: dict[int, Place] = {}
        chunk_bytes = self.document["chunk_bytes"]
        for number, shard in enumerate(self.shards):
            for position, digest in enumerate(shard["chunks"]):
                begin = position * chunk_bytes
                here = Range(number, begin, min(begin + chunk_bytes, shard["size_bytes"]))
                for chunk in wanted.pop(digest, ()) if digest in wanted and self._has(here) else ():
                    extent = chunks.extent(chunk)
                    if extent.end - extent.begin == here.end - here.begin:
                        found[chunk] = self._place(here, digest)
        return found

    def versioned(self, manifest: Manifest, chunks: Chunks, missing: Sequence[int]) -> dict[int, Place]:
        """Return the places of the missing chunks whose shard has the same version and size as a shard of this snapshot."""
        observed = self.document.get("observed")
        if (
            observed is None
            or manifest.observed is None
            or self.document["chunk_bytes"] != manifest.chunk_bytes
        ):
            return {}
        pairs = zip(observed["versions"], self.shards, strict=True)
        numbers = {(version, shard["size_bytes"]): number for number, (version, shard) in enumerate(pairs)}
        found: dict[int, Place] = {}
        for chunk in missing:
            extent = chunks.extent(chunk)
            version = manifest.observed.versions[extent.shard]
            number = numbers.get((version, manifest.shards[extent.shard].size_bytes))
            if number is None or not _HASH.fullmatch(version):
                continue
            here = Range(number, extent.begin, extent.end)
            if self._has(here):
                digest = self.shards[number]["chunks"][extent.begin // manifest.chunk_bytes]
                found[chunk] = self._place(here, digest)
        return found

    def _has(self, extent: Range) -> bool:
        """Return True if this snapshot has these bytes. It lacks bytes only if it is a part (see `Manifest.part`)."""
        part = self.document.get("part")
        if part is None or extent.begin == extent.end:
            return True
        if not self._first:
            self._first = [0, *accumulate(len(shard["chunks"]) for shard in self.shards)]
        before = self._first[extent.shard]
        first, last = (before + at // self.document["chunk_bytes"] for at in (extent.begin, extent.end - 1))
        index = bisect_right(part["chunks"], first, key=lambda ends: ends[0]) - 1
        return index >= 0 and bool(last <= part["chunks"][index][1])

    def _place(self, here: Range, digest: str) -> Place:
        return Place(self._file(here.shard), here.begin, digest)

    def _file(self, shard: int) -> int:
        if shard not in self._descriptors:
            self._descriptors[shard] = self.source.open(self.shards[shard]["name"])
            self.opened.callback(os.close, self._descriptors[shard])
        return self._descriptors[shard]
