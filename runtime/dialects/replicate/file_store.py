"""Stores the files that callers upload as inputs of predictions, on the gateway's disk, for a day."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import IO, Any

from pydantic import BaseModel, ValidationError

from ....errors import InputTooLarge, UnknownFile
from ...jobs.job import ALL

MAX_FILE_BYTES = 100 << 20
MAX_TOTAL_BYTES = 4 << 30
MAX_FILES = 10_000
KEEP_S = 24 * 3600.0
MAX_SUFFIX_CHARS = 20
_ABOUT, _CONTENT = "about.json", "content"
_ID = re.compile(r"[0-9a-f]{32}")


class StoredFile(BaseModel, frozen=True):
    """What is stored of a file beside its content. `owner` is the id of the API key that uploaded it."""

    id: str
    owner: str
    name: str
    content_type: str
    size: int
    sha256: str
    md5: str
    metadata: dict[str, Any]
    created_s: float

    @property
    def expires_s(self) -> float:
        return self.created_s + KEEP_S


class Upload:
    """A file that is being uploaded. Its methods block."""

    def __init__(self, folder: Path, suffix: str) -> None:
        self.folder = folder
        self.size = 0
        self.sha256, self.md5 = hashlib.sha256(), hashlib.md5(usedforsecurity=False)
        self._target: IO[bytes] = (folder / f"{_CONTENT}{suffix}").open("wb")

    def write(self, block: bytes) -> None:
        """Append a block. Raises InputTooLarge if the file becomes larger than MAX_FILE_BYTES."""
        self.size += len(block)
        if self.size > MAX_FILE_BYTES:
            raise too_large()
        for part in (self.sha256, self.md5):
            part.update(block)
        self._target.write(block)

    def close(self) -> None:
        self._target.close()


class FileStore:
    """The folder of uploaded files. Its methods block. What others uploaded is as if it did not exist."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def begin(self, name: str) -> Upload:
        """Return a new upload, which `finish` or `discard` must end.

        Raises InputTooLarge if there are too many files. Removes expired files first.
        """
        self._root.mkdir(mode=0o700, exist_ok=True)
        files = list(self._files())
        if len(files) >= MAX_FILES or sum(file.size for file in files) > MAX_TOTAL_BYTES:
            message = f"The gateway holds {len(files)} uploaded files, which are all that it may."
            raise InputTooLarge(message, remedy="Delete files that are not needed, or send data URLs.")
        folder = self._root / f".{secrets.token_hex(16)}"
        folder.mkdir(mode=0o700)
        return Upload(folder, PurePath(name).suffix[:MAX_SUFFIX_CHARS])

    def discard(self, upload: Upload) -> None:
        """Remove what has arrived of an upload, unless it is stored."""
        upload.close()
        shutil.rmtree(upload.folder, ignore_errors=True)

    def finish(self, upload: Upload, owner: str, name: str, content_type: str, metadata: dict[str, Any]) -> StoredFile:  # fmt: skip
        """Store an upload and return what is stored of it."""
        upload.close()
        about = StoredFile(
            id=upload.folder.name.removeprefix("."), owner=owner, name=name, content_type=content_type,
            size=upload.size, sha256=upload.sha256.hexdigest(), md5=upload.md5.hexdigest(), metadata=metadata,
            created_s=time.time(),
        )  # fmt: skip
        (upload.folder / _ABOUT).write_bytes(about.model_dump_json().encode())
        upload.folder.rename(self._root / about.id)
        return about

    def get(self, file_id: str, owner: str) -> tuple[StoredFile, Path]:
        """Return a file and the path of its content; with `owner` ALL, of any owner. Raises UnknownFile."""
        about = self._read(self._root / file_id) if _ID.fullmatch(file_id) else None
        if about is None or owner not in (ALL, about.owner):
            raise UnknownFile(f"There is no file {file_id[:128]!r}.", remedy="Files are kept for 24 hours.")
        return about, next((self._root / file_id).glob(f"{_CONTENT}*"))

    def list(self, owner: str) -> list[StoredFile]:
        """Return an owner's files, the newest first."""
        found = [file for file in self._files() if owner in (ALL, file.owner)]
        return sorted(found, key=lambda file: file.created_s, reverse=True)

    def delete(self, file_id: str, owner: str) -> None:
        """Delete a file. Raises UnknownFile."""
        self.get(file_id, owner)
        shutil.rmtree(self._root / file_id, ignore_errors=True)

    def _files(self) -> Iterator[StoredFile]:
        """Yield all files. Expired ones, and what broken uploads have left, are removed."""
        if not self._root.is_dir():
            return
        with os.scandir(self._root) as entries:
            folders = [Path(entry.path) for entry in entries]
        for folder in folders:
            if (about := self._read(folder)) is not None:
                yield about
            elif not folder.name.startswith(".") or time.time() - _changed_s(folder) > KEEP_S:
                shutil.rmtree(folder, ignore_errors=True)

    @staticmethod
    def _read(folder: Path) -> StoredFile | None:
        """Return what is stored of a file, or None if it is unreadable or expired."""
        try:
            about = StoredFile.model_validate_json((folder / _ABOUT).read_bytes())
        except (OSError, ValidationError):
            return None
        return about if time.time() < about.expires_s and folder.name == about.id else None


def too_large() -> InputTooLarge:
    message = f"The file is larger than {MAX_FILE_BYTES >> 20} MiB."
    return InputTooLarge(message, remedy="Send the address of the file as the input instead.")


def _changed_s(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:
        return time.time()
