"""The port at which gRPC is served. The gateway accepts its connections, limits them, and passes their bytes on to gRPC's unix socket.

gRPC itself limits neither its connections nor the bytes of the messages that arrive on them.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, cast

from ....errors import Overloaded
from ...front.api.backend import Backend
from ...front.http.incoming_bodies import ArrivingBytes, IncomingBodies, no_room
from ...front.listening.acceptor import Acceptor
from ...front.listening.open_connections import ConnectionPlace, OpenConnections, most_connections

READ_BYTES = 32 << 10
"""The most bytes that are read from one connection at a time."""
SHARE = 6
"""The limit of HTTP connections is divided by this number to get the limit of gRPC connections. A connection of gRPC uses three files: the client's, and both
ends of the unix socket.
"""


# All sides read into this buffer, because each side copies its bytes before another side reads.
_received = memoryview(bytearray(READ_BYTES))


class _Side(asyncio.BufferedProtocol):
    """One side of a connection: the client's or gRPC's. It sends the bytes that the other side has read. While it cannot send,
    the other side stops reading.
    """

    def __init__(self, place: ConnectionPlace) -> None:
        self.other: _Side
        self._place = place
        self.transport: asyncio.Transport | None = None
        self.waits = False
        """True while the other side cannot send, or is not connected yet. Then this side must not read."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return _received

    def buffer_updated(self, nbytes: int) -> None:
        self.received(bytes(_received[:nbytes]))
        if nbytes == READ_BYTES:
            self.pause()
            self._place.take_turn(self.go_on)

    def received(self, data: bytes) -> None:
        """Pass bytes on to the other side."""
        if self.other.transport is not None and not self.other.transport.is_closing():
            self.other.transport.write(data)

    def pause(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.pause_reading()

    def go_on(self) -> None:
        if self.transport is not None and not (self.waits or self.transport.is_closing()):
            self.transport.resume_reading()

    def pause_writing(self) -> None:
        self.other.waits = True
        self.other.pause()

    def resume_writing(self) -> None:
        self.other.waits = False
        self.other.go_on()

    def connection_lost(self, _: BaseException | None) -> None:
        if self.other.transport is not None:
            self.other.transport.close()


class GrpcConnection(_Side):
    """A client's connection."""

    def __init__(self, port: GrpcPort, place: ConnectionPlace) -> None:
        super().__init__(place)
        self.other = _Side(place)
        self.other.other = self
        self._port = port
        self._name, self._early = "", list[bytes]()
        self._calls = 0
        # Until its first call is admitted, the bytes that arrive count for the client's address, not for the owner of a key.
        self._arriving = ArrivingBytes(port.incoming, f"client {place.client}")
        self._owner: str | None = None
        # The timeouts of the calls that wait for a message.
        self._waiting = set[asyncio.Timeout]()
        self._refused = False

    @property
    def is_busy(self) -> bool:
        """True if a call is running."""
        return self._calls > 0

    @property
    def address(self) -> str:
        """The client's IP address."""
        peer = self.transport.get_extra_info("peername") if self.transport is not None else None
        return str(peer[0]) if isinstance(peer, tuple) else ""

    def abort(self) -> None:
        """Close the connection at once."""
        for side in (self, self.other):
            if side.transport is not None:
                side.transport.abort()

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Count a running call during the block."""
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._arriving.change(0, 0)

    def admit(self) -> None:
        """Note that the gateway has admitted a call."""
        if not self._place.admitted:
            self._place.admit()

    async def message(self, read: Callable[[], Awaitable[Any]], owner: str, timeout_s: float) -> Any:
        """Return what `read` returns, the next message of a call.

        Raise TimeoutError after `timeout_s`, and Overloaded if more bytes arrive on this connection than the owner of its first call
        may send.
        """
        if self._owner is None:
            self._owner = owner
            self._arriving.give_to(owner)
        limit, size = asyncio.timeout(timeout_s), 0
        self._waiting.add(limit)
        try:
            async with limit:
                message = await read()
            size = len(message) if isinstance(message, bytes) else 0
        except TimeoutError:
            if self._refused:
                raise no_room() from None
            raise
        finally:
            self._waiting.discard(limit)
            self._refused = self._refused and bool(self._waiting)
            self._arriving.change(-size, len(self._waiting) * self._port.most)
        return message

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._place.connection = self
        sock = socket.socket(socket.AF_UNIX)
        try:
            # Linux chooses a name for this socket. gRPC reports it as the peer of each call, so that `GrpcPort.find` finds
            # the connection.
            sock.bind("")
            sock.setblocking(False)
            sock.connect(self._port.path)
        except OSError:
            sock.close()
            self.abort()
            return
        self._name = sock.getsockname()[1:].decode()
        self._port.connections[self._name] = self
        self._port.tasks.create_task(self._open(sock), name="connection")

    async def _open(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().create_unix_connection(lambda: self.other, sock=sock)
        if self.transport is None or self.transport.is_closing() or self.other.transport is None:
            self.abort()
            return
        self.waits = False
        self.other.transport.writelines(self._early)
        self._early.clear()
        self.go_on()

    def received(self, data: bytes) -> None:
        try:
            self._arriving.change(len(data), max(1, len(self._waiting)) * self._port.most)
        except Overloaded:
            self._refuse()
            if not self._waiting:
                self.abort()
                return
        if self.other.transport is None:
            self._early.append(data)
            self.waits = True
            self.pause()
        else:
            super().received(data)

    def _refuse(self) -> None:
        """In the next turn of the event loop, end the calls that wait for a message. gRPC then drops the bytes that have arrived
        for these calls.
        """
        self._refused = True
        for limit in self._waiting:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())

    def connection_lost(self, exc: BaseException | None) -> None:
        self._place.leave()
        self._port.connections.pop(self._name, None)
        self._arriving.change(0, 0)
        super().connection_lost(exc)


class GrpcPort:
    """A port of gRPC, and its open connections."""

    def __init__(self, sock: socket.socket, path: str, backend: Backend, incoming: IncomingBodies) -> None:
        """gRPC listens at the unix socket `path`."""
        self.path, self.incoming, self.most = path, incoming, backend.max_body_bytes
        self.tasks = backend.functions.tasks
        self.connections = dict[str, GrpcConnection]()
        places = OpenConnections(backend.origins, most_connections() // SHARE)
        self._acceptor = Acceptor(sock, places, self.tasks, partial(GrpcConnection, self), None, 0.0)

    def find(self, peer: str) -> GrpcConnection | None:
        """Return the connection of a call with this peer; None if it is closed, or did not come through this port."""
        return self.connections.get(peer.removeprefix("unix-abstract:"))

    def stop_accepting(self) -> None:
        self._acceptor.close()

    def close(self) -> None:
        """Close all connections."""
        self._acceptor.close()
        for connection in [*self.connections.values()]:
            connection.abort()
