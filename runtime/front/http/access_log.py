"""Writes the access log, which has a line for each answered request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from ...ground.telemetry.logs import LogChannel
from .requests import Headers

UNKNOWN = "-"
ClientOf = Callable[[Headers, asyncio.BaseTransport | None], str]
"""Returns the IP address of a request's client, also behind a trusted proxy. Returns "" for a request over a unix socket."""


class AccessLog:
    """The access log of a gateway. It exists only if the setting `access_log` is on."""

    def __init__(self, channel: LogChannel, client_of: ClientOf) -> None:
        self._channel, self.client_of = channel, client_of

    def write(
        self,
        method: str,
        path: str,
        status: int,
        begun_s: float,
        *,
        owner: str,
        function: str,
        request_id: str,
        client: str,
    ) -> None:
        """Write a line about a request. `path` is the registered path of the route, and `owner` the id of the caller's
        API key.
        """
        took_ms = round((time.monotonic() - begun_s) * 1000, 1)
        about = {"key": owner or UNKNOWN, "function": function or UNKNOWN, "from": client or UNKNOWN}
        text = f"{method} {path} {status} {took_ms} ms {' '.join(f'{name}={one}' for name, one in about.items())}"
        facts: dict[str, str | float] = {
            "method": method,
            "path": path,
            "status": status,
            "ms": took_ms,
            **about,
        }
        self._channel.write("access", text, "info", request_id=request_id, facts=facts)
