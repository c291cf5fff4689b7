"""The state folder of one gateway: private, and locked against a second gateway."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from ...errors import GatewayError


@contextlib.contextmanager
def locked_state_dir(path: Path) -> Iterator[Path]:
    """Make the folder if needed, and own it until the block ends or the process dies. Yield its absolute path."""
    path = path.absolute()
    try:
        # Settings of functions and secrets are in it.
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        message = f"The state folder {path} cannot be used: {error.strerror}."
        remedy = "Set PILOTFLAME_STATE_DIR to a folder that can be written."
        raise GatewayError(message, remedy=remedy) from error
    # The file is kept: after its removal, two gateways could lock different files of the same name.
    try:
        _lock(descriptor, path)
        yield path
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
        message = f"Another gateway, process {holder}, uses the state folder {path}."
        remedy = "Stop it, or set PILOTFLAME_STATE_DIR to another folder."
        details = {"pid": int(holder) if holder.isdecimal() else None}
        raise GatewayError(message, remedy=remedy, details=details) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
