"""Defines the steps that each request passes once, whether aiohttp or `transport.py` has read the request.

In this order: accept, guard, audit, route, errors, compression, the limit of large answers, access log. Each step is a
plain function. `middleware` carries a request of aiohttp through them, and `PlainCall` of `api/plain_calls.py` a plain
call. A new check belongs here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from aiohttp import hdrs, web

from ....errors import Cancelled, HeadersTooLarge, PilotflameError, QuotaExceeded, UnknownFunction
from ...ground.access.keyring import Held
from ...ground.telemetry.refusals import explaining
from .access_log import UNKNOWN, AccessLog
from .audit import Audit
from .connection import ClientConnection, discard_unread_body
from .cross_origin import CrossOrigin
from .guard import ADMITTED, UNKNOWN_CALLER, Admitted, Guard
from .header_limit import check_headers
from .incoming_bodies import IncomingBodies
from .large_answers import LargeAnswers
from .page_isolation import PageIsolation
from .requests import CALLER, REQUEST_ID_HEADER, Headers, id_of
from .responses import (
    STALE_HEADER,
    ErrorResponses,
    Handler,
    InTurn,
    Response,
    check_version,
    complete_headers,
    compress,
    name_coding,
    not_routed,
)
from .sliced_body import SlicedBody


class OnlyFunction(Protocol):
    """The only function of a gateway (`api/standalone.py`)."""

    def name_function(self, request: web.Request) -> None:
        """Add the function to the variables of the path of `POST /`."""

    async def hold(self, request: web.Request, path: str) -> None:
        """Let a call wait for the first deploy. Raise PilotflameError if it takes too long."""


@dataclass(slots=True, eq=False)
class Passage:
    """A request on its way through the steps."""

    method: str
    target: str
    """The path as the caller sent it."""
    path: str
    """The registered path of its route; "" if no route matches."""
    function: str | None
    headers: Headers
    transport: asyncio.Transport | None
    received_s: float
    admitted: Admitted = UNKNOWN_CALLER
    client: str = ""
    """The IP address of the client, for the access log; "" without an access log."""

    @property
    def owner(self) -> str:
        """The id of the caller's API key."""
        return self.admitted.caller.owner


@dataclass(slots=True)
class Chain:
    """The steps of a gateway."""

    guard: Guard
    errors: ErrorResponses
    cors: CrossOrigin
    audit: Audit
    answers: LargeAnswers
    on_quota: Callable[[str, PilotflameError], None]
    """Called with the function and the error of a request that exceeds its key's quota."""
    isolation: PageIsolation | None = None
    access: AccessLog | None = None
    standalone: OnlyFunction | None = None
    is_stale: Callable[[str | None], bool] | None = None
    """Returns True if other gateways may serve a newer revision of the function, or of any function if the argument is
    None. `is_stale` is None if there are no other gateways.
    """
    bodies: IncomingBodies = field(default_factory=IncomingBodies)
    leaving: bool = False
    """True if each connection is closed after its next response."""

    def begin(self, passage: Passage) -> None:
        """Note the client of a request that has arrived."""
        if self.access is not None:
            passage.client = self.access.client_of(passage.headers, passage.transport)

    def admit(self, passage: Passage, signer: Held | None = None) -> None:
        """Let the guard admit a request. Raise the guard's errors. The request counts as running until `ended`."""
        rule = self.guard.rule(passage.method, passage.path)
        if rule is not None:
            try:
                passage.admitted = self.guard.admit(
                    passage.headers, rule, passage.function, passage.transport, signer
                )
            except QuotaExceeded as error:
                self._note_quota(passage, error)
                raise

    def failed(self, passage: Passage, error: PilotflameError, request_id: str) -> Response:
        """Return the response for an error, in the form that the caller expects."""
        return self.errors.response(
            error, request_id, passage.target, passage.path, passage.admitted.caller, passage.function
        )

    def ended(self, passage: Passage, status: int, request_id: str) -> None:
        """End a request whose response is complete: stop counting it as running, and write the access log. Call this
        once for each request. A response that is not a stream is sent after this call.
        """
        passage.admitted.leave()
        if self.access is not None:
            self.access.write(
                passage.method[:32], passage.path or UNKNOWN, status, passage.received_s, owner=passage.owner,
                function=(passage.function or "")[:64], request_id=request_id, client=passage.client,
            )  # fmt: skip

    def turn_of(self, owner: str) -> InTurn:
        """Return a function that runs work on a large body in a thread once it is the turn of `owner`."""
        return partial(self.bodies.in_turn, owner)

    def _note_quota(self, passage: Passage, error: QuotaExceeded) -> None:
        if passage.function is not None:
            self.on_quota(passage.function, error)

    # -- requests that aiohttp has read

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Carry a request of aiohttp through the steps."""
        passage = self._accepted(request)
        self.begin(passage)
        status, request_id = 500, ""
        try:
            response = await self._sendable(passage, request, await self._answered(passage, request, handler))
            status, request_id = response.status, response.headers.get(REQUEST_ID_HEADER, "")
        except web.HTTPException as error:
            status = error.status
            raise
        except (asyncio.CancelledError, ConnectionError) as error:
            status = Cancelled.status
            # Return a response, although it cannot be delivered. If the error were raised, aiohttp would log it for
            # each caller who has closed the connection.
            if isinstance(error, ConnectionError) and (
                not request.transport or request.transport.is_closing()
            ):
                return web.Response()
            raise
        finally:
            self.ended(passage, status, request_id)
        await discard_unread_body(request, response)
        return response

    def _accepted(self, request: web.Request) -> Passage:
        if isinstance(request.protocol, ClientConnection):
            request.protocol.begin(request)
        if self.standalone is not None:
            self.standalone.name_function(request)
        match = request.match_info
        resource = match.route.resource
        return Passage(
            request.method, request.path, resource.canonical if resource is not None else "", match.get("function"),
            request.headers, request.transport, time.monotonic(),
        )  # fmt: skip

    async def _answered(self, passage: Passage, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Return the response of the route, or of the step that refuses the request."""
        if request.method == hdrs.METH_OPTIONS and (preflight := await self.cors.preflight(request)):
            return preflight
        try:
            check_version(request)
            check_headers(request)
            with explaining(named=False):
                return await self._routed(passage, request, handler)
        except PilotflameError as error:
            response = self.failed(passage, error, id_of(request)).response()
            if isinstance(error, HeadersTooLarge):
                response.force_close()
            return response
        except (web.HTTPMethodNotAllowed, web.HTTPNotFound) as error:
            response = self.failed(passage, not_routed(request, error), id_of(request)).response()
            if hdrs.ALLOW in error.headers:
                response.headers[hdrs.ALLOW] = error.headers[hdrs.ALLOW]
            return response

    async def _routed(self, passage: Passage, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Admit a request, and return the response of its route."""
        public = self.guard.rule(passage.method, passage.path) is None
        if not public:
            try:
                signer = await self.guard.find_signer(request, passage.path)
            except QuotaExceeded as error:
                self._note_quota(passage, error)
                raise
            self.admit(passage, signer)
            request[CALLER], request[ADMITTED] = passage.admitted.caller, passage.admitted
            if isinstance(request.protocol, ClientConnection):
                request.protocol.admitted()
        try:
            if self.standalone is not None:
                await self.standalone.hold(request, passage.path)
            with explaining(named=False, begun=self.guard.may_call(passage.method, passage.path)):
                return await self.audit.audited(request, passage.path, handler)
        except UnknownFunction as error:
            if public:
                raise
            raise self.guard.suggesting(error, passage.headers, passage.admitted.caller) from None

    async def _sendable(
        self, passage: Passage, request: web.Request, response: web.StreamResponse
    ) -> web.StreamResponse:
        """Return a response as it is sent: compressed if its caller accepts this, and in slices if it is large."""
        body = response.body if isinstance(response, web.Response) else None
        if not isinstance(response, web.Response) or not isinstance(body, bytes | SlicedBody):
            return response
        if coding := name_coding(passage.headers, response.headers, response.content_type, body):
            body = await compress(body, coding, self.turn_of(passage.owner))
        called = self.guard.may_call(passage.method, passage.path)
        try:
            sliced = self.answers.sliced(
                body, response.content_type, passage.owner, passage.transport, called=called
            )
        except PilotflameError as error:
            return self.failed(passage, error, id_of(request)).response()
        if sliced is not response.body:
            response.body = sliced
        return response

    async def on_prepare(self, request: web.Request, response: web.StreamResponse) -> None:
        """Complete the headers of a response, before aiohttp sends them."""
        complete_headers(request, response)
        self.cors.complete(request, response)
        if self.isolation is not None:
            self.isolation.complete(request, response)
        if self.is_stale is not None and self.is_stale(request.match_info.get("function")):
            response.headers[STALE_HEADER] = "true"
        if self.leaving:
            response.headers["Connection"] = "close"
            response.force_close()
