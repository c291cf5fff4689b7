"""Writes metrics in the text format of Prometheus, in slices.

A gateway with many functions has tens of thousands of samples. To write all of them at once would block the event loop
for too long. So other callbacks of the loop run between two slices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from prometheus_client import generate_latest
from prometheus_client.core import Metric, Sample
from prometheus_client.registry import Collector

SLICE_SAMPLES = 100
"""A slice has at least this number of samples, unless it is the last slice of a metric. Its text takes about a millisecond."""
MOST_SERIES = 200
"""The most series of a function in a metric."""

Labels: TypeAlias = tuple[str, ...]


class Distribution(Protocol):
    """Numbers that a histogram or a summary describes."""

    def samples(self, name: str, labels: dict[str, str]) -> Sequence[Sample]:
        """Return the samples of the metric `name`."""


class Family(NamedTuple):
    """A metric. `kind` is "counter", "gauge", "histogram" or "summary". Each row has the values of the labels, and a number or distribution."""

    kind: str
    name: str
    text: str
    labels: Labels
    rows: Sequence[tuple[Labels, float | Distribution]]

    def limited(self, left_out: Counter[str]) -> Family:
        """Return the metric with at most MOST_SERIES series of a function. Count the others in `left_out`, by function.

        So the length of the text depends only on the number of functions, even if callers choose the values of other labels.
        """
        if self.labels[:1] != ("function",):
            return self
        series, rows = Counter[str](), list[tuple[Labels, float | Distribution]]()
        for row in self.rows:
            function = row[0][0]
            series[function] += 1
            if series[function] <= MOST_SERIES:
                rows.append(row)
            else:
                left_out[function] += 1
        return self._replace(rows=rows)

    def slices(self) -> Iterator[bytes]:
        """Yield the text in slices. Each slice is made only when the caller asks for it."""
        metric = Metric(f"pilotflame_{self.name}", self.text, self.kind)
        name = f"{metric.name}_total" if self.kind == "counter" else metric.name
        samples, heads = list[Sample](), 0
        for values, number in self.rows:
            labels = dict(zip(self.labels, values, strict=True))
            # A distribution may change between two slices, so one slice has all of its samples.
            samples += (
                [Sample(name, labels, number)]
                if isinstance(number, (int, float))
                else number.samples(name, labels)
            )
            if len(samples) >= SLICE_SAMPLES:
                yield _written(metric, samples, heads)
                samples, heads = [], 2
        if samples or not heads:
            yield _written(metric, samples, heads)


def _written(metric: Metric, samples: list[Sample], heads: int) -> bytes:
    """Return the text of these samples. Omit the first `heads` lines: a metric has its lines HELP and TYPE only once."""
    metric.samples = samples
    return bytes(generate_latest(_One(metric)).split(b"\n", heads)[heads])


class _One(Collector):
    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return [self._metric]
