"""The state folder of one gateway: made, kept private, and locked against a second gateway."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from ...errors import GatewayError


class StateDir:
    """A context manager that owns a state folder for as long as this process lives, however it ends."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._lock_fd: int | None = None

    def __enter__(self) -> Self:
        try:
            # Settings of functions, with their secrets, lie here: only their owner reads them.
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise GatewayError(
                f"The state folder {self.path} cannot be used: {error.strerror}.",
                remedy="Set PILOTFLAME_STATE_DIR to a folder that can be written.",
            ) from error
        try:
            self._take(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self._lock_fd = descriptor
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The file stays: removing it would let a third gateway lock another file of the same name.
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _take(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise GatewayError(
                f"Another gateway, process {holder}, uses the state folder {self.path}.",
                remedy="Stop it, or set PILOTFLAME_STATE_DIR to another folder.",
                details={"pid": int(holder) if holder.isdecimal() else None},
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
