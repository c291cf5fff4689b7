"""Opens and finds the control socket, a unix socket in the state folder on which a gateway serves HTTP.

Only the user who runs the gateway can open it. Requests on it need no API key and may do everything.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

# Must not be longer than `run/link.sock`, whose length the listener checks: unix sockets limit their paths.
_PATH = "run/own.sock"


@contextlib.contextmanager
def control_socket(state: Path) -> Iterator[socket.socket]:
    """Yield the bound control socket, and remove its file when the block ends.

    The caller must have locked the state folder: a file that a killed gateway left there is replaced.
    """
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
    """Return the path of the control socket, or None if no gateway listens on it."""
    path = state / _PATH
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.connect(str(path))
        except OSError:
            return None
    return path
