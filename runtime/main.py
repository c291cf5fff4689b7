"""Runs the gateway's process: creates its parts, connects them, serves, and shuts down."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import shlex
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from .._version import __version__
from ..addresses import Addresses, is_loopback
from ..entry_points import APIS, DIALECTS, OBSERVERS, check_names, load
from ..errors import GatewayError, PilotflameError, UnknownFunction
from ..handlers.recognise import Dialects
from ..snapshot.caching.node import Budgets
from ..snapshot.extras import require
from .access.control_socket import control_socket
from .access.deploy_policy import DeployPolicies, DeployPolicy
from .access.keyring import Keyring
from .access.keys import ANYBODY
from .access.secrets import Secrets
from .alerting.alerts import FunctionAlerts
from .api.access import AccessControl
from .api.admin import Admin
from .api.backend import Backend
from .api.console import Console
from .api.deploys import Deploys
from .api.docs_page import DocsPage
from .api.fast_path import FastPath
from .api.guard import Guard
from .api.history import HistoryApi
from .api.invoke import Gateway
from .api.logs import LogsApi
from .api.openapi import OpenApi
from .api.plugin import ApiPlugin, Plugins
from .api.revisions import RevisionsApi
from .api.server import HttpServer, http_server
from .api.standalone import Standalone
from .api.usage import UsageApi
from .api.warmup import WarmupApi
from .api.webhooks import WebhooksApi
from .billing.ledger import Ledger
from .billing.usage import Prices
from .billing.usage_store import UsageStore
from .commands.watch import watch
from .events.message_queue import Identity
from .events.sources import Sources
from .functions.deploy import Deployment
from .functions.function_events import FunctionEvents
from .functions.prewarming import Prewarming
from .functions.registry import Functions
from .functions.rest import Rest
from .functions.store import Retention, Store
from .generation.token_counts import TokenCounts
from .http.access_log import AccessLog
from .http.audit import Audit
from .http.cross_origin import CrossOrigin
from .http.endless_answers import EndlessAnswers
from .http.host_names import HostNames
from .http.large_answers import LargeAnswers
from .http.listening import bind, url_of
from .http.origins import Origins
from .http.responses import ErrorResponses, compressed
from .http.routes import Route, error_formats, joined
from .http.tls import Certificate
from .jobs.jobs import Jobs
from .launching.container_engine import find_engine
from .launching.container_launcher import ContainerLauncher
from .launching.fetcher_client import FetcherClient, Sharing
from .launching.gpu_driver import GpuDriver
from .launching.gpus import find_driver
from .launching.launcher import LauncherByImage
from .launching.listener import Listener
from .launching.process_launcher import ProcessLauncher
from .measuring.metering import Metering
from .measuring.node_memory import MemoryMeter
from .measuring.recorder import Recorder
from .reconciling.function_histories import FunctionHistories
from .reconciling.gpu_places import GpuPlaces
from .reconciling.reconciler import Reconciler
from .scaling.placement import Gpu
from .serving.response_cache import ResponseCache
from .settings.function_settings import FunctionSettings, read_settings
from .settings.gateway_settings import GatewaySettings
from .settings.state_dir import free_bytes, is_disk_full, locked_state_dir, running_marker
from .telemetry.background import BackgroundTasks
from .telemetry.disk import Disk
from .telemetry.gateway_log import Format, gateway_logging, print_log
from .telemetry.log_files import ACCESS, AUDIT, LogFiles
from .telemetry.logs import Logs
from .telemetry.metrics import Metrics, Reading
from .webhooks.signing import load_key

LOG = logging.getLogger(__name__)
# A garbage collection starts after this number of new objects. A request creates about twenty objects that the
# collector counts. Nearly all of them are freed when the request ends, so frequent collections would find nothing.
YOUNG_OBJECTS = 20_000
# A gateway that other machines can reach serves new requests for this time after SIGTERM. Kubernetes informs the load
# balancers when it sends the signal, and the load balancers need a second or two to react.
LAME_DUCK_S = 3.0
# At shutdown, slow clients have at least this time to read answers that are complete.
LAST_BYTES_S = 1.0
NO_SHUTDOWN = (
    "the previous gateway (%s) ended without shutdown; restored: %d functions, %d jobs that were running and run again,"
    " %d jobs that failed because it was their last attempt"
)
NO_ENGINE = (
    "there is no container engine, so nothing can be deployed with the API keys that may only deploy containers: {names}."
    " Install docker or podman, or see `pilotflame keys create --help` for --trusted."
)
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
    http: HttpServer
    endless: EndlessAnswers
    standalone: Standalone | None
    lame_duck_s: float

    def leave(self) -> None:
        """Announce the end of this gateway: /readyz reports it, and connections close after their next response."""
        self.admin.draining = True
        self.http.send_away()


class Stop(asyncio.Event):
    """An event that is set when the process must end, because of a signal or because it cannot serve."""

    def __init__(self) -> None:
        super().__init__()
        self.signal: int | None = None
        self.error: PilotflameError | None = None

    def by_signal(self, number: int) -> None:
        self.signal = number
        self.set()

    def by_error(self, error: PilotflameError) -> None:
        self.error = error
        self.set()


def run(
    settings: GatewaySettings,
    *,
    on_listening: Callable[[str], None],
    folder: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    standalone: bool = False,
) -> None:
    """Serve until SIGINT or SIGTERM, then drain. A second signal ends the process at once.

    Once the gateway accepts requests, this calls `on_listening` with the gateway's URL. If `folder` is given, it is
    deployed at the start and after each change. With `standalone`, `folder` is the only function and is deployed only
    once. Raise GatewayError if the gateway cannot start, and the error of the deploy if a standalone function cannot be
    deployed.
    """
    if folder is not None and not folder.is_dir():
        raise GatewayError(f"{folder} is not a folder.", remedy="Give the folder that holds handler.py.")
    deployment = Deployment(path=folder, overrides=overrides or {}, standalone=standalone)
    alone: FunctionSettings | None = None
    if folder is not None and standalone:
        alone = read_settings(folder, overrides=overrides, standalone=True)

    async def run_until_signal() -> None:
        stop = Stop()
        with _capture_signals(stop):
            async with serve(settings, alone) as server:
                # Exempt all objects that exist now from garbage collection, and collect new objects less often.
                gc.collect()
                gc.freeze()
                gc.set_threshold(YOUNG_OBJECTS)
                on_listening(server.url)
                if server.standalone is not None:
                    opening = _open(server.standalone, server.functions, deployment, stop)
                    server.standalone.follow(server.tasks.create_task(opening, name="deploy"))
                elif folder is not None:
                    follow = functools.partial(watch, folder, server.functions, deployment, stop)
                    server.tasks.keep(follow, name="watch")
                await stop.wait()
                if stop.signal == signal.SIGTERM:
                    server.leave()
                    await asyncio.sleep(server.lame_duck_s)
        if stop.error is not None:
            raise stop.error

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run_until_signal())


@contextlib.asynccontextmanager
async def serve(settings: GatewaySettings, alone: FunctionSettings | None = None) -> AsyncIterator[Server]:
    """Run a gateway: it accepts requests inside the `async with` block and drains when the block ends.

    If `alone` is given, it has the settings of the gateway's only function, which the caller deploys.
    """
    failed: PilotflameError | None = None
    async with contextlib.AsyncExitStack() as stack:
        try:
            server = await startup(settings, stack, alone)
        except PilotflameError as error:
            # A group of tasks on the stack would wrap it.
            failed = error
        else:
            yield server
    if failed is not None:
        raise failed


async def startup(
    settings: GatewaySettings, stack: contextlib.AsyncExitStack, alone: FunctionSettings | None = None
) -> Server:
    """Start each part after the parts that it uses. When `stack` closes, it drains and closes the parts in reverse."""
    plugin_apis = _plugin_apis(settings)
    state = stack.enter_context(locked_state_dir(settings.state_dir))
    previous = stack.enter_context(running_marker(state))
    disk = Disk(state, functools.partial(is_disk_full, state, settings.min_free_bytes))
    logs = await _open_logs(state, settings, disk, stack)
    store = Store(state, LOG.warning, _retention(settings))
    await asyncio.to_thread(store.start)
    certificate = _load_certificate(settings, stack)
    sock = stack.enter_context(bind(settings.host, settings.port))
    url = url_of(sock, tls=certificate is not None)
    local = is_loopback(sock.getsockname()[0])
    keyring, secrets = await asyncio.to_thread(_load_access, state)
    engine, local_only = settings.engine or find_engine(), alone is not None and settings.auth != "always"
    _warn_of_keys(engine, keyring, state, url, local=local or local_only)

    sharing = _sharing(settings)
    listener = _listen(state, stack)
    tasks = await stack.enter_async_context(BackgroundTasks())
    gpus, driver = await asyncio.to_thread(_find_gpus, settings)
    launcher, fetcher = await _launcher(
        settings, engine, listener, state, tasks, sharing, (gpus, driver.cdi_kind), stack
    )
    events = FunctionEvents(logged=logs.logged)
    ledger = await _open_ledger(settings, state, lambda: metrics, stack)
    functions = Functions(
        store, state / "environments", launcher, tasks, fetcher, secrets, events, logs, settings,
        await FunctionHistories.open(state / "habits", tasks, ledger.account),
        Reconciler(GpuPlaces(gpus, driver), settings.max_workers, keyring.max_workers),
        Dialects(load(DIALECTS, settings.plugins).values()),
        _deploy_policies(settings, keyring),
    )  # fmt: skip
    stack.callback(functions.close_threads)
    metrics = Metrics(functions.worker_counts, tasks.failures, [fetcher.metrics], lambda: logs.files.dropped)
    rest, memory = _observe(functions, metrics, ledger, keyring, settings, stack)
    # A gateway for one function deploys this function anew. It serves no other function of an older state folder.
    if alone is None:
        await functions.restore()
    rest.note_change()

    jobs = await _open_jobs(state, functions, settings, disk, previous, plugin_apis.values(), stack)
    sources = Sources(
        jobs, tasks, functions.log, drain_s=settings.drain_s, on_backlog=functions.expect, plugins=settings.plugins,
        identity=functools.partial(_identity, functions),
    )  # fmt: skip
    prewarming = Prewarming(functions, learned=settings.learn_upstreams)
    await _connect(functions, jobs, sources, prewarming, stack)
    metrics.readers += [
        jobs.readings, sources.readings, prewarming.readings, keyring.readings, ledger.readings,
        functools.partial(_disk_readings, state, disk), functions.gpus.readings,
    ]  # fmt: skip

    admin = Admin(
        functions, metrics, logs, memory, sources=sources.statuses,
        disk_full=disk.look,
        starting=lambda: standalone is not None and standalone.is_starting(),
    )  # fmt: skip
    backend = Backend(
        functions, jobs, settings.max_body_bytes, settings.body_timeout_s, state,
        Origins(settings.trusted_proxies), disk, endless := EndlessAnswers(), _response_cache(functions, metrics, settings),
    )  # fmt: skip
    gateway = Gateway(backend)
    plugins = Plugins(plugin_apis, backend, bare=settings.bare_paths, alone=alone is not None)
    stack.callback(plugins.start(tasks, metrics))
    apis = (
        gateway, admin, Deploys(functions, disk.check, local=local and alone is None), LogsApi(functions, logs, endless), RevisionsApi(functions),
        AccessControl(keyring, secrets, functions, endless, engine),
        WebhooksApi(functions, jobs), HistoryApi(functions, _recorder(functions, state, stack)), DocsPage(plugins.root),
        UsageApi(ledger), Console(functions, metrics, endless), WarmupApi(functions),
    )  # fmt: skip
    rows = joined({"pilotflame": [row for api in apis for row in api.routes()], **plugins.rows()})
    standalone = _standalone(alone, functions, rows, settings.log_format, stack)
    routes = OpenApi(
        [*rows, *(standalone.routes if standalone is not None else [])],
        admin.statuses,
        plugins.all,
    ).routes
    cors, control = (
        CrossOrigin(functions, routes, settings.cors_origins, lambda: local and not guard.closed),
        stack.enter_context(control_socket(state)),
    )
    guard = Guard(
        keyring, control, tasks, routes, cors, local=local,
        required=settings.auth == "always" or not (local or standalone is not None),
        names=lambda: [live.record.function for live in functions.all()], owns=functions.owns, anybody=ANYBODY if standalone is None else standalone.caller,
        open_to_anybody=frozenset() if standalone is None else standalone.open_routes, on_quota=functools.partial(_count_refusal, functions, metrics),
        max_body_bytes=settings.max_body_bytes, body_timeout_s=settings.body_timeout_s,
    )  # fmt: skip
    hosts, requests = (
        _host_names(functions, plugins, settings),
        AccessLog(logs.channel(ACCESS)) if settings.access_log else None,
    )
    http = await stack.enter_async_context(
        http_server(
            [sock, control.sock], routes,
            [
                *([standalone.name_function] if standalone is not None else []),
                *([requests.middleware] if requests is not None else []), cors.middleware, compressed,
                ErrorResponses(error_formats(routes)).middleware, guard.middleware, (audit := _open_audit(routes, logs, stack)).middleware,
                *([standalone.hold] if standalone is not None else []),
            ],
            FastPath(gateway, functions, guard, routes, LargeAnswers(settings.body_timeout_s), requests, alone.name if alone is not None else "", hosts.claims, plugins.takers),
            settings.header_timeout_s, [cors.on_prepare], certificate.context if certificate is not None else None, hosts,
        )
    )  # fmt: skip
    await stack.enter_async_context(plugins.listening(settings.plugin_ports, guard, audit, certificate))
    server = Server(
        url, functions, admin, tasks, jobs, sources, http, endless, standalone,
        _lame_duck_s(settings, local=local),
    )  # fmt: skip
    stack.push_async_callback(shutdown, server)
    return server


def _warn_of_keys(engine: str | None, keyring: Keyring, state: Path, url: str, *, local: bool) -> None:
    """Warn of API keys with which nothing can be deployed, and if other machines reach the gateway, of missing keys."""
    if (names := keyring.container_only) and not engine:
        LOG.warning("%s", NO_ENGINE.format(names=", ".join(names)))
    if not local and not keyring.exists:
        LOG.warning("%s", NO_KEY_YET.format(url=url, state=shlex.quote(str(state))))


def _deploy_policies(settings: GatewaySettings, keyring: Keyring) -> DeployPolicies:
    """Return the policies for deploys. Raise PackageMissing if signatures are required and cannot be checked."""
    if settings.snapshot_signers:
        require({"The setting snapshot_signers": "cryptography"})
    gateway = DeployPolicy(
        kind=settings.policy_kind, networks=settings.policy_networks, images=settings.policy_images,
        snapshots=settings.policy_snapshots, queues=settings.policy_queues, gpus=settings.policy_gpus,
        memory_mb=settings.policy_memory_mb, cpus=settings.policy_cpus,
    )  # fmt: skip
    return DeployPolicies(
        gateway, keyring.policy, settings.snapshot_identity,
        Addresses.of(settings.snapshot_networks), Addresses.of(settings.queue_networks), settings.snapshot_signers,
    )  # fmt: skip


def _identity(functions: Functions, name: str) -> Identity:
    """Return what the event sources of a function may use. Raise the errors of `Functions.get`."""
    access = functions.policies.queue_access(functions.get(name).record.deployed_by)
    return Identity(functools.partial(functions.secrets.of, name), access)


async def _open_logs(
    state: Path, settings: GatewaySettings, disk: Disk, stack: contextlib.AsyncExitStack
) -> Logs:
    """Open the logs. The gateway's own messages go to its log and to standard error."""
    files = LogFiles(
        state / "logs", max_bytes=settings.log_max_bytes, keep_s=settings.log_keep_s, on_written=disk.wrote
    )
    await asyncio.to_thread(files.start)
    stack.push_async_callback(asyncio.to_thread, files.close)
    logs = Logs(files)
    stack.enter_context(gateway_logging(logs, settings.log_level, settings.log_format))
    return logs


async def _open_jobs(
    state: Path, functions: Functions, settings: GatewaySettings, disk: Disk, previous: str,
    plugins: Iterable[type[ApiPlugin]], stack: contextlib.AsyncExitStack,
) -> Jobs:  # fmt: skip
    """Open the jobs, and close them with `stack`. If `previous` names a gateway that crashed, log what was restored."""
    key = await asyncio.to_thread(load_key, state)
    bodies = {form: make for plugin in plugins for form, make in plugin.webhook_bodies.items()}
    jobs = Jobs(state, key, functions.get, functions.tasks, settings, disk.wrote, bodies)
    again, failed = await jobs.start()
    stack.push_async_callback(jobs.close)
    if previous:
        LOG.warning(NO_SHUTDOWN, previous, len(functions.all()), again, failed)
    return jobs


def _plugin_apis(settings: GatewaySettings) -> dict[str, type[ApiPlugin]]:
    """Return the APIs of the plugins that are on. Raise PluginError if a plugin in the settings is not installed."""
    check_names(settings.plugins or ())
    return load(APIS, settings.plugins)


def _load_certificate(settings: GatewaySettings, stack: contextlib.AsyncExitStack) -> Certificate | None:
    """Return the certificate if the gateway serves HTTPS. On SIGHUP, the gateway reads the certificate again."""
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    certificate = Certificate(settings.tls_cert, settings.tls_key)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, certificate.reload)
    stack.callback(loop.remove_signal_handler, signal.SIGHUP)
    return certificate


def _listen(state: Path, stack: contextlib.AsyncExitStack) -> Listener:
    """Open the socket to which zygotes and workers connect, and close it with `stack`."""
    listener = Listener(state / "run" / "link.sock")
    listener.open()
    stack.callback(listener.close)
    return listener


def _retention(settings: GatewaySettings) -> Retention:
    return Retention(
        settings.keep_revisions, settings.keep_revisions_bytes, settings.keep_compiled_bytes,
        settings.keep_prefixes_bytes,
    )  # fmt: skip


async def _launcher(
    settings: GatewaySettings, engine: str | None, listener: Listener, state: Path, tasks: BackgroundTasks,
    sharing: Sharing | None, gpus: tuple[Sequence[Gpu], str], stack: contextlib.AsyncExitStack,
) -> tuple[LauncherByImage, FetcherClient]:  # fmt: skip
    """Make the launcher and the fetcher, and close them with `stack`.

    Raise LauncherError if the fetcher cannot serve chunks to peers.
    """
    budgets = Budgets(settings.cache_memory_mb, settings.cache_disk_mb)
    containers = ContainerLauncher(engine, listener, tasks, str(state), LOG.warning, budgets, *gpus)
    launcher = LauncherByImage(ProcessLauncher(listener, tasks, state, settings.cache_dir), containers)
    fetcher = FetcherClient(settings.cache_dir, tasks, budgets, sharing)
    # `stack` closes the launcher first, because its containers have folders of the fetcher's cache mounted.
    for close in (fetcher.close, launcher.close):
        stack.push_async_callback(close)
    await fetcher.share()
    return launcher, fetcher


def _sharing(settings: GatewaySettings) -> Sharing | None:
    """Return how this node exchanges chunks of snapshots with its peers, or None if it has no peers.

    Raise GatewayError if the port for peers is taken.
    """
    if not settings.peers or settings.peers_token is None:
        return None
    try:
        # Check the port here, before the gateway has started anything. Later, the fetcher binds it again.
        bind(settings.host, settings.peers_port).close()
    except GatewayError as error:
        raise GatewayError(error.message, remedy="Choose another PILOTFLAME_PEERS_PORT.") from None
    certificate = None
    if settings.peers[0].startswith("https:") and settings.tls_cert is not None:
        certificate = (str(settings.tls_cert), str(settings.tls_key))
    token = settings.peers_token.get_secret_value()
    return Sharing(settings.host, settings.peers_port, settings.peers, token, certificate)


async def _disk_readings(state: Path, disk: Disk) -> list[Reading]:
    free = await asyncio.to_thread(free_bytes, state)
    await asyncio.to_thread(disk.look)
    return [Reading("state_free_bytes", "Free space for the state folder.", {(): free}, ())]


def _load_access(state: Path) -> tuple[Keyring, Secrets]:
    """Read the API keys and secrets. Blocks. Raise GatewayError if a file is damaged."""
    keyring, secrets = Keyring(state), Secrets(state)
    keyring.load()
    secrets.load()
    return keyring, secrets


def _response_cache(functions: Functions, metrics: Metrics, settings: GatewaySettings) -> ResponseCache:
    cache = ResponseCache(settings.response_cache_mb << 20)
    functions.events.live.append(cache.forget)
    functions.events.removed.append(cache.remove)
    metrics.readers.append(cache.readings)
    return cache


def _host_names(functions: Functions, plugins: Plugins, settings: GatewaySettings) -> HostNames:
    prefix = next((one.host_prefix for one in plugins.all if one.host_prefix), "")
    return HostNames(functions.hosts.find, prefix if settings.app_hosts else "")


def _open_audit(routes: Sequence[Route], logs: Logs, stack: contextlib.AsyncExitStack) -> Audit:
    """Open the audit log. It also records the start and the stop of the gateway."""
    audit = Audit(routes, logs.channel(AUDIT))
    audit.note_gateway("Start", __version__)
    stack.callback(audit.note_gateway, "Stop", __version__)
    return audit


async def shutdown(server: Server) -> None:
    """Refuse new work, finish running work, and release messages of event sources whose jobs are not running."""
    begun_s = time.monotonic()
    server.leave()
    server.http.stop_accepting()
    if server.standalone is not None:
        await server.standalone.close()
    server.jobs.stop()
    # Do not use a task group here: if one task failed, the group would cancel the other task.
    parts = (server.sources.close(), server.functions.close())
    await asyncio.wait([server.tasks.create_task(part) for part in parts])
    # Followed logs and the console stay open until now, so that they also show the end of the functions.
    server.endless.close()
    await server.http.finish(max(LAST_BYTES_S, begun_s + server.functions.drain_s - time.monotonic()))


def _lame_duck_s(settings: GatewaySettings, *, local: bool) -> float:
    """Return the time in seconds for which the gateway serves new requests after SIGTERM."""
    if settings.lame_duck_s is not None:
        return settings.lame_duck_s
    return 0.0 if local else LAME_DUCK_S


def _standalone(
    alone: FunctionSettings | None, functions: Functions, rows: Sequence[Route], form: Format,
    stack: contextlib.AsyncExitStack,
) -> Standalone | None:  # fmt: skip
    """Return the `Standalone` of the only function, and print that function's log until `stack` closes."""
    if alone is None:
        return None
    printing = print_log(functions.logs.of_function(alone.name), form)
    stack.callback(functions.tasks.create_task(printing).cancel)
    return Standalone(alone, functions, rows)


async def _open(standalone: Standalone, functions: Functions, deployment: Deployment, stop: Stop) -> None:
    """Deploy the only function. If the deploy fails, end the process, so that the platform starts it again."""
    try:
        live = await functions.deploy(deployment)
    except PilotflameError as error:
        return stop.by_error(error)
    except OSError as error:
        remedy = "Check the folder, and the space of the temporary folder."
        return stop.by_error(GatewayError(f"The function cannot be copied: {error}.", remedy=remedy))
    except Exception as error:
        stop.by_error(GatewayError(f"The function cannot be deployed: {type(error).__name__}: {error}."))
        raise
    for warning in live.warnings:
        LOG.warning(warning)
    return standalone.open()


async def _open_ledger(
    settings: GatewaySettings, state: Path, metrics: Callable[[], Metrics], stack: contextlib.AsyncExitStack
) -> Ledger:
    """Open the accounts of the functions, and close them with `stack`. `metrics` returns the gateway's metrics, which
    do not exist yet: it is called only when usage is written or read.
    """
    prices = Prices(settings.price_memory_gb_hour, settings.price_disk_gb_hour, settings.price_device_hour)
    store = UsageStore(state / "usage.sqlite3")
    ledger = Ledger(store, prices, lambda function: metrics().totals(function), settings.currency)
    await asyncio.to_thread(ledger.open)
    stack.push_async_callback(ledger.close)
    return ledger


def _find_gpus(settings: GatewaySettings) -> tuple[list[Gpu], GpuDriver]:
    """Return the GPUs on which workers are placed, and their driver."""
    driver = find_driver()
    if settings.gpus is None:
        return driver.find(), driver
    pairs = (text.split(":") for text in settings.gpus)
    return [Gpu(name, int(memory_mb)) for name, memory_mb in pairs], driver


def _observe(
    functions: Functions, metrics: Metrics, ledger: Ledger, keyring: Keyring, settings: GatewaySettings,
    stack: contextlib.AsyncExitStack,
) -> tuple[Rest, MemoryMeter]:  # fmt: skip
    """Connect the metrics, the ledger, the limits of API keys in tokens, the memory limit and the plugins' observers to the
    events of functions, until `stack` closes.

    Return the object that limits the memory of idle functions, and the meter of the memory of all processes.
    """
    events, memory = functions.events, MemoryMeter(functions, functions.tasks)
    metering = Metering(functions, ledger, memory, functions.tasks)
    rest = Rest(
        functions.all, functions.launcher, functions.tasks, settings.rest_mb, functions.weights.give_back
    )
    events.activated.append(metrics.activated)
    events.ended.append(metrics.ended)
    events.refused.append(metrics.refused)
    # The ledger takes the last counts before the metrics drop them.
    for removed in (ledger.note_removed, metrics.forget, metering.forget):
        events.removed.append(removed)
    events.live.append(TokenCounts(functions, keyring).follow)
    for notice in (events.activated, events.live, events.processes):
        notice.append(metering.note_change)
    metering.note_change()
    for notice in (events.activated, events.live, events.removed):
        notice.append(rest.note_change)
    events.processes.append(rest.note_processes)
    for close in (rest.close, metering.close, functions.tasks.keep(ledger.run, name="usage").cancel):
        stack.callback(close)
    _open_observers(functions, metrics, settings, stack)
    return rest, memory


def _open_observers(
    functions: Functions, metrics: Metrics, settings: GatewaySettings, stack: contextlib.AsyncExitStack
) -> None:
    """Let the observers of plugins follow the events of functions, until `stack` closes."""
    for kind in load(OBSERVERS, settings.plugins).values():
        if (observer := kind.open()) is None:
            continue
        observer.follow(functions.events, metrics)
        stack.push_async_callback(observer.close)
        if observer.call_observer:
            functions.observe_calls(observer.call_observer)


def _recorder(functions: Functions, state: Path, stack: contextlib.AsyncExitStack) -> Recorder:
    """Store the decisions about functions, their load and their arrivals, until `stack` closes."""
    recorder, tasks = Recorder(state / "records", functions.all), functions.tasks

    def deleted(name: str) -> None:
        tasks.create_task(recorder.forget(name))

    # Subscribe to `deleted`, which comes before `removed`: if the gateway is killed during the deletion, a new function
    # with this name must not get the old records.
    functions.events.deleted.append(deleted)
    functions.events.processes.append(recorder.note_change)
    stack.push_async_callback(recorder.flush)
    stack.callback(tasks.keep(recorder.run, name="records").cancel)
    return recorder


async def _connect(
    functions: Functions,
    jobs: Jobs,
    sources: Sources,
    prewarming: Prewarming,
    stack: contextlib.AsyncExitStack,
) -> None:
    """Connect jobs, event sources, pre-warming and alerts to the events of functions, until `stack` closes."""
    events, alerts = functions.events, FunctionAlerts(jobs.store, functions.tasks, jobs.check_webhook)
    await alerts.start()
    stack.callback(prewarming.close)
    stack.callback(alerts.close)

    def follow(name: str) -> None:
        # `get` raises GatewayError if the gateway is shutting down. Then no event source is started.
        with contextlib.suppress(GatewayError):
            deployed = functions.get(name)
            if deployed.function.paused or deployed.function.barred:
                sources.stop(name)
            else:
                sources.start(name, deployed.record.settings)
            prewarming.follow(name)
            alerts.follow(deployed)

    def live(name: str) -> None:
        jobs.wake(name)
        follow(name)

    def gone(name: str) -> None:
        prewarming.forget(name)
        alerts.forget(name)
        sources.stop(name)
        jobs.forget(name)

    for function in functions.all():
        follow(function.record.function)
    events.called.append(prewarming.note_call)
    events.ended.append(alerts.note_end)
    events.refused.append(alerts.note_refused)
    events.live.append(live)
    events.deleted.append(gone)


def _count_refusal(functions: Functions, metrics: Metrics, name: str, error: PilotflameError) -> None:
    """Count a request that a quota refused. Count it only if its function exists, because callers can invent names."""
    with contextlib.suppress(UnknownFunction, GatewayError):
        functions.get(name)
        metrics.turned_away(name, error)


@contextlib.contextmanager
def _capture_signals(stop: Stop) -> Iterator[None]:
    """Inside the block, the first SIGINT or SIGTERM sets `stop`, and the second signal ends the process."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def on_signal(received: int) -> None:
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        LOG.info("draining; press Ctrl-C again to stop at once")
        stop.by_signal(received)

    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
