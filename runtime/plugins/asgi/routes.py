"""The route of web apps: each request below /asgi/{function}/ is a call of the function's app."""

from __future__ import annotations

import time
from typing import ClassVar

from aiohttp import hdrs, web

from ....errors import LinkError, PilotflameError, UnknownRoute
from ....handlers.codec import BYTES_TYPE
from ...calls.serving.input_stream import InputStream
from ...calls.serving.invocation import Invocation
from ...calls.serving.revision import Revision
from ...front.api.backend import Backend
from ...front.api.plugin import ApiPlugin
from ...front.api.standalone import PLATFORM
from ...front.http.page_isolation import POLICY, SANDBOX
from ...front.http.requests import (
    CALLS,
    HOLD,
    MAX_HOLD_S,
    awaits_continue,
    caller_of,
    priority_of,
    read_sent,
    request_id_of,
    seconds,
    timeout_of,
    too_large,
    trace_of,
)  # fmt: skip
from ...front.http.responses import error_reply
from ...front.http.routes import Route
from ...ground.access.keys import Scope
from ...node.functions.live import Live
from .http_exchange import HttpExchange
from .incoming_request import facts_of, is_websocket, scheme_of
from .websocket_exchange import WebSocketExchange

ROOT = "/asgi/{function}"
PATH = f"{ROOT}/{{path:.*}}"
ERRORS = (400, 408, 413, 429, 500, 503, 504)
DIALECTS = ("asgi", "wsgi")
NO_SCRIPTS = (
    "browsers run no scripts and send no forms of pages below {path}, because the console has the same origin: open the app at"
    " its own host name, {host}. PILOTFLAME_APP_HOSTS of the gateway, as *.apps.example.com, gives all functions such names"
)
SMALL_BYTES = 64 << 10
"""A body of at most this length is read before the app is called. A longer body is sent to the app while it arrives."""


class AsgiApi(ApiPlugin):
    """The route of web apps."""

    host_prefix: ClassVar = ROOT

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        # The functions whose log already has the warning NO_SCRIPTS.
        self._named = set[str]()

    def routes(self) -> list[Route]:
        summary = "Send a request to the function's app. The app decides about methods, paths and responses."
        to_root = "Go to the root of the function's app."
        return [
            Route("*", PATH, self.serve, Scope.INVOKE, summary, errors=ERRORS),
            Route("*", ROOT, self.redirect, Scope.INVOKE, to_root, status=308),
        ]

    async def redirect(self, request: web.Request) -> web.StreamResponse:
        """Redirect to the path of the app's root, which ends with a slash."""
        self._app(request.match_info["function"])
        location = str(
            request.rel_url.with_path(f"{request.rel_url.raw_path}/", encoded=True, keep_query=True)
        )
        return web.Response(status=308, headers={"Location": location})

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Call the app with a request."""
        received_s, request_id = time.monotonic(), request_id_of(request.headers)
        name, websocket = request.match_info["function"], is_websocket(request)
        live = self._app(name)
        request[CALLS] = True
        try:
            body, follows = (b"", True) if websocket else await self._body(request, live)
            # Look the function up again, because another revision may have become live while the body arrived.
            revision, invocation = self._submit(
                self._app(name), request, received_s, request_id, body, follows=follows
            )
        except PilotflameError as error:
            return error_reply(error, request_id).response()
        if (stream := invocation.stream) is None:
            raise LinkError("An invocation of a web app has no stream.")
        most = self.backend.body_limit(revision)
        if websocket:
            invocation.idle_s = invocation.timeout_s
            return await WebSocketExchange(
                request, revision, invocation, stream, most, self.backend.endless
            ).run()
        response = await HttpExchange(request, revision, invocation, stream, most).run()
        if "text/html" in request.headers.get(hdrs.ACCEPT, "") and name not in self._named:
            self._name_host(live, request, response)
        return response

    def _alone(self, request: web.Request) -> bool:
        """Return True if the request was sent to the app's own host name."""
        return self.backend.functions.hosts.find(request.headers.get(hdrs.HOST, "")) is not None

    def _name_host(self, live: Live, request: web.Request, response: web.StreamResponse) -> None:
        """If a browser has asked for a page that has the gateway's origin, write the app's own host name to the app's log."""
        if self._alone(request) or SANDBOX not in response.headers.getall(POLICY, ()):
            return
        name = live.record.function
        self._named.add(name)
        text = NO_SCRIPTS.format(
            path=ROOT.format(function=name), host=self.backend.functions.hosts.name_of(live.record.settings)
        )
        live.logs.write("gateway", text, "warning")

    def _app(self, name: str) -> Live:
        """Return a function. Raise UnknownFunction if it does not exist, UnknownRoute if it is no web app."""
        live = self.backend.functions.get(name)
        if live.record.handler.get("dialect") not in DIALECTS:
            raise UnknownRoute(f"{name} is no web app.", remedy=f"Call it with POST /invoke/{name}.")
        return live

    async def _body(self, request: web.Request, live: Live) -> tuple[bytes, bool]:
        """Return (body, False) for a body of at most SMALL_BYTES. Return (b"", True) for any other body, which is sent to the
        app in pieces. Raise the errors of `read_sent`, and count them.
        """
        try:
            return await self._read(request, live)
        except PilotflameError as error:
            self.backend.functions.events.refused(live.record.function, error)
            raise

    async def _read(self, request: web.Request, live: Live) -> tuple[bytes, bool]:
        if not request.can_read_body:
            return b"", False
        most, length = self.backend.body_limit(live.revision), request.content_length
        if length is not None and length > most:
            raise too_large(most, self.backend.too_large_remedy(most, live.revision))
        if not request.content.is_eof() and (
            length is None or length > SMALL_BYTES or awaits_continue(request)
        ):
            return b"", True
        if request.content.is_eof() and request.content.total_bytes > SMALL_BYTES:
            return b"", True
        return await read_sent(request, most), False

    def _submit(
        self, live: Live, request: web.Request, received_s: float, request_id: str, body: bytes, *, follows: bool
    ) -> tuple[Revision, Invocation]:  # fmt: skip
        """Submit the invocation of a request. Raise an error if a header is invalid or the queue refuses the invocation."""
        caller = caller_of(request)
        headers, settings, name = request.headers, live.record.settings, live.record.function
        facts = facts_of(
            request, scheme_of(request, self.backend.origins), ROOT.format(function=name), keyed=caller.owner not in ("", PLATFORM),
            alone=self._alone(request),
        )  # fmt: skip
        try:
            traceparent, tracestate = trace_of(headers)
            invocation = Invocation(
                request_id, body, now_s=received_s,
                deadline_s=received_s + timeout_of(headers, settings.timeout_s),
                hold_until_s=received_s + seconds(headers, HOLD, settings.hold_s, MAX_HOLD_S),
                content_type=BYTES_TYPE, extra=facts.encode(), traceparent=traceparent, tracestate=tracestate,
                streaming=True, exchanges=True, input=InputStream() if follows else None,
                tenant=caller.owner, priority=priority_of(headers, urgent=caller.urgent),
            )  # fmt: skip
            live.revision.submit(invocation)
        except PilotflameError as error:
            self.backend.functions.events.refused(name, error)
            raise
        return live.revision, invocation
