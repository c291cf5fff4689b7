"""Counts what the gateway does, and exports the counts as Prometheus metrics.

Each request is counted, but the metrics are read only every few seconds. So the counts are plain numbers, and
objects of the Prometheus library are made from them only when the metrics are read (`exposition.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from prometheus_client.core import Sample

from ....errors import Overloaded, PilotflameError, QueueFull
from .exposition import MOST_SERIES, Family, Labels
from .invocation_end import InvocationEnd, Source
from .timeline import COLD_START_PHASES, WARM_PHASES, Timeline

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
# The bounds of phases are fewer: a function has five phases, so each bound makes five series.
PHASE_SECONDS = SECONDS[1::2]
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
    """Counts observed values by bucket, and sums them up. Each bound is the largest value of its bucket.

    Without bounds, it is a summary: the number of values and their sum.
    """

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: tuple[float, ...] = ()) -> None:
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

    def samples(self, name: str, labels: dict[str, str]) -> list[Sample]:
        """Return the samples of the metric `name`. There, a bucket counts all values up to its bound, also the values in lower buckets."""
        counts = list(itertools.accumulate(self._counts))
        bounds = (*map(str, self._bounds), "+Inf") if self._bounds else ()
        buckets = [
            Sample(f"{name}_bucket", {**labels, "le": bound}, count)
            for bound, count in zip(bounds, counts, strict=False)
        ]
        return [
            *buckets,
            Sample(f"{name}_count", labels, counts[-1]),
            Sample(f"{name}_sum", labels, self.sum),
        ]


class Totals(NamedTuple):
    """The counts of one function since the gateway started or the function was first deployed."""

    by_source: Mapping[Source, Mapping[int, int]]
    """The number of invocations by their submitter, and by the status of their response."""
    durations: Sequence[int] = (0,) * (len(SECONDS) + 1)
    """Invocations by duration: one number for each bound in SECONDS, and one number for invocations that took longer."""
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
        self.batch = _Histogram()
        self.cold_starts = Counter[str]()
        self.cold_phases = defaultdict[str, _Histogram](_Histogram)
        self.phases = {name: _Histogram(PHASE_SECONDS) for name in WARM_PHASES}

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
            self.cold_starts[timeline.activation.cause] += 1
            for phase, seconds in timeline.phases().items():
                self.cold_phases[phase].observe(seconds)

    def totals(self) -> Totals:
        seconds = {name: self.cold_phases[name].sum for name in COLD_START_PHASES if name in self.cold_phases}
        by_source = {source: dict(codes) for source, codes in self.codes.items()}
        errors = self.failures + self.refusals
        return Totals(
            by_source, self.duration.counts, self.cold_starts.total(), self.duration.sum, errors, seconds
        )


Numbers: TypeAlias = Mapping[Labels, float]
"""The numbers of a metric by the values of its labels."""


class Reading(NamedTuple):
    """A metric that another part of the gateway keeps."""

    name: str
    text: str
    values: Numbers
    labels: Labels = ("function",)
    """If the first label is the function, only the numbers of live functions are exported."""
    total: bool = False
    """True if the metric only grows, so that it is a counter."""


class Metrics:
    """The metrics of one gateway. Gateways in one process do not share them."""

    def __init__(
        self,
        worker_counts: Callable[[], Mapping[str, WorkerCounts]],
        failures: Mapping[str, int] | None = None,
        others: Iterable[Callable[[], Iterable[Reading]]] = (),
        dropped: Callable[[], int] = lambda: 0,
    ) -> None:
        """`worker_counts` returns the counts of each function by name, `dropped` how many log lines were dropped.

        Both are called when metrics are read. `failures` is the number of failures of each background task. `others`
        return the metrics of other parts of the gateway.
        """
        self._counts_of = worker_counts
        self._dropped = dropped
        self._failures = failures if failures is not None else {}
        self._functions: defaultdict[str, _FunctionCounts] = defaultdict(_FunctionCounts)
        self._others = list(others)
        self.readers: list[Callable[[], Awaitable[Iterable[Reading]]]] = []
        """The functions that are called when metrics are read. If one raises PilotflameError, its metrics are left out."""
        self._writing, self._callers = asyncio.Lock(), 0
        self._text, self._text_s = b"", 0.0

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
        """Drop the counts of a deleted function. Otherwise, the many time series of each deleted function would accumulate."""
        self._functions.pop(function, None)

    async def read(self) -> bytes:
        """Return the body of the response to GET /metrics, with the readings of `readers`.

        Callers that wait at the same time get the same text.
        """
        asked_s = time.monotonic()
        self._callers += 1
        try:
            async with self._writing:
                if self._text_s < asked_s:
                    self._text = await self._written()
                    self._text_s = time.monotonic()
                return self._text
        finally:
            self._callers -= 1
            if not self._callers:
                self._text = b""

    async def _written(self) -> bytes:
        readings: list[Reading] = []
        for reader in self.readers:
            with contextlib.suppress(PilotflameError):
                readings += await reader()
            await asyncio.sleep(0)
        live, slices = self._counts_of(), list[bytes]()
        await asyncio.sleep(0)
        for slice_ in self._slices(live, readings):
            slices.append(slice_)
            await asyncio.sleep(0)
        return b"".join(slices)

    def text(self, readings: Iterable[Reading] = ()) -> bytes:
        """Return all metrics in the text format of Prometheus. Blocks, for milliseconds for each ten functions."""
        return b"".join(self._slices(self._counts_of(), readings))

    def _slices(self, live: Mapping[str, WorkerCounts], readings: Iterable[Reading]) -> Iterator[bytes]:
        left_out = Counter[str]()
        others = itertools.chain(*(other() for other in self._others), readings)
        # The numbers of each metric are taken just before its first slice.
        for family in itertools.chain(
            map(_family, self._counters()), map(_family, _states(live)), self._distributions(),
            (_family(reading, live) for reading in others),
        ):  # fmt: skip
            yield from family.limited(left_out).slices()
        text = f"Series of a function that are left out, because a metric has at most {MOST_SERIES} of them."
        yield from _family(_by_name("series_left_out", text, left_out)).slices()

    def _counters(self) -> Iterator[Reading]:
        codes: Numbers = {
            (function, str(code), source): count
            for function, of in self._functions.items()
            for source, by_code in of.codes.items()
            for code, count in by_code.items()
        }
        yield Reading("invocations", "Invocations ended.", codes, ("function", "code", "source"), total=True)
        for name, text, label in (
            ("refusals", "Requests refused, by error code.", "reason"),
            ("failures", "Invocations that failed in a worker, by error code.", "error"),
            ("activations", "Workers started, by outcome.", "outcome"),
            (
                "cold_starts",
                "Invocations that waited for the start of a worker, by why it was started.",
                "cause",
            ),
        ):
            counts: Numbers = {
                (function, key): count
                for function, of in self._functions.items()
                for key, count in getattr(of, name).items()
            }
            yield Reading(name, text, counts, ("function", label), total=True)
        text = "Failures of the gateway's background tasks."
        yield _by_name("background_failures", text, self._failures, "task", total=True)
        yield Reading(
            "log_lines_dropped", "Log lines that were not stored.", {(): self._dropped()}, (), total=True
        )

    def _distributions(self) -> Iterator[Family]:
        one, two, found = ("function",), ("function", "phase"), self._functions.items()
        took = [((function,), of.duration) for function, of in found]
        yield Family("histogram", "invocation_seconds", "From accepted to ended.", one, took)
        warm = [((function, phase), each) for function, of in found for phase, each in of.phases.items()]
        yield Family("histogram", "phase_seconds", _PHASES_HELP, two, warm)
        cold = [((function, phase), each) for function, of in found for phase, each in of.cold_phases.items()]
        yield Family("summary", "cold_start_phase_seconds", "Phases of cold starts.", two, cold)
        batch = [((function,), of.batch) for function, of in found]
        yield Family("summary", "batch_size", "Invocations that ran together.", one, batch)


def _family(reading: Reading, live: Collection[str] | None = None) -> Family:
    """Return a metric. With `live`, if the first label is the function, leave out functions that are not in `live`."""
    rows = [
        (labels, number)
        for labels, number in reading.values.items()
        if live is None or reading.labels[:1] != ("function",) or labels[0] in live
    ]
    kind = "counter" if reading.total else "gauge"
    return Family(kind, reading.name, reading.text, reading.labels, rows)


def _by_name(
    name: str, text: str, numbers: Mapping[str, float], label: str = "function", *, total: bool = False
) -> Reading:
    return Reading(name, text, {(one,): number for one, number in numbers.items()}, (label,), total=total)


_OF_WORKERS: tuple[tuple[str, str, Callable[[WorkerCounts], float]], ...] = (
    ("queued", "Invocations waiting.", lambda of: of.queued),
    ("in_flight", "Invocations at workers.", lambda of: of.in_flight),
    ("worker_busy_ratio", "Busy share of worker_ready_seconds.", lambda of: of.busy_s / (of.ready_s or 1.0)),
)
_OF_WORKERS_SO_FAR: tuple[tuple[str, str, Callable[[WorkerCounts], float]], ...] = (
    ("worker_busy_seconds", "Time with work, summed over all workers.", lambda of: of.busy_s),
    ("worker_ready_seconds", "Time ready, summed over all workers.", lambda of: of.ready_s),
    ("worker_deaths", "Workers that ended without draining.", lambda of: of.deaths),
)


def _states(found: Mapping[str, WorkerCounts]) -> Iterator[Reading]:
    states = ("starting", "ready", "parked", "draining")
    workers: Numbers = {(name, state): getattr(of, state) for name, of in found.items() for state in states}
    yield Reading("workers", "Workers by state.", workers, ("function", "state"))
    for figures, total in ((_OF_WORKERS, False), (_OF_WORKERS_SO_FAR, True)):
        for name, text, number in figures:
            numbers: Numbers = {(function,): number(of) for function, of in found.items()}
            yield Reading(name, text, numbers, total=total)
