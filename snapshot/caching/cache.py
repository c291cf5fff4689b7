"""The cache of snapshots on a node: one that is here is used, another is fetched once for all openers.

    cache = Cache([Tier(Path("/dev/shm/weights"), 8 << 30, "tmpfs"), Tier(Path("/var/weights"), 200 << 30)])
    with cache.open(manifest, open_source("s3://bucket/prefix")) as lease:
        mapping = Mapping(lease.root, lease.manifest, keep=lease.hold)

No process owns the cache: all state is in locks and files, so any process may be killed at any moment.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ...errors import CacheError, PilotflameError
from ..fetching.arrival import Arrival
from ..fetching.fetch import FetchStats
from ..format.manifest import Manifest
from ..sources.folder import FolderSource
from ..sources.source import Progress, Source
from .flock import Hold
from .pull import Pull
from .stored import Stored
from .tier import Tier


@dataclass(eq=False)
class Lease:
    """A snapshot in use. Its files are there at full size; `arrival` says which of their chunks have landed.

    `root` is not evicted until the lease is closed and every Mapping that was given its `hold` is gone.
    Closing a lease stops its fetch; others that wait for the snapshot, in any process, continue it.
    """

    root: Path
    manifest: Manifest
    arrival: Arrival
    _hold: Hold | None
    _pull: Pull | None = None

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._copy: Lease | None = None
        self._copy_error: PilotflameError | None = None
        self._copy_begun = threading.Event()

    @property
    def hold(self) -> Hold:
        """A reference to this protects the files from eviction."""
        if self._hold is None:
            raise CacheError("The lease is closed.", remedy="Map the files before closing it.")
        return self._hold

    @property
    def stats(self) -> FetchStats | None:
        """The figures of the fetch, once it is done and if this lease fetched."""
        return self._pull.stats if self._pull is not None else None

    def wait(self, timeout_s: float | None = None, *, copied: bool = False) -> None:
        """Block until the snapshot is published; with `copied`, until the copy on the disk is too.

        Raise what prevented it; SourceUnavailable if either of the two takes longer than `timeout_s`.
        """
        if self._pull is not None:
            self._pull.wait(timeout_s)
        if self._pull is None or not copied:
            return
        if not self._copy_begun.wait(timeout_s):
            raise CacheError(f"The copy on the disk was not begun within {timeout_s:.0f} s.")
        if self._copy_error is not None:
            raise self._copy_error
        if self._copy is not None:
            self._copy.wait(timeout_s)

    def close(self) -> None:
        """Release the files. May be called twice, and from another thread."""
        with self._lock:
            self._hold = None
            copy = self._copy
        for part in (copy, self._pull):
            if part is not None:
                part.close()

    def copy_to(self, tiers: Sequence[Tier]) -> None:
        """Start a copy to the first of `tiers` that takes it. Called once the snapshot is published."""
        try:
            if tiers:
                # Like a fetch: resumed, verified chunk by chunk, published last.
                copy = Cache(tiers).open(self.manifest, FolderSource(self.root), tee=False)
                with self._lock:
                    self._copy, closed = copy, self._hold is None
                if closed:
                    copy.close()
        except PilotflameError as error:
            self._copy_error = error
        finally:
            self._copy_begun.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()


class Cache:
    """Snapshots in `tiers`, the fastest first."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self.tiers = tuple(tiers)

    def open(
        self, manifest: Manifest, source: Source, *, progress: Progress | None = None, tee: bool = True
    ) -> Lease:
        """Return a lease of the snapshot as soon as its files can be mapped; its bytes may still be arriving.

        A snapshot that is ready in any tier is used there: nothing is read, no thread is started. One that is
        being fetched is followed. Otherwise the first tier that takes it fetches it from `source`, and then,
        unless `tee` is False, copies it to a disk tier. CacheError if no tier takes it; SourceError,
        SnapshotCorrupt if an asset cannot be had.
        """
        digest = manifest.digest
        for tier in self.tiers:
            hold = tier.ready(digest, manifest)
            if hold is not None:
                arrival = Arrival(manifest)
                arrival.land_all()
                if progress is not None:
                    progress(manifest.total_bytes, manifest.total_bytes)
                return Lease(tier.folder(digest) / "files", manifest, arrival, hold)
        tier, pull = self._pull(digest, manifest, source)
        lease = Lease(pull.files, manifest, pull.arrival, pull.hold, pull)
        if progress is not None:
            _report(manifest, pull.arrival, progress)
        copied = tee and tier.kind == "tmpfs"
        disks = [other for other in self.tiers if other.kind == "disk"] if copied else []
        pull.start(lambda: lease.copy_to(disks))
        return lease

    def list(self) -> Sequence[Stored]:
        """Every snapshot of every tier, published or being fetched."""
        return [stored for tier in self.tiers for stored in tier.list()]

    def evict(self, digest: str) -> None:
        """Drop a snapshot from every tier; CacheError if it is in use."""
        for tier in self.tiers:
            tier.evict(digest)

    def _pull(self, digest: str, manifest: Manifest, source: Source) -> tuple[Tier, Pull]:
        # A tier that is fetching it already comes first: one fetch for all, and less left of it.
        tiers = sorted(self.tiers, key=lambda tier: not tier.has(digest))
        refusals = []
        for tier in tiers:
            try:
                return tier, Pull(tier, digest, manifest, source)
            except CacheError as error:
                refusals.append(error)
        size_bytes = manifest.total_bytes + manifest.assets_bytes
        reasons = " ".join(refusal.message for refusal in refusals)
        raise CacheError(
            f"No tier of the cache takes the snapshot of {size_bytes} bytes. {reasons}",
            remedy=refusals[0].remedy if refusals else "Give the cache a tier.",
            details={"digest": digest, "size_bytes": size_bytes},
        )


def _report(manifest: Manifest, arrival: Arrival, progress: Progress) -> None:
    """Call `progress` as chunks land. The bytes never decrease."""
    lock = threading.Lock()

    def landed(_chunk: int) -> None:
        with lock:
            progress(arrival.landed_bytes, manifest.total_bytes)

    arrival.on_land(landed)
