"""The journal: the output file, whose complete lines are what is done, and beside it a note of whose output it is.

Lines are appended in order, so that their number alone says where to go on after a crash; a last line that was written
by half is cut off. The note goes when all is done: an output without one is finished, or somebody else's.
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
    """An output that is being written, by one process at a time. `run` names this batch, through all its resumptions."""

    def __init__(self, path: Path, *, function: str, digest: str, restart: bool) -> None:
        self.path = path
        self.run = secrets.token_hex(8)
        self.done = 0
        self.failed = 0
        self._note = path.with_name(path.name + NOTE_SUFFIX)
        told = {"function": function, "input": digest}
        self._lock = os.open(self._note, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._output = -1
        try:
            self._take(told, restart)
            self._output = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._mend()
        except BaseException:
            self.close()
            raise

    def append(self, lines: Sequence[bytes]) -> None:
        """Writes the next lines."""
        left = memoryview(b"\n".join([*lines, b""]))
        while left:
            left = left[os.write(self._output, left) :]
        self.done += len(lines)

    def sync(self) -> None:
        os.fsync(self._output)

    def finish(self) -> None:
        """All is done: the note goes."""
        self._note.unlink(missing_ok=True)

    def close(self) -> None:
        for descriptor in (self._output, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._output = self._lock = -1

    def _take(self, told: dict[str, str], restart: bool) -> None:
        """Make it ours: by its note, or because there is nothing yet."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BatchFailed(
                f"{self.path} is written by another batch now.", remedy="Wait for it, or name another output."
            ) from None
        text = os.pread(self._lock, 1 << 16, 0)
        if text and not restart:
            self.run = self._known(text, told)
            return
        if self.path.exists() and not restart and self.path.stat().st_size:
            self._note.unlink()
            raise BatchFailed(
                f"{self.path} is there already, and is no batch that was interrupted.",
                remedy="Name another output, or overwrite it with --restart.",
            )
        note = json.dumps({**told, "run": self.run}).encode()
        if self.path.exists():
            os.truncate(self.path, 0)
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, note, 0)
        os.fsync(self._lock)

    def _known(self, text: bytes, told: dict[str, str]) -> str:
        """The run that a note names, if it is of the same function and input."""
        note: dict[str, str] = {}
        with suppress(ValueError):
            note = json.loads(text)
        for key, name in (("function", "function"), ("input", "input")):
            if note.get(key) != told[key]:
                raise BatchFailed(
                    f"{self.path} is half done with another {name}, or its input has changed since.",
                    remedy="Begin anew with --restart, or name another output.",
                )
        return note["run"]

    def _mend(self) -> None:
        """Count what is done, and cut off what is not a whole line."""
        size = os.fstat(self._output).st_size
        if not size:
            return
        with mmap.mmap(self._output, size, prot=mmap.PROT_READ) as seen:
            end = seen.rfind(b"\n") + 1
            while end and not _whole(seen[seen.rfind(b"\n", 0, end - 1) + 1 : end - 1]):
                end = seen.rfind(b"\n", 0, end - 1) + 1  # after a loss of power the last pages may be empty
            begin = 0
            while begin < end:
                stop = seen.find(b"\n", begin, end)
                self.done += 1
                if seen[begin : begin + len(ERROR_START)] == ERROR_START:
                    self.failed += is_failure(seen[begin:stop])
                begin = stop + 1
        os.ftruncate(self._output, end)


def is_failure(line: bytes) -> bool:
    """Whether a line of output says that its input failed; an answer may have an `error` of its own."""
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
