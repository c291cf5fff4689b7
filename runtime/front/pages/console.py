"""Serves the console, a page that shows what the gateway does, and `GET /v1/console`, which feeds it.

The page consists of the files in `console_page`. They load nothing from elsewhere, so the page works offline, and its
security policy forbids everything else: other origins, scripts and styles inside the page, and HTML made from strings.
The page's files contain no data. It sends the API key that a user enters in the header Authorization. There are no
cookies, so a page of another origin cannot act for the user, and no token against forged requests is needed.

`GET /v1/console?follow=1` sends a line of JSON each second, with the functions that have changed. All followers share
the rows, which are computed once a second. While no reader follows, the gateway does no work for the console.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web
from typing_extensions import TypedDict

from ...._version import __version__
from ....errors import UnknownRoute
from ....handlers.codec import JSON_TYPE
from ...ground.access.keys import Caller, Scope
from ...ground.telemetry.cold_starts import ColdStart
from ...ground.telemetry.metrics import SECONDS, Metrics
from ...ground.telemetry.rung_name import RungName
from ...node.functions.live import Live
from ...node.functions.registry import Functions
from ..http.endless_answers import EndlessAnswers
from ..http.page_isolation import OwnPage
from ..http.requests import caller_of
from ..http.responses import Timestamp, json_response, timestamp
from ..http.routes import Flag, Parameter, Route
from .docs_page import HEADERS

FOLDER = Path(__file__).with_name("console_page")
PAGE = "console.html"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
MEDIA_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
EVERY_S = 1.0
# The event loop gets a turn each time after this number of functions, because a gateway may have thousands.
ROWS_AT_ONCE = 10
FOLLOW = Flag("follow", "Go on with a line each second, with the functions that have changed.")


class ConsoleWorkers(TypedDict):
    """How many workers a function has, by state, and how many it may have."""

    ready: int
    parked: int
    starting: int
    draining: int
    max: int


class ConsoleFunction(TypedDict):
    """A row of the console: the state of a function. Counts only grow while the gateway runs. `rung` tells how warm the
    function is now.
    """

    name: str
    revision: str
    rung: RungName
    next_rung: RungName | None
    next_rung_at: int | None
    """When the keep-alive policy moves the function to `next_rung`, in Unix seconds, if no invocation comes before. The time is rounded to
    whole seconds. Otherwise its fraction could change each second, and the row would be sent each time.
    """
    cold_because: str
    standby: bool
    workers: ConsoleWorkers
    queued: int
    in_flight: int
    stopped: str
    """The reason why the function refuses calls now, such as "budget"; "" if it accepts calls."""
    failed_starts: int
    """How many starts of a worker have failed since the last successful start."""
    rest_mb: float | None
    codes: dict[str, int]
    durations: list[int]
    """The numbers of invocations by duration: one number for each of `bounds_s`, and one number for longer invocations."""
    cold_starts: int
    cold_phases_s: dict[str, float]
    last_cold_phases_ms: dict[str, float]
    last_cold_start: ColdStart | None
    """The latest cold start with all its phases. The function's status also has earlier cold starts."""


class ConsoleGateway(TypedDict):
    """The gateway, and what the caller may do."""

    version: str
    started_at: Timestamp
    scopes: list[Scope]
    keyed: bool
    bounds_s: list[float]


class ConsoleView(TypedDict):
    """The content of the console. `removed` lists the functions that were deleted since the previous line."""

    at: float
    gateway: ConsoleGateway
    functions: list[ConsoleFunction]
    removed: list[str]


# The JSON of a row for the owner of the function, and for other callers.
ConsoleRow = tuple[bytes, bytes]
PUBLIC_FIELDS = frozenset({
    "name", "revision", "rung", "standby", "workers", "queued", "in_flight", "stopped", "failed_starts", "codes", "durations",
    "cold_starts", "cold_phases_s",
})  # fmt: skip
# The private fields, with the values that callers without ownership get. A new field is private until PUBLIC_FIELDS
# names it.
_HIDDEN = dict.fromkeys(("next_rung", "next_rung_at", "rest_mb", "last_cold_start")) | {
    "last_cold_phases_ms": {},
    "cold_because": "",
}


class Console:
    """The routes of the console. Its files are public, but its data is not."""

    def __init__(self, functions: Functions, metrics: Metrics, endless: EndlessAnswers) -> None:
        self._functions, self._metrics, self._endless = functions, metrics, endless
        self._started_at = timestamp(time.time())
        self._files = {
            path.name: path.read_bytes() for path in FOLDER.iterdir() if path.suffix in MEDIA_TYPES
        }
        # The rows for followers, by function.
        self._rows: dict[str, ConsoleRow] = {}
        self._made_s = 0.0
        self._refreshing = asyncio.Lock()

    def routes(self) -> list[Route]:
        view = {JSON_TYPE: ConsoleView, "application/x-ndjson": str}
        files = dict.fromkeys(MEDIA_TYPES.values(), str)
        file = Parameter("file", place="path", type="string", enum=sorted(self._files))
        glance, page = "Show all functions at a glance.", {"text/html": str}
        return [
            Route("GET", "/v1/console", self.view, Scope.READ, glance, view, parameters=(FOLLOW,)),
            Route("GET", "/console", self.page, None, "The console, a page.", page, public=True, errors=()),
            Route(
                "GET", "/console/{file}", self.file, None, "A file of the console.", files, public=True,
                errors=(404,), parameters=(file,),
            ),
        ]  # fmt: skip

    async def page(self, _request: web.Request) -> web.StreamResponse:
        return self._send(PAGE)

    async def file(self, request: web.Request) -> web.StreamResponse:
        return self._send(request.match_info["file"])

    def _send(self, name: str) -> web.StreamResponse:
        if (body := self._files.get(name)) is None:
            raise UnknownRoute(f"The console has no file {name[:64]!r}.", remedy="/console is the page.")
        headers = {**HEADERS, "Content-Security-Policy": POLICY}
        kind = MEDIA_TYPES[Path(name).suffix]
        return OwnPage(body=body, content_type=kind, charset="utf-8", headers=headers)

    async def view(self, request: web.Request) -> web.StreamResponse:
        caller = caller_of(request)
        if FOLLOW.read(request):
            return await self._follow(request, caller)
        rows = self._visible(await self._made(caller.allows), caller).values()
        return json_response(self._view(caller, [orjson.Fragment(row) for row in rows]), no_store=True)

    async def _follow(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        """Send a line each second until the client disconnects, its key ends, or the gateway drains."""
        headers = {
            "Content-Type": "application/x-ndjson", "Cache-Control": "no-store", "X-Accel-Buffering": "no",
        }  # fmt: skip
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        async with self._endless.limited(caller):
            await self._send_changes(response, caller)
        return response

    async def _send_changes(self, response: web.StreamResponse, caller: Caller) -> None:
        known: dict[str, bytes] = {}
        # The first rows are not older than the request.
        since_s = time.monotonic()
        while True:
            now = self._visible(await self._latest(since_s), caller)
            changed = [orjson.Fragment(row) for name, row in now.items() if known.get(name) != row]
            view = self._view(caller, changed, sorted(known.keys() - now.keys()))
            await response.write(orjson.dumps(view) + b"\n")
            known = now
            await asyncio.sleep(EVERY_S)
            since_s = time.monotonic() - EVERY_S

    def _visible(self, rows: Mapping[str, ConsoleRow], caller: Caller) -> dict[str, bytes]:
        """Return what the caller may see of each function."""
        allowed = [(name, row) for name, row in rows.items() if caller.allows(name)]
        return {name: row[not self._functions.owns(caller, name)] for name, row in allowed}

    async def _latest(self, since_s: float) -> dict[str, ConsoleRow]:
        """Return the rows of all functions, as they were at `since_s` of the monotonic clock or later."""
        async with self._refreshing:
            if self._made_s < since_s:
                began_s = time.monotonic()
                self._rows = await self._made(lambda _: True)
                self._made_s = began_s
            return self._rows

    async def _made(self, allows: Callable[[str], bool]) -> dict[str, ConsoleRow]:
        """Return a row for each of the functions that `allows` accepts."""
        rows: dict[str, ConsoleRow] = {}
        for number, live in enumerate(self._functions.all(), 1):
            if allows(live.record.function):
                row: Mapping[str, Any] = self._row(live)
                public = _HIDDEN | {name: row[name] for name in PUBLIC_FIELDS}
                rows[live.record.function] = orjson.dumps(row), orjson.dumps(public)
            if number % ROWS_AT_ONCE == 0:
                await asyncio.sleep(0)
        return rows

    def _view(
        self, caller: Caller, rows: list[orjson.Fragment], removed: list[str] | None = None
    ) -> dict[str, Any]:
        """Return a ConsoleView that orjson can write."""
        gateway = ConsoleGateway(
            version=__version__, started_at=self._started_at, scopes=[one for one in Scope if caller.has(one)],
            keyed=bool(caller.owner), bounds_s=list(SECONDS),
        )  # fmt: skip
        return {"at": time.time(), "gateway": gateway, "functions": rows, "removed": removed or []}

    def _row(self, live: Live) -> ConsoleFunction:
        record, worker_counts, workers = live.record, live.workers.worker_counts(), live.workers
        totals, step = self._metrics.totals(record.function), live.function.ladder.next_step
        latest = live.function.cold_starts.told(1)
        return ConsoleFunction(
            name=record.function, revision=record.revision, standby=worker_counts.standby,
            rung=workers.inventory.stands_on, cold_because=live.cooled[0], next_rung=step.rung if step else None, next_rung_at=round(step.at) if step else None,
            workers=ConsoleWorkers(
                ready=worker_counts.ready, parked=worker_counts.parked, starting=worker_counts.starting, draining=worker_counts.draining,
                max=record.settings.scale.max,
            ),
            queued=worker_counts.queued, in_flight=worker_counts.in_flight,
            stopped=live.function.stopped, failed_starts=workers.breaker.failures, rest_mb=live.rest_mb,
            codes={str(code): count for code, count in totals.codes.items()}, durations=list(totals.durations),
            cold_starts=totals.cold_starts, cold_phases_s=_rounded(totals.cold_phases_s, 6),
            last_cold_phases_ms=_rounded(live.last_cold_phases_ms(), 3),
            last_cold_start=latest[0] if latest else None,
        )  # fmt: skip


def _rounded(numbers: Mapping[str, float], digits: int) -> dict[str, float]:
    return {name: round(number, digits) for name, number in numbers.items()}
