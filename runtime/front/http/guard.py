"""Identifies the caller before every route, and checks the caller's rights.

A gateway is open if only this machine can reach the gateway, its setting `auth` is not "always", and no API key was
ever created. An open gateway admits every request. Any other gateway requires an API key on all routes that are not
public, except in requests with the key of the control socket. A gateway that serves one function alone requires an API
key only if a key exists. If no key exists, its callers may use only a few routes. `CrossOrigin` refuses requests of web
pages of other origins, with and without a key.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from aiohttp import hdrs, web

from ....errors import (
    Forbidden,
    GatewayError,
    Overloaded,
    PilotflameError,
    Unauthorized,
    UnknownFunction,
)
from ...ground.access.aws_signature import SCHEME, Signature, SignedRequest, parse_signature, refused, verify
from ...ground.access.control_socket import CONTROL_KEY, ControlSocket
from ...ground.access.keyring import Held, Keyring, Meter, check_quota
from ...ground.access.keys import ANYBODY, Caller, Scope
from ..listening.open_connections import OpenConnections
from .cross_origin import CrossOrigin
from .incoming_bodies import INCOMING
from .requests import BODY, BODY_TIMEOUT_S, GATEWAY_REMEDY, Headers, read_sent
from .responses import MAX_ON_LOOP_BYTES
from .routes import Route, scopes_by_route
from .unverified_bodies import PlaceLost, UnverifiedBodies

if TYPE_CHECKING:
    from ...ground.access.issuers import Issuers

LOG = logging.getLogger(__name__)
# AWS's clients sign requests, and may also send a session token. A caller can use the API key as this token.
SESSION_TOKEN = "X-Amz-Security-Token"  # noqa: S105
KEY_HEADERS = frozenset(name.lower() for name in ("Authorization", SESSION_TOKEN, CONTROL_KEY))
"""The headers in which a request may contain a key of this gateway, in lower case. Handlers do not get these headers."""
RETRY_S = 1.0
_JSON_WEB_TOKEN = re.compile(r"[\w-]+\.[\w-]+\.[\w-]+", re.ASCII)


@dataclass(slots=True, eq=False)
class Admitted:
    """The caller of an admitted request. The request counts as running in the key's quota until `leave`."""

    caller: Caller
    meter: Meter | None = None
    count: int = 1
    """The number of requests as which the quota counts this request."""
    on_leave: Callable[[], None] | None = None

    def leave(self) -> None:
        if self.meter is not None:
            self.meter.leave(self.count)
        if self.on_leave is not None:
            self.on_leave()


UNKNOWN_CALLER = Admitted(ANYBODY)
ADMITTED = web.RequestKey("admitted", Admitted)


def count_calls(request: web.Request, count: int) -> None:
    """Count a request as `count` requests, because it has several prompts, events or values. Raise QuotaExceeded if that is too many now."""
    admitted = request.get(ADMITTED)
    if admitted is None or admitted.meter is None or count <= admitted.count:
        return
    more, meter = count - admitted.count, admitted.meter
    check_quota(meter, meter.widen(time.monotonic(), more, admitted.count))
    admitted.count = count


def counted(request: web.Request) -> bool:
    """Return True if `count_calls` has counted all calls of the request and their answers."""
    admitted = request.get(ADMITTED)
    return admitted is not None and admitted.count > 1


class Guard:
    """The guard of a gateway, with the scope that each route requires."""

    def __init__(
        self, keyring: Keyring, control: ControlSocket, tasks: asyncio.TaskGroup, routes: Sequence[Route],
        cors: CrossOrigin, connections: OpenConnections, *, local: bool, required: bool, max_body_bytes: int,
        names: Callable[[], Iterable[str]] = tuple, check_owner: Callable[[Caller, str], None] = lambda _caller, _function: None, anybody: Caller = ANYBODY, open_to_anybody: Set[tuple[str, str]] = frozenset(),
    ) -> None:  # fmt: skip
        """`local` is True if only this machine can reach the gateway, `required` if requests need a key even if no key exists.

        While requests need no key, their caller is `anybody`. This caller may use the routes (method and path) in
        `open_to_anybody`, whatever scope these routes require. `max_body_bytes` limits the bodies of signed requests,
        which the guard reads. `names` returns the names of all functions. `check_owner(caller, function)` raises
        Forbidden if the caller may not change the function.
        """
        self._keyring, self._control, self._tasks, self._cors = keyring, control, tasks, cors
        self._public = {
            (method, route.path) for route in routes if route.public for method in _methods(route)
        }
        self._signed = {route.path for route in routes if route.aws_signed}
        self._key_headers = {route.canonical: route.key_header for route in routes if route.key_header}
        self._scopes = scopes_by_route(routes)
        self._max_body_bytes = max_body_bytes
        self._unverified, self._connections = UnverifiedBodies(), connections
        self._issuers: Issuers | None = None
        self._local, self._required = local, required
        self._anybody = Admitted(anybody) if anybody is not ANYBODY else UNKNOWN_CALLER
        self._open_to_anybody = open_to_anybody
        self._names, self._check_owner = names, check_owner

    @property
    def closed(self) -> bool:
        """True if requests need an API key."""
        return self._required or self._keyring.exists

    def rule(self, method: str, path: str) -> tuple[str, str] | None:
        """Return the row (method, path) by which requests to a registered path are admitted; None if it is public."""
        if (method, path) in self._public:
            return None
        # A row with "*" serves all methods.
        return ("*" if ("*", path) in self._scopes else method, path)

    def may_call(self, method: str, path: str) -> bool:
        """Return True if a request to a registered path may run a function."""
        return method not in ("GET", "HEAD") and self._scopes.get((method, path)) not in (
            Scope.DEPLOY,
            Scope.ADMIN,
        )

    async def find_signer(self, request: web.Request, path: str) -> Held | None:
        """Return the API key that has signed the request, or the API key that the request's token of an issuer stands
        for. Return None if the request contains an API key itself or needs none.

        If this returns a key, the key's meter counts the request. Raise the errors of `find_issuer`, and those of
        `read_sent`: a signature covers the body as it was sent, so the body is read first.
        """
        signer = await self._find_signer(request) if path in self._signed else None
        return await self.find_issuer(request.headers) if signer is None else signer

    def waits(self, headers: Headers) -> bool:
        """Return True if the request has the token of an issuer. Then only `find_signer`, which is asynchronous, finds
        its key.
        """
        return hdrs.AUTHORIZATION in headers and self._issued(headers) != ""

    def _issued(self, headers: Headers) -> str:
        """Return the token of an issuer; "" without one."""
        token = token_in(headers.get(hdrs.AUTHORIZATION, ""))
        return token if _JSON_WEB_TOKEN.fullmatch(token) and self._keyring.federated else ""

    def admit(
        self, headers: Headers, route: tuple[str, str], function: str | None,
        transport: asyncio.BaseTransport | None, signer: Held | None = None,
    ) -> Admitted:  # fmt: skip
        """Admit a request to the route of this method and registered path. Call `leave` of the result.

        `signer` is the key that has signed the request, if the request does not contain the key itself. The meter of
        `signer` already counts the request. Raise Unauthorized, Forbidden, QuotaExceeded, UnknownFunction if the key
        does not cover the function, or Overloaded if a client behind a proxy has too many requests.
        """
        admitted = self._admit(headers, route, function, transport, signer)
        try:
            end = self._connections.begin(headers, transport)
        except Overloaded:
            admitted.leave()
            raise
        return replace(admitted, on_leave=end) if end is not None else admitted

    def _admit(
        self, headers: Headers, route: tuple[str, str], function: str | None,
        transport: asyncio.BaseTransport | None, signer: Held | None,
    ) -> Admitted:  # fmt: skip
        closed = self.closed
        try:
            if closed or self._local:
                self._cors.check(headers, route[1], function)
        except Forbidden:
            if not self._control.admits(headers, transport):
                raise
        if not closed:
            return self._admit_anybody(headers, route, transport)
        held = signer or self._find_key(headers, transport, route[1])
        if held is None:
            return UNKNOWN_CALLER
        if signer is None:
            _enter(held.meter)
        try:
            self._check_scope(held.caller, route)
            if function is not None:
                self.check_function(held.caller, route, function)
        except PilotflameError as error:
            held.meter.leave()
            if isinstance(error, UnknownFunction):
                raise self.suggesting(error, headers, held.caller) from None
            raise
        return Admitted(held.caller, held.meter)

    def check_function(self, caller: Caller, route: tuple[str, str], function: str) -> None:
        """Raise UnknownFunction if the caller's key does not cover the function, and Forbidden if only the function's
        owner may use the route.
        """
        caller.check(function)
        if caller.confined and self._scopes.get(route) is Scope.DEPLOY:
            if function not in self._names():
                raise UnknownFunction.named(function)
            self._check_owner(caller, function)

    def suggesting(self, error: UnknownFunction, headers: Headers, caller: Caller) -> UnknownFunction:
        """Return the error with the closest names among the functions visible to the caller."""
        # A web page may call a function, but has no right to list functions.
        if not error.name or hdrs.ORIGIN in headers:
            return error
        return UnknownFunction.named(error.name, filter(caller.allows, self._names()))

    def _admit_anybody(
        self, headers: Headers, route: tuple[str, str], transport: asyncio.BaseTransport | None
    ) -> Admitted:
        """Admit a caller without a key. Raise Forbidden if `anybody` may not use the route."""
        if self._anybody is UNKNOWN_CALLER or self._control.admits(headers, transport):
            return UNKNOWN_CALLER
        if route not in self._open_to_anybody:
            self._check_scope(self._anybody.caller, route)
        return self._anybody

    def _check_scope(self, caller: Caller, route: tuple[str, str]) -> None:
        if route[1] and (scope := self._scopes.get(route, Scope.ADMIN)) is not None:
            caller.check_scope(scope)

    def _find_key(self, headers: Headers, transport: asyncio.BaseTransport | None, path: str) -> Held | None:
        """Return the API key in the request, or None if the request needs no key. Raise Unauthorized if the key is
        missing or invalid.
        """
        sent = headers.get("Authorization")
        if sent is None and path in self._key_headers:
            sent = headers.get(self._key_headers[path])
        if sent is None:
            if self._control.admits(headers, transport):
                return None
            remedy = "Send `Authorization: Bearer KEY`, or set PILOTFLAME_API_KEY; `pilotflame keys create` makes one."
            raise Unauthorized("This gateway requires an API key.", remedy=remedy)
        now_s = time.time()
        # On routes that accept no signatures, the session token of a signed request must be the key.
        if sent.startswith(SCHEME):
            sent = headers.get(SESSION_TOKEN, "")
        held = self._keyring.find(token_in(sent), now_s)
        if held is None:
            remedy = "See `pilotflame keys list` on the gateway's machine."
            raise Unauthorized("The API key is unknown, was revoked, or has expired.", remedy=remedy)
        self._note_use(held, now_s)
        return held

    async def _find_signer(self, request: web.Request) -> Held | None:
        """Return the key that has signed the request, or None if the request is not signed or contains the key itself.

        If this returns a key, the key's meter counts the request. Raise Unauthorized if the signature is not valid,
        QuotaExceeded and Overloaded. Also raise the errors of `read_sent`, which reads the body, because a signature
        covers it.
        """
        headers, now_s = request.headers, time.time()
        signed = headers.get("Authorization", "").startswith(SCHEME) and SESSION_TOKEN not in headers
        if not signed or not self.closed:
            return None
        signature = parse_signature(headers, now_s)
        # Check the key before the body is read. Otherwise, requests with an unknown key or an exhausted quota could
        # fill the memory.
        held = self._keyring.signer(signature.key_id, now_s)
        if held is None:
            raise refused(signature, "there is no such key, or it has expired")
        check_quota(held.meter, held.meter.wait_s(time.monotonic()))
        await self._verify(request, held, signature)
        # Count the request only after its signature was verified, because anyone can send a request that names the key.
        _enter(held.meter)
        self._note_use(held, now_s)
        return held

    async def find_issuer(self, headers: Headers) -> Held | None:
        """Return the API key as which the request's token of an issuer acts, or None if it has no such token.

        If this returns a key, the key's meter counts the request. Raise Unauthorized, QuotaExceeded, or GatewayError
        if the issuer's keys cannot be fetched.
        """
        if not (token := self._issued(headers)):
            return None
        if self._issuers is None:
            # Import the library only for a token of an issuer, and in a thread, because the import would block the
            # event loop.
            module = await asyncio.to_thread(_issuers_module)
            made: Issuers = module.Issuers(self._keyring.of_issuer)
            self._issuers = self._issuers or made
        now_s = time.time()
        found = await self._issuers.find(token, now_s)
        # The key may have been revoked meanwhile.
        if self._keyring.signer(found.held.key.id, now_s) is not found.held:
            raise Unauthorized(
                "The API key of this token was revoked.", remedy="Ask its owner for another one."
            )
        _enter(found.held.meter)
        self._note_use(found.held, now_s)
        return found.held.acting(found.owner, found.expires_s)

    async def _verify(self, request: web.Request, held: Held, signature: Signature) -> None:
        """Read the body, and raise Unauthorized unless the key has signed the request."""
        async with self._reading(request, held.key.id):
            body = request[BODY] = await read_sent(request, self._max_body_bytes, remedy=GATEWAY_REMEDY)
            covered = SignedRequest(request.method, request.raw_path, request.headers, body)
            if len(body) > MAX_ON_LOOP_BYTES:
                work = partial(verify, held.key.signing_digest, signature, covered)
                # Unverified requests have turns of their own. They must not use the turns of the key's owner, because
                # anyone can name the key.
                await request.app[INCOMING].in_turn(f"unverified {held.key.id}", work)
            else:
                verify(held.key.signing_digest, signature, covered)

    @contextlib.asynccontextmanager
    async def _reading(self, request: web.Request, key_id: str) -> AsyncIterator[None]:
        """Limit the number of unverified bodies in memory. Small bodies do not count."""
        if not request.can_read_body or (request.content_length or math.inf) <= MAX_ON_LOOP_BYTES:
            yield
            return
        content = request.content

        def received() -> int | None:
            return None if content.is_eof() else content.total_bytes

        try:
            client = self._connections.client_of(request.headers, request.transport)
            async with self._unverified.place(key_id, client, received, BODY_TIMEOUT_S):
                yield
        except PlaceLost:
            message = "The gateway is verifying as many signed requests as it may at a time."
            details = {"retry_after_s": RETRY_S}
            raise Overloaded(message, remedy="Try again, or send the API key.", details=details) from None

    def _note_use(self, held: Held, now_s: float) -> None:
        if held.used(now_s):
            self._tasks.create_task(asyncio.to_thread(self._save), name="keyring")

    def _save(self) -> None:
        try:
            self._keyring.save()
        except GatewayError as error:
            # Only log the error and admit the request. The gateway uses the time of last use only to show it to users.
            LOG.warning("%s", error)


def _issuers_module() -> Any:
    try:
        return import_module("...ground.access.issuers", __package__)
    except ImportError as error:
        remedy = "pip install 'pilotflame[oidc]', for the gateway, and start it again."
        raise GatewayError(f"Tokens of issuers need a package: {error}.", remedy=remedy) from None


def _methods(route: Route) -> tuple[str, ...]:
    """Return the methods of a route. `aiohttp_routes` adds HEAD to public routes with GET."""
    return ("GET", "HEAD") if route.method == "GET" else (route.method,)


def _enter(meter: Meter) -> None:
    """Count a request. Raise QuotaExceeded if the key may send no request now."""
    check_quota(meter, meter.enter(time.monotonic()))


def token_in(header: str) -> str:
    """Return the token of an Authorization header.

    Some of RunPod's clients send the token without "Bearer", and older clients of Replicate send it with "Token".
    """
    scheme, space, rest = header.strip().partition(" ")
    return rest.strip() if space and scheme.lower() in ("bearer", "token") else header.strip()
