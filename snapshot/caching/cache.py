"""Caches snapshots on a node. A missing snapshot is fetched once, for all processes that open it.

    cache = Cache([Tier(Path("/dev/shm/weights"), 8 << 30, "tmpfs"), Tier(Path("/var/weights"), 200 << 30)])
    with cache.open(manifest, open_source("s3://bucket/prefix")) as lease:
        mapping = Mapping(lease.root, lease.manifest, keep=lease.lock, arrival=lease.arrival)

All state is in files and in locks that the kernel releases. So any process may be killed at any time.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from ...errors import CacheError
from ..fetching.arrival import Arrival
from ..fetching.fetch import FetchStats
from ..fetching.ranges import Chunks
from ..format.manifest import Manifest
from ..sources.folder import FolderSource
from ..sources.source import ReportProgress, Source
from .flock import FolderLock
from .pull import Pull
from .related import Related
from .stored import Stored
from .tier import Tier
from .tier_fetch import Nodes, TierFetch


@dataclass(eq=False)
class Lease:
    """A snapshot in use. Its files exist at full size. `arrival` records which of their chunks have landed.

    `root` is the folder of the files. It is not evicted before the lease is closed and every Mapping that was given
    `lock` is gone. If the tier becomes full during the fetch, the rest arrives in another tier. From then on, `root` is
    the folder there, and a Mapping that was given `arrival` uses that folder. Closing a lease stops its fetch. Any
    other lease of the snapshot then continues the fetch.
    """

    _files: Path
    manifest: Manifest
    arrival: Arrival
    _lock: FolderLock | None
    _pull: Pull | None = None
    _copy: Future[Lease | None] = field(default_factory=Future, init=False)
    """The result is the lease of the copy on the disk, as soon as the copy has begun; None if there is no copy."""

    @property
    def root(self) -> Path:
        return self._pull.at.files if self._pull is not None else self._files

    @property
    def lock(self) -> FolderLock:
        """The object that protects the files from eviction for as long as it is referenced."""
        lock = self._lock and (self._pull.at.lock.shared if self._pull is not None else self._lock)
        if lock is None:
            raise CacheError("The lease is closed.", remedy="Map the files before closing it.")
        return lock

    @property
    def stats(self) -> FetchStats | None:
        """The statistics of the fetch. None before its end, and if this lease did not fetch."""
        return self._pull.stats if self._pull is not None else None

    def wait(self, timeout_s: float | None = None, *, copied: bool = False) -> None:
        """Block until the snapshot is published. With `copied`, also until its copy on the disk is published.

        Raise the error of the fetch or of the copy, SourceUnavailable if the fetch or the copy does not end within
        `timeout_s`, and CacheError if the copy does not begin within `timeout_s`.
        """
        if self._pull is not None:
            self._pull.wait(timeout_s)
        if copied:
            try:
                copy = self._copy.result(timeout_s)
            except TimeoutError:
                raise CacheError(f"The copy on the disk was not begun within {timeout_s:.0f} s.") from None
            if copy is not None:
                copy.wait(timeout_s)

    def described(self) -> Manifest:
        """Return the manifest with the digests of all chunks. Call it after `wait`.

        If `manifest` has no digests, take them from the published manifest: the first fetch has computed them.
        """
        if self.manifest.has_digests:
            return self.manifest
        return self.manifest.with_chunks(Chunks(Manifest.read(self.root)).digests)

    def close(self) -> None:
        """Release the files. May be called twice, and from another thread."""
        # This callback also closes a copy that begins later. Close the copy first, since it reads the files.
        self._copy.add_done_callback(_close_copy)
        self._lock = None
        if self._pull is not None:
            self._pull.close()

    def start_copy(self, tiers: Sequence[Tier]) -> None:
        """Copy the published snapshot to the first of `tiers` that has room. Return at once.

        An incomplete copy is continued, and a complete copy is only marked as used.
        """
        if tiers:
            # Use a thread: making room may wait for a lock and for the disk, and `open` and `close` must not wait.
            threading.Thread(target=self._copy_to, args=(tiers,), name="snapshot-copy", daemon=True).start()
        else:
            self._copy.set_result(None)

    def _copy_to(self, tiers: Sequence[Tier]) -> None:
        try:
            # Protect the files until the copy belongs to this lease, even if the lease is closed meanwhile.
            _lock = self.lock
            # The copy is a fetch from this tier's folder. So it can be resumed, is verified, and is published last.
            # Reuse no chunks of related snapshots: they may be on the disk, but these files are in memory.
            source = FolderSource(self.root)
            copy = Cache(tiers).open(self.described(), source, tee=False, reuse=False)
        except Exception as error:  # noqa: BLE001  raised by `wait`
            self._copy.set_exception(error)
        else:
            self._copy.set_result(copy)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()


def _close_copy(copy: Future[Lease | None]) -> None:
    if copy.exception() is None and (lease := copy.result()) is not None:
        lease.close()


class Cache:
    """The snapshots in `tiers`, which are given with the fastest first."""

    def __init__(self, tiers: Sequence[Tier], nodes: Nodes | None = None) -> None:
        """With `nodes`, chunks are taken from other nodes that have them, and served to other nodes."""
        self.tiers = tuple(tiers)
        self._nodes = nodes

    def open(
        self,
        manifest: Manifest,
        source: Source,
        *,
        progress: ReportProgress | None = None,
        tee: bool = True,
        reuse: bool = True,
        assets: Path | None = None,
    ) -> Lease:
        """Return a lease of the snapshot as soon as its files can be mapped. Its bytes may still be arriving.

        If the snapshot is published in a tier, the lease uses it there. If another lease is fetching it, this lease
        waits for the same bytes. Otherwise this lease fetches it from `source` into the first tier that has room. In
        all cases, if the tier is in memory and `tee` is True, the snapshot is then copied to a disk tier, unless a disk
        tier has it.

        If `reuse` is True, chunks that another snapshot of the manifest's realm has in a tier are copied from that
        snapshot instead of being fetched. Assets are copied from folder `assets` if it has them. Raise CacheError if no
        tier has room, and SourceError or SnapshotCorrupt if an asset cannot be fetched.
        """
        digest = manifest.digest
        for tier in self.tiers:
            lock = tier.ready(digest, manifest)
            if lock is not None:
                arrival = Arrival(manifest)
                arrival.land_all()
                if progress is not None:
                    progress(manifest.needed_bytes, manifest.needed_bytes)
                lease = Lease(tier.folder(digest) / "files", manifest, arrival, lock)
                disks = self._disks_to_copy_to(tier) if tee else ()
                # Start a copy only if the disks lack the snapshot, so that the usual `open` starts no thread.
                copied = any(disk.ready(digest, manifest) for disk in disks)
                lease.start_copy(() if copied else disks)
                return lease
        related = Related(self.tiers if reuse else ())
        pull = self._pull(digest, manifest, source, related)
        lease = Lease(pull.files, manifest, pull.arrival, pull.lock.shared, pull)
        if progress is not None:
            pull.arrival.report(progress)

        def copy() -> None:
            lease.start_copy(self._disks_to_copy_to(pull.at.tier) if tee else ())

        def elsewhere(full: Pull) -> Pull:
            others = Cache([tier for tier in self.tiers if tier is not full.tier], self._nodes)
            return others._pull(digest, manifest, source, related, before=full.fetch)

        pull.start(copy, elsewhere if len(self.tiers) > 1 else None)
        # The thread of the pull fetches the shards meanwhile.
        pull.bring_assets(assets)
        return lease

    def list(self) -> Sequence[Stored]:
        """Return every snapshot of every tier, complete or not."""
        return [stored for tier in self.tiers for stored in tier.list()]

    def evict(self, digest: str) -> None:
        """Remove a snapshot from every tier. Raise CacheError if it is in use."""
        for tier in self.tiers:
            tier.evict(digest)

    def _disks_to_copy_to(self, tier: Tier) -> Sequence[Tier]:
        return [disk for disk in self.tiers if disk.kind == "disk"] if tier.kind == "tmpfs" else ()

    def _pull(
        self,
        digest: str,
        manifest: Manifest,
        source: Source,
        related: Related,
        *,
        before: TierFetch | None = None,
    ) -> Pull:
        refusals = []
        # Try first the tiers into which a process fetches the snapshot, then the tiers that hold a part of its chunks.
        for tier in sorted(self.tiers, key=lambda tier: (not tier.fetches(digest), not tier.has(digest))):
            try:
                fetch = TierFetch(tier, digest, manifest, source, related, before=before, nodes=self._nodes)
                return Pull(fetch)
            except CacheError as error:
                refusals.append(error)
        size_bytes = manifest.needed_bytes + manifest.assets_bytes
        reasons = " ".join(refusal.message for refusal in refusals)
        raise CacheError(
            f"No tier of the cache takes the snapshot of {size_bytes} bytes. {reasons}",
            remedy=refusals[0].remedy if refusals else "Give the cache a tier.",
            details={"digest": digest, "size_bytes": size_bytes},
        )
