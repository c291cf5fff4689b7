"""Serves `/`, which names the gateway, and `/docs`, a page that shows /openapi.json and sends requests.

The page consists of three files beside this one. It loads nothing from elsewhere, so it works offline, and its security
policy forbids everything else. The page's files contain no data. The page reads /openapi.json with the key that a user
enters, and keeps the key only while the page is open.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from aiohttp import web

from ...._version import __version__
from ..http.page_isolation import OwnPage
from ..http.responses import json_response
from ..http.routes import Route

NAME = "pilotflame"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'"
)
LINKS = {
    "console_url": "/console",
    "docs_url": "/docs",
    "openapi_url": "/openapi.json",
    "live_url": "/healthz",
    "ready_url": "/readyz",
}
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": POLICY,
    # A page that opens this page in a window cannot access the window.
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


class DocsPage:
    """The routes of the page and of `/`. They are public: a health checker or a browser needs no key."""

    def __init__(self, more: Mapping[str, str] = MappingProxyType({})) -> None:
        """`more` contains the fields that plugins add to `/`."""
        self._fields = {"name": NAME, "version": __version__, **LINKS, **more}

    def routes(self) -> list[Route]:
        probe: dict[str, Any] = {"public": True, "errors": ()}
        named = dict.fromkeys(self._fields, str)
        return [
            Route("GET", "/", self.index, None, "Name the gateway.", named, other_responses={303: None}, **probe),
            Route("OPTIONS", "/", self.options, None, "List the methods.", None, 204, **probe),
            Route("GET", "/docs", _file("html", "text/html"), None, "This API as a page.", {"text/html": str}, **probe),
            Route(
                "GET", "/docs/page.js", _file("js", "text/javascript"), None, "The page's script.",
                {"text/javascript": str}, **probe,
            ),
            Route(
                "GET", "/docs/page.css", _file("css", "text/css"), None, "The page's style.", {"text/css": str},
                **probe,
            ),
        ]  # fmt: skip

    async def index(self, request: web.Request) -> web.StreamResponse:
        """Respond with 200, which health checkers expect. Redirect a browser to the console."""
        if "text/html" in request.headers.get("Accept", ""):
            return web.Response(status=303, headers={"Location": LINKS["console_url"], "Vary": "Accept"})
        return json_response(self._fields, headers={"Vary": "Accept"})

    async def options(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(status=204, headers={"Allow": "GET, HEAD, OPTIONS"})


def _file(suffix: str, media_type: str) -> Any:
    """Return the handler that serves one of the page's files. Read the file once, before the first request."""
    body = Path(__file__).with_suffix(f".{suffix}").read_bytes()

    async def send(_request: web.Request) -> web.StreamResponse:
        return OwnPage(body=body, content_type=media_type, charset="utf-8", headers=HEADERS)

    return send
