"""Brings one snapshot into one tier for one lease. A pull fetches the snapshot, or follows another pull's fetch.

The pull that gets the fetch lock fetches. When its process ends, in whatever way, the kernel releases the lock. Then
one of the followers gets the lock, and continues the fetch with the chunks in the files. Two leases in one process work
like leases in two processes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property
from mmap import mmap
from pathlib import Path
from typing import Protocol

from ...errors import CacheError, PilotflameError, SourceDenied, SourceUnavailable, StorageFull
from ..fetching.arrival import Arrival
from ..fetching.assets import fetch_assets
from ..fetching.chunk_reuse import ChunkReuse
from ..fetching.digest_journal import learned_digests
from ..fetching.fetch import FetchStats, fetch
from ..fetching.landing import ShardTarget, copy_landed, land_existing
from ..format.manifest import MANIFEST_NAME, Manifest
from ..publish import cannot_write, sync
from ..sources.source import Source, VersionedByContent
from .flock import Hold, hold, locked_file, try_lock
from .follow import Feed, Following
from .memory import has_huge_pages
from .related import Related
from .stored import DIGESTS, REUSED, is_whole, sync_files
from .tier import Tier

TAKEOVER_TIMEOUT_S = 30.0
"""How long a pull waits for the fetch lock while its holder has no feed, for example because the holder is ending."""
CLOSE_TIMEOUT_S = 10.0
ASSETS_TIMEOUT_S = 600.0
"""How long a pull whose shards are complete waits for the assets before it publishes."""
MOVE_TIMEOUT_S = 600.0
"""How long it may take to copy the chunks of a full tier to another tier."""


@dataclass(frozen=True, slots=True)
class _Fetching:
    """The role of a pull that holds the fetch lock. `descriptor` has the lock.

    `new` is True if this pull has just created the files. Then they hold no chunks.
    """

    descriptor: int
    feed: Feed
    new: bool


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


Elsewhere = Callable[["Pull"], "Pull"]
"""Makes a pull that continues the given pull in another tier. Raises CacheError if no other tier has room."""


class Pull:
    """One pull. The constructor makes all shards at full size, and raises CacheError if the tier has no room.

    A thread, which `start` starts, brings the bytes of the shards. Meanwhile the caller brings the assets with
    `bring_assets`.
    """

    def __init__(
        self,
        tier: Tier,
        digest: str,
        manifest: Manifest,
        source: Source,
        related: Related,
        *,
        before: Pull | None = None,
        nodes: Nodes | None = None,
    ) -> None:
        """Chunks that `related` or other `nodes` have are copied from there instead of being fetched.

        With `before`, this pull continues that pull in another tier, and copies its landed chunks.
        """
        self.tier = tier
        self.files = tier.folder(digest) / "files"
        self.arrival = Arrival(manifest)
        self._stats: FetchStats | None = None
        self._digest, self._manifest, self._source = digest, manifest, source
        self._related, self._nodes = related, nodes
        self._error: PilotflameError | None = None
        self._before = before
        self._after: Pull | None = None
        """The pull that continues this pull in another tier, after this tier became full."""
        self.hold: Hold | None = None
        """Protects the files from eviction. None after the pull is closed."""
        self._cancelled = threading.Event()
        self._over = threading.Event()
        self._assets_ended = threading.Event()
        self._assets_missing: PilotflameError | None = CacheError("The assets were not brought.")
        self._role: _Fetching | Following | None = None
        try:
            self._role = self._take_role()
        except BaseException as error:
            self._drop_role(None, dropped=True)
            self.hold = None
            if isinstance(error, OSError):
                raise cannot_write(Path(error.filename or tier.root), error) from error
            raise
        self.arrival.on_demand(self._demand)

    @property
    def stats(self) -> FetchStats | None:
        """The statistics of the fetch. None before its end, and if this pull did not fetch."""
        return self._after.stats if self._after is not None else self._stats

    @property
    def at(self) -> Pull:
        """The pull that brings the chunks now: this pull, or a pull that continues it in another tier."""
        return self._after.at if self._after is not None else self

    def start(self, on_published: Callable[[], None], elsewhere: Elsewhere | None = None) -> None:
        """Start the thread that brings the shards. It calls `on_published` when the snapshot is published.

        If the tier becomes full, the thread calls `elsewhere`, and continues with the pull that this returns.
        """
        run, how = self._run, (on_published, elsewhere)
        self._thread = threading.Thread(target=run, args=how, name="snapshot-pull", daemon=True)
        self._thread.start()

    def bring_assets(self, copies: Path | None = None) -> None:
        """Bring the missing assets, from folder `copies` if it has them. Call it once after `start`.

        Raises SourceError or SnapshotCorrupt if an asset cannot be fetched. Then the pull is closed. If the tier
        is full, raises nothing: the pull continues in another tier, which needs the assets again.
        """
        if self.tier.read_only:
            return
        try:
            fetch_assets(self._manifest, self._source, self.files, copies)
            self._assets_missing = None
        except StorageFull as error:
            self._assets_missing = error
        except BaseException:
            self._assets_ended.set()
            self.close()
            raise
        self._assets_ended.set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the snapshot is published. Raises the pull's error, or SourceUnavailable after `timeout_s`."""
        if not self._over.wait(timeout_s):
            raise SourceUnavailable(f"The weights did not arrive within {timeout_s:.0f} s.")
        if self._error is not None:
            raise self._error
        if self._after is not None:
            self._after.wait(timeout_s)

    def close(self) -> None:
        """Stop fetching or following. Landed chunks stay in the files, and a follower may fetch the other chunks."""
        self._cancelled.set()
        # End the wait for the assets. If assets are still missing, nothing is published.
        self._assets_ended.set()
        if isinstance(role := self._role, Following):
            role.cancel()
        if self._after is not None:
            self._after.close()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_TIMEOUT_S)
        if self._over.is_set():
            # Release the hold here: this object and `arrival` refer to each other until the garbage collector runs.
            self.hold = None

    def _take_role(self) -> _Fetching | Following | None:
        """Take the fetch lock, or follow the pull that has it. Return None if the snapshot is already published.

        Raises CacheError if the tier has no room, or if the lock stays locked without a feed to follow.
        """
        deadline_s = time.monotonic() + TAKEOVER_TIMEOUT_S
        folder = self.tier.folder(self._digest)
        while True:
            if self.tier.read_only:
                return self._follow(folder, deadline_s)
            if (following := self._join(folder)) is not None:
                return following
            with self.tier.locked(), ExitStack() as undo:
                new = not self.tier.has(self._digest)
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
            # The fetch lock is held, but there is no feed, so the holder is ending. Wait for the lock and retry.
            with locked_file(folder / "fetching", max(0.0, deadline_s - time.monotonic())):
                pass

    def _join(self, folder: Path) -> Following | None:
        """Follow the process that fetches, if there is one. This does not need the tier's lock."""
        held = (self.hold or hold(folder)) if self.tier.fetches(self._digest) else None
        if held is not None:
            with suppress(ConnectionError, FileNotFoundError):
                following = Following(held.descriptor)
                self.hold = held
                return following
        return None

    def _follow(self, folder: Path, deadline_s: float) -> Following | None:
        """Follow the process that fetches, or raise SourceDenied. Return None if the snapshot is published."""
        self.hold = self.hold or hold(folder)
        while self.hold is not None:
            # Call `fetches` before `is_whole`, so as not to miss a process that publishes and ends in between.
            fetches = self.tier.fetches(self._digest)
            if is_whole(self.files, self._manifest):
                return None
            with suppress(ConnectionError, FileNotFoundError):
                return Following(self.hold.descriptor)
            if not fetches:
                break
            # The feed of the fetching process is closed already, or not open yet.
            timeout_s = max(0.0, deadline_s - time.monotonic())
            with locked_file(folder / "fetching", timeout_s, read_only=True):
                pass
        fault = f"{folder} holds no snapshot, and no process fetches one into it."
        raise SourceDenied(fault, remedy="Try again: the next activation fetches what is missing.")

    def _drop_role(self, error: PilotflameError | None, *, dropped: bool = False) -> None:
        """End fetching or following. `error` and `dropped` are passed to Feed.close."""
        role, self._role = self._role, None
        if isinstance(role, _Fetching):
            role.feed.close(error, dropped=dropped)
            os.close(role.descriptor)
        elif isinstance(role, Following):
            role.close()

    def _demand(self, first: int, last: int) -> None:
        if isinstance(role := self._role, Following):
            role.demand(first, last)

    def _run(self, on_published: Callable[[], None], elsewhere: Elsewhere | None) -> None:
        try:
            while not self._play_role():
                self._role = self._take_role()
        except (PilotflameError, OSError) as error:
            failure = cannot_write(self.files, error) if isinstance(error, OSError) else error
            if isinstance(failure, StorageFull) and elsewhere is not None and not self._cancelled.is_set():
                self._continue_elsewhere(failure, on_published, elsewhere)
            else:
                self._fail(failure)
        except BaseException as error:
            # If the source has raised an exception, the arrival has an error for it.
            self._fail(self.arrival.error or self._broken_off(error))
            raise
        else:
            self._over.set()
            on_published()
        finally:
            self._drop_role(None, dropped=True)
            self._over.set()
            if self._cancelled.is_set():
                self.hold = None

    def _continue_elsewhere(
        self, full: StorageFull, on_published: Callable[[], None], elsewhere: Elsewhere
    ) -> None:
        """Let a pull into another tier bring the missing chunks to the same waiting threads, because this tier is full.

        The followers get the error only after the other pull has its role. So they find a fetch to follow in that tier.
        """
        try:
            after = elsewhere(self)
        except PilotflameError as error:
            self._fail(StorageFull(f"{full.message} {error.message}", remedy=full.remedy))
            return
        except Exception as error:
            self._fail(self._broken_off(error))
            raise
        landed = [chunk for chunk in range(self.arrival.count) if self.arrival.landed(chunk)]
        after.start(on_published)
        self._after = after
        self._drop_role(full)
        # `close` sets the event before it looks at `_after`. So either `close` or this thread closes `after`.
        if self._cancelled.is_set():
            after.close()
        try:
            after.bring_assets(self.files)
            for chunk in landed:
                after.arrival.wait(chunk, chunk, MOVE_TIMEOUT_S)
        except PilotflameError as error:
            self._fail(error)
            return
        except Exception as error:
            self._fail(self._broken_off(error))
            raise
        self.arrival.move(after.files)
        after.arrival.relay(self.arrival)

    def _broken_off(self, error: BaseException) -> CacheError:
        return CacheError(f"The pull of {self._digest} broke off: {error!r}.", remedy="Try again.")

    def _fail(self, error: PilotflameError) -> None:
        self._error = error
        # If access was denied, let a follower take over the fetch, because it may have other credentials.
        self._drop_role(error, dropped=self._cancelled.is_set() or isinstance(error, SourceDenied))
        self.arrival.fail(error)

    def _play_role(self) -> bool:
        """Fetch or follow to the end. Return False if the followed process has gone before the end."""
        role = self._role
        # Check this only after taking the role. `close` sets the event before it cancels the role. So either `close` or
        # this check always ends this thread.
        if self._cancelled.is_set():
            remedy = "Open it again: what has arrived is kept."
            raise CacheError("The snapshot was closed before all of it had arrived.", remedy=remedy)
        if isinstance(role, Following):
            return role.run(self.arrival)
        if isinstance(role, _Fetching):
            with ExitStack() as until_published:
                self._fetch(until_published, new=role.new)
                self._publish()
            self._drop_role(None)
        self.arrival.land_all()
        return True

    def _fetch(self, until_published: ExitStack, *, new: bool) -> None:
        with ExitStack() as opened:
            targets = [self._target(shard.name, opened) for shard in self._manifest.shards]
            learned: Sequence[str] | None = None
            if not self._manifest.has_digests:
                journal = learned_digests(self.files.parent / DIGESTS, self.arrival)
                learned = opened.enter_context(journal)
            if self._before is not None:
                before, self._before = self._before, None
                copy_landed(self._manifest, before.arrival, before.files, targets, self._cancelled)
                new, learned = False, before.arrival.chunks.digests
            if not new:
                land_existing(self._manifest, targets, self.arrival, self._cancelled, learned)
            landed_bytes = self.arrival.landed_bytes
            try:
                self._stats = self._bring(targets, until_published)
            finally:
                self.tier.counts.add_verified(self.arrival.landed_bytes - landed_bytes)

    def _bring(self, targets: Sequence[ShardTarget], until_published: ExitStack) -> FetchStats:
        """Copy chunks from related snapshots. Meanwhile, take the other chunks from other nodes, or fetch them."""
        with ExitStack() as opened:
            by_version = isinstance(self._source, VersionedByContent)
            places = self._related.places(self._manifest, self.arrival, opened, by_version=by_version)
            with ChunkReuse(self.arrival, targets, places, self._cancelled):
                taken_bytes = self._take(targets, places, until_published)
                stats = self._fetch_missing(targets, left_out=places)
        if not self.arrival.complete:
            stats.add(self._fetch_missing(targets))
        stats.taken_bytes = taken_bytes
        return stats

    def _take(
        self, targets: Sequence[ShardTarget], left_out: Container[int], until_published: ExitStack
    ) -> int:
        if self._nodes is None:
            return 0
        joined = self._nodes.joined(self._manifest, self.arrival, self.files)
        return until_published.enter_context(joined).take(targets, left_out, self._cancelled)

    def _fetch_missing(self, targets: Sequence[ShardTarget], left_out: Container[int] = ()) -> FetchStats:
        return fetch(
            self._manifest, self._source, targets, self.arrival, cancelled=self._cancelled,
            count_received=self.tier.counts.add_received, left_out=left_out,
        )  # fmt: skip

    @cached_property
    def _makes_huge_pages(self) -> bool:
        return self.tier.kind == "tmpfs" and has_huge_pages(self.files)

    def _target(self, name: str, opened: ExitStack) -> ShardTarget:
        descriptor = os.open(self.files / name, os.O_RDWR | os.O_CLOEXEC)
        opened.callback(os.close, descriptor)
        memory = self.tier.spares.map_pages(descriptor) if self.tier.kind == "tmpfs" else None
        fresh = memory is None and self._makes_huge_pages
        if fresh and (size_bytes := os.fstat(descriptor).st_size):
            memory = memoryview(mmap(descriptor, size_bytes))
        if memory is not None:
            opened.callback(_unmap, memory)
        return ShardTarget(
            str(self.files / name), descriptor, self._manifest.digest_algorithm, memory, fresh=fresh
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
            sync_files(self.files, self._manifest)
            sync(self.files.parent)
            sync(self.files.parent.parent)
        # No bytes of another snapshot are left.
        (self.files.parent / REUSED).unlink(missing_ok=True)
        manifest = self._manifest
        if not manifest.has_digests:
            manifest = manifest.with_chunks(self.arrival.chunks.digests)
        # Leave out the realm: containers have this file mounted, and need not know the realm.
        manifest.with_realm("").write(self.files / MANIFEST_NAME)
        (self.files.parent / DIGESTS).unlink(missing_ok=True)


def _unmap(memory: memoryview) -> None:
    """Unmap now, instead of at the end of the last reference to the mapping, because a mapped file counts as in use."""
    mapped = memory.obj
    # BufferError means that some object, such as the traceback of a failed thread, still refers to a slice of it.
    with suppress(BufferError):
        memory.release()
        if isinstance(mapped, mmap):
            mapped.close()
