"""A collector of OpenTelemetry for tests: an HTTP server on loopback that decodes what exporters send."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from live import LIMIT_S
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


def values_of(attributes: Any) -> dict[str, Any]:
    """Return attributes of OTLP as a dict."""
    return {one.key: getattr(one.value, str(one.value.WhichOneof("value"))) for one in attributes}


@dataclass(frozen=True)
class ReceivedSpan:
    """A span. Ids are hexadecimal; `parent` is "" for a root. Times are Unix seconds."""

    name: str
    trace: str
    id: str
    parent: str
    kind: int
    state: str
    started_s: float
    ended_s: float
    attributes: dict[str, Any]
    resource: dict[str, Any]
    links: tuple[str, ...]
    """The ids of the linked spans."""
    failed: bool

    @property
    def seconds(self) -> float:
        return self.ended_s - self.started_s


class OtlpReceiver:
    """Keeps spans, records of logs, and the latest points of each metric."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[ReceivedSpan] = []
        self.lines: list[tuple[Any, dict[str, Any]]] = []
        """Records of logs, each with the attributes of its resource."""
        self.answers: list[int] = []
        """The statuses of the next responses to logs. When the list is empty, or a status is 200, the logs
        are stored.
        """
        self.retry_after = ""
        """The Retry-After of the responses with another status than 200."""
        self.metrics: dict[str, list[Any]] = {}
        self._changed = asyncio.Condition()

    async def take_spans(self, request: web.Request) -> web.Response:
        for group in ExportTraceServiceRequest.FromString(await request.read()).resource_spans:
            resource = values_of(group.resource.attributes)
            for scope in group.scope_spans:
                self.spans += [_span(one, resource) for one in scope.spans]
        return await self._took()

    async def take_lines(self, request: web.Request) -> web.Response:
        if self.answers and (status := self.answers.pop(0)) != 200:
            headers = {"Retry-After": self.retry_after} if self.retry_after else {}
            return web.Response(status=status, text="<html>", headers=headers)
        for group in ExportLogsServiceRequest.FromString(await request.read()).resource_logs:
            resource = values_of(group.resource.attributes)
            self.lines += [(one, resource) for scope in group.scope_logs for one in scope.log_records]
        return await self._took()

    async def take_metrics(self, request: web.Request) -> web.Response:
        for group in ExportMetricsServiceRequest.FromString(await request.read()).resource_metrics:
            for metric in (one for scope in group.scope_metrics for one in scope.metrics):
                kind = str(metric.WhichOneof("data"))
                self.metrics[metric.name] = list(getattr(metric, kind).data_points)
        return await self._took()

    async def _took(self) -> web.Response:
        async with self._changed:
            self._changed.notify_all()
        return web.Response(content_type="application/x-protobuf")

    async def until(self, condition: Callable[[], Any]) -> Any:
        """Wait until `condition` returns a true value, and return this value."""
        found: list[Any] = []

        def met() -> bool:
            found[:] = [condition()]
            return bool(found[0])

        async with asyncio.timeout(LIMIT_S), self._changed:
            await self._changed.wait_for(met)
        return found[0]

    async def of_trace(self, trace: str, *names: str) -> dict[str, ReceivedSpan]:
        """Return the spans of a trace by name, once all of `names` have come."""

        def found() -> dict[str, ReceivedSpan]:
            spans = {one.name: one for one in self.spans if one.trace == trace}
            return spans if spans.keys() >= set(names) else {}

        return dict(await self.until(found))

    async def points(self, name: str, **attributes: Any) -> list[Any]:
        """Return the points of a metric that have these attributes (with __ for .), once there are any."""
        wanted = {key.replace("__", "."): value for key, value in attributes.items()}

        def found() -> list[Any]:
            points = self.metrics.get(name, [])
            return [one for one in points if wanted.items() <= values_of(one.attributes).items()]

        return list(await self.until(found))


def _span(of: Any, resource: dict[str, Any]) -> ReceivedSpan:
    return ReceivedSpan(
        of.name, of.trace_id.hex(), of.span_id.hex(), of.parent_span_id.hex(), of.kind, of.trace_state,
        of.start_time_unix_nano / 1e9, of.end_time_unix_nano / 1e9, values_of(of.attributes), resource,
        tuple(link.span_id.hex() for link in of.links), of.status.code == 2,
    )  # fmt: skip


@asynccontextmanager
async def otlp_receiver() -> AsyncIterator[OtlpReceiver]:
    app = web.Application()
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    receiver = OtlpReceiver("")
    app.router.add_post("/v1/traces", receiver.take_spans)
    app.router.add_post("/v1/logs", receiver.take_lines)
    app.router.add_post("/v1/metrics", receiver.take_metrics)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    receiver.url = f"http://{host}:{port}"
    try:
        yield receiver
    finally:
        await runner.cleanup()
