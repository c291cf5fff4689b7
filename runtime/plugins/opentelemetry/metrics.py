"""Exports the counts of the gateway as metrics of the semantic conventions.

The SDK's instruments take several microseconds for each value, which is a few percent of a short call. The gateway counts
invocations anyway, for /metrics, so these counts are read when the SDK exports.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeAlias

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExportResult,
    MetricsData,
    PeriodicExportingMetricReader,
)

from ...._version import __version__
from ....errors import ActivationTimeout, DeadlineExceeded
from ...ground.telemetry.invocation_end import GenerationEnd
from ...ground.telemetry.metrics import SECONDS, Metrics, Totals
from ...ground.telemetry.timeline import Activation
from .attributes import NAME, model_attributes, resource

# The bounds that the conventions advise for durations of requests, of first tokens and of later tokens, in seconds.
INIT_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
REQUEST_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
LATER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
TIMEOUTS = (ActivationTimeout.code, DeadlineExceeded.code)
ReadTotals: TypeAlias = Callable[[Totals], Iterable[tuple[int, dict[str, str]]]]
"""Returns numbers, each with its attributes. The attribute with the name of the function is added later."""


class FunctionMetrics:
    """The metrics of a gateway's functions. A thread of the SDK reads the counts of the event loop."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._since_ns = time.time_ns()
        # For each function, the time at which the worker with the latest recorded start was requested.
        self._asked_s = dict[str, float]()
        reader = PeriodicExportingMetricReader(ExporterWithDurations(self._durations))
        self._provider = MeterProvider([reader], resource(NAME), shutdown_on_exit=False)
        meter = self._provider.get_meter(NAME, __version__)
        for name, text, unit, read in (
            ("faas.coldstarts", "Invocations that waited for the start of a worker.", "{coldstart}", _cold),
            ("faas.timeouts", "Invocations that ended by a time limit.", "{timeout}", _timeouts),
            ("faas.errors", "Invocations that failed or were refused.", "{error}", _errors),
        ):
            meter.create_observable_counter(name, [self._observing(read)], unit, text)

        def seconds(name: str, text: str, bounds: tuple[float, ...]) -> Any:
            return meter.create_histogram(name, "s", text, explicit_bucket_boundaries_advisory=bounds)

        self._init = seconds("faas.init_duration", "From the request of a worker until it was ready.", INIT_S)
        self._request = seconds("gen_ai.server.request.duration", "Duration of an answer.", REQUEST_S)
        self._first = seconds("gen_ai.server.time_to_first_token", "Until the first piece.", FIRST_TOKEN_S)
        self._later = seconds(
            "gen_ai.server.time_per_output_token", "Mean time of a token after the first one.", LATER_TOKEN_S
        )

    def note_start(self, function: str, start: Activation) -> None:
        """Record the start of a worker for which an invocation has waited."""
        # Record a start once, although several invocations may have waited for it.
        if start.asked_s > self._asked_s.get(function, 0.0):
            self._asked_s[function] = start.asked_s
            self._init.record(start.ready_s - start.asked_s, {"faas.name": function})

    def note_generated(self, generation: GenerationEnd) -> None:
        attributes, first_s, last_s = model_attributes(generation), generation.first_s, generation.last_s
        self._request.record((last_s or time.monotonic()) - generation.received_s, attributes)
        if first_s:
            self._first.record(first_s - generation.received_s, attributes)
        if (later := generation.generated_tokens - 1) > 0 and last_s > first_s:
            self._later.record((last_s - first_s) / later, attributes)

    def shutdown(self) -> None:
        """Send the last metrics to the collector. Blocks."""
        self._provider.shutdown()

    def _totals(self) -> Iterator[tuple[str, Totals]]:
        for name in self._metrics.counted:
            yield name, self._metrics.totals(name)

    def _observing(self, read: ReadTotals) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_options: CallbackOptions) -> Iterator[Observation]:
            for name, totals in self._totals():
                for number, more in read(totals):
                    yield Observation(number, {"faas.name": name, **more})

        return observe

    def _durations(self) -> Metric:
        now_ns = time.time_ns()
        points = [
            HistogramDataPoint(
                attributes={"faas.name": name}, start_time_unix_nano=self._since_ns, time_unix_nano=now_ns,
                count=sum(totals.durations), sum=totals.seconds, bucket_counts=totals.durations,
                # The gateway does not keep the extremes, which are optional in OTLP.
                explicit_bounds=SECONDS, min=None, max=None,  # type: ignore[arg-type]
            )
            for name, totals in self._totals()
        ]  # fmt: skip
        data = Histogram(points, AggregationTemporality.CUMULATIVE)
        return Metric("faas.invoke_duration", "From the arrival of an invocation to its end.", "s", data)


class ExporterWithDurations(OTLPMetricExporter):
    """Adds a metric to the metrics that the SDK has collected, because no instrument takes a whole histogram."""

    def __init__(self, made: Callable[[], Metric]) -> None:
        super().__init__()
        self._made = made

    def export(
        self, metrics_data: MetricsData, timeout_millis: float | None = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        first, *others = metrics_data.resource_metrics
        scope, *rest = first.scope_metrics
        scope = replace(scope, metrics=[*scope.metrics, self._made()])
        first = replace(first, scope_metrics=[scope, *rest])
        more = replace(metrics_data, resource_metrics=[first, *others])
        return super().export(more, timeout_millis, **kwargs)


def _cold(totals: Totals) -> Iterator[tuple[int, dict[str, str]]]:
    yield totals.cold_starts, {}


def _timeouts(totals: Totals) -> Iterator[tuple[int, dict[str, str]]]:
    yield sum(totals.errors.get(code, 0) for code in TIMEOUTS), {}


def _errors(totals: Totals) -> Iterator[tuple[int, dict[str, str]]]:
    for code, number in totals.errors.items():
        yield number, {"error.type": code}
