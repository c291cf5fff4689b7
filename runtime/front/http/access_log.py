"""Writes the access log, which has a line for each answered request."""

from __future__ import annotations

import asyncio
import time

from aiohttp import web

from ....errors import Cancelled
from ...ground.telemetry.logs import LogChannel
from .requests import REQUEST_ID_HEADER, caller_of
from .responses import Handler

UNKNOWN = "-"


class AccessLog:
    """The access log of a gateway. It exists only if the setting `access_log` is on."""

    def __init__(self, channel: LogChannel) -> None:
        self._channel = channel

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
    ) -> None:
        """Write a line about a request. `path` is the registered path of the route, and `owner` the id of the caller's
        API key.
        """
        took_ms = (time.monotonic() - begun_s) * 1000
        text = (
            f"{method} {path} {status} {took_ms:.1f} ms key={owner or UNKNOWN} function={function or UNKNOWN}"
        )
        self._channel.write("access", text, "info", request_id=request_id)

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        begun_s, status, request_id = time.monotonic(), 500, ""
        try:
            response = await handler(request)
            status, request_id = response.status, response.headers.get(REQUEST_ID_HEADER, "")
        except web.HTTPException as error:
            status = error.status
            raise
        except (asyncio.CancelledError, ConnectionError):
            status = Cancelled.status
            raise
        finally:
            resource = request.match_info.route.resource
            self.write(
                request.method[:32], resource.canonical if resource is not None else UNKNOWN, status, begun_s,
                owner=caller_of(request).owner, function=request.match_info.get("function", "")[:64],
                request_id=request_id,
            )  # fmt: skip
        return response
