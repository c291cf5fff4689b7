"""A pull: one snapshot on its way into one tier, as one opener sees it. It fetches, or it follows who does.

Whoever gets the fetch lock fetches; the kernel lets go of it however its holder ends, and then a follower gets it and goes
on from what is in the files. Openers in one process are no different from openers in two.
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
from ..fetching.fetch import FetchStats, fetch
from ..fetching.target import ShardTarget
from ..format.manifest import MANIFEST_NAME, Manifest
from ..publish import sync
from ..sources.source import Source
from .assets import bring_assets
from .flock import Hold, hold, lock, try_lock
from .follow import Feed, Following
from .memory import has_huge_pages
from .resume import land_what_is_there
from .stored import file_sizes, is_whole
from .tier import Tier

TAKEOVER_TIMEOUT_S = 30.0
"""How long a process that is ending may keep the fetch lock after it stopped to tell."""
CLOSE_TIMEOUT_S = 10.0
_CLOSED = "The snapshot was closed before all of it had arrived."
_CLOSED_REMEDY = "Open it again: what has arrived is kept."


@dataclass(frozen=True, slots=True)
class _Fetching:
    """This pull holds the fetch lock. `new`: its files were made just now, nothing of the snapshot is in them."""

    descriptor: int
    feed: Feed
    new: bool


class Pull:
    """Joined once it is constructed: files are there at full size, assets with their bytes; shards come in a thread.

    Raises CacheError or OSError if the tier cannot take it, SourceError or SnapshotCorrupt if an asset cannot be had.
    """

    def __init__(
        self, tier: Tier, digest: str, manifest: Manifest, source: Source, *, learned: Path | None = None
    ) -> None:
        self.tier = tier
        self.files = tier.folder(digest) / "files"
        self.arrival = Arrival(manifest)
        self.stats: FetchStats | None = None
        """Of the fetch, if it was this pull that fetched."""
        self._digest, self._manifest, self._source, self._learned = digest, manifest, source, learned
        self._error: PilotflameError | None = None
        self._hold: Hold | None = None
        self._cancelled = threading.Event()
        self._over = threading.Event()
        self._turn: _Fetching | Following | None = self._join()
        try:
            bring_assets(manifest, source, self.files)
        except BaseException:
            self._end_turn(None, dropped=True)
            raise
        self.arrival.on_demand(self._demand)
        self._then: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._run, name="snapshot-pull", daemon=True)

    def start(self, then: Callable[[], None] | None = None) -> None:
        """Let the shards come; `then` is called in the thread once all is published."""
        self._then = then
        self._thread.start()

    @property
    def hold(self) -> Hold:
        """What protects the files from eviction."""
        if self._hold is None:
            raise CacheError(_CLOSED, remedy=_CLOSED_REMEDY)
        return self._hold

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Until all is published; raises what prevented it, or SourceUnavailable in time."""
        if not self._over.wait(timeout_s):
            raise SourceUnavailable(f"The weights did not arrive within {timeout_s:.0f} s.")
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Stop fetching or following. What has landed stays for the next one; who follows goes on from there."""
        self._cancelled.set()
        turn = self._turn
        if isinstance(turn, Following):
            turn.cancel()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_TIMEOUT_S)
        if self._over.is_set():
            # Said aloud, since listeners and arrival refer to each other: collecting that may take its time.
            self._hold = None

    # -- whose turn it is

    def _join(self) -> _Fetching | Following | None:
        """Take the fetch lock, or follow who has it; None if all is published by now."""
        deadline_s = time.monotonic() + TAKEOVER_TIMEOUT_S
        while True:
            with self.tier.locked(), ExitStack() as undo:
                folder = self.tier.folder(self._digest)
                new = not folder.is_dir() and self.tier.make_room(self._digest, self._manifest)
                self._hold = self._hold or self._held(folder)
                descriptor = os.open(folder / "fetching", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                undo.callback(os.close, descriptor)
                if try_lock(descriptor, exclusive=True):
                    turn = self._start_fetching(descriptor, new=new)
                    if turn is not None:
                        undo.pop_all()
                    return turn
                with suppress(ConnectionError, FileNotFoundError):
                    return Following(self._hold.descriptor)
            self._wait_for_lock(folder / "fetching", deadline_s - time.monotonic())

    def _held(self, folder: Path) -> Hold:
        found = hold(folder)
        if found is None:
            raise CacheError(f"{folder} went away while it was opened.", remedy="Try again.")
        return found

    def _start_fetching(self, descriptor: int, *, new: bool) -> _Fetching | None:
        if is_whole(self.files, self._manifest):
            return None
        (self.files / MANIFEST_NAME).unlink(missing_ok=True)
        if not new:
            self.tier.make_room(self._digest, self._manifest)
        return _Fetching(descriptor, Feed(self.hold.descriptor, self.arrival), new)

    def _wait_for_lock(self, path: Path, timeout_s: float) -> None:
        """Nobody tells, but somebody has the lock: a process that is just ending."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            lock(descriptor, path, timeout_s=max(0.0, timeout_s))
        finally:
            os.close(descriptor)

    def _end_turn(self, error: PilotflameError | None, *, dropped: bool = False) -> None:
        turn, self._turn = self._turn, None
        if isinstance(turn, _Fetching):
            turn.feed.close(error, dropped=dropped)
            os.close(turn.descriptor)
        elif isinstance(turn, Following):
            turn.close()

    def _demand(self, first: int, last: int) -> None:
        turn = self._turn
        if isinstance(turn, Following):
            turn.demand(first, last)

    # -- the thread

    def _run(self) -> None:
        try:
            while not self._step():
                self._turn = self._join()
        except PilotflameError as error:
            self._fail(error)
        except OSError as error:
            self._fail(
                CacheError(f"{self.files}: {error.strerror}.", remedy="Check the disk and its folder.")
            )
        except BaseException as error:
            self._fail(CacheError(f"The pull of {self._digest} broke off: {error!r}.", remedy="Try again."))
            raise
        else:
            self._over.set()
            if self._then is not None:
                self._then()
        finally:
            self._end_turn(None, dropped=True)
            self._over.set()
            if self.cancelled:
                self._hold = None

    def _fail(self, error: PilotflameError) -> None:
        self._error = error
        # Who follows may have better credentials than ours.
        self._end_turn(error, dropped=self.cancelled or isinstance(error, SourceDenied))
        self.arrival.fail(error)

    def _step(self) -> bool:
        """Fetch or follow until that ends; whether all is published."""
        turn = self._turn
        if self.cancelled:  # asked after the turn was taken, as `close` cancels the turn after saying so
            raise CacheError(_CLOSED, remedy=_CLOSED_REMEDY)
        if isinstance(turn, Following):
            return turn.run(self.arrival)
        if isinstance(turn, _Fetching):
            self._fetch(new=turn.new)
            self._publish()
            self._end_turn(None)
        self.arrival.land_all()
        return True

    def _fetch(self, *, new: bool) -> None:
        with ExitStack() as opened:
            huge = self.tier.kind == "tmpfs" and has_huge_pages(self.files)
            targets = [self._target(shard.name, opened, huge=huge) for shard in self._manifest.shards]
            if not new:
                land_what_is_there(self._manifest, targets, self.arrival, self._cancelled)
            self.stats = fetch(
                self._manifest,
                self._source,
                targets,
                self.arrival,
                cancelled=self._cancelled,
                learned=self._learned,
            )
        if not self.arrival.complete:
            raise CacheError(_CLOSED, remedy=_CLOSED_REMEDY)

    def _target(self, name: str, opened: ExitStack, *, huge: bool) -> ShardTarget:
        descriptor = os.open(self.files / name, os.O_RDWR | os.O_CLOEXEC)
        opened.callback(os.close, descriptor)
        memory = self.tier.spares.touched(descriptor) if self.tier.kind == "tmpfs" else None
        fresh = memory is None and huge
        if fresh and (size_bytes := os.fstat(descriptor).st_size):
            memory = memoryview(mmap(descriptor, size_bytes))
        if memory is not None:
            opened.callback(_unmap, memory)
        return ShardTarget(str(self.files / name), descriptor, memory, fresh=fresh)

    def _publish(self) -> None:
        """All chunks are verified: say so, for good. On a disk, once the disk has them."""
        for rest in self.files.glob(f".{MANIFEST_NAME}.*"):
            rest.unlink()  # of one that was killed here
        if self.tier.kind == "disk":
            paths = [self.files / name for name in file_sizes(self._manifest)]
            folders = {
                folder for path in paths for folder in path.parents if folder.is_relative_to(self.files)
            }
            for path in (*paths, *folders, self.files.parent, self.files.parent.parent):
                sync(path)
        self._manifest.write(self.files / MANIFEST_NAME)


def _unmap(memory: memoryview) -> None:
    """At once, and not when somebody who knows of the fetch is forgotten: until then the file is in use."""
    mapped = memory.obj
    with suppress(BufferError):  # the traceback of a failed thread still has a slice of it
        memory.release()
        if isinstance(mapped, mmap):
            mapped.close()
