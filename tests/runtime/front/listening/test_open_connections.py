"""The limits of open connections: a real gateway with few descriptors, and which connection is closed for a new one."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import trustme
from live import LIMIT_S, Gateway, gateway_here, gateway_process
from multidict import CIMultiDict
from pilotflame.errors import Overloaded
from pilotflame.runtime.front.api import server
from pilotflame.runtime.front.listening.open_connections import MAX_LOOKS, ConnectionPlace, OpenConnections
from pilotflame.runtime.front.listening.origins import Origins
from pilotflame.runtime.startup import front

FILES = 512
IDLE = 700


class Connected:
    """Stands in for a connection of the server."""

    def __init__(self) -> None:
        self.is_busy = self.aborted = False

    def abort(self) -> None:
        self.aborted = True


Enter = Callable[..., "ConnectionPlace | None"]


@pytest.fixture
def enter() -> Iterator[Enter]:
    """Yield a function that enters a new connection of an address. With `handshake`, its TLS handshake has not ended."""
    near, far = socket.socketpair()

    def entered(
        connections: OpenConnections, address: str = "192.0.2.1", *, handshake: bool = False
    ) -> ConnectionPlace | None:
        if (place := connections.enter(near, address)) is not None and not handshake:
            place.connection = Connected()
        return place

    with near, far:
        yield entered


def some(enter: Enter, connections: OpenConnections, *addresses: str) -> list[ConnectionPlace]:
    found = [enter(connections, address) for address in addresses]
    assert all(found), found
    return [place for place in found if place is not None]


def aborted(places: list[ConnectionPlace]) -> list[bool]:
    return [isinstance(one.connection, Connected) and one.connection.aborted for one in places]


def test_the_oldest_idle_connection_is_closed_for_a_new_one(enter: Enter) -> None:
    connections = OpenConnections(Origins(()), 4)
    places = some(enter, connections, "192.0.2.1", "192.0.2.2", "192.0.2.3")
    places[0].connection.is_busy = True  # type: ignore[union-attr,misc]
    # Connections without an admitted request may use three of the four places, and these connections use all three. So the
    # oldest idle connection is closed.
    assert enter(connections, "192.0.2.4") is not None
    assert aborted(places) == [False, True, False]
    for place in places:
        place.leave()
        place.leave()
    assert all(enter(connections, f"192.0.2.{n}") for n in range(5, 7))


def test_connections_with_an_admitted_request_stay(enter: Enter) -> None:
    connections = OpenConnections(Origins(()), 8)
    kept = some(enter, connections, *["192.0.2.1"] * 3)
    for place in kept:
        place.admit()
    assert all(enter(connections, f"198.51.100.{n}") for n in range(50))
    assert aborted(kept) == [False] * 3
    # A connection that was closed is not counted as admitted afterwards.
    lost = some(enter, connections, "192.0.2.9")[0]
    lost.close()
    lost.admit()
    assert lost.admitted is False


def test_a_client_has_half_of_the_places(enter: Enter) -> None:
    connections = OpenConnections(Origins(("10.0.0.1",)), 8)
    first, *others = some(enter, connections, *[f"2001:db8::{n}" for n in range(4)])
    assert enter(connections, "2001:db8::5") is not None
    assert aborted([first, *others]) == [True, False, False, False]
    for n in range(2, 6):
        places = some(enter, connections, *["192.0.2.1"] * n)
        assert sum(aborted(places)) == max(0, n - 4)
        for place in places:
            place.leave()
    for place in others:
        place.leave()
    # A trusted proxy may have more connections than one client, because its connections belong to many clients.
    assert aborted(some(enter, connections, *["10.0.0.1"] * 5)) == [False] * 5


def test_a_new_connection_is_refused_if_all_are_busy(enter: Enter) -> None:
    connections = OpenConnections(Origins(()), 400)
    places = some(enter, connections, *[f"192.0.{n // 99}.{n % 99}" for n in range(300)])
    for place in places:
        place.connection.is_busy = True  # type: ignore[union-attr,misc]
    assert enter(connections) is None
    # One search checks MAX_LOOKS connections, and the next search goes on after them. So only the fourth search finds the idle
    # connection.
    places[MAX_LOOKS * 3].connection.is_busy = False  # type: ignore[union-attr,misc]
    assert [enter(connections) is not None for _ in range(3)] == [False, False, True]


def test_a_connection_in_its_handshake_is_idle(enter: Enter) -> None:
    connections = OpenConnections(Origins(()), 2)
    with contextlib.ExitStack() as stack:
        near, far = (stack.enter_context(one) for one in socket.socketpair())
        assert connections.enter(near, "192.0.2.1") is not None
        assert enter(connections, "192.0.2.2") is not None
        assert enter(connections, "192.0.2.3") is not None
        assert far.recv(1) == b""


def test_clients_behind_a_proxy_share_no_cap() -> None:
    connections = OpenConnections(Origins(("10.0.0.1",)), 4)

    class Transport(asyncio.BaseTransport):
        def __init__(self, *peer: str) -> None:
            super().__init__({"peername": (*peer, 4711)} if peer else {})

    proxy = Transport("10.0.0.1")

    def begin(client: str, transport: asyncio.BaseTransport | None = proxy) -> Callable[[], None] | None:
        return connections.begin(CIMultiDict({"X-Forwarded-For": client}), transport)

    ends = [begin("192.0.2.1"), begin("192.0.2.1"), begin("192.0.2.2")]
    with pytest.raises(Overloaded):
        begin("192.0.2.1")
    for end in ends:
        assert end is not None
        end()
    assert begin("192.0.2.1") is not None
    assert begin("192.0.2.1") is not None
    # Requests that do not come through a trusted proxy are not counted, because their connections are counted.
    assert [begin("192.0.2.1", one) for one in (Transport("192.0.2.9"), Transport(), None)] == [None] * 3


# -- a gateway


@contextlib.asynccontextmanager
async def small_gateway(folder: Path, **settings: object) -> AsyncIterator[Gateway]:
    """Run a gateway that may open few files."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nulimit -S -n 256\nulimit -H -n {FILES}\nexec {sys.executable} "$@"\n')
    python.chmod(0o700)
    async with gateway_process(folder / "state", python=str(python), **settings) as gateway:
        yield gateway


@contextlib.contextmanager
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.asynccontextmanager
async def idle_connections(
    gateway: Gateway, sent: bytes, count: int = IDLE
) -> AsyncIterator[list[socket.socket]]:
    """Open many connections, and send the same bytes on each."""
    with many_files(), contextlib.ExitStack() as stack:
        loop, socks = asyncio.get_running_loop(), list[socket.socket]()
        for number in range(count):
            sock = stack.enter_context(socket.socket())
            socks.append(sock)
            sock.setblocking(False)
            # Use many addresses of the loopback network, so that the limit of one client does not apply.
            sock.bind((f"127.0.1.{number % 250 + 1}", 0))
            async with asyncio.timeout(LIMIT_S):
                await loop.sock_connect(sock, gateway.address)
            with contextlib.suppress(ConnectionError):
                await loop.sock_sendall(sock, sent)
        yield socks


SENT = (
    b"",
    b"GET /healthz HTTP/1.1\r\nHost: l",
    # The gateway refuses this request before the body has arrived.
    b"POST /invoke/f HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n",
)


async def port_of(client: httpx.AsyncClient) -> int:
    """Send a request, which must succeed. Return the client's port."""
    answer = await client.get("/v1/functions")
    assert answer.status_code == 200, answer.text
    return int(answer.extensions["network_stream"].get_extra_info("client_addr")[1])


async def test_idle_connections_lock_nobody_out(tmp_path: Path) -> None:
    async with small_gateway(tmp_path, auth="always") as gateway:
        assert gateway.process is not None
        process = psutil.Process(gateway.process.pid)
        assert process.rlimit(psutil.RLIMIT_NOFILE) == (FILES, FILES)
        async with gateway.at_home() as home:
            key = (await home.post("/v1/keys", json={"name": "k", "scopes": ["read"]})).json()["key"]
        limits, known = (
            httpx.Limits(max_connections=1, keepalive_expiry=None),
            {"Authorization": f"Bearer {key}"},
        )
        async with httpx.AsyncClient(
            base_url=gateway.url, timeout=LIMIT_S, limits=limits, headers=known
        ) as kept:
            ports = [await port_of(kept)]
            for sent in SENT:
                async with idle_connections(gateway, sent):
                    # A client with a key keeps its connection, and new clients get one.
                    ports.append(await port_of(kept))
                    async with httpx.AsyncClient(base_url=gateway.url, timeout=LIMIT_S) as fresh:
                        assert (await fresh.get("/healthz")).status_code == 200
                    assert process.num_fds() < FILES * 3 // 4
        assert "Too many open files" not in (tmp_path / "gateway.log").read_text()
        assert len(set(ports)) == 1


async def test_handshakes_that_do_not_end_lock_nobody_out(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front, "most_connections", lambda: 32)
    # Let unfinished handshakes stay open for longer than the test, so that only the limit of connections closes them.
    monkeypatch.setattr(server, "HEADER_TIMEOUT_S", 2 * LIMIT_S)
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    chain, key = tmp_path / "chain.pem", tmp_path / "key.pem"
    chain.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    key.touch(0o600)
    key.write_bytes(issued.private_key_pem.bytes())
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    async with (
        gateway_here(state, tls_cert=chain, tls_key=key) as gateway,
        idle_connections(gateway, b"\x16\x03\x01", 100) as idle,
        httpx.AsyncClient(base_url=gateway.url, timeout=LIMIT_S, verify=trust) as fresh,
    ):
        assert (await fresh.get("/healthz")).status_code == 200
        # The oldest connections were closed.
        with contextlib.suppress(ConnectionError):
            assert await asyncio.get_running_loop().sock_recv(idle[0], 100) == b""
