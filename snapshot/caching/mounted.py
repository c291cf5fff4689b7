"""Lets a container use one snapshot of the node's cache, and no other snapshot.

The folder of the snapshot in each tier is mounted into the container, read-only, before there are any files in it. The
folder is kept in place until the container has ended, also if the snapshot is evicted and fetched again. The processes
in the container follow the fetch, and their locks on the folder protect it from eviction. They can neither fetch nor
evict. A handler can read the files at any time, so the files must never hold another snapshot's bytes. So no spares
are used for these files while the folder is mounted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar

from ...errors import CacheError
from .flock import LOCK_TIMEOUT_S, locked_file, try_lock
from .stored import MOUNTED, REUSED
from .tier import Tier

REUSED_TIMEOUT_S = 300.0
"""How long to wait for the end of a fetch that overwrites another snapshot's bytes in the folder."""


class KeptFolders:
    """The folders of one snapshot, one in each tier, kept in place until `close`. `paths` has them."""

    def __init__(self, tiers: Sequence[Tier], digest: str) -> None:
        """Make the folders that are absent. Raise OSError if a folder cannot be made, and CacheError if a folder or a lock stays in use."""
        self._digest = digest
        self._kept: list[tuple[Tier, int]] = []
        try:
            for tier in tiers:
                self._kept.append((tier, _keep(tier, digest)))
        except BaseException:
            self.close()
            raise

    @property
    def paths(self) -> list[Path]:
        return [tier.folder(self._digest) for tier, _ in self._kept]

    def close(self) -> None:
        """Stop keeping the folders, and remove the folders without files. May be called twice."""
        kept, self._kept = self._kept, []
        for tier, descriptor in kept:
            os.close(descriptor)
            folder = tier.folder(self._digest)
            # If this process does not get the tier's lock in time, a later sweep removes the folder.
            if folder.is_dir():
                with suppress(OSError, CacheError), tier.locked():
                    tier.remove_empty(folder)


def _keep(tier: Tier, digest: str) -> int:
    """Return a descriptor that keeps the folder of a snapshot in place while the descriptor is open."""
    deadline_s = time.monotonic() + REUSED_TIMEOUT_S
    while True:
        with tier.locked():
            if _holds_only_its_own(tier, digest):
                return _lock_mounted(tier.folder(digest))
        # Wait for the lock of the fetch, which is released at the end of the fetch in any case.
        with (
            suppress(FileNotFoundError),
            locked_file(
                tier.folder(digest) / "fetching", max(0.0, deadline_s - time.monotonic()), read_only=True
            ),
        ):
            pass


def _holds_only_its_own(tier: Tier, digest: str) -> bool:
    """Return True if a snapshot's folder holds no bytes of another snapshot, and False if a fetch must end first.

    Remove the files if a fetch left them incomplete and no process continues the fetch. Raise CacheError if these files
    are in use.
    """
    if not (tier.folder(digest) / REUSED).exists() or tier.discard_unused(digest):
        return True
    if tier.fetches(digest):
        return False
    fault = f"Snapshot {digest} in {tier.root} is incomplete and in use, and holds bytes of another one."
    raise CacheError(fault, remedy="Try again, or stop the workers that have it mapped.")


def _lock_mounted(folder: Path) -> int:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(folder / MOUNTED, os.O_RDWR | os.O_CREAT, 0o600)
    try_lock(descriptor, exclusive=False)
    return descriptor


class FollowedTier(Tier):
    """A tier into which another process fetches. This process only locks the snapshots that it uses."""

    read_only: ClassVar[bool] = True

    def __init__(self, root: Path) -> None:
        super().__init__(root, 0)

    @contextmanager
    def locked(self, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
        """Do nothing: this process changes nothing in the tier."""
        del timeout_s
        yield


class MountedFolder(FollowedTier):
    """A tier that holds one snapshot, in folder `root`, which cannot be written to."""

    def folder(self, digest: str) -> Path:
        del digest
        return self.root
