"""Serves the control routes: list, show and delete functions; health and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from aiohttp import web

from ...errors import Forbidden
from ..access.keys import Caller, Scope
from ..functions.live import FunctionStatus, Live, Prefetched, Process, SourceStatus
from ..functions.registry import Functions
from ..telemetry.logs import Logs
from ..telemetry.metrics import Metrics
from .requests import caller_of
from .responses import json_response
from .routes import Flag, Route

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MEMORY = Flag("memory", "Include the function's processes and their memory.")


class Admin:
    """The control routes of a gateway. While `draining` is true, /readyz responds with 503."""

    def __init__(
        self,
        functions: Functions,
        metrics: Metrics,
        logs: Logs,
        *,
        sources: Callable[[str], list[SourceStatus]] = lambda _function: [],
        disk_full: Callable[[], bool] = lambda: False,
        starting: Callable[[], bool] = lambda: False,
    ) -> None:
        """`sources` returns how a function's event sources do. `disk_full` is called in a thread, and returns whether
        the state folder's disk is full. While `starting` returns True, /readyz responds with 503 too.
        """
        self._sources = sources
        self._disk_full, self._starting = disk_full, starting
        self._functions = functions
        self._logs = logs
        self._metrics = metrics
        self.draining = False

    def routes(self) -> list[Route]:
        functions, function, deploy = "/v1/functions", "/v1/functions/{function}", Scope.DEPLOY
        read = Scope.READ
        listing, ready = (
            {"functions": list[FunctionStatus]},
            {"status": Literal["ready", "draining", "starting", "disk_full"]},
        )
        probe: Any = {"public": True, "errors": ()}
        return [
            Route("GET", functions, self.list, read, "List the functions.", listing),
            Route("GET", function, self.status, read, "Show a function.", FunctionStatus, parameters=(MEMORY,)),
            Route("DELETE", function, self.delete, deploy, "Delete a function.", {"deleted": str}),
            Route(
                "POST", f"{function}/prefetch", self.prefetch, deploy,
                "Bring a function's image and weights to this node.", Prefetched,
                errors=(404, 422, 500, 502, 503, 507),
            ),
            Route("GET", "/healthz", self.health, None, "Liveness.", {"status": Literal["alive"]}, **probe),
            Route("GET", "/readyz", self.ready, None, "Readiness.", ready, other_responses={503: ready}, **probe),
            Route("GET", "/metrics", self.metrics, read, "Prometheus metrics.", {"text/plain": str}),
        ]  # fmt: skip

    async def list(self, request: web.Request) -> web.StreamResponse:
        return json_response({"functions": [one.model_dump(mode="json") for one in self.statuses(request)]})

    async def status(self, request: web.Request) -> web.StreamResponse:
        live = self._functions.get(request.match_info["function"])
        processes = await live.processes() if MEMORY.read(request) else []
        found = {
            "last_errors": await live.last_errors(self._logs),
            "sources": self._sources(live.record.function),
            "latest_cold_starts": live.revision.history.cold_starts.told(),
        }
        status = self._status(live, processes).model_copy(update=found)
        return json_response(_visible(status, caller_of(request)).model_dump(mode="json"))

    async def delete(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["function"]
        await self._functions.delete(name)
        return json_response({"deleted": name})

    async def prefetch(self, request: web.Request) -> web.StreamResponse:
        found = await self._functions.prefetch(request.match_info["function"])
        return json_response(found.model_dump(mode="json"))

    async def health(self, _request: web.Request) -> web.StreamResponse:
        return json_response({"status": "alive"})

    async def ready(self, _request: web.Request) -> web.StreamResponse:
        if self.draining:
            return json_response({"status": "draining"}, status=503, headers={"Retry-After": "5"})
        if self._starting():
            return json_response({"status": "starting"}, status=503, headers={"Retry-After": "1"})
        if await asyncio.to_thread(self._disk_full):
            return json_response({"status": "disk_full"}, status=503, headers={"Retry-After": "60"})
        return json_response({"status": "ready"})

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        if caller_of(request).functions is not None:
            remedy = "Use a key with the scope read for all functions."
            raise Forbidden("The metrics are of all functions, and this key covers some.", remedy=remedy)
        return web.Response(body=await self._metrics.read(), headers={"Content-Type": METRICS_TYPE})

    def statuses(self, request: web.Request) -> Iterator[FunctionStatus]:
        """Yield the status of each function that the caller may see."""
        caller = caller_of(request)
        found = (self._status(live) for live in self._functions.all() if caller.allows(live.record.function))
        return (_visible(status, caller) for status in found)

    def _status(self, live: Live, processes: Sequence[Process] = ()) -> FunctionStatus:
        """Return the status of a function, with what the metrics have counted of it."""
        by_source = self._metrics.totals(live.record.function).by_source
        counts = {
            source: {str(code): count for code, count in of.items()} for source, of in by_source.items()
        }
        return live.status(processes).model_copy(update={"invocations": counts})


def _visible(status: FunctionStatus, caller: Caller) -> FunctionStatus:
    """Return the status without what only those may see who may deploy: environment, alerts.url, and error texts."""
    if caller.has(Scope.DEPLOY):
        return status
    alerts = status.settings.alerts
    if alerts.url is not None:
        alerts = alerts.model_copy(update={"url": "…"})
    hidden = {"env": dict.fromkeys(status.settings.env, "…"), "alerts": alerts}
    settings = status.settings.model_copy(update=hidden)
    errors = [error.model_copy(update={"text": ""}) for error in status.last_errors]
    sources = [source.model_copy(update={"last_error": ""}) for source in status.sources]
    return status.model_copy(update={"settings": settings, "last_errors": errors, "sources": sources})
