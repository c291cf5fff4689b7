"""What the gateway counts, in Prometheus form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .timeline import Timeline

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Counts(Protocol):
    """The part of a revision's census that is exported."""

    @property
    def queued(self) -> int: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def starting(self) -> int: ...
    @property
    def ready(self) -> int: ...
    @property
    def draining(self) -> int: ...


class Metrics:
    """Counters and histograms of one gateway. Its own registry: two gateways in one process do not mix."""

    def __init__(self, census: Callable[[], Mapping[str, Counts]]) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "pilotlight_invocations", "Invocations answered.", ["function", "code"], registry=self._registry
        )
        self._duration = Histogram(
            "pilotlight_invocation_seconds", "From accepted to answered.", ["function"],
            buckets=SECONDS, registry=self._registry,
        )  # fmt: skip
        self._phase = Histogram(
            "pilotlight_cold_start_phase_seconds", "Phases of cold invocations.", ["function", "phase"],
            buckets=SECONDS, registry=self._registry,
        )  # fmt: skip
        self._batch = Histogram(
            "pilotlight_batch_size", "Invocations that ran together.", ["function"],
            buckets=SIZES, registry=self._registry,
        )  # fmt: skip
        self._activations = Counter(
            "pilotlight_activations",
            "Workers started, by outcome.",
            ["function", "outcome"],
            registry=self._registry,
        )
        self._registry.register(_Census(census))
        self._known: dict[tuple[str, int], tuple[Counter, Histogram, Histogram]] = {}

    def answered(self, function: str, code: int, timeline: Timeline) -> None:
        """One invocation has been answered with an HTTP status."""
        known = self._known.get((function, code))
        if known is None:  # looking children up by their labels is most of the cost of counting
            known = self._known[function, code] = (
                self._requests.labels(function, str(code)),
                self._duration.labels(function),
                self._batch.labels(function),
            )
        requests, duration, batch = known
        requests.inc()
        duration.observe(timeline.total_s)
        if timeline.answered_s:
            batch.observe(timeline.batch)
        if timeline.cold:
            for phase, seconds in timeline.phases().items():
                self._phase.labels(function, phase).observe(seconds)

    def refused(self, function: str, code: int) -> None:
        """A request that never became an invocation."""
        self._requests.labels(function, str(code)).inc()

    def activated(self, function: str, outcome: str) -> None:
        self._activations.labels(function, outcome).inc()

    def text(self) -> bytes:
        """The exposition, for /metrics."""
        return generate_latest(self._registry)


class _Census(Collector):
    """Gauges that are read when somebody looks, instead of being kept."""

    def __init__(self, census: Callable[[], Mapping[str, Counts]]) -> None:
        self._census = census

    def collect(self) -> Iterable[Metric]:
        workers = GaugeMetricFamily("pilotlight_workers", "Workers by state.", labels=["function", "state"])
        waiting = GaugeMetricFamily("pilotlight_queued", "Invocations waiting.", labels=["function"])
        running = GaugeMetricFamily("pilotlight_in_flight", "Invocations at workers.", labels=["function"])
        for function, counts in self._census().items():
            for state, count in (
                ("starting", counts.starting),
                ("ready", counts.ready),
                ("draining", counts.draining),
            ):
                workers.add_metric([function, state], count)
            waiting.add_metric([function], counts.queued)
            running.add_metric([function], counts.in_flight)
        return workers, waiting, running
