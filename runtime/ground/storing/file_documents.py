"""Stores documents as files of one gateway's state folder."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from . import private_files
from .documents import NAME, check_document_name


class FileDocuments:
    """A `Documents`. The name of a document is its path in the state folder.

    Only one process at a time changes the files, because it holds the lock of the state folder (`locked_state_dir`), and it has one
    object of this class. So the lock of this object suffices for `update`, and `generation` counts in memory.
    """

    def __init__(self, state: Path) -> None:
        self._state = state
        self._changes = Counter[str]()
        self._lock = threading.Lock()

    def remove_leftovers(self, prefix: str) -> None:
        """Remove temporary files that a crashed process left beside documents, since they may hold keys or secrets."""
        for path in private_files.files_below(self._folder(prefix)):
            if path.name.startswith("."):
                private_files.remove(path)

    def all(self, prefix: str) -> dict[str, bytes]:
        paths = private_files.files_below(self._folder(prefix))
        names = filter(NAME.fullmatch, (path.relative_to(self._state).as_posix() for path in paths))
        return {name: data for name in names if (data := self.get(name)) is not None}

    def get(self, name: str) -> bytes | None:
        return private_files.read(self._path(name))

    def put(self, name: str, data: bytes, *, durable: bool = True) -> None:
        with self._lock:
            self._replace(name, data, durable=durable)

    def remove(self, name: str) -> None:
        with self._lock:
            self._replace(name, None)

    def update(self, name: str, change: Callable[[bytes | None], bytes | None]) -> bytes | None:
        with self._lock:
            before = self.get(name)
            after = change(before)
            if after != before:
                self._replace(name, after)
        return after

    def generation(self, prefix: str) -> int:
        with self._lock:
            return sum(count for name, count in self._changes.items() if name.startswith(prefix))

    def close(self) -> None:
        """Do nothing: files are closed after each call."""

    def place(self, name: str) -> str:
        return str(self._path(name))

    def _replace(self, name: str, data: bytes | None, *, durable: bool = True) -> None:
        path = self._path(name)
        self._changes[name] += 1
        if data is None:
            private_files.remove(path)
        else:
            private_files.write(path, data, durable=durable)

    def _path(self, name: str) -> Path:
        return self._state / check_document_name(name)

    def _folder(self, prefix: str) -> Path:
        return self._path(prefix.removesuffix("/"))
