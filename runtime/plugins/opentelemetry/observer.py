"""Turns the events of functions into spans, metrics and records of logs. It imports OpenTelemetry only if an endpoint is configured."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Self

from ....errors import GatewayError
from ...ground.telemetry.invocation_end import InvocationEnd
from ...ground.telemetry.metrics import Metrics
from ...node.functions.function_events import FunctionEvents, Observer

if TYPE_CHECKING:
    from .logs import LogExport
    from .metrics import FunctionMetrics
    from .spans import InvocationSpans

LOG = logging.getLogger(__name__)
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
PROTOCOL = "http/protobuf"
# The time in which the last spans, metrics and lines must reach the collector when the gateway ends.
FLUSH_S = 3.0
MISSING = "%s is set, but %s is not installed, so nothing is exported: pip install 'pilotflame[otel]'"


class OpenTelemetry(Observer):
    """The spans, the metrics and the functions' logs of a gateway. Some of them may be off."""

    def __init__(
        self,
        spans: InvocationSpans | None,
        make_metrics: type[FunctionMetrics] | None,
        logs: LogExport | None,
    ) -> None:
        self._spans, self._make_metrics, self._logs = spans, make_metrics, logs
        self._metrics: FunctionMetrics | None = None
        if spans is not None:
            self.call_observer = "pilotflame.runtime.plugins.opentelemetry.worker:observe"

    @classmethod
    def open(cls) -> Self | None:
        traces, metrics, logs = (is_wanted(signal, os.environ) for signal in ("TRACES", "METRICS", "LOGS"))
        if not (traces or metrics or logs):
            return None
        try:
            from .log_collector import LogTarget  # noqa: PLC0415  off costs no import
            from .logs import LogExport  # noqa: PLC0415
            from .metrics import FunctionMetrics  # noqa: PLC0415
            from .spans import InvocationSpans  # noqa: PLC0415
        except ImportError as error:
            LOG.warning(MISSING, ENDPOINT, error.name)
            return None
        return cls(
            InvocationSpans() if traces else None,
            FunctionMetrics if metrics else None,
            LogExport(LogTarget.of(os.environ)) if logs else None,
        )

    def follow(self, events: FunctionEvents, metrics: Metrics) -> None:
        if self._make_metrics is not None:
            self._metrics = self._make_metrics(metrics)
            events.generated.append(self._metrics.note_generated)
        if self._spans is not None:
            events.begun.append(self._spans.begin)
            events.generated.append(self._spans.note_generated)
        if self._logs is not None:
            # Subscribe after `InvocationSpans.begin`, which gives an invocation the span that `LogExport.begin` reads.
            events.begun.append(self._logs.begin)
            events.logged.append(self._logs.note)
        events.ended.append(self._note_end)

    def _note_end(self, end: InvocationEnd) -> None:
        # Most invocations are neither sampled nor cold.
        if end.trace is not None and self._spans is not None:
            self._spans.note_end(end, end.trace)
        if (start := end.timeline.activation) is not None and self._metrics is not None:
            self._metrics.note_start(end.function, start)

    async def close(self) -> None:
        parts = [part for part in (self._spans, self._metrics, self._logs) if part is not None]
        if self._spans is not None:
            self._spans.finish()
        await asyncio.gather(*(run_for(FLUSH_S, part.shutdown) for part in parts))


def is_wanted(signal: str, environ: Mapping[str, str]) -> bool:
    """Return True if the variables ask for the export of "TRACES", "METRICS" or "LOGS".

    Logs are exported only if OTEL_LOGS_EXPORTER is `otlp`. Raise GatewayError if they ask for an exporter or a protocol that this plugin does not have.
    """
    own = f"OTEL_EXPORTER_OTLP_{signal}_"
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if not (environ.get(ENDPOINT) or environ.get(f"{own}ENDPOINT")):
        return False
    name = f"OTEL_{signal}_EXPORTER"
    if (exporter := environ.get(name) or ("none" if signal == "LOGS" else "otlp")) != "otlp":
        if exporter == "none":
            return False
        raise GatewayError(
            f"{name} is {exporter!r}, which pilotflame does not have.", remedy="Set otlp or none."
        )
    name = next((one for one in (f"{own}PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL") if environ.get(one)), "")
    if name and environ[name] != PROTOCOL:
        message = f"{name} is {environ[name]!r}, which pilotflame does not have."
        raise GatewayError(message, remedy=f"Set {PROTOCOL}, and the endpoint's port for HTTP, mostly 4318.")
    return True


async def run_for(limit_s: float, run: Callable[[], object]) -> None:
    """Call a blocking function in a thread, and wait up to `limit_s` for it. The thread does not keep the process alive."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def call() -> None:
        try:
            run()
        finally:
            with contextlib.suppress(RuntimeError):  # the loop may be closed by now
                loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=call, name="opentelemetry-shutdown", daemon=True).start()
    try:
        async with asyncio.timeout(limit_s):
            await ended.wait()
    except TimeoutError:
        LOG.warning("the collector did not take the last spans, metrics and lines within %.0f s", limit_s)
