"""A socket to a web server that its one user may replace, and that anybody may shut."""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Whom a connection is to."""

    scheme: str
    host: str
    port: int

    @staticmethod
    def of(url: str) -> ServerAddress:
        """The origin of an http(s) URL; ValueError if it is none."""
        parts = urlsplit(url)
        if parts.scheme not in _PORTS or not parts.hostname:
            raise ValueError("not an http(s) URL")
        host = parts.hostname.encode("idna").decode()
        return ServerAddress(parts.scheme, host, parts.port or _PORTS[parts.scheme])

    @property
    def authority(self) -> str:
        """As the Host header has it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}"


class Wire:
    """At most one socket at a time. Used by one thread; `close` alone may be called from another.

    Everything but `close` raises OSError. A descriptor is closed by the user's thread if that is inside a call,
    since its number would be somebody else's the moment it is closed; who closes meanwhile only shuts it down.
    """

    def __init__(self, timeout_s: float, connect_timeout_s: float, tls: Callable[[], ssl.SSLContext]) -> None:
        self.origin: ServerAddress | None = None
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._tls = tls
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._busy = False
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def connect(self, origin: ServerAddress) -> None:
        """Connect to `origin`, whatever this was connected to before; TLS included."""
        self.drop()
        deadline_s = time.monotonic() + self._connect_timeout_s
        failure: OSError = OSError(f"{origin.host} has no address")
        for family, kind, protocol, _, address in socket.getaddrinfo(
            origin.host, origin.port, type=socket.SOCK_STREAM
        ):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                break
            try:
                return self._open(origin, socket.socket(family, kind, protocol), address, left_s)
            except OSError as error:
                self.drop()
                failure = error
                if self._closed or isinstance(error, ssl.SSLCertVerificationError):
                    break
        raise failure

    def send(self, data: bytes) -> None:
        """Send all of `data`."""
        connected = self._enter()
        try:
            connected.sendall(data)
        finally:
            self._leave()

    def receive(self, view: memoryview, limit: int = 0) -> int:
        """Receive what is there into `view`, at most `limit` bytes (0: all of it); 0 is the peer's end."""
        connected = self._enter()
        try:
            return connected.recv_into(view, limit)
        finally:
            self._leave()

    def quiet(self) -> bool:
        """Whether the socket is open and nothing waits to be read: no end of the peer's, no leftovers."""
        poll = select.poll()
        with self._lock:
            if self._socket is None:
                return False
            poll.register(self._socket, select.POLLIN)
            return not poll.poll(0)

    def drop(self) -> None:
        """The user's own way to let go of the socket; another may be connected."""
        with self._lock:
            self.origin, found, self._socket = None, self._socket, None
            if found is not None:
                found.close()

    def close(self) -> None:
        """For good. A call in another thread ends at once with ConnectionAbortedError."""
        with self._lock:
            self._closed = True
            if self._socket is None:
                return
            if self._busy:
                _shut_down(self._socket)
            else:
                self._socket.close()
                self._socket = None

    def _open(
        self, origin: ServerAddress, raw: socket.socket, address: tuple[object, ...], left_s: float
    ) -> None:
        # TLS is put around the socket before it connects, so that it is one object that `close` can shut,
        # all through the handshake.
        try:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if origin.scheme == "https":
                raw = self._tls().wrap_socket(raw, server_hostname=origin.host)
            raw.settimeout(left_s)
        except BaseException:
            raw.close()
            raise
        with self._lock:
            self._socket = raw
        connected = self._enter()
        try:
            connected.connect(address)
            connected.settimeout(self._timeout_s)
        finally:
            self._leave()
        self.origin = origin

    def _enter(self) -> socket.socket:
        with self._lock:
            if self._closed:
                self._discard()
                raise ConnectionAbortedError("closed")
            if self._socket is None:
                raise ConnectionError("not connected")
            self._busy = True
            return self._socket

    def _leave(self) -> None:
        with self._lock:
            self._busy = False
            if self._closed:
                self._discard()
                raise ConnectionAbortedError("closed")

    def _discard(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _shut_down(found: socket.socket) -> None:
    try:
        # Not SSLSocket's own: that takes TLS away first, and a reader might get what is encrypted as it is.
        socket.socket.shutdown(found, socket.SHUT_RDWR)
    except OSError:
        return  # not connected (any more): whoever waits on it has been told
