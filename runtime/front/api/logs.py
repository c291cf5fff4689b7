"""Serves the log of each function, also after the function was deleted, and the log of the gateway itself."""

from __future__ import annotations

import contextlib
import math
from typing import Any

from aiohttp import web
from typing_extensions import TypedDict

from ....errors import BadInput, UnknownFunction, UnknownRoute
from ...ground.access.fair_share import SharedRoom
from ...ground.access.keys import Scope
from ...ground.telemetry.log_files import (
    ACCESS,
    AUDIT,
    GATEWAY,
    LogLevel,
    LogQuery,
    function_file,
    function_of,
)
from ...ground.telemetry.logs import Logs
from ...node.functions.registry import Functions
from ..http.endless_answers import EndlessAnswers
from ..http.requests import caller_of
from ..http.responses import Timestamp, json_response, timestamp
from ..http.routes import Flag, Number, Parameter, Route, UnixTime

MAX_LINES = 10_000
MAX_SENDING_BYTES = 256 << 20
"""Limit in bytes for the stored lines that all answers together are sending. The owners of API keys share it."""
NAMES = (GATEWAY, AUDIT, ACCESS)
LINES = Number("lines", "The largest number of lines, the last ones.", 100, maximum=MAX_LINES)
FOLLOW = Flag("follow", "Go on with new lines until the gateway ends, the API key, or the function.")
SINCE = UnixTime("since", "Unix time in seconds of the first line.", 0.0)
UNTIL = UnixTime("until", "Unix time in seconds of the last line.", math.inf)
REQUEST = Parameter("request", "Only the lines of the invocation or job with this id.")
WORKER = Parameter("worker", "Only what the worker with this name, as in X-Worker-Id, has printed.")

LOG = Parameter("log", place="path", type="string", enum=list(NAMES))
LEVEL = Parameter("level", "The lowest level.", type="string", enum=list(LogLevel))
PARAMETERS: tuple[Parameter, ...] = (LINES, FOLLOW, SINCE, UNTIL, REQUEST, LEVEL, WORKER)


class LogSummary(TypedDict):
    """A stored log. The name of a function's log is `functions/` and the function's name."""

    name: str
    bytes: int
    written_at: Timestamp


class LogsApi:
    """The routes of the logs."""

    def __init__(self, functions: Functions, logs: Logs, endless: EndlessAnswers) -> None:
        self._functions, self._logs, self._endless = functions, logs, endless
        self._room = SharedRoom(MAX_SENDING_BYTES)

    def routes(self) -> list[Route]:
        lines: Any = {"application/x-ndjson": str}
        listing, one = {"logs": list[LogSummary]}, "/v1/functions/{function}/logs"
        printed = "Return the lines of a function's log, a JSON object each, also after its deletion."
        said = f"Return the lines of a log of the gateway: {', '.join(NAMES)}."
        return [
            Route("GET", one, self.of_function, Scope.DEPLOY, printed, lines, parameters=PARAMETERS),
            Route("GET", "/v1/logs", self.list, Scope.READ, "List the stored logs.", listing),
            Route(
                "GET",
                "/v1/logs/{log}",
                self.of_gateway,
                Scope.ADMIN,
                said,
                lines,
                parameters=(LOG, *PARAMETERS),
            ),
        ]

    async def of_function(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["function"]
        file = function_file(name)
        live = any(live.record.function == name for live in self._functions.all())
        if not live and not await self._logs.exists(file):
            raise UnknownFunction.named(name)
        return await self._send(request, file)

    async def of_gateway(self, request: web.Request) -> web.StreamResponse:
        if (name := request.match_info["log"]) not in NAMES:
            raise UnknownRoute(f"There is no log {name[:64]!r}.", remedy=f"One of {', '.join(NAMES)}.")
        return await self._send(request, name)

    async def list(self, request: web.Request) -> web.StreamResponse:
        allowed, found = caller_of(request).functions, await self._logs.facts()
        rows = [
            LogSummary(name=one.name, bytes=one.bytes, written_at=timestamp(one.written_at))
            for one in found
            if allowed is None or function_of(one.name) in allowed
        ]
        return json_response({"logs": rows})

    async def _send(self, request: web.Request, file: str) -> web.StreamResponse:
        caller, follows = caller_of(request), FOLLOW.read(request)
        query = _query(request)._replace(since_deletion=caller.confined)
        lines = self._logs.follow(file, query) if follows else self._logs.stored(file, query)
        headers = {
            "Content-Type": "application/x-ndjson", "Cache-Control": "no-store", "X-Accel-Buffering": "no",
        }  # fmt: skip
        response = web.StreamResponse(headers=headers)
        # Count only answers that do not follow the log. An answer that follows it stays open long after it has sent the
        # stored lines.
        with contextlib.nullcontext() if follows else self._room.held(caller.owner, query.most_bytes, "logs"):
            await response.prepare(request)
            async with self._endless.limited(caller) if follows else contextlib.nullcontext():
                async for line in lines:
                    await response.write(line.encode())
        return response


def _query(request: web.Request) -> LogQuery:
    """Return the query of the request. Raise BadInput if a parameter is not valid."""
    sent = request.query
    level = sent.get(LEVEL.name, LogLevel.DEBUG).lower()
    if level not in list(LogLevel):
        raise BadInput(f"level is {level[:40]!r}.", remedy=f"One of {', '.join(LogLevel)}.")
    since_s, until_s = SINCE.read(request), UNTIL.read(request)
    request_id, worker = sent.get(REQUEST.name, ""), sent.get(WORKER.name, "")
    return LogQuery(LINES.read(request), since_s, until_s, request_id, level, worker)
