"""The gateway's process: wiring, signals, and its life in three verbs: start, serve, stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import shlex
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from aiohttp import web
from aiohttp.typedefs import Middleware

from ..addresses import is_loopback
from ..errors import GatewayError, PilotflameError, UnknownFunction
from .access.control_socket import control_socket
from .access.keyring import Keyring
from .access.secrets import Secrets
from .api.access import AccessControl
from .api.admin import MAX_ARCHIVE_BYTES, Admin
from .api.backend import Backend
from .api.connection import connection_factory, header_timer, missing_internals
from .api.fast_path import FastPath
from .api.guard import Guard
from .api.invoke import Gateway
from .api.openapi import OpenApi
from .api.responses import ErrorResponses, compressed
from .api.routes import Route, aiohttp_routes, error_formats
from .api.webhooks import WebhooksApi
from .commands.watch import watch
from .dialects.registry import dialect_routes
from .events.sources import Sources
from .functions.deploy import Deployment
from .functions.registry import FunctionEvents, Functions
from .functions.store import Store
from .jobs.jobs import Jobs
from .launching.fetcher_client import FetcherClient
from .launching.launcher import Launcher
from .launching.listener import Listener
from .settings.gateway_settings import GatewaySettings
from .settings.state_dir import locked_state_dir
from .telemetry.metrics import Metrics

# A request makes some twenty objects that the collector counts, and nearly all of them go with it.
YOUNG_OBJECTS = 20_000
BACKLOG = 1024
NO_KEY_YET = (
    "{url} can be reached by others than this machine, and there is no API key yet: all but /healthz and /readyz is"
    " refused. Make a key: pilotflame keys create NAME --scope admin --state-dir {state}"
)

NO_FAST_PATH = (
    "aiohttp {version} lacks {names}: plain calls are answered in aiohttp's ordinary way, which takes more time each."
    " Install an aiohttp that pilotflame's pyproject.toml allows."
)


@dataclass(frozen=True, slots=True)
class Server:
    """A running gateway: its address and its parts."""

    url: str
    functions: Functions
    admin: Admin
    tasks: asyncio.TaskGroup
    jobs: Jobs


def run(
    settings: GatewaySettings,
    *,
    on_listening: Callable[[str], None],
    folder: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> None:
    """Serves until SIGINT or SIGTERM, then drains; a second signal ends at once.

    With `folder`, deploys it at start and again whenever it changes. Raises GatewayError if it cannot start.
    """
    if folder is not None and not folder.is_dir():
        raise GatewayError(f"{folder} is not a folder.", remedy="Give the folder that holds handler.py.")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(settings, on_listening, folder, overrides or {}))


async def _run(
    settings: GatewaySettings,
    on_listening: Callable[[str], None],
    folder: Path | None,
    overrides: Mapping[str, Any],
) -> None:
    stop = asyncio.Event()
    with _signals(stop):
        async with serve(settings) as server:
            settle_down()
            on_listening(server.url)
            if folder is not None:
                server.tasks.create_task(
                    watch(server.functions, Deployment(path=folder, overrides=overrides), stop)
                )
            await stop.wait()


def settle_down() -> None:
    """What is there now stays: the collector need not look at it again and again, and at what is new less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


@contextlib.asynccontextmanager
async def serve(settings: GatewaySettings) -> AsyncIterator[Server]:
    """A gateway that accepts requests inside the block and has drained after it."""
    with locked_state_dir(settings.state_dir) as state:
        store = Store(state, _say)
        await asyncio.to_thread(store.start)
        listener = Listener(state / "run" / "link.sock")
        listener.open()
        try:
            async with _server(settings, store, state, listener) as server:
                yield server
        finally:
            listener.close()


@contextlib.asynccontextmanager
async def _server(
    settings: GatewaySettings, store: Store, state: Path, listener: Listener
) -> AsyncIterator[Server]:
    sock = _bind(settings)
    try:
        keyring, vault = Keyring(state), Secrets(state)
        await asyncio.to_thread(keyring.load)
        await asyncio.to_thread(vault.load)
        local = is_loopback(sock.getsockname()[0])
        if not local and not keyring.exists:
            _say(NO_KEY_YET.format(url=_url(sock), state=shlex.quote(str(state))))
        async with asyncio.TaskGroup() as tasks:
            launcher = Launcher(listener, tasks)
            weights = FetcherClient(settings.cache_dir, tasks)
            events = FunctionEvents()
            functions = Functions(
                store, state / "environments", launcher, tasks, weights, vault, events,
                drain_s=settings.drain_s,
            )  # fmt: skip
            metrics = Metrics(functions.census)
            events.activated.append(metrics.activated)
            await functions.restore()
            admin = Admin(functions, metrics, local=local)
            async with _jobs(state, functions, events, tasks, settings) as (jobs, sources):
                backend = Backend(functions, jobs, metrics, settings.max_body_bytes, settings.body_timeout_s)
                gateway, access = Gateway(backend), AccessControl(keyring, vault, functions)
                apis = (gateway, admin, access, WebhooksApi(functions, jobs))
                own_routes = [route for api in apis for route in api.routes()]
                routes = OpenApi([*own_routes, *dialect_routes(backend)], admin.statuses).routes
                guard = Guard(
                    keyring, tasks, routes,
                    required=settings.auth == "always" or not local, on_quota=_counted(functions, metrics),
                )  # fmt: skip
                errors = ErrorResponses(error_formats(routes))
                with control_socket(state) as own:
                    async with _http(
                        [sock, own],
                        routes,
                        [compressed, errors.middleware, guard.middleware],
                        FastPath(gateway, functions, guard),
                        settings.header_timeout_s,
                    ):
                        try:
                            yield Server(_url(sock), functions, admin, tasks, jobs)
                        finally:
                            admin.draining = True
                            jobs.stop()
                            await _close(functions, sources)
            await weights.close()
            await launcher.close()
    finally:
        sock.close()


def _counted(functions: Functions, metrics: Metrics) -> Callable[[str, PilotflameError], None]:
    """Counts what is refused before it reaches a function; by the names that are there: anybody can make names up."""

    def count(name: str, error: PilotflameError) -> None:
        with contextlib.suppress(UnknownFunction, GatewayError):
            functions.get(name)
            metrics.turned_away(name, error)

    return count


@contextlib.asynccontextmanager
async def _jobs(
    state: Path,
    functions: Functions,
    events: FunctionEvents,
    tasks: asyncio.TaskGroup,
    settings: GatewaySettings,
) -> AsyncIterator[tuple[Jobs, Sources]]:
    """The jobs of these functions, from those that the last life of the gateway left on; and what sources bring."""
    jobs = Jobs(state, functions.get, tasks, settings)
    await jobs.start()
    sources = Sources(jobs, tasks, functions.log, drain_s=settings.drain_s)

    def live(name: str) -> None:
        jobs.wake(name)
        with contextlib.suppress(GatewayError):  # going down: then there is nothing to begin any more
            sources.start(name, functions.get(name).record.settings)

    def gone(name: str) -> None:
        sources.stop(name)
        jobs.forget(name)

    for function in functions.all():
        sources.start(function.record.function, function.record.settings)
    events.live.append(live)
    events.deleted.append(gone)
    try:
        yield jobs, sources
    finally:
        await jobs.close()


async def _close(functions: Functions, sources: Sources) -> None:
    """Together: what sources brought and runs may end, and is then deleted where it came from."""
    async with asyncio.TaskGroup() as closing:
        closing.create_task(sources.close())
        closing.create_task(functions.close())


@contextlib.asynccontextmanager
async def _http(
    socks: list[socket.socket],
    routes: list[Route],
    middlewares: list[Middleware],
    fast_path: FastPath,
    header_timeout_s: float,
) -> AsyncIterator[None]:
    missing = missing_internals()
    if missing:
        _say(NO_FAST_PATH.format(version=aiohttp.__version__, names=", ".join(missing)))
    app = web.Application(
        client_max_size=MAX_ARCHIVE_BYTES,
        middlewares=[*([header_timer] if missing else []), *middlewares],
    )
    app.add_routes(aiohttp_routes(routes))
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    loop = asyncio.get_running_loop()
    accept = connection_factory(runner, None if missing else fast_path, header_timeout_s)
    servers = [await loop.create_server(accept, sock=sock, backlog=BACKLOG) for sock in socks]
    try:
        yield
    finally:
        for server in servers:
            server.close()
        await runner.cleanup()
        for server in servers:
            await server.wait_closed()


def _bind(settings: GatewaySettings) -> socket.socket:
    """A bound socket. Raises GatewayError if the address is taken or not ours."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise GatewayError(
            f"{settings.host} is no address of this machine: {error}.", remedy="Use --host 127.0.0.1."
        ) from None
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise GatewayError(
            f"Cannot listen on {settings.host}:{settings.port}: {error.strerror}.",
            remedy="Choose another --port (0 takes a free one), or stop what listens there.",
        ) from None
    return sock


def _url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.contextmanager
def _signals(stop: asyncio.Event) -> Iterator[None]:
    """SIGINT and SIGTERM set `stop`; the second one ends the process as if nobody had caught it."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def caught() -> None:
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        _say("draining; press Ctrl-C again to stop at once")
        stop.set()

    for number in numbers:
        loop.add_signal_handler(number, caught)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _say(text: str) -> None:
    sys.stderr.write(f"pilotflame: {text}\n")
