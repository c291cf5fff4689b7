"""The control socket: a unix socket in the state folder. Whoever can open it owns the gateway and needs no key."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

# Shorter than the path of the link's socket in the same folder: if that fits the limit of unix sockets, this does.
_PATH = "run/own.sock"


@contextlib.contextmanager
def control_socket(state: Path) -> Iterator[socket.socket]:
    """Yield the bound socket, and remove its file at the end. The caller has locked the state folder."""
    path = state / _PATH
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(str(path))
        path.chmod(0o600)
        try:
            yield sock
        finally:
            path.unlink(missing_ok=True)


def find_control_socket(state: Path) -> Path | None:
    """Return the socket's path if a gateway listens on it now."""
    path = state / _PATH
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.connect(str(path))
        # There is no socket, or its gateway was killed.
        except OSError:
            return None
    return path
