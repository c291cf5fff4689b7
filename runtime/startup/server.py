"""Starts the parts of a gateway inside the process, in their order, and ends them in reverse."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from ...entry_points import APIS, check_names, load
from ...errors import GatewayError, PilotflameError
from ..front.api.admin import Admin
from ..front.api.server import HttpServer
from ..front.api.standalone import Standalone
from ..front.http.endless_answers import EndlessAnswers
from ..front.listening.tls import Certificate
from ..ground.settings.function_settings import FunctionSettings
from ..ground.settings.gateway_settings import GatewaySettings
from ..ground.telemetry.background import BackgroundTasks
from ..jobs.events.sources import Sources
from ..jobs.stored.jobs import Jobs
from ..node.functions.registry import Functions
from ..node.functions.restoration import Restoration
from ..node.launching.container_engine import find_engine
from .address import open_address, warn_of_keys
from .front import FrontParts, open_front
from .node import RunningNode, open_node
from .sharing import ReportSharing, SharedState
from .state import open_state
from .stored_calls import open_stored_calls

# A gateway that other machines can reach serves new requests for this time after SIGTERM. Kubernetes informs the load
# balancers when it sends the signal, and the load balancers need a second or two to react.
LAME_DUCK_S = 3.0
# At shutdown, slow clients have at least this time to read answers that are complete.
LAST_BYTES_S = 1.0


@dataclass(frozen=True, slots=True)
class Server:
    """A running gateway: its address and its parts."""

    url: str
    node: RunningNode
    functions: Functions
    admin: Admin
    tasks: BackgroundTasks
    jobs: Jobs
    sources: Sources
    http: HttpServer
    endless: EndlessAnswers
    standalone: Standalone | None
    lame_duck_s: float
    certificate: Certificate | None

    def reload(self) -> None:
        """Read the TLS certificate again, if there is one."""
        if self.certificate is not None:
            self.certificate.reload()

    def leave(self) -> None:
        """Announce the end of this gateway: /readyz reports it, and connections close after their next response."""
        self.admin.draining = True
        self.http.send_away()


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
            # A task group on the stack would wrap the error.
            failed = error
        else:
            yield server
    if failed is not None:
        raise failed


async def startup(
    settings: GatewaySettings, stack: contextlib.AsyncExitStack, alone: FunctionSettings | None = None
) -> Server:
    """Start each part after the parts that it uses. When `stack` closes, it drains and closes the parts in reverse.

    Raise PluginError if a plugin in the settings is not installed.
    """
    check_names(settings.plugins or ())
    plugins = load(APIS, settings.plugins)
    if alone is not None and settings.database is not None:
        message = "A gateway of one function shares no database: the setting is for gateways to which functions are deployed."
        raise GatewayError(message, remedy="Unset PILOTFLAME_DATABASE.")
    state = await open_state(settings, stack)
    address, engine = open_address(settings, stack), settings.engine or find_engine()
    local = address.local or (alone is not None and settings.auth != "always")
    warn_of_keys(address, engine, state.keyring, state.folder, local=local)
    node = await open_node(settings, state, engine, stack)
    # A gateway for one function deploys this function anew. It serves no other function of an older state folder.
    shared = None
    if alone is None:
        if state.members is not None:
            shared = SharedState(state.members, state, node, stack)
            await shared.catch_up()
        await Restoration(node.functions, node.revisions).run()
    calls = await open_stored_calls(settings, state, node, plugins.values(), stack)
    is_stale = None if shared is None else shared.is_stale
    parts = FrontParts(settings, address, state, node, calls, plugins, engine, alone, is_stale)
    front = await open_front(parts, stack)
    if shared is not None and state.members is not None:
        shared.follow(front.endless.end_of_key)
        ReportSharing(state.members, state, node, calls.alerts, stack)
    server = Server(
        address.url, node, node.functions, front.admin, node.functions.tasks, calls.jobs, calls.sources, front.http,
        front.endless, front.standalone, _lame_duck_s(settings, local=address.local), address.certificate,
    )  # fmt: skip
    stack.push_async_callback(shutdown, server)
    return server


async def shutdown(server: Server) -> None:
    """Refuse new work, finish running work, and release messages of event sources whose jobs are not running."""
    begun_s = time.monotonic()
    server.leave()
    server.http.stop_accepting()
    if server.standalone is not None:
        await server.standalone.close()
    server.jobs.stop()
    # Do not use a task group here: if one task failed, the group would cancel the other task.
    parts = (server.sources.close(), server.node.retirements.close())
    await asyncio.wait([server.tasks.create_task(part) for part in parts])
    # Followed logs and the console stay open until now, so that they also show the end of the functions.
    server.endless.close()
    until_s = begun_s + server.functions.settings.drain_s
    await server.http.finish(max(LAST_BYTES_S, until_s - time.monotonic()))


def _lame_duck_s(settings: GatewaySettings, *, local: bool) -> float:
    """Return the time in seconds for which the gateway serves new requests after SIGTERM."""
    if settings.lame_duck_s is not None:
        return settings.lame_duck_s
    return 0.0 if local else LAME_DUCK_S
