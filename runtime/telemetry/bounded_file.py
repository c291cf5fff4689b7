"""Keeps the newest rows of something in two files: one that grows, and the one before it, which it replaces when full."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


class BoundedFile:
    """A file to which rows are appended. Together with its predecessor it has at most `max_bytes`.

    Its methods block. Rows have either `row_bytes`, or end with a line feed. One that a crash has
    torn is cut off; a torn line stays, and whoever reads it finds that it is none.
    """

    def __init__(self, path: Path, max_bytes: int, *, row_bytes: int = 0) -> None:
        self._path, self._row_bytes = path, row_bytes
        self._older = path.with_name(f"{path.name}.1")
        self._half_bytes = max_bytes // 2

    def append(self, rows: bytes) -> None:
        """Append whole rows. Raise OSError if they cannot be written."""
        if not rows:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._size() + len(rows) > self._half_bytes and self._path.exists():
            self._path.replace(self._older)
        with self._path.open("a+b") as file:
            size = file.seek(0, os.SEEK_END)
            if self._row_bytes:
                file.truncate(size - size % self._row_bytes)
            elif size and os.pread(file.fileno(), 1, size - 1) != b"\n":
                file.write(b"\n")
            file.write(rows)

    def read(self) -> bytes:
        """Return the rows that are kept, the oldest first."""
        return self._rows(self._older) + self._rows(self._path)

    def remove(self) -> None:
        for path in (self._path, self._older):
            path.unlink(missing_ok=True)

    def _size(self) -> int:
        with contextlib.suppress(OSError):
            return self._path.stat().st_size
        return 0

    def _rows(self, path: Path) -> bytes:
        try:
            data = path.read_bytes()
        except OSError:
            return b""
        if self._row_bytes:
            return data[: len(data) - len(data) % self._row_bytes]
        return data[: data.rfind(b"\n") + 1]
