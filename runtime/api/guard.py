"""The guard: before every route, asks who comes, and whether he may.

A gateway that only this machine reaches, and for which no key was ever made, asks nobody, but refuses what a web page of
elsewhere has sent. Any other answers nothing but health to those without a key. Requests on the socket in the state folder need none: who can open that is its owner.
"""

from __future__ import annotations

import asyncio
import math
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from aiohttp import web

from ...errors import Forbidden, GatewayError, PilotflameError, QuotaExceeded, Unauthorized
from ..access.caller import ANYBODY, CALLER, Caller
from ..access.keyring import Held, Keyring
from ..access.quota import Meter
from ..dialects.aws_lambda.errors import PATHS, aws_error
from .origin import OriginCheck
from .requests import request_id_of
from .responses import error_response
from .rules import OPEN, scope_of

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

CHALLENGE = "Bearer"
SIGNED = "AWS4-"
SESSION_TOKEN = "X-Amz-Security-Token"  # noqa: S105  a header's name
"""AWS's clients sign with a secret that is not stored here; the session token that they send along may be the API key."""


class Admitted(NamedTuple):
    """Somebody who may pass, and whose quota he uses while he is here."""

    caller: Caller
    meter: Meter | None = None

    def leave(self) -> None:
        if self.meter is not None:
            self.meter.leave()


NOBODY = Admitted(ANYBODY)


class Guard:
    """`required` says that keys are asked for even if there are none yet."""

    def __init__(
        self,
        keyring: Keyring,
        tasks: asyncio.TaskGroup,
        *,
        required: bool,
        on_quota: Callable[[str, PilotflameError], None] = lambda _function, _error: None,
    ) -> None:
        """`on_quota` is told of requests for a function, if there is one of that name, for which a key had no quota."""
        self._keyring = keyring
        self._tasks = tasks
        self._required = required
        self._on_quota = on_quota
        self._origins = OriginCheck()

    @property
    def closed(self) -> bool:
        """Whether a request needs a key."""
        return self._required or self._keyring.exists

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        path = _path(request)
        if path in OPEN:
            return await handler(request)
        function = request.match_info.get("function")
        try:
            admitted = self.admit(request.headers, path, function, request.transport)
        except PilotflameError as error:
            if isinstance(error, QuotaExceeded) and (function := request.match_info.get("function")):
                self._on_quota(function, error)
            return _refusal(request, error)
        request[CALLER] = admitted.caller
        try:
            return await handler(request)
        finally:
            admitted.leave()

    def admit(
        self,
        headers: Mapping[str, str],
        path: str,
        function: str | None,
        transport: asyncio.BaseTransport | None,
    ) -> Admitted:
        """Who may pass; `leave` of what comes back must follow. `path` is the route's, as it was registered.

        Raises Unauthorized, Forbidden, QuotaExceeded, UnknownFunction.
        """
        if not self.closed:
            try:
                self._origins.check(headers)
            except Forbidden:
                if not _on_own_socket(transport):
                    raise
            return NOBODY
        held = self._held(headers, transport)
        if held is None:
            return NOBODY
        _enter(held)
        try:
            if path and (scope := scope_of(path)) is not None:
                held.caller.check_scope(scope)
            if function is not None:
                held.caller.check(function)
        except PilotflameError:
            held.meter.leave()
            raise
        return Admitted(held.caller, held.meter)

    def _held(self, headers: Mapping[str, str], transport: asyncio.BaseTransport | None) -> Held | None:
        """The key that came with a request; None: its sender owns this gateway. Raises Unauthorized."""
        given = headers.get("Authorization")
        if given is None:
            if _on_own_socket(transport):
                return None
            raise Unauthorized(
                "This gateway answers only to those who send an API key.",
                remedy="Send `Authorization: Bearer KEY`, or set PILOTFLAME_API_KEY; `pilotflame keys create` makes one.",
            )
        now_s = time.time()
        if given.startswith(SIGNED):  # of a signature only the key's holder could tell whether it is right
            given = headers.get(SESSION_TOKEN, "")
        held = self._keyring.find(token_in(given), now_s)
        if held is None:
            raise Unauthorized(
                "The API key that was sent is not one of this gateway's, was revoked, or has expired.",
                remedy="See `pilotflame keys list` on the gateway's machine.",
            )
        if held.used(now_s):
            self._tasks.create_task(asyncio.to_thread(self._save))
        return held

    def _save(self) -> None:
        try:
            self._keyring.save()
        except GatewayError as error:  # nobody is let in or kept out by when a key was last used
            sys.stderr.write(f"pilotflame: {error}\n")


def token_in(header: str) -> str:
    """What an Authorization header brings. Some of RunPod's code sends a bare key: that is taken too."""
    scheme, space, rest = header.strip().partition(" ")
    return rest.strip() if space and scheme.lower() == "bearer" else header.strip()


def _path(request: web.Request) -> str:
    """As it was registered; "" if nothing is there."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else ""


def _enter(held: Held) -> None:
    wait_s = held.meter.enter(time.monotonic())
    if wait_s:
        raise QuotaExceeded(
            "This API key's quota is used up.",
            remedy="Try again after the seconds in Retry-After, or ask for a larger quota.",
            details={"retry_after_s": wait_s},
        )


def _refusal(request: web.Request, error: PilotflameError) -> web.Response:
    # With an id, as every route's own refusal: nobody is to tell the two apart.
    answer = aws_error if request.path.startswith(PATHS) else error_response
    response = answer(error, request_id_of(request.headers))
    if isinstance(error, Unauthorized):
        response.headers["WWW-Authenticate"] = CHALLENGE
    elif isinstance(error, QuotaExceeded):
        response.headers["Retry-After"] = str(max(1, math.ceil(error.details["retry_after_s"])))
    return response


def _on_own_socket(transport: asyncio.BaseTransport | None) -> bool:
    sock = transport.get_extra_info("socket") if transport is not None else None
    return sock is not None and sock.family == socket.AF_UNIX
