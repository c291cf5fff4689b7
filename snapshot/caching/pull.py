"""A pull brings one snapshot into one tier, for one opener. It fetches, or it follows the pull that fetches.

The pull that gets the fetch lock fetches. The kernel releases that lock however its holder ends; then a
follower gets it and goes on from what is in the files. Openers in one process are no different from openers
in two.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path

from ...errors import CacheError, PilotflameError, SourceDenied, SourceUnavailable
from ..fetching.arrival import Arrival
from ..fetching.assets import fetch_assets
from ..fetching.fetch import FetchStats, fetch
from ..fetching.landing import ShardTarget, land_existing
from ..format.manifest import MANIFEST_NAME, Manifest
from ..publish import cannot_write, sync
from ..sources.source import Source
from .flock import Hold, hold, locked_file, try_lock
from .follow import Feed, Following
from .memory import has_huge_pages
from .stored import is_whole, sync_files
from .tier import Tier

TAKEOVER_TIMEOUT_S = 30.0
"""How long an ending process may keep the fetch lock after it closed its feed."""
CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class _Fetching:
    """The role of the pull that holds the fetch lock. `new`: its files were just made and are empty."""

    descriptor: int
    feed: Feed
    new: bool


class Pull:
    """Once constructed, files are there at full size and assets are complete; shards arrive in a thread.

    Raise CacheError if the tier cannot take it, SourceError or SnapshotCorrupt if an asset cannot be had.
    """

    def __init__(self, tier: Tier, digest: str, manifest: Manifest, source: Source) -> None:
        self.tier = tier
        self.files = tier.folder(digest) / "files"
        self.arrival = Arrival(manifest)
        self.stats: FetchStats | None = None
        """The figures of the fetch, if this pull fetched."""
        self._digest, self._manifest, self._source = digest, manifest, source
        self._error: PilotflameError | None = None
        self.hold: Hold | None = None
        """Protects the files from eviction; None once this is closed."""
        self._cancelled = threading.Event()
        self._over = threading.Event()
        self._role: _Fetching | Following | None = None
        try:
            self._role = self._take_role()
            fetch_assets(manifest, source, self.files)
        except BaseException as error:
            self._drop_role(None, dropped=True)
            self.hold = None
            if isinstance(error, OSError):
                raise cannot_write(Path(error.filename or tier.root), error) from error
            raise
        self.arrival.on_demand(self._demand)

    def start(self, on_published: Callable[[], None]) -> None:
        """Start the thread that brings the shards; it calls `on_published` once all is published."""
        self._thread = threading.Thread(
            target=self._run, args=(on_published,), name="snapshot-pull", daemon=True
        )
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until all is published. Raise what prevented it, or SourceUnavailable in time."""
        if not self._over.wait(timeout_s):
            raise SourceUnavailable(f"The weights did not arrive within {timeout_s:.0f} s.")
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Stop fetching or following. Landed chunks stay; a follower continues from there."""
        self._cancelled.set()
        if isinstance(role := self._role, Following):
            role.cancel()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_TIMEOUT_S)
        if self._over.is_set():
            # Released here: listeners and arrival refer to each other, so garbage collection may be late.
            self.hold = None

    # -- the role

    def _take_role(self) -> _Fetching | Following | None:
        """Take the fetch lock, or follow its holder; None if all is published by now."""
        deadline_s = time.monotonic() + TAKEOVER_TIMEOUT_S
        while True:
            with self.tier.locked(), ExitStack() as undo:
                folder = self.tier.folder(self._digest)
                new = not folder.is_dir()
                if new:
                    self.tier.make_room(self._digest, self._manifest)
                self.hold = self.hold or hold(folder)
                if self.hold is None:
                    raise CacheError(f"{folder} was removed while it was opened.", remedy="Try again.")
                descriptor = os.open(folder / "fetching", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                undo.callback(os.close, descriptor)
                if try_lock(descriptor, exclusive=True):
                    if is_whole(self.files, self._manifest):
                        return None
                    (self.files / MANIFEST_NAME).unlink(missing_ok=True)
                    if not new:
                        self.tier.make_room(self._digest, self._manifest)
                    role = _Fetching(descriptor, Feed(self.hold.descriptor, self.arrival), new)
                    undo.pop_all()
                    return role
                with suppress(ConnectionError, FileNotFoundError):
                    return Following(self.hold.descriptor)
            # There is no feed, but the lock is held: by a process that is just ending.
            with locked_file(folder / "fetching", max(0.0, deadline_s - time.monotonic())):
                pass

    def _drop_role(self, error: PilotflameError | None, *, dropped: bool = False) -> None:
        """End fetching or following. `error` and `dropped` are for the followers (see Feed.close)."""
        role, self._role = self._role, None
        if isinstance(role, _Fetching):
            role.feed.close(error, dropped=dropped)
            os.close(role.descriptor)
        elif isinstance(role, Following):
            role.close()

    def _demand(self, first: int, last: int) -> None:
        if isinstance(role := self._role, Following):
            role.demand(first, last)

    # -- the thread

    def _run(self, on_published: Callable[[], None]) -> None:
        try:
            while not self._play_role():
                self._role = self._take_role()
        except PilotflameError as error:
            self._fail(error)
        except OSError as error:
            self._fail(cannot_write(self.files, error))
        except BaseException as error:
            self._fail(CacheError(f"The pull of {self._digest} broke off: {error!r}.", remedy="Try again."))
            raise
        else:
            self._over.set()
            on_published()
        finally:
            self._drop_role(None, dropped=True)
            self._over.set()
            if self._cancelled.is_set():
                self.hold = None

    def _fail(self, error: PilotflameError) -> None:
        self._error = error
        # A follower may have better credentials than this pull.
        self._drop_role(error, dropped=self._cancelled.is_set() or isinstance(error, SourceDenied))
        self.arrival.fail(error)

    def _play_role(self) -> bool:
        """Fetch or follow until that ends. Return True if all is published."""
        role = self._role
        # Checked after the role was taken: `close` sets the event first, then cancels the role.
        if self._cancelled.is_set():
            remedy = "Open it again: what has arrived is kept."
            raise CacheError("The snapshot was closed before all of it had arrived.", remedy=remedy)
        if isinstance(role, Following):
            return role.run(self.arrival)
        if isinstance(role, _Fetching):
            self._fetch(new=role.new)
            self._publish()
            self._drop_role(None)
        self.arrival.land_all()
        return True

    def _fetch(self, *, new: bool) -> None:
        with ExitStack() as opened:
            huge = self.tier.kind == "tmpfs" and has_huge_pages(self.files)
            targets = [self._target(shard.name, opened, huge=huge) for shard in self._manifest.shards]
            if not new:
                land_existing(self._manifest, targets, self.arrival, self._cancelled)
            self.stats = fetch(self._manifest, self._source, targets, self.arrival, cancelled=self._cancelled)

    def _target(self, name: str, opened: ExitStack, *, huge: bool) -> ShardTarget:
        descriptor = os.open(self.files / name, os.O_RDWR | os.O_CLOEXEC)
        opened.callback(os.close, descriptor)
        memory = self.tier.spares.map_pages(descriptor) if self.tier.kind == "tmpfs" else None
        fresh = memory is None and huge
        if fresh and (size_bytes := os.fstat(descriptor).st_size):
            memory = memoryview(mmap(descriptor, size_bytes))
        if memory is not None:
            opened.callback(_unmap, memory)
        return ShardTarget(str(self.files / name), descriptor, memory, fresh=fresh)

    def _publish(self) -> None:
        """All chunks are verified: write the manifest; on a disk, once the files are synced."""
        # What a process that was killed while writing the manifest left.
        for rest in self.files.glob(f".{MANIFEST_NAME}.*"):
            rest.unlink()
        if self.tier.kind == "disk":
            sync_files(self.files, self._manifest)
            sync(self.files.parent)
            sync(self.files.parent.parent)
        self._manifest.write(self.files / MANIFEST_NAME)


def _unmap(memory: memoryview) -> None:
    """Unmap at once rather than when the last reference goes: while it is mapped, the file is in use."""
    mapped = memory.obj
    # The traceback of a failed thread may still refer to a slice of it.
    with suppress(BufferError):
        memory.release()
        if isinstance(mapped, mmap):
            mapped.close()
