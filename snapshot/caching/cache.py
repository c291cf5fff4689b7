"""The node's cache of snapshots: what is here is used, what is not is fetched once, whoever asks and however many.

    cache = Cache([Tier(Path("/dev/shm/pilotflame"), 8 << 30, "tmpfs"), Tier(Path("/var/cache/pilotflame"), 200 << 30)])
    with cache.open(manifest, open_source("s3://bucket/prefix")) as lease:
        mapping = Mapping(lease.root, lease.manifest, keep=lease.hold)   # at once; tensors come in lease.arrival

No process owns it: locks and files say all there is to know, so any may be killed at any moment.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from ...errors import CacheError, PilotflameError
from ..fetching.arrival import Arrival
from ..fetching.fetch import FetchStats
from ..format.manifest import Manifest
from ..sources.folder import FolderSource
from ..sources.source import Progress, Source
from .flock import Hold
from .pull import Pull
from .stored import Stored, needed_bytes
from .tier import Tier

_CLOSED = "The lease is closed."


class Lease:
    """A snapshot in use. Its files are there at full size; `arrival` says which chunks of them count.

    `root` stays the same and stays valid until the lease, and every Mapping that was given its `hold`, is gone: nothing
    evicts it before. Closing a lease stops its fetch; who else waits for the snapshot, here or in another process, goes on
    with it.
    """

    def __init__(
        self, root: Path, manifest: Manifest, arrival: Arrival, hold: Hold, pull: Pull | None
    ) -> None:
        self.root = root
        self.manifest = manifest
        self.arrival = arrival
        self._hold: Hold | None = hold
        self._pull = pull
        self._lock = threading.Lock()
        self._copy: Pull | None = None
        self._copy_error: PilotflameError | None = None
        self._copy_begun = threading.Event()

    @property
    def hold(self) -> Hold:
        """What protects the files from eviction for as long as anybody refers to it."""
        if self._hold is None:
            raise CacheError(_CLOSED, remedy="Map the files before closing it.")
        return self._hold

    @property
    def stats(self) -> FetchStats | None:
        """Of the fetch, once it is done and if it was this lease that fetched."""
        return self._pull.stats if self._pull is not None else None

    def wait(self, timeout_s: float | None = None, *, copied: bool = False) -> None:
        """Until all is there, verified and published; with `copied`, on the disk too where it is copied there.

        Raises what prevented it; SourceUnavailable if it takes longer than `timeout_s` (either part of it).
        """
        if self._pull is not None:
            self._pull.wait(timeout_s)
        if not copied or self._pull is None:
            return
        if not self._copy_begun.wait(timeout_s):
            raise CacheError(f"The copy on the disk was not begun within {timeout_s:.0f} s.")
        if self._copy_error is not None:
            raise self._copy_error
        if self._copy is not None:
            self._copy.wait(timeout_s)

    def close(self) -> None:
        """Let go. May be called twice, and from another thread."""
        with self._lock:
            self._hold = None
            copy = self._copy
        for pull in (copy, self._pull):
            if pull is not None:
                pull.close()

    def start(self, below: Sequence[Tier], digest: str) -> None:
        """Let it come; once it is here, copy it to the first of the tiers `below` that takes it."""
        if self._pull is not None:
            self._pull.start(lambda: self._start_copy(below, digest))

    def _start_copy(self, below: Sequence[Tier], digest: str) -> None:
        try:
            for tier in below:
                if tier.ready(digest, self.manifest) is not None or self._copy_to(tier, digest):
                    return
        finally:
            self._copy_begun.set()

    def _copy_to(self, tier: Tier, digest: str) -> bool:
        """Whether there is nothing more to do: it is on its way, or nobody wants it any more."""
        try:
            # The same engine as from afar: resumed, verified chunk by chunk, published last.
            copy = Pull(tier, digest, self.manifest, FolderSource(self.root))
        except PilotflameError as error:
            self._copy_error = error
            return False
        except OSError as error:
            self._copy_error = _refused(tier, error)
            return False
        with self._lock:
            self._copy, self._copy_error, closed = copy, None, self._hold is None
        copy.start()
        if closed:
            copy.close()
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Cache:
    """Snapshots in `tiers`, the fastest first. `learned`: the file in which the fetching engine remembers sources."""

    def __init__(self, tiers: Sequence[Tier], *, learned: Path | None = None) -> None:
        self.tiers = tuple(tiers)
        self._learned = learned

    def sweep(self) -> None:
        """Clear what crashes left in the tiers: for a process that lives long, at its start."""
        for tier in self.tiers:
            tier.sweep()

    def open(
        self, manifest: Manifest, source: Source, *, progress: Progress | None = None, tee: bool = True
    ) -> Lease:
        """A lease of the snapshot, as soon as its files can be mapped; its bytes may still be coming.

        What is ready in any tier is used there: nothing is read, no thread is started. What is on its way is followed. Else
        the first tier that takes it fetches it from `source`, and unless `tee` is off copies it to a disk tier after that.
        CacheError if no tier takes it; SourceError, SnapshotCorrupt if an asset cannot be had.
        """
        digest = manifest.digest
        for tier in self.tiers:
            found = tier.ready(digest, manifest)
            if found is not None:
                return self._at_once(tier.folder(digest) / "files", manifest, found, progress)
        tier, pull = self._pull(digest, manifest, source)
        lease = Lease(pull.files, manifest, pull.arrival, pull.hold, pull)
        if progress is not None:
            _report(manifest, pull.arrival, progress)
        below = (
            [other for other in self.tiers if other.kind == "disk"] if tee and tier.kind == "tmpfs" else []
        )
        lease.start(below, digest)
        return lease

    def list(self) -> Sequence[Stored]:
        """Every snapshot of every tier, published or on its way."""
        return [stored for tier in self.tiers for stored in tier.list()]

    def evict(self, digest: str) -> bool:
        """Drop a snapshot from every tier; whether it was in any. CacheError if one is in use, which stays."""
        evicted = [tier.evict(digest) for tier in self.tiers]
        return any(evicted)

    def usage(self) -> Sequence[tuple[Tier, int]]:
        """Each tier, and the bytes of its budget that are taken, spare files included."""
        return [(tier, tier.used_bytes()) for tier in self.tiers]

    def _at_once(self, root: Path, manifest: Manifest, hold: Hold, progress: Progress | None) -> Lease:
        arrival = Arrival(manifest)
        arrival.land_all()
        if progress is not None:
            progress(manifest.total_bytes, manifest.total_bytes)
        return Lease(root, manifest, arrival, hold, None)

    def _pull(self, digest: str, manifest: Manifest, source: Source) -> tuple[Tier, Pull]:
        # Where it is on its way already comes first: that is one fetch for all, and less left of it.
        tiers = sorted(self.tiers, key=lambda tier: not tier.has(digest))
        refusals = []
        for tier in tiers:
            try:
                return tier, Pull(tier, digest, manifest, source, learned=self._learned)
            except CacheError as error:
                refusals.append(error)
            except OSError as error:
                refusals.append(_refused(tier, error))
        raise CacheError(
            f"No tier of the cache takes the snapshot of {needed_bytes(manifest)} bytes. "
            + " ".join(refusal.message for refusal in refusals),
            remedy=refusals[0].remedy if refusals else "Give the cache a tier.",
            details={"digest": digest, "size_bytes": needed_bytes(manifest)},
        )


def _refused(tier: Tier, error: OSError) -> CacheError:
    where = error.filename or tier.root
    return CacheError(
        f"{where} cannot be written: {error.strerror}.",
        remedy=f"Make room or mend the permissions of {tier.root}, or put the cache elsewhere.",
    )


def _report(manifest: Manifest, arrival: Arrival, progress: Progress) -> None:
    """Call `progress` as chunks land, with ever more bytes."""
    sizes = [
        min(manifest.chunk_bytes, shard.size_bytes - chunk * manifest.chunk_bytes)
        for shard in manifest.shards
        for chunk in range(len(shard.chunks))
    ]
    lock, done = threading.Lock(), [0]

    def landed(chunk: int) -> None:
        with lock:
            done[0] += sizes[chunk]
            progress(done[0], manifest.total_bytes)

    arrival.on_land(landed)
