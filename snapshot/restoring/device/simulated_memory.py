"""Counts the bytes of a simulated device. Processes share the device if they name the same folder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ....errors import SnapshotError


class SimulatedMemory:
    """How many bytes this process holds, and in a folder, how many the other processes hold.

    Each process keeps a file there, which has its bytes as text. The kernel drops the lock on it when the process ends.
    """

    def __init__(self, capacity_bytes: int, folder: Path | None = None) -> None:
        self.capacity_bytes, self._folder = capacity_bytes, folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            with self._alone(folder):
                self._own = os.open(folder / f"held-{os.getpid()}-{id(self)}", os.O_CREAT | os.O_RDWR, 0o600)
                fcntl.flock(self._own, fcntl.LOCK_EX)

    def hold(self, held_bytes: int, new_bytes: int = 0) -> None:
        """Let this process hold `new_bytes` beside the `held_bytes` that it has. Raises SnapshotError if there is no room."""
        if self._folder is None:
            self._check(new_bytes, self.capacity_bytes - held_bytes)
            return
        with self._alone(self._folder):
            if new_bytes > 0:
                self._check(new_bytes, self.capacity_bytes - held_bytes - self._of_others(self._folder))
            os.ftruncate(self._own, 0)
            os.pwrite(self._own, str(held_bytes + new_bytes).encode(), 0)

    def _check(self, new_bytes: int, free_bytes: int) -> None:
        if new_bytes > free_bytes:
            room = f"{max(0, free_bytes)} of {self.capacity_bytes} free"
            fault = f"The weights need {new_bytes} bytes on simulated, which has {room}."
            raise SnapshotError(fault, remedy="Free memory there, or use a smaller model.")

    def _of_others(self, folder: Path) -> int:
        own, found_bytes = os.fstat(self._own).st_ino, 0
        for path in folder.glob("held-*"):
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_ino == own:
                    continue
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    found_bytes += int(file.read() or b"0")
                else:
                    # Its process has ended.
                    path.unlink()
        return found_bytes

    @contextmanager
    def _alone(self, folder: Path) -> Iterator[None]:
        with (folder / "lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
