"""Counts what the gateway does, and exports the counts as Prometheus metrics.

Each request is counted, but the metrics are read only every few seconds. So the counts are plain numbers, and
objects of the Prometheus library are made from them only when the metrics are read.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple, TypeAlias, TypeVar

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ...errors import Overloaded, PilotflameError, QueueFull
from .invocation_end import InvocationEnd, Source
from .timeline import COLD_START_PHASES, WARM_PHASES, Timeline

Family = TypeVar("Family", CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily)

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_PHASES_HELP = (
    "Phases of invocations, named as in Server-Timing: queue = from accepted until sent to a worker (the"
    " activation of a cold start included); link = to the worker and back; wait = in the worker until its"
    " batch starts; exec = in the handler; respond = from the worker's result to the response, if that is made at once."
)


@dataclass(frozen=True, slots=True)
class WorkerCounts:
    """The number of invocations and workers of a revision at one moment, for its status and the metrics."""

    queued: int = 0
    in_flight: int = 0
    starting: int = 0
    ready: int = 0
    parked: int = 0
    draining: int = 0
    busy_s: float = 0.0
    """The seconds in which workers had work, summed over all workers that the revision has had."""
    ready_s: float = 0.0
    """The seconds for which workers were ready, summed over all workers that the revision has had."""
    standby: bool = False
    zygote: bool = False
    deaths: int = 0
    """The number of workers that ended without draining; failed starts do not count."""


class _Histogram:
    """Counts observed values by bucket, and sums them up. Each bound is the largest value of its bucket."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of values in each bucket, without the values in lower buckets."""
        return tuple(self._counts)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return a pair per bucket, as Prometheus needs: the bound, and how many values are not above the bound."""
        bounds = (*map(str, map(float, self._bounds)), "+Inf")
        return list(zip(bounds, map(float, accumulate(self._counts)), strict=True))


class Totals(NamedTuple):
    """The counts of one function since the gateway started or the function was first deployed."""

    by_source: Mapping[Source, Mapping[int, int]]
    """The number of invocations by their submitter, and by the status of their response."""
    durations: Sequence[int] = (0,) * (len(SECONDS) + 1)
    """Invocations by duration: one number for each bound in SECONDS, and one number for invocations that took longer.
    """
    cold_starts: int = 0
    seconds: float = 0.0
    """The sum of the durations."""
    errors: Mapping[str, int] = MappingProxyType({})
    """The invocations and requests that failed or were refused, by the code of their error."""
    cold_phases_s: Mapping[str, float] = MappingProxyType({})
    """The seconds of each phase in which an invocation waits for a worker, summed over all cold starts."""

    @property
    def codes(self) -> dict[int, int]:
        """Invocations by the status of their response."""
        return dict(sum((Counter(codes) for codes in self.by_source.values()), Counter[int]()))


class _FunctionCounts:
    def __init__(self) -> None:
        self.codes = defaultdict[Source, Counter[int]](Counter)
        self.refusals = Counter[str]()
        self.failures = Counter[str]()
        self.activations = Counter[str]()
        self.duration = _Histogram(SECONDS)
        self.batch = _Histogram(SIZES)
        self.cold_starts = 0
        self.cold_phases: dict[str, _Histogram] = {}
        self.phases = {name: _Histogram(SECONDS) for name in WARM_PHASES}

    def count(self, source: Source, code: int, timeline: Timeline) -> None:
        self.codes[source][code] += 1
        self.duration.observe(timeline.total_s)
        warm = timeline.warm_phases()
        if timeline.completed_s:
            self.batch.observe(timeline.batch)
            for histogram, seconds in zip(self.phases.values(), warm, strict=True):
                histogram.observe(seconds)
        else:
            self.phases["queue"].observe(warm[0])
        if timeline.activation is not None:
            self.cold_starts += 1
            for phase, seconds in timeline.phases().items():
                self.cold_phases.setdefault(phase, _Histogram(SECONDS)).observe(seconds)

    def totals(self) -> Totals:
        seconds = {name: self.cold_phases[name].sum for name in COLD_START_PHASES if name in self.cold_phases}
        by_source = {source: dict(codes) for source, codes in self.codes.items()}
        errors = self.failures + self.refusals
        return Totals(by_source, self.duration.counts, self.cold_starts, self.duration.sum, errors, seconds)


Numbers: TypeAlias = Mapping[tuple[str, ...], float]
"""The numbers of a metric by the values of its labels."""


class Reading(NamedTuple):
    """A metric that another part of the gateway keeps."""

    name: str
    text: str
    values: Numbers
    labels: tuple[str, ...] = ("function",)
    """If the first label is the function, only the numbers of live functions are exported."""
    total: bool = False
    """True if the metric only grows, so that it is a counter."""


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families


class Metrics:
    """The metrics of one gateway. Gateways in one process do not share them."""

    def __init__(
        self,
        worker_counts: Callable[[], Mapping[str, WorkerCounts]],
        failures: Mapping[str, int] | None = None,
        others: Iterable[Collector] = (),
        dropped: Callable[[], int] = lambda: 0,
    ) -> None:
        """`worker_counts` returns the counts of each function by name, `dropped` how many log lines were dropped.

        Both are called when metrics are read. `failures` is the number of failures of each background task. `others`
        are the metrics of other parts of the gateway.
        """
        self._counts_of = worker_counts
        self._dropped = dropped
        self._failures = failures if failures is not None else {}
        self._functions: defaultdict[str, _FunctionCounts] = defaultdict(_FunctionCounts)
        self._others = list(others)
        self.readers: list[Callable[[], Awaitable[Iterable[Reading]]]] = []
        """The functions that are called when metrics are read. If a function fails, its metrics are left out."""

    def ended(self, end: InvocationEnd) -> None:
        """Count an invocation that has ended.

        A failed invocation counts as refused if it was never sent to a worker, or if the error is Overloaded or QueueFull.
        Otherwise it counts as a failure.
        """
        function, error = end.function, end.error
        self._functions[function].count(end.source, end.code, end.timeline)
        if error is None:
            return
        if not end.timeline.sent_s or isinstance(error, (Overloaded, QueueFull)):
            self.turned_away(function, error)
        else:
            self._functions[function].failures[error.code] += 1

    def refused(self, function: str, error: PilotflameError) -> None:
        """Count a request that was answered with `error` because no invocation was accepted for it."""
        self._functions[function].codes["http"][error.status] += 1
        self.turned_away(function, error)

    def turned_away(self, function: str, error: PilotflameError) -> None:
        """Count a refusal by the code of its error. Unlike `refused`, this does not count the HTTP status."""
        self._functions[function].refusals[error.code] += 1

    def activated(self, function: str, outcome: str) -> None:
        """Count the start of a worker by its outcome."""
        self._functions[function].activations[outcome] += 1

    def totals(self, function: str) -> Totals:
        """Return the counts of a function so far."""
        found = self._functions.get(function)
        return found.totals() if found is not None else Totals({})

    @property
    def counted(self) -> list[str]:
        """The functions that have counts."""
        return list(self._functions)

    def forget(self, function: str) -> None:
        """Drop the counts of a deleted function, because names come and go and each name has many time series."""
        self._functions.pop(function, None)

    async def read(self) -> bytes:
        """Return the body of the response to GET /metrics, with the readings of `readers`."""
        readings: list[Reading] = []
        for reader in self.readers:
            with contextlib.suppress(PilotflameError):
                readings += await reader()
        return self.text(readings)

    def text(self, readings: Iterable[Reading] = ()) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        worker_counts = self._counts_of()
        families = [*self._counters(), *self._histograms(), *_states(worker_counts), self._lost()]
        families += [family for part in self._others for family in part.collect()]
        return generate_latest(
            _Families([*families, *(_read(reading, worker_counts) for reading in readings)])
        )

    def _lost(self) -> Metric:
        lost = CounterMetricFamily("pilotflame_log_lines_dropped", "Log lines that were not stored.")
        lost.add_metric([], self._dropped())
        return lost

    def _counters(self) -> Iterator[Metric]:
        codes = _family(CounterMetricFamily, "invocations", "Invocations ended.", "code", "source")
        refusals = _family(CounterMetricFamily, "refusals", "Requests refused, by error code.", "reason")
        failures = _family(
            CounterMetricFamily, "failures", "Invocations that failed in a worker, by error code.", "error"
        )
        started = _family(CounterMetricFamily, "activations", "Workers started, by outcome.", "outcome")
        for function, of in self._functions.items():
            for family, counter in (
                (refusals, of.refusals), (failures, of.failures), (started, of.activations),
            ):  # fmt: skip
                for label, count in counter.items():
                    family.add_metric([function, str(label)], count)
            for source, by_code in of.codes.items():
                for code, count in by_code.items():
                    codes.add_metric([function, str(code), source], count)
        broken = CounterMetricFamily(
            "pilotflame_background_failures", "Failures of the gateway's background tasks.", labels=["task"]
        )
        for task, count in self._failures.items():
            broken.add_metric([task], count)
        yield from (codes, refusals, failures, started, broken)

    def _histograms(self) -> Iterator[Metric]:
        took = _family(HistogramMetricFamily, "invocation_seconds", "From accepted to ended.")
        batch = _family(HistogramMetricFamily, "batch_size", "Invocations that ran together.")
        warm = _family(HistogramMetricFamily, "phase_seconds", _PHASES_HELP, "phase")
        cold = _family(HistogramMetricFamily, "cold_start_phase_seconds", "Phases of cold starts.", "phase")
        for function, of in self._functions.items():
            took.add_metric([function], of.duration.buckets(), of.duration.sum)
            batch.add_metric([function], of.batch.buckets(), of.batch.sum)
            for family, phases in ((warm, of.phases), (cold, of.cold_phases)):
                for phase, histogram in phases.items():
                    family.add_metric([function, phase], histogram.buckets(), histogram.sum)
        yield from (took, warm, cold, batch)


def _read(reading: Reading, live: Collection[str]) -> Metric:
    kind = CounterMetricFamily if reading.total else GaugeMetricFamily
    family = kind(f"pilotflame_{reading.name}", reading.text, labels=reading.labels)
    of_function = reading.labels[:1] == ("function",)
    for labels, number in reading.values.items():
        if not of_function or labels[0] in live:
            family.add_metric(list(labels), number)
    return family


def _states(found: Mapping[str, WorkerCounts]) -> Iterator[Metric]:
    workers = _family(GaugeMetricFamily, "workers", "Workers by state.", "state")
    waiting = _family(GaugeMetricFamily, "queued", "Invocations waiting.")
    running = _family(GaugeMetricFamily, "in_flight", "Invocations at workers.")
    busy = _family(CounterMetricFamily, "worker_busy_seconds", "Time with work, summed over all workers.")
    ready = _family(CounterMetricFamily, "worker_ready_seconds", "Time ready, summed over all workers.")
    share = _family(GaugeMetricFamily, "worker_busy_ratio", "Busy share of worker_ready_seconds.")
    deaths = _family(CounterMetricFamily, "worker_deaths", "Workers that ended without draining.")
    for function, worker_counts in found.items():
        for state in ("starting", "ready", "parked", "draining"):
            workers.add_metric([function, state], getattr(worker_counts, state))
        waiting.add_metric([function], worker_counts.queued)
        running.add_metric([function], worker_counts.in_flight)
        busy.add_metric([function], worker_counts.busy_s)
        ready.add_metric([function], worker_counts.ready_s)
        share.add_metric(
            [function], worker_counts.busy_s / worker_counts.ready_s if worker_counts.ready_s else 0.0
        )
        deaths.add_metric([function], worker_counts.deaths)
    yield from (workers, waiting, running, busy, ready, share, deaths)


def _family(kind: type[Family], name: str, text: str, *labels: str) -> Family:
    return kind(f"pilotflame_{name}", text, labels=["function", *labels])
