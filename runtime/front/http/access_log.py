"""Writes the access log, which has a line for each answered request."""

from __future__ import annotations

import time

from ...ground.telemetry.logs import LogChannel

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
