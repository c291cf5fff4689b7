"""Opens and finds the control socket, a unix socket in the state folder on which a gateway serves HTTP.

Requests on the control socket with the control key in a header need no API key and may do everything. The key is in a
file beside the socket that only the user who runs the gateway can read. The permissions of the socket are not enough:
Landlock hides the state folder from functions with private files, but lets these functions connect to the socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

# The path of a unix socket has a limited length. The listener checks this only for `run/link.sock`, so `_PATH` must not
# be longer than `run/link.sock`.
_PATH, _KEY_PATH = "run/own.sock", "run/own.key"
CONTROL_KEY = "X-Pilotflame-Control-Key"


class ControlSocket(NamedTuple):
    """The bound control socket of a gateway, and the key that requests on the socket must send."""

    sock: socket.socket
    key: str

    def admits(self, headers: Mapping[str, str], transport: asyncio.BaseTransport | None) -> bool:
        """Return True if the request came over a unix socket and its headers have the control key."""
        sock = transport.get_extra_info("socket") if transport is not None else None
        if sock is None or sock.family != socket.AF_UNIX:
            return False
        sent = headers.get(CONTROL_KEY, "").encode(errors="surrogateescape")
        return hmac.compare_digest(sent, self.key.encode())


class ControlAddress(NamedTuple):
    """The path of a running gateway's control socket, and the header with the control key that requests must send."""

    path: Path
    headers: dict[str, str]


@contextlib.contextmanager
def control_socket(state: Path) -> Iterator[ControlSocket]:
    """Yield the bound control socket with a new key, and remove their files when the block ends.

    The caller must have locked the state folder, because this replaces the files of a gateway that was killed.
    """
    path, key_path = state / _PATH, state / _KEY_PATH
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    for left in (path, key_path):
        left.unlink(missing_ok=True)
    control = ControlSocket(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), secrets.token_urlsafe(32))
    with control.sock:
        try:
            # Write the key before the socket exists. So a client that can connect can also read the key.
            key_path.touch(0o600, exist_ok=False)
            key_path.write_text(control.key)
            control.sock.bind(str(path))
            path.chmod(0o600)
            yield control
        finally:
            for own in (path, key_path):
                own.unlink(missing_ok=True)


def find_control_socket(state: Path) -> ControlAddress | None:
    """Return the address of the control socket, or None if no gateway listens on it."""
    path = state / _PATH
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.connect(str(path))
            key = (state / _KEY_PATH).read_text()
        except OSError:
            return None
    return ControlAddress(path, {CONTROL_KEY: key})
