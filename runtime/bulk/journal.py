"""The journal of a batch: its output file, and beside it a note that names the batch while it is unfinished.

Lines are appended in order, so their number tells where to resume after a crash; an incomplete last line is
cut off. The note is deleted at the end: an output without one is finished, or belongs to something else.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ...errors import BatchFailed

NOTE_SUFFIX = ".batch"
ERROR_START = b'{"error":'


class Journal:
    """An output that one process at a time writes. `run` identifies the batch, also after it is resumed."""

    def __init__(self, path: Path, *, function: str, digest: str, restart: bool) -> None:
        self.path = path
        self.run = secrets.token_hex(8)
        self.done = 0
        self.failed = 0
        self._note = path.with_name(path.name + NOTE_SUFFIX)
        self._lock = os.open(self._note, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._output = -1
        try:
            self._claim({"function": function, "input": digest}, restart)
            self._output = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._recover()
        except BaseException:
            self.close()
            raise

    def append(self, lines: Sequence[bytes]) -> None:
        """Write the next lines, and count them."""
        left = memoryview(b"\n".join([*lines, b""]))
        while left:
            left = left[os.write(self._output, left) :]
        self.done += len(lines)
        self.failed += sum(map(is_failure, lines))

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
        """Lock the output. Take over its unfinished batch, or begin a new one if there is no output yet."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BatchFailed(
                f"{self.path} is being written by another batch.",
                remedy="Wait for it, or name another output.",
            ) from None
        note = os.pread(self._lock, 1 << 16, 0)
        if note and not restart:
            self.run = self._run_in(note, identity)
            return
        if self.path.exists() and not restart and self.path.stat().st_size:
            self._note.unlink()
            raise BatchFailed(
                f"{self.path} already exists, and is not an interrupted batch.",
                remedy="Name another output, or overwrite it with --restart.",
            )
        if self.path.exists():
            os.truncate(self.path, 0)
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, json.dumps({**identity, "run": self.run}).encode(), 0)
        os.fsync(self._lock)

    def _run_in(self, text: bytes, identity: dict[str, str]) -> str:
        """Return the run that a note names. Raise BatchFailed if it is of another function or input."""
        note: dict[str, str] = {}
        with suppress(ValueError):
            note = json.loads(text)
        for key, value in identity.items():
            if note.get(key) != value:
                raise BatchFailed(
                    f"{self.path} is half done with another {key}, or its input has changed since.",
                    remedy="Begin again with --restart, or name another output.",
                )
        return note["run"]

    def _recover(self) -> None:
        """Count the lines that are written, and cut off an incomplete end."""
        size = os.fstat(self._output).st_size
        if not size:
            return
        with mmap.mmap(self._output, size, prot=mmap.PROT_READ) as written:
            end = written.rfind(b"\n") + 1
            # After a power loss the last pages may be empty.
            while end and not _whole(written[written.rfind(b"\n", 0, end - 1) + 1 : end - 1]):
                end = written.rfind(b"\n", 0, end - 1) + 1
            begin = 0
            while begin < end:
                stop = written.find(b"\n", begin, end)
                self.done += 1
                if written[begin : begin + len(ERROR_START)] == ERROR_START:
                    self.failed += is_failure(written[begin:stop])
                begin = stop + 1
        os.ftruncate(self._output, end)


def is_failure(line: bytes) -> bool:
    """Return True if a line of output is the error of its input. An answer may have an `error` of its own."""
    if not line.startswith(ERROR_START):
        return False
    error = json.loads(line)["error"]
    return isinstance(error, dict) and "line" in (error.get("details") or {})


def _whole(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
