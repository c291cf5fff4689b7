"""Brings one snapshot into one tier for one lease. A pull fetches the snapshot, or follows another pull's fetch.

The pull that gets the fetch lock fetches. When its process ends, in whatever way, the kernel releases the lock. Then
one of the followers gets the lock, and continues the fetch with the chunks in the files. Two leases in one process work
like leases in two processes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from ...errors import CacheError, PilotflameError, SourceDenied, SourceUnavailable, StorageFull
from ..fetching.arrival import Arrival
from ..fetching.fetch import FetchStats
from ..format.manifest import MANIFEST_NAME, Manifest
from ..publish import cannot_write
from .flock import FolderLock, lock_shared, locked_file, try_lock
from .follow import Feed, Following
from .stored import is_whole
from .tier import Tier
from .tier_fetch import TierFetch

TAKEOVER_TIMEOUT_S = 30.0
"""How long a pull waits for the fetch lock while its holder has no feed, for example because the holder is ending."""
CLOSE_TIMEOUT_S = 10.0
MOVE_TIMEOUT_S = 600.0
"""How long it may take to copy the chunks of a full tier to another tier."""


@dataclass(frozen=True, slots=True)
class Fetching:
    """The role of a pull that holds the fetch lock. `descriptor` is the locked file.

    `new` is True if this pull has just created the files. Then they hold no chunks.
    """

    descriptor: int
    feed: Feed
    new: bool


class FetchLock:
    """The fetch lock of a snapshot's folder, for one pull. This pull has the lock, or follows the pull that has it."""

    def __init__(self, tier: Tier, digest: str, manifest: Manifest, arrival: Arrival) -> None:
        self._tier, self._digest = tier, digest
        self._folder = tier.folder(digest)
        self._manifest, self._arrival = manifest, arrival
        self.shared: FolderLock | None = None
        """Protects the files from eviction. None after the pull is closed."""
        self.role: Fetching | Following | None = None

    def take(self) -> None:
        """Set `role`: take the lock, or follow the pull that has it. `role` is None if the snapshot is already published.

        Raise CacheError if the tier has no room, or if the lock stays locked without a feed to follow.
        """
        deadline_s = time.monotonic() + TAKEOVER_TIMEOUT_S
        self.role = self._follow(deadline_s) if self._tier.read_only else self._take(deadline_s)

    def _take(self, deadline_s: float) -> Fetching | Following | None:
        while True:
            if (following := self._join()) is not None:
                return following
            with self._tier.locked(), ExitStack() as undo:
                new = not self._tier.has(self._digest)
                if new:
                    self._tier.make_room(self._digest, self._manifest)
                self.shared = self.shared or lock_shared(self._folder)
                if self.shared is None:
                    fault = f"{self._folder} was removed while it was opened."
                    raise CacheError(fault, remedy="Try again.")
                flags = os.O_RDWR | os.O_CREAT
                descriptor = os.open(self._folder / "fetching", flags, 0o600)
                undo.callback(os.close, descriptor)
                if try_lock(descriptor, exclusive=True):
                    if self._is_whole():
                        return None
                    (self._folder / "files" / MANIFEST_NAME).unlink(missing_ok=True)
                    if not new:
                        self._tier.make_room(self._digest, self._manifest)
                    role = Fetching(descriptor, Feed(self.shared.descriptor, self._arrival), new)
                    undo.pop_all()
                    return role
                with suppress(ConnectionError, FileNotFoundError):
                    return Following(self.shared.descriptor)
            # The fetch lock is held, but there is no feed, so the holder is ending. Wait for the lock and retry.
            with locked_file(self._folder / "fetching", max(0.0, deadline_s - time.monotonic())):
                pass

    def _join(self) -> Following | None:
        """Follow the process that fetches, if there is one. This does not need the tier's lock."""
        found = (self.shared or lock_shared(self._folder)) if self._tier.fetches(self._digest) else None
        if found is not None:
            with suppress(ConnectionError, FileNotFoundError):
                following = Following(found.descriptor)
                self.shared = found
                return following
        return None

    def _follow(self, deadline_s: float) -> Following | None:
        """Follow the process that fetches, or raise SourceDenied. Return None if the snapshot is published."""
        self.shared = self.shared or lock_shared(self._folder)
        while self.shared is not None:
            # Call `fetches` before `_is_whole`, so as not to miss a process that publishes and ends in between.
            fetches = self._tier.fetches(self._digest)
            if self._is_whole():
                return None
            with suppress(ConnectionError, FileNotFoundError):
                return Following(self.shared.descriptor)
            if not fetches:
                break
            # The feed of the fetching process is closed already, or not open yet. Wait for the end of the fetch, and look again.
            timeout_s = max(0.0, deadline_s - time.monotonic())
            with locked_file(self._folder / "fetching", timeout_s, read_only=True):
                pass
        fault = f"{self._folder} holds no snapshot, and no process fetches one into it."
        raise SourceDenied(fault, remedy="Try again: the next activation fetches what is missing.")

    def _is_whole(self) -> bool:
        return is_whole(self._folder / "files", self._manifest)

    def release(self, error: PilotflameError | None, *, dropped: bool = False) -> None:
        """End fetching or following. `error` and `dropped` are passed to Feed.close."""
        role, self.role = self.role, None
        if isinstance(role, Fetching):
            role.feed.close(error, dropped=dropped)
            os.close(role.descriptor)
        elif isinstance(role, Following):
            role.close()

    def demand(self, first: int, last: int) -> None:
        """If this pull follows another pull, ask the other pull to fetch chunks `first` to `last` next."""
        if isinstance(role := self.role, Following):
            role.demand(first, last)

    def cancel(self) -> None:
        """Stop following. Any thread may call this."""
        if isinstance(role := self.role, Following):
            role.cancel()


Elsewhere = Callable[["Pull"], "Pull"]
"""Makes a pull that continues the given pull in another tier. Raises CacheError if no other tier has room."""


class Pull:
    """One pull. The constructor makes all shards at full size, and raises CacheError if the tier has no room.

    A thread, which `start` starts, brings the bytes of the shards. Meanwhile the caller brings the assets with
    `bring_assets`.
    """

    def __init__(self, fetch: TierFetch) -> None:
        """`fetch` brings the chunks if this pull gets the fetch lock."""
        self.fetch = fetch
        self.tier, self.files, self.arrival = fetch.tier, fetch.files, fetch.arrival
        self.lock = FetchLock(fetch.tier, fetch.digest, fetch.manifest, fetch.arrival)
        self._error: PilotflameError | None = None
        self._after: Pull | None = None
        """The pull that continues this pull in another tier, after this tier became full."""
        self._over = threading.Event()
        try:
            self.lock.take()
        except BaseException as error:
            self.lock.shared = None
            if isinstance(error, OSError):
                raise cannot_write(Path(error.filename or fetch.tier.root), error) from error
            raise
        self.arrival.on_demand(self.lock.demand)

    @property
    def stats(self) -> FetchStats | None:
        """The statistics of the fetch. None before its end, and if this pull did not fetch."""
        return self._after.stats if self._after is not None else self.fetch.stats

    @property
    def at(self) -> Pull:
        """The pull that brings the chunks now: this pull, or a pull that continues it in another tier."""
        return self._after.at if self._after is not None else self

    def start(self, on_published: Callable[[], None], elsewhere: Elsewhere | None = None) -> None:
        """Start the thread that brings the shards. It calls `on_published` when the snapshot is published.

        If the tier becomes full, the thread calls `elsewhere`, and continues with the pull that `elsewhere` returns.
        """
        run, how = self._run, (on_published, elsewhere)
        self._thread = threading.Thread(target=run, args=how, name="snapshot-pull", daemon=True)
        self._thread.start()

    def bring_assets(self, copies: Path | None = None) -> None:
        """Bring the missing assets, from folder `copies` if it has them. Call it once after `start`.

        Raise SourceError or SnapshotCorrupt if an asset cannot be fetched. Then the pull is closed. If the tier
        is full, raise nothing: the pull continues in another tier, which needs the assets again.
        """
        if self.tier.read_only:
            return
        try:
            self.fetch.bring_assets(copies)
        except BaseException:
            self.close()
            raise

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the snapshot is published. Raise the pull's error, or SourceUnavailable after `timeout_s`."""
        if not self._over.wait(timeout_s):
            raise SourceUnavailable(f"The weights did not arrive within {timeout_s:.0f} s.")
        if self._error is not None:
            raise self._error
        if self._after is not None:
            self._after.wait(timeout_s)

    def close(self) -> None:
        """Stop fetching or following. Landed chunks stay in the files, and a follower may fetch the other chunks."""
        self.fetch.cancel()
        self.lock.cancel()
        if self._after is not None:
            self._after.close()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_TIMEOUT_S)
        if self._over.is_set():
            # Unlock the folder here: this object and `arrival` refer to each other until the garbage collector runs.
            self.lock.shared = None

    def _run(self, on_published: Callable[[], None], elsewhere: Elsewhere | None) -> None:
        try:
            while not self._play_role():
                self.lock.take()
        except (PilotflameError, OSError) as error:
            failure = cannot_write(self.files, error) if isinstance(error, OSError) else error
            if (
                isinstance(failure, StorageFull)
                and elsewhere is not None
                and not self.fetch.cancelled.is_set()
            ):
                self._continue_elsewhere(failure, on_published, elsewhere)
            else:
                self._fail(failure)
        except BaseException as error:
            # Prefer the error of the arrival, which says what the source has raised, if the source has failed.
            self._fail(self.arrival.error or self._broken_off(error))
            raise
        else:
            self._over.set()
            on_published()
        finally:
            self.lock.release(None, dropped=True)
            self._over.set()
            if self.fetch.cancelled.is_set():
                self.lock.shared = None

    def _continue_elsewhere(
        self, full: StorageFull, on_published: Callable[[], None], elsewhere: Elsewhere
    ) -> None:
        """Continue with a pull into another tier, because this tier is full. Threads that wait here get the chunks of that pull.

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
        self.lock.release(full)
        # `close` sets the event before it looks at `_after`. So either `close` or this thread closes `after`.
        if self.fetch.cancelled.is_set():
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
        return CacheError(f"The pull of {self.fetch.digest} broke off: {error!r}.", remedy="Try again.")

    def _fail(self, error: PilotflameError) -> None:
        self._error = error
        # If access was denied, let a follower take over the fetch, because it may have other credentials.
        self.lock.release(error, dropped=self.fetch.cancelled.is_set() or isinstance(error, SourceDenied))
        self.arrival.fail(error)

    def _play_role(self) -> bool:
        """Fetch or follow to the end. Return False if the followed process has gone before the end."""
        role = self.lock.role
        # Check this only after taking the role. `close` sets the event before it cancels the role. So either `close` or
        # this check always ends this thread.
        if self.fetch.cancelled.is_set():
            remedy = "Open it again: what has arrived is kept."
            raise CacheError("The snapshot was closed before all of it had arrived.", remedy=remedy)
        if isinstance(role, Following):
            return role.run(self.arrival)
        if isinstance(role, Fetching):
            self.fetch.run(new=role.new)
            self.lock.release(None)
        self.arrival.land_all()
        return True
