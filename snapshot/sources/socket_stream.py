"""Defines SocketStream, a connected socket whose calls block for a limited time and receive large pieces."""

from __future__ import annotations

import select
import socket
import struct

GATHER_S = 0.01
"""How long a receive waits for all wanted bytes. It is much shorter than the windows in which fetches measure rates."""


class SocketStream:
    """A connected socket. One thread uses it. Any thread may shut the socket down. Methods raise OSError."""

    idle = True

    def __init__(self, connected: socket.socket, timeout_s: float) -> None:
        """Calls raise TimeoutError if the peer sends nothing, or takes nothing, for `timeout_s`."""
        self._socket, self._timeout_s = connected, timeout_s
        # Set no Python timeout: it would make the socket non-blocking, so the kernel would not wait for more bytes.
        connected.settimeout(None)
        for option, seconds in ((socket.SO_RCVTIMEO, GATHER_S), (socket.SO_SNDTIMEO, timeout_s)):
            value = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
            connected.setsockopt(socket.SOL_SOCKET, option, value)
        self._readable = select.poll()
        self._readable.register(connected, select.POLLIN)

    def send(self, data: bytes) -> None:
        """Send all of `data`."""
        try:
            self._socket.sendall(data)
        except BlockingIOError as error:
            raise TimeoutError("timed out") from error

    def receive(
        self, view: memoryview, limit: int, *, gather: bool = False, timeout_s: float | None = None
    ) -> int:
        """Wait for bytes, and receive at most `limit` into `view`. Return their number: 0 at the end of the stream.

        With `gather`, once there are bytes, the kernel waits up to GATHER_S for `limit` bytes. Without `gather`, bytes come
        in pieces of about 100 KB, and a small piece takes as much time in the interpreter as a large piece.
        """
        if not self._readable.poll((self._timeout_s if timeout_s is None else timeout_s) * 1e3):
            raise TimeoutError("timed out")
        return self._socket.recv_into(view, limit, socket.MSG_WAITALL if gather else 0)
