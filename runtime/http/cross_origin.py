"""Lets web pages of other origins call functions (CORS), if the function or the gateway allows their origin.

This applies to routes that need the scope `invoke` or no scope, never to routes that deploy or manage. A page sends its
API key in a header that it sets, not in a cookie, so no response allows credentials.

While a gateway on loopback has no API key, pages of this machine may use the routes with the scope `invoke`, too. Any
program of the machine may use these routes anyway.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence

from aiohttp import hdrs, web

from ...errors import GatewayError, UnknownFunction
from ..access.keys import Scope
from ..functions.registry import Functions
from ..settings.function_settings import Cors
from .responses import Handler
from .routes import Route

EVERY = "*"
MAX_METHOD_CHARS = 20
MAX_HEADERS_CHARS = 4096
# The origins of pages that a program of this machine serves. A browser writes them in this form.
_LOCAL = re.compile(r"https?://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?")
_PRIVATE_NETWORK = "Access-Control-{}-Private-Network"


class CrossOrigin:
    """Decides which origins may call which routes. Pages of `origins` may call all functions."""

    def __init__(
        self,
        functions: Functions,
        routes: Sequence[Route],
        origins: Sequence[str],
        is_open: Callable[[], bool],
    ) -> None:
        """`is_open` returns True while only this machine reaches the gateway and requests need no API key."""
        self._functions, self._is_open = functions, is_open
        self._invoking = {route.canonical for route in routes if route.scope is Scope.INVOKE}
        self._paths = {route.canonical for route in routes if route.scope in (None, Scope.INVOKE)}
        self._everywhere = Cors(origins=tuple(origins))

    def allows(self, origin: str, path: str, function: str | None) -> bool:
        """Return True if pages of `origin` may call the route with this registered path."""
        return self._settings(origin, path, function) is not None

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer preflights, with which a browser asks, without an API key, whether a page may send a request."""
        origin = request.headers.get(hdrs.ORIGIN)
        method = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_METHOD, "")[:MAX_METHOD_CHARS]
        if request.method != hdrs.METH_OPTIONS or origin is None or not method:
            return await handler(request)
        match = await request.app.router.resolve(request.clone(method=method))
        settings = self._settings(origin, *_route(match))
        if settings is None:
            return await handler(request)
        wanted = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")
        headers: dict[str, str] = {
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: method,
            hdrs.ACCESS_CONTROL_ALLOW_HEADERS: wanted[:MAX_HEADERS_CHARS],
            hdrs.ACCESS_CONTROL_MAX_AGE: str(settings.max_age_s),
        }
        # Chrome sends this header before a page of the internet calls a gateway on this machine or network.
        if _PRIVATE_NETWORK.format("Request") in request.headers:
            headers[_PRIVATE_NETWORK.format("Allow")] = "true"
        return web.Response(status=204, headers=headers | _allow(origin, settings))

    async def on_prepare(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add the headers without which a browser hides the response from the page."""
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is None or hdrs.ACCESS_CONTROL_ALLOW_ORIGIN in response.headers:
            return
        settings = self._settings(origin, *_route(request.match_info))
        if settings is not None:
            varies = response.headers.get(hdrs.VARY)
            response.headers.update(_allow(origin, settings))
            if varies:
                response.headers[hdrs.VARY] = f"{varies}, {hdrs.ORIGIN}"
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = EVERY

    def _settings(self, origin: str, path: str, function: str | None) -> Cors | None:
        """Return the settings that allow the origin: the settings of the function, or else of the gateway. None if
        neither allow it.
        """
        if path not in self._paths:
            return None
        if path in self._invoking and _LOCAL.fullmatch(origin) and self._is_open():
            return Cors(origins=(origin,))
        found = [self._everywhere]
        if function is not None:
            with contextlib.suppress(UnknownFunction, GatewayError):
                found.insert(0, self._functions.get(function).record.settings.cors)
        return next((one for one in found if origin in one.origins or EVERY in one.origins), None)


def _route(match: web.UrlMappingMatchInfo) -> tuple[str, str | None]:
    """Return (registered path, function) of a request; ("", None) if no route matches."""
    resource = match.route.resource
    return (resource.canonical if resource is not None else "", match.get("function"))


def _allow(origin: str, settings: Cors) -> dict[str, str]:
    allowed = EVERY if EVERY in settings.origins else origin
    return {hdrs.ACCESS_CONTROL_ALLOW_ORIGIN: allowed, hdrs.VARY: hdrs.ORIGIN}
