"""Serves the control routes: list, show and delete functions; health and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NotRequired

from aiohttp import web
from pydantic import BaseModel
from typing_extensions import TypedDict

from ....errors import Forbidden
from ....handlers.codec import JSON_TYPE
from ...ground.access.keys import Caller, Scope
from ...ground.settings.function_settings import FunctionSettings
from ...ground.telemetry.logs import Logs
from ...ground.telemetry.metrics import Metrics
from ...node.functions.live import Live
from ...node.functions.registry import Functions
from ...node.functions.retirements import Retirements
from ...node.functions.revisions import Revisions
from ...node.functions.status import FunctionStatus, Prefetched, Process, SourceStatus
from ...node.measuring.node_memory import MemoryMeter, NodeMemory
from ..http.requests import caller_of
from ..http.responses import Timestamp, json_response, timestamp
from ..http.routes import Flag, Route

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ALL_MEMORY = Flag("memory", "Measure the memory of all processes.")
MEMORY = Flag("memory", "Include the function's processes and their memory.")
PUBLIC_SETTINGS = frozenset({
    "aliases", "attempts", "concurrency", "execution_timeout_s", "hold_s", "hosts", "idempotent", "max_body_bytes", "max_jobs",
    "max_queue", "scale", "timeout_s", "ttl_s",
})  # fmt: skip
"""The settings that all callers with the scope `read` see."""
# The fields of a status that all callers with the scope `read` see. They also see a part of `settings` and of
# `desired`. A new field is private until it is added to this set.
PUBLIC_FIELDS = frozenset({
    "name", "revision", "created_at", "dialect", "kind", "streaming", "batch", "stopped", "workers", "standby", "zygote", "rung",
    "queued", "in_flight", "memory_bytes", "invocations", "input_schema", "output_schema", "input_example",
})  # fmt: skip


class HeldMemory(BaseModel, frozen=True):
    """The memory (PSS) of all processes of this gateway: a page that several of them map counts once in the total."""

    functions_bytes: int
    """Memory of all functions, including functions that are being deployed or deleted."""
    bases_bytes: int
    """Memory of the processes from which zygotes are forked. Functions share them."""
    gateway_bytes: int
    """Memory of the gateway and its fetcher."""
    total_bytes: int
    measured_at: Timestamp

    @classmethod
    def of(cls, memory: NodeMemory) -> HeldMemory:
        return cls(
            functions_bytes=memory.functions_bytes, bases_bytes=memory.bases_bytes,
            gateway_bytes=memory.gateway_bytes, total_bytes=memory.total_bytes,
            measured_at=timestamp(memory.measured_at),
        )  # fmt: skip


class FunctionList(TypedDict):
    """All functions that the caller may see, without their schemas. If the caller asked for the memory and may see all functions, also the
    memory of all processes.
    """

    functions: list[FunctionStatus]
    memory: NotRequired[HeldMemory]


class Admin:
    """The control routes of a gateway. While `draining` is true, /readyz responds with 503."""

    def __init__(
        self,
        functions: Functions,
        revisions: Revisions,
        retirements: Retirements,
        metrics: Metrics,
        logs: Logs,
        memory: MemoryMeter,
        *,
        sources: Callable[[str], list[SourceStatus]] = lambda _function: [],
        disk_full: Callable[[], bool] = lambda: False,
        starting: Callable[[], bool] = lambda: False,
    ) -> None:
        """`sources` returns the state and the counts of a function's event sources. `disk_full` returns True if the
        state folder's disk is full; /readyz calls it in a thread. While `starting` returns True, /readyz responds with
        503 too.
        """
        self._sources = sources
        self._disk_full, self._starting = disk_full, starting
        self._functions, self._revisions, self._retirements = functions, revisions, retirements
        self._memory = memory
        self._logs = logs
        self._metrics = metrics
        self.draining = False

    def routes(self) -> list[Route]:
        functions, function, deploy = "/v1/functions", "/v1/functions/{function}", Scope.DEPLOY
        read = Scope.READ
        listing, ready = (
            FunctionList,
            {"status": Literal["ready", "draining", "starting", "disk_full"]},
        )
        probe: Any = {"public": True, "errors": ()}
        return [
            Route("GET", functions, self.list, read, "List the functions.", listing, parameters=(ALL_MEMORY,)),
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
        memory = await self._memory.latest() if ALL_MEMORY.read(request) else None
        found: list[bytes] = []
        for status in self.statuses(request):
            shown = status if memory is None else _with_memory(status, memory)
            found.append(shown.without_schemas().model_dump_json().encode())
            # Let other requests go on: there may be a thousand functions.
            await asyncio.sleep(0)
        # The caller of a key that covers only some functions must not learn the memory of the other functions.
        rest = b"}"
        if memory is not None and caller_of(request).functions is None:
            rest = b',"memory":%b}' % HeldMemory.of(memory).model_dump_json().encode()
        return web.Response(body=b'{"functions":[%b]%b' % (b",".join(found), rest), content_type=JSON_TYPE)

    async def status(self, request: web.Request) -> web.StreamResponse:
        live = self._functions.get(request.match_info["function"])
        processes = await live.processes() if MEMORY.read(request) else []
        found = {
            "last_errors": await live.last_errors(self._logs),
            "sources": self._sources(live.record.function),
            "latest_cold_starts": live.function.cold_starts.told(),
        }
        status = self._status(live, processes).model_copy(update=found)
        return json_response(self._visible(status, caller_of(request)).model_dump(mode="json"))

    async def delete(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["function"]
        await self._retirements.delete(name)
        return json_response({"deleted": name})

    async def prefetch(self, request: web.Request) -> web.StreamResponse:
        found = await self._revisions.prefetch(request.match_info["function"])
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
        return (self._visible(status, caller) for status in found)

    def _visible(self, status: FunctionStatus, caller: Caller) -> FunctionStatus:
        """Return what the caller may see of a function."""
        return status if self._functions.owns(caller, status.name) else _public(status)

    def _status(self, live: Live, processes: Sequence[Process] = ()) -> FunctionStatus:
        """Return the status of a function, with its counts from the metrics."""
        by_source = self._metrics.totals(live.record.function).by_source
        counts = {
            source: {str(code): count for code, count in of.items()} for source, of in by_source.items()
        }
        return live.status(processes).model_copy(update={"invocations": counts})


def _with_memory(status: FunctionStatus, memory: NodeMemory) -> FunctionStatus:
    """Return the status with the memory of the function. If the function's processes are newer than the measurement,
    the memory is None.
    """
    if (held := memory.functions.get(status.name)) is not None:
        return status.model_copy(update={"memory_bytes": held.total_bytes})
    running = status.zygote or any(status.workers.model_dump().values())
    return status.model_copy(update={"memory_bytes": None if running else 0})


def _public(status: FunctionStatus) -> FunctionStatus:
    """Return the part of a status that all callers with the scope `read` may see: what they need to call the function,
    and counts.
    """
    names = PUBLIC_SETTINGS & status.settings.model_fields_set
    settings = {name: getattr(status.settings, name) for name in names}
    shown: dict[str, Any] = {name: getattr(status, name) for name in PUBLIC_FIELDS}
    shown["settings"] = FunctionSettings.model_construct(name=status.name, **settings)
    shown["desired"] = status.desired.model_copy(update={"because": []})
    return FunctionStatus.model_construct(**shown)
