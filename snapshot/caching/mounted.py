"""Lets a container use one snapshot of the node's cache, and nothing else of it.

The folder of the snapshot in each tier is mounted into the container, read-only and before there are any files
in it. It is kept in place until the container has ended, also if the snapshot is evicted and fetched again.
The processes in the container follow the fetch, and their locks on the folder protect it from eviction. They
can neither fetch nor evict.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar

from ...errors import CacheError
from .flock import LOCK_TIMEOUT_S, try_lock
from .stored import MOUNTED
from .tier import Tier


class KeptFolders:
    """The folders of one snapshot, one in each tier, kept in place until `close`. `paths` has them."""

    def __init__(self, tiers: Sequence[Tier], digest: str) -> None:
        """Make the folders that are absent. Raises OSError if one cannot be made, and CacheError."""
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
        """Let the folders go: those without files are removed. May be called twice."""
        kept, self._kept = self._kept, []
        for tier, descriptor in kept:
            os.close(descriptor)
            folder = tier.folder(self._digest)
            # If the lock of the tier takes too long to get, a later sweep removes the folder.
            if folder.is_dir():
                with suppress(OSError, CacheError), tier.locked():
                    tier.remove_empty(folder)


def _keep(tier: Tier, digest: str) -> int:
    """Return the descriptor that keeps the folder of a snapshot in place, until it is closed."""
    with tier.locked():
        folder = tier.folder(digest)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder / MOUNTED, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try_lock(descriptor, exclusive=False)
        return descriptor


class MountedFolder(Tier):
    """A tier that holds one snapshot, in folder `root`, which cannot be written to."""

    read_only: ClassVar[bool] = True

    def __init__(self, root: Path) -> None:
        super().__init__(root, 0)

    def folder(self, digest: str) -> Path:
        del digest
        return self.root

    @contextmanager
    def locked(self, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
        """Do nothing: this process changes nothing in the tier."""
        del timeout_s
        yield
