"""What the gateway counts, as Prometheus metrics.

Counting happens with every request and scraping every few seconds, so counts are plain numbers and become metrics when
they are scraped.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ...errors import Overloaded, PilotflameError, QueueFull
from .timeline import Timeline

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_PHASES_HELP = (
    "Phases of invocations, named as in Server-Timing: queue = from accepted until sent to a worker (the activation of a"
    " cold start included); link = to the worker and back; wait = in the worker until its batch starts; exec = in the"
    " handler; respond = from the worker's result to the response."
)
_REFUSALS_HELP = "Requests that were refused before they ran, by error code."


class CensusCounts(Protocol):
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
    @property
    def busy_s(self) -> float: ...
    @property
    def ready_s(self) -> float: ...


class _Histogram:
    """Observations by bucket, and their sum."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return (bound, how many observations are at most that), as Prometheus has them."""
        found, total = [], 0
        for bound, count in zip((*map(str, map(float, self._bounds)), "+Inf"), self._counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found


class _FunctionCounts:
    """All counts of one function."""

    def __init__(self) -> None:
        self.codes = Counter[int]()
        self.refusals = Counter[str]()
        self.activations = Counter[str]()
        self.duration = _Histogram(SECONDS)
        self.batch = _Histogram(SIZES)
        self.cold: dict[str, _Histogram] = {}
        self.queue, self.link, self.wait, self.exec, self.respond = (_Histogram(SECONDS) for _ in range(5))

    def count(self, code: int, timeline: Timeline) -> None:
        self.codes[code] += 1
        self.duration.observe(timeline.total_s)
        sent_s, completed_s = timeline.sent_s, timeline.completed_s
        self.queue.observe(max(0.0, (sent_s or timeline.responded_s) - timeline.received_s))
        if completed_s:
            self.batch.observe(timeline.batch)
            self.link.observe(max(0.0, completed_s - sent_s - timeline.wait_s - timeline.exec_s))
            self.wait.observe(timeline.wait_s)
            self.exec.observe(timeline.exec_s)
            self.respond.observe(max(0.0, timeline.responded_s - completed_s))
        if timeline.activation is not None:
            for phase, seconds in timeline.phases().items():
                self.cold.setdefault(phase, _Histogram(SECONDS)).observe(seconds)

    def phases(self) -> Iterator[tuple[str, _Histogram]]:
        for name in ("queue", "link", "wait", "exec", "respond"):
            yield name, getattr(self, name)


class Metrics:
    """Counts of one gateway, in a registry of its own: two gateways in one process do not mix."""

    def __init__(self, census: Callable[[], Mapping[str, CensusCounts]]) -> None:
        self._functions: dict[str, _FunctionCounts] = {}
        self._registry = CollectorRegistry()
        self._registry.register(_CountsCollector(self._functions))
        self._registry.register(_CensusCollector(census))

    def responded(
        self, function: str, code: int, timeline: Timeline, error: PilotflameError | None = None
    ) -> None:
        """Count an invocation that was responded to with an HTTP status; `error` is what it failed with."""
        counts = self._of(function)
        counts.count(code, timeline)
        if error is not None and (not timeline.sent_s or isinstance(error, (Overloaded, QueueFull))):
            counts.refusals[error.code] += 1

    def refused(self, function: str, error: PilotflameError) -> None:
        """Count a request that never became an invocation."""
        self._of(function).codes[error.status] += 1
        self.turned_away(function, error)

    def turned_away(self, function: str, error: PilotflameError) -> None:
        """Count a request, for an invocation or not, that was refused because of its caller."""
        self._of(function).refusals[error.code] += 1

    def activated(self, function: str, outcome: str) -> None:
        self._of(function).activations[outcome] += 1

    def text(self) -> bytes:
        """Return the exposition for /metrics."""
        return generate_latest(self._registry)

    def _of(self, function: str) -> _FunctionCounts:
        counts = self._functions.get(function)
        if counts is None:
            counts = self._functions[function] = _FunctionCounts()
        return counts


class _CountsCollector(Collector):
    """Turns counts into metrics."""

    def __init__(self, functions: Mapping[str, _FunctionCounts]) -> None:
        self._functions = functions

    def collect(self) -> Iterable[Metric]:
        return [*self._counters(), *self._histograms()]

    def _counters(self) -> Iterator[Metric]:
        codes = CounterMetricFamily(
            "pilotflame_invocations", "Invocations answered.", labels=["function", "code"]
        )
        refusals = CounterMetricFamily("pilotflame_refusals", _REFUSALS_HELP, labels=["function", "reason"])
        started = CounterMetricFamily("pilotflame_activations", "Workers started, by outcome.", labels=["function", "outcome"])  # fmt: skip
        for function, counts in self._functions.items():
            for family, counter in (
                (codes, counts.codes),
                (refusals, counts.refusals),
                (started, counts.activations),
            ):
                for label, count in counter.items():
                    family.add_metric([function, str(label)], count)
        yield from (codes, refusals, started)

    def _histograms(self) -> Iterator[Metric]:
        took = HistogramMetricFamily("pilotflame_invocation_seconds", "From accepted to answered.", labels=["function"])  # fmt: skip
        phases = HistogramMetricFamily("pilotflame_phase_seconds", _PHASES_HELP, labels=["function", "phase"])
        cold = HistogramMetricFamily("pilotflame_cold_start_phase_seconds", "Phases of cold invocations.", labels=["function", "phase"])  # fmt: skip
        batch = HistogramMetricFamily("pilotflame_batch_size", "Invocations that ran together.", labels=["function"])  # fmt: skip
        for function, counts in self._functions.items():
            took.add_metric([function], counts.duration.buckets(), counts.duration.sum)
            batch.add_metric([function], counts.batch.buckets(), counts.batch.sum)
            for phase, histogram in counts.phases():
                phases.add_metric([function, phase], histogram.buckets(), histogram.sum)
            for phase, histogram in counts.cold.items():
                cold.add_metric([function, phase], histogram.buckets(), histogram.sum)
        yield from (took, phases, cold, batch)


class _CensusCollector(Collector):
    """Reads the state of revisions when it is scraped."""

    def __init__(self, census: Callable[[], Mapping[str, CensusCounts]]) -> None:
        self._census = census

    def collect(self) -> Iterable[Metric]:
        workers = GaugeMetricFamily("pilotflame_workers", "Workers by state.", labels=["function", "state"])
        waiting = GaugeMetricFamily("pilotflame_queued", "Invocations waiting.", labels=["function"])
        running = GaugeMetricFamily("pilotflame_in_flight", "Invocations at workers.", labels=["function"])
        busy = CounterMetricFamily("pilotflame_worker_busy_seconds", "Time in which workers had something to do, of all together.", labels=["function"])  # fmt: skip
        ready = CounterMetricFamily("pilotflame_worker_ready_seconds", "Time for which workers were ready, of all together.", labels=["function"])  # fmt: skip
        share = GaugeMetricFamily("pilotflame_worker_busy_ratio", "Busy worker-seconds of the ready ones, since the revision started.", labels=["function"])  # fmt: skip
        for function, counts in self._census().items():
            for state in ("starting", "ready", "draining"):
                workers.add_metric([function, state], getattr(counts, state))
            waiting.add_metric([function], counts.queued)
            running.add_metric([function], counts.in_flight)
            busy.add_metric([function], counts.busy_s)
            ready.add_metric([function], counts.ready_s)
            share.add_metric([function], counts.busy_s / counts.ready_s if counts.ready_s else 0.0)
        return workers, waiting, running, busy, ready, share
