"""Creates the HTTP server: the routes of the gateway and its plugins, and the checks before them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..._version import __version__
from ...errors import GatewayError, PilotflameError, UnknownFunction
from ..calls.serving.response_cache import ResponseCache
from ..front.api.admin import Admin
from ..front.api.backend import Backend
from ..front.api.credentials import CredentialsApi
from ..front.api.deploys import Deploys
from ..front.api.history import HistoryApi
from ..front.api.invoke import Invoker
from ..front.api.jobs import JobsApi
from ..front.api.logs import LogsApi
from ..front.api.nodes import NodesApi
from ..front.api.openapi import OpenApi
from ..front.api.plain_calls import PlainCalls
from ..front.api.plugin import ApiPlugin, Plugins
from ..front.api.revisions import RevisionsApi
from ..front.api.server import HttpServer, http_server
from ..front.api.standalone import Standalone
from ..front.api.usage import UsageApi
from ..front.api.warmup import WarmupApi
from ..front.api.webhooks import WebhooksApi
from ..front.http.access_log import AccessLog
from ..front.http.audit import Audit
from ..front.http.chain import Chain
from ..front.http.cross_origin import CrossOrigin
from ..front.http.endless_answers import EndlessAnswers
from ..front.http.guard import Guard
from ..front.http.host_names import HostNames
from ..front.http.large_answers import LargeAnswers
from ..front.http.page_isolation import PageIsolation
from ..front.http.responses import ErrorResponses
from ..front.http.routes import Route, error_formats, joined
from ..front.listening.open_connections import OpenConnections, most_connections
from ..front.listening.origins import Origins
from ..front.pages.console import Console
from ..front.pages.docs_page import DocsPage
from ..ground.access.control_socket import ControlSocket, control_socket
from ..ground.access.keys import ANYBODY
from ..ground.settings.function_settings import FunctionSettings
from ..ground.settings.gateway_settings import GatewaySettings
from ..ground.storing.members import GatewayMember
from ..ground.telemetry.gateway_log import Format, print_log
from ..ground.telemetry.log_files import ACCESS, AUDIT
from ..ground.telemetry.logs import Logs
from ..ground.telemetry.metrics import Metrics
from ..node.functions.registry import Functions
from .address import GatewayAddress
from .joining import node_name
from .node import RunningNode
from .state import State
from .stored_calls import StoredCalls


@dataclass(frozen=True, slots=True)
class Front:
    """The HTTP server of a gateway, and the parts that a shutdown needs."""

    admin: Admin
    http: HttpServer
    endless: EndlessAnswers
    standalone: Standalone | None


@dataclass(frozen=True, slots=True)
class FrontParts:
    """The parts that the HTTP server serves."""

    settings: GatewaySettings
    address: GatewayAddress
    state: State
    node: RunningNode
    calls: StoredCalls
    plugins: Mapping[str, type[ApiPlugin]]
    """The APIs of plugins, by the names of the plugins."""
    engine: str | None
    """The URL of the container engine; None without an engine."""
    alone: FunctionSettings | None
    """The gateway's only function; None if there may be several functions."""
    is_stale: Callable[[str | None], bool] | None = None
    """Returns True if other gateways may serve a newer revision of the function, or of any function if the argument is None."""


async def open_front(parts: FrontParts, stack: contextlib.AsyncExitStack) -> Front:
    """Start the HTTP server, as the last step of a gateway's start."""
    settings, node = parts.settings, parts.node
    endless = EndlessAnswers()
    backend = _backend(parts, endless)
    invoker = Invoker(backend)
    plugins = Plugins(parts.plugins, backend, bare=settings.bare_paths, alone=parts.alone is not None)
    stack.callback(plugins.start(node.functions.tasks, node.metrics))
    admin = Admin(
        node.functions, node.revisions, node.retirements, node.metrics, parts.state.logs, node.memory, sources=parts.calls.sources.statuses,
        disk_full=parts.state.disk.look,
        starting=lambda: standalone is not None and standalone.is_starting(),
    )  # fmt: skip
    own = [
        *invoker.routes(),
        *JobsApi(backend).routes(),
        *admin.routes(),
        *_other_routes(parts, endless, plugins),
    ]
    rows = joined({"pilotflame": own, **plugins.rows()})
    standalone = _standalone(parts.alone, node.functions, rows, settings.log_format, stack)
    routes = OpenApi(
        [*rows, *(standalone.routes if standalone is not None else [])], admin.statuses, plugins.all
    ).routes
    control = stack.enter_context(control_socket(parts.state.folder))
    # Without a plugin that serves apps, the prefix is "", and `HostNames` finds no function for any host name.
    prefix = next((one.host_prefix for one in plugins.all if one.host_prefix), "")
    hosts = HostNames(node.functions.hosts.find, prefix)
    connections = OpenConnections(backend.origins, most_connections())
    guard, cors = _guard(parts, routes, control, connections, standalone, hosts)
    audit = _open_audit(routes, parts.state.logs, connections, stack)
    http = await stack.enter_async_context(
        _server(parts, invoker, plugins, routes, control, connections, guard, cors, audit, standalone, hosts)
    )
    await stack.enter_async_context(
        plugins.listening(settings.plugin_ports, guard, audit, http.app, parts.address.certificate)
    )
    return Front(admin, http, endless, standalone)


def _backend(parts: FrontParts, endless: EndlessAnswers) -> Backend:
    settings, functions, metrics = parts.settings, parts.node.functions, parts.node.metrics
    cache = ResponseCache(settings.response_cache_mb << 20)
    functions.events.live.append(cache.forget)
    functions.events.removed.append(cache.remove)
    metrics.readers.append(cache.readings)
    return Backend(
        functions, parts.calls.jobs, settings.max_body_bytes, parts.state.folder,
        Origins(settings.trusted_proxies), parts.state.disk, endless, cache, parts.state.members, parts.state.database,
    )  # fmt: skip


def _other_routes(parts: FrontParts, endless: EndlessAnswers, plugins: Plugins) -> list[Route]:
    """Return the gateway's own routes, except the routes of calls, jobs and administration."""
    state, node, local = parts.state, parts.node, parts.address.local and parts.alone is None
    functions = node.functions
    apis = (
        Deploys(node.rollouts, state.disk.check, local=local), LogsApi(functions, state.logs, endless),
        RevisionsApi(node.rollouts),
        CredentialsApi(state.keyring, state.secrets, node.rollouts, endless, parts.engine),
        WebhooksApi(functions, parts.calls.jobs), HistoryApi(functions, node.recorder), DocsPage(plugins.root),
        UsageApi(node.ledger), _nodes(parts), Console(functions, node.metrics, endless), WarmupApi(functions),
    )  # fmt: skip
    return [row for api in apis for row in api.routes()]


def _nodes(parts: FrontParts) -> NodesApi:
    if (members := parts.state.members) is not None:
        return NodesApi(members.incarnation, lambda: members.members)
    alone = GatewayMember("", node_name(parts.settings), __version__, 0, alive=True)
    return NodesApi("", lambda: [alone])


def _standalone(
    alone: FunctionSettings | None, functions: Functions, rows: Sequence[Route], form: Format,
    stack: contextlib.AsyncExitStack,
) -> Standalone | None:  # fmt: skip
    """Return the `Standalone` of the only function, and print that function's log."""
    if alone is None:
        return None
    if form != "collector":
        printing = print_log(functions.logs.of_function(alone.name), form)
        stack.callback(functions.tasks.create_task(printing).cancel)
    return Standalone(alone, functions, rows)


def _guard(
    parts: FrontParts, routes: Sequence[Route], control: ControlSocket, connections: OpenConnections,
    standalone: Standalone | None, hosts: HostNames,
) -> tuple[Guard, CrossOrigin]:  # fmt: skip
    """Return two checks of each request: of its API key and quotas, and of the web page from which a browser sends it."""
    settings, functions, local = parts.settings, parts.node.functions, parts.address.local
    cors = CrossOrigin(functions, routes, settings.cors_origins, hosts, lambda: local and not guard.closed)
    guard = Guard(
        parts.state.keyring, control, functions.tasks, routes, cors, connections, local=local,
        required=settings.auth == "always" or not (local or standalone is not None),
        names=lambda: [live.record.function for live in functions.all()], check_owner=functions.check_owner,
        anybody=ANYBODY if standalone is None else standalone.caller,
        open_to_anybody=frozenset() if standalone is None else standalone.open_routes,
        max_body_bytes=settings.max_body_bytes,
    )  # fmt: skip
    return guard, cors


def _count_refusal(functions: Functions, metrics: Metrics, name: str, error: PilotflameError) -> None:
    """Count a request that a quota refused. Count it only if its function exists, because callers can invent names."""
    with contextlib.suppress(UnknownFunction, GatewayError):
        functions.get(name)
        metrics.turned_away(name, error)


def _open_audit(
    routes: Sequence[Route], logs: Logs, connections: OpenConnections, stack: contextlib.AsyncExitStack
) -> Audit:
    """Open the audit log. It also records the start and the stop of the gateway."""
    audit = Audit(routes, logs.channel(AUDIT), connections.client_of)
    audit.note_gateway("Start", __version__)
    stack.callback(audit.note_gateway, "Stop", __version__)
    return audit


def _server(
    parts: FrontParts, invoker: Invoker, plugins: Plugins, routes: Sequence[Route], control: ControlSocket,
    connections: OpenConnections, guard: Guard, cors: CrossOrigin, audit: Audit, standalone: Standalone | None,
    hosts: HostNames,
) -> contextlib.AbstractAsyncContextManager[HttpServer]:  # fmt: skip
    """Return the HTTP server."""
    settings, functions, certificate = parts.settings, parts.node.functions, parts.address.certificate
    chain = Chain(
        guard, ErrorResponses(error_formats(routes), functions.owns, plugins.unrouted), cors, audit, LargeAnswers(),
        on_quota=functools.partial(_count_refusal, functions, parts.node.metrics),
        # A single function needs no isolation of its pages, because its code and the gateway have the same owner.
        isolation=PageIsolation(hosts) if standalone is None else None,
        access=AccessLog(parts.state.logs.channel(ACCESS), connections.client_of) if settings.access_log else None,
        standalone=standalone, is_stale=parts.is_stale,
    )  # fmt: skip
    plain = PlainCalls(
        chain, invoker, functions.live, functions.tasks, routes, parts.alone.name if parts.alone is not None else "", hosts.claims,
        plugins.plain,
    )  # fmt: skip
    return http_server(
        [parts.address.socket, control.sock], routes, plain,
        connections, functions.tasks, certificate.context if certificate is not None else None, hosts,
    )  # fmt: skip
