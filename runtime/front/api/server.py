"""Serves the routes over HTTP on the gateway's sockets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeAlias

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Middleware

from ....errors import GatewayError
from ..http.acceptor import Acceptor
from ..http.connection import ClientConnection, FastConnection, discard_unread_body, header_timer
from ..http.host_names import HostNames
from ..http.incoming_bodies import INCOMING, IncomingBodies
from ..http.open_connections import ConnectionPlace, OpenConnections
from ..http.parsed_bodies import PARSED_BODIES, ParsedBodies
from ..http.responses import Handler, complete_headers
from ..http.routes import Route, aiohttp_routes
from ..http.self_check import why_not_fast
from .deploys import MAX_ARCHIVE_BYTES
from .fast_path import FastPath

LOG = logging.getLogger(__name__)
OnPrepare: TypeAlias = Callable[[web.Request, web.StreamResponse], Awaitable[None]]
NO_FAST_PATH = (
    "plain calls take more time, since the fast path does not work with aiohttp {version}: {reason}"
)


class HttpServer:
    """The gateway's HTTP server. Before the gateway ends, the server makes its clients connect elsewhere."""

    def __init__(self, runner: web.AppRunner, fast_path: FastPath) -> None:
        self._runner, self._fast_path = runner, fast_path
        self._acceptors: list[Acceptor] = []
        self._leaving = False

    def listen(
        self, accept: Callable[[ConnectionPlace], asyncio.Protocol], socks: Sequence[socket.socket], connections: OpenConnections,
        tasks: asyncio.TaskGroup, tls: ssl.SSLContext | None, header_timeout_s: float,
    ) -> list[Acceptor]:  # fmt: skip
        """Accept connections on `socks`, with TLS on all sockets but the control socket, which is a unix socket."""
        for sock in socks:
            context = None if sock.family == socket.AF_UNIX else tls
            self._acceptors.append(Acceptor(sock, connections, tasks, accept, context, header_timeout_s))
        return self._acceptors

    def send_away(self) -> None:
        """From now on, close each connection after its next response, so that clients connect elsewhere."""
        self._leaving = True
        self._fast_path.close()

    def stop_accepting(self) -> None:
        """Refuse new connections of other programs. The control socket stays open."""
        for acceptor in self._acceptors:
            if acceptor.sock.family != socket.AF_UNIX:
                acceptor.close()

    async def finish(self, timeout_s: float) -> None:
        """Close the connections of running invocations after their answers. Wait until these answers have been sent,
        also to slow readers.
        """
        server = self._runner.server
        connections = server.connections if server is not None else []
        sending = [one.finish() for one in connections if isinstance(one, FastConnection)]
        if waits := [one for one in sending if one is not None]:
            await asyncio.wait(waits, timeout=timeout_s)

    async def on_prepare(self, _request: web.Request, response: web.StreamResponse) -> None:
        if self._leaving:
            response.headers["Connection"] = "close"
            response.force_close()


@web.middleware
async def callers_leave(request: web.Request, handler: Handler) -> web.StreamResponse:
    """End the request of a caller that has closed the connection. Without this, aiohttp logs an error for each such
    caller.
    """
    try:
        return await handler(request)
    except ConnectionError:
        if request.transport is not None and not request.transport.is_closing():
            raise
        # aiohttp cannot send this response, and ends the connection.
        return web.Response()


@contextlib.asynccontextmanager
async def http_server(
    socks: Sequence[socket.socket], routes: Sequence[Route], middlewares: Sequence[Middleware],
    fast_path: FastPath, header_timeout_s: float, connections: OpenConnections, tasks: asyncio.TaskGroup,
    on_prepare: Sequence[OnPrepare] = (), tls: ssl.SSLContext | None = None, hosts: HostNames | None = None,
) -> AsyncIterator[HttpServer]:  # fmt: skip
    """Serve `routes` on `socks` inside the block. At its end, requests have one more second.

    Before the header of a response is sent, aiohttp calls each function in `on_prepare` with the request and the
    response. Requests for a name in `hosts` go to the web app of its function. If the installed aiohttp does not support `fast_path`, log a message and serve without it.
    """
    if reason := await why_not_fast():
        LOG.warning(NO_FAST_PATH.format(version=aiohttp.__version__, reason=reason))
        middlewares = [header_timer, *middlewares]
    app = web.Application(
        client_max_size=MAX_ARCHIVE_BYTES,
        middlewares=[callers_leave, discard_unread_body, fast_path.answers.middleware, *middlewares],
    )
    app[INCOMING], app[PARSED_BODIES] = IncomingBodies(), ParsedBodies()
    app.add_routes(aiohttp_routes(routes))
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    http = HttpServer(runner, fast_path)
    app.on_response_prepare.extend([complete_headers, *on_prepare, http.on_prepare])
    await runner.setup()
    if hosts is not None and runner.server is not None:
        hosts.install(runner.server)

    def accept(place: ConnectionPlace) -> asyncio.Protocol:
        if runner.server is None:
            raise GatewayError("The gateway is shutting down.")
        if reason:
            return ClientConnection(runner.server, header_timeout_s=header_timeout_s, place=place)
        return FastConnection(runner.server, fast_path, header_timeout_s=header_timeout_s, place=place)

    acceptors = http.listen(accept, socks, connections, tasks, tls, header_timeout_s)
    try:
        yield http
    finally:
        for acceptor in acceptors:
            acceptor.close()
        await runner.cleanup()
        app[PARSED_BODIES].close()
        app[INCOMING].close()
