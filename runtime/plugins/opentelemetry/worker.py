"""Nests the spans of a handler under the span of its invocation, and exports them if the function's variables say where.

It runs in zygotes and workers. It imports OpenTelemetry only if the handler has imported it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ....handlers.contract import Context
from ...calls.link.worker_spec import WorkerSpec

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
# The time in which the last spans of a worker must reach the collector.
FLUSH_S = 2.0


def observe(spec: WorkerSpec) -> HandlerSpans | None:
    """Return the observer of a handler that has imported OpenTelemetry; None for other handlers."""
    if "opentelemetry.trace" not in sys.modules or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    return HandlerSpans(spec)


class HandlerSpans:
    """Makes the span of an invocation the current one while the handler runs.

    If the handler has set no provider, and the function's variables name an endpoint, the worker exports the handler's
    spans. The zygote imports the modules, and the first sampled call of a worker starts the exporter's thread.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        from opentelemetry import context, trace  # noqa: PLC0415  the handler has imported it
        from opentelemetry.trace.propagation import tracecontext  # noqa: PLC0415

        self._attach, self._trace = context.attach, trace
        self._nothing, self._w3c = context.Context(), tracecontext.TraceContextTextMapPropagator()
        self._lock = threading.Lock()
        self._shutdown: Callable[[], None] | None = None
        self._make: Callable[[], Any] | None = None
        wanted = os.environ.get("OTEL_TRACES_EXPORTER") != "none"
        if wanted and any(map(os.environ.get, ENDPOINTS)):
            self._make = _importing(spec)

    def begin(self, contexts: Sequence[Context]) -> None:
        """Make the span of the invocation the current one; in a batch, the span of the first sampled invocation."""
        chosen = next((one for one in contexts if one.traceparent.endswith("1")), contexts[0])
        if self._make is not None and chosen.traceparent.endswith("1"):
            self._start()
        if chosen.traceparent:
            carrier = {"traceparent": chosen.traceparent, "tracestate": chosen.tracestate}
            self._attach(self._w3c.extract(carrier, self._nothing))
        else:
            self._attach(self._unsampled())

    def _unsampled(self) -> Any:
        """Return a context with a new span that is not sampled. The handler's spans inherit this decision.

        It is used when the gateway sends no `traceparent`: the request has no trace, and the gateway has not sampled it.
        """
        trace = self._trace
        ids = int.from_bytes(os.urandom(16)), int.from_bytes(os.urandom(8))
        span = trace.NonRecordingSpan(trace.SpanContext(*ids, is_remote=True))
        return trace.set_span_in_context(span, self._nothing)

    def _start(self) -> None:
        with self._lock:
            make, self._make = self._make, None
            if make is not None and isinstance(
                self._trace.get_tracer_provider(), self._trace.ProxyTracerProvider
            ):
                provider = make()
                self._trace.set_tracer_provider(provider)
                self._shutdown = provider.shutdown

    def close(self) -> None:
        """Send the last spans, for up to FLUSH_S."""
        if self._shutdown is not None:
            # Shut down in a thread, because the exporter tries for longer than FLUSH_S if the collector does not answer.
            flush = threading.Thread(target=self._shutdown, daemon=True)
            flush.start()
            flush.join(FLUSH_S)


def _importing(spec: WorkerSpec) -> Callable[[], Any] | None:
    """Import what an export needs, and return a function that makes a provider; None if a package is missing."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

        from .attributes import resource  # noqa: PLC0415
    except ImportError as error:
        sys.stderr.write(f"the handler's spans are not exported, because {error.name} is not installed\n")
        return None

    def make() -> TracerProvider:
        own = {"faas.name": spec.function, "faas.version": spec.revision}
        provider = TracerProvider(resource=resource(spec.function, **own), shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        return provider

    return make
