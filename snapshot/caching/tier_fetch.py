"""Fetches one snapshot into the files that a tier has made for it, and publishes it there."""

from __future__ import annotations

import os
import threading
from collections.abc import Container, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import cached_property
from mmap import mmap
from pathlib import Path
from typing import Protocol

from ...errors import CacheError, PilotflameError, SourceUnavailable, StorageFull
from ..fetching.arrival import Arrival
from ..fetching.assets import fetch_assets
from ..fetching.chunk_reuse import ChunkReuse
from ..fetching.digest_journal import learned_digests
from ..fetching.fetch import FetchStats, fetch
from ..fetching.landing import ShardTarget, copy_landed, land_existing
from ..format.manifest import MANIFEST_NAME, Manifest
from ..publish import sync
from ..sources.source import Source, VersionedByContent
from .memory import has_huge_pages
from .related import Related
from .stored import DIGESTS, REUSED, sync_files
from .tier import Tier

ASSETS_TIMEOUT_S = 600.0
"""How long a fetch whose shards are complete waits for the assets before it publishes."""


class Neighbours(Protocol):
    """The other nodes that may have chunks of a snapshot that is being fetched."""

    def take(
        self, targets: Sequence[ShardTarget], left_out: Container[int], cancelled: threading.Event
    ) -> int:
        """Take missing chunks, except the chunks in `left_out`, from these nodes. Return the number of bytes taken."""


class Nodes(Protocol):
    """The other nodes."""

    def joined(self, manifest: Manifest, arrival: Arrival, files: Path) -> AbstractContextManager[Neighbours]:
        """While the block runs, offer the landed chunks to other nodes. Yield the nodes that may have chunks."""


class TierFetch:
    """The fetch of one snapshot into one tier. One thread calls `run`. Meanwhile, another thread calls `bring_assets`."""

    def __init__(
        self,
        tier: Tier,
        digest: str,
        manifest: Manifest,
        source: Source,
        related: Related,
        *,
        before: TierFetch | None = None,
        nodes: Nodes | None = None,
    ) -> None:
        """Chunks that `related` or other `nodes` have are copied from there instead of being fetched.

        With `before`, this fetch continues the fetch `before` of another tier, and copies the chunks that have landed there.
        """
        self.files = tier.folder(digest) / "files"
        self.arrival = Arrival(manifest)
        self.stats: FetchStats | None = None
        """The statistics of the fetch. None before its end."""
        self.cancelled = threading.Event()
        self.tier, self.digest, self.manifest, self._source = tier, digest, manifest, source
        self._related, self._nodes, self._before = related, nodes, before
        self._assets_ended = threading.Event()
        self._assets_missing: PilotflameError | None = CacheError("The assets were not brought.")

    def cancel(self) -> None:
        """Stop the fetch. Landed chunks stay in the files."""
        self.cancelled.set()
        # End the wait for the assets. If assets are still missing, nothing is published.
        self._assets_ended.set()

    def bring_assets(self, copies: Path | None) -> None:
        """Bring the missing assets, from folder `copies` if it has them. Nothing is published before this ends.

        Raise SourceError or SnapshotCorrupt if an asset cannot be fetched. If the tier is full, `run` raises StorageFull.
        """
        try:
            fetch_assets(self.manifest, self._source, self.files, copies)
            self._assets_missing = None
        except StorageFull as error:
            self._assets_missing = error
        finally:
            self._assets_ended.set()

    def run(self, *, new: bool) -> None:
        """Fetch what is missing, and publish the snapshot. If `new`, the files hold no chunks. Raise the errors of `fetch`."""
        with ExitStack() as until_published:
            self._bring_missing(until_published, new=new)
            self._publish()

    def _bring_missing(self, until_published: ExitStack, *, new: bool) -> None:
        with ExitStack() as opened:
            targets = [self._target(shard.name, opened) for shard in self.manifest.shards]
            learned: Sequence[str] | None = None
            if not self.manifest.has_digests:
                journal = learned_digests(self.files.parent / DIGESTS, self.arrival)
                learned = opened.enter_context(journal)
            if self._before is not None:
                before, self._before = self._before, None
                copy_landed(self.manifest, before.arrival, before.files, targets, self.cancelled)
                new, learned = False, before.arrival.chunks.digests
            if not new:
                land_existing(self.manifest, targets, self.arrival, self.cancelled, learned)
            landed_bytes = self.arrival.landed_bytes
            try:
                self.stats = self._bring(targets, until_published)
            finally:
                self.tier.space.counts.add(verified=self.arrival.landed_bytes - landed_bytes)

    def _bring(self, targets: Sequence[ShardTarget], until_published: ExitStack) -> FetchStats:
        """Copy chunks from related snapshots. Meanwhile, take the other chunks from other nodes, or fetch them."""
        with ExitStack() as opened:
            by_version = isinstance(self._source, VersionedByContent)
            places = self._related.places(self.manifest, self.arrival, opened, by_version=by_version)
            with ChunkReuse(self.arrival, targets, places, self.cancelled):
                taken_bytes = self._take(targets, places, until_published)
                stats = self._fetch(targets, left_out=places)
        if not self.arrival.complete:
            stats.add(self._fetch(targets))
        stats.taken_bytes = taken_bytes
        return stats

    def _take(
        self, targets: Sequence[ShardTarget], left_out: Container[int], until_published: ExitStack
    ) -> int:
        if self._nodes is None:
            return 0
        joined = self._nodes.joined(self.manifest, self.arrival, self.files)
        return until_published.enter_context(joined).take(targets, left_out, self.cancelled)

    def _fetch(self, targets: Sequence[ShardTarget], left_out: Container[int] = ()) -> FetchStats:
        counts = self.tier.space.counts
        return fetch(
            self.manifest, self._source, targets, self.arrival, cancelled=self.cancelled,
            count_received=lambda count: counts.add(received=count), left_out=left_out,
        )  # fmt: skip

    @cached_property
    def _makes_huge_pages(self) -> bool:
        return self.tier.kind == "tmpfs" and has_huge_pages(self.files)

    def _target(self, name: str, opened: ExitStack) -> ShardTarget:
        descriptor = os.open(self.files / name, os.O_RDWR)
        opened.callback(os.close, descriptor)
        memory = self.tier.space.spares.map_pages(descriptor) if self.tier.kind == "tmpfs" else None
        fresh = memory is None and self._makes_huge_pages
        if fresh and (size_bytes := os.fstat(descriptor).st_size):
            memory = memoryview(mmap(descriptor, size_bytes))
        if memory is not None:
            opened.callback(_unmap, memory)
        return ShardTarget(
            str(self.files / name), descriptor, self.manifest.digest_algorithm, memory, fresh=fresh
        )

    def _publish(self) -> None:
        """Publish the complete snapshot: sync its files if they are on a disk, then write its manifest."""
        if not self._assets_ended.wait(ASSETS_TIMEOUT_S):
            raise SourceUnavailable(f"The assets did not arrive within {ASSETS_TIMEOUT_S:.0f} s.")
        if self._assets_missing is not None:
            raise self._assets_missing
        # Remove temporary files of a process that was killed while it wrote the manifest.
        for rest in self.files.glob(f".{MANIFEST_NAME}.*"):
            rest.unlink()
        if self.tier.kind == "disk":
            sync_files(self.files, self.manifest)
            sync(self.files.parent)
            sync(self.files.parent.parent)
        # Remove REUSED, because the files contain no bytes of another snapshot any more.
        (self.files.parent / REUSED).unlink(missing_ok=True)
        manifest = self.manifest
        if not manifest.has_digests:
            manifest = manifest.with_chunks(self.arrival.chunks.digests)
        # Leave out the realm: containers have this file mounted, and need not know the realm.
        manifest.with_realm("").write(self.files / MANIFEST_NAME)
        (self.files.parent / DIGESTS).unlink(missing_ok=True)


def _unmap(memory: memoryview) -> None:
    """Unmap now, instead of at the end of the last reference to the mapping, because a mapped file counts as in use."""
    mapped = memory.obj
    # BufferError means that some object, such as the traceback of a failed thread, still refers to a slice of the memory.
    with suppress(BufferError):
        memory.release()
        if isinstance(mapped, mmap):
            mapped.close()
