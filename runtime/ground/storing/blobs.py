"""Defines `Blobs`, a store of bytes that are too large for rows, and `FileBlobs`, the store of a single gateway: files in a folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

from ....errors import JobStoreFailed
from ....snapshot.publish import publish

LOG = logging.getLogger(__name__)
WRITE_BYTES = 4 << 20
"""`put` writes a file in parts of this size, and waits for the disk after each part. So a commit of a database on this disk does not wait for
the whole file.
"""


class Blobs(Protocol):
    """Bytes by name. A blob never changes. All methods block, and are safe to call from several threads.

    `put` and `get` raise JobStoreFailed if the store cannot be written or read. If a blob cannot be deleted, a log line says so, and `keep` tries again.
    """

    def put(self, name: str, data: bytes) -> None:
        """Store a new blob durably."""

    def get(self, name: str) -> bytes | None:
        """Return a blob, or None if there is none with this name."""

    def delete(self, names: Collection[str]) -> None:
        """Delete the blobs that exist."""

    def keep(self, names: Collection[str]) -> None:
        """Delete the blobs that a crash has left. Keep `names`, and new blobs of other gateways, whose rows may not be stored yet."""

    def close(self) -> None:
        """Close connections. No other call may run at the same time, or later."""


class FileBlobs:
    """Files in a folder of one gateway."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, name: str, data: bytes) -> None:
        path = self._folder / name
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            with publish(path, 0o600) as stream:
                for start in range(0, len(data), WRITE_BYTES):
                    stream.write(memoryview(data)[start : start + WRITE_BYTES])
                    stream.flush()
                    os.fdatasync(stream.fileno())
        except OSError as error:
            raise JobStoreFailed(
                f"{path} could not be written: {error.strerror}.",
                remedy="Check whether the disk of the state folder is full.",
            ) from error

    def get(self, name: str) -> bytes | None:
        path = self._folder / name
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise JobStoreFailed(
                f"{path} could not be read: {error.strerror}.", remedy="Check the disk."
            ) from error

    def delete(self, names: Collection[str]) -> None:
        for name in names:
            try:
                (self._folder / name).unlink(missing_ok=True)
            except OSError as error:
                LOG.warning("%s could not be deleted: %s", self._folder / name, error.strerror)

    def keep(self, names: Collection[str]) -> None:
        kept = frozenset(names)
        if self._folder.is_dir():
            self.delete([path.name for path in self._folder.iterdir() if path.name not in kept])

    def close(self) -> None:
        """Do nothing: no file is open."""
