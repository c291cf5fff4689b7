"""Serves the routes over HTTP on the gateway's sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Sequence

from aiohttp import web

from ....errors import GatewayError
from ..http.chain import Chain
from ..http.connection import HEADER_TIMEOUT_S, ClientConnection
from ..http.host_names import HostNames
from ..http.incoming_bodies import INCOMING
from ..http.large_answers import ANSWERS
from ..http.parsed_bodies import PARSED_BODIES, ParsedBodies
from ..http.routes import Route, aiohttp_routes
from ..http.transport import PlainConnection
from ..listening.acceptor import Acceptor
from ..listening.open_connections import ConnectionPlace, OpenConnections
from .deploys import MAX_ARCHIVE_BYTES
from .plain_calls import PlainCalls


class HttpServer:
    """The gateway's HTTP server. Before the gateway ends, the server makes its clients connect elsewhere."""

    def __init__(self, runner: web.AppRunner, chain: Chain) -> None:
        self._runner, self.chain, self.app = runner, chain, runner.app
        self._acceptors: list[Acceptor] = []

    def listen(
        self, accept: Callable[[ConnectionPlace], asyncio.Protocol], socks: Sequence[socket.socket], connections: OpenConnections,
        tasks: asyncio.TaskGroup, tls: ssl.SSLContext | None,
    ) -> list[Acceptor]:  # fmt: skip
        """Accept connections on `socks`, with TLS on all sockets but the control socket, which is a unix socket."""
        for sock in socks:
            context = None if sock.family == socket.AF_UNIX else tls
            self._acceptors.append(Acceptor(sock, connections, tasks, accept, context, HEADER_TIMEOUT_S))
        return self._acceptors

    def send_away(self) -> None:
        """From now on, close each connection after its next response, so that clients connect elsewhere."""
        self.chain.leaving = True

    def stop_accepting(self) -> None:
        """Stop accepting new TCP connections. The control socket stays open."""
        for acceptor in self._acceptors:
            if acceptor.sock.family != socket.AF_UNIX:
                acceptor.close()

    async def finish(self, timeout_s: float) -> None:
        """Close the connections of running invocations after their answers. Wait until these answers have been sent,
        also to slow readers, but at most `timeout_s`.
        """
        server = self._runner.server
        connections = server.connections if server is not None else []
        sending = [one.finish() for one in connections if isinstance(one, ClientConnection)]
        if waits := [one for one in sending if one is not None]:
            await asyncio.wait(waits, timeout=timeout_s)


@contextlib.asynccontextmanager
async def http_server(
    socks: Sequence[socket.socket], routes: Sequence[Route], plain: PlainCalls,
    connections: OpenConnections, tasks: asyncio.TaskGroup, tls: ssl.SSLContext | None = None, hosts: HostNames | None = None,
) -> AsyncIterator[HttpServer]:  # fmt: skip
    """Serve `routes` on `socks` inside the block. At the end of the block, running requests have one more second.

    Each request passes the chain of `plain`. Requests for a name in `hosts` go to the web app of its function.
    """
    chain = plain.chain
    app = web.Application(client_max_size=MAX_ARCHIVE_BYTES, middlewares=[chain.middleware])
    app[INCOMING], app[PARSED_BODIES], app[ANSWERS] = chain.bodies, ParsedBodies(), chain.answers
    app.add_routes(aiohttp_routes(routes))
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    http = HttpServer(runner, chain)
    app.on_response_prepare.append(chain.on_prepare)
    await runner.setup()
    if hosts is not None and runner.server is not None:
        hosts.install(runner.server)

    def accept(place: ConnectionPlace) -> asyncio.Protocol:
        if runner.server is None:
            raise GatewayError("The gateway is shutting down.")
        return PlainConnection(runner.server, plain, place=place)

    acceptors = http.listen(accept, socks, connections, tasks, tls)
    try:
        yield http
    finally:
        for acceptor in acceptors:
            acceptor.close()
        await runner.cleanup()
        app[PARSED_BODIES].close()
        app[INCOMING].close()
