"""Keeps pages of functions apart from the gateway's own pages, and from each other, in the browsers that show them.

A browser gives all pages of one host name and port the same rights (their origin). On a host name of its own, a
function has an origin of its own. Everywhere else, its pages have the origin of the console, so the policy `sandbox`
makes the browser give each page an origin of its own, without scripts and forms. This policy applies to documents and
workers only.
"""

from __future__ import annotations

from functools import partial

from aiohttp import hdrs, web

from ...ground.access.host_claims import host_name
from .host_names import HostNames

POLICY = "Content-Security-Policy"
SANDBOX = "sandbox"
CLEAR_SITE_DATA = "Clear-Site-Data"
"""This header also deletes the cookies of all other host names below the same domain, so no function may send it."""
ORIGIN_WIDE = (
    CLEAR_SITE_DATA, "Service-Worker-Allowed", "Strict-Transport-Security", "Alt-Svc", "NEL", "Report-To",
)  # fmt: skip
"""Headers by which a response decides about other paths of its origin."""


class OwnPage(web.Response):
    """A file of the gateway's own pages. `PageIsolation` leaves only these responses as they are."""


class PageIsolation:
    """Completes and removes headers of responses, so that no page of a function acts as a page of the gateway."""

    def __init__(self, hosts: HostNames) -> None:
        self._hosts = hosts

    def complete(self, request: web.Request, response: web.StreamResponse) -> None:
        """Complete the headers of a response before they are sent."""
        if isinstance(response, OwnPage):
            return
        alone, headers = self._hosts.function_of(request.headers) is not None, response.headers
        for name in (CLEAR_SITE_DATA,) if alone else ORIGIN_WIDE:
            headers.popall(name, None)
        stay = (
            partial(_stays, host=host_name(request.host)) if alone else partial(_stays_below, request=request)
        )
        cookies = headers.getall(hdrs.SET_COOKIE, ())
        if not all(map(stay, cookies)):
            del headers[hdrs.SET_COOKIE]
            headers.extend([(hdrs.SET_COOKIE, cookie) for cookie in filter(stay, cookies)])
        # Browsers send Origin with all other methods. So a request with another method and without Origin comes from a
        # program, and needs no sandbox. Plain calls come from programs, too.
        if not alone and (
            request.method in (hdrs.METH_GET, hdrs.METH_HEAD) or hdrs.ORIGIN in request.headers
        ):
            # Add a further line, because the browser must obey the function's own policy, too.
            headers.add(POLICY, SANDBOX)


def _stays(cookie: str, host: str) -> bool:
    """Return True if a browser sends a cookie only to `host` and to host names below it."""
    return all(domain.lower().removeprefix(".") in ("", host) for domain in _values(cookie, "domain"))


def _stays_below(cookie: str, request: web.Request) -> bool:
    """Return True if a browser sends a cookie only to paths of the function that the request names."""
    if (root := _root(request)) is None or not _stays(cookie, ""):
        return False
    # Without a valid path, a browser takes the path of the request up to its last slash.
    default = request.path.rpartition("/")[0]
    paths = [path if path.startswith("/") else default for path in _values(cookie, "path")] or [default]
    return all(path == root or path.startswith(f"{root}/") for path in paths)


def _values(cookie: str, attribute: str) -> list[str]:
    pairs = [part.partition("=") for part in cookie.split(";")[1:]]
    return [value.strip() for name, _, value in pairs if name.strip().lower() == attribute]


def _root(request: web.Request) -> str | None:
    """Return the path of a request up to the name of its function."""
    function, resource = request.match_info.get("function"), request.match_info.route.resource
    before, place, _ = resource.canonical.partition("{function}") if resource is not None else ("", "", "")
    return f"{before}{function}" if function and place else None
