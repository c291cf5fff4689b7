"""Keeps snapshots that a function computes itself, such as the stored beginnings of prompts. The first worker computes them.

    <folder>/lock              the file that a worker locks while it computes a snapshot
    <folder>/<key>/            a complete snapshot with its manifest, which later workers map
    <folder>/<key>.verified    the zygote that last verified these files, and the versions of the files
    <folder>/.<key>.<random>/  a snapshot that is being written, or that a killed worker has left incomplete

A snapshot is written and synced under a hidden name, and renamed when it is complete. The next worker that computes a snapshot removes what
killed workers have left. The first worker of each zygote reads all bytes of a snapshot and compares the digests. If the snapshot is
damaged, the worker computes it again.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from ..errors import CacheError, SnapshotCorrupt, SnapshotError
from .caching.flock import locked_file
from .format.compared import file_version
from .format.create import create
from .format.manifest import MANIFEST_NAME, Manifest
from .handle import Snapshot
from .publish import cannot_write, publish_folder, sync
from .sources.folder import FolderSource

# How long a worker waits for another worker that computes the same snapshot.
COMPUTE_TIMEOUT_S = 900.0
_LOCK = "lock"


class ComputedSnapshots:
    """The computed snapshots of one function on this node. The function's workers call it, so it has only the function's rights."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        """If the snapshots in `folder` have more than `limit_bytes` together, the least recently used snapshots are removed."""
        self.folder, self.limit_bytes = folder, limit_bytes
        # All workers of a zygote have the same token, because the zygote makes this object before it forks them.
        self._zygote = secrets.token_hex(8)
        self._opened: list[Snapshot] = []

    def open(self, key: str, compute: Callable[[Path], None]) -> Snapshot:
        """Return the snapshot with this key, mapped. If there is none, call `compute`, which writes its files to the given folder.

        Block while another worker computes. Raise what `compute` raises, and SnapshotError if the folder cannot be written or
        stays locked, or if `compute` has written no snapshot.
        """
        found = self._open(self.folder / key, compute)
        self._opened.append(found)
        return found

    def check(self) -> None:
        """Raise SnapshotChanged if the bytes of an open snapshot differ from its manifest. The next worker that opens it computes it again."""
        for one in self._opened:
            one.check()

    def _open(self, place: Path, compute: Callable[[Path], None]) -> Snapshot:
        if (found := self._mapped(place)) is not None:
            return found
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with locked_file(self.folder / _LOCK, COMPUTE_TIMEOUT_S):
                # Look again: another worker may have computed the snapshot while this worker waited for the lock.
                if (found := self._mapped(place)) is None:
                    found = self._computed(place, compute)
        except _ComputationFailed as failed:
            raise failed.error from failed.error.__cause__
        except (OSError, CacheError) as error:
            fault = cannot_write(self.folder, error) if isinstance(error, OSError) else error
            # Do not raise a CacheError, which would mean that the function's weights are incomplete.
            raise SnapshotError(fault.message, remedy=fault.remedy) from error
        return found

    def _computed(self, place: Path, compute: Callable[[Path], None]) -> Snapshot:
        """Compute the snapshot, and return it mapped. The caller holds the lock, so hidden folders are leftovers."""
        for left in (place, *self.folder.glob(".*/")):
            shutil.rmtree(left, ignore_errors=True)
        with publish_folder(place) as made:
            try:
                compute(made)
            except (OSError, CacheError) as error:
                raise _ComputationFailed(error) from error
            create(made).write(made / MANIFEST_NAME)
            for file in made.iterdir():
                sync(file)
        self._remove_others(place)
        return _map(place, Manifest.read(place), {})

    def _mapped(self, place: Path) -> Snapshot | None:
        """Return a snapshot, mapped; None if it is absent or damaged."""
        try:
            manifest = Manifest.read(place)
            # Get the versions before the verification. If a file is written to meanwhile, its version differs when it is
            # mapped, and `open` compares its bytes again.
            versions = {one.name: file_version((place / one.name).stat()) for one in manifest.shards}
            self._verify(place, manifest)
            return _map(place, manifest, versions)
        except (OSError, SnapshotError):
            return None

    def _verify(self, place: Path, manifest: Manifest) -> None:
        """Raise SnapshotError if a byte differs from the digests. Skip files that a worker of this zygote has verified."""
        source, mark = FolderSource(place), place.with_name(f"{place.name}.verified")
        shards, assets = [one.name for one in manifest.shards], [one.name for one in manifest.assets]
        versions = [source.stat(name).version for name in (MANIFEST_NAME, *shards, *assets)]
        facts = " ".join((self._zygote, *versions)).encode()
        if mark.is_file() and mark.read_bytes() == facts:
            return
        # Compare the digests of whole manifests, because the stored manifest may be damaged too.
        if create(place).digest != manifest.digest:
            raise SnapshotCorrupt(f"{place} is damaged.")
        with contextlib.suppress(OSError):
            mark.write_bytes(facts)

    def _remove_others(self, place: Path) -> None:
        """Remove the least recently used snapshots, so that the others fit into the limit together with the new snapshot."""
        others = [path for path in self.folder.iterdir() if path.is_dir() and path != place]
        left_bytes = self.limit_bytes - _bytes(place)
        for other in sorted(others, key=_used_s, reverse=True):
            left_bytes -= _bytes(other)
            if left_bytes < 0:
                # A worker that has mapped this snapshot keeps its bytes, so the files may be removed at any time.
                shutil.rmtree(other, ignore_errors=True)
                other.with_name(f"{other.name}.verified").unlink(missing_ok=True)


class _ComputationFailed(Exception):
    """Wraps an error of `compute`, so that `_open` does not take it for an error of the folder."""

    def __init__(self, error: OSError | CacheError) -> None:
        super().__init__(str(error))
        self.error = error


def _map(place: Path, manifest: Manifest, versions: dict[str, str]) -> Snapshot:
    found = Snapshot(place, manifest, versions=versions)
    found.open()
    # Record the time of use, by which `_remove_others` finds the least recently used snapshots.
    os.utime(place)
    return found


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _used_s(folder: Path) -> float:
    return folder.stat().st_mtime
