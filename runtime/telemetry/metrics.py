"""What the gateway counts, in Prometheus form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ...errors import Overloaded, PilotflameError, QueueFull
from .tally import FunctionTally
from .timeline import Timeline

_PHASES_HELP = (
    "Phases of invocations: queue = accepted until sent to a worker (a cold start's activation among it);"
    " batch = to the worker and back, gathered with the others of its batch; wait = at the worker until its batch starts;"
    " exec = in the handler; respond = from the worker's answer to the response."
)
_REFUSALS_HELP = "Requests that no worker was given, or that were given back to their callers before they ran; by the error's code."


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


class Metrics:
    """Counts of one gateway. Its own registry: two gateways in one process do not mix."""

    def __init__(self, census: Callable[[], Mapping[str, CensusCounts]]) -> None:
        self._tallies: dict[str, FunctionTally] = {}
        self._registry = CollectorRegistry()
        self._registry.register(_Tallies(self._tallies))
        self._registry.register(_Census(census))

    def answered(
        self, function: str, code: int, timeline: Timeline, error: PilotflameError | None = None
    ) -> None:
        """One invocation has been answered with an HTTP status; `error` is what the caller was told instead."""
        tally = self._of(function)
        tally.answered(code, timeline)
        if error is not None and (not timeline.sent_s or isinstance(error, (Overloaded, QueueFull))):
            tally.refusals[error.code] += 1

    def refused(self, function: str, error: PilotflameError) -> None:
        """A request that never became an invocation."""
        tally = self._of(function)
        tally.codes[error.status] += 1
        tally.refusals[error.code] += 1

    def turned_away(self, function: str, error: PilotflameError) -> None:
        """A request, for an invocation or not, that was refused for whose it was."""
        self._of(function).refusals[error.code] += 1

    def activated(self, function: str, outcome: str) -> None:
        self._of(function).activations[outcome] += 1

    def text(self) -> bytes:
        """The exposition, for /metrics."""
        return generate_latest(self._registry)

    def _of(self, function: str) -> FunctionTally:
        tally = self._tallies.get(function)
        if tally is None:
            tally = self._tallies[function] = FunctionTally()
        return tally


class _Tallies(Collector):
    """What was counted, made into metrics when somebody looks."""

    def __init__(self, tallies: Mapping[str, FunctionTally]) -> None:
        self._tallies = tallies

    def collect(self) -> Iterable[Metric]:
        return [*self._counters(), *self._histograms()]

    def _counters(self) -> Iterator[Metric]:
        asked = CounterMetricFamily(
            "pilotflame_invocations", "Invocations answered.", labels=["function", "code"]
        )
        refused = CounterMetricFamily("pilotflame_refusals", _REFUSALS_HELP, labels=["function", "reason"])
        started = CounterMetricFamily("pilotflame_activations", "Workers started, by outcome.", labels=["function", "outcome"])  # fmt: skip
        for function, tally in self._tallies.items():
            for code, count in tally.codes.items():
                asked.add_metric([function, str(code)], count)
            for reason, count in tally.refusals.items():
                refused.add_metric([function, reason], count)
            for outcome, count in tally.activations.items():
                started.add_metric([function, outcome], count)
        yield from (asked, refused, started)

    def _histograms(self) -> Iterator[Metric]:
        took = HistogramMetricFamily("pilotflame_invocation_seconds", "From accepted to answered.", labels=["function"])  # fmt: skip
        phases = HistogramMetricFamily("pilotflame_phase_seconds", _PHASES_HELP, labels=["function", "phase"])
        cold = HistogramMetricFamily("pilotflame_cold_start_phase_seconds", "Phases of cold invocations.", labels=["function", "phase"])  # fmt: skip
        batch = HistogramMetricFamily("pilotflame_batch_size", "Invocations that ran together.", labels=["function"])  # fmt: skip
        for function, tally in self._tallies.items():
            took.add_metric([function], tally.duration.buckets(), tally.duration.sum)
            batch.add_metric([function], tally.batch.buckets(), tally.batch.sum)
            for phase, one in tally.phases():
                phases.add_metric([function, phase], one.buckets(), one.sum)
            for phase, one in tally.cold.items():
                cold.add_metric([function, phase], one.buckets(), one.sum)
        yield from (took, phases, cold, batch)


class _Census(Collector):
    """What is read when somebody looks, instead of being kept."""

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
