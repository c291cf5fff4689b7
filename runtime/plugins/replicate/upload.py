"""Writes a file that a caller uploads. Until the file is complete, readers of the store cannot see it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import IO, Any

from pydantic import BaseModel

from ....errors import InputTooLarge, StorageFull
from ....snapshot.publish import publish, sync

MAX_FILE_BYTES = 100 << 20
MAX_SUFFIX_CHARS = 20
ABOUT, CONTENT = "about.json", "content"
HIDDEN = "."
"""The name of an incomplete file's folder begins with this prefix."""


class StoredFile(BaseModel, frozen=True):
    """The record of a stored file, without its content. `owner` is the id of the API key that uploaded it."""

    id: str
    owner: str
    name: str
    content_type: str
    size: int
    sha256: str
    md5: str
    metadata: dict[str, Any]
    created_s: float


class Upload:
    """A file that is being uploaded. Its methods block, and are safe to call from several threads.

    A caller may disconnect while a thread still writes. So `close` makes all later writes raise StorageFull.
    """

    def __init__(self, root: Path, file_id: str, owner: str, name: str, most: int) -> None:
        """The file may have at most `most` bytes. Nothing is written before the first block."""
        self.file_id = file_id
        self._root, self._owner, self._name, self._most = root, owner, name, most
        self._folder = root / f"{HIDDEN}{file_id}"
        self._size = 0
        self._sha256, self._md5 = hashlib.sha256(), hashlib.md5(usedforsecurity=False)
        self._target: IO[bytes] | None = None
        self._closed = False
        self._lock = threading.Lock()

    def write(self, block: bytes) -> None:
        """Append a block. Raise InputTooLarge if the file becomes too large, StorageFull if the write fails."""
        with self._lock, reported():
            target = self._opened()
            self._size += len(block)
            if self._size > self._most:
                remedy = "Send the address of the file as the input instead."
                raise InputTooLarge(f"The file is larger than {self._most} bytes.", remedy=remedy)
            for digest in (self._sha256, self._md5):
                digest.update(block)
            target.write(block)

    def publish(self, content_type: str, metadata: dict[str, Any]) -> StoredFile:
        """Complete the file, sync it to the disk, and return its record. Raise StorageFull if a write fails."""
        about = StoredFile(
            id=self.file_id, owner=self._owner, name=self._name, content_type=content_type, size=self._size,
            sha256=self._sha256.hexdigest(), md5=self._md5.hexdigest(), metadata=metadata, created_s=time.time(),
        )  # fmt: skip
        with self._lock, reported():
            with self._opened() as target:
                target.flush()
                os.fsync(target.fileno())
            with publish(self._folder / ABOUT, 0o600) as stream:
                stream.write(about.model_dump_json().encode())
            self._folder.rename(self._root / self.file_id)
            sync(self._root)
        return about

    def close(self) -> None:
        """Remove the written part of the file, unless the file was published."""
        with self._lock:
            self._closed = True
            if self._target is not None:
                # `write` and `publish` already report a full disk.
                with contextlib.suppress(OSError):
                    self._target.close()
                shutil.rmtree(self._folder, ignore_errors=True)

    def _opened(self) -> IO[bytes]:
        if self._closed:
            raise StorageFull("The upload was given up.")
        if self._target is None:
            self._folder.mkdir(mode=0o700)
            suffix = PurePath(self._name).suffix[:MAX_SUFFIX_CHARS]
            self._target = (self._folder / f"{CONTENT}{suffix}").open("wb")
        return self._target


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Turn an OSError of the block into StorageFull, whose message names no path."""
    try:
        yield
    except OSError as error:
        # Callers must not see paths of the state folder.
        message = f"The gateway cannot store the file: {error.strerror or type(error).__name__}."
        raise StorageFull(message, remedy="Send data URLs, or free space on the gateway's disk.") from error
