"""The memory of a simulated device. Counts its bytes, and keeps the content of freed blocks for recorded streams."""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import UntypedStorage

from ....errors import SnapshotError

POISON = 0x7F
"""The value of bytes that are uninitialised or freed. It is not 0, so that a test notices weights with such bytes."""


class SimulatedMemory:
    """Counts the bytes that this process holds, and the bytes that other processes with the same folder hold.

    Each process keeps a locked file in the folder, with the number of its bytes as text. The kernel drops the lock when
    the process ends.
    """

    def __init__(self, capacity_bytes: int, folder: Path | None = None) -> None:
        self.capacity_bytes, self._folder = capacity_bytes, folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            with self._alone(folder):
                self._own = os.open(folder / f"held-{os.getpid()}-{id(self)}", os.O_CREAT | os.O_RDWR, 0o600)
                fcntl.flock(self._own, fcntl.LOCK_EX)

    def hold(self, held_bytes: int, new_bytes: int = 0) -> None:
        """Add `new_bytes` to the `held_bytes` that this process holds. Raises SnapshotError if there is no room."""
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
                    # The file is not locked any more, so its process has ended.
                    path.unlink()
        return found_bytes

    @contextmanager
    def _alone(self, folder: Path) -> Iterator[None]:
        with (folder / "lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


class SimulatedBlock:
    """Memory from its allocation until it is freed and the recorded streams have passed."""

    def __init__(self, storage: UntypedStorage) -> None:
        self.size_bytes, self.given_back = storage.nbytes(), False
        self._storage = weakref.ref(storage)
        self._recorded = 0
        self._kept: UntypedStorage | None = None

    @property
    def freed(self) -> bool:
        return self._found() is None

    def storage(self) -> UntypedStorage:
        """Return the memory, or poison if it is freed."""
        found = self._found()
        return poison(self.size_bytes) if found is None else found

    def record(self) -> None:
        """Keep the content for one more stream, until it has `passed`."""
        self._recorded += 1
        self._kept = self._found()

    def passed(self) -> None:
        self._recorded -= 1
        if not self._recorded:
            self._kept = None

    def give_back(self) -> None:
        """Free the memory. Call it before the storage gets other memory."""
        self.given_back = True
        if self._kept is not None:
            self._kept = self._kept.clone()  # type: ignore[no-untyped-call]

    def is_of(self, storage: UntypedStorage) -> bool:
        return not self.given_back and self._storage() is storage

    def _found(self) -> UntypedStorage | None:
        return self._kept if self._kept is not None or self.given_back else self._storage()


def poison(size_bytes: int) -> UntypedStorage:
    return torch.full((size_bytes,), POISON, dtype=torch.uint8).untyped_storage()
