"""Defines what a plugin adds to the HTTP API of a gateway. A plugin offers a subclass of `ApiPlugin` as an entry point."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import orjson
from aiohttp import web

from ....addresses import is_loopback
from ....errors import BadInput, DeadlineExceeded, OutputInvalid, PilotflameError, PluginError, Unauthorized
from ....handlers.codec import JSON_TYPE
from ....handlers.contract import NOTHING
from ...ground.telemetry.background import BackgroundTasks
from ...ground.telemetry.metrics import Metrics, Reading
from ...jobs.stored.webhook_body import WebhookBodies
from ...node.functions.status import FunctionStatus
from ..http.audit import Audit
from ..http.call_group import CallGroup
from ..http.event_stream import LAST_EVENT_S
from ..http.guard import UNKNOWN_CALLER, Admitted, Guard, count_calls
from ..http.parsed_bodies import parsed
from ..http.requests import Headers, dump_json, id_of, load_json, load_output, timeout_of
from ..http.responses import ErrorFormat, dumped, outputs_response
from ..http.routes import Route, based
from ..listening.tls import Certificate
from .backend import Backend
from .invoke import Invoker


@dataclass(frozen=True, slots=True)
class Entrance:
    """The address at which a plugin serves another protocol than HTTP, and the guard before it."""

    guard: Guard
    audit: Audit
    host: str
    port: int
    app: web.Application
    """The gateway's web app. It contains the limits that all protocols share: INCOMING and PARSED_BODIES."""
    certificate: Certificate | None = None

    async def admit(
        self, headers: Headers, route: tuple[str, str] | None, transport: asyncio.BaseTransport | None = None,
    ) -> Admitted:  # fmt: skip
        """Admit a call that needs the scope of this HTTP route. If `route` is None, the call needs no key. Call `leave`
        of the result at the end of the call.

        `transport` belongs to the client's connection.

        Raise the errors of `Guard.admit` and `Guard.find_issuer`, and Unauthorized if other machines reach the address
        and no API key exists.
        """
        if route is None:
            return UNKNOWN_CALLER
        if not self.guard.closed and not is_loopback(self.host):
            message = f"Other machines reach {self.host}, and this gateway has no API key."
            raise Unauthorized(message, remedy="Create one: pilotflame keys create NAME.")
        return self.guard.admit(headers, route, None, transport, await self.guard.find_issuer(headers))


BARE: Mapping[str, Any] = {"bare": True}
"""The `extra` of a call whose event is the input itself, not `{"input": ...}`."""
MOST_CALLS = 256
"""Limit for the calls of one request that wait or run at the same time."""
MOST_OUTPUT_BYTES = 64 << 20
"""Limit for the bytes of the outputs of all calls of one request."""
MOST_SHARED_BYTES = 64 << 20
"""Limit for the size of `extra` in bytes, times the number of calls of one request."""
CALL_REMEDY = "Return values that JSON has, or call it at /invoke."


async def list_response(
    request: web.Request, name: str, outputs: Sequence[bytes], others: Mapping[str, Any] = NOTHING
) -> web.Response:
    """Return a response with a JSON object. Its member `name` is the list of `outputs`. Its other members are `others`."""

    def show() -> dict[str, Any]:
        return {name: [orjson.Fragment(output) for output in outputs], **others}

    size = sum(map(len, outputs))
    return await outputs_response(request, size, show, headers={"X-Request-Id": id_of(request)})


class ApiPlugin:
    """The routes of a plugin and its other additions to the API. This class adds nothing."""

    base: ClassVar[str] = ""
    """The prefix of the paths of its routes, such as "/cog". The paths without the prefix exist only with `bare_paths`."""
    other_bases: ClassVar[tuple[str, ...]] = ()
    """Other prefixes with which the paths exist too, such as the prefixes of other platforms with the same API."""
    always_bare: ClassVar[str] = ""
    """Paths with this beginning also exist without the prefix, unless another plugin has them; "" for none."""
    host_prefix: ClassVar[str] = ""
    """The path below which the plugin serves requests whose Host is the host name of a function, such as "/asgi/{function}"."""
    plain_paths: ClassVar[str | tuple[str, ...]] = ""
    """The beginnings of the paths of plain calls that the plugin serves as a `PlainApi` (`plain_calls.py`); "" for none."""
    unrouted: ClassVar[Mapping[str, ErrorFormat]] = {}
    """Maps beginnings of paths to the formats of errors for paths without a route."""
    webhook_bodies: ClassVar[WebhookBodies] = {}
    """The forms of webhooks that jobs of this plugin have."""
    root: ClassVar[Mapping[str, str]] = {}
    """The fields that the plugin adds to the response to `GET /`."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def routes(self) -> Sequence[Route]:
        """Return the routes of the plugin. Their paths do not have the prefix `base`."""
        return ()

    def bare_routes(self) -> Sequence[Route]:
        """Return the routes that a gateway with `bare_paths` also has without the prefix `base`."""
        return self.routes()

    def origin_of(self, request: web.Request) -> str:
        """Return the URL below which this caller finds the paths of `routes`."""
        base = self.base if request.path.startswith(f"{self.base}/") else ""
        return self.backend.origins.of(request) + base

    async def read_json(self, request: web.Request) -> Any:
        """Return the parsed JSON body of a request for the function in the path. Raise UnknownFunction, or an error of
        the body.
        """
        _, body = await self.backend.read_body(request, request.match_info["function"])
        return await parsed(request, body, load_json)

    async def call(
        self,
        request: web.Request,
        function: str,
        event: Any,
        number: int = 0,
        extra: Mapping[str, Any] | None = None,
        *,
        read: Callable[[bytes], Any] = load_output,
    ) -> Any:
        """Call a function with a JSON value, and return what `read` makes of its output, which must be JSON. Raise its
        error.

        A large output is read in a thread.

        `number` distinguishes several calls of one request. If the caller disconnects, the call is cancelled. The
        handler reads `extra` as `context.extra`. Pass `BARE` as `extra` if the event is the input itself, even if the
        event has a member `input`.
        """
        output = await self._json_of(request, function, event, number, extra)
        return await parsed(request, output, read, called=True)

    async def _json_of(
        self, request: web.Request, function: str, event: Any, number: int, extra: Mapping[str, Any] | None
    ) -> bytes:
        body = await dumped(request, dump_json, event)
        output = await Invoker(self.backend).call(request, function, body, number, extra)
        if output.content_type != JSON_TYPE:
            raise OutputInvalid(
                f"The output of {function} is {output.content_type}, not JSON.", remedy=CALL_REMEDY
            )
        return output.payload

    def listening(self, entrance: Entrance) -> AbstractAsyncContextManager[None]:
        """Return a context in which the plugin serves its own protocol at an address of `plugin_ports`. Raise
        PluginError if the plugin serves only HTTP.
        """
        raise PluginError(
            f"The plugin at {self.base or '/'} serves nothing but HTTP.",
            remedy="Leave it out of plugin_ports.",
        )

    async def call_each(
        self,
        request: web.Request,
        function: str,
        events: Sequence[Any],
        field: str,
        extra: Mapping[str, Any] = BARE,
    ) -> list[bytes]:
        """Call a function with each of several JSON values, so that its calls form batches. Return the outputs in the same order,
        as JSON.

        By default, each value is the whole input of a call, also if it has the form `{"input": ...}`. The handler reads `extra` as
        `context.extra`.

        If a call fails, cancel the others and raise its error, whose message begins with `field[number]`. Raise BadInput if
        `extra` has more than MOST_SHARED_BYTES in all calls, DeadlineExceeded if all calls together take longer than a single
        call may take, and OutputInvalid if their outputs have more than MOST_OUTPUT_BYTES.
        """
        settings = self.backend.functions.get(function).record.settings
        shared = len(await dumped(request, dump_json, dict(extra)))
        if shared * len(events) > MOST_SHARED_BYTES:
            fault = f"What the {len(events)} {field} share has {shared} bytes, too many for each of them."
            raise BadInput(fault, remedy="Send fewer in one request.")
        count_calls(request, len(events))
        # Keep the outputs as JSON text. A parsed output may be twenty times as large.
        outputs = [b"null"] * len(events)
        waiting, left_bytes = iter(enumerate(events)), MOST_OUTPUT_BYTES

        async def work() -> None:
            nonlocal left_bytes
            for number, event in waiting:
                try:
                    output = await self._json_of(request, function, event, number, extra)
                    left_bytes -= len(output)
                    if left_bytes < 0:
                        message = f"The outputs have more than {MOST_OUTPUT_BYTES} bytes."
                        raise OutputInvalid(message, remedy="Send fewer in one request.")
                    await parsed(request, output, load_output, called=True)
                except PilotflameError as error:
                    raise error.about(f"{field}[{number}]") from None
                outputs[number] = output

        try:
            async with (
                asyncio.timeout(timeout_of(request.headers, settings.timeout_s) + LAST_EVENT_S),
                CallGroup() as group,
            ):
                for _ in range(min(MOST_CALLS, settings.max_queue, len(events))):
                    group.create_task(work())
        except TimeoutError:
            message = f"{function} did not answer all {field} in time."
            raise DeadlineExceeded(message, remedy="Send fewer in one request.") from None
        return outputs

    async def sweep(self) -> None:
        """Run the plugin's periodic work until cancelled. If `sweep` raises an error, the gateway calls `sweep` again."""

    async def readings(self) -> Iterable[Reading]:
        """Return the metrics of the plugin."""
        return ()

    def describe(
        self, document: dict[str, Any], functions: Sequence[FunctionStatus], *, named: bool
    ) -> dict[str, Any]:
        """Return /openapi.json for a caller who may see `functions`. `named` is True if the caller asked for one
        function, the only one in `functions`.
        """
        return document


class Plugins:
    """The APIs of the plugins that are on."""

    def __init__(
        self, kinds: Mapping[str, type[ApiPlugin]], backend: Backend, *, bare: bool | None, alone: bool
    ) -> None:
        """`bare` is the setting `bare_paths`. `alone` is true if the gateway serves one function."""
        self._by_name = {name: kind(backend) for name, kind in kinds.items()}
        self._bare = alone if bare is None else bare

    @property
    def all(self) -> list[ApiPlugin]:
        return list(self._by_name.values())

    def start(self, tasks: BackgroundTasks, metrics: Metrics) -> Callable[[], None]:
        """Start the `sweep` of each plugin, and add its metrics. Return a function that stops the sweeps."""
        metrics.readers += [plugin.readings for plugin in self.all]
        running = [tasks.keep(plugin.sweep, name=name) for name, plugin in self._by_name.items()]

        def end() -> None:
            for task in running:
                task.cancel()

        return end

    @asynccontextmanager
    async def listening(
        self, addresses: Sequence[str], guard: Guard, audit: Audit, app: web.Application, certificate: Certificate | None
    ) -> AsyncIterator[None]:  # fmt: skip
        """Let plugins listen at these addresses (NAME=HOST:PORT) inside the block. Raise PluginError, GatewayError."""
        async with AsyncExitStack() as stack:
            for text in addresses:
                name, _, address = text.partition("=")
                if (plugin := self._by_name.get(name)) is None:
                    raise PluginError(
                        f"plugin_ports names {name!r}, which is not on.", remedy="See `plugins`."
                    )
                host, _, port = address.rpartition(":")
                await stack.enter_async_context(
                    plugin.listening(Entrance(guard, audit, host.strip("[]"), int(port), app, certificate))
                )
            yield

    def rows(self) -> dict[str, list[Route]]:
        """Return the rows of each plugin by its name."""
        found = {
            name: based(
                api.base,
                api.routes(),
                api.other_bases,
                bare=api.bare_routes() if self._bare and not api.always_bare else (),
            )
            for name, api in self._by_name.items()
        }
        taken = {(row.method, row.path) for rows in found.values() for row in rows}
        for name, plugin in self._by_name.items():
            if plugin.always_bare:
                bare = [
                    row for row in plugin.routes() if self._bare or row.path.startswith(plugin.always_bare)
                ]
                found[name] += [row for row in bare if (row.method, row.path) not in taken]
        return found

    @property
    def plain(self) -> dict[str | tuple[str, ...], Any]:
        """The plugins that serve plain calls, by the beginnings of their paths."""
        return {plugin.plain_paths: plugin for plugin in self.all if plugin.plain_paths}

    @property
    def unrouted(self) -> dict[str, ErrorFormat]:
        """The formats of errors for paths without a route, by the beginnings of the paths."""
        return {path: form for plugin in self.all for path, form in plugin.unrouted.items()}

    @property
    def root(self) -> dict[str, str]:
        """The fields that plugins add to `/`. Values that are paths begin with the plugin's base."""
        return {
            name: plugin.base + text if text.startswith("/") and not self._bare else text
            for plugin in self.all
            for name, text in plugin.root.items()
        }
