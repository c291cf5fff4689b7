"""Keeps statistics of a number in the calls of a function: count, mean, quantiles, and its shift from earlier calls.

The shift is the population stability index of the latest WINDOW values against the first WINDOW values. About 0.1 is a small
shift, 0.25 a large one.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ....snapshot.extras import needs
from ...ground.settings.request_log import parts_of
from ...ground.telemetry.metrics import Reading
from .records import find

if TYPE_CHECKING:
    from fastdigest import TDigest

WINDOW = 1000
BINS = 10
MAX_VALUES = 1000
"""A call counts with at most this many values of a field."""
QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.99)


class ReferenceWindow:
    """The values of the first window in bins of about equal size, as the share of each bin."""

    def __init__(self, values: Sequence[float]) -> None:
        ordered = sorted(values)
        # Equal edges become one, so that values that occur often make fewer bins.
        self._edges = sorted({ordered[len(ordered) * number // BINS] for number in range(1, BINS)})
        self._shares = self._shares_of(values)

    def shift_of(self, values: Sequence[float]) -> float:
        """Return the population stability index of other values; 0 for equal shares."""
        pairs = zip(self._shares_of(values), self._shares, strict=True)
        return sum((now - before) * math.log(now / before) for now, before in pairs)

    def _shares_of(self, values: Sequence[float]) -> list[float]:
        # Each bin starts with half a value, because the logarithm of an empty share is infinite.
        counts = [0.5] * (len(self._edges) + 1)
        for value in values:
            counts[bisect_left(self._edges, value)] += 1
        total = sum(counts)
        return [count / total for count in counts]


class NumberStatistics:
    """The statistics of one number of a function."""

    def __init__(self, digest: TDigest) -> None:
        """`digest` must be empty."""
        self.digest = digest
        self.shift: float | None = None
        """The shift of the latest full window; None until there was a second window."""
        self._window: list[float] = []
        self._reference: ReferenceWindow | None = None

    def add(self, values: Sequence[float]) -> None:
        self.digest.batch_update(values)
        self._window += values
        while len(self._window) >= WINDOW:
            full, self._window = self._window[:WINDOW], self._window[WINDOW:]
            if self._reference is None:
                self._reference = ReferenceWindow(full)
            else:
                self.shift = self._reference.shift_of(full)


class FunctionStatistics:
    """The statistics of all numbers that a function's settings name."""

    def __init__(self, pointers: Sequence[str]) -> None:
        """Raise PackageMissing if fastdigest is not installed."""
        if pointers:
            with needs("request_log.statistics", "fastdigest"):
                from fastdigest import TDigest  # noqa: PLC0415  only functions with statistics need it
        self._numbers = {pointer: NumberStatistics(TDigest()) for pointer in pointers}
        # A thread adds records, and the event loop reads the metrics. Both hold the lock for less than a millisecond.
        self._lock = threading.Lock()

    def add(self, record: Mapping[str, Any]) -> None:
        """Count the numbers of a record. Values that are no numbers, such as redacted ones, are left out."""
        for pointer, statistics in self._numbers.items():
            if values := _numbers(list(find(record, parts_of(pointer)))):
                with self._lock:
                    statistics.add(values)

    def readings(self, function: str) -> list[Reading]:
        """Return the metrics of the numbers that have values."""
        with self._lock:
            return self._readings(function)

    def _readings(self, function: str) -> list[Reading]:
        counts, means, quantiles, shifts = (dict[tuple[str, ...], float]() for _ in range(4))
        for pointer, one in self._numbers.items():
            if one.digest.is_empty():
                continue
            key = (function, pointer)
            counts[key], means[key] = one.digest.n_values, one.digest.mean()
            quantiles |= {(*key, str(quantile)): one.digest.quantile(quantile) for quantile in QUANTILES}
            if one.shift is not None:
                shifts[key] = one.shift
        labels = ("function", "field")
        return [
            Reading("value_count", "Values of a number in calls.", counts, labels, total=True),
            Reading("value_mean", "Mean of a number in calls.", means, labels),
            Reading("value_quantile", "Quantiles of a number in calls.", quantiles, (*labels, "quantile")),
            Reading(
                "value_shift", "Population stability index of the latest window of a number.", shifts, labels
            ),
        ]


def _numbers(values: list[Any]) -> list[float]:
    """Return the numbers in `values` and in the lists in it, without NaN and infinity, which JSON does not have."""
    flat = [each for value in values for each in (value if isinstance(value, list) else [value])]
    numbers = [
        float(each)
        for each in flat[:MAX_VALUES]
        if isinstance(each, (int, float)) and not isinstance(each, bool)
    ]
    return [number for number in numbers if math.isfinite(number)]
