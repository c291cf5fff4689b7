"""Keeps snapshots that a function computes itself, such as the stored beginnings of prompts. The first worker computes them.

    <folder>/lock              held by the worker that computes
    <folder>/<key>/            a complete snapshot with its manifest, which later workers map
    <folder>/<key>.verified    which zygote has verified these files last, and their versions
    <folder>/.<key>.<random>/  one that is being written, or that a killed worker has left

A snapshot is written and synced under a hidden name, and renamed when it is complete. The next worker that computes removes what
killed workers have left. The first worker of each zygote reads all bytes and compares the digests. A damaged snapshot is computed again.
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
    """The computed snapshots of one function on this node. Its workers use it with the rights of the function."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        """`limit_bytes` is the size of all snapshots in `folder`, beyond which the older ones are removed."""
        self.folder, self.limit_bytes = folder, limit_bytes
        # A zygote makes this object, and its workers inherit it.
        self._zygote = secrets.token_hex(8)
        self._opened: list[Snapshot] = []

    def open(self, key: str, compute: Callable[[Path], None]) -> Snapshot:
        """Return the snapshot with this key, mapped. If it is not there, `compute` writes its files into the folder that it gets.

        Blocks while another worker computes. Raises what `compute` raises, and SnapshotError if the folder cannot be written or
        stays locked, or if `compute` has written no snapshot.
        """
        found = self._open(self.folder / key, compute)
        self._opened.append(found)
        return found

    def check(self) -> None:
        """Raise SnapshotChanged if a file of an open snapshot was written to. The next worker computes that snapshot again."""
        for one in self._opened:
            one.check()

    def _open(self, place: Path, compute: Callable[[Path], None]) -> Snapshot:
        if (found := self._mapped(place)) is not None:
            return found
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with locked_file(self.folder / _LOCK, COMPUTE_TIMEOUT_S):
                # Another worker may have computed it meanwhile.
                if (found := self._mapped(place)) is None:
                    found = self._computed(place, compute)
        except _ComputationFailed as failed:
            raise failed.error from failed.error.__cause__
        except (OSError, CacheError) as error:
            fault = cannot_write(self.folder, error) if isinstance(error, OSError) else error
            # A CacheError would say that the function's weights are not whole.
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
            # A file that is written to while it is verified has another version when it is mapped.
            versions = {one.name: file_version((place / one.name).stat()) for one in manifest.shards}
            self._verify(place, manifest)
            return _map(place, manifest, versions)
        except (OSError, SnapshotError):
            return None

    def _verify(self, place: Path, manifest: Manifest) -> None:
        """Raise SnapshotError if a byte differs. Read nothing if a worker of this zygote has verified the present files."""
        source, mark = FolderSource(place), place.with_name(f"{place.name}.verified")
        shards, assets = [one.name for one in manifest.shards], [one.name for one in manifest.assets]
        versions = [source.stat(name).version for name in (MANIFEST_NAME, *shards, *assets)]
        facts = " ".join((self._zygote, *versions)).encode()
        if mark.is_file() and mark.read_bytes() == facts:
            return
        # The digest of a new manifest also finds damage of the manifest.
        if create(place).digest != manifest.digest:
            raise SnapshotCorrupt(f"{place} is damaged.")
        with contextlib.suppress(OSError):
            mark.write_bytes(facts)

    def _remove_others(self, place: Path) -> None:
        """Remove the snapshots that were used least recently and do not fit into the limit."""
        others = [path for path in self.folder.iterdir() if path.is_dir() and path != place]
        left_bytes = self.limit_bytes - _bytes(place)
        for other in sorted(others, key=_used_s, reverse=True):
            left_bytes -= _bytes(other)
            if left_bytes < 0:
                # A worker that has mapped it keeps its bytes.
                shutil.rmtree(other, ignore_errors=True)
                other.with_name(f"{other.name}.verified").unlink(missing_ok=True)


class _ComputationFailed(Exception):
    """Carries an error of `compute` past the handlers of errors of the folder."""

    def __init__(self, error: OSError | CacheError) -> None:
        super().__init__(str(error))
        self.error = error


def _map(place: Path, manifest: Manifest, versions: dict[str, str]) -> Snapshot:
    found = Snapshot(place, manifest, versions=versions)
    found.open()
    # The time of the folder says when it was used last.
    os.utime(place)
    return found


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _used_s(folder: Path) -> float:
    return folder.stat().st_mtime
