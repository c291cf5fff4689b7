"""Finds the chunks that this node can give to other nodes: chunks of complete snapshots and of running fetches.

A file is read only while its snapshot's folder is locked against eviction. After an eviction, the file's pages may be
used for another snapshot.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from uuid import uuid4

from ...errors import SourceMissing, SourceUnavailable
from ..caching.flock import FolderLock, lock_shared
from ..caching.stored import is_published
from ..caching.tier import Tier
from ..fetching.arrival import Arrival
from ..format.manifest import MANIFEST_NAME, Manifest
from .fetch_order import WHOLE, LineAnswer, Position

WAIT_S = 1.0
"""How long a request waits for its chunk to land. The node that sent the request may ask again."""
SETTLE_S = 0.5
LANDED = "landed_bytes"
_KEY = re.compile("[0-9a-f]{64}")


@dataclass(eq=False, slots=True)
class FetchTicket:
    """A fetch of this node, from its beginning until the snapshot is published or the fetch has ended."""

    manifest: Manifest
    arrival: Arrival
    files: Path
    name: str = field(default_factory=lambda: uuid4().hex)
    position: Position | None = None
    chosen: threading.Event = field(default_factory=threading.Event)
    key: str = field(init=False)
    """The digest of the manifest. It is computed only once, because that takes a tenth of a second if there are many chunks."""

    def __post_init__(self) -> None:
        self.key = self.manifest.digest

    def choose(self, number: int) -> Position:
        """Take the position with this number. It does not change while the fetch runs."""
        self.position = Position(number, self.name)
        self.chosen.set()
        return self.position


@dataclass(frozen=True, slots=True)
class Lent:
    """A chunk: `size_bytes` from byte `offset` on in an open file."""

    descriptor: int
    offset: int
    size_bytes: int


class ServedChunks:
    """The chunks in `tiers` that this node can give to other nodes. `node` is the name of this node. Thread-safe."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self.node = uuid4().hex
        self._tiers = tiers
        self._lock = threading.Lock()
        self._tickets: dict[str, FetchTicket] = {}

    @contextmanager
    def offered(self, ticket: FetchTicket) -> Iterator[None]:
        """While the block runs, let other nodes take the landed chunks of a fetch."""
        with self._lock:
            self._tickets[ticket.name] = ticket
        try:
            yield
        finally:
            with self._lock:
                del self._tickets[ticket.name]

    def position_of(self, key: str, *, settled: bool) -> LineAnswer:
        """Return this node's position for snapshot `key`. If `settled`, wait up to SETTLE_S until it has chosen one."""
        if _KEY.fullmatch(key) is None:
            return LineAnswer(self.node)
        if any(is_published(tier.folder(key)) for tier in self._tiers):
            return LineAnswer(self.node, WHOLE)
        with self._lock:
            tickets = [each for each in self._tickets.values() if each.key == key]
        for ticket in tickets:
            if settled:
                ticket.chosen.wait(SETTLE_S)
            return LineAnswer(self.node, ticket.position, choosing=ticket.position is None)
        return LineAnswer(self.node)

    @contextmanager
    def lent(self, key: str, ticket: str, chunk: int) -> Iterator[Lent]:
        """Yield a chunk of snapshot `key`, from the fetch with this ticket or from the complete snapshot.

        Raise SourceUnavailable, with the number of landed bytes, if the chunk does not land within WAIT_S. Raise
        SourceMissing if this node neither has nor fetches the chunk, or the error of the fetch if the fetch has failed.
        """
        manifest, arrival, files, _lock = self._found(key, ticket)
        if not 0 <= chunk < arrival.count:
            raise _missing(key)
        _wait(arrival, chunk)
        extent = arrival.chunks.extent(chunk)
        descriptor = os.open(files / manifest.shards[extent.shard].name, os.O_RDONLY)
        try:
            yield Lent(descriptor, extent.begin, extent.end - extent.begin)
        finally:
            os.close(descriptor)

    def _found(self, key: str, ticket: str) -> tuple[Manifest, Arrival, Path, FolderLock]:
        with self._lock:
            fetch = self._tickets.get(ticket)
        if fetch is not None and fetch.key == key:
            if (lock := lock_shared(fetch.files.parent)) is not None:
                return fetch.manifest, fetch.arrival, fetch.files, lock
        elif _KEY.fullmatch(key):
            for folder in (tier.folder(key) for tier in self._tiers):
                # Lock the folder before checking it, so that a published snapshot is not evicted between the check and the read.
                if (lock := lock_shared(folder)) is not None and is_published(folder):
                    return *_published(folder / "files", _version(folder)), lock
        raise _missing(key)


def _wait(arrival: Arrival, chunk: int) -> None:
    try:
        arrival.wait(chunk, chunk, WAIT_S, demand=False)
    except SourceUnavailable as error:
        if arrival.error is not None:
            raise
        raise SourceUnavailable(error.message, details={LANDED: arrival.landed_bytes}) from None
    if not arrival.landed(chunk):
        # The wait ended at once, because the chunk does not belong to the part that this node needs.
        raise SourceMissing(f"Chunk {chunk} is not fetched here.")


def _missing(key: str) -> SourceMissing:
    return SourceMissing(f"Chunks of snapshot {key[:64]!r} are not to be had here.")


def _version(folder: Path) -> tuple[int, int]:
    status = (folder / "files" / MANIFEST_NAME).stat()
    return status.st_ino, status.st_mtime_ns


@lru_cache(maxsize=8)
def _published(files: Path, _version: tuple[int, int]) -> tuple[Manifest, Arrival, Path]:
    manifest = Manifest.read(files)
    arrival = Arrival(manifest)
    arrival.land_all()
    return manifest, arrival, files
