"""Connections that arrive while an acceptor closes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import ssl
from collections.abc import Iterator
from typing import cast

import pytest
import trustme
from live import LIMIT_S
from pilotflame.runtime.front.listening.acceptor import Acceptor
from pilotflame.runtime.front.listening.open_connections import ConnectionPlace, OpenConnections
from pilotflame.runtime.front.listening.origins import Origins


class Connection(asyncio.Protocol):
    def __init__(self, place: ConnectionPlace) -> None:
        self._place, self.is_busy = place, False

    def connection_lost(self, exc: BaseException | None) -> None:
        self._place.leave()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._place.connection = self
        cast("asyncio.Transport", transport).write(b"open")
        transport.close()

    def abort(self) -> None:
        raise AssertionError("no connection is in the way")


class Counted(OpenConnections):
    """Remembers the places that it gave."""

    def __init__(self) -> None:
        super().__init__(Origins(()), 64)
        self.places: list[ConnectionPlace] = []

    def enter(self, sock: socket.socket, address: str) -> ConnectionPlace | None:
        if (place := super().enter(sock, address)) is not None:
            self.places.append(place)
        return place


@pytest.fixture
def no_gc() -> Iterator[None]:
    """Disable the garbage collector during the test, because a connection must end without it."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("turns", range(4))
@pytest.mark.usefixtures("no_gc")
async def test_each_accepted_connection_ends(turns: int, secure: bool):
    """It ends whether its task has begun or not. A client without an answer would wait until its own deadline."""
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH) if secure else None
    if tls is not None:
        trustme.CA().issue_cert("127.0.0.1").configure_cert(tls)
    connections = Counted()
    async with asyncio.TaskGroup() as tasks:
        listening = socket.create_server(("127.0.0.1", 0))
        acceptor = Acceptor(listening, connections, tasks, Connection, tls, LIMIT_S)
        clients = [await asyncio.open_connection(*listening.getsockname()) for _ in range(3)]
        more = [socket.create_connection(listening.getsockname()) for _ in range(3)]
        for _ in range(turns):
            await asyncio.sleep(0)
        acceptor.close()
        for reader, writer in clients:
            writer.write(b"hello")
            async with asyncio.timeout(LIMIT_S):
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read() in (b"", b"open")
            writer.close()
        for client in more:
            client.close()
    assert connections.places or not turns
    assert not any(map(connections.leave, connections.places))
