"""Percentiles: order statistics of a list of figures, without interpolation surprises."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(figures: Sequence[float], share: float) -> float:
    """The nearest rank: the smallest figure that at least `share` (0 to 1) of them do not exceed."""
    if not figures:
        return math.nan
    ordered = sorted(figures)
    return float(ordered[max(0, math.ceil(share * len(ordered)) - 1)])


def median(figures: Sequence[float]) -> float:
    """The middle figure; the mean of the middle two where their number is even."""
    if not figures:
        return math.nan
    ordered = sorted(figures)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return float(ordered[middle])
    return (ordered[middle - 1] + ordered[middle]) / 2


def summary_ms(latencies_ns: Sequence[int]) -> dict[str, float]:
    """The figures one prints of a latency distribution, in milliseconds."""
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999, "max": 1.0}
    return {name: percentile(latencies_ns, share) / 1e6 for name, share in shares.items()}
