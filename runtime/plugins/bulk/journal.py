"""Writes the journal of a batch: its output file, and a second file, the note, that identifies the batch.

Answers are appended in the order of the input lines. So the number of lines in the output says where to resume after a
crash. An incomplete last line is cut off. At the end the batch deletes the note. So an output file without a note is
either finished or was not written by a batch.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import secrets
from pathlib import Path

from ....errors import BatchFailed

NOTE_SUFFIX = ".batch"
ERROR_START = b'{"error":'


class Journal:
    """The output of one batch. Only one process at a time can open it.

    `run` is a random id of the batch, which stays the same when the batch is resumed. `done` counts the written
    lines. `failed` counts the written lines that are errors.
    """

    def __init__(self, path: Path, *, function: str, digest: str, restart: bool) -> None:
        self.path = path
        self.run = secrets.token_hex(8)
        self.done = 0
        self.failed = 0
        self._note = path.with_name(path.name + NOTE_SUFFIX)
        self._lock = os.open(self._note, os.O_RDWR | os.O_CREAT, 0o644)
        self._output = -1
        try:
            self._claim({"function": function, "input": digest}, restart)
            self._output = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            self._recover()
        except BaseException:
            self.close()
            raise

    def append(self, line: bytes) -> None:
        """Append the next line to the output, and count it. Only `sync` makes sure that the line is on disk."""
        left = memoryview(line + b"\n")
        while left:
            left = left[os.write(self._output, left) :]
        self.done += 1
        self.failed += _is_failure(line)

    def sync(self) -> None:
        os.fsync(self._output)

    def finish(self) -> None:
        """Mark the output as finished: delete the note."""
        self._note.unlink(missing_ok=True)

    def close(self) -> None:
        for descriptor in (self._output, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._output = self._lock = -1

    def _claim(self, identity: dict[str, str], restart: bool) -> None:
        """Lock the output, and continue its unfinished batch. Begin anew if there is no such batch, or on `restart`.

        Raise BatchFailed if another process has locked the output. Without `restart`, also raise BatchFailed if the
        unfinished batch has another function or input, or if the output has lines but no unfinished batch.
        """
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            busy = f"{self.path} is being written by another batch."
            raise BatchFailed(busy, remedy="Wait for it, or name another output.") from None
        note = os.pread(self._lock, 1 << 16, 0)
        if note and not restart:
            self.run = self._run_in(note, identity)
            return
        if self.path.exists():
            if not restart and self.path.stat().st_size:
                self._note.unlink()
                remedy = "Name another output, or overwrite it with --restart."
                raise BatchFailed(f"{self.path} already exists, and is not half done.", remedy=remedy)
            os.truncate(self.path, 0)
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, json.dumps({**identity, "run": self.run}).encode(), 0)
        os.fsync(self._lock)

    def _run_in(self, text: bytes, identity: dict[str, str]) -> str:
        """Return `run` from the note `text`. Raise BatchFailed if the note belongs to another function or input."""
        note: dict[str, str] = json.loads(text) if _is_json(text) else {}
        for key, value in identity.items():
            if note.get(key) != value:
                differs = f"{self.path} is half done with another {key}, or its input has changed since."
                raise BatchFailed(differs, remedy="Begin again with --restart, or name another output.")
        return note["run"]

    def _recover(self) -> None:
        """Count the lines that the output already contains, and cut off incomplete lines at its end."""
        size = os.fstat(self._output).st_size
        if not size:
            return
        with mmap.mmap(self._output, size, prot=mmap.PROT_READ) as written:
            end = written.rfind(b"\n") + 1
            # After a power loss the last pages of the file may contain zeros. Then several lines are not JSON.
            while end and not _is_json(written[written.rfind(b"\n", 0, end - 1) + 1 : end - 1]):
                end = written.rfind(b"\n", 0, end - 1) + 1
            while written.tell() < end:
                self.done += 1
                self.failed += _is_failure(written.readline())
        os.ftruncate(self._output, end)


def _is_failure(line: bytes) -> bool:
    """Return True if `line` is the error object of an input line that failed."""
    if not line.startswith(ERROR_START):
        return False
    # A function's own answer may also start with "error", but it does not contain the number of the input line.
    error = json.loads(line)["error"]
    return isinstance(error, dict) and "input_line" in (error.get("details") or {})


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
