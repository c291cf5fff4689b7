"""Refuses requests of web pages of other origins, unless the function or the gateway allows the origin (CORS).

Only routes that need the scope `invoke` or no scope can be allowed, never routes that deploy or manage. A page sends its
API key in a header that it sets, not in a cookie, so no response allows credentials.

While a gateway on loopback has no API key, pages of this machine may use the routes with the scope `invoke`, too. Any
program of the machine may use these routes anyway.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from aiohttp import hdrs, web
from multidict import istr

from ....addresses import is_loopback
from ....errors import Forbidden, GatewayError, UnknownFunction
from ...ground.access.keys import Scope
from ...ground.settings.function_settings import Cors
from ...node.functions.registry import Functions
from .host_names import HostNames
from .requests import Headers
from .routes import Route

EVERY = "*"
MAX_METHOD_CHARS = 20
MAX_AGE_S = "600"
"""Seconds for which a browser remembers the response to a preflight. With a longer time, a change of the settings takes effect later."""
MAX_HEADERS_CHARS = 4096
# The origins of pages that a program of this machine serves. A browser writes them in this form.
_LOCAL = re.compile(r"https?://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?")
_PRIVATE_NETWORK = "Access-Control-{}-Private-Network"
_FETCH_SITE, _FETCH_DEST = istr("Sec-Fetch-Site"), istr("Sec-Fetch-Dest")
# A browser sends "none" if the user has entered the address. Programs send no such header, which gives None.
_OWN_SITES = (None, "none", "same-origin")


class CrossOrigin:
    """Decides which origins may call which routes. Pages of `origins` may call all functions."""

    def __init__(
        self,
        functions: Functions,
        routes: Sequence[Route],
        origins: Sequence[str],
        hosts: HostNames,
        is_open: Callable[[], bool],
    ) -> None:
        """`is_open` returns True while only this machine reaches the gateway and requests need no API key."""
        self._functions, self._hosts, self._is_open = functions, hosts, is_open
        self._invoking = {route.canonical for route in routes if route.scope is Scope.INVOKE}
        self._paths = {route.canonical for route in routes if route.scope in (None, Scope.INVOKE)}
        self._everywhere = Cors(origins=tuple(origins))

    def check(self, headers: Headers, path: str, function: str | None) -> None:
        """Raise Forbidden if the request comes from a web page that may not call the route with this registered path.

        A page can send requests to each gateway that its browser reaches. The page's own host name may resolve to
        127.0.0.1 (DNS rebinding). A page cannot forge the headers Host, Origin and Sec-Fetch-*, which the browser sets.
        """
        host, origin, site = headers.get(hdrs.HOST), headers.get(hdrs.ORIGIN), headers.get(_FETCH_SITE)
        if host is not None and not _names_loopback(f"//{host}") and self._is_foreign(headers):
            raise self._refusal(f"answers only to this machine's own names, not to {host[:80]!a}")
        if site in _OWN_SITES and (origin is None or self._is_own(origin, host, site)):
            return
        if origin is None:
            allowed = self._is_link(headers)
        else:
            allowed = self._settings(origin, path, function) is not None
        if not allowed:
            page = "another origin" if origin is None else ascii(origin[:80])
            raise self._refusal(f"answers no web page of {page} here")

    def _is_foreign(self, headers: Headers) -> bool:
        """Return True if the gateway is open and the Host is not the host name of a function. A function's host name is
        safe, because it only reaches the function's app.
        """
        return self._is_open() and self._hosts.function_of(headers) is None

    def _is_own(self, origin: str, host: str | None, site: str | None) -> bool:
        """Return True if this gateway has served the page. A proxy may have changed the scheme and the Host, so
        `Sec-Fetch-Site: same-origin` of the browser may also count.
        """
        proxied = site == "same-origin" and (_names_loopback(origin) or not self._is_open())
        return proxied or origin.partition("://")[2] == host

    def _is_link(self, headers: Headers) -> bool:
        """Return True if the request opens a function's app, at its host name, in a window, as after a login elsewhere.
        No other page can read the response.
        """
        in_window = headers.get(_FETCH_DEST) == "document" and not self._is_open()
        return in_window and self._hosts.function_of(headers) is not None

    def _refusal(self, what: str) -> Forbidden:
        remedy = "[cors] in pilotflame.toml lets pages of other origins call a function, and do nothing else."
        if not self._is_open():
            return Forbidden(f"This gateway {what}.", remedy=remedy)
        own = "Call http://localhost:PORT, or send an API key (pilotflame keys create NAME --scope admin)."
        return Forbidden(f"Without API keys this gateway {what}.", remedy=f"{own} {remedy}")

    async def preflight(self, request: web.Request) -> web.Response | None:
        """Return the response to a preflight. A browser sends it without an API key, to ask whether a page may send a
        request.

        Return None for any other request, and if the page may not send the request.
        """
        origin = request.headers.get(hdrs.ORIGIN)
        method = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_METHOD, "")[:MAX_METHOD_CHARS]
        if request.method != hdrs.METH_OPTIONS or origin is None or not method:
            return None
        match = await request.app.router.resolve(request.clone(method=method))
        settings = self._settings(origin, *_route(match))
        if settings is None:
            return None
        wanted = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")
        headers: dict[str, str] = {
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: method,
            hdrs.ACCESS_CONTROL_ALLOW_HEADERS: wanted[:MAX_HEADERS_CHARS],
            hdrs.ACCESS_CONTROL_MAX_AGE: MAX_AGE_S,
        }
        # Chrome sends this header before a page of the internet calls a gateway on this machine or network.
        if _PRIVATE_NETWORK.format("Request") in request.headers:
            headers[_PRIVATE_NETWORK.format("Allow")] = "true"
        return web.Response(status=204, headers=headers | _allow(origin, settings))

    def complete(self, request: web.Request, response: web.StreamResponse) -> None:
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
        """Return the settings that allow the origin: the settings of the function, or else of the gateway. Return
        None if neither allows the origin.
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


# Cached because most requests have the same Host.
@functools.lru_cache(maxsize=16)
def _names_loopback(address: str) -> bool:
    """Return True if the host of an address such as //localhost:8600 or http://[::1] is this machine."""
    try:
        parts = urlsplit(address)
        return parts.username is None and is_loopback(parts.hostname or "")
    except ValueError:
        return False


def _allow(origin: str, settings: Cors) -> dict[str, str]:
    allowed = EVERY if EVERY in settings.origins else origin
    return {hdrs.ACCESS_CONTROL_ALLOW_ORIGIN: allowed, hdrs.VARY: hdrs.ORIGIN}
