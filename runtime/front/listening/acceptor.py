"""Accepts the connections of a listening socket, up to the limits of `OpenConnections`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any

from .open_connections import ConnectionPlace, OpenConnections

LOG = logging.getLogger(__name__)
BACKLOG = 1024
MAX_AT_ONCE = 4
"""Limit for the connections that one turn of the event loop accepts. Bytes that have arrived on them are read in the next turn."""
PAUSE_S = 1.0
"""The pause after an error such as EMFILE. No event says when a descriptor becomes free."""
FULL = "connections are closed because all places are in use: raise the hard limit of open files (ulimit -Hn)"


class Acceptor:
    """Accepts connections of a socket until `close`."""

    def __init__(
        self, sock: socket.socket, connections: OpenConnections, tasks: asyncio.TaskGroup, make: Callable[[ConnectionPlace], asyncio.BaseProtocol],
        tls: ssl.SSLContext | None, handshake_s: float,
    ) -> None:  # fmt: skip
        """`make` returns the protocol of a new connection. With `tls`, each connection begins with a handshake of TLS, which may take `handshake_s`."""
        self.sock = sock
        self._connections, self._tasks, self._make = connections, tasks, make
        self._tls: dict[str, Any] = {} if tls is None else {"ssl": tls, "ssl_handshake_timeout": handshake_s}
        self._loop = asyncio.get_running_loop()
        self._handshakes: set[asyncio.Task[Any]] = set()
        self._paused: asyncio.TimerHandle | None = None
        self._warned = False
        sock.setblocking(False)
        sock.listen(BACKLOG)
        self._loop.add_reader(sock, self._accept)

    def close(self) -> None:
        """Accept no more connections, and cancel unfinished TLS handshakes. Open connections stay open."""
        if self.sock.fileno() < 0:
            return
        if self._paused is not None:
            self._paused.cancel()
        self._loop.remove_reader(self.sock)
        self.sock.close()
        for task in self._handshakes:
            task.cancel()

    def _accept(self) -> None:
        for _ in range(MAX_AT_ONCE):
            try:
                sock, address = self.sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._pause(error)
                return
            # The address of a unix socket is a text.
            place = self._connections.enter(sock, address[0] if isinstance(address, tuple) else "")
            if place is None:
                sock.close()
                self._warn(FULL)
                continue
            sock.setblocking(False)
            self._tasks.create_task(self._open(sock, place), name="connection")

    async def _open(self, sock: socket.socket, place: ConnectionPlace) -> None:
        # `close` leaves this to the task: a task that is cancelled before its first step does not close its socket.
        if self.sock.fileno() < 0:
            sock.close()
            return place.leave()
        if handshake := asyncio.current_task() if self._tls else None:
            self._handshakes.add(handshake)
        try:
            # Ignore clients that have disconnected or that do not use TLS. The transport closes their sockets.
            with contextlib.suppress(OSError):
                await self._loop.connect_accepted_socket(lambda: self._make(place), sock, **self._tls)
        finally:
            if handshake is not None:
                self._handshakes.discard(handshake)
            if place.connection is None:
                place.leave()

    def _pause(self, error: OSError) -> None:
        """Accept nothing for PAUSE_S. Without the pause, the event loop would call `_accept` again at once, because the
        socket stays readable.
        """
        self._warn(f"connections cannot be accepted: {error.strerror}")
        self._loop.remove_reader(self.sock)
        self._paused = self._loop.call_later(PAUSE_S, self._loop.add_reader, self.sock, self._accept)

    def _warn(self, text: str) -> None:
        """Log a warning once: any client could fill the log."""
        if not self._warned:
            self._warned = True
            LOG.warning("%s", text)
