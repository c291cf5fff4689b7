"""Sends requests for a host name of a function to the function's web app."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import hdrs, web
from aiohttp.http import RawRequestMessage

Find = Callable[[str], str | None]


class HostNames:
    """The host names of functions. If a request names such a host, its path is changed to the path below which a plugin
    serves the function.
    """

    def __init__(self, find: Find, prefix: str) -> None:
        """`find` returns the function whose host name is the value of a Host header, or None. `prefix` begins the new
        path, with "{function}" in place of the function's name. It is "" if no plugin serves host names.
        """
        self._find, self._prefix = find, prefix

    def function_of(self, headers: Mapping[str, str]) -> str | None:
        """Return the function whose host name a request names; None for the gateway's own names."""
        host = headers.get(hdrs.HOST) if self._prefix else None
        return None if host is None else self._find(host)

    def claims(self, headers: Mapping[str, str]) -> bool:
        return self.function_of(headers) is not None

    def install(self, server: web.Server) -> None:
        """Change the path of each request for a host name, before a route is chosen."""
        make = server.request_factory

        def routed(message: RawRequestMessage, *others: Any) -> web.BaseRequest:
            return make(self._routed(message), *others)

        server.request_factory = routed

    def _routed(self, message: RawRequestMessage) -> RawRequestMessage:
        function = self.function_of(message.headers)
        if function is None:
            return message
        path = self._prefix.format(function=function) + message.url.raw_path
        url = message.url.with_path(path, encoded=True, keep_query=True)
        return message._replace(path=url.raw_path_qs, url=url)
