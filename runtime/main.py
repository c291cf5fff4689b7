"""Runs the gateway's process: creates its parts, connects them, serves, and shuts down."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import shlex
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from .._version import __version__
from ..addresses import is_loopback
from ..errors import GatewayError, PilotflameError, UnknownFunction
from .access.control_socket import control_socket
from .access.keyring import Keyring
from .access.secrets import Secrets
from .api.access import AccessControl
from .api.access_log import AccessLog
from .api.admin import Admin
from .api.audit import Audit
from .api.backend import Backend
from .api.cross_origin import CrossOrigin
from .api.docs_page import DocsPage
from .api.fast_path import FastPath
from .api.guard import Guard
from .api.invoke import Gateway
from .api.logs import LogsApi
from .api.openapi import OpenApi
from .api.origins import Origins
from .api.responses import ErrorResponses, compressed
from .api.revisions import RevisionsApi
from .api.routes import Route, error_formats
from .api.server import bind, http_server, url_of
from .api.webhooks import WebhooksApi
from .commands.watch import watch
from .dialects.registry import Dialects
from .events.sources import Sources
from .functions.deploy import Deployment
from .functions.registry import FunctionEvents, Functions
from .functions.rest import Rest
from .functions.store import Retention, Store
from .jobs.jobs import Jobs
from .jobs.webhook_signing import load_key
from .launching.container_launcher import ContainerLauncher, find_engine
from .launching.fetcher_client import FetcherClient
from .launching.launcher import LauncherByImage
from .launching.listener import Listener
from .launching.process_launcher import ProcessLauncher
from .settings.gateway_settings import GatewaySettings
from .settings.state_dir import free_bytes, is_disk_full, locked_state_dir
from .telemetry.background import BackgroundTasks
from .telemetry.gateway_log import gateway_logging
from .telemetry.log_files import ACCESS, AUDIT, LogFiles
from .telemetry.logs import Logs
from .telemetry.metrics import Metrics, Reading

LOG = logging.getLogger(__name__)
# How many new objects trigger a garbage collection. A request creates about twenty objects that the collector
# counts. Nearly all of them are freed when the request ends, so frequent collections would find nothing.
YOUNG_OBJECTS = 20_000
NO_KEY_YET = (
    "{url} can be reached by other machines, and there is no API key yet: all routes except /healthz and"
    " /readyz refuse requests. Create a key: pilotflame keys create NAME --scope admin --state-dir {state}"
)


@dataclass(frozen=True, slots=True)
class Server:
    """A running gateway: its address and its parts."""

    url: str
    functions: Functions
    admin: Admin
    tasks: BackgroundTasks
    jobs: Jobs
    sources: Sources


def run(
    settings: GatewaySettings,
    *,
    on_listening: Callable[[str], None],
    folder: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM, then drain. A second signal ends the process at once.

    `on_listening` is called with the gateway's URL once it accepts requests. If `folder` is given, it is
    deployed at the start and after each change. Raise GatewayError if the gateway cannot start.
    """
    if folder is not None and not folder.is_dir():
        raise GatewayError(f"{folder} is not a folder.", remedy="Give the folder that holds handler.py.")

    async def run_until_signal() -> None:
        stop = asyncio.Event()
        with _capture_signals(stop):
            async with serve(settings) as server:
                # Exempt all objects that exist now from garbage collection, and collect new ones less often.
                gc.collect()
                gc.freeze()
                gc.set_threshold(YOUNG_OBJECTS)
                on_listening(server.url)
                if folder is not None:
                    deployment = Deployment(path=folder, overrides=overrides or {})
                    follow = functools.partial(watch, folder, server.functions, deployment, stop)
                    server.tasks.keep(follow, name="watch")
                await stop.wait()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run_until_signal())


@contextlib.asynccontextmanager
async def serve(settings: GatewaySettings) -> AsyncIterator[Server]:
    """Run a gateway: it accepts requests inside the `async with` block and drains when the block ends."""
    async with contextlib.AsyncExitStack() as stack:
        yield await startup(settings, stack)


async def startup(settings: GatewaySettings, stack: contextlib.AsyncExitStack) -> Server:
    """Start each part after the parts that it uses. Closing `stack` drains and closes them in reverse."""
    state = stack.enter_context(locked_state_dir(settings.state_dir))
    logs = await _open_logs(state, settings, stack)
    store = Store(state, LOG.warning, Retention(settings.keep_revisions, settings.keep_revisions_bytes))
    await asyncio.to_thread(store.start)
    sock = stack.enter_context(bind(settings.host, settings.port))
    local = is_loopback(sock.getsockname()[0])
    keyring, secrets = await asyncio.to_thread(_load_access, state)
    if not local and not keyring.exists:
        LOG.warning(NO_KEY_YET.format(url=url_of(sock), state=shlex.quote(str(state))))

    listener = _listen(state, stack)
    tasks = await stack.enter_async_context(BackgroundTasks())
    launcher, fetcher = _launcher(settings, listener, state, tasks), FetcherClient(settings.cache_dir, tasks)
    for part in (launcher, fetcher):
        stack.push_async_callback(part.close)
    events = FunctionEvents()
    functions = Functions(
        store, state / "environments", launcher, tasks, fetcher, secrets, events, logs, settings.drain_s
    )
    stack.callback(functions.close_threads)
    metrics = Metrics(functions.census, tasks.failures, [fetcher.metrics], lambda: logs.files.dropped)
    rest = Rest(functions.all, launcher, tasks, settings.rest_mb)
    stack.callback(rest.close)
    _observe(events, metrics, rest)
    await functions.restore()
    rest.note_change()

    key = await asyncio.to_thread(load_key, state)
    jobs = Jobs(state, key, functions.get, tasks, settings)
    await jobs.start()
    stack.push_async_callback(jobs.close)
    sources = Sources(jobs, tasks, functions.log, drain_s=settings.drain_s)
    _connect(events, functions, jobs, sources)
    metrics.readers += [
        jobs.readings, sources.readings, keyring.readings, functools.partial(_disk_readings, state),
    ]  # fmt: skip

    admin = Admin(
        functions, metrics, logs, local=local,
        disk_full=functools.partial(is_disk_full, state, settings.min_free_bytes),
    )  # fmt: skip
    backend = Backend(
        functions, jobs, metrics, settings.max_body_bytes, settings.body_timeout_s, state,
        Origins(settings.trusted_proxies),
    )  # fmt: skip
    gateway, dialects = Gateway(backend), Dialects(backend)
    stack.callback(tasks.keep(dialects.sweep, name="files_sweep").cancel)
    apis = (
        gateway, admin, LogsApi(functions, logs), RevisionsApi(functions), AccessControl(keyring, secrets, functions),
        WebhooksApi(functions, jobs), DocsPage(),
    )  # fmt: skip
    own_routes = [route for api in apis for route in api.routes()]
    routes = OpenApi([*own_routes, *dialects.routes()], admin.statuses).routes
    cors = CrossOrigin(functions, routes, settings.cors_origins)
    guard = Guard(
        keyring, tasks, routes, cors, required=settings.auth == "always" or not local,
        on_quota=functools.partial(_count_refusal, functions, metrics),
        max_body_bytes=settings.max_body_bytes, body_timeout_s=settings.body_timeout_s,
    )  # fmt: skip
    errors = ErrorResponses(error_formats(routes))
    requests = AccessLog(logs.book(ACCESS)) if settings.access_log else None
    audit = _open_audit(routes, logs, stack)
    await stack.enter_async_context(
        http_server(
            [sock, stack.enter_context(control_socket(state))], routes,
            [
                *([requests.middleware] if requests is not None else []), cors.middleware, compressed,
                errors.middleware, guard.middleware, audit.middleware,
            ],
            FastPath(gateway, functions, guard, routes, requests), settings.header_timeout_s, [cors.on_prepare],
        )
    )  # fmt: skip
    server = Server(url_of(sock), functions, admin, tasks, jobs, sources)
    stack.push_async_callback(shutdown, server)
    return server


async def _open_logs(state: Path, settings: GatewaySettings, stack: contextlib.AsyncExitStack) -> Logs:
    """Open the logs, and let the gateway's own messages go there and to standard error."""
    files = LogFiles(state / "logs", max_bytes=settings.log_max_bytes, keep_s=settings.log_keep_s)
    await asyncio.to_thread(files.start)
    stack.push_async_callback(asyncio.to_thread, files.close)
    logs = Logs(files)
    stack.enter_context(gateway_logging(logs, settings.log_level, settings.log_format))
    return logs


def _listen(state: Path, stack: contextlib.AsyncExitStack) -> Listener:
    """Open the socket that zygotes and workers dial, and close it with `stack`."""
    listener = Listener(state / "run" / "link.sock")
    listener.open()
    stack.callback(listener.close)
    return listener


def _launcher(
    settings: GatewaySettings, listener: Listener, state: Path, tasks: BackgroundTasks
) -> LauncherByImage:
    containers = ContainerLauncher(settings.engine or find_engine(), listener, tasks, str(state), LOG.warning)
    return LauncherByImage(ProcessLauncher(listener, tasks, state), containers)


async def _disk_readings(state: Path) -> list[Reading]:
    free = await asyncio.to_thread(free_bytes, state)
    return [Reading("state_free_bytes", "Free space for the state folder.", {(): free}, ())]


def _load_access(state: Path) -> tuple[Keyring, Secrets]:
    """Read the API keys and secrets. Blocks. Raise GatewayError if a file is damaged."""
    keyring, secrets = Keyring(state), Secrets(state)
    keyring.load()
    secrets.load()
    return keyring, secrets


def _open_audit(routes: Sequence[Route], logs: Logs, stack: contextlib.AsyncExitStack) -> Audit:
    """Open the audit log, which also says when the gateway starts and stops."""
    audit = Audit(routes, logs.book(AUDIT))
    audit.note_gateway("Start", __version__)
    stack.callback(audit.note_gateway, "Stop", __version__)
    return audit


async def shutdown(server: Server) -> None:
    """Refuse new work, finish what runs, and release messages of event sources that no job is running for."""
    server.admin.draining = True
    server.jobs.stop()
    # Not a task group of their own: if one failed, it would cancel the other.
    parts = (server.sources.close(), server.functions.close())
    await asyncio.wait([server.tasks.create_task(part) for part in parts])


def _observe(events: FunctionEvents, metrics: Metrics, rest: Rest) -> None:
    """Tell the metrics and what limits the memory at rest when workers start and when functions come and go."""
    events.activated.append(metrics.activated)
    events.removed.append(metrics.forget)
    for notice in (events.activated, events.live, events.removed):
        notice.append(rest.note_change)


def _connect(events: FunctionEvents, functions: Functions, jobs: Jobs, sources: Sources) -> None:
    """Tell jobs and event sources when a function becomes live and when it is deleted."""

    def live(name: str) -> None:
        jobs.wake(name)
        # GatewayError: the gateway is shutting down, so no event source is started.
        with contextlib.suppress(GatewayError):
            sources.start(name, functions.get(name).record.settings)

    def gone(name: str) -> None:
        sources.stop(name)
        jobs.forget(name)

    for function in functions.all():
        sources.start(function.record.function, function.record.settings)
    events.live.append(live)
    events.deleted.append(gone)


def _count_refusal(functions: Functions, metrics: Metrics, name: str, error: PilotflameError) -> None:
    """Count a request that a quota refused, if its function exists: callers can invent names."""
    with contextlib.suppress(UnknownFunction, GatewayError):
        functions.get(name)
        metrics.turned_away(name, error)


@contextlib.contextmanager
def _capture_signals(stop: asyncio.Event) -> Iterator[None]:
    """Inside the block, the first SIGINT or SIGTERM sets `stop`, and the second one ends the process."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def on_signal() -> None:
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        LOG.info("draining; press Ctrl-C again to stop at once")
        stop.set()

    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
