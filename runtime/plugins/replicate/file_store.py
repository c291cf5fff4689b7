"""Stores the files that callers upload as inputs of predictions, on the gateway's disk, for a day."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from ....errors import InputTooLarge, UnknownFile
from ...ground.access.keys import ALL
from .upload import ABOUT, CONTENT, HIDDEN, MAX_FILE_BYTES, StoredFile, Upload, reported

MAX_OWNER_BYTES = 4 << 30
MAX_OWNER_FILES = 10_000
KEEP_S = 24 * 3600.0


class Share(NamedTuple):
    """The disk space that a file or an incomplete upload takes from its owner's share."""

    owner: str
    size: int
    created_s: float

    @property
    def expired(self) -> bool:
        return time.time() >= self.created_s + KEEP_S


class FileStore:
    """The folder of uploaded files. Each owner has a share of the space, and does not see the files of other owners.

    All methods except `begin` block. All methods are safe to call from several threads.
    """

    def __init__(self, root: Path, check_disk: Callable[[], None] = lambda: None) -> None:
        """`check_disk` raises StorageFull if the disk has no room for a file."""
        self._root, self.check_disk = root, check_disk
        self._lock = threading.Lock()
        self._loaded = False
        self._stored: dict[str, Share] = {}
        self._pending: dict[str, Share] = {}

    def load(self, owner: str = ALL) -> None:
        """In the first call, find the stored files, and remove incomplete uploads that an earlier gateway has left. `owner` has an
        effect only in `SharedFileStore`.

        Raise StorageFull if the folder cannot be created or read.
        """
        with self._lock, reported():
            if self._loaded:
                return
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            with os.scandir(self._root) as entries:
                folders = [Path(entry.path) for entry in entries]
            for folder in folders:
                if (about := _read(folder)) is not None and not folder.name.startswith(HIDDEN):
                    self._stored[about.id] = Share(about.owner, about.size, about.created_s)
                else:
                    shutil.rmtree(folder, ignore_errors=True)
            self._loaded = True

    def begin(self, owner: str, name: str, most: int = MAX_FILE_BYTES) -> Upload:
        """Return a new upload, and reserve `most` bytes of the owner's share for it. Call `load` before.

        The caller must pass the upload to `discard` at the end, also after `finish`. This method does not touch the disk, so it does not
        block. Raise InputTooLarge if the owner's share has too little space left.
        """
        file_id, most = secrets.token_hex(16), min(most, MAX_FILE_BYTES)
        with self._lock:
            shares = (*self._stored.values(), *self._pending.values())
            sizes = [share.size for share in shares if share.owner == owner and not share.expired]
            if len(sizes) >= MAX_OWNER_FILES or sum(sizes) + most > MAX_OWNER_BYTES:
                limits = f"{MAX_OWNER_FILES} files and {MAX_OWNER_BYTES >> 20} MiB"
                message = f"Your uploaded files may be {limits} together, and there is no room for this one."
                raise InputTooLarge(message, remedy="Delete files that are not needed, or send data URLs.")
            self._pending[file_id] = Share(owner, most, time.time())
        return Upload(self._root, file_id, owner, name, most)

    def finish(self, upload: Upload, content_type: str, metadata: dict[str, Any]) -> StoredFile:
        """Store an upload and return its record. Raise StorageFull if a write fails."""
        about = upload.publish(content_type, metadata)
        with self._lock:
            self._pending.pop(about.id, None)
            self._stored[about.id] = Share(about.owner, about.size, about.created_s)
        return about

    def discard(self, upload: Upload) -> None:
        """End an upload. Remove the received part of the file, unless the file is stored."""
        upload.close()
        with self._lock:
            self._pending.pop(upload.file_id, None)

    def get(self, file_id: str, owner: str) -> tuple[StoredFile, Path]:
        """Return a file and the path of its content. `owner` may be ALL for any owner. Raise UnknownFile if there is
        none.
        """
        self.load()
        share, folder = self._stored.get(file_id), self._root / file_id
        if share is not None and owner in (ALL, share.owner) and not share.expired:
            about, path = _read(folder), next(folder.glob(f"{CONTENT}*"), None)
            if about is not None and path is not None:
                return about, path
        raise unknown_file(file_id)

    def list(self, owner: str) -> list[StoredFile]:
        """Return an owner's files, the newest first."""
        mine = self._find(lambda share: owner in (ALL, share.owner) and not share.expired)
        found = [about for file_id in mine if (about := _read(self._root / file_id)) is not None]
        return sorted(found, key=lambda file: file.created_s, reverse=True)

    def delete(self, file_id: str, owner: str) -> None:
        """Delete a file. Raise UnknownFile if the owner has no such file."""
        self.get(file_id, owner)
        if not self._remove(file_id):
            raise unknown_file(file_id)

    def sweep(self) -> None:
        """Remove all expired files."""
        for file_id in self._find(lambda share: share.expired):
            self._remove(file_id)

    def _find(self, wanted: Callable[[Share], bool]) -> tuple[str, ...]:
        self.load()
        with self._lock:
            return tuple(file_id for file_id, share in self._stored.items() if wanted(share))

    def _remove(self, file_id: str) -> bool:
        """Remove a file. Return False if it has already been removed."""
        with self._lock:
            if self._stored.pop(file_id, None) is None:
                return False
        self._remove_folder(file_id)
        return True

    def _remove_folder(self, file_id: str) -> None:
        # Rename the folder first. If the gateway crashes in the removal, `load` must not find a file without content.
        hidden = self._root / f"{HIDDEN}{file_id}"
        with contextlib.suppress(OSError):
            (self._root / file_id).rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def expires_s(file: StoredFile) -> float:
    return file.created_s + KEEP_S


def unknown_file(file_id: str) -> UnknownFile:
    return UnknownFile(f"There is no file {file_id[:128]!r}.", remedy="Files are kept for 24 hours.")


def _read(folder: Path) -> StoredFile | None:
    """Return the record of a stored file, or None if it is unreadable."""
    try:
        about = StoredFile.model_validate_json((folder / ABOUT).read_bytes())
    except (OSError, ValidationError):
        return None
    return about if folder.name == about.id else None
