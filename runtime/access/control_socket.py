"""The door: a gateway's own unix socket, in its state folder. Who can open it owns the gateway, and needs no key."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

from . import private_files

# Shorter than the link's, which lies beside it: where that fits, this does.
NAME = "run/own.sock"


@contextlib.contextmanager
def door(state: Path) -> Iterator[socket.socket]:
    """The bound socket; its file goes with the block. Whoever calls it has locked the state folder."""
    path = state / NAME
    private_files.folder(path.parent)
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(str(path))
        path.chmod(0o600)
        try:
            yield sock
        finally:
            path.unlink(missing_ok=True)


def someone_home(state: Path) -> Path | None:
    """The socket's path if a gateway listens there now."""
    path = state / NAME
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.connect(str(path))
        except OSError:  # none, or one that was killed: then the lock is free, too
            return None
    return path
